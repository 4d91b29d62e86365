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
from deft.errors import RunError
from deft.evaluation.video import write_video
from deft.models.f1.frames import to_images, to_model
from deft.models.f1.policy import F1Policy
from deft.ownership import record
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
    wrist = to_images(to_model(batch.streams["wrist"][row, 1 : length + 1], size, schema.WRIST_RGB)).cpu().numpy()
    head = batch.streams.get("head")
    seen = None if head is None else to_images(to_model(head[row, 1 : length + 1], size, schema.HEAD_RGB))
    return PredictedEpisode(wrist, torch.cat(predicted).numpy(), None if seen is None else seen.cpu().numpy())


def write_prediction_video(episode: PredictedEpisode, path: Path) -> Path:
    """A video: head camera (if there is one), wrist camera, predicted wrist."""
    parts = [part for part in (episode.head, episode.wrist, episode.predicted) if part is not None]
    times = max(1, VIDEO_HEIGHT // parts[0].shape[-1])
    frames = np.concatenate([_channels_last(part) for part in parts], 2)
    return write_video([frame.repeat(times, 0).repeat(times, 1) for frame in frames], path, FPS)


def draw_sample(episode: PredictedEpisode, path: Path) -> Path:
    """A image with a row each for the truth, the prediction and the error of some frames."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    chosen = np.unique(np.linspace(0, len(episode.wrist) - 1, SHOWN_FRAMES).round().astype(int))
    truth, predicted = _channels_last(episode.wrist[chosen]), _channels_last(episode.predicted[chosen])
    error = np.abs(truth.astype(int) - predicted.astype(int)).astype(np.uint8)
    figure = Figure(figsize=(1.3 * len(chosen) + 0.9, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(3, len(chosen), squeeze=False)
    for line, (label, images) in enumerate((("Truth", truth), ("Prediction", predicted), ("Error", error))):
        for axes, image, step in zip(grid[line], images, chosen, strict=True):
            axes.imshow(image, interpolation="nearest")
            axes.set_xticks([])
            axes.set_yticks([])
            if line == 0:
                axes.set_title(f"step {step + 1}", fontsize=8)
        grid[line, 0].set_ylabel(label, fontsize=9)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=100, format="png")
        record(path)
    except OSError as failure:
        raise RunError(f"cannot write the image {path}: {failure.strerror or failure}") from failure
    return path


def _channels_last(images: np.ndarray) -> np.ndarray:
    return np.moveaxis(images, -3, -1)
