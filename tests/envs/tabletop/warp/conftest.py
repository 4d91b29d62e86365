"""Where the extra `warp` is missing, its tests are skipped. They share kernels: two objects, no clutter.

Without a cache the kernels take a minute or two to compile (then they are in ~/.cache/warp). One process compiles them;
those beside it wait.
"""

import fcntl
import importlib.util
from pathlib import Path

import pytest

HAS_WARP = importlib.util.find_spec("mujoco_warp") is not None
NEED_WARP = ["test_env.py", "test_f1.py", "test_kernels.py", "test_rendering.py", "test_training.py"]
collect_ignore = [] if HAS_WARP else NEED_WARP


@pytest.fixture(scope="session")
def compiled_kernels(tmp_path_factory: pytest.TempPathFactory) -> None:
    from deft.envs.tabletop.warp.env import WarpTabletopEnv

    with (Path(tmp_path_factory.getbasetemp()).parent / "warp_kernels.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        env = WarpTabletopEnv(1, device="cpu", num_scenes=1, task="reach", observation="images", image_size=16)
        env.reset(seed=0)
        env.close()
