"""The compiled model: the Panda's published figures, and that all scenes share what the renderer uploads once."""

import mujoco
import numpy as np
import pytest

from deft.envs.tabletop import panda, textures
from deft.envs.tabletop.model import compile_scene, object_position, texture_model
from deft.envs.tabletop.scene import DomainRandomization, draw_scene


def some_model(seed: int = 0):
    scene = draw_scene(seed, 2, True, DomainRandomization(cluttered_table=True, random_background=True))
    assert scene is not None
    return scene, compile_scene(scene)


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
