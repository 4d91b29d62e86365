"""The simulated robot: it holds a posture, and follows its targets."""

import numpy as np

from deft.envs.tabletop import panda
from deft.envs.tabletop.model import compile_scene
from deft.envs.tabletop.scene import DomainRandomization, draw_scene
from deft.envs.tabletop.simulation import Simulation


def some_model(seed: int = 0):
    scene = draw_scene(seed, 2, True, DomainRandomization(cluttered_table=True, random_background=True))
    assert scene is not None
    return scene, compile_scene(scene)


def test_robot_holds_any_posture_without_sagging() -> None:
    scene, _ = some_model()
    scene.objects, scene.clutter = [], []
    simulation = Simulation(scene)
    posture = np.array([0.3, 0.2, -0.2, -1.8, 0.4, 2.0, 0.1])
    simulation.put_robot(posture)
    for _ in range(25):
        simulation.step(posture, panda.FINGER_TRAVEL)
    np.testing.assert_allclose(simulation.joints, posture, atol=1e-3)


def test_robot_follows_its_targets() -> None:
    scene, _ = some_model()
    scene.objects, scene.clutter = [], []
    simulation = Simulation(scene)
    simulation.put_robot(panda.HOME)
    target = panda.HOME + 0.1
    for _ in range(8):
        simulation.step(target, panda.FINGER_TRAVEL)
    np.testing.assert_allclose(simulation.joints, target, atol=5e-3)  # after 0.32 s, six time constants
