"""`deft train waypoint-sft`: a camera encoder and a waypoint head, fitted to recorded driving.

A run that is stopped leaves a checkpoint, which `--resume` continues from; a complete one leaves the model alone.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deft import schema
from deft.config.aliases import translate
from deft.config.loading import to_dict
from deft.config.waypoint_settings import WaypointSFTConfig
from deft.data.waypoint_recording import WaypointRecording
from deft.envs.waypoints.protocol import displacement_errors
from deft.errors import InputError, Stopped
from deft.models.waypoint import WaypointSFT, WaypointShape
from deft.runs import checkpoint
from deft.runs.compute import choose_device, threads_for
from deft.runs.json_files import write_json
from deft.runs.random_state import seed_everything
from deft.runs.signals import StopSignal, interruptible, raise_if_stopped
from deft.runs.waypoint_files import CONFIG, MODEL, TRAIN_METRICS, check_alone, save_sft

log = logging.getLogger(__name__)
CHUNK = 512  # decisions that are looked at together in validation
FREE = (
    "output_dir",
    "device",
    "threads",
    "resume",
    "auto_resume",
    "overwrite",
)  # settings that a resumed run may change


def train_sft(config: WaypointSFTConfig) -> dict[str, Any]:
    """Fit the waypoints of the recording, smooth L1 in deviations; validate on whole episodes that were kept out."""
    check_alone("waypoint-sft")
    folder = Path(config.output_dir)
    resume_from = _place(config, folder)
    recording = WaypointRecording.load(config.dataset)
    device = choose_device(config.device)
    seed_everything(config.seed)
    model = WaypointSFT(
        WaypointShape(
            recording.camera.shape[-1],
            recording.motion.shape[-1],
            recording.waypoints.shape[1],
            config.encoder_dim,
            tuple(config.hidden_sizes),
        )
    ).to(device)
    training, held_out = _split(recording, config.holdout, config.seed)
    model.fit_scales(torch.as_tensor(recording.motion[training]), torch.as_tensor(recording.waypoints[training]))
    started, stop = time.monotonic(), StopSignal()
    threads = threads_for(config.threads, model, config.batch_size).applied()
    with stop, threads, checkpoint.folder_lock(folder), contextlib.suppress(Stopped), interruptible(stop):
        if resume_from is None:
            _delete_checkpoints(folder)
        metrics = _fit(model, recording, training, held_out, config, device, resume_from)
    stop.reraise()
    about = {"dataset": recording.about, "config": to_dict(config), **metrics[-1]}
    save_sft(model, folder / MODEL, about)
    write_json(to_dict(config), folder / CONFIG)
    write_json(metrics, folder / TRAIN_METRICS)
    _delete_checkpoints(folder)
    return {"checkpoint": str(folder / MODEL), **metrics[-1], "seconds": round(time.monotonic() - started, 1)}


def _place(config: WaypointSFTConfig, folder: Path) -> Path | None:
    """The checkpoint to resume from; an error where a model or a run would be replaced unasked."""
    stopped = checkpoint.list_checkpoints(folder)
    if config.resume is not None:
        if not checkpoint.list_checkpoints(Path(config.resume)) and not checkpoint.is_checkpoint(Path(config.resume)):
            raise InputError(f"resume: {config.resume} holds no run that was stopped; leave --resume out")
        return checkpoint.resumable(config.resume)
    if config.auto_resume and stopped:
        return checkpoint.resumable(folder)
    if config.overwrite:
        return None
    if (folder / MODEL).exists():
        raise InputError(f"output_dir: {folder} already holds a {MODEL}; --overwrite replaces it, or give another")
    if stopped:
        raise InputError(
            f"output_dir: {folder} holds a run that was stopped ({stopped[-1].name}); --auto-resume continues it, "
            "--overwrite replaces it, or give another"
        )
    return None


def _delete_checkpoints(folder: Path) -> None:
    for path in checkpoint.list_checkpoints(folder):
        checkpoint.delete_checkpoint(path)


def _fit(
    model: WaypointSFT,
    recording: WaypointRecording,
    training: np.ndarray,
    held_out: np.ndarray,
    config: WaypointSFTConfig,
    device: torch.device,
    resume_from: Path | None,
) -> list[dict[str, Any]]:
    """All epochs; the metrics of each. A stop request saves between two minibatches and raises `Stopped`."""
    optimizer = torch.optim.AdamW(model.parameters(), config.learning_rate, weight_decay=config.weight_decay)
    per_epoch = math.ceil(len(training) / config.batch_size)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, config.num_epochs * per_epoch)
    generator = np.random.default_rng(config.seed)
    target = (torch.as_tensor(recording.waypoints, device=device) - model.target_mean) / model.target_deviation
    metrics: list[dict[str, Any]] = []
    losses: list[Tensor] = []  # of the epoch under way
    settings = {name: value for name, value in to_dict(config).items() if name not in FREE}
    if resume_from is not None:
        state = checkpoint.load_training_state(resume_from)
        saved, _ = translate(WaypointSFTConfig, state["settings"])  # may be written by an earlier version
        for name, value in settings.items():
            if saved.get(name) != value:
                raise InputError(f"resume: {resume_from} was trained with {name} {saved.get(name)}")
        checkpoint.load_weights(model, checkpoint.load_part(resume_from, checkpoint.MODEL), resume_from)
        optimizer.load_state_dict(state["optimizer"])
        schedule.load_state_dict(state["schedule"])
        generator.bit_generator.state = state["generator"]
        metrics, losses = state["metrics"], list(state["losses"].to(device))
    for epoch in range(len(metrics) + 1, config.num_epochs + 1):
        at_start = generator.bit_generator.state
        parts = np.array_split(generator.permutation(training), per_epoch)
        try:
            model.train()
            for rows in parts[len(losses) :]:
                raise_if_stopped()
                predicted = model.normalized(model.encode(_observation(recording, rows, device)))
                loss = torch.nn.functional.smooth_l1_loss(predicted, target[torch.as_tensor(rows, device=device)])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
                losses.append(loss.detach())
            entry = {"epoch": epoch, "loss": float(torch.stack(losses).mean())}
            if len(held_out):
                entry["ade"], entry["fde"] = _validate(model.eval(), recording, held_out, device)
        except Stopped:
            state = {
                "settings": settings,
                "optimizer": optimizer.state_dict(),
                "schedule": schedule.state_dict(),
                "generator": at_start,
                "metrics": metrics,
                "losses": torch.stack(losses).cpu() if losses else torch.zeros(0),
            }
            weights = {name: value.detach().cpu() for name, value in model.state_dict().items()}
            updates = (epoch - 1) * per_epoch + len(losses)
            path = checkpoint.save_checkpoint(Path(config.output_dir), updates, weights, state, {})
            log.warning("stopped in epoch %d: saved %s; --auto-resume continues", epoch, path)
            raise
        losses = []
        metrics.append(entry)
        log.info("epoch %d: %s", epoch, ", ".join(f"{name} {value:.4g}" for name, value in entry.items()))
    model.eval()
    return metrics


@torch.inference_mode()
def _validate(
    model: WaypointSFT, recording: WaypointRecording, rows: np.ndarray, device: torch.device
) -> tuple[float, float]:
    """ADE and FDE in metres."""
    parts = [rows[start : start + CHUNK] for start in range(0, len(rows), CHUNK)]
    found = []
    for part in parts:
        raise_if_stopped()
        found.append(model(_observation(recording, part, device)).numpy(force=True))
    predicted = np.concatenate(found)
    ade, fde = displacement_errors(predicted, recording.waypoints[rows])
    return float(ade.mean()), float(fde.mean())


def _observation(recording: WaypointRecording, rows: np.ndarray, device: torch.device) -> dict[str, Tensor]:
    return {
        schema.CAMERA: torch.as_tensor(recording.camera[rows], device=device),
        schema.MOTION: torch.as_tensor(recording.motion[rows], device=device),
    }


def _split(recording: WaypointRecording, share: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows for training and for validation; whole episodes, since neighbouring frames are nearly the same."""
    episodes = np.random.default_rng(seed).permutation(np.unique(recording.episode))
    chosen = episodes[: round(share * len(episodes))]
    if len(chosen) == len(episodes):
        raise InputError(f"holdout: {share:g} of {len(episodes)} episodes leaves none to train on")
    is_held_out = np.isin(recording.episode, chosen)
    return np.flatnonzero(~is_held_out), np.flatnonzero(is_held_out)
