"""CARLA as a Gymnasium environment with a camera, a state and an instruction: `--env carla`, extra `carla`.

Registered as `deft/Carla-v0`. It drives a `CarlaClient` (`carla_client.py`) with throttle and steering. A server has
one ego vehicle: the environments of a process that use the same server alternate by episodes.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn

import gymnasium
import numpy as np
from gymnasium import spaces

from deft import schema
from deft.envs.adapters.carla_client import CarlaClient
from deft.envs.checks import check_difficulty, check_image_size, check_render_mode, check_whole
from deft.envs.serial import SerialVectorEnv
from deft.envs.spaces import action_space, image_space, text_space, vector_space
from deft.envs.state import StateObstacle
from deft.envs.waypoints.protocol import MAX_GAP, outcome_info
from deft.errors import InputError, RunError

ENV_ID = "deft/Carla-v0"
INSTRUCTION = "drive safely"
REWARD_SCALE = 10.0  # the terms of waypoint simulators are a tenth of the driving environment's
STATE_SIZE = 8
STATE_LIMIT = 2.0
MAX_INTERRUPTED = 2


@dataclass
class _Shared:
    """One client of one server, and the environment whose episode it runs."""

    client: CarlaClient
    settings: dict[str, Any]
    users: list[CarlaEnv] = field(default_factory=list)
    active: CarlaEnv | None = None
    thread: int = 0


_CLIENTS: dict[tuple[str, int], _Shared] = {}


class CarlaEnv(gymnasium.Env[dict[str, Any], np.ndarray]):
    """Drive `route_length` metres through the traffic of a town without a collision or leaving the road.

    **Action**: [acceleration, steering] in [-1, 1]; acceleration is the throttle above 0 and the brake below, steering
    is positive to the left. A step is `ticks_per_step` ticks of 0.1 s. **Observation**, a Dict: `image` (uint8
    [3, h, w], the front camera, or the one above the vehicle with `camera="above"`), `state` (float32 [8]: speed /
    20 m/s, acceleration / 10 m/s², steering, gap to the vehicle ahead / 60 m, closing speed / 20 m/s, metres left of
    the lane's middle / 2, sine of the heading error, rest of the route) and `instruction` (text).

    **Episode**: ends at the end of the route (`info["success"]`), on a collision, or off the road; truncated after
    `max_seconds`. **Reward**, each part in `info["reward_terms"]`: progress (metres along the road), collision (-100),
    off_road (-100), comfort (-0.1 Σ|a - a_before|), lane (-0.5 |offset from the lane's middle|, -2 for a crossed solid
    line); lane and comfort are summed over the ticks.

    If another environment of this process resets on the same server, this environment's episode ends: its next step
    does nothing and is truncated, with `info["interrupted"]`.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 5}  # noqa: RUF012 (Gymnasium's own declaration)
    reward_terms = CarlaClient.reward_terms

    def __init__(
        self,
        difficulty: str = "medium",
        image_size: int = 64,
        instruction: str = INSTRUCTION,
        camera: Literal["front", "above"] = "front",
        ticks_per_step: int = 2,
        host: str = "127.0.0.1",
        port: int = 2000,
        render_mode: Literal["rgb_array"] | None = None,
        **settings: Any,
    ) -> None:
        """`settings` are further arguments of `CarlaClient`: town, timeout, route_length, max_seconds, …"""
        check_render_mode(render_mode)
        check_image_size(image_size)
        check_whole("ticks_per_step", ticks_per_step, 1)
        self.difficulty = check_difficulty(difficulty)
        self.instruction = str(instruction)
        self.ticks_per_step = ticks_per_step
        self.render_mode = render_mode
        self._address = (host, port)
        self._shared = _connect(self, {"camera_size": image_size, "camera": camera, **settings})
        self.action_space = action_space(2)
        self.observation_space = spaces.Dict(
            {
                "image": image_space(image_size),
                schema.STATE: vector_space(STATE_SIZE, STATE_LIMIT),
                schema.INSTRUCTION: text_space(max(1, len(self.instruction))),
            }
        )
        self._last: dict[str, Any] = {}
        self._num_interrupted = 0  # episodes in a row that were interrupted before their first step
        self._has_stepped = False

    @property
    def client(self) -> CarlaClient:
        """The client of the server."""
        return self._shared.client

    def set_difficulty(self, level: str) -> None:
        """Set the traffic (easy, medium, hard) of the next episodes."""
        self.difficulty = check_difficulty(level)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Spawn the vehicle and the traffic at random positions."""
        super().reset(seed=seed)
        shared, thread = self._shared, threading.get_ident()
        if shared.active not in (None, self) and shared.thread != thread:
            raise RunError(
                "env carla: collecting and evaluating at the same time need a server each; use --buffer_type standard, "
                "or --eval_freq 0"
            )
        shared.active, shared.thread, self._has_stepped = self, thread, False
        self.client.set_difficulty(self.difficulty)
        self.client.reset(np.arange(1), [int(self.np_random.integers(2**31))])
        self._last = self._observe()
        return dict(self._last), {"success": False, "collision": False, "off_road": False, "progress": 0.0}

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Hold throttle and steering for one step."""
        if self._shared.active is not self:
            self._num_interrupted = 0 if self._has_stepped else self._num_interrupted + 1
            if self._num_interrupted > MAX_INTERRUPTED:
                raise RunError("env carla: several environments use one server; use a separate port for each")
            nothing = dict.fromkeys(self.reward_terms, 0.0)
            return dict(self._last), 0.0, False, True, {"interrupted": True, "reward_terms": nothing}
        acceleration, steering = np.clip(np.asarray(action, np.float64), -1.0, 1.0).tolist()
        self._has_stepped = True
        outcome = self.client.drive(acceleration, steering, self.ticks_per_step)
        self._last = self._observe()
        info = {**outcome_info(outcome, REWARD_SCALE), "progress": self.client.travelled}
        reward = sum(info["reward_terms"].values())
        return dict(self._last), reward, bool(outcome.terminated[0]), bool(outcome.truncated[0]), info

    def expert_action(self) -> np.ndarray:
        """Return the scripted driver's action: along the lane, behind the vehicle ahead."""
        return np.array(self.client.expert_command(), np.float32)

    def render(self) -> np.ndarray | None:
        """Return the camera's image, uint8 [h, w, 3]."""
        return None if self.render_mode is None or not self._last else self._last["image"].transpose(1, 2, 0)

    def get_state(self) -> NoReturn:
        """Raise StateObstacle: a server does not expose its state."""
        raise StateObstacle("a CARLA server, whose state cannot be saved")

    def set_state(self, state: dict[str, Any]) -> NoReturn:
        """Raise StateObstacle, as `get_state`."""
        raise StateObstacle("a CARLA server, whose state cannot be saved")

    def close(self) -> None:
        """Close the client, unless another environment of this process uses it. Further calls do nothing."""
        shared = self._shared
        if self in shared.users:
            shared.users.remove(self)
            if shared.active is self:
                shared.active = None
            if not shared.users:
                _CLIENTS.pop(self._address, None)
                shared.client.close()

    def _observe(self) -> dict[str, Any]:
        streams = self.client.observe()
        speed, acceleration, _, gap, closing = streams[schema.MOTION][0].tolist()
        offset, heading = self.client.lane_error()
        rest = 1.0 - self.client.travelled / self.client.server.route_length
        ego = [speed / 20, acceleration / 10, self.client.steering]
        state = [*ego, gap / MAX_GAP, closing / 20, offset / 2, heading, rest]
        return {
            "image": streams[schema.CAMERA][0],
            schema.STATE: np.clip(state, -STATE_LIMIT, STATE_LIMIT).astype(np.float32),
            schema.INSTRUCTION: self.instruction,
        }


class CarlaVectorEnv(SerialVectorEnv):
    """The single environment of a server as a vector environment."""

    def __init__(self, num_envs: int, *, max_episode_steps: int | None = None, **kwargs: Any) -> None:
        if num_envs != 1:
            raise InputError(f"env carla: a server has one ego vehicle; give --num_envs 1, not {num_envs}")
        super().__init__([gymnasium.make(ENV_ID, max_episode_steps, disable_env_checker=True, **kwargs)])


def _connect(env: CarlaEnv, settings: dict[str, Any]) -> _Shared:
    """Return the client of the environment's server: that of another environment of this process, or a new one."""
    shared = _CLIENTS.get(env._address)
    if shared is None:
        host, port = env._address
        shared = _CLIENTS[env._address] = _Shared(CarlaClient(host=host, port=port, **settings), settings)
    elif shared.settings != settings:
        raise InputError(
            f"env carla: an environment with other settings ({shared.settings}) uses the server at "
            f"{':'.join(map(str, env._address))}; use the same settings, or another port"
        )
    shared.users.append(env)
    return shared
