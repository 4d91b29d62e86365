"""New names for the streams of an environment (`env.rename_streams`): policies match streams by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium

from deft.envs.layout import ObservationLayout, value_at
from deft.envs.wrappers import describe_env
from deft.errors import InputError
from deft.schema import renamed_streams


class RenamedStreams(gymnasium.ObservationWrapper, gymnasium.utils.RecordConstructorArgs):
    """The environment's observation as one Dict of streams, nested names joined with a slash, some of them renamed.

    `rename`: {new name: name in the environment}.
    """

    def __init__(self, env: gymnasium.Env, rename: Mapping[str, str]) -> None:
        gymnasium.utils.RecordConstructorArgs.__init__(self, rename=dict(rename))
        gymnasium.ObservationWrapper.__init__(self, env)
        layout = ObservationLayout(env.observation_space)
        paths = {"/".join(path): path for path in layout.paths}
        names = renamed_streams(paths, rename, describe_env(env, 0))
        self._paths = {new: paths[name] for name, new in names.items()}
        leaves = {name: value_at(env.observation_space, path) for name, path in self._paths.items()}
        self.observation_space = gymnasium.spaces.Dict(leaves)

    def observation(self, observation: Any) -> dict[str, Any]:
        """Return the streams by their new names."""
        return {name: value_at(observation, path) for name, path in self._paths.items()}


def rename(env: Any, streams: Mapping[str, str]) -> Any:
    """Rename the streams of an environment, or of each in a list; return it unchanged without new names."""
    if not streams:
        return env
    if isinstance(env, gymnasium.Env):
        return RenamedStreams(env, streams)
    if isinstance(env, list | tuple):
        return [rename(item, streams) for item in env]
    raise InputError(
        f"rename_streams: the streams of a {type(env).__name__} cannot be renamed; pass a list of "
        "environments, or wrap each of them in deft.envs.rename.RenamedStreams"
    )
