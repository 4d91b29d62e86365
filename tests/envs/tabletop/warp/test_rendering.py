"""The ray tracer draws what the OpenGL renderer draws."""

from types import SimpleNamespace

import mujoco
import numpy as np
import pytest
import warp as wp

from deft.envs.tabletop import textures
from deft.envs.tabletop.env import TabletopEnv
from deft.envs.tabletop.warp.model import batch_model, scene_numbers
from deft.envs.tabletop.warp.rendering import Cameras, mipmaps

EVERYTHING = {
    "random_background": True,
    "random_light": True,
    "cluttered_table": True,
    "random_appearance": True,
    "random_table_height": 0.03,
    "random_head_camera_dis": 0.05,
    "crazy_random_light_rate": 0.0,
}
SIDE = 64


def on_device(values: np.ndarray, dtype: type) -> wp.array:
    return wp.array(np.ascontiguousarray(values)[None], dtype=dtype, device="cpu")


def traced(env: TabletopEnv) -> np.ndarray:
    """Both images of the environment's present state by ray tracing, [2, SIDE, SIDE, 3]."""
    batch, simulation = batch_model(env), env.simulation
    numbers = scene_numbers(batch, simulation.scene, simulation.model, simulation.data)
    data = mujoco.MjData(batch.model)
    data.qpos[:] = numbers["qpos"]
    mujoco.mj_kinematics(batch.model, data)
    static = [*batch.fixed, *batch.area, *batch.tiles]
    data.geom_xpos[static] = numbers["static_position"][static]
    cameras = Cameras(
        batch.model, [batch.model.camera(name).id for name in ("head_camera", "wrist_camera")], SIDE, 1, "cpu"
    )
    looks = cameras.looks
    looks.size, looks.rgba = on_device(numbers["geom_size"], wp.vec3), on_device(numbers["rgba"], wp.vec4)
    looks.material, looks.lights = on_device(numbers["material"], int), on_device(numbers["lights"], float)
    looks.ambient = on_device(numbers["ambient"], float)
    poses = SimpleNamespace(
        geom_xpos=on_device(data.geom_xpos, wp.vec3),
        geom_xmat=on_device(data.geom_xmat.reshape(-1, 3, 3), wp.mat33),
        cam_xpos=on_device(simulation.data.cam_xpos, wp.vec3),
        cam_xmat=on_device(simulation.data.cam_xmat.reshape(-1, 3, 3), wp.mat33),
    )
    images = wp.zeros((1, 6, SIDE, SIDE), dtype=wp.uint8, device="cpu")
    rows = wp.array([0], dtype=int, device="cpu")
    cameras.render(rows, on_device(numbers["geom_rbound"], float), poses, images)
    return images.numpy()[0].reshape(2, 3, SIDE, SIDE).transpose(0, 2, 3, 1)


@pytest.mark.usefixtures("gl")
@pytest.mark.parametrize("randomization", [None, EVERYTHING])
def test_images_are_those_of_the_opengl_renderer(randomization):
    env = TabletopEnv(task="all", domain_randomization=randomization, control_mode="delta_ee")
    ratios = []
    for seed in range(6):
        env.reset(seed=seed)
        action = np.random.default_rng(seed).uniform(-1, 1, 7)
        for _ in range(seed):
            env.step(action)
        expected = np.stack(list(env.camera_images(("head", "wrist"), SIDE).values()))
        error = ((traced(env).astype(float) - expected) ** 2).mean(axis=(1, 2, 3))
        ratios.append(10 * np.log10(255**2 / error))
    # Edges of round shapes differ by parts of a pixel: 32 to 45 dB were measured.
    assert np.mean(ratios) > 32
    assert np.min(ratios) > 25


def test_coarser_levels_of_textures_are_means():
    levels = mipmaps()
    first = textures.atlas()[3].astype(np.float64) / 255
    size = textures.SIZE**2
    assert levels.shape == (textures.COUNT, (4 * size - 1) // 3, 3)
    np.testing.assert_allclose(levels[3, size], first[:2, :2].mean((0, 1)), atol=1e-6)
    np.testing.assert_allclose(levels[3, -1], first.mean((0, 1)), atol=1e-5)
