"""Images for the image tokenizer: rendered by workers while it trains, or read from a dataset.

`deft.training.phases.tokenizer` uses them. The images and their order depend on the settings alone and never on timing,
so that a resumed run equals an uninterrupted one.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deft.config.f1_settings import TokenizerTrainingConfig
from deft.data.datasets import open_dataset
from deft.envs.process import ProcessVectorEnv
from deft.envs.serial import SerialVectorEnv
from deft.envs.tabletop.env import CAMERAS
from deft.envs.tabletop.images import TabletopImages
from deft.envs.vector import VectorEnv, VectorStep
from deft.errors import InputError
from deft.machine import available_cores
from deft.models.f1.frames import to_images, to_model
from deft.runs.rollout import rollout
from deft.runs.signals import raise_if_stopped
from deft.training.phases.recorded import check_streams, image_streams, last_picture, split, trained_on

COPIES = 32  # environments, for any number of workers: the order of the images depends on it
HELD_OUT_SEED = 1_000_000  # added to the run's: other scenes
WAIT_INTERVAL = 0.5  # seconds between looks at a source that is waited for
Chunk = np.ndarray | Tensor


class FrameStore:
    """Images uint8 [N, 3, h, w] on a device, filled in order; a thread fetches the next ones while these are used."""

    def __init__(self, source: Generator[Chunk], num_frames: int, size: int, device: torch.device) -> None:
        self.frames = torch.zeros(num_frames, 3, size, size, dtype=torch.uint8, device=device)
        self._count, self._source = 0, source
        self._thread = ThreadPoolExecutor(1, "deft-frames")
        self._next = self._thread.submit(next, source, None)

    def first(self, count: int) -> Tensor:
        """Wait for the first `count` images and return them."""
        while self._count < count:
            raise_if_stopped()
            if not wait([self._next], WAIT_INTERVAL).done:
                continue
            chunk = self._next.result()
            if chunk is None:
                raise InputError(f"num_frames: {count} images were expected, and there are {self._count}")
            rows = self.frames[self._count :][: len(chunk)]
            rows.copy_(torch.as_tensor(chunk[: len(rows)]))
            self._count += len(rows)
            self._next = self._thread.submit(next, self._source, None)
        return self.frames[:count]

    def close(self) -> None:
        """Stop fetching; the environments are closed by the thread that made them."""
        self._thread.submit(self._source.close)
        self._thread.shutdown()


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

    def training(self) -> Generator[Chunk]:
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

    def _render(self, seed: int) -> Any:
        functions = [self._function()] * COPIES
        is_serial = not self.num_workers
        env: VectorEnv = (
            SerialVectorEnv(functions) if is_serial else ProcessVectorEnv(functions, num_workers=self.num_workers)
        )
        actions = np.zeros(COPIES, np.int64)
        steps: list[VectorStep] = []
        try:
            observation: Any = env.reset(seed)
            while True:
                yield observation.reshape(-1, *observation.shape[2:]).copy()
                observation = rollout(env, lambda _: actions, lambda _, __, step: steps.append(step), observation, 1)
                final: Any = steps.pop().final_observation  # the last images of scenes that ended
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
        check_streams(self._dataset, "cameras", config.cameras or ())
        self.streams = list(config.cameras or image_streams(self._dataset))
        self.fingerprint = self._dataset.fingerprint()
        # The split of a teacher with the same seed: its tokenizer is not trained on the teacher's held-out episodes.
        self._training, self._held_out = split(self._dataset.num_episodes, config.held_out_episodes, config.seed)
        self.trained_on: dict[str, Any] | None = trained_on(self._dataset, self._training)
        total = self._count(self._training)
        self._stride = max(1, math.ceil(total / config.num_frames))
        self.num_frames = sum(self._kept(index, self._stride) for index in self._training) * len(self.streams)

    def training(self) -> Generator[Chunk]:
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
            images = torch.from_numpy(last_picture(streams[name]))
            found[name] = to_images(to_model(images, self._size, name or "the dataset's image"))
        return found
