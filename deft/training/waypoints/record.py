"""`deft collect waypoints`: records observations and plans of an environment's scripted driver."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from deft import schema
from deft.config.loading import to_dict
from deft.config.waypoint_settings import WaypointRecordingConfig
from deft.data.waypoint_recording import WaypointRecording
from deft.envs.vector import VectorStep
from deft.envs.waypoints.make import make_waypoint_simulator
from deft.envs.waypoints.protocol import WaypointEpisode, WaypointVectorEnv
from deft.errors import InputError, RunError
from deft.runs.rollout import rollout

DEFAULT_COPIES = 16


def record(config: WaypointRecordingConfig) -> dict[str, Any]:
    """Record whole episodes; episode i starts from seed + i, whatever the number of environments."""
    path = Path(config.out)
    if path.suffix != ".npz":
        raise InputError(f"--out {path}: a waypoint recording is a .npz file")
    if path.exists() and not config.overwrite:
        raise InputError(f"--out {path}: exists; --overwrite replaces it")
    copies = config.num_envs or (1 if config.env == "carla" else DEFAULT_COPIES)
    simulator = make_waypoint_simulator(config.env, min(copies, config.episodes), config.difficulty, config.env_kwargs)
    env = WaypointVectorEnv(simulator)
    try:
        recorder = _Recorder(env, config)
        for first in range(0, config.episodes, env.num_envs):
            recorder.record(first)
    finally:
        env.close()
    rows, episodes = recorder.rows, recorder.episodes
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


class _Recorder:
    """The rows of each episode by its number, and the episodes, as the scripted driver drives them."""

    def __init__(self, env: WaypointVectorEnv, config: WaypointRecordingConfig) -> None:
        self.env, self.config = env, config
        self.generator = np.random.default_rng(config.seed)
        self.rows: dict[int, list[tuple[np.ndarray, ...]]] = {}
        self.episodes: list[WaypointEpisode] = []

    def record(self, first: int) -> None:
        """Record the episodes from number `first` on, one in every environment."""
        self._first = first
        self._under_way = set(range(min(self.env.num_envs, self.config.episodes - first)))
        rollout(self.env, self._act, self._take, self.env.reset(self.config.seed + first))

    def _act(self, observation: Any) -> np.ndarray:
        """Store what is seen and planned; return the plan with noise."""
        config, plan = self.config, self.env.simulator.target_waypoints()
        if plan is None:
            raise RunError(f"{config.env} has no driver to record: it gives no ground truth")
        label = plan + self.generator.normal(0, config.label_noise, plan.shape) if config.label_noise else plan
        for index in self._under_way:
            images, motion = observation[schema.CAMERA][index].copy(), observation[schema.MOTION][index].copy()
            row = (images, motion, label[index].astype(np.float32))
            self.rows.setdefault(self._first + index, []).append(row)
        noise = self.generator.normal(0, config.noise, plan.shape) if config.noise else 0.0
        actions: np.ndarray = (plan + noise).astype(np.float32)
        return actions

    def _take(self, _: Any, __: Any, step: VectorStep) -> bool:
        for episode in step.episodes:
            if episode.env_index in self._under_way:
                assert isinstance(episode, WaypointEpisode)
                self._under_way.remove(episode.env_index)
                self.episodes.append(episode)
        return not self._under_way
