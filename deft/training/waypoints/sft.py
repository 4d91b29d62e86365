"""`deft train waypoint-sft`: a camera encoder and a waypoint head, fitted to recorded driving."""

from __future__ import annotations

import logging
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deft import schema
from deft.config.loading import to_dict
from deft.config.waypoint_settings import WaypointSFTConfig
from deft.data.waypoint_recording import WaypointRecording
from deft.envs.waypoints.protocol import displacement_errors
from deft.errors import InputError
from deft.models.waypoint import WaypointSFT, WaypointShape
from deft.training.compute import choose_device, threads_for
from deft.training.random_state import seed_everything
from deft.training.waypoints.files import CONFIG, MODEL, TRAIN_METRICS, check_alone, save_sft, write_json

log = logging.getLogger(__name__)
CHUNK = 512  # decisions that are looked at together in validation


def train_sft(config: WaypointSFTConfig) -> dict[str, Any]:
    """Fit the waypoints of the recording, smooth L1 in deviations; validate on whole episodes that were kept out."""
    check_alone("waypoint-sft")
    folder = Path(config.out_dir)
    if (folder / MODEL).exists() and not config.overwrite:
        raise InputError(f"out_dir: {folder} already holds a {MODEL}; --overwrite replaces it, or give another")
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
    started = time.monotonic()
    with threads_for(config.threads, model, config.batch_size).applied():
        metrics = _fit(model, recording, training, held_out, config, device)
    about = {"dataset": recording.about, "config": to_dict(config), **metrics[-1]}
    save_sft(model, folder / MODEL, about)
    write_json(to_dict(config), folder / CONFIG)
    write_json(metrics, folder / TRAIN_METRICS)
    return {"checkpoint": str(folder / MODEL), **metrics[-1], "seconds": round(time.monotonic() - started, 1)}


def _fit(
    model: WaypointSFT,
    recording: WaypointRecording,
    training: np.ndarray,
    held_out: np.ndarray,
    config: WaypointSFTConfig,
    device: torch.device,
) -> list[dict[str, Any]]:
    optimizer = torch.optim.AdamW(model.parameters(), config.lr, weight_decay=config.weight_decay)
    per_epoch = math.ceil(len(training) / config.batch_size)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, config.num_epochs * per_epoch)
    generator = np.random.default_rng(config.seed)
    target = (torch.as_tensor(recording.waypoints, device=device) - model.target_mean) / model.target_deviation
    metrics: list[dict[str, Any]] = []
    for epoch in range(1, config.num_epochs + 1):
        model.train()
        losses = []
        for rows in np.array_split(generator.permutation(training), per_epoch):
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
    predicted = np.concatenate([model(_observation(recording, part, device)).numpy(force=True) for part in parts])
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
