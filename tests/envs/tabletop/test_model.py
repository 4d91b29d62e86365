"""The compiled model: the Panda's published figures, and that all scenes share what the renderer uploads once."""

import mujoco
import numpy as np
import pytest

from deft.envs.tabletop import panda, textures
from deft.envs.tabletop.model import compile_scene, object_position, texture_model
from deft.envs.tabletop.scene import DomainRandomization, draw_scene
from deft.envs.tabletop.simulation import Simulation


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


def test_models_share_the_renderers_assets() -> None:
    uploaded = texture_model()
    for seed in range(3):
        _, model = some_model(seed)
        assert model.nmat == uploaded.nmat
        assert model.ntex == uploaded.ntex == textures.COUNT
        np.testing.assert_array_equal(model.mat_texid, uploaded.mat_texid)
    pictures = uploaded.tex_data.reshape(textures.COUNT, textures.SIZE, textures.SIZE, 3)
    np.testing.assert_array_equal(pictures, textures.atlas())
    assert textures.atlas().std(axis=(1, 2)).max(axis=1).min() > 3  # none is of one colour


def test_objects_stand_on_the_table() -> None:
    scene, model = some_model()
    data = mujoco.MjData(model)
    for index, item in enumerate(scene.everything):
        x, y, z = data.qpos[object_position(index)]
        assert (x, y) == pytest.approx(item.place, abs=1e-5)
        assert z == pytest.approx(item.half_height - scene.table_drop, abs=1e-5)


def test_the_arm_does_not_collide_with_itself_or_its_stand() -> None:
    _, model = some_model()
    data = mujoco.MjData(model)
    names = [model.body(model.geom_bodyid[geom]).name for geom in range(model.ngeom)]
    random = np.random.default_rng(0)
    for _ in range(50):
        data.qpos[:7] = random.uniform(panda.JOINT_LOWER, panda.JOINT_UPPER)
        mujoco.mj_forward(model, data)
        for contact in data.contact:
            pair = {names[contact.geom1], names[contact.geom2]}
            assert pair & {"furniture"} or any(name.startswith("object") for name in pair)
