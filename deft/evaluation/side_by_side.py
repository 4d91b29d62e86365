"""A video of several policies in the same episodes, side by side: `make demo` writes one."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from deft.envs.make import make_env, wrap
from deft.envs.wrappers import FrameRecorder
from deft.evaluation.evaluate import env_of_run, find_run, first_seed, load_policy
from deft.evaluation.rollouts import play_episodes
from deft.evaluation.video import write_video
from deft.models.policy import members_of
from deft.runs.random_state import seed_everything

HOLD = 0.6  # seconds for which the last images of an episode stay
STRIP_HEIGHT = 24
GAP = 4  # pixels between two policies
COLOURS = {True: (60, 160, 80), False: (190, 70, 60), None: (70, 70, 70)}  # of the strip above an image, by success


class Recording(NamedTuple):
    """The images of one episode, and whether it succeeded."""

    frames: list[np.ndarray]
    success: bool | None


def record_side_by_side(
    runs: Mapping[str, str | Path],
    path: str | Path,
    episodes: int,
    seed: int = 0,
    env_kwargs: Mapping[str, Any] | None = None,
) -> Path:
    """Play the first episodes of an evaluation with each run's policy, and write them next to each other.

    `runs` are run directories or checkpoints by the label above their images. Every policy plays the episodes that
    `deft evaluate --seed` plays. An episode that ends first keeps its last image until the others end.
    """
    recorded = {label: _record(Path(run), episodes, seed, env_kwargs or {}) for label, run in runs.items()}
    fps = next(iter(recorded.values()))[1]
    frames: list[np.ndarray] = []
    for index in range(episodes):
        frames += join({label: recordings[index] for label, (recordings, _) in recorded.items()}, round(HOLD * fps))
    return write_video(frames, Path(path), fps=fps)


def join(recordings: Mapping[str, Recording], hold: int) -> list[np.ndarray]:
    """Return the frames of one episode of all policies; each last one stays until the longest ends, plus `hold`."""
    length = max(len(recording.frames) for recording in recordings.values())
    joined = []
    for step in range(length + hold):
        columns = []
        for label, (frames, success) in recordings.items():
            is_over = step >= len(frames) - 1
            frame = frames[min(step, len(frames) - 1)]
            columns += [_with_strip(frame, label, success if is_over else None), _gap(frame)]
        joined.append(np.concatenate(columns[:-1], axis=1))
    return joined


def _record(run: Path, episodes: int, seed: int, env_kwargs: Mapping[str, Any]) -> tuple[list[Recording], int]:
    """Return the recordings of a run's policy, and their frames per second."""
    folder, config = find_run(run)
    env_config = env_of_run(config, None, env_kwargs)
    seed_everything(seed)
    recorder = FrameRecorder(make_env(env_config, render_mode="rgb_array"))
    found = []
    with closing(wrap(recorder, chunk_length=config.policy.chunk_length)) as vector:
        policy = members_of(load_policy(folder, config, vector))[0]
        start = first_seed(vector, seed)
        for index in range(episodes):
            episode = play_episodes(policy, vector, 1, start + index)[0]
            found.append(Recording(recorder.last_episode, episode.success))
    return found, int(recorder.metadata.get("render_fps", 30))


def _with_strip(frame: np.ndarray, label: str, success: bool | None) -> np.ndarray:
    """Return the image with a strip above it: the label and, once it is known, the outcome."""
    from PIL import Image, ImageDraw, ImageFont

    words = {True: f"{label}: success", False: f"{label}: failure", None: label}[success]
    strip = Image.new("RGB", (frame.shape[1], STRIP_HEIGHT), COLOURS[success])
    font = ImageFont.load_default(14)
    ImageDraw.Draw(strip).text((frame.shape[1] / 2, STRIP_HEIGHT / 2), words, "white", font, anchor="mm")
    return np.concatenate([np.asarray(strip), frame])


def _gap(frame: np.ndarray) -> np.ndarray:
    return np.full((frame.shape[0] + STRIP_HEIGHT, GAP, 3), 255, np.uint8)
