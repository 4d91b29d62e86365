"""`deft suite check`: detects a suite that no longer behaves as the one whose results were published.

One fixed episode of every task: the settled initial state, the first image, and the return, length and success of the
scripted expert (without one: of fixed random actions). They are compared with those in the package. Versions of the
suite's packages are compared with the lock file, so that a difference is reported with its likely cause.

Processors round differently, and contacts amplify that: the same packages leave a mug at another angle on another
processor. `update` therefore repeats the episodes with gravity and actions changed by rounding errors. A number that
changes by more than a fraction of its tolerance is written as null and never compared; `--merge` does the same for
numbers that differ on another machine, such as axes of inertia of symmetric meshes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
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
STATE_TOLERANCE = 2e-5  # in units of the state (metres); numbers that are compared differ by 1e-6 between processors
# Of 255, in the mean over the thumbnail after a fit of brightness and contrast. MetaWorld's images by Mesa on x86-64
# and AArch64 differ by up to 2.3; images without shadows by 4.5, and those of a camera moved by two pixels by 6.
IMAGE_TOLERANCE = 3.5
RETURN_TOLERANCE = 0.02  # relative, and at least this much
SENSITIVE = 0.25  # share of a tolerance: a number that rounding changes by more is not compared
GRAVITY_SCALES = (1 + 1e-9, 1 - 1e-8)  # of the repeated episodes
ACTION_NOISE = 1e-6  # of their actions, as a share of the range of actions
MAX_REPORTED = 5  # differences in the message
SCRIPTED_STEPS = 50  # without an expert


def check(suite: Suite, progress: Progress, repeats: int = 1, path: str | None = None) -> dict[str, Any]:
    """Compare a suite with its fingerprint; raise RunError that names the differences."""
    if not suite.fingerprint.is_file():
        raise RunError(f"the suite {suite.name} has no fingerprint; deft suite check {suite.name} --update writes it")
    expected = json.loads(suite.fingerprint.read_text())
    packages = differences(suite)
    for repeat in range(repeats):
        found = measure(suite, partial(_repeated, progress, repeat, repeats), path=path)
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


def update(suite: Suite, progress: Progress, merge: bool = False, path: str | None = None) -> dict[str, Any]:
    """Write the fingerprint of the suite as it is installed, without the numbers that rounding changes.

    With `merge`, keep the numbers of the present file that this machine agrees with.
    """
    passes = 1 + len(GRAVITY_SCALES)
    plays = [
        measure(suite, partial(_repeated, progress, number, passes), scale, path)
        for number, scale in enumerate((None, *GRAVITY_SCALES))
    ]
    tasks = {task: stable([play[task] for play in plays]) for task in plays[0]}
    if merge:
        earlier = json.loads(suite.fingerprint.read_text())["tasks"]
        tasks = {task: stable([earlier.get(task, values), values]) for task, values in tasks.items()}
    rows = ",\n".join(f"    {json.dumps(task)}: {json.dumps(values)}" for task, values in tasks.items())
    packages = json.dumps(locked_packages(suite))
    suite.fingerprint.write_text(f'{{\n  "packages": {packages},\n  "tasks": {{\n{rows}\n  }}\n}}\n')
    return {"suite": suite.name, "tasks": len(tasks), "fingerprint": str(suite.fingerprint)}


def stable(plays: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the first of several plays of one episode, with null for each number that is not equal in all of them."""
    first = plays[0]
    states = [play["state"] for play in plays]
    state = [
        value if None not in values and np.ptp(values) <= SENSITIVE * STATE_TOLERANCE else None
        for value, values in zip(first["state"], zip(*states, strict=True), strict=True)
    ]
    returns, successes = [play["return"] for play in plays], {play["success"] for play in plays}
    is_stable = None not in returns and np.ptp(returns) <= SENSITIVE * _return_limit(first["return"])
    return {
        **first,
        "state": state,
        "return": first["return"] if is_stable else None,
        "success": first["success"] if len(successes) == 1 else None,
    }


def measure(
    suite: Suite, progress: Progress, gravity: float | None = None, path: str | None = None
) -> dict[str, dict[str, Any]]:
    """Return the fingerprint of each task: episode i of the group plays its task i, from seed i.

    With `gravity`, a factor near 1, gravity is multiplied by it and actions have a noise as small. `path` is the folder
    of the suite's further files.
    """
    group, found = suite.fingerprint_task, dict[str, dict[str, Any]]()
    tasks = suite.tasks_of(f"{suite.name}/{group}") if group else list(suite.tasks)
    for env_id, played in [(group, tasks)] if group else [(task, [task]) for task in tasks]:
        kwargs = dict(suite.fingerprint_kwargs)
        env = make_env(EnvConfig(id=f"{suite.name}/{env_id}", kwargs=kwargs, suite_path=path))
        try:
            if gravity is not None and env.has_wrapper_attr("scale_gravity"):
                env.get_wrapper_attr("scale_gravity")(gravity)
            for name in played:
                progress(len(found), len(tasks), name)
                has_expert = suite.fingerprint_expert and env.has_wrapper_attr(EXPERT_METHOD)
                found[name] = _measured(env, len(found), gravity, has_expert)
        finally:
            close_env(env)
    return found


def _measured(env: gymnasium.Env, seed: int, gravity: float | None, has_expert: bool) -> dict[str, Any]:
    """Return the fingerprint of one episode."""
    _observe(env, True)
    observation, _ = env.reset(seed=seed)
    streams = observation if isinstance(observation, dict) else {"observation": observation}
    values = {key: np.asarray(value) for key, value in streams.items() if not isinstance(value, str)}
    _observe(env, False)  # later images are not compared
    return {
        "state": [round(float(x), 6) for key in sorted(values) for x in _state(values[key])],
        "image": [round(float(x)) for key in sorted(values) for x in _thumbnail(values[key])],
        **_play(env, has_expert, 0.0 if gravity is None else ACTION_NOISE, gravity or 1.0),
    }


def _observe(env: gymnasium.Env, observes: bool) -> None:
    """Set whether the environment renders, where that can be chosen."""
    if env.has_wrapper_attr("set_observes"):
        env.get_wrapper_attr("set_observes")(observes)


def compare(task: str, expected: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """Describe how a task differs from what is expected; a null is not compared."""
    lines = []
    for key in ("state", "image"):
        if len(expected[key]) != len(found[key]):
            lines.append(f"{task}: the {key} has {len(found[key])} numbers instead of {len(expected[key])}")
            continue
        if key == "state":
            pairs = [pair for pair in zip(found[key], expected[key], strict=True) if pair[1] is not None]
            difference = max((abs(one - two) for one, two in pairs), default=0.0)
            if difference > STATE_TOLERANCE:
                lines.append(f"{task}: the initial state differs by {difference:.3g}")
        elif (difference := image_difference(found[key], expected[key])) > IMAGE_TOLERANCE:
            lines.append(f"{task}: the first image differs by {difference:.3g} of 255")
    differs = expected["return"] is not None and abs(found["return"] - expected["return"]) > _return_limit(
        expected["return"]
    )
    if differs or (expected["success"] is not None and found["success"] != expected["success"]):
        wanted = "any" if expected["return"] is None else f"{expected['return']:.6g}"
        lines.append(
            f"{task}: return {found['return']:.6g} instead of {wanted}, success {found['success']} "
            f"instead of {expected['success']}"
        )
    return lines


def image_difference(found: Sequence[float], expected: Sequence[float]) -> float:
    """Return the mean difference of two thumbnails after the best fit of brightness and contrast of the first."""
    one, two = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    if not one.size:
        return 0.0
    columns = np.stack([one, np.ones_like(one)], 1)
    fit = np.linalg.lstsq(columns, two, rcond=None)[0]
    return float(np.abs(columns @ fit - two).mean())


def _return_limit(value: float) -> float:
    return RETURN_TOLERANCE * max(1.0, abs(value))


def _state(value: np.ndarray) -> np.ndarray:
    return np.empty(0) if value.dtype == np.uint8 else value.astype(np.float64).ravel()


def _thumbnail(value: np.ndarray) -> np.ndarray:
    """Return the mean colour of the squares of an image [h, w, 3]; nothing for other values."""
    if value.dtype != np.uint8 or value.ndim != 3:
        return np.empty(0)
    rows = [np.mean(part, axis=0) for part in np.array_split(value.astype(np.float64), THUMBNAIL, axis=0)]
    squares = [part.mean(axis=1) for part in np.array_split(np.stack(rows), THUMBNAIL, axis=1)]
    return np.stack(squares, axis=1).ravel()


def _play(env: gymnasium.Env, has_expert: bool, noise: float, scale: float) -> dict[str, Any]:
    """Play the episode; return its return, length and success. Other scales draw other noise."""
    generator, noises = np.random.default_rng(SEED), np.random.default_rng(int(scale * 1e9))
    space: Any = env.action_space
    total, length, is_over = 0.0, 0, False
    info: dict[str, Any] = {}
    while not is_over and (has_expert or length < SCRIPTED_STEPS):
        action = env.get_wrapper_attr(EXPERT_METHOD)() if has_expert else generator.uniform(space.low, space.high)
        if noise:
            action = action + noise * (space.high - space.low) * noises.uniform(-1, 1, space.shape)
        _, reward, terminated, truncated, info = env.step(np.asarray(action, space.dtype))
        total, length, is_over = total + float(reward), length + 1, bool(terminated or truncated)
    success = info.get("success", info.get("is_success"))
    return {"return": round(total, 4), "length": length, "success": None if success is None else bool(success)}
