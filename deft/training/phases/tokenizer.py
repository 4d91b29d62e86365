"""`deft train tokenizer`: fits the image tokenizer of an F1 model to pictures, and says how well it repeats others.

The run folder holds `config.json`, checkpoints, metrics, `samples/` (held-out pictures above what became of them),
`results.json` and `tokenizer.safetensors`, which a model names as its `tokenizer_weights`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import platform
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from deft.config.loading import to_dict
from deft.config.settings import LoggingConfig
from deft.config.tokenizer_settings import TokenizerTrainingConfig
from deft.data.datasets.dataset import same_fingerprint
from deft.errors import InputError, RunError, Stopped
from deft.evaluation.image_quality import psnr, ssim
from deft.models.f1.codebook import CodebookAverages
from deft.models.f1.config import read_f1_config
from deft.models.f1.frames import to_model, to_pictures
from deft.models.f1.loading import fill_tokenizer, find_tokenizer
from deft.models.f1.vq import MultiScaleTokenizer
from deft.ownership import record
from deft.runs import checkpoint
from deft.runs.compute import Threads, choose_device, thread_counts
from deft.runs.directory import remove_run
from deft.runs.intervals import crossed
from deft.runs.json_files import write_json
from deft.runs.logging import RunLogger, logged_evaluations
from deft.runs.random_state import seed_everything
from deft.runs.signals import StopSignal, interruptible, raise_if_stopped
from deft.training.phases.frames import DatasetFrames, FrameStore, TabletopFrames

log = logging.getLogger(__name__)
CONFIG, RESULTS, WEIGHTS, SAMPLES = "config.json", "results.json", "tokenizer.safetensors", "samples"
RISING_UPDATES = 50  # until the step size is at its highest
STORE_START = 1 / 8  # share of the pictures that training waits for; the rest joins until half of the updates are done
START_FRAMES = 768  # pictures that linear path and codebook start from
REVIVE_UNTIL = 0.8  # share of the updates after which codes keep their places
CHUNK = 128  # pictures that are evaluated together
SAMPLE_COLUMNS = 12
FIXED = (
    "model",
    "dataset",
    "dataset_options",
    "cameras",
    "num_frames",
    "batch_size",
    "pictures_per_scene",
    "env_kwargs",
    "seed",
)


def train_tokenizer(config: TokenizerTrainingConfig, logging_config: LoggingConfig | None = None) -> dict[str, Any]:
    """Train as configured, evaluate, and write the tokenizer; returns the figures."""
    folder = Path(config.output_dir)
    resume_from = _place(config, folder)
    size = read_f1_config(config.model).tokenizer.image_size
    source = TabletopFrames(config, size) if config.dataset is None else DatasetFrames(config, size)
    trainer = TokenizerTrainer(config, source, resumes=resume_from is not None)
    if resume_from is not None:
        trainer.load(resume_from)
    threads = trainer.threads.applied(
        # On ARM, oneDNN takes 1.3 to 1.5 times as long for convolutions as narrow as these.
        small_matrices=trainer.device.type == "cpu" and platform.machine() == "aarch64",
    )
    stop, started = StopSignal(), time.monotonic()
    with stop, threads, checkpoint.folder_lock(folder):
        if resume_from is None:
            remove_run(folder)
        write_settings = partial(write_json, to_dict(config), folder / CONFIG)
        write_settings()
        settings, total, reached = logging_config or LoggingConfig(), config.num_updates, trainer.num_updates
        with (
            RunLogger(
                folder, settings, total, reached, to_dict(config), unit="updates", write_start=write_settings
            ) as run_log,
            contextlib.suppress(Stopped),
            interruptible(stop),
        ):
            held_out = source.held_out()
            store = FrameStore(source.training(), source.num_frames, size, trainer.device)
            try:
                results = trainer.run(store, held_out, run_log)
            finally:
                store.close()
    stop.reraise()
    results |= {"seconds": round(time.monotonic() - started, 1), "frames": source.num_frames}
    results |= {"weights": str(folder / WEIGHTS)}
    write_json(results, folder / RESULTS)
    return results


class TokenizerTrainer:
    """One tokenizer in training: the model, its optimizer and codebook, and the loop."""

    def __init__(
        self, config: TokenizerTrainingConfig, source: TabletopFrames | DatasetFrames, resumes: bool = False
    ) -> None:
        self.config = config
        self.folder = Path(config.output_dir)
        self.device = choose_device(config.device)
        self.fingerprint, self.trained_on = source.fingerprint, source.trained_on
        seed_everything(config.seed)
        self.model = MultiScaleTokenizer(read_f1_config(config.model).tokenizer)
        if config.init_weights is not None and not resumes:
            fill_tokenizer(self.model, find_tokenizer(config.init_weights, "init_weights"))
        self.model.to(self.device)
        if self.device.type == "cuda":
            self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.codebook = CodebookAverages(self.model.quantize)
        learning = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(
            learning, config.learning_rate, betas=(0.9, 0.99), weight_decay=1e-4, fused=self.device.type == "cuda"
        )
        self.generator = torch.Generator().manual_seed(config.seed)  # on the CPU: one sequence on every device
        self.num_updates = self._saved_at = 0
        self.autocast = _autocast_type(config.precision, self.device)
        self.threads = Threads(thread_counts(config.threads))

    @property
    def progress(self) -> float:
        """Share of the updates that are done."""
        return self.num_updates / self.config.num_updates

    def run(self, store: FrameStore, held_out: dict[str, Tensor], run_log: RunLogger) -> dict[str, Any]:
        """Update to the end; what is due is logged, saved and then evaluated on the way.

        A stop request saves and raises `Stopped` between two updates, while frames are waited for, or between two parts
        of an evaluation. An evaluation that was stopped is made when the run is resumed.
        """
        config = self.config
        results = self._evaluate_if_due(held_out, run_log) if self.num_updates else {}
        try:
            while self.num_updates < config.num_updates:
                raise_if_stopped()
                self.threads.begin()
                metrics = self.update(store)
                self.threads.tick(1)
                step, is_last = self.num_updates, self.num_updates == config.num_updates
                run_log.progress(step)
                if crossed(step - 1, step, config.log_freq) or is_last:
                    values = {f"train/{name}": float(value) for name, value in metrics.items()}
                    if not all(map(math.isfinite, values.values())):
                        raise RunError(
                            f"the tokenizer's loss is not finite at update {step}; lower --learning-rate "
                            f"({config.learning_rate:g})"
                        )
                    run_log.log_metrics(step, values)
                if crossed(step - 1, step, config.save_freq) or self._is_evaluated:
                    run_log.flush()
                    self.save(results)
                results = self._evaluate_if_due(held_out, run_log) or results
        except Stopped:
            if self.num_updates > self._saved_at:
                run_log.flush()
                self.save(results)
            raise
        self.write_weights(results)
        return {"updates": self.num_updates, **results}

    @property
    def _is_evaluated(self) -> bool:
        """Whether these weights are to be evaluated: every `eval_freq` updates, and at the end."""
        step, config = self.num_updates, self.config
        return (crossed(step - 1, step, config.eval_freq) or step == config.num_updates) and self.is_coding

    def _evaluate_if_due(self, held_out: dict[str, Tensor], run_log: RunLogger) -> dict[str, float]:
        """Evaluate, log it and write samples; where it is in the metrics already, only return what was found."""
        if not self._is_evaluated:
            return {}
        step, logged = self.num_updates, logged_evaluations(self.folder, self.num_updates)
        if logged and logged[-1]["step"] == step:
            return {name: value for name, value in logged[-1].items() if name not in ("type", "step", "time")}
        results = self.evaluate(held_out)
        run_log.log_evaluation(step, results)
        log.info("update %d: %s", step, ", ".join(f"{name} {value:.4g}" for name, value in results.items()))
        self.write_samples(held_out)
        return results

    @property
    def is_coding(self) -> bool:
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
        with self._precision():
            if is_plain:
                made, quantization = self.model.decode_features(self.model.features(frames)), frames.new_zeros(())
            else:
                found = self.model(frames)
                made, quantization = found.frames, found.quantization_loss
        if not is_plain:
            self.codebook.update(found.features)
            is_due = crossed(self.num_updates, self.num_updates + 1, config.revive_interval)
            if is_due and self.progress < REVIVE_UNTIL:
                self.codebook.revive(found.features, self.generator)
        error = made.float() - frames
        edges = (error.diff(dim=-1).abs().mean() + error.diff(dim=-2).abs().mean()) / 2
        loss = error.abs().mean() + error.square().mean() + config.gradient_weight * edges + quantization
        rate = config.learning_rate * min(1.0, (self.num_updates + 1) / RISING_UPDATES)
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
        is_new = self.config.init_weights is None
        if self.model.config.linear_path and is_new:
            self.model.start_linear_path(frames)
        features = torch.cat([self.model.features(part).float() for part in frames.split(CHUNK)])
        if is_new:
            self.codebook.start(features, self.generator)
        else:
            self.codebook.begin(features)
        # The counts of the start are of many pictures, those to come of a batch.
        self.codebook.rescale(self.config.batch_size / count)

    def _draw(self, store: FrameStore, count: int) -> Tensor:
        """A batch of frames in -1 … 1, of the pictures that are to be there by this update."""
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
        """Each picture [B, 3, h, w] moved by a number of pixels of its own, its edges repeated."""
        most, (count, _, height, width) = self.config.shift_augmentation, frames.shape
        by = torch.randint(-most, most + 1, (2, count, 1), generator=self.generator).to(self.device)
        rows = (torch.arange(height, device=self.device) + by[0]).clamp(0, height - 1)  # [B, h]
        columns = (torch.arange(width, device=self.device) + by[1]).clamp(0, width - 1)
        places = torch.arange(count, device=self.device)
        return frames.permute(0, 2, 3, 1)[places[:, None, None], rows[:, :, None], columns[:, None]].permute(0, 3, 1, 2)

    def _precision(self) -> contextlib.AbstractContextManager[Any]:
        if self.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, self.autocast)

    @torch.inference_mode()
    def reconstruct(self, pictures: Tensor) -> tuple[Tensor, Tensor]:
        """What becomes of uint8 pictures [B, 3, h, w], and their codes [B, L]; on the CPU."""
        made, codes = [], []
        for part in pictures.split(CHUNK):
            raise_if_stopped()
            found = self.model.encode(to_model(part.to(self.device), self.model.config.image_size, "frames"))
            codes.append(found.cpu())
            made.append(to_pictures(self.model.decode(found)).cpu())
        return torch.cat(made), torch.cat(codes)

    def evaluate(self, held_out: dict[str, Tensor]) -> dict[str, float]:
        """PSNR and SSIM, over all cameras and for each, and how many codes are used how evenly."""
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
        """Held-out pictures, evenly chosen, above their reconstructions."""
        from PIL import Image

        rows = []
        for pictures in held_out.values():
            chosen = pictures[np.linspace(0, len(pictures) - 1, SAMPLE_COLUMNS).astype(int)]
            for shown in (chosen, self.reconstruct(chosen)[0]):
                rows.append(torch.cat(list(shown.permute(0, 2, 3, 1)), 1))  # [h, columns · w, 3]
        path = self.folder / SAMPLES / f"update_{self.num_updates}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        picture = Image.fromarray(torch.cat(rows).numpy())
        picture.resize((2 * picture.width, 2 * picture.height), Image.Resampling.NEAREST).save(path)
        return record(path)

    def write_weights(self, results: dict[str, Any]) -> None:
        """The file that `load_tokenizer` reads, in half precision, with the figures in its header."""
        tensors = {name: value.detach().cpu().half().contiguous() for name, value in self.model.state_dict().items()}
        unfinished = self.folder / f".{WEIGHTS}.{os.getpid()}"
        about = {"updates": self.num_updates, "model": self.config.model, **results}
        if self.trained_on is not None:
            about["trained_on"] = self.trained_on
        save_file(tensors, unfinished, {name: json.dumps(value) for name, value in about.items()})
        record(unfinished.replace(self.folder / WEIGHTS))

    def save(self, results: dict[str, Any]) -> Path:
        """A checkpoint, from which training goes on as if it had not stopped."""
        state = {
            "num_updates": self.num_updates,
            "threads": self.threads.state_dict(),
            "settings": {name: to_dict(self.config)[name] for name in FIXED},
            "fingerprint": self.fingerprint,
            "optimizer": self.optimizer.state_dict(),
            "codebook": self.codebook.state_dict(),
            "generator": self.generator.get_state(),
        }
        weights = {name: value.detach().cpu() for name, value in self.model.state_dict().items()}
        path = checkpoint.save_checkpoint(self.folder, self.num_updates, weights, state, results)
        self._saved_at = self.num_updates
        checkpoint.prune_checkpoints(self.folder, self.config.keep_checkpoints, self.num_updates)
        return path

    def load(self, path: Path) -> None:
        """Go on from a checkpoint of the same pictures and model."""
        state = checkpoint.load_training_state(path)
        own = {name: to_dict(self.config)[name] for name in FIXED}
        for name, value in own.items():
            if name not in state["settings"] or state["settings"][name] != value:
                raise InputError(f"resume: {path} was trained with {name} {state['settings'].get(name)}, not {value}")
        if not same_fingerprint(state["fingerprint"], self.fingerprint):
            raise InputError(f"resume: {path} was trained on other data than {self.config.dataset} holds now")
        checkpoint.load_weights(self.model, checkpoint.load_part(path, checkpoint.MODEL), path)
        self.optimizer.load_state_dict(state["optimizer"])
        self.codebook.load_state_dict(state["codebook"])
        self.generator.set_state(state["generator"])
        self.num_updates = self._saved_at = state["num_updates"]
        self.threads.load_state_dict(state.get("threads"))


def perplexity(shares: Tensor) -> float:
    """exp of the entropy of shares that sum to 1: how many codes there are in effect."""
    return math.exp(float(torch.special.entr(shares.double()).sum()))


def _autocast_type(precision: str, device: torch.device) -> torch.dtype | None:
    if precision == "auto":
        precision = "bf16" if device.type == "cuda" and torch.cuda.is_bf16_supported() else "fp32"
    return torch.bfloat16 if precision == "bf16" else None


def _place(config: TokenizerTrainingConfig, folder: Path) -> Path | None:
    """The checkpoint to go on from; a run that would be replaced by accident is refused."""
    existing = checkpoint.list_checkpoints(folder)
    if config.resume is not None or (config.auto_resume and existing):
        return checkpoint.resumable(config.resume or folder)
    checkpoint.check_replaceable(existing, config.overwrite, "--auto-resume", "--output-dir")
    return None
