"""`deft suite check`: detects a suite that no longer behaves as the one whose results were published.

One fixed episode of every task: the settled initial state, the first image, and the return, length and success of the
scripted expert (without one: of fixed random actions). They are compared with those in the package. Versions of the
suite's packages are compared with the lock file, so that a difference is reported with its likely cause.
"""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import gymnasium
import numpy as np

from deft.config.settings import EnvConfig
from deft.envs.make import make_env
from deft.envs.suites import Suite
from deft.envs.suites.install import Progress, differences, locked_packages
from deft.envs.wrappers import close_env
from deft.errors import RunError
from deft.evaluation.rollouts import EXPERT_METHOD

SEED = 0  # of random actions
THUMBNAIL = 8  # pixels: images are compared as means over their squares
STATE_TOLERANCE = 2e-5  # in units of the state (metres); the same versions differ between processors by rounding
IMAGE_TOLERANCE = 4.0  # of 255, in the mean over the thumbnail; drivers differ by less
RETURN_TOLERANCE = 0.02  # relative, and at least this much
MAX_REPORTED = 5  # differences in the message
SCRIPTED_STEPS = 50  # without an expert


def check(suite: Suite, progress: Progress, repeats: int = 1) -> dict[str, Any]:
    """Compare a suite with its fingerprint; raise RunError that names the differences."""
    if not suite.fingerprint.is_file():
        raise RunError(f"the suite {suite.name} has no fingerprint; deft suite check {suite.name} --update writes it")
    expected = json.loads(suite.fingerprint.read_text())
    packages = differences(suite)
    for repeat in range(repeats):
        found = measure(suite, partial(_repeated, progress, repeat, repeats))
        wrong = [line for task, values in expected["tasks"].items() for line in compare(task, values, found[task])]
        if wrong or packages:
            more = f", and {len(wrong) - MAX_REPORTED} more" if len(wrong) > MAX_REPORTED else ""
            cause = (
                f"versions that differ: {'; '.join(packages)}"
                if packages
                else "all versions are those of the lock file"
            )
            what = f"{'; '.join(wrong[:MAX_REPORTED])}{more}" if wrong else "no episode differs"
            raise RunError(
                f"the suite {suite.name} is not the one that results are published for: {what}; {cause}. "
                f"deft suite install {suite.name} --reinstall restores it"
            )
    return {
        "suite": suite.name,
        "version": locked_packages(suite)[suite.package],
        "tasks": len(expected["tasks"]),
        "repeats": repeats,
        "fingerprint": "unchanged",
    }


def _repeated(progress: Progress, repeat: int, repeats: int, done: int, total: int, task: str) -> None:
    progress(repeat * total + done, repeats * total, task)


def update(suite: Suite, progress: Progress) -> dict[str, Any]:
    """Write the fingerprint of the suite as it is installed."""
    tasks = measure(suite, progress)
    rows = ",\n".join(f"    {json.dumps(task)}: {json.dumps(values)}" for task, values in tasks.items())
    packages = json.dumps(locked_packages(suite))
    suite.fingerprint.write_text(f'{{\n  "packages": {packages},\n  "tasks": {{\n{rows}\n  }}\n}}\n')
    return {"suite": suite.name, "tasks": len(tasks), "fingerprint": str(suite.fingerprint)}


def measure(suite: Suite, progress: Progress) -> dict[str, dict[str, Any]]:
    """Return the fingerprint of each task: episode i of the group plays its task i, from seed i."""
    task = suite.fingerprint_task or suite.default_task
    env_id = suite.name if task == suite.default_task else f"{suite.name}/{task}"
    tasks, found = suite.tasks_of(env_id), {}
    env = make_env(EnvConfig(id=env_id, kwargs=dict(suite.fingerprint_kwargs)))
    try:
        for number, name in enumerate(tasks):
            progress(number, len(tasks), name)
            _observe(env, True)
            observation, _ = env.reset(seed=number)
            streams = observation if isinstance(observation, dict) else {"observation": observation}
            values = {key: np.asarray(value) for key, value in streams.items() if not isinstance(value, str)}
            _observe(env, False)  # later images are not compared
            found[name] = {
                "state": [round(float(x), 6) for key in sorted(values) for x in _state(values[key])],
                "image": [round(float(x)) for key in sorted(values) for x in _thumbnail(values[key])],
                **_play(env),
            }
    finally:
        close_env(env)
    return found


def _observe(env: gymnasium.Env, observes: bool) -> None:
    """Set whether the environment renders, where that can be chosen."""
    if env.has_wrapper_attr("set_observes"):
        env.get_wrapper_attr("set_observes")(observes)


def compare(task: str, expected: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """Describe how a task differs from what is expected."""
    lines = []
    for key, unit, tolerance in (("state", "", STATE_TOLERANCE), ("image", " of 255", IMAGE_TOLERANCE)):
        if len(expected[key]) != len(found[key]):
            lines.append(f"{task}: the {key} has {len(found[key])} numbers instead of {len(expected[key])}")
            continue
        apart = np.abs(np.subtract(found[key], expected[key]))
        difference = 0.0 if not apart.size else float(apart.max() if key == "state" else apart.mean())
        if difference > tolerance:
            name = "initial state" if key == "state" else "first image"
            lines.append(f"{task}: the {name} differs by {difference:.3g}{unit}")
    limit = RETURN_TOLERANCE * max(1.0, abs(expected["return"]))
    if abs(found["return"] - expected["return"]) > limit or found["success"] != expected["success"]:
        lines.append(
            f"{task}: return {found['return']:.6g} instead of {expected['return']:.6g}, success {found['success']} "
            f"instead of {expected['success']}"
        )
    return lines


def _state(value: np.ndarray) -> np.ndarray:
    return np.empty(0) if value.dtype == np.uint8 else value.astype(np.float64).ravel()


def _thumbnail(value: np.ndarray) -> np.ndarray:
    """Return the mean colour of the squares of an image [h, w, 3]; nothing for other values."""
    if value.dtype != np.uint8 or value.ndim != 3:
        return np.empty(0)
    rows = [np.mean(part, axis=0) for part in np.array_split(value.astype(np.float64), THUMBNAIL, axis=0)]
    squares = [part.mean(axis=1) for part in np.array_split(np.stack(rows), THUMBNAIL, axis=1)]
    return np.stack(squares, axis=1).ravel()


def _play(env: gymnasium.Env) -> dict[str, Any]:
    """Play the episode; return its return, length and success."""
    has_expert = env.has_wrapper_attr(EXPERT_METHOD)
    generator = np.random.default_rng(SEED)
    space: Any = env.action_space
    total, length, is_over = 0.0, 0, False
    info: dict[str, Any] = {}
    while not is_over and (has_expert or length < SCRIPTED_STEPS):
        action = env.get_wrapper_attr(EXPERT_METHOD)() if has_expert else generator.uniform(space.low, space.high)
        _, reward, terminated, truncated, info = env.step(np.asarray(action, space.dtype))
        total, length, is_over = total + float(reward), length + 1, bool(terminated or truncated)
    success = info.get("success", info.get("is_success"))
    return {"return": round(total, 4), "length": length, "success": None if success is None else bool(success)}
