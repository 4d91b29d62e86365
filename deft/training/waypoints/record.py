"""`deft collect waypoints`: lets a world's scripted driver drive, and records what it saw and planned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from deft import schema
from deft.config.loading import to_dict
from deft.config.waypoint_settings import WaypointRecordingConfig
from deft.data.waypoint_recording import WaypointRecording
from deft.envs.waypoints.make import make_waypoint_simulator
from deft.envs.waypoints.protocol import WaypointEpisode, WaypointVectorEnv
from deft.errors import InputError, RunError

DEFAULT_COPIES = 16


def record(config: WaypointRecordingConfig) -> dict[str, Any]:
    """Record whole episodes; episode i starts from seed + i, whatever the number of copies."""
    path = Path(config.out)
    if path.suffix != ".npz":
        raise InputError(f"--out {path}: a waypoint recording is a .npz file")
    if path.exists() and not config.overwrite:
        raise InputError(f"--out {path}: exists; --overwrite replaces it")
    copies = config.num_envs or (1 if config.env == "carla" else DEFAULT_COPIES)
    simulator = make_waypoint_simulator(config.env, min(copies, config.episodes), config.difficulty, config.env_kwargs)
    env = WaypointVectorEnv(simulator)
    try:
        rows, episodes = _drive(env, config)
    finally:
        env.close()
    numbers = np.concatenate([np.full(len(rows[number]), number) for number in sorted(rows)])
    columns = [
        np.stack(column) for column in zip(*(row for number in sorted(rows) for row in rows[number]), strict=True)
    ]
    recording = WaypointRecording(columns[0], columns[1], columns[2], numbers, to_dict(config))
    recording.save(path)
    return {
        "dataset": str(path),
        "episodes": len(episodes),
        "decisions": len(recording),
        "success_rate": float(np.mean([bool(episode.success) for episode in episodes])),
        "collision_rate": float(np.mean([episode.collision for episode in episodes])),
    }


def _drive(
    env: WaypointVectorEnv, config: WaypointRecordingConfig
) -> tuple[dict[int, list[tuple[np.ndarray, ...]]], list[WaypointEpisode]]:
    """The rows of each episode by its number, and how the episodes went."""
    generator = np.random.default_rng(config.seed)
    rows: dict[int, list[tuple[np.ndarray, ...]]] = {}
    episodes: list[WaypointEpisode] = []
    for first in range(0, config.episodes, env.num_envs):
        observation = env.reset(config.seed + first)
        under_way = set(range(min(env.num_envs, config.episodes - first)))
        while under_way:
            plan = env.simulator.target_waypoints()
            if plan is None:
                raise RunError(f"{config.env} has no driver to record: it gives no ground truth")
            assert isinstance(observation, dict)
            label = plan + generator.normal(0, config.label_noise, plan.shape) if config.label_noise else plan
            for index in under_way:
                row = (observation[schema.CAMERA][index], observation[schema.MOTION][index], label[index])
                rows.setdefault(first + index, []).append((row[0].copy(), row[1].copy(), row[2].astype(np.float32)))
            noise = generator.normal(0, config.noise, plan.shape) if config.noise else 0.0
            step = env.step((plan + noise).astype(np.float32))
            observation = step.observation
            for episode in step.episodes:
                if episode.env_index in under_way:
                    assert isinstance(episode, WaypointEpisode)
                    under_way.remove(episode.env_index)
                    episodes.append(episode)
    return rows, episodes
