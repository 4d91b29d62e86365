"""MetaWorld with one camera: steps per second and core of Deft's environment against plain Gymnasium and MetaWorld.

All run in the suite's interpreter (`deft suite install metaworld`), each in a new process, with the same actions, one
rendered image per step and one rendering thread. The ratio goes by CPU time, so that it also holds on a busy machine.
The images of both are compared: mean difference of 255, and peak signal-to-noise ratio in dB over several tasks.

    python benchmarks/metaworld_speed.py
    python benchmarks/metaworld_speed.py --sizes 64 84 224 --steps 60
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from typing import Any

import numpy as np

TASKS = ("reach-v3", "door-open-v3", "drawer-open-v3", "peg-insert-side-v3", "window-open-v3", "assembly-v3")
VARIANTS = ("plain", "suite", "light", "no camera")


def plain_env(task: str, size: int) -> Any:
    """MetaWorld's own environment, as its documentation makes it, with the camera of Deft's."""
    import gymnasium
    import metaworld  # noqa: F401 (registers the environments)

    options = {"render_mode": "rgb_array", "camera_name": "corner2", "width": size, "height": size}
    env = gymnasium.make("Meta-World/MT1", env_name=task, seed=0, **options)
    model = env.unwrapped.model
    model.cam_pos[model.camera("corner2").id] = (0.75, 0.075, 0.7)
    return env


def measure(name: str, size: int, steps: int) -> float:
    """Milliseconds of CPU time per step of plain MetaWorld, or of a variant of Deft's environment."""
    from deft.envs.suites.metaworld import MetaWorldEnv

    env: Any
    if name == "plain":
        env = plain_env(TASKS[0], size)
    else:
        options: Any = {"observation": "state"} if name == "no camera" else {"rendering": name}
        env = MetaWorldEnv(TASKS[0], image_size=size, **options)
    env.reset(seed=0)

    def step(action: np.ndarray) -> None:
        env.step(action)
        if name == "plain":
            env.render()

    actions = np.random.default_rng(0).uniform(-1, 1, (steps, 4)).astype(np.float32)
    step(actions[0])  # compiles shaders
    started = time.process_time()
    for action in actions:
        step(action)
    return 1e3 * (time.process_time() - started) / steps


def compare_images(size: int, task: str) -> dict[str, list[float]]:
    """Mean difference and peak signal-to-noise ratio of Deft's image to MetaWorld's own, of the same state."""
    from deft.envs.suites.metaworld import MetaWorldEnv
    from deft.envs.suites.metaworld_images import Camera

    env = MetaWorldEnv(task, image_size=size)
    env.reset(seed=0)
    for _ in range(20):
        env._advance(env.expert_action())
    simulator = env._simulator()
    from gymnasium.envs.mujoco.mujoco_rendering import OffScreenViewer

    viewer = OffScreenViewer(simulator.model, simulator.data, size, size)
    own = np.flip(viewer.render("rgb_array", simulator.model.camera("corner2").id), (0, 1)).astype(np.float64)
    found = {}
    for rendering in ("suite", "light"):
        difference = Camera(simulator.model, size, rendering).render(simulator.data) - own
        found[rendering] = [
            float(np.abs(difference).mean()),
            float(10 * np.log10(255**2 / max(1e-9, float((difference**2).mean())))),
        ]
    return found


def work() -> None:
    """Measure in the suite's interpreter; print one line of JSON."""
    function, arguments = json.loads(os.environ["DEFT_BENCHMARK"])
    print(json.dumps({"measure": measure, "compare_images": compare_images}[function](*arguments)), flush=True)
    os._exit(0)


def in_suite(function: str, *arguments: Any) -> Any:
    """Call a function of this file in a new process of the suite's interpreter: each has its own OpenGL context."""
    from deft.envs.suites import find_suite

    code = f"import runpy; runpy.run_path({os.path.abspath(__file__)!r}, run_name='deft_benchmark')"
    environment = {"MUJOCO_GL": "egl", **os.environ, "LP_NUM_THREADS": "0", "OMP_NUM_THREADS": "1"}
    environment["DEFT_BENCHMARK"] = json.dumps([function, arguments])
    command = find_suite("metaworld").interpreter().command(code)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Run the measurement and print it."""
    from common import print_machine, print_table

    from deft.envs.suites import find_suite

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 84])
    parser.add_argument("--steps", type=int, default=40)
    arguments = parser.parse_args()
    find_suite("metaworld").check_installed("benchmarks/metaworld_speed.py")
    found: dict[str, Any] = {"speeds": {}, "images": {}}
    for size in arguments.sizes:
        found["speeds"][size] = {name: in_suite("measure", name, size, arguments.steps) for name in VARIANTS}
        found["images"][size] = {task: in_suite("compare_images", size, task) for task in TASKS}
    print_machine()
    rows = []
    for size, speeds in found["speeds"].items():
        for name, milliseconds in speeds.items():
            images = [of_task[name] for of_task in found["images"][size].values()] if name in ("suite", "light") else []
            rows.append(
                [
                    f"{size} px, {name}",
                    f"{milliseconds:.1f}",
                    f"{1e3 / milliseconds:.1f}",
                    f"{speeds['plain'] / milliseconds:.1f}",
                    f"{np.mean([mean for mean, _ in images]):.2f}" if images else "",
                    f"{min(psnr for _, psnr in images):.1f}" if images else "",
                ]
            )
    print_table(["", "ms/step (CPU)", "steps/s per core", "× plain", "mean difference", "lowest PSNR (dB)"], rows)


if __name__ == "deft_benchmark":
    work()
elif __name__ == "__main__":
    sys.exit(main())
