"""Pictures: not flat, the same again, shared by many environments, and what is left out of a view is not in it."""

import itertools
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import mujoco.egl
import numpy as np
import pytest

from deft.envs.tabletop import rendering
from deft.envs.tabletop.env import TabletopEnv
from deft.errors import InputError

pytestmark = pytest.mark.usefixtures("gl")
EVERYTHING = {"random_background": True, "random_light": True, "cluttered_table": True, "random_appearance": True}


def pictures(env: TabletopEnv, size: int = 64) -> dict[str, np.ndarray]:
    return {name: picture.copy() for name, picture in env.camera_images(("head", "wrist"), size).items()}


def test_both_cameras_see_something() -> None:
    env = TabletopEnv(observation="images", image_size=80)
    for seed in range(4):
        observation, _ = env.reset(seed=seed)
        for name in ("head_rgb", "wrist_rgb"):
            assert observation[name].shape == (3, 80, 80)
            assert observation[name].dtype == np.uint8
            assert observation[name].std() > 10


def test_closing_one_environment_leaves_the_others_their_pictures() -> None:
    first, second = TabletopEnv(), TabletopEnv()
    first.reset(seed=1)
    second.reset(seed=2)
    before = pictures(second)
    pictures(first)
    first.close()
    del first
    after = pictures(second)
    assert all(np.array_equal(before[name], after[name]) for name in before)


def test_sizes_do_not_disturb_each_other() -> None:
    env = TabletopEnv()
    env.reset(seed=1)
    small = pictures(env, 32)
    pictures(env, 300)
    again = pictures(env, 32)
    assert all(np.array_equal(small[name], again[name]) for name in small)


def test_what_is_culled_would_not_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    env = TabletopEnv(domain_randomization=EVERYTHING)
    random = np.random.default_rng(0)
    drawn = []
    in_view = rendering.Culling.in_view

    def counting(self: rendering.Culling, camera: int) -> np.ndarray:
        visible = in_view(self, camera)
        drawn.append(visible.mean())
        return visible

    for seed in range(3):
        env.reset(seed=seed)
        for _ in range(5):
            for _ in range(8):
                env.step(random.uniform(-1, 1, 8))
            monkeypatch.setattr(rendering.Culling, "in_view", counting)
            culled = pictures(env)
            monkeypatch.setattr(rendering.Culling, "in_view", lambda self, camera: np.ones(len(self._radius), bool))
            whole = pictures(env)
            assert all(np.array_equal(culled[name], whole[name]) for name in culled)
    assert np.mean(drawn) < 0.9


def test_another_thread_renders_the_same() -> None:
    env = TabletopEnv()
    env.reset(seed=3)
    here = pictures(env)
    there: dict[str, Any] = {}
    thread = threading.Thread(target=lambda: there.update(pictures(env)))
    thread.start()
    thread.join()
    assert all(np.array_equal(here[name], there[name]) for name in here)
    again = pictures(env)
    assert all(np.array_equal(here[name], again[name]) for name in here)


def test_objects_are_where_they_are_seen() -> None:
    env = TabletopEnv()
    for seed in range(8):
        env.reset(seed=seed)
        simulation = env.simulation
        picture = pictures(env, 128)["head"].astype(int)
        camera = simulation.cameras["head"]
        axes = simulation.data.cam_xmat[camera].reshape(3, 3)
        for item, place in zip(env.scene.objects, simulation.object_positions, strict=True):
            x, y, z = (place - simulation.data.cam_xpos[camera]) @ axes
            # Pinhole: a place at depth -z is seen half a picture times x / (-z tan(fovy / 2)) right of the middle.
            scale = 64 / np.tan(np.radians(simulation.model.cam_fovy[camera]) / 2) / -z
            row, column = int(64 - y * scale), int(64 + x * scale)
            colour = np.array(item.rgba[:3])
            seen = picture[row - 1 : row + 2, column - 1 : column + 2].reshape(-1, 3).mean(axis=0)
            # The same hue, whatever the light: the direction in colour space agrees.
            cosine = seen @ colour / np.linalg.norm(seen) / np.linalg.norm(colour)
            assert cosine > 0.95, (seed, item.name)


def test_randomisation_shows() -> None:
    plain, other = TabletopEnv(), TabletopEnv(domain_randomization={"random_background": True, "random_light": True})
    plain.reset(seed=5)
    other.reset(seed=5)
    assert np.abs(pictures(plain)["head"].astype(int) - pictures(other)["head"]).mean() > 10


def test_a_noise_patch_changes_with_every_step_and_comes_again() -> None:
    env = TabletopEnv(domain_randomization={"noise_patch_rate": 1.0})

    def record() -> list[np.ndarray]:
        env.reset(seed=2)
        frames = [pictures(env)["wrist"].astype(int)]
        for _ in range(3):
            env.step(np.array([0] * 7 + [1.0]))
            frames.append(pictures(env)["wrist"].astype(int))
        return frames

    first, second = record(), record()
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))
    for one, other in itertools.pairwise(first):
        # The hand stands still: what differs by much is the patch, and it is a part of the picture alone.
        differs = np.abs(one - other).max(-1) > 20
        assert 0.05 < differs.mean() < 0.8


def test_crazy_light_changes_with_every_step_and_comes_again() -> None:
    settings = {"random_light": True, "crazy_random_light_rate": 1.0}
    env = TabletopEnv(domain_randomization=settings)

    def record() -> list[np.ndarray]:
        env.reset(seed=2)
        frames = [pictures(env)["head"]]
        for _ in range(3):
            env.step(np.array([0] * 7 + [1.0]))
            frames.append(pictures(env)["head"])
        return frames

    first, second = record(), record()
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))
    # Nothing moves much, but the light is another one: the mean colour jumps.
    means = [frame.mean(axis=(0, 1)) for frame in first]
    assert all(np.abs(a - b).max() > 1 for a, b in itertools.pairwise(means))


def test_no_graphics_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def __init__(self, width: int, height: int) -> None:
            raise ImportError("Cannot initialize\na EGL device display")

    monkeypatch.setenv("MUJOCO_GL", "egl")
    monkeypatch.setattr(mujoco.egl, "GLContext", Broken)
    with pytest.raises(InputError, match=r"MUJOCO_GL=egl .*install libegl1") as caught:
        rendering.Renderer()
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(sys.platform != "linux", reason="the default is for Linux")
def test_headless_default_is_egl() -> None:
    environment = {name: value for name, value in os.environ.items() if name not in ("MUJOCO_GL", "DISPLAY")}
    command = "import deft.envs.tabletop, os; print(os.environ['MUJOCO_GL'])"
    done = subprocess.run([sys.executable, "-c", command], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "egl"


def test_a_foreign_renderer_that_is_freed_does_not_freeze_the_pictures(tmp_path: Path) -> None:
    """Gymnasium's MuJoCo renderer deletes OpenGL objects by number when it is freed, ours among them."""
    script = """
import gc, gymnasium, numpy as np, deft.envs
env = gymnasium.make("deft/Tabletop-v0", observation="images")
env.reset(seed=0)
other = gymnasium.make("HalfCheetah-v5", render_mode="rgb_array")
other.reset(seed=0)
other.render()
env.reset(seed=0)
other.close()
before = env.reset(seed=0)[0]["head_rgb"].copy()
del other
gc.collect()
for _ in range(10):
    observation = env.step(np.eye(8, dtype=np.float32)[0])[0]
changed = int((observation["head_rgb"] != before).sum())
again = env.reset(seed=0)[0]["head_rgb"]
print(changed > 100, np.array_equal(again, before))
"""
    # MuJoCo writes a log of its warning where it runs.
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert ran.stdout.split()[-2:] == ["True", "True"], ran.stdout + ran.stderr[-500:]  # after a warning of MuJoCo


def test_a_forked_process_is_told_that_it_cannot_render() -> None:
    script = """
import os, gymnasium, deft.envs
from deft.errors import InputError
env = gymnasium.make("deft/Tabletop-v0", observation="images")
env.reset(seed=0)
child = os.fork()
if child == 0:
    try:
        env.reset(seed=0)
    except InputError as error:
        os.write(1, f"{'forked process' in str(error)}".encode())
    os._exit(0)
os.waitpid(child, 0)
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert ran.stdout == "True", ran.stderr[-500:]
