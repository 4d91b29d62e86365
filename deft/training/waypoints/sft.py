"""`deft train waypoint-sft`: a camera encoder and a waypoint head, fitted to recorded driving.

A run that is stopped leaves a checkpoint, from which `--resume` continues; a complete one leaves the model alone.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deft import schema
from deft.config.aliases import translate
from deft.config.loading import to_dict
from deft.config.settings import LoggingConfig
from deft.config.waypoint_settings import WaypointSFTConfig
from deft.data.waypoint_recording import WaypointRecording
from deft.envs.waypoints.protocol import displacement_errors
from deft.errors import InputError, Stopped
from deft.models.waypoint import WaypointSFT, WaypointShape
from deft.runs import checkpoint
from deft.runs.compute import choose_device, threads_for
from deft.runs.directory import directory_opener, place_directory
from deft.runs.json_files import write_json
from deft.runs.random_state import seed_everything
from deft.runs.signals import interruptible, raise_if_stopped
from deft.runs.waypoint_files import CONFIG, MODEL, TRAIN_METRICS, check_alone, save_sft
from deft.training.lifecycle import Run, RunSpec
from deft.training.loop import Intervals, Loop, Metrics

CHUNK = 512  # decisions that are validated together
FREE = (
    "output_dir",
    "device",
    "threads",
    "resume",
    "auto_resume",
    "overwrite",
    "view",
    "view_port",
)  # a resumed run may change them


def train_sft(config: WaypointSFTConfig, logging_config: LoggingConfig | None = None) -> dict[str, Any]:
    """Fit the waypoints of the recording (smooth L1 in deviations); validate on whole episodes that are held out."""
    check_alone("waypoint-sft")
    folder = Path(config.output_dir)
    resume_from, _ = place_directory(folder, config.resume, config.auto_resume, config.overwrite)
    if resume_from is None and not config.overwrite and (folder / MODEL).exists():
        raise InputError(f"output_dir: {folder} already holds a {MODEL}; --overwrite replaces it, or give another")
    recording = WaypointRecording.load(config.dataset)
    trainer = WaypointSFTTrainer(config, recording, logging_config, resume_from is None)
    if resume_from is not None:
        trainer.load(resume_from)
    summary = trainer.run.execute(config.num_epochs * trainer.updates_per_epoch)
    metrics = trainer.metrics
    save_sft(trainer.model, folder / MODEL, {"dataset": recording.about, "config": to_dict(config), **metrics[-1]})
    write_json(metrics, folder / TRAIN_METRICS)
    for path in checkpoint.list_checkpoints(folder):
        checkpoint.delete_checkpoint(path)
    return {"checkpoint": str(folder / MODEL), **metrics[-1], **summary}


class WaypointSFTTrainer(Loop):
    """Trains the supervised waypoint policy, one minibatch a step; an epoch ends with a validation."""

    def __init__(
        self,
        config: WaypointSFTConfig,
        recording: WaypointRecording,
        logging_config: LoggingConfig | None = None,
        replaces: bool = False,
    ) -> None:
        self.config, self.recording, self.device = config, recording, choose_device(config.device)
        seed_everything(config.seed)
        shape = WaypointShape(
            recording.camera.shape[-1],
            recording.motion.shape[-1],
            recording.waypoints.shape[1],
            config.encoder_dim,
            tuple(config.hidden_sizes),
        )
        self.model = WaypointSFT(shape).to(self.device)
        self.training, self.held_out = _split(recording, config.holdout, config.seed)
        motion, waypoints = recording.motion[self.training], recording.waypoints[self.training]
        self.model.fit_scales(torch.as_tensor(motion), torch.as_tensor(waypoints))
        target = torch.as_tensor(recording.waypoints, device=self.device)
        self.target = (target - self.model.target_mean) / self.model.target_deviation
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), config.learning_rate, weight_decay=config.weight_decay
        )
        self.updates_per_epoch = math.ceil(len(self.training) / config.batch_size)
        total = config.num_epochs * self.updates_per_epoch
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, total)
        self.generator = np.random.default_rng(config.seed)
        self._at_start = self.generator.bit_generator.state  # of the current epoch
        self._minibatches: list[np.ndarray] = []
        self.metrics: list[dict[str, Any]] = []  # of the complete epochs
        self._losses: list[Tensor] = []  # of the current epoch
        folder = Path(config.output_dir)
        write_settings = functools.partial(write_json, to_dict(config), folder / CONFIG)
        spec = RunSpec(
            seed=config.seed,
            logging_config=logging_config or LoggingConfig.with_view(config),
            config=to_dict(config),
            on_start=directory_opener(folder, replaces, write_settings),
        )
        self.run = Run(self, spec, folder, threads_for(config.threads, self.model, config.batch_size))

    @property
    def global_step(self) -> int:
        """Minibatches trained on so far."""
        return len(self.metrics) * self.updates_per_epoch + len(self._losses)

    num_updates = global_step

    @property
    def is_over(self) -> bool:
        """Whether all epochs are trained and validated."""
        return len(self.metrics) >= self.config.num_epochs

    @property
    def intervals(self) -> Intervals:
        """The metrics of every epoch are logged; a checkpoint is written when the run is stopped."""
        return Intervals(self.updates_per_epoch, 0, 0, 1)

    @property
    def is_midway(self) -> bool:
        """Whether a validation was stopped."""
        return len(self._losses) == self.updates_per_epoch

    def step(self) -> Metrics | None:
        """Train on a minibatch; validate after the last one of an epoch."""
        self.model.train()
        if not self._minibatches:
            self._at_start = self.generator.bit_generator.state
            self._minibatches = np.array_split(self.generator.permutation(self.training), self.updates_per_epoch)
        if len(self._losses) < self.updates_per_epoch:
            self._losses.append(self._update(self._minibatches[len(self._losses)]))
        if len(self._losses) < self.updates_per_epoch:
            return {"loss": self._losses[-1]}
        entry: dict[str, Any] = {"epoch": len(self.metrics) + 1, "loss": float(torch.stack(self._losses).mean())}
        if len(self.held_out):
            try:
                with interruptible(self.stop_requested):
                    entry["ade"], entry["fde"] = self._validate()
            except Stopped:
                return None
        self.metrics.append(entry)
        self._losses, self._minibatches = [], []
        return entry

    def _update(self, rows: np.ndarray) -> Tensor:
        predicted = self.model.normalized(self.model.encode(self._observation(rows)))
        target = self.target[torch.as_tensor(rows, device=self.device)]
        loss = torch.nn.functional.smooth_l1_loss(predicted, target)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        return loss.detach()

    @torch.inference_mode()
    def _validate(self) -> tuple[float, float]:
        """ADE and FDE on the held-out rows, in metres."""
        self.model.eval()
        predicted = []
        for start in range(0, len(self.held_out), CHUNK):
            raise_if_stopped()
            predicted.append(self.model(self._observation(self.held_out[start : start + CHUNK])).numpy(force=True))
        ade, fde = displacement_errors(np.concatenate(predicted), self.recording.waypoints[self.held_out])
        return float(ade.mean()), float(fde.mean())

    def _observation(self, rows: np.ndarray) -> dict[str, Tensor]:
        streams = {schema.CAMERA: self.recording.camera, schema.MOTION: self.recording.motion}
        return {name: torch.as_tensor(values[rows], device=self.device) for name, values in streams.items()}

    def end(self) -> None:
        """Leave the model ready to predict."""
        self.model.eval()

    def summary(self) -> dict[str, Any]:
        """Return the time of training."""
        return {"seconds": round(self.run.seconds, 1)}

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def weights(self) -> Mapping[str, Tensor]:
        """The model's."""
        return self.model.state_dict()

    @property
    def _fixed_settings(self) -> dict[str, Any]:
        """The settings that a resumed run must repeat."""
        return {name: value for name, value in to_dict(self.config).items() if name not in FREE}

    def state_dict(self, after_failure: bool = False) -> dict[str, Any]:
        """Return optimizer, schedule, the generator at the start of the epoch, and its losses."""
        return {
            "settings": self._fixed_settings,
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "generator": self._at_start if self._losses else self.generator.bit_generator.state,
            "metrics": self.metrics,
            "losses": torch.stack(self._losses).cpu() if self._losses else torch.zeros(0),
        }

    def load_state_dict(self, state: dict[str, Any], folder: Path) -> None:
        """Load a state of the same settings, in the middle of an epoch too."""
        saved, _ = translate(WaypointSFTConfig, state["settings"])  # may be written by an earlier version
        for name, value in self._fixed_settings.items():
            if saved.get(name) != value:
                raise InputError(f"resume: {folder} was trained with {name} {saved.get(name)}, not {value}")
        checkpoint.load_weights(self.model, checkpoint.load_part(folder, checkpoint.MODEL), folder)
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.generator.bit_generator.state = state["generator"]
        self.metrics, self._losses = state["metrics"], list(state["losses"].to(self.device))


def _split(recording: WaypointRecording, share: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows for training and for validation; whole episodes, since neighbouring frames are nearly the same."""
    episodes = np.random.default_rng(seed).permutation(np.unique(recording.episode))
    chosen = episodes[: round(share * len(episodes))]
    if len(chosen) == len(episodes):
        raise InputError(f"holdout: {share:g} of {len(episodes)} episodes leaves none to train on")
    is_held_out = np.isin(recording.episode, chosen)
    return np.flatnonzero(~is_held_out), np.flatnonzero(is_held_out)
