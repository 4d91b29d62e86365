"""The driving environment: one copy for Gymnasium, and many that step at once for training.

`deft.envs` registers it as `deft/Driving-v0`; `deft.envs.make` uses `DrivingVectorEnv` for `vector: sync`. Both are
thin around a `DrivingWorld`, and a copy drives bit for bit the same in either.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, Literal

import gymnasium
import numpy as np
from gymnasium import spaces

from deft.envs.driving.expert import expert_action
from deft.envs.driving.rendering import picture
from deft.envs.driving.world import (
    LANE_WIDTH,
    MAX_ACCELERATION,
    MAX_EPISODE_STEPS,
    MAX_SPEED,
    MAX_STEERING,
    NUM_LANES,
    REWARD_TERMS,
    ROUTE_LENGTH,
    DrivingWorld,
)
from deft.envs.state import decode, encode
from deft.envs.vector import ActionLayout, Episode, Observation, ObservationLayout, VectorEnv, VectorStep
from deft.errors import InputError

ENV_ID = "deft/Driving-v0"
CURVATURE_DISTANCES = np.array([0.0, 5.0, 10.0, 16.0, 24.0, 34.0])
NUM_NEIGHBOURS = 6
NEIGHBOUR_SIZE = 5
RANGE = 60.0  # metres ahead and behind in which others are seen
STATE_SIZE = 5 + NUM_LANES + 1 + len(CURVATURE_DISTANCES) + NUM_NEIGHBOURS * NEIGHBOUR_SIZE
STATE_LIMIT = 2.0

ObservationKind = Literal["vector", "image", "both"]


def observe(world: DrivingWorld) -> np.ndarray:
    """What a policy sees of every copy without a camera: float32 [N, 45], about -1 to 1.

    speed, steering, last acceleration, offset from the lane's centre, sine of the heading error (left positive); the
    lane, one-hot from the right; the rest of the route; the road's curvature 0, 5, 10, 16, 24 and 34 m ahead; then the
    6 nearest vehicles within 60 m: 1 for being there, metres ahead, metres to the left, and their speed and sideways
    speed relative to the ego's. What is not there is 0.
    """
    rows = np.arange(world.num_envs)
    lanes = np.zeros((world.num_envs, NUM_LANES))
    lanes[rows, world.target_lane] = 1.0
    ego = [
        world.speed / MAX_SPEED,
        world.steering / MAX_STEERING,
        world.command[:, 0],
        world.lateral_offset / (0.5 * LANE_WIDTH),
        2.0 * np.sin(world.heading_error),
        *lanes.T,
        world.remaining / ROUTE_LENGTH,
        *(20.0 * world.curvature(CURVATURE_DISTANCES)).T,
    ]
    ahead = world.ahead()
    seen = world.other_active & (np.abs(ahead) < RANGE)
    nearest = np.argsort(np.where(seen, np.abs(ahead), np.inf), axis=1, kind="stable")[:, :NUM_NEIGHBOURS]
    chosen = rows[:, None], nearest
    neighbours = np.stack(
        [
            np.ones(nearest.shape),
            ahead[chosen] / 50.0,
            (world.other_offset[chosen] - world.road_offset[:, None]) / 7.0,
            (world.other_speed[chosen] - world.speed[:, None]) / 10.0,
            world.other_side_speed[chosen] / 2.0,
        ],
        axis=2,
    )
    neighbours *= seen[chosen][:, :, None]
    state = np.concatenate([np.stack(ego, axis=1), neighbours.reshape(world.num_envs, -1)], axis=1)
    return np.minimum(np.maximum(state, -STATE_LIMIT), STATE_LIMIT).astype(np.float32)


def observation_space(observation: str, image_size: int) -> spaces.Space:
    """The space of one copy's observations; refuses what cannot be chosen."""
    if observation not in ("vector", "image", "both"):
        raise InputError(f"observation is {observation!r}; choose 'vector', 'image' or 'both'")
    if isinstance(image_size, bool) or not isinstance(image_size, int | np.integer) or not 16 <= image_size <= 512:
        raise InputError(f"image_size is {image_size!r}; choose 16 to 512 pixels")
    state = spaces.Box(-STATE_LIMIT, STATE_LIMIT, (STATE_SIZE,), np.float32)
    image = spaces.Box(0, 255, (3, int(image_size), int(image_size)), np.uint8)
    if observation == "both":
        return spaces.Dict({"image": image, "state": state})
    return state if observation == "vector" else image


def _drive(world: DrivingWorld, actions: np.ndarray) -> np.ndarray:
    """Step with actions [N, 2] in [-1, 1]; returns the rewards [N], the sum of their terms."""
    world.step(actions[:, 0] * np.float64(MAX_ACCELERATION), actions[:, 1] * np.float64(MAX_STEERING))
    reward = world.terms[:, 0].copy()
    for term in range(
        1, len(REWARD_TERMS)
    ):  # one after another: a row's sum must not depend on how many rows there are
        reward += world.terms[:, term]
    return reward


def _check_render_mode(render_mode: str | None) -> None:
    if render_mode not in (None, "rgb_array"):
        raise InputError(f"render_mode is {render_mode!r}; choose 'rgb_array' or None")


class DrivingEnv(gymnasium.Env[Any, np.ndarray]):
    """Drive 200 m along a winding three-lane road, through slower traffic, without touching it or leaving the road.

    **Action**: [acceleration, steering] in [-1, 1], of ±5 m/s² and ±0.25 rad; the wheels turn at 0.5 rad/s. A step is
    0.2 s. **Observation**: `vector` (see `observe`), `image` (uint8 [3, h, w], 48 m seen from above, heading up), or
    `both` in a Dict of `state` and `image`.

    **Episode**: ends at the end of the route (`info["success"]`), on a collision, or off the road; 150 steps at most.
    **Reward**, each part in `info["reward_terms"]`: progress (metres along the road), collision (-100), off_road
    (-100), comfort (-0.1 Σ|a - a_before|), lane (-0.5 |offset from the lane's centre|).
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012 (Gymnasium's own declaration)
    reward_terms = REWARD_TERMS

    def __init__(
        self,
        difficulty: str = "medium",
        observation: ObservationKind = "vector",
        image_size: int = 64,
        render_mode: Literal["rgb_array"] | None = None,
    ) -> None:
        """Choose the traffic and the road (`easy`, `medium`, `hard`), and what the policy sees."""
        _check_render_mode(render_mode)
        self.observation_space = observation_space(observation, image_size)
        self.action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.observation = observation
        self.image_size = int(image_size)
        self.render_mode = render_mode
        self.world = DrivingWorld(1, difficulty)

    def set_difficulty(self, level: str) -> None:
        """Choose easy, medium or hard for the episodes after this one."""
        self.world.set_difficulty(level)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Draw a road and traffic."""
        super().reset(seed=seed)
        self.world.generators[0] = self.np_random
        self.world.reset()
        return self._observe(), self._info()

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Drive for 0.2 s, then see what came of it."""
        world = self.world
        reward = _drive(world, np.clip(np.asarray(action, np.float32), -1.0, 1.0)[None])
        terminated = bool(world.reached[0] | world.collided[0] | world.off_road[0])
        info = self._info()
        info["reward_terms"] = dict(zip(REWARD_TERMS, world.terms[0].tolist(), strict=True))
        return self._observe(), float(reward[0]), terminated, False, info

    def expert_action(self) -> np.ndarray:
        """What the scripted driver does here."""
        return expert_action(self.world)[0]

    def render(self) -> np.ndarray | None:
        """A picture for videos, uint8 [480, 480, 3]."""
        return None if self.render_mode is None else picture(self.world, 0)

    def get_state(self) -> dict[str, Any]:
        """All that the future depends on, as plain data."""
        return self.world.get_state()[0]

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on from a saved state, bit for bit."""
        self.world.generators[0] = self.np_random
        self.world.set_state([state])

    def _info(self) -> dict[str, Any]:
        world = self.world
        return {
            "success": bool(world.reached[0]),
            "collision": bool(world.collided[0]),
            "off_road": bool(world.off_road[0]),
            "progress": float(world.progress[0]),
        }

    def _observe(self) -> Any:
        if self.observation == "image":
            return self.world.images(self.image_size)[0]
        state = observe(self.world)[0]
        if self.observation == "vector":
            return state
        return {"image": self.world.images(self.image_size)[0], "state": state}


class DrivingVectorEnv(VectorEnv):
    """N copies of the driving environment in one world; `DrivingEnv` says what they are."""

    def __init__(
        self,
        num_envs: int,
        *,
        max_episode_steps: int | None = MAX_EPISODE_STEPS,
        difficulty: str = "medium",
        observation: ObservationKind = "vector",
        image_size: int = 64,
        render_mode: Literal["rgb_array"] | None = None,
    ) -> None:
        _check_render_mode(render_mode)
        if max_episode_steps is not None and max_episode_steps < 1:
            raise InputError(f"max_episode_steps is {max_episode_steps}; choose at least 1, or None")
        super().__init__(
            num_envs,
            ObservationLayout(observation_space(observation, image_size)),
            ActionLayout(spaces.Box(-1.0, 1.0, (2,), np.float32)),
            reward_terms=REWARD_TERMS,
        )
        self.world = DrivingWorld(num_envs, difficulty)
        self.spec = copy.deepcopy(gymnasium.spec(ENV_ID))
        """How to make one copy of it alone: trainers evaluate in such a one."""
        self.spec.kwargs = {"difficulty": difficulty, "observation": observation, "image_size": int(image_size)}
        self.spec.max_episode_steps = max_episode_steps
        self._max_episode_steps = max_episode_steps
        self._kind = observation
        self._image_size = int(image_size)
        self._render_mode = render_mode
        self._returns = np.zeros(num_envs)
        self._terms = np.zeros((num_envs, len(REWARD_TERMS)))

    def reset(self, seed: int | Sequence[int] | None = None) -> Observation:
        """Start an episode in every copy; copy i gets `seed + i`, or the i-th of several seeds."""
        seeds = self._env_seeds(seed)
        self.world.reset(seeds=None if seed is None else [int(one) for one in seeds if one is not None])
        self._returns[:] = 0.0
        self._terms[:] = 0.0
        arrays = self._next_arrays()
        self._observe(arrays.observation)
        self._started = True
        return arrays.observation

    def step(self, actions: np.ndarray) -> VectorStep:
        """Step every copy with its row of `actions`."""
        prepared = self._prepare(actions)
        world, arrays = self.world, self._next_arrays()
        reward = _drive(world, prepared)
        self._returns += reward
        self._terms += world.terms
        arrays.reward[:] = reward
        assert arrays.reward_terms is not None
        arrays.reward_terms[:] = world.terms
        np.logical_or(world.collided, world.off_road, out=arrays.terminated)
        arrays.terminated |= world.reached
        if self._max_episode_steps is not None:
            np.greater_equal(world.elapsed_steps, self._max_episode_steps, out=arrays.truncated)
        done = np.flatnonzero(arrays.terminated | arrays.truncated)
        if not len(done):
            self._observe(arrays.observation)
            return self._result(arrays, [])
        self._observe(self._final, done)
        episodes = [self._end_episode(index) for index in done.tolist()]
        world.reset(done)
        self._observe(arrays.observation)
        return self._result(arrays, episodes)

    def get_state(self) -> list[dict[str, Any]]:
        """Plain data that `set_state` goes on from, one dict a copy."""
        return [
            {"world": encode(state), "episode_return": float(self._returns[row]), "terms": self._terms[row].tolist()}
            for row, state in enumerate(self.world.get_state())
        ]

    def set_state(self, states: list[dict[str, Any]]) -> None:
        """Go on from saved states."""
        self._check_states(states)
        self.world.set_state([decode(state["world"]) for state in states])
        self._returns[:] = [state["episode_return"] for state in states]
        self._terms[:] = [state["terms"] for state in states]
        self._observe(self._next_arrays().observation)
        self._started = True

    def state_obstacle(self) -> None:
        """Nothing keeps the state from being saved."""
        return None

    def call(self, name: str, *args: Any) -> list[Any]:
        """Call a method on every copy: `expert_action()` or `set_difficulty(level)`."""
        methods: dict[str, Callable[..., Any]] = {
            "expert_action": lambda: list(expert_action(self.world)),
            "set_difficulty": self.world.set_difficulty,
        }
        if name not in methods:
            raise InputError(f"environment 0 ({ENV_ID}) has no method {name!r}")
        result = methods[name](*args)
        return [None] * self.num_envs if result is None else result

    def render(self, index: int = 0) -> np.ndarray | None:
        """A picture of one copy; None where the environment was made without a render mode."""
        return None if self._render_mode is None else picture(self.world, index)

    def close(self) -> None:
        """Nothing is held."""

    def _end_episode(self, index: int) -> Episode:
        terms = dict(zip(REWARD_TERMS, self._terms[index].tolist(), strict=True))
        length, success = int(self.world.elapsed_steps[index]), bool(self.world.reached[index])
        episode = Episode(index, float(self._returns[index]), length, success, terms)
        self._returns[index] = 0.0
        self._terms[index] = 0.0
        return episode

    def _observe(self, arrays: Observation, rows: np.ndarray | None = None) -> None:
        """Write what the copies, or those of `rows`, see into their rows of the arrays."""
        chosen = slice(None) if rows is None else rows
        streams = arrays if isinstance(arrays, dict) else {"image" if self._kind == "image" else "state": arrays}
        if "state" in streams:
            streams["state"][chosen] = observe(self.world)[chosen]
        if "image" in streams:
            streams["image"][chosen] = self.world.images(self._image_size, rows)
