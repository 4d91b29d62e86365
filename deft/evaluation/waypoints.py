"""Evaluation of waypoint policies: measures on episodes from fixed seeds, comparisons, and images.

The waypoint trainer, its safety check and `deft compare` call it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from deft import schema
from deft.data.tensors import policy_inputs
from deft.envs.waypoints.make import env_kwargs_of, make_waypoint_simulator
from deft.envs.waypoints.protocol import WaypointEpisode, WaypointVectorEnv
from deft.evaluation.plots import BLUE, GRAY, ORANGE, drawing
from deft.evaluation.rollouts import play_episodes, summarize
from deft.models.waypoint import PPOPolicy
from deft.runs.random_state import separate_random_state
from deft.runs.rollout import rollout

CYAN = "#00d5ff"  # visible on grass, asphalt and white lines
MEASURES = ("success_rate", "collision_rate", "off_road_rate", "ade", "fde", "mean_reward")
MOST_COPIES = 64  # stepped together in an evaluation


# Takes the number of episodes; returns a context that yields the `watch` of `play_episodes`.
Watching = Callable[[int], contextlib.AbstractContextManager[Any]]


class HeldOut:
    """Episodes that are not trained on: `episodes` of each environment, episode i from seed + i, always the same.

    `shared` are environments to play in instead of new ones; `disturbed` is then True after one was
    played in: other users of it must start new episodes.
    """

    def __init__(
        self,
        names: Sequence[str],
        difficulty: str,
        episodes: int,
        seed: int,
        kwargs: Mapping[str, Any] | None = None,
        shared: Mapping[str, WaypointVectorEnv] | None = None,
    ) -> None:
        self.episodes, self.seed = episodes, seed
        self.disturbed = False
        self.watching: Watching = lambda _: contextlib.nullcontext()  # a trainer's shows progress, and may stop it
        self._shared = dict(shared or {})
        self.envs: dict[str, WaypointVectorEnv] = {name: self._shared[name] for name in names if name in self._shared}
        for name in names:
            if name not in self._shared:
                # The toy always measures ADE; elsewhere a plan costs as much as the driving.
                own = ({} if name == "toy" else {"measure_ade": True}) | env_kwargs_of(name, names, kwargs)
                copies = 1 if name == "carla" else min(episodes, MOST_COPIES)
                self.envs[name] = WaypointVectorEnv(make_waypoint_simulator(name, copies, difficulty, own))

    def evaluate(self, policy: PPOPolicy) -> dict[str, Any]:
        """The measures of the policy's likeliest waypoints; with several environments also each one's as `name/…`."""
        self.disturbed = bool(self._shared)
        with self.watching(self.episodes * len(self.envs)) as watch, separate_random_state(self.seed):
            results = {name: self._measure(policy, env, watch) for name, env in self.envs.items()}
        if len(results) == 1:
            return next(iter(results.values()))
        merged: dict[str, Any] = {"episodes": sum(result["episodes"] for result in results.values())}
        for measure in (*MEASURES, "std_reward", "mean_length"):
            values = [result[measure] for result in results.values() if result.get(measure) is not None]
            if values:
                merged[measure] = float(np.mean(values))
        return merged | {f"{name}/{key}": value for name, result in results.items() for key, value in result.items()}

    def _measure(
        self, policy: PPOPolicy, env: WaypointVectorEnv, watch: Callable[[int], None] | None
    ) -> dict[str, Any]:
        episodes = play_episodes(policy, env, self.episodes, self.seed, watch=watch)
        measured = [episode for episode in episodes if isinstance(episode, WaypointEpisode)]
        results = summarize(episodes)
        results["collision_rate"] = float(np.mean([episode.collision for episode in measured]))
        results["off_road_rate"] = float(np.mean([episode.off_road for episode in measured]))
        for name in ("ade", "fde"):
            values = [value for episode in measured if (value := getattr(episode, name)) is not None]
            if values:
                results[name] = float(np.mean(values))
        return results

    def close(self) -> None:
        """Free the environments that are its own."""
        for name, env in self.envs.items():
            if name not in self._shared:
                env.close()


def plot_waypoints(
    policies: Mapping[str, PPOPolicy], env: WaypointVectorEnv, path: Path, seed: int, count: int = 4, after: int = 3
) -> Path:
    """Each policy's waypoints over what the camera saw, in the scenes that the first policy drives into.

    `count` copies from seed, seed + 1, … after `after` decisions.
    """
    first = next(iter(policies.values()))
    colors = (ORANGE, BLUE, GRAY)
    with torch.inference_mode(), separate_random_state(seed):
        observation = rollout(env, partial(_waypoints, first), lambda *_: None, env.reset(seed), after)
        planned = {name: _waypoints(policy, observation) for name, policy in policies.items()}
        target = env.simulator.target_waypoints()
    assert isinstance(observation, dict)
    near, far, right, left = env.simulator.view
    count = min(count, env.num_envs)
    with drawing(path, 3.1 * count, 3.9) as figure:
        for index, axes in enumerate(np.atleast_1d(figure.subplots(1, count))):
            image = observation[schema.CAMERA][index].transpose(1, 2, 0)
            axes.imshow(image, extent=(left, right, near, far), aspect="equal")
            if target is not None:
                axes.plot(*target[index, :, ::-1].T, "--", color=CYAN, linewidth=1.6, label="ground truth")
            for (name, waypoints), color in zip(planned.items(), colors, strict=False):
                axes.plot(*waypoints[index, :, ::-1].T, "o-", color=color, markersize=4, label=name)
            axes.set(xlim=(left, right), ylim=(near, far), title=f"episode {seed + index}", xlabel="to the left, m")
            axes.grid(False)
        figure.axes[0].set_ylabel("ahead, m")
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), facecolor=GRAY, frameon=True)
    return path


def plot_safety(
    train_metrics: Sequence[Mapping[str, Any]], baseline: Mapping[str, Any], measures: Sequence[str], path: Path
) -> Path:
    """Plot measures on the held-out set over a run: of the deployed, the supervised and the rejected policies."""
    train_metrics = [entry for entry in train_metrics if "rolled_back" in entry and f"safety/{measures[0]}" in entry]
    with drawing(path, 5.2 * len(measures), 3.2) as figure:
        for axes, measure in zip(np.atleast_1d(figure.subplots(1, len(measures))), measures, strict=True):
            rejected = [entry for entry in train_metrics if entry["rolled_back"]]
            axes.axhline(baseline[measure], color=GRAY, linestyle="--", label="supervised")
            axes.plot(*_curve(train_metrics, f"safety/{measure}"), color=BLUE, label="deployed")
            axes.plot(*_curve(rejected, f"safety/candidate_{measure}"), "x", color=ORANGE, label="rejected")
            axes.set(title=measure.replace("_", " "), xlabel="iteration")
            axes.legend()
    return path


def _curve(entries: Sequence[Mapping[str, Any]], name: str) -> tuple[list[int], list[float]]:
    return [entry["iteration"] for entry in entries], [entry[name] for entry in entries]


def _waypoints(policy: PPOPolicy, observation: Any) -> np.ndarray:
    device = next(policy.parameters()).device
    return policy.act(policy_inputs(observation, device), deterministic=True)[schema.ACTION].numpy(force=True)
