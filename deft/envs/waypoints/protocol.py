"""The protocol of waypoint simulators: N environments that are driven by waypoints in the vehicle's frame.

`ToySimulator`, `DrivingWaypointSimulator`, `HighwaySimulator` and `CarlaClient` implement it. `WaypointVectorEnv` is
the vector environment of any of them for the trainers, `WaypointEnv` the Gymnasium environment of a single one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from deft import schema
from deft.envs.checks import check_difficulty
from deft.envs.spaces import image_space, vector_space
from deft.envs.state import decode, encode
from deft.envs.vector import BatchedVectorEnv, BatchStep, Episode
from deft.errors import InputError

NUM_WAYPOINTS = 8
CAMERA_SIZE = 64
MOTION_NAMES = ("speed", "acceleration", "steering", "gap", "closing_speed")
MAX_GAP = 60.0  # metres: the range of the distance sensor, and its value without a vehicle ahead
DRIVING_TERMS = ("progress", "collision", "off_road", "comfort", "lane")


@dataclass(slots=True)
class Outcome:
    """The result of following the waypoints for one decision, [N] each."""

    terms: dict[str, np.ndarray]
    """The reward's terms by name; the reward is their sum."""
    terminated: np.ndarray
    truncated: np.ndarray
    success: np.ndarray
    collision: np.ndarray
    off_road: np.ndarray
    ade: np.ndarray | None = None
    """Average displacement error of the waypoints, in metres; None without ground truth."""
    fde: np.ndarray | None = None
    """Final displacement error."""


@dataclass(slots=True)
class WaypointEpisode(Episode):
    """An episode with the metrics of waypoints."""

    collision: bool = False
    off_road: bool = False
    ade: float | None = None
    """Mean over the episode's decisions; None without ground truth."""
    fde: float | None = None


def displacement_errors(waypoints: np.ndarray, target: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return ADE and FDE of […, K, 2] against […, K, 2]: the mean of |p_k - q_k| over k, and |p_K - q_K|."""
    distance = np.linalg.norm(waypoints - target, axis=-1)
    return distance.mean(-1), distance[..., -1]


class WaypointSimulator(ABC):
    """N independent environments. One step is one decision: K waypoints [K, 2], x forward and y left.

    The observation has the streams `camera` (uint8 [3, S, S]), `motion` (`MOTION_NAMES`, SI units) and `sft_offset`
    ([K, 2], an error of the supervised policy's waypoints in this episode: zeros except in the toy).
    """

    view: tuple[float, float, float, float]
    """The visible region of the camera in the vehicle's frame: nearest and farthest x, rightmost and leftmost y."""
    reward_terms: tuple[str, ...] = DRIVING_TERMS

    def __init__(
        self,
        num_envs: int = 1,
        difficulty: str = "medium",
        num_waypoints: int = NUM_WAYPOINTS,
        camera_size: int = CAMERA_SIZE,
        steps_per_decision: int = 3,
        waypoint_seconds: float = 0.4,
        measure_ade: bool = False,
    ) -> None:
        """`measure_ade` compares the waypoints with `target_waypoints` in every decision."""
        self.num_envs, self.num_waypoints, self.camera_size = num_envs, num_waypoints, camera_size
        self.steps_per_decision, self.waypoint_seconds = steps_per_decision, waypoint_seconds
        self.measure_ade = measure_ade
        self.set_difficulty(difficulty)
        self._sft_offset = np.zeros((num_envs, num_waypoints, 2), np.float32)

    @property
    def observation_space(self) -> spaces.Dict:
        """Of one environment."""
        camera, motion = image_space(self.camera_size), vector_space(len(MOTION_NAMES))
        return spaces.Dict({schema.CAMERA: camera, schema.MOTION: motion, schema.SFT_OFFSET: self.action_space})

    @property
    def action_space(self) -> spaces.Box:
        """Of one environment: metres in the vehicle's frame."""
        return spaces.Box(-np.inf, np.inf, (self.num_waypoints, 2), np.float32)

    def observe(self, index: np.ndarray | None = None) -> dict[str, np.ndarray]:
        """Return the streams of the environments `index`, or of all."""
        rows = np.arange(self.num_envs) if index is None else index
        motion = np.asarray(self._motion(rows), np.float32)
        return {schema.CAMERA: self._images(rows), schema.MOTION: motion, schema.SFT_OFFSET: self._sft_offset[rows]}

    def follow(self, waypoints: np.ndarray) -> Outcome:
        """Drive along waypoints [N, K, 2] until the next decision."""
        errors = None
        if self.measure_ade and (target := self.target_waypoints()) is not None:
            errors = displacement_errors(waypoints, target)
        outcome = self._track(waypoints)
        if errors is not None:
            outcome.ade, outcome.fde = errors
        return outcome

    @abstractmethod
    def reset(self, index: np.ndarray, seeds: Sequence[int | None]) -> None:
        """Start an episode in the environments `index`; a seed None continues with the present generator."""

    @abstractmethod
    def _images(self, rows: np.ndarray) -> np.ndarray:
        """Return the camera images, uint8 [R, 3, S, S]."""

    @abstractmethod
    def _motion(self, rows: np.ndarray) -> Any:
        """Return `MOTION_NAMES` [R, 5]."""

    @abstractmethod
    def _track(self, waypoints: np.ndarray) -> Outcome:
        """Drive along waypoints for `steps_per_decision` steps."""

    @abstractmethod
    def target_waypoints(self) -> np.ndarray | None:
        """Return the ground truth [N, K, 2]: the path of a good driver; None if there is none."""

    def set_difficulty(self, level: str) -> None:
        """Set `easy`, `medium` or `hard` for the next episodes."""
        self.difficulty = check_difficulty(level)

    def get_state(self) -> list[dict[str, Any]] | None:
        """Return plain data for `set_state`, one dict per environment; None if the state cannot be saved."""
        return None

    def set_state(self, states: list[dict[str, Any]]) -> None:
        """Continue from saved states."""
        raise InputError(f"{type(self).__name__} cannot continue from a saved state")

    def close(self) -> None:  # noqa: B027 (most simulators hold no resources)
        """Release all resources. Further calls do nothing."""


class WaypointVectorEnv(BatchedVectorEnv):
    """A waypoint simulator as a vector environment."""

    def __init__(self, simulator: WaypointSimulator) -> None:
        space, actions = simulator.observation_space, simulator.action_space
        super().__init__(simulator.num_envs, space, actions, reward_terms=simulator.reward_terms)
        self.simulator = simulator
        self._error_sums = np.zeros((simulator.num_envs, 2))  # ADE and FDE
        self._outcome: Outcome

    def _begin(self, seeds: list[int] | None) -> None:
        self.simulator.reset(np.arange(self.num_envs), seeds or [None] * self.num_envs)

    def _advance(self, actions: np.ndarray) -> BatchStep:
        outcome = self._outcome = self.simulator.follow(actions)
        if outcome.ade is not None and outcome.fde is not None:
            self._error_sums += np.stack([outcome.ade, outcome.fde], 1)
        terms = np.stack([outcome.terms[name] for name in self.reward_terms], 1)
        reward = terms.sum(1).astype(np.float32)
        return BatchStep(reward, outcome.terminated, outcome.truncated, outcome.success, terms)

    def _observe(self, rows: np.ndarray | None) -> dict[str, np.ndarray]:
        return self.simulator.observe(rows)

    def _restart(self, rows: np.ndarray) -> None:
        self.simulator.reset(rows, [None] * len(rows))

    def _end_episode(self, index: int, result: BatchStep) -> WaypointEpisode:
        episode, outcome = super()._end_episode(index, result), self._outcome
        ade, fde = (self._error_sums[index] / episode.length).tolist() if outcome.ade is not None else (None, None)
        own = (episode.episode_return, episode.length, episode.success, episode.terms)
        return WaypointEpisode(index, *own, bool(outcome.collision[index]), bool(outcome.off_road[index]), ade, fde)

    def _clear(self, rows: Any) -> None:
        super()._clear(rows)
        self._error_sums[rows] = 0

    def get_state(self) -> list[dict[str, Any]] | None:
        """Return plain data for `set_state`; None if `state_obstacle` gives a reason."""
        states = self.simulator.get_state()
        if states is None:
            return None
        found = []
        for index, state in enumerate(states):
            counted = [float(self._returns[index]), int(self._lengths[index]), self._episode_terms(index)]
            observation = self._observation_layout.encode_row(self.observation, index)
            tally = [*counted, *self._error_sums[index].tolist()]
            found.append({"world": encode(state), "tally": tally, "observation": observation})
        return found

    def set_state(self, states: list[dict[str, Any]]) -> None:
        """Continue from saved states."""
        self._check_states(states)
        self.simulator.set_state([decode(state["world"]) for state in states])
        arrays = self._next_arrays()
        for index, state in enumerate(states):
            self._returns[index], self._lengths[index], terms, *self._error_sums[index] = state["tally"]
            self._term_sums[index] = [terms.get(name, 0.0) for name in self.reward_terms]
            self._observation_layout.decode_row(state["observation"], arrays.observation, index)
        self._started = True

    def state_obstacle(self) -> str | None:
        """Explain in one line why the state cannot be saved; None if it can."""
        saves = type(self.simulator).get_state is not WaypointSimulator.get_state
        return None if saves else f"{type(self.simulator).__name__} does not expose its state"

    def call(self, name: str, *args: Any) -> list[Any]:
        """Call a method of the simulator, which all environments share."""
        if not hasattr(self.simulator, name):
            raise InputError(f"{type(self.simulator).__name__} has no method {name!r}")
        return [getattr(self.simulator, name)(*args)] * self.num_envs

    def render(self, index: int = 0) -> np.ndarray | None:
        """Return the camera's image [h, w, 3]."""
        return self.simulator.observe(np.array([index]))[schema.CAMERA][0].transpose(1, 2, 0)

    def close(self) -> None:
        """Close the simulator."""
        self.simulator.close()


class WaypointEnv(gymnasium.Env):
    """A single waypoint environment for Gymnasium; `info` has ade, fde, success and collision."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012

    def __init__(self, simulator: WaypointSimulator, render_mode: str | None = None) -> None:
        if simulator.num_envs != 1:
            raise InputError(f"WaypointEnv has one environment, not {simulator.num_envs}: use WaypointVectorEnv")
        self.simulator = simulator
        self.render_mode = render_mode
        self.observation_space = simulator.observation_space
        self.action_space = simulator.action_space
        self.reward_terms = simulator.reward_terms

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start an episode."""
        super().reset(seed=seed)
        self.simulator.reset(np.zeros(1, np.int64), [seed])
        return self._observe(), {}

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Follow the waypoints [K, 2] until the next decision."""
        outcome = self.simulator.follow(np.asarray(action, np.float32)[None])
        info = outcome_info(outcome)
        if outcome.ade is not None and outcome.fde is not None:
            info |= {"ade": float(outcome.ade[0]), "fde": float(outcome.fde[0])}
        reward = sum(info["reward_terms"].values())
        return self._observe(), reward, bool(outcome.terminated[0]), bool(outcome.truncated[0]), info

    def render(self) -> np.ndarray:
        """Return the camera's image [h, w, 3]."""
        return self._observe()[schema.CAMERA].transpose(1, 2, 0)

    def set_difficulty(self, level: str) -> None:
        """Set `easy`, `medium` or `hard` for the next episodes."""
        self.simulator.set_difficulty(level)

    def close(self) -> None:
        """Close the simulator."""
        self.simulator.close()

    def _observe(self) -> dict[str, np.ndarray]:
        return {name: stream[0] for name, stream in self.simulator.observe().items()}


def outcome_info(outcome: Outcome, scale: float = 1.0) -> dict[str, Any]:
    """Return the outcome of a single environment as the info of a Gymnasium step."""
    return {
        "reward_terms": {name: scale * float(values[0]) for name, values in outcome.terms.items()},
        "success": bool(outcome.success[0]),
        "collision": bool(outcome.collision[0]),
        "off_road": bool(outcome.off_road[0]),
    }
