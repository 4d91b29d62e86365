"""The loop in which environments are stepped. Nothing else outside `deft.envs` calls `env.step`.

Collectors, evaluations and recordings pass in what acts and the sink that takes the steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from deft.runs.signals import never


def rollout(
    env: Any,
    act: Callable[[Any], Any],
    sink: Callable[[Any, Any, Any], bool | None],
    observation: Any,
    num_steps: int | None = None,
    stop: Callable[[], bool] = never,
) -> Any:
    """Step `env` from `observation` and return the observation after the last step.

    `act(observation)` returns the actions. `sink(observation, actions, answer)` takes what `env.step` returned: a
    `VectorStep`, or the tuple of a single Gymnasium environment. The rollout ends when the sink returns True, after
    `num_steps` steps (None: no limit), or when `stop()` is True before a step.
    """
    while num_steps != 0 and not stop():
        actions = act(observation)
        answer = env.step(actions)
        is_over = sink(observation, actions, answer)
        observation = answer[0] if isinstance(answer, tuple) else answer.observation
        if is_over:
            break
        num_steps = None if num_steps is None else num_steps - 1
    return observation
