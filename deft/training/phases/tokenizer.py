"""`deft train tokenizer`: fits the image tokenizer of an F1 model, and measures how well it reconstructs other images.

The run directory holds `config.json`, checkpoints, metrics, `samples/` (held-out images above their reconstructions),
`results.json` and `tokenizer.safetensors`, which a model names as its `tokenizer_weights`.

Images are rendered by workers while it trains, or read from a dataset. The images and their order depend on the
settings alone and never on timing, so that a resumed run equals an uninterrupted one.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import platform
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from deft.config.f1_settings import TokenizerTrainingConfig
from deft.config.loading import to_dict
from deft.config.settings import LoggingConfig
from deft.data.datasets import open_dataset
from deft.envs.process import ProcessVectorEnv
from deft.envs.serial import SerialVectorEnv
from deft.envs.tabletop.env import CAMERAS
from deft.envs.tabletop.images import TabletopImages
from deft.envs.vector import VectorEnv, VectorStep
from deft.errors import InputError, RunError, Stopped
from deft.evaluation.image_quality import psnr, ssim
from deft.machine import available_cores
from deft.models.f1.config import read_f1_config
from deft.models.f1.frames import to_images, to_model
from deft.models.f1.loading import fill_tokenizer, find_tokenizer
from deft.models.f1.vq import CodebookAverages, MultiScaleTokenizer
from deft.ownership import record
from deft.runs import checkpoint
from deft.runs.compute import Threads, autocast, choose_device, thread_counts
from deft.runs.directory import directory_opener, place_directory
from deft.runs.json_files import write_json
from deft.runs.random_state import seed_everything
from deft.runs.rollout import rollout
from deft.runs.signals import interruptible, raise_if_stopped
from deft.training.lifecycle import Run, RunSpec
from deft.training.loop import Intervals, Loop, Metrics, crossed
from deft.training.phases.recorded import check_streams, image_streams, last_picture, split, trained_on

CONFIG, RESULTS, WEIGHTS, SAMPLES = "config.json", "results.json", "tokenizer.safetensors", "samples"
WARMUP_UPDATES = 50  # until the learning rate is at its highest
STORE_START = 1 / 8  # fraction of the images that training waits for; the rest is added until half of the updates
START_FRAMES = 768  # images that linear path and codebook start from
REVIVE_UNTIL = 0.8  # fraction of the updates after which unused codes are no longer replaced
CHUNK = 128  # images that are evaluated together
SAMPLE_COLUMNS = 12
COPIES = 32  # environments, for any number of workers: the order of the images depends on it
HELD_OUT_SEED = 1_000_000  # added to the run's: other scenes
WAIT_INTERVAL = 0.5  # seconds between looks at a source that is waited for
FIXED = (
    "model", "dataset", "dataset_options", "cameras", "num_frames", "batch_size", "pictures_per_scene", "env_kwargs",
    "seed",
)  # fmt: skip

Chunk = np.ndarray | Tensor


def train_tokenizer(config: TokenizerTrainingConfig, logging_config: LoggingConfig | None = None) -> dict[str, Any]:
    """Train as configured, evaluate, write the tokenizer, and return the results."""
    folder = Path(config.output_dir)
    resume_from, _ = place_directory(folder, config.resume, config.auto_resume, config.overwrite)
    size = read_f1_config(config.model).tokenizer.image_size
    source = TabletopFrames(config, size) if config.dataset is None else DatasetFrames(config, size)
    write_settings = functools.partial(write_json, to_dict(config), folder / CONFIG)
    on_start = directory_opener(folder, resume_from is None, write_settings)
    logging_config = logging_config or LoggingConfig.with_view(config)
    spec = RunSpec(logging_config=logging_config, on_start=on_start)
    trainer = TokenizerTrainer(config, source, spec, resumes=resume_from is not None)
    if resume_from is not None:
        trainer.load(resume_from)
    summary = trainer.run.execute(config.num_updates, evaluates_last=True)
    trainer.write_weights(trainer.last_evaluation)
    results = {**summary, **trainer.last_evaluation, "frames": source.num_frames, "weights": str(folder / WEIGHTS)}
    write_json(results, folder / RESULTS)
    return results


class TokenizerTrainer(Loop):
    """Trains one tokenizer: the model, its optimizer and its codebook."""

    def __init__(
        self,
        config: TokenizerTrainingConfig,
        source: TabletopFrames | DatasetFrames,
        spec: RunSpec | None = None,
        resumes: bool = False,
    ) -> None:
        self.config, self.source = config, source
        self.device = choose_device(config.device)
        spec = spec or RunSpec()
        spec.seed, spec.config = config.seed, to_dict(config)
        self.run = Run(self, spec, Path(config.output_dir), Threads(thread_counts(config.threads)))
        seed_everything(config.seed)
        self.model = MultiScaleTokenizer(read_f1_config(config.model).tokenizer)
        if config.init_weights is not None and not resumes:
            fill_tokenizer(self.model, find_tokenizer(config.init_weights, "init_weights"))
        self.model.to(self.device)
        if self.device.type == "cuda":
            self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.codebook = CodebookAverages(self.model.quantize)
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(
            trained, config.learning_rate, betas=(0.9, 0.99), weight_decay=1e-4, fused=self.device.type == "cuda"
        )
        self.generator = torch.Generator().manual_seed(config.seed)  # on the CPU: one sequence on every device
        self.num_updates = 0
        is_fast = config.precision == "auto" and self.device.type == "cuda" and torch.cuda.is_bf16_supported()
        self.autocast_dtype = torch.bfloat16 if is_fast or config.precision == "bf16" else None
        self._store: FrameStore | None = None

    @property
    def global_step(self) -> int:
        """Updates so far."""
        return self.num_updates

    @property
    def progress(self) -> float:
        """The fraction of the updates that are done."""
        return self.num_updates / self.config.num_updates

    @property
    def intervals(self) -> Intervals:
        """As in the config."""
        own = self.config
        return Intervals(own.log_freq, own.eval_freq, own.save_freq, own.keep_checkpoints)

    @property
    def uses_small_matrices(self) -> bool:
        """On ARM, oneDNN takes 1.3 to 1.5 times as long for convolutions as narrow as these."""
        return self.device.type == "cpu" and platform.machine() == "aarch64"

    # -- an iteration --------------------------------------------------------------------------------------------------

    def step(self) -> Metrics | None:
        """Update; a stop request also ends the wait for images."""
        try:
            with interruptible(self.stop_requested):
                if self._store is None:
                    size = self.model.config.image_size
                    self._store = FrameStore(self.source.training(), self.source.num_frames, size, self.device)
                return self.update(self._store)
        except Stopped:
            return None

    def halt(self) -> None:
        """End the processes that render."""
        if self._store is not None:
            self._store.close()
            self._store = None

    def is_logged(self, previous: int) -> bool:
        """Every `log_freq` updates, and at the end."""
        return super().is_logged(previous) or self.num_updates == self.config.num_updates

    def logged(self, metrics: Metrics) -> Metrics:
        """The metrics, as `train/…`."""
        return {f"train/{name}": value for name, value in metrics.items()}

    def check_metrics(self, metrics: Metrics) -> None:
        """Raise an error if the loss is not finite."""
        if not all(math.isfinite(float(value)) for value in metrics.values()):
            raise RunError(
                f"the tokenizer's loss is not finite at update {self.num_updates}; lower --learning-rate "
                f"({self.config.learning_rate:g})"
            )

    def summary(self) -> dict[str, Any]:
        """Return what a command reports at the end, beside the evaluation."""
        return {"updates": self.num_updates, "seconds": round(self.run.seconds, 1)}

    # -- evaluation ----------------------------------------------------------------------------------------------------

    @functools.cached_property
    def held_out(self) -> dict[str, Tensor]:
        """Held-out images, by camera."""
        return self.source.held_out()

    def start_evaluation(self, video: Path | None) -> list[tuple[int, dict[str, Any]]]:
        """Evaluate, and write samples."""
        with interruptible(self.run.stop):
            results = self.evaluate(self.held_out)
            self.write_samples(self.held_out)
        return [(self.num_updates, results)]

    @property
    def is_evaluated(self) -> bool:
        """Whether the decoder sees codes yet."""
        return self.num_updates > self._plain_updates

    @property
    def _plain_updates(self) -> int:
        if self.model.config.linear_path or self.config.init_weights is not None:  # a good start by itself
            return 0
        return min(round(self.config.plain_share * self.config.num_updates), self.config.num_updates - 1)

    def update(self, store: FrameStore) -> dict[str, Tensor]:
        """One step of the optimizer and of the codebook."""
        config = self.config
        frames = self._draw(store, config.batch_size)
        if self.num_updates == self._plain_updates:
            self._start_coding(store)
        is_plain = self.num_updates < self._plain_updates
        with autocast(self.device, self.autocast_dtype):
            if is_plain:
                made, quantization = self.model.decode_features(self.model.features(frames)), frames.new_zeros(())
            else:
                found = self.model(frames)
                made, quantization = found.frames, found.quantization_loss
        if not is_plain:
            self.codebook.update(found.features)
            is_due = crossed(self.num_updates, self.num_updates + 1, config.revive_interval)
            if is_due and self.progress < REVIVE_UNTIL:
                self.codebook.reset_unused(found.features, self.generator)
        error = made.float() - frames
        edges = (error.diff(dim=-1).abs().mean() + error.diff(dim=-2).abs().mean()) / 2
        loss = error.abs().mean() + error.square().mean() + config.gradient_weight * edges + quantization
        rate = config.learning_rate * min(1.0, (self.num_updates + 1) / WARMUP_UPDATES)
        rate *= 0.5 + 0.5 * math.cos(math.pi * self.progress)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.num_updates += 1
        return {
            "loss": loss.detach(),
            "pixel_error": error.detach().abs().mean(),
            "quantization_loss": quantization.detach(),
            "codes_in_use": (self.codebook.counts > 0.2 * self.codebook.counts.mean()).sum(),
        }

    @torch.no_grad()
    def _start_coding(self, store: FrameStore) -> None:
        count = min(START_FRAMES, len(store.frames))
        frames = self._draw(store, count)
        if self.model.config.linear_path and self.config.init_weights is None:
            self.model.start_linear_path(frames)
        features = torch.cat([self.model.features(part).float() for part in frames.split(CHUNK)])
        if self.config.init_weights is None:
            self.codebook.initialize(features, self.generator)
        else:
            self.codebook.initialize_counts(features)
        # These counts are of many images, later ones of a batch.
        self.codebook.rescale(self.config.batch_size / count)

    def _draw(self, store: FrameStore, count: int) -> Tensor:
        """Return a batch of frames in -1 … 1, of the images that are available by this update."""
        total = len(store.frames)
        first = min(total, max(START_FRAMES, round(STORE_START * total)))
        available = first + round((total - first) * min(1.0, 2 * self.progress))
        pictures = store.first(available)  # may wait, and be stopped: nothing is drawn before it
        chosen = torch.randint(available, (count,), generator=self.generator)
        pictures = pictures[chosen.to(self.device)]
        frames = to_model(pictures, self.model.config.image_size, "frames")
        if self.config.color_jitter:
            scale = 1 + self.config.color_jitter * (2 * torch.rand(count, 3, 1, 1, generator=self.generator) - 1)
            frames = ((frames + 1) * scale.to(self.device) - 1).clamp(-1, 1)
        if self.config.shift_augmentation:
            frames = self._shifted(frames)
        return frames.contiguous(memory_format=torch.channels_last) if self.device.type == "cuda" else frames

    def _shifted(self, frames: Tensor) -> Tensor:
        """Shift each image [B, 3, h, w] by its own number of pixels, with repeated edges."""
        most, (count, _, height, width) = self.config.shift_augmentation, frames.shape
        by = torch.randint(-most, most + 1, (2, count, 1), generator=self.generator).to(self.device)
        rows = (torch.arange(height, device=self.device) + by[0]).clamp(0, height - 1)  # [B, h]
        columns = (torch.arange(width, device=self.device) + by[1]).clamp(0, width - 1)
        images = torch.arange(count, device=self.device)
        return frames.permute(0, 2, 3, 1)[images[:, None, None], rows[:, :, None], columns[:, None]].permute(0, 3, 1, 2)

    @torch.inference_mode()
    def reconstruct(self, pictures: Tensor) -> tuple[Tensor, Tensor]:
        """Return reconstructions of uint8 images [B, 3, h, w], and their codes [B, L], on the CPU."""
        made, codes = [], []
        for part in pictures.split(CHUNK):
            raise_if_stopped()
            found = self.model.encode(to_model(part.to(self.device), self.model.config.image_size, "frames"))
            codes.append(found.cpu())
            made.append(to_images(self.model.decode(found)).cpu())
        return torch.cat(made), torch.cat(codes)

    def evaluate(self, held_out: dict[str, Tensor]) -> dict[str, float]:
        """Return PSNR and SSIM over all cameras and for each, and how many codes are used how evenly."""
        results: dict[str, float] = {}
        quality, codes = [], []
        for name, pictures in held_out.items():
            made, found = self.reconstruct(pictures)
            quality.append(torch.stack([psnr(pictures, made), ssim(pictures, made)]))
            codes.append(found)
            results |= {f"psnr_{name}": float(quality[-1][0].mean()), f"ssim_{name}": float(quality[-1][1].mean())}
        joined, size = torch.cat(quality, 1).mean(1), self.model.config.codebook_size
        use = torch.bincount(torch.cat(codes).flatten(), minlength=size) / torch.cat(codes).numel()
        return {
            "psnr": float(joined[0]),
            "ssim": float(joined[1]),
            "perplexity": perplexity(use),
            "codes_used": float((use > 0).sum()),
            **results,
        }

    def write_samples(self, held_out: dict[str, Tensor]) -> Path:
        """Write held-out images, evenly spaced, above their reconstructions."""
        from PIL import Image

        rows = []
        for pictures in held_out.values():
            chosen = pictures[np.linspace(0, len(pictures) - 1, SAMPLE_COLUMNS).astype(int)]
            for shown in (chosen, self.reconstruct(chosen)[0]):
                rows.append(torch.cat(list(shown.permute(0, 2, 3, 1)), 1))  # [h, columns · w, 3]
        path = self.run_dir / SAMPLES / f"update_{self.num_updates}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        picture = Image.fromarray(torch.cat(rows).numpy())
        picture.resize((2 * picture.width, 2 * picture.height), Image.Resampling.NEAREST).save(path)
        return record(path)

    def write_weights(self, results: dict[str, Any]) -> None:
        """Write the file that `fill_tokenizer` reads, in half precision, with the results in its header."""
        tensors = {name: value.detach().cpu().half().contiguous() for name, value in self.model.state_dict().items()}
        unfinished = self.run_dir / f".{WEIGHTS}.{os.getpid()}"
        about = {"updates": self.num_updates, "model": self.config.model, **results}
        if self.source.trained_on is not None:
            about["trained_on"] = self.source.trained_on
        save_file(tensors, unfinished, {name: json.dumps(value) for name, value in about.items()})
        record(unfinished.replace(self.run_dir / WEIGHTS))

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def weights(self) -> Mapping[str, Tensor]:
        """The model's."""
        return self.model.state_dict()

    def state_dict(self, after_failure: bool = False) -> dict[str, Any]:
        """Return optimizer, codebook and counters, and what identifies the images."""
        return {
            "num_updates": self.num_updates,
            "settings": {name: to_dict(self.config)[name] for name in FIXED},
            "fingerprint": self.source.fingerprint,
            "optimizer": self.optimizer.state_dict(),
            "codebook": self.codebook.state_dict(),
            "generator": self.generator.get_state(),
        }

    def load_state_dict(self, state: dict[str, Any], folder: Path) -> None:
        """Load a state of the same images and model."""
        for name, value in to_dict(self.config).items():
            if name in FIXED and state["settings"].get(name) != value:
                raise InputError(f"resume: {folder} was trained with {name} {state['settings'].get(name)}, not {value}")
        if state["fingerprint"] != self.source.fingerprint:
            raise InputError(f"resume: {folder} was trained on other data than {self.config.dataset} holds now")
        checkpoint.load_weights(self.model, checkpoint.load_part(folder, checkpoint.MODEL), folder)
        self.optimizer.load_state_dict(state["optimizer"])
        self.codebook.load_state_dict(state["codebook"])
        self.generator.set_state(state["generator"])
        self.num_updates = state["num_updates"]


def perplexity(shares: Tensor) -> float:
    """Return exp of the entropy of fractions that sum to 1: the effective number of codes."""
    return math.exp(float(torch.special.entr(shares.double()).sum()))


# -- images -----------------------------------------------------------------------------------------------------------


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
        except (TypeError, InputError) as error:
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
        return functools.partial(TabletopImages, self._size, config.pictures_per_scene, **config.env_kwargs)

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
