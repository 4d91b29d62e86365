"""The driving environment: a single one for Gymnasium, and many that step at once for training.

`deft.envs` registers it as `deft/Driving-v0`; `deft.envs.make` uses `DrivingVectorEnv` for `vector: sync`. Both use a
`DrivingSimulator`, and an environment gives the same results bit for bit in either.
"""

from __future__ import annotations

import copy
from typing import Any, Literal

import gymnasium
import numpy as np
from gymnasium import spaces

from deft.envs.checks import check_choice, check_image_size, check_render_mode, check_whole
from deft.envs.driving import simulator as driving
from deft.envs.driving.expert import expert_action
from deft.envs.driving.rendering import images, render
from deft.envs.driving.simulator import REWARD_TERMS, DrivingSimulator
from deft.envs.spaces import action_space, image_space, vector_space
from deft.envs.state import decode, encode
from deft.envs.vector import BatchedVectorEnv, BatchStep
from deft.errors import InputError

ENV_ID = "deft/Driving-v0"
CURVATURE_DISTANCES = np.array([0.0, 5.0, 10.0, 16.0, 24.0, 34.0])
NUM_NEIGHBOURS = 6
NEIGHBOUR_SIZE = 5
RANGE = 60.0  # metres ahead and behind in which other vehicles are observed
STATE_SIZE = 5 + driving.NUM_LANES + 1 + len(CURVATURE_DISTANCES) + NUM_NEIGHBOURS * NEIGHBOUR_SIZE
STATE_LIMIT = 2.0

ObservationKind = Literal["vector", "image", "both"]


def observe(simulator: DrivingSimulator) -> np.ndarray:
    """Return the observations of all environments without a camera: float32 [N, 45], about -1 to 1.

    speed, steering, last acceleration, offset from the lane's centre, sine of the heading error (left positive); the
    lane, one-hot from the right; the rest of the route; the road's curvature 0, 5, 10, 16, 24 and 34 m ahead; then the
    6 nearest vehicles within 60 m: 1 for presence, metres ahead, metres to the left, and their speed and sideways
    speed relative to the ego's. Entries without a vehicle are 0.
    """
    rows = np.arange(simulator.num_envs)
    lanes = np.zeros((simulator.num_envs, driving.NUM_LANES))
    lanes[rows, simulator.target_lane] = 1.0
    ego = [
        simulator.speed / driving.MAX_SPEED,
        simulator.steering / driving.MAX_STEERING,
        simulator.command[:, 0],
        simulator.lateral_offset / (0.5 * driving.LANE_WIDTH),
        2.0 * np.sin(simulator.heading_error),
        *lanes.T,
        simulator.remaining / driving.ROUTE_LENGTH,
        *(20.0 * simulator.curvature(CURVATURE_DISTANCES)).T,
    ]
    ahead = simulator.ahead()
    seen = simulator.other_active & (np.abs(ahead) < RANGE)
    nearest = np.argsort(np.where(seen, np.abs(ahead), np.inf), axis=1, kind="stable")[:, :NUM_NEIGHBOURS]
    chosen = rows[:, None], nearest
    neighbours = np.stack(
        [
            np.ones(nearest.shape),
            ahead[chosen] / 50.0,
            (simulator.other_offset[chosen] - simulator.road_offset[:, None]) / 7.0,
            (simulator.other_speed[chosen] - simulator.speed[:, None]) / 10.0,
            simulator.other_side_speed[chosen] / 2.0,
        ],
        axis=2,
    )
    neighbours *= seen[chosen][:, :, None]
    state = np.concatenate([np.stack(ego, axis=1), neighbours.reshape(simulator.num_envs, -1)], axis=1)
    return np.minimum(np.maximum(state, -STATE_LIMIT), STATE_LIMIT).astype(np.float32)


class _Observer:
    """What the policy observes: the space, and the observations of some environments of a simulator."""

    def __init__(self, kind: str, image_size: int) -> None:
        check_choice("observation", kind, ("vector", "image", "both"))
        self.kind = kind
        self.image_size = check_image_size(image_size, 512)
        state, image = vector_space(STATE_SIZE, STATE_LIMIT), image_space(self.image_size)
        both = spaces.Dict({"image": image, "state": state})
        self.space: spaces.Space = {"vector": state, "image": image, "both": both}[kind]

    def __call__(self, simulator: DrivingSimulator, rows: np.ndarray | None = None) -> Any:
        """Return the observations [R, …] of the environments `rows`, or of all."""
        if self.kind == "image":
            return images(simulator, self.image_size, rows)
        state = observe(simulator) if rows is None else observe(simulator)[rows]
        return state if self.kind == "vector" else {"image": images(simulator, self.image_size, rows), "state": state}


def _drive(simulator: DrivingSimulator, actions: np.ndarray) -> np.ndarray:
    """Step with actions [N, 2] in [-1, 1]; return the rewards [N], the sum of their terms."""
    acceleration = actions[:, 0] * np.float64(driving.MAX_ACCELERATION)
    simulator.step(acceleration, actions[:, 1] * np.float64(driving.MAX_STEERING))
    reward = simulator.terms[:, 0].copy()
    for term in range(1, len(REWARD_TERMS)):  # in sequence: the sum of a row must not depend on the number of rows
        reward += simulator.terms[:, term]
    return reward


class DrivingEnv(gymnasium.Env[Any, np.ndarray]):
    """Drive 200 m along a winding three-lane road, through slower traffic, without a collision or leaving the road.

    **Action**: [acceleration, steering] in [-1, 1], of ±5 m/s² and ±0.25 rad; the wheels turn at 0.5 rad/s. A step is
    0.2 s. **Observation**: `vector` (see `observe`), `image` (uint8 [3, h, w], 48 m from above, heading up), or `both`
    in a Dict of `state` and `image`.

    **Episode**: ends at the end of the route (`info["success"]`), on a collision, or off the road; 150 steps at most.
    **Reward**, each term in `info["reward_terms"]`: progress (metres along the road), collision (-100), off_road
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
        """Choose the traffic and the road (`easy`, `medium`, `hard`), and the observation."""
        check_render_mode(render_mode)
        self._observe = _Observer(observation, image_size)
        self.observation_space = self._observe.space
        self.action_space = action_space(2)
        self.render_mode = render_mode
        self.simulator = DrivingSimulator(1, difficulty)

    def set_difficulty(self, level: str) -> None:
        """Set the difficulty (easy, medium, hard) of the next episodes."""
        self.simulator.set_difficulty(level)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Draw a road and traffic."""
        super().reset(seed=seed)
        self.simulator.generators[0] = self.np_random
        self.simulator.reset()
        return self._observation(), self._info()

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Drive for 0.2 s."""
        reward = _drive(self.simulator, np.clip(np.asarray(action, np.float32), -1.0, 1.0)[None])
        terms = dict(zip(REWARD_TERMS, self.simulator.terms[0].tolist(), strict=True))
        info = {**self._info(), "reward_terms": terms}
        return self._observation(), float(reward[0]), bool(self.simulator.terminated[0]), False, info

    def expert_action(self) -> np.ndarray:
        """Return the scripted driver's action."""
        return expert_action(self.simulator)[0]

    def render(self) -> np.ndarray | None:
        """Return an image for videos, uint8 [480, 480, 3]."""
        return None if self.render_mode is None else render(self.simulator, 0)

    def get_state(self) -> dict[str, Any]:
        """Return the complete state as plain data."""
        return self.simulator.get_state()[0]

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from a saved state, bit for bit."""
        self.simulator.generators[0] = self.np_random
        self.simulator.set_state([state])

    def _info(self) -> dict[str, Any]:
        simulator = self.simulator
        return {
            "success": bool(simulator.reached[0]),
            "collision": bool(simulator.collided[0]),
            "off_road": bool(simulator.off_road[0]),
            "progress": float(simulator.progress[0]),
        }

    def _observation(self) -> Any:
        rows = self._observe(self.simulator)
        return {name: stream[0] for name, stream in rows.items()} if isinstance(rows, dict) else rows[0]


class DrivingVectorEnv(BatchedVectorEnv):
    """N driving environments in one simulator; see `DrivingEnv`."""

    def __init__(
        self,
        num_envs: int,
        *,
        max_episode_steps: int | None = driving.MAX_EPISODE_STEPS,
        difficulty: str = "medium",
        observation: ObservationKind = "vector",
        image_size: int = 64,
        render_mode: Literal["rgb_array"] | None = None,
    ) -> None:
        check_render_mode(render_mode)
        if max_episode_steps is not None:
            check_whole("max_episode_steps", max_episode_steps, 1)
        self._observer = _Observer(observation, image_size)
        limit, terms = max_episode_steps, REWARD_TERMS
        super().__init__(num_envs, self._observer.space, action_space(2), max_episode_steps=limit, reward_terms=terms)
        self.simulator = DrivingSimulator(num_envs, difficulty)
        self.spec = copy.deepcopy(gymnasium.spec(ENV_ID))
        """How to make a single environment of this kind, for evaluation."""
        self.spec.kwargs = {"difficulty": difficulty, "observation": observation, "image_size": int(image_size)}
        self.spec.max_episode_steps = max_episode_steps
        self._render_mode = render_mode

    def _begin(self, seeds: list[int] | None) -> None:
        self.simulator.reset(seeds=seeds)

    def _advance(self, actions: np.ndarray) -> BatchStep:
        reward, simulator = _drive(self.simulator, actions), self.simulator
        return BatchStep(reward, simulator.terminated, success=simulator.reached, terms=simulator.terms)

    def _observe(self, rows: np.ndarray | None) -> Any:
        return self._observer(self.simulator, rows)

    def _restart(self, rows: np.ndarray) -> None:
        self.simulator.reset(rows)

    def get_state(self) -> list[dict[str, Any]]:
        """Return plain data for `set_state`, one dict per environment."""
        return [
            {"world": encode(state), "episode_return": float(total), "terms": terms.tolist()}
            for state, total, terms in zip(self.simulator.get_state(), self._returns, self._term_sums, strict=True)
        ]

    def set_state(self, states: list[dict[str, Any]]) -> None:
        """Continue from saved states."""
        self._check_states(states)
        self.simulator.set_state([decode(state["world"]) for state in states])
        self._returns[:] = [state["episode_return"] for state in states]
        self._term_sums[:] = [state["terms"] for state in states]
        self._lengths[:] = self.simulator.elapsed_steps
        self._observation_layout.write_batch(self._observe(None), self._next_arrays().observation)
        self._started = True

    def state_obstacle(self) -> None:
        """Return None: the state can be saved."""
        return None

    def call(self, name: str, *args: Any) -> list[Any]:
        """Call `expert_action()` or `set_difficulty(level)` of every environment."""
        if name == "expert_action":
            return list(expert_action(self.simulator))
        if name != "set_difficulty":
            raise InputError(f"environment 0 ({ENV_ID}) has no method {name!r}")
        self.simulator.set_difficulty(*args)
        return [None] * self.num_envs

    def render(self, index: int = 0) -> np.ndarray | None:
        """Return an image of one environment; None without a render mode."""
        return None if self._render_mode is None else render(self.simulator, index)
