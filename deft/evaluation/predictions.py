"""What a world model predicts of an episode, step by step, as images and videos next to the truth.

The trainers of the phases write them as they go; `deft evaluate` for `--video`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from deft import schema
from deft.data.episodes import EpisodeBatch
from deft.evaluation.plots import drawing
from deft.evaluation.video import write_video
from deft.models.f1.frames import to_images, to_model
from deft.models.f1.policy import F1Policy
from deft.runs.signals import raise_if_stopped

STEPS_TOGETHER = 16
SHOWN_FRAMES = 8
VIDEO_HEIGHT = 192  # pixels at least
FPS = 10


@dataclass
class PredictedEpisode:
    """T steps: what was there, and what was predicted one step before. uint8 [T, 3, h, w]."""

    wrist: np.ndarray
    predicted: np.ndarray
    head: np.ndarray | None


@torch.no_grad()
def predict_episode(policy: F1Policy, batch: EpisodeBatch, row: int = 0) -> PredictedEpisode:
    """Predict frame t + 1 of one episode at every t, with its memory."""
    was_training = policy.training
    policy.eval()
    length, size = int(batch.lengths[row]), policy.config.tokenizer.image_size
    memory = policy.initial_memory(1) if policy.config.memory_enabled else None
    rows = torch.tensor([[row]])
    predicted = []
    for start in range(0, length, STEPS_TOGETHER):
        raise_if_stopped()
        times = torch.arange(start, min(start + STEPS_TOGETHER, length))[:, None]
        steps = batch.steps(rows.expand_as(times), times)
        found = policy.predict_images_only(steps, memory)
        memory = found.get(schema.MEMORY_STATE)
        predicted.append(found["images"][:, 0].cpu())
    policy.train(was_training)
    seen = {
        name: to_images(to_model(batch.streams[name][row, 1 : length + 1], size, name)).cpu().numpy()
        for name in ("wrist", "head")
        if name in batch.streams
    }
    return PredictedEpisode(seen["wrist"], torch.cat(predicted).numpy(), seen.get("head"))


def write_prediction_video(episode: PredictedEpisode, path: Path) -> Path:
    """A video: head camera (if there is one), wrist camera, predicted wrist."""
    parts = [part for part in (episode.head, episode.wrist, episode.predicted) if part is not None]
    times = max(1, VIDEO_HEIGHT // parts[0].shape[-1])
    frames = np.concatenate([_channels_last(part) for part in parts], 2)
    return write_video([frame.repeat(times, 0).repeat(times, 1) for frame in frames], path, FPS)


def draw_sample(episode: PredictedEpisode, path: Path) -> Path:
    """An image with a row each for the truth, the prediction and the error of some frames."""
    chosen = np.unique(np.linspace(0, len(episode.wrist) - 1, SHOWN_FRAMES).round().astype(int))
    truth, predicted = _channels_last(episode.wrist[chosen]), _channels_last(episode.predicted[chosen])
    error = np.abs(truth.astype(int) - predicted.astype(int)).astype(np.uint8)
    with drawing(path, 1.3 * len(chosen) + 0.9, 4.2) as figure:
        grid = figure.subplots(3, len(chosen), squeeze=False)
        for row, label, images in zip(grid, ("Truth", "Prediction", "Error"), (truth, predicted, error), strict=True):
            row[0].set_ylabel(label, fontsize=9)
            for axes, image in zip(row, images, strict=True):
                axes.imshow(image, interpolation="nearest")
                axes.set(xticks=[], yticks=[])
        for axes, step in zip(grid[0], chosen, strict=True):
            axes.set_title(f"step {step + 1}", fontsize=8)
    return path


def _channels_last(images: np.ndarray) -> np.ndarray:
    return np.moveaxis(images, -3, -1)
