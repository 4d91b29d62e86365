"""Images for the image tokenizer: rendered by workers while it trains, or read from a dataset.

`deft.training.phases.tokenizer` uses them. The images and their order depend on the settings alone and never on timing,
so that a resumed run equals an uninterrupted one.
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

from deft.config.f1_settings import TokenizerTrainingConfig
from deft.data.datasets import open_dataset
from deft.data.datasets.dataset import Dataset
from deft.envs.process import ProcessVectorEnv
from deft.envs.serial import SerialVectorEnv
from deft.envs.tabletop.env import CAMERAS
from deft.envs.tabletop.images import TabletopImages
from deft.envs.vector import VectorEnv
from deft.errors import InputError
from deft.machine import available_cores
from deft.models.f1.frames import to_images, to_model
from deft.runs.rollout import rollout
from deft.runs.signals import raise_if_stopped
from deft.training.phases.recorded import split, trained_on

COPIES = 32  # environments, for any number of workers: the order of the images depends on it
HELD_OUT_SEED = 1_000_000  # added to the run's: other scenes
WAIT_INTERVAL = 0.5  # seconds between looks at a source that is waited for
Chunk = np.ndarray | Tensor


class FrameStore:
    """Images uint8 [N, 3, h, w] on a device, filled in order by a thread while others of them are used."""

    def __init__(self, source: Iterator[Chunk], num_frames: int, size: int, device: torch.device) -> None:
        self.frames = torch.zeros(num_frames, 3, size, size, dtype=torch.uint8, device=device)
        self._count = 0
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._fill, args=(source,), name="deft-frames", daemon=True)
        self._thread.start()

    def first(self, count: int) -> Tensor:
        """Wait for the first `count` images and return them."""
        with self._changed:
            while self._count < count:
                raise_if_stopped()
                if self._error is not None:
                    raise self._error
                if not self._thread.is_alive():
                    raise InputError(f"num_frames: {count} images were expected, and there are {self._count}")
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
                    # Blocking copies: images that are counted can be read from any stream.
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
    """Renders images; head and wrist camera alternate."""

    def __init__(self, config: TokenizerTrainingConfig, size: int) -> None:
        self._config = config
        self._size = size
        self.num_frames = config.num_frames
        cores = available_cores()
        self.num_workers = min(COPIES, max(1, cores - 1) if config.num_workers is None else config.num_workers)
        self.fingerprint: int | str = 0
        self.trained_on: dict[str, Any] | None = None
        try:
            self._function()()  # a wrong setting raises an error before a process starts
        except TypeError as error:
            raise InputError(f"env_kwargs: {error}") from None

    def training(self) -> Iterator[Chunk]:
        """All images to learn from, in order, as they are rendered."""
        return self._render(self._config.seed)

    def held_out(self) -> dict[str, Tensor]:
        """Images of other scenes, by camera."""
        count = math.ceil(self._config.held_out_frames / len(CAMERAS))
        found: list[np.ndarray] = []
        with contextlib.closing(self._render(self._config.seed + HELD_OUT_SEED)) as chunks:
            for chunk in chunks:
                raise_if_stopped()
                found.append(chunk)
                if sum(map(len, found)) >= count * len(CAMERAS):
                    break
        images = torch.from_numpy(np.concatenate(found))
        return {name: images[index :: len(CAMERAS)][:count] for index, name in enumerate(CAMERAS)}

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
    """Images of recorded episodes, in the size that the model sees; whole episodes are kept for evaluation."""

    num_workers = 0

    def __init__(self, config: TokenizerTrainingConfig, size: int) -> None:
        assert config.dataset is not None
        self._config = config
        self._size = size
        self._dataset = open_dataset(config.dataset, config.dataset_options)
        self.streams = _image_streams(self._dataset, config.cameras)
        self.fingerprint = self._dataset.fingerprint()
        # The split of a teacher with the same seed: its tokenizer is not trained on the teacher's held-out episodes.
        self._training, self._held_out = split(self._dataset.num_episodes, config.held_out_episodes, config.seed)
        self.trained_on: dict[str, Any] | None = trained_on(self._dataset, self._training)
        total = self._count(self._training)
        self._stride = max(1, math.ceil(total / config.num_frames))
        self.num_frames = sum(self._kept(index, self._stride) for index in self._training) * len(self.streams)

    def training(self) -> Iterator[Chunk]:
        """The images to learn from, episode after episode, those of the cameras one after another."""
        for index in self._training:
            yield torch.cat([images[:: self._stride] for images in self._images(index).values()])

    def held_out(self) -> dict[str, Tensor]:
        """Images of the episodes that are kept out, by camera."""
        stride = max(1, math.ceil(self._count(self._held_out) / self._config.held_out_frames))
        found = [self._images(index) for index in self._held_out]
        return {name or "image": torch.cat([part[name][::stride] for part in found]) for name in self.streams}

    def _count(self, episodes: np.ndarray) -> int:
        return sum(self._kept(index, 1) for index in episodes) * len(self.streams)

    def _kept(self, index: int, stride: int) -> int:
        return math.ceil((int(self._dataset.lengths[index]) + 1) / stride)

    def _images(self, index: int) -> dict[str, Tensor]:
        streams = self._dataset.episode(index).streams
        found = {}
        for name in self.streams:
            images = torch.from_numpy(np.ascontiguousarray(streams[name][:, -3:]))  # the newest of stacked frames
            found[name] = to_images(to_model(images, self._size, name or "the dataset's image"))
        return found


def _image_streams(dataset: Dataset, wanted: tuple[str, ...] | None) -> list[str]:
    """The names of a dataset's image streams; a plain observation has the empty name."""
    space = dataset.observation_space
    parts = space.spaces if isinstance(space, spaces.Dict) else {"": space}
    found = [
        name
        for name, part in parts.items()
        if isinstance(part, spaces.Box) and part.dtype == np.uint8 and len(part.shape) == 3 and part.shape[0] % 3 == 0
    ]
    if not found:
        raise InputError(f"dataset {dataset.name} has no images (uint8 [3, h, w]); it has {space}")
    for name in wanted or ():
        if name not in found:
            raise InputError(f"cameras: dataset {dataset.name} has no {name!r}; it has {', '.join(found) or 'one'}")
    return list(wanted or found)
