"""What a waypoint world is: N copies of a scene that are driven by waypoints in the vehicle's frame.

`ToyWorld`, `DrivingWaypointWorld`, `HighwayWorld` and `CarlaWorld` implement it. `WaypointVectorEnv` makes a vector
environment of any of them for the trainers, `WaypointEnv` a Gymnasium environment of one copy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from deft import schema
from deft.envs.state import decode, encode
from deft.envs.vector import ActionLayout, Episode, Observation, ObservationLayout, StepArrays, VectorEnv, VectorStep
from deft.errors import InputError

NUM_WAYPOINTS = 8
CAMERA_SIZE = 64
DIFFICULTIES = ("easy", "medium", "hard")
MOTION_NAMES = ("speed", "acceleration", "steering", "gap", "closing_speed")
MAX_GAP = 60.0  # metres that the distance sensor sees; what it reads where nothing is ahead


@dataclass(slots=True)
class Outcome:
    """What following the waypoints for one decision gave, [N] each."""

    terms: dict[str, np.ndarray]
    """The reward's parts by name; the reward is their sum."""
    terminated: np.ndarray
    truncated: np.ndarray
    success: np.ndarray
    collision: np.ndarray
    off_road: np.ndarray
    ade: np.ndarray | None = None
    """Average displacement error of the waypoints, in metres; None where there is no ground truth."""
    fde: np.ndarray | None = None
    """Final displacement error."""


@dataclass(slots=True)
class WaypointEpisode(Episode):
    """An episode with what is measured of waypoints."""

    collision: bool = False
    off_road: bool = False
    ade: float | None = None
    """Mean over the episode's decisions; None where there is no ground truth."""
    fde: float | None = None


def displacement_errors(waypoints: np.ndarray, target: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """ADE and FDE of […, K, 2] against […, K, 2]: the mean of |p_k − q_k| over k, and |p_K − q_K|."""
    distance = np.linalg.norm(waypoints - target, axis=-1)
    return distance.mean(-1), distance[..., -1]


class WaypointWorld(ABC):
    """N independent copies of a scene. One step is one decision: K waypoints [K, 2], x ahead and y to the left.

    The observation has the streams `camera` (uint8 [3, S, S]), `motion` (`MOTION_NAMES`, SI units) and `sft_offset`
    ([K, 2], an error that the supervised policy's waypoints have in this episode: zeros where the world adds none).
    """

    num_envs: int
    num_waypoints: int = NUM_WAYPOINTS
    camera_size: int = CAMERA_SIZE
    view: tuple[float, float, float, float]
    """What the camera's picture shows, in the vehicle's frame: nearest and farthest x, rightmost and leftmost y."""
    reward_terms: tuple[str, ...]

    @property
    def observation_space(self) -> spaces.Dict:
        """Of one copy."""
        size, count = self.camera_size, self.num_waypoints
        return spaces.Dict(
            {
                schema.CAMERA: spaces.Box(0, 255, (3, size, size), np.uint8),
                schema.MOTION: spaces.Box(-np.inf, np.inf, (len(MOTION_NAMES),), np.float32),
                schema.SFT_OFFSET: spaces.Box(-np.inf, np.inf, (count, 2), np.float32),
            }
        )

    @property
    def action_space(self) -> spaces.Box:
        """Of one copy: metres in the vehicle's frame."""
        return spaces.Box(-np.inf, np.inf, (self.num_waypoints, 2), np.float32)

    @abstractmethod
    def reset(self, index: np.ndarray, seeds: Sequence[int | None]) -> None:
        """Start an episode in the copies of `index`, each from its seed; None goes on with the copy's own draws."""

    @abstractmethod
    def observe(self, index: np.ndarray | None = None) -> dict[str, np.ndarray]:
        """The streams of the copies of `index`, or of all."""

    @abstractmethod
    def follow(self, waypoints: np.ndarray) -> Outcome:
        """Drive along waypoints [N, K, 2] until the next decision."""

    @abstractmethod
    def target_waypoints(self) -> np.ndarray | None:
        """Ground truth [N, K, 2]: where a good driver would go from here; None where there is none."""

    def set_difficulty(self, level: str) -> None:
        """`easy`, `medium` or `hard`, from each copy's next episode on."""
        raise InputError(f"{type(self).__name__} has one difficulty; leave --difficulty and --curriculum out")

    def get_state(self) -> list[dict[str, Any]] | None:
        """Plain data of each copy that `set_state` goes on from; None where that cannot be had."""
        return None

    def set_state(self, states: list[dict[str, Any]]) -> None:
        """Go on from saved states."""
        raise InputError(f"{type(self).__name__} cannot go on from a saved state")

    def close(self) -> None:  # noqa: B027 (most worlds hold nothing)
        """Free what the world holds. Calling it again does nothing."""


def check_difficulty(level: str) -> str:
    """One of the three levels, or one line."""
    if level not in DIFFICULTIES:
        raise InputError(f"difficulty: {level!r} is not allowed; one of {', '.join(DIFFICULTIES)}")
    return level


@dataclass(slots=True)
class _Tally:
    """What an episode under way has summed up to, in one copy."""

    episode_return: float = 0.0
    length: int = 0
    terms: dict[str, float] = field(default_factory=dict)
    ade: float = 0.0
    fde: float = 0.0


class WaypointVectorEnv(VectorEnv):
    """A waypoint world as a vector environment: counts episodes, and resets a copy in the step that ends its own."""

    def __init__(self, world: WaypointWorld) -> None:
        super().__init__(
            world.num_envs,
            ObservationLayout(world.observation_space),
            ActionLayout(world.action_space),
            reward_terms=world.reward_terms,
        )
        self.world = world
        self._tallies = [_Tally() for _ in range(world.num_envs)]
        self._rows = np.arange(world.num_envs)

    def reset(self, seed: int | Sequence[int] | None = None) -> Observation:
        """Start an episode in every copy; copy i gets `seed + i`, or the i-th of several seeds."""
        self.world.reset(self._rows, self._env_seeds(seed))
        self._tallies = [_Tally() for _ in range(self.num_envs)]
        arrays = self._next_arrays()
        self._write(self.world.observe(), arrays.observation, self._rows)
        self._started = True
        return arrays.observation

    def step(self, actions: np.ndarray) -> VectorStep:
        """Every copy follows its waypoints."""
        outcome = self.world.follow(self._prepare(actions))
        arrays = self._next_arrays()
        terms = np.stack([outcome.terms[name] for name in self.reward_terms], 1)
        arrays.reward[:] = terms.sum(1)
        assert arrays.reward_terms is not None
        arrays.reward_terms[:] = terms
        arrays.terminated[:] = outcome.terminated
        arrays.truncated[:] = outcome.truncated
        self._write(self.world.observe(), arrays.observation, self._rows)
        self._count(arrays, outcome)
        done = np.flatnonzero(outcome.terminated | outcome.truncated)
        episodes: list[Episode] = []
        if len(done):
            assert isinstance(arrays.observation, dict)
            final = {name: stream[done] for name, stream in arrays.observation.items()}
            self._write(final, self._final, done)
            episodes += [self._end_episode(int(index), outcome) for index in done]
            self.world.reset(done, [None] * len(done))
            self._write(self.world.observe(done), arrays.observation, done)
        return self._result(arrays, episodes)

    def _count(self, arrays: StepArrays, outcome: Outcome) -> None:
        for index, tally in enumerate(self._tallies):
            tally.episode_return += float(arrays.reward[index])
            tally.length += 1
            for name, values in outcome.terms.items():
                tally.terms[name] = tally.terms.get(name, 0.0) + float(values[index])
            if outcome.ade is not None and outcome.fde is not None:
                tally.ade += float(outcome.ade[index])
                tally.fde += float(outcome.fde[index])

    def _end_episode(self, index: int, outcome: Outcome) -> WaypointEpisode:
        tally, self._tallies[index] = self._tallies[index], _Tally()
        measured = outcome.ade is not None
        return WaypointEpisode(
            index,
            tally.episode_return,
            tally.length,
            bool(outcome.success[index]),
            tally.terms,
            bool(outcome.collision[index]),
            bool(outcome.off_road[index]),
            tally.ade / tally.length if measured else None,
            tally.fde / tally.length if measured else None,
        )

    @staticmethod
    def _write(streams: dict[str, np.ndarray], arrays: Observation, rows: np.ndarray) -> None:
        assert isinstance(arrays, dict)
        for name, stream in streams.items():
            arrays[name][rows] = stream

    def get_state(self) -> list[dict[str, Any]] | None:
        """Plain data that `set_state` goes on from; None where `state_obstacle` says why."""
        states = self.world.get_state()
        if states is None:
            return None
        return [
            {
                "world": encode(state),
                "tally": [tally.episode_return, tally.length, dict(tally.terms), tally.ade, tally.fde],
                "observation": self._observation_layout.encode_row(self.observation, index),
            }
            for index, (state, tally) in enumerate(zip(states, self._tallies, strict=True))
        ]

    def set_state(self, states: list[dict[str, Any]]) -> None:
        """Go on from saved states."""
        self._check_states(states)
        self.world.set_state([decode(state["world"]) for state in states])
        self._tallies = [_Tally(*state["tally"]) for state in states]
        arrays = self._next_arrays()
        for index, state in enumerate(states):
            self._observation_layout.decode_row(state["observation"], arrays.observation, index)
        self._started = True

    def state_obstacle(self) -> str | None:
        """One line on what keeps the state from being saved; None if nothing does."""
        saves = type(self.world).get_state is not WaypointWorld.get_state
        return None if saves else f"{type(self.world).__name__} does not give its state away"

    def call(self, name: str, *args: Any) -> list[Any]:
        """Call a method of the world, which all copies share."""
        if not hasattr(self.world, name):
            raise InputError(f"{type(self.world).__name__} has no method {name!r}")
        return [getattr(self.world, name)(*args)] * self.num_envs

    def render(self, index: int = 0) -> np.ndarray | None:
        """The camera's picture [h, w, 3]."""
        return self.world.observe(np.array([index]))[schema.CAMERA][0].transpose(1, 2, 0)

    def close(self) -> None:
        """Free the world."""
        self.world.close()


class WaypointEnv(gymnasium.Env):
    """One copy of a waypoint world as a Gymnasium environment; `info` has ade, fde, success and collision."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012

    def __init__(self, world: WaypointWorld, render_mode: str | None = None) -> None:
        if world.num_envs != 1:
            raise InputError(f"a WaypointEnv is one copy; this world has {world.num_envs}: use WaypointVectorEnv")
        self.world = world
        self.render_mode = render_mode
        self.observation_space = world.observation_space
        self.action_space = world.action_space
        self.reward_terms = world.reward_terms
        self._row = np.zeros(1, np.int64)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start an episode."""
        super().reset(seed=seed)
        self.world.reset(self._row, [seed])
        return self._observe(), {}

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Follow the waypoints [K, 2] until the next decision."""
        outcome = self.world.follow(np.asarray(action, np.float32)[None])
        terms = {name: float(values[0]) for name, values in outcome.terms.items()}
        info: dict[str, Any] = {
            "reward_terms": terms,
            "success": bool(outcome.success[0]),
            "collision": bool(outcome.collision[0]),
            "off_road": bool(outcome.off_road[0]),
        }
        if outcome.ade is not None and outcome.fde is not None:
            info |= {"ade": float(outcome.ade[0]), "fde": float(outcome.fde[0])}
        return self._observe(), sum(terms.values()), bool(outcome.terminated[0]), bool(outcome.truncated[0]), info

    def render(self) -> np.ndarray:
        """The camera's picture [h, w, 3]."""
        return self._observe()[schema.CAMERA].transpose(1, 2, 0)

    def set_difficulty(self, level: str) -> None:
        """`easy`, `medium` or `hard`, from the next episode on."""
        self.world.set_difficulty(level)

    def close(self) -> None:
        """Free the world."""
        self.world.close()

    def _observe(self) -> dict[str, np.ndarray]:
        return {name: stream[0] for name, stream in self.world.observe().items()}
