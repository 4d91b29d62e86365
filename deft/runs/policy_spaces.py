"""The spaces that a policy was built for: saved with every checkpoint, and compared with those that it acts in.

A policy identifies the streams of its observation by their names. The builders of runs and `deft evaluate` rebuild it
for the spaces in its checkpoint, and check here that an environment or a dataset has streams of these names.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path

import gymnasium
import numpy as np
from gymnasium import spaces

from deft.data.spaces import space_from_json, space_to_json
from deft.errors import InputError
from deft.models.encoders import ObservationEncoder
from deft.models.policy import Policy
from deft.ownership import MANIFEST, verify
from deft.plain_data import parse_bounded, read_bounded
from deft.schema import INSTRUCTION, LABELS, channels_first, has_channels_last

log = logging.getLogger(__name__)
SPACES_FILE = "spaces.json"
KINDS = ("observation", "action")


@dataclass(frozen=True)
class PolicySpaces:
    """The observation and action space of a policy."""

    observation: spaces.Space
    action: spaces.Space
    """As the environment has it (`VectorEnv.env_action_space`); in an online run of action chunks that of a chunk."""
    action_mask: np.ndarray | None = None

    def __str__(self) -> str:
        return f"observations {describe(self.observation)} and actions {describe(self.action)}"

    def matches(self, other: PolicySpaces) -> bool:
        """Whether the streams and actions have the same names, kinds and shapes."""
        return str(self) == str(other)

    def write(self, folder: Path) -> None:
        """Write them into the folder of a checkpoint."""
        content = {
            "observation_space": json.loads(space_to_json(self.observation, compact=True)),
            "action_space": json.loads(space_to_json(self.action, compact=True)),
            "action_mask": None if self.action_mask is None else self.action_mask.tolist(),
        }
        (folder / SPACES_FILE).write_text(json.dumps(content), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path | None) -> PolicySpaces | None:
        """Read those of a checkpoint; None if it has none."""
        file = None if folder is None else folder / SPACES_FILE
        if file is None or not file.is_file():
            return None
        if (file.parent / MANIFEST).is_file():
            verify(file)
        try:
            content = parse_bounded(read_bounded(file))
            observation, action = (space_from_json(json.dumps(content[f"{kind}_space"])) for kind in KINDS)
            mask = None if content["action_mask"] is None else np.array(content["action_mask"], bool)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, MemoryError) as error:
            raise InputError(f"{file}: damaged: {' '.join(str(error).split())}") from error
        return cls(observation, action, mask)


def policy_space(recorded: PolicySpaces | None, given: spaces.Space, source: Path | str, where: str) -> spaces.Space:
    """Return the observation space of a policy whose weights are loaded: the one that it was trained with.

    Labels are for training only: what has the space may have none, but no others. `source` is the checkpoint, `where`
    names what has the space `given`.
    """
    if recorded is None:
        if isinstance(given, spaces.Dict) and len(given) > 1:
            names = ", ".join(given)
            log.warning(
                "%s does not record its streams: it is assumed that they are those of %s: %s", source, where, names
            )
        return given
    if not isinstance(recorded.observation, spaces.Dict) or not isinstance(given, spaces.Dict):
        return given
    learned, labels = (
        {name: space for name, space in own.items() if name in LABELS} for own in (recorded.observation, given)
    )
    if learned and labels and describe(spaces.Dict(learned)) != describe(spaces.Dict(labels)):
        raise InputError(
            f"labels: {source} was trained with {describe(spaces.Dict(learned))}, {where} has "
            f"{describe(spaces.Dict(labels))}: leave these out (of an environment --env-kwargs observation=images), or "
            "give the same"
        )
    return spaces.Dict({name: space for name, space in recorded.observation.items() if name not in LABELS} | labels)


def check_streams(
    policy: Policy, made_for: spaces.Space, given: spaces.Space, where: str, flag: str = "--rename_streams"
) -> None:
    """Raise an error if `where` lacks a stream that the policy reads, or has one of another kind by that name."""
    if not isinstance(made_for, spaces.Dict) or not isinstance(given, spaces.Dict):
        if type(made_for) is not type(given) or _row_shape(made_for) != _row_shape(given):
            raise InputError(
                f"policy: made for observations {made_for}, {where} has {given}: use what it was trained for, or train "
                "a new policy"
            )
        return
    read = {name: space for name, space in made_for.items() if name not in LABELS}
    if policy.streams is not None:
        read = {name: space for name, space in read.items() if name in policy.streams}
    if missing := [name for name in read if name not in given.spaces]:
        renaming = " ".join(f"{name}=STREAM" for name in missing)
        raise InputError(
            f"{where} has the streams {', '.join(given)}; the policy reads {', '.join(read)}: name them with "
            f"{flag} {renaming}"
        )
    fixed = isinstance(getattr(policy, "encoder", None), ObservationEncoder)  # a VLA model scales its images itself
    for name, space in read.items():
        own, theirs = _row_shape(space), _row_shape(given[name])
        kinds = [_kind(one) for one in (space, given[name])]
        flexible = kinds[0] != "vector" and (not fixed or name.rpartition("/")[2] == INSTRUCTION)
        if kinds[0] != kinds[1] or (own != theirs and not flexible):
            raise InputError(
                f"{where}: stream {name!r} is {kinds[1]} of shape {theirs}, the policy was made for {kinds[0]} of "
                f"shape {own}: give the stream that it was trained with (--rename_streams), or train a new policy"
            )
    if further := [name for name in given if name not in made_for.spaces and name not in LABELS]:
        log.info("%s has further streams, which the policy does not read: %s", where, ", ".join(further))


def describe(space: gymnasium.Space) -> str:
    """Return the kind and shape of a space, of each stream by its name."""
    if isinstance(space, spaces.Dict):
        return ", ".join(f"{name} ({describe(stream)})" for name, stream in sorted(space.items()))
    return f"{_kind(space)} of shape {_row_shape(space)}" if isinstance(space, spaces.Box) else str(space)


def _kind(space: gymnasium.Space) -> str:
    if not isinstance(space, spaces.Box):
        return str(space)
    if space.dtype == np.uint8:
        return "image" if len(space.shape) > 1 else "text"
    return "vector"


def _row_shape(space: gymnasium.Space) -> tuple[int, ...] | None:
    """Return the shape of an observation in Deft: images have their channels first."""
    if isinstance(space, spaces.Box) and has_channels_last(space.shape, space.dtype):
        return channels_first(space.low).shape
    return space.shape
