"""Where the extra `warp` is missing, its tests are skipped. They share kernels: two objects, no clutter."""

import importlib.util

collect_ignore = (
    []
    if importlib.util.find_spec("mujoco_warp")
    else ["test_env.py", "test_f1.py", "test_kernels.py", "test_rendering.py"]
)
