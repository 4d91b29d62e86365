"""Recorded video as the episodes of a world model: any dataset with images, states and actions from −1 to 1, padded.

The teacher trains on them instead of exploration (`--dataset`), and `deft evaluate` measures it on episodes that
were kept out.
"""

from __future__ import annotations

import json
import logging
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces
from safetensors import safe_open

from deft import schema
from deft.config.f1_settings import TrainingConfig
from deft.data.augmentation import recolor_episode, shift_episode
from deft.data.datasets import Dataset, find_dataset, open_dataset
from deft.data.datasets.lerobot import matches as is_lerobot
from deft.data.robot_episode import RobotEpisode
from deft.envs.padded import PADDED_SIZE
from deft.errors import InputError
from deft.runs.signals import raise_if_stopped
from deft.training.phases.exploration import Explorer

log = logging.getLogger(__name__)
WRIST_NAMES = ("wrist", "hand", "gripper")
HEAD_NAMES = ("head", "ego", "front", "top", "agentview", "exterior", "side")
OFF = "off"
MEASURED = 50  # episodes from which the range of states and actions is taken


class DatasetExplorer(Explorer):
    """A dataset's episodes in a new random order every time through; without those that are kept for evaluation."""

    def __init__(self, training: TrainingConfig, image_size: int, first: int = 0, every: int = 1) -> None:
        assert training.dataset is not None
        self.training = training
        self.dataset = open_video(training.dataset, training.dataset_options, image_size)
        self.cameras = find_cameras(self.dataset, training.wrist_camera, training.head_camera)
        self.training_episodes, self.held_out_episodes = split(
            self.dataset.num_episodes, training.holdout, training.seed
        )
        mine = self.training_episodes[first::every]
        if not len(mine):
            raise InputError(f"dataset {training.dataset}: fewer episodes to train on than processes")
        self._mine, self._next = mine, 0
        self.num_episodes = len(mine)
        shortest, longest = int(self.dataset.lengths.min()), int(self.dataset.lengths.max())
        if shortest < 2 * training.frame_skip - 1:  # from any of its first frames there is one more to predict
            raise InputError(
                f"frame_skip {training.frame_skip}: the shortest episode of {training.dataset} has {shortest} steps; "
                f"use at most {(shortest + 1) // 2}"
            )
        self.longest = longest // training.frame_skip
        self.normalization = self._measure()
        self.state_dim, self.action_dim = (
            max(PADDED_SIZE, len(self.normalization[name][0])) for name in ("state", "action")
        )

    @property
    def varies(self) -> bool:
        """Whether an episode is another one the next time."""
        training = self.training
        return bool(training.colour_augmentation or training.shift_augmentation or training.frame_skip > 1)

    def take(self, count: int) -> list[RobotEpisode]:
        """The next `count` episodes."""
        found = []
        for _ in range(count):
            raise_if_stopped()
            turn, place = divmod(self._next, self.num_episodes)
            order = np.random.default_rng([self.training.seed, turn]).permutation(self._mine)
            generator = np.random.default_rng([self.training.seed, self._next, 2])
            begin = int(generator.integers(self.training.frame_skip)) if self.training.frame_skip > 1 else 0
            episode = self.read(int(order[place]), begin)
            episode = recolor_episode(episode, generator, self.training.colour_augmentation)
            found.append(shift_episode(episode, generator, self.training.shift_augmentation))
            self._next += 1
        return found

    def held_out(self, count: int) -> list[RobotEpisode]:
        """Episodes that are not trained on, without augmentation; each from every possible first frame."""
        begins = range(self.training.frame_skip)
        return [self.read(int(index), begin) for index in self.held_out_episodes[:count] for begin in begins]

    def skip(self, count: int) -> None:
        """Skip `count` episodes."""
        self._next += count

    def close(self) -> None:
        """Let go of open files."""
        self.dataset.close()

    def read(self, index: int, begin: int = 0) -> RobotEpisode:
        """One episode of the dataset, its numbers brought to −1 … 1: every `frame_skip`-th frame from `begin` on.

        An action is then the mean of those between two frames.
        """
        episode, skip = self.dataset.episode(index), self.training.frame_skip
        wrist, head = self.cameras
        streams = episode.streams
        count = (len(episode) - begin) // skip
        frames = slice(begin, begin + count * skip + 1, skip)
        state = _state_of(streams, len(episode) + 1)[frames]
        action = _scaled(_vectors(episode.action), self.normalization["action"])
        action = action[begin : begin + count * skip].reshape(count, skip, -1).mean(1)
        return RobotEpisode(
            wrist=last_picture(streams[wrist])[frames],
            state=_padded(_scaled(state, self.normalization["state"]), self.state_dim),
            action=_padded(action, self.action_dim),
            head=None if head is None else last_picture(streams[head])[frames],
            number=index,
        )

    def _measure(self) -> dict[str, list[list[float]]]:
        """Least and greatest value of each dim over (the first of) the episodes that are trained on."""
        limits: dict[str, list[np.ndarray]] = {"state": [], "action": []}
        for index in self.training_episodes[:MEASURED]:
            episode = self.dataset.episode(int(index))
            state, action = _state_of(episode.streams, len(episode) + 1), _vectors(episode.action)
            limits["state"] += [state.min(0), state.max(0)]
            limits["action"] += [action.min(0), action.max(0)]
        return {name: [np.min(rows, 0).tolist(), np.max(rows, 0).tolist()] for name, rows in limits.items()}


def open_video(name: str, options: dict[str, Any], image_size: int) -> Dataset:
    """Open a dataset, with images resized to the model's size if its format can do that."""
    path, _ = find_dataset(name)
    return open_dataset(name, {"image_size": image_size, **options} if is_lerobot(path) else options)


def find_cameras(dataset: Dataset, wrist: str | None, head: str | None) -> tuple[str, str | None]:
    """The predicted stream and the additional one; chosen by name if they are not given."""
    images = image_streams(dataset)
    check_streams(dataset, "wrist_camera", {wrist} - {None, OFF})
    check_streams(dataset, "head_camera", {head} - {None, OFF})

    def named(words: tuple[str, ...], other: str | None) -> list[str]:
        return [name for name in images if name != other and any(word in name.lower() for word in words)]

    if wrist is None:
        rest = [name for name in images if name != head]
        wrist = [*named(WRIST_NAMES, head), *rest, ""][0]
    if head is None:
        head = [*named(HEAD_NAMES, wrist), OFF][0]
    return wrist, None if head == OFF else head


def image_streams(dataset: Dataset) -> list[str]:
    """The names of a dataset's image streams; a plain observation has the empty name."""
    space = dataset.observation_space
    named = space.spaces if isinstance(space, spaces.Dict) else {"": space}
    found = [name for name, one in named.items() if one.dtype == np.uint8 and len(one.shape or ()) == 3]
    if not found:
        raise InputError(f"dataset {dataset.name} has no images (uint8 [3, h, w]): its observations are {space}")
    return found


def check_streams(dataset: Dataset, flag: str, names: Iterable[str | None]) -> None:
    """Raise an error if a dataset does not have these image streams."""
    found = image_streams(dataset)
    for name in names:
        if name not in found:
            shown = ", ".join(one or "the observation" for one in found)
            raise InputError(f"{flag}: dataset {dataset.name} has no images {name!r}; it has {shown}")


def split(num_episodes: int, share: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Episodes to train on, and at least one that is kept out."""
    if num_episodes < 2:
        raise InputError("the dataset has one episode; two are needed, one of them to evaluate on")
    order = np.random.default_rng(seed).permutation(num_episodes)
    count = min(num_episodes - 1, max(1, round(share * num_episodes)))
    return np.sort(order[count:]), np.sort(order[:count])


def trained_on(dataset: Dataset, episodes: np.ndarray) -> dict[str, Any]:
    """Which episodes of which dataset, for the header of a tokenizer's file; a dataset is known by its lengths."""
    return {"dataset": zlib.crc32(dataset.lengths.tobytes()), "episodes": [int(index) for index in episodes]}


def warn_of_seen_episodes(tokenizer: Path, dataset: Dataset, held_out: np.ndarray) -> None:
    """What a tokenizer was trained on is no longer held out; its file says what that was."""
    with safe_open(tokenizer, "numpy") as file:
        header = (file.metadata() or {}).get("trained_on")
    if header is None or (seen := json.loads(header))["dataset"] != trained_on(dataset, held_out)["dataset"]:
        return
    if both := sorted(set(seen["episodes"]) & {int(index) for index in held_out}):
        text = (
            "tokenizer_weights: %s was trained on episode %s, which is held out here: give `deft train tokenizer` the "
            "same seed, and as held_out_episodes what holdout is here"
        )
        log.warning(text, tokenizer, ", ".join(map(str, both)))


def last_picture(frames: np.ndarray) -> np.ndarray:
    """uint8 [T, 3, h, w]; of frames that were stacked along the channels the newest, grey ones in three channels."""
    channels = frames.shape[1]
    if channels == 1:
        return np.repeat(frames, 3, 1)
    if channels % 3:
        raise InputError(f"images have {channels} channels; three, a multiple of three or one are needed")
    return np.ascontiguousarray(frames[:, -3:])


def _state_of(streams: dict[str, np.ndarray], length: int) -> np.ndarray:
    """The numbers of an observation, concatenated; empty if there are only images."""
    found = [
        _vectors(values)
        for name, values in sorted(streams.items())
        if values.dtype.kind == "f" and values.ndim <= 2 and name != schema.INSTRUCTION
    ]
    return np.concatenate(found, 1) if found else np.zeros((length, 0), np.float32)


def _vectors(values: np.ndarray) -> np.ndarray:
    values = np.asarray(values, np.float32)
    return values[:, None] if values.ndim == 1 else values


def _scaled(values: np.ndarray, limits: list[list[float]]) -> np.ndarray:
    """To −1 … 1 between the limits; a dim that never changes becomes 0."""
    low, high = (np.asarray(limit, np.float32) for limit in limits)
    middle, half = (low + high) / 2, (high - low) / 2
    return (values - middle) / np.where(half > 0, half, 1.0)


def _padded(values: np.ndarray, size: int) -> np.ndarray:
    return np.pad(values, ((0, 0), (0, size - values.shape[1]))).astype(np.float32)
