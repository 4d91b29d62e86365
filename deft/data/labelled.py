"""Steps of several environments with the labels of an expert, as episodes in memory: the aggregated data of DAgger.

`deft.training.labelled_collection` writes them and samples them with `StreamingBuffer`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from deft import schema
from deft.data.datasets.dataset import Dataset, Episode, Observation
from deft.data.tensors import Key, Row, to_numpy

FIELDS: dict[str, Key] = {
    "action": schema.ACTION,
    "reward": schema.NEXT_REWARD,
    "terminated": schema.NEXT_TERMINATED,
    "truncated": schema.NEXT_TRUNCATED,
    "intervention": schema.INTERVENTION,
    "expert_action": schema.EXPERT_ACTION,
}
"""The fields of an episode beside observations, and their keys in a step."""


class EpisodeList(Dataset):
    """Episodes in memory whose actions are the expert's."""

    def __init__(
        self, episodes: Sequence[Episode], observation_space: spaces.Space, action_space: spaces.Space
    ) -> None:
        super().__init__("labels", observation_space, action_space, np.array([len(one) for one in episodes]))
        self._list = episodes

    def episode(self, index: int) -> Episode:
        """Return one episode, with the expert's actions where it has them."""
        episode = self._list[index]
        return episode if episode.expert_action is None else dataclasses.replace(episode, action=episode.expert_action)


class LabelledSteps:
    """Takes steps [N, …] in, and cuts them into episodes at their ends and wherever `cut` is called."""

    def __init__(self) -> None:
        self.episodes: list[Episode] = []
        """Whole episodes and parts of them, in the order of the environments within a round."""
        self._rows: list[dict[Key, np.ndarray]] = []
        self._first: list[int] = []  # of each environment: its first row that is in no episode yet

    def write(self, row: Row) -> None:
        """Store one step of all environments; steps outside `schema.STEP_MASK` were lost with their episode."""
        # A copy: environments write their next observation to the same memory.
        arrays = {key: to_numpy(value) if isinstance(value, Tensor) else value for key, value in row.items()}
        self._rows.append({key: np.array(value) for key, value in arrays.items()})

    def cut(self, whole: bool = False) -> list[Episode]:
        """End the episodes under way here, and return those of all steps since the last call.

        With `whole`, episodes under way are left for later calls.
        """
        rows, found = self._rows, []
        starts = self._first or [0] * (len(rows[0][schema.ACTION]) if rows else 0)
        for env, start in enumerate(starts):
            for first, last in _segments(rows, env, start, whole):
                found.append(self._episode(rows, env, first, last))
                starts[env] = last + 1
            if not whole:
                starts[env] = len(rows)
        used = min(starts, default=0)
        self._rows, self._first = rows[used:], [start - used for start in starts]
        self.episodes += found
        return found

    def _episode(self, rows: list[dict[Key, np.ndarray]], env: int, first: int, last: int) -> Episode:
        """The steps first … last of an environment."""
        steps = rows[first : last + 1]
        observation = _observations(steps, env)
        columns = {name: np.stack([row[key][env] for row in steps]) for name, key in FIELDS.items() if key in steps[0]}
        columns["truncated"][-1] |= not columns["terminated"][-1]  # cut here, where it has not ended
        columns["reward"] = columns["reward"].astype(np.float32)
        return Episode(observation, **columns)

    def state_dict(self) -> dict[str, Any]:
        """Return the episodes as one tensor per field, and the steps that were not cut yet."""
        whole: dict[str, Any] = {"lengths": [len(one) for one in self.episodes]}
        if self.episodes:
            names = self.episodes[0].streams
            whole["streams"] = {name: _joined([one.streams[name] for one in self.episodes]) for name in names}
            fields = [name for name in FIELDS if vars(self.episodes[0])[name] is not None]
            whole["columns"] = {name: _joined([vars(one)[name] for one in self.episodes]) for name in fields}
        rows = [[(key, torch.from_numpy(value)) for key, value in row.items()] for row in self._rows]
        return {"episodes": whole, "rows": rows, "first": list(self._first)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned."""
        self._rows = [{key: value.numpy() for key, value in row} for row in state["rows"]]
        self._first, self.episodes = list(state["first"]), []
        whole, start = state["episodes"], 0
        for number, length in enumerate(whole["lengths"]):
            rows = slice(start + number, start + number + length + 1)  # an episode has one more observation
            streams = {name: tensor[rows].numpy() for name, tensor in whole["streams"].items()}
            columns = {name: tensor[start : start + length].numpy() for name, tensor in whole["columns"].items()}
            self.episodes.append(Episode(streams.get("", streams), **columns))
            start += length


def marked_parts(episode: Episode) -> list[Episode]:
    """Return the parts of an episode that an expert decided, each as an episode."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], episode.marks, [False]]).astype(np.int8)))
    parts = []
    for first, last in edges.reshape(-1, 2):
        rows, steps = slice(first, last + 1), slice(first, last)
        streams = {name: stream[rows] for name, stream in episode.streams.items()}
        fields = {name: vars(episode)[name] for name in FIELDS if vars(episode)[name] is not None}
        columns = {name: values[steps].copy() for name, values in fields.items()}
        columns["truncated"][-1] |= not columns["terminated"][-1]  # cut here, where it has not ended
        parts.append(Episode(streams.get("", streams), **columns))
    return parts


def _segments(rows: list[dict[Key, np.ndarray]], env: int, start: int, whole: bool) -> list[tuple[int, int]]:
    """First and last steps of the episodes of an environment from `start` on, without steps that were lost."""
    segments, first = [], start
    for step, row in enumerate(rows[start:], start):
        is_lost = schema.STEP_MASK in row and not row[schema.STEP_MASK][env]
        ends = bool(row[schema.NEXT_TERMINATED][env] or row[schema.NEXT_TRUNCATED][env])
        is_last = ends or (not whole and step == len(rows) - 1)
        if is_lost:
            if step > first:
                segments.append((first, step - 1))
            first = step + 1
        elif is_last:
            segments.append((first, step))
            first = step + 1
    return segments


def _observations(steps: list[dict[Key, np.ndarray]], env: int) -> Observation:
    """The observations before the steps of an environment, and the one after the last."""
    if schema.OBSERVATION in steps[0]:
        last = steps[-1][schema.NEXT_OBSERVATION][env]
        return np.stack([*(row[schema.OBSERVATION][env] for row in steps), last])
    names = [key[1] for key in steps[0] if isinstance(key, tuple) and key[0] == schema.OBSERVATION]
    return {
        name: np.stack(
            [
                *(row[(schema.OBSERVATION, name)][env] for row in steps),
                steps[-1][(*schema.NEXT_OBSERVATION, name)][env],
            ]
        )
        for name in names
    }


def _joined(arrays: Sequence[np.ndarray]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(arrays))
