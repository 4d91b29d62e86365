"""`set_difficulty(level)` on the outermost wrapper: Gymnasium's own wrappers do not forward it."""

from __future__ import annotations

from typing import Any

import gymnasium
from gymnasium.envs.registration import WrapperSpec
from gymnasium.utils import RecordConstructorArgs

METHOD = "set_difficulty"


class Difficulty(gymnasium.Wrapper, RecordConstructorArgs):
    """Forwards `set_difficulty` to the environment that has it."""

    is_stateless = True  # saved states are equal with and without it

    def __init__(self, env: gymnasium.Env) -> None:
        RecordConstructorArgs.__init__(self)
        super().__init__(env)

    def set_difficulty(self, level: Any) -> None:
        """Set the difficulty of the next episodes."""
        self.env.get_wrapper_attr(METHOD)(level)


SPEC = WrapperSpec("Difficulty", "deft.envs.difficulty:Difficulty", {})


def forward_difficulty(env: gymnasium.Env) -> gymnasium.Env:
    """Wrap an environment in `Difficulty` if an inner layer has `set_difficulty`."""
    return Difficulty(env) if not hasattr(env, METHOD) and env.has_wrapper_attr(METHOD) else env
