"""Labels that need no simulator: where the robot goes next in the same recorded episode.

An object is where the hand closes. So a policy that learns to predict the hand's position at the next change of the
gripper learns to see the object, from nothing but the recorded positions of the robot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from gymnasium import spaces

from deft.data.datasets.dataset import Dataset, DatasetView, Episode, box
from deft.errors import InputError
from deft.schema import KEYFRAMES, LABELS

AHEAD = (8, 16)  # steps


class KeyframeDataset(DatasetView):
    """A dataset with labels, the stream `keyframes`: numbers of another stream at later steps, less those at this one.

    The later steps are, in this order: the next one at which the sign of an action dim changes (else the last), the
    last of the episode, and those `AHEAD`.
    """

    def __init__(self, dataset: Dataset, stream: str, dims: Sequence[int] = (), switch: int = -1) -> None:
        space, action = dataset.observation_space, dataset.action_space
        parts = dict(space.spaces) if isinstance(space, spaces.Dict) else {}
        part = parts.get(stream)
        if not isinstance(part, spaces.Box) or not _is_vector(part):
            vectors = [name for name, one in parts.items() if _is_vector(one)]
            found = f"it has {', '.join(vectors)}" if vectors else "it has none with a name"
            raise InputError(f"keyframe_stream: dataset {dataset.name} has no vectors named {stream!r}; {found}")
        if labels := [name for name in LABELS if name in parts]:
            raise InputError(f"keyframe_stream: dataset {dataset.name} has labels ({labels[0]}) already")
        count = spaces.flatdim(part)
        self._dims = list(dims or range(count))
        if outside := [dim for dim in self._dims if not -count <= dim < count]:
            raise InputError(f"keyframe_dims: {stream} has {count} numbers, and no number {outside[0]}")
        if not isinstance(action, spaces.Box) or not -action.shape[-1] <= switch < action.shape[-1]:
            raise InputError(f"keyframe_switch: dataset {dataset.name} has no action dim {switch}")
        if len({dim % count for dim in self._dims}) < len(self._dims):
            raise InputError(f"keyframe_dims: {' '.join(map(str, self._dims))} names a number twice")
        self._stream, self._switch = stream, switch
        parts[KEYFRAMES] = box(len(self._dims) * (2 + len(AHEAD)))
        super().__init__(dataset, spaces.Dict(parts), dataset.lengths)

    def episode(self, index: int) -> Episode:
        """Return one episode with its labels."""
        episode = self._dataset.episode(index)
        values, last = episode.streams[self._stream][:, self._dims], len(episode)
        steps = np.arange(last + 1)
        is_closed = episode.action[:, self._switch] > 0
        changes = np.append(np.flatnonzero(is_closed[1:] != is_closed[:-1]) + 1, last)
        later = [changes[np.searchsorted(changes[:-1], steps, "right")], np.full(last + 1, last)]
        later += [np.minimum(steps + ahead, last) for ahead in AHEAD]
        labels = np.concatenate([values[step] - values for step in later], 1)
        return replace(episode, observation={**episode.streams, KEYFRAMES: labels})

    def episode_returns(self) -> np.ndarray:
        """Return the undiscounted return of each episode, float64 [E]."""
        return self._dataset.episode_returns()

    def fingerprint(self) -> str:
        """Return the fingerprint of the dataset, and of what its labels are."""
        dims = ",".join(map(str, self._dims))
        return f"{self._dataset.fingerprint()}-{self._stream}:{dims}:{self._switch}"

    def source_files(self) -> list[Path]:
        """Return the files of the dataset."""
        return self._dataset.source_files()


def _is_vector(space: spaces.Space) -> bool:
    return isinstance(space, spaces.Box) and space.dtype == np.float32 and len(space.shape) == 1
