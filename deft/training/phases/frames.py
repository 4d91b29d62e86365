"""Pictures for the image tokenizer: rendered by workers while it trains, or read from a dataset.

`deft.training.phases.tokenizer` asks for them. Which pictures there are, and in which order, depends on the settings
alone and never on timing, so that a resumed run sees what an uninterrupted one would have.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from deft.config.tokenizer_settings import TokenizerTrainingConfig
from deft.data.datasets import open_dataset
from deft.data.datasets.dataset import Dataset
from deft.envs.process import ProcessVectorEnv
from deft.envs.serial import SerialVectorEnv
from deft.envs.tabletop.env import CAMERAS
from deft.envs.tabletop.images import TabletopImages
from deft.envs.vector import VectorEnv
from deft.errors import InputError
from deft.machine import available_cores
from deft.models.f1.frames import to_model, to_pictures
from deft.runs.rollout import rollout
from deft.runs.signals import raise_if_stopped
from deft.training.phases.recorded import split, trained_on

COPIES = 32  # of the tabletop, however many workers there are: the order of the pictures depends on it
HELD_OUT_SEED = 1_000_000  # added to the run's: other scenes
WAIT_INTERVAL = 0.5  # seconds between looks at a source that is waited for
Chunk = np.ndarray | Tensor


class FrameStore:
    """Pictures uint8 [N, 3, h, w] on a device, filled in order by a thread while others of them are used."""

    def __init__(self, source: Iterator[Chunk], num_frames: int, size: int, device: torch.device) -> None:
        self.frames = torch.zeros(num_frames, 3, size, size, dtype=torch.uint8, device=device)
        self._count = 0
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._fill, args=(source,), name="deft-frames", daemon=True)
        self._thread.start()

    def first(self, count: int) -> Tensor:
        """The first `count` pictures; waits until they are there."""
        with self._changed:
            while self._count < count:
                raise_if_stopped()
                if self._error is not None:
                    raise self._error
                if not self._thread.is_alive():
                    raise InputError(f"num_frames: {count} pictures were expected, and there are {self._count}")
                self._changed.wait(WAIT_INTERVAL)
        return self.frames[:count]

    def close(self) -> None:
        """Stop filling, and wait for the thread."""
        self._closed = True
        self._thread.join()

    def _fill(self, source: Iterator[Chunk]) -> None:
        try:
            with contextlib.closing(source):  # type: ignore[type-var]
                for chunk in source:
                    count = min(len(chunk), len(self.frames) - self._count)
                    # Blocking copies: what is counted is there, whichever stream reads it.
                    self.frames[self._count : self._count + count].copy_(torch.as_tensor(chunk[:count]))
                    with self._changed:
                        self._count += count
                        self._changed.notify_all()
                    if self._closed or self._count == len(self.frames):
                        return
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()


class TabletopFrames:
    """Where the pictures are rendered. Head and wrist camera take turns."""

    def __init__(self, config: TokenizerTrainingConfig, size: int) -> None:
        self._config = config
        self._size = size
        self.num_frames = config.num_frames
        cores = available_cores()
        self.num_workers = min(COPIES, max(1, cores - 1) if config.num_workers is None else config.num_workers)
        self.fingerprint: int | str = 0
        self.trained_on: dict[str, Any] | None = None
        try:
            self._function()()  # so that a wrong setting is told before anything is started
        except TypeError as error:
            raise InputError(f"env_kwargs: {error}") from None

    def training(self) -> Iterator[Chunk]:
        """All pictures to learn from, in order, as they are rendered."""
        return self._render(self._config.seed)

    def held_out(self) -> dict[str, Tensor]:
        """Pictures of other scenes, by camera."""
        count = math.ceil(self._config.held_out_frames / len(CAMERAS))
        found: list[np.ndarray] = []
        with contextlib.closing(self._render(self._config.seed + HELD_OUT_SEED)) as chunks:
            for chunk in chunks:
                raise_if_stopped()
                found.append(chunk)
                if sum(map(len, found)) >= count * len(CAMERAS):
                    break
        pictures = torch.from_numpy(np.concatenate(found))
        return {name: pictures[place :: len(CAMERAS)][:count] for place, name in enumerate(CAMERAS)}

    def _function(self) -> Callable[[], TabletopImages]:
        config = self._config
        return partial(TabletopImages, self._size, config.pictures_per_scene, **config.env_kwargs)

    def _make(self) -> VectorEnv:
        if self.num_workers:
            return ProcessVectorEnv([self._function()] * COPIES, num_workers=self.num_workers)
        return SerialVectorEnv([self._function()] * COPIES)

    def _render(self, seed: int) -> Any:
        env = self._make()
        try:
            actions = np.zeros(COPIES, np.int64)
            observation: Any = env.reset(seed)
            finals: list[Any] = []  # the last images of scenes that ended
            while True:
                yield observation.reshape(-1, *observation.shape[2:]).copy()
                observation = rollout(
                    env, lambda _: actions, lambda _, __, step: finals.append(step.final_observation), observation, 1
                )
                final = finals.pop()
                if final is not None:
                    yield final.reshape(-1, *final.shape[2:]).copy()
        finally:
            env.close()


class DatasetFrames:
    """Pictures of recorded episodes, in the size that the model sees; whole episodes are kept for evaluation."""

    num_workers = 0

    def __init__(self, config: TokenizerTrainingConfig, size: int) -> None:
        assert config.dataset is not None
        self._config = config
        self._size = size
        self._dataset = open_dataset(config.dataset, config.dataset_options)
        self.streams = _picture_streams(self._dataset, config.cameras)
        self.fingerprint = self._dataset.fingerprint()
        # With one seed and share as a teacher keeps them: what it is measured on, its tokenizer has not seen either.
        self._training, self._held_out = split(self._dataset.num_episodes, config.held_out_episodes, config.seed)
        self.trained_on: dict[str, Any] | None = trained_on(self._dataset, self._training)
        total = self._count(self._training)
        self._stride = max(1, math.ceil(total / config.num_frames))
        self.num_frames = sum(self._kept(index, self._stride) for index in self._training) * len(self.streams)

    def training(self) -> Iterator[Chunk]:
        """The pictures to learn from, episode after episode, those of the cameras one after another."""
        for index in self._training:
            yield torch.cat([pictures[:: self._stride] for pictures in self._pictures(index).values()])

    def held_out(self) -> dict[str, Tensor]:
        """Pictures of the episodes that are kept out, by camera."""
        stride = max(1, math.ceil(self._count(self._held_out) / self._config.held_out_frames))
        found = [self._pictures(index) for index in self._held_out]
        return {name or "image": torch.cat([part[name][::stride] for part in found]) for name in self.streams}

    def _count(self, episodes: np.ndarray) -> int:
        return sum(self._kept(index, 1) for index in episodes) * len(self.streams)

    def _kept(self, index: int, stride: int) -> int:
        return math.ceil((int(self._dataset.lengths[index]) + 1) / stride)

    def _pictures(self, index: int) -> dict[str, Tensor]:
        streams = self._dataset.episode(index).streams
        found = {}
        for name in self.streams:
            pictures = torch.from_numpy(np.ascontiguousarray(streams[name][:, -3:]))  # the newest of stacked frames
            found[name] = to_pictures(to_model(pictures, self._size, name or "the dataset's picture"))
        return found


def _picture_streams(dataset: Dataset, wanted: tuple[str, ...] | None) -> list[str]:
    """The names of a dataset's picture streams; a plain observation has the empty name."""
    space = dataset.observation_space
    parts = space.spaces if isinstance(space, spaces.Dict) else {"": space}
    found = [
        name
        for name, part in parts.items()
        if isinstance(part, spaces.Box) and part.dtype == np.uint8 and len(part.shape) == 3 and part.shape[0] % 3 == 0
    ]
    if not found:
        raise InputError(f"dataset {dataset.name} has no pictures (uint8 [3, h, w]); it has {space}")
    for name in wanted or ():
        if name not in found:
            raise InputError(f"cameras: dataset {dataset.name} has no {name!r}; it has {', '.join(found) or 'one'}")
    return list(wanted or found)
