"""The Panda's published figures in the compiled model."""

import numpy as np
import pytest

from deft.envs.tabletop import panda
from deft.envs.tabletop.model import compile_scene
from deft.envs.tabletop.scene import DomainRandomization, draw_scene


def some_model(seed: int = 0):
    scene = draw_scene(seed, 2, True, DomainRandomization(cluttered_table=True, random_background=True))
    assert scene is not None
    return scene, compile_scene(scene)


def test_robot_has_its_published_figures() -> None:
    _, model = some_model()
    # The arm's total mass without the base is 17.8 kg with the hand: 4.97 + 0.65 + 3.23 + 3.59 + 1.23 + 1.67 + 0.74
    # = 16.08 for the links, 0.73 for the hand, and 0.03 a finger here.
    links = sum(model.body(f"link{number}").mass[0] for number in range(1, 8))
    assert links == pytest.approx(16.08)
    assert model.body("hand").mass[0] == pytest.approx(0.73)
    for index, name in enumerate(panda.ARM_JOINTS):
        lower, upper = model.joint(name).range
        assert panda.JOINT_LOWER[index] < lower < panda.JOINT_LOWER[index] + 0.05
        assert panda.JOINT_UPPER[index] - 0.05 < upper < panda.JOINT_UPPER[index]
        np.testing.assert_allclose(
            model.actuator(name).forcerange, [-panda.JOINT_TORQUES[index], panda.JOINT_TORQUES[index]]
        )
    assert model.opt.timestep == 1 / 250
