"""The F1 environments on MuJoCo Warp: the batched tabletop with histories of frames and actions in the 32-dim layout.

`deft.envs.make` makes them for `env.vector: warp`. Streams, actions and time limits are those of `F1RLEnv`, whose class
on the CPU describes them; histories are tensors on the device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from deft import schema
from deft.envs.f1 import F1RLEnv, StudentEnv, TeacherEnv, read_task_config
from deft.envs.history import executed_action
from deft.envs.layout import ActionLayout, ObservationLayout
from deft.envs.make import SHORT_NAMES, full_id
from deft.envs.padded import PADDED_SIZE
from deft.envs.robot_env import tabletop_arguments
from deft.envs.state import decode, encode
from deft.envs.tabletop.control import hand_down, padded_index
from deft.envs.tabletop.panda import NUM_JOINTS
from deft.envs.tabletop.warp.env import WarpTabletopEnv
from deft.envs.vector import VectorEnv, VectorStep
from deft.errors import InputError


class WarpF1Env(VectorEnv):
    """N robots, each with a history of its last H steps; see `F1RLEnv`."""

    def __init__(
        self, kind: type[F1RLEnv], num_envs: int, task_config: Mapping[str, Any] | None = None, **arguments: Any
    ) -> None:
        """`arguments` are those of `F1RLEnv`, `device` and `num_scenes`; the rewards are the simulator's."""
        device, num_scenes = arguments.pop("device", "auto"), arguments.pop("num_scenes", None)
        limit = arguments.pop("max_episode_steps", None)
        if arguments.pop("chunk_length", 1) > 1:
            raise InputError("env.vector: warp has no action chunks for F1 environments; use sync or process")
        arguments.pop("gamma", None)
        world = read_task_config(task_config, {}).world
        if full_id(world) != SHORT_NAMES["tabletop"]:
            raise InputError(f"world is {world!r}; env.vector warp simulates only the tabletop")
        if arguments.get("teacher_policy") is not None:
            raise InputError("teacher_policy: not with env.vector warp; use sync or process")
        template = kind(task_config, **arguments)
        config = template.config
        layout, actions = ObservationLayout(template.observation_space), ActionLayout(template.action_space)
        super().__init__(
            num_envs,
            observation_space=layout.space,
            action_space=actions.space,
            action_mask=template.action_mask,
            reward_terms=template.reward_terms,
        )
        scenes = {} if num_scenes is None else {"num_scenes": num_scenes}
        needs_head = schema.HEAD_RGB in self._names
        self.env = WarpTabletopEnv(
            num_envs,
            device=device,
            max_episode_steps=template.max_steps if limit is None else min(limit, template.max_steps),
            **scenes,
            **tabletop_arguments(config, needs_head),
        )
        self.device = self.env.device
        self._mode, self._length, self._stride = config.control_mode, config.n_obs_img_steps, config.obs_img_stride
        self._mask = self._tensor(template.action_mask, torch.float32)
        self._index = self._tensor(padded_index(self._mode), torch.int64)
        normalizer = template.state_normalizer
        self._state_index = self._tensor(normalizer.mask.nonzero()[0], torch.int64)
        self._lower, self._upper = (
            self._tensor(bound, torch.float32) for bound in (normalizer.lower, normalizer.upper)
        )
        self._cameras = tuple(name for name in (schema.HEAD_RGB, schema.WRIST_RGB) if name in self._names)
        self._rings: dict[str, Tensor] = {}  # frames [N, H · stride, 3, h, w], actions [N, H · stride, 32]
        self._observation: dict[str, Tensor] = {}
        self._contacts = torch.zeros(num_envs, dtype=torch.int64, device=self.device)

    @property
    def _names(self) -> list[str]:
        return list(self.observation_space.spaces)  # type: ignore[attr-defined]

    @property
    def reward_weights(self) -> Any:
        """[K]: weights of the reward terms; None: all are 1."""
        return self.env.reward_weights

    @reward_weights.setter
    def reward_weights(self, weights: Any) -> None:
        self.env.reward_weights = weights

    @property
    def observation(self) -> Any:
        """The latest observation."""
        return dict(self._observation)

    def reset(self, seed: int | Sequence[int] | None = None) -> Any:
        """Start an episode in every environment, with histories of its first frame and of zero actions."""
        present = self.env.reset(seed)
        self._rings = self._first_rings(present)
        self._observation = self._with_histories(present, self._rings)
        return self.observation

    def step(self, actions: Any) -> VectorStep:
        """Step every environment with its row of `actions`, a tensor or array [N, 32]."""
        actions = torch.as_tensor(actions, dtype=torch.float32, device=self.device)
        if actions.shape != (self.num_envs, PADDED_SIZE):
            raise InputError(f"actions have shape {tuple(actions.shape)}; F1 takes {(self.num_envs, PADDED_SIZE)}")
        executed = executed_action(actions, self._mask)
        step = self.env.step(actions[:, self._index])
        self._contacts += self.env.simulation.touching()  # of the physics before a reset
        present: Any = step.observation
        rings = self._following_rings(executed, present, self._rings)
        final: Any = step.final_observation
        if final is not None:
            rows: Any = step.done_index
            last = {name: ring[rows] for name, ring in self._rings.items()}
            final = self._with_histories(final, self._following_rings(executed[rows], final, last))
            first = self._first_rings({name: stream[rows] for name, stream in present.items()})
            for name, ring in rings.items():
                ring[rows] = first[name]
        self._rings = rings
        self._observation = self._with_histories(present, rings)
        return dataclasses.replace(step, observation=self.observation, final_observation=final)

    def render(self, index: int = 0) -> Any:
        """Return the head camera's image of one environment for videos, uint8 [320, 320, 3]."""
        return self.env.render(index)

    def call(self, name: str, *args: Any) -> list[Any]:
        """Call `take_contacts` of every environment, as `ContactEnv` has it."""
        if name != "take_contacts":
            return super().call(name, *args)
        found = self._contacts.tolist()
        self._contacts.zero_()
        return found

    def get_state(self) -> list[dict[str, Any]] | None:
        """Return plain data for `set_state`, including the histories."""
        states = self.env.get_state()
        if states is None:
            return None
        rings = {name: ring.cpu().numpy() for name, ring in self._rings.items()}
        return [
            {"simulator": state, "rings": encode({name: ring[index].copy() for name, ring in rings.items()})}
            for index, state in enumerate(states)
        ]

    def set_state(self, states: list[dict[str, Any]]) -> None:
        """Continue from saved states."""
        self.env.set_state([state["simulator"] for state in states])
        names = (*self._cameras, schema.ACTION_HISTORY)
        saved = [decode(state["rings"]) for state in states]
        self._rings = {
            name: torch.stack([torch.from_numpy(rings[name]) for rings in saved]).to(self.device) for name in names
        }
        self._observation = self._with_histories(self.env.observation, self._rings)

    def state_obstacle(self) -> str | None:
        """Explain in one line why the state cannot be saved; None if it can."""
        return self.env.state_obstacle()

    def close(self) -> None:
        """Close the simulation."""
        self.env.close()

    def _tensor(self, values: Any, dtype: torch.dtype) -> Tensor:
        return torch.as_tensor(values, dtype=dtype, device=self.device)

    def _first_rings(self, observation: Mapping[str, Tensor]) -> dict[str, Tensor]:
        size = self._length * self._stride
        rings = {name: observation[name][:, None].repeat(1, size, 1, 1, 1) for name in self._cameras}
        count = len(observation[schema.STATE])
        return {**rings, schema.ACTION_HISTORY: torch.zeros(count, size, PADDED_SIZE, device=self.device)}

    def _following_rings(
        self, actions: Tensor, observation: Mapping[str, Tensor], rings: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Return the rings with an action and the frames after it, without their oldest entries."""
        added = {**observation, schema.ACTION_HISTORY: actions}
        return {name: torch.cat([ring[:, 1:], added[name][:, None]], 1) for name, ring in rings.items()}

    def _with_histories(self, observation: Mapping[str, Tensor], rings: Mapping[str, Tensor]) -> dict[str, Tensor]:
        streams = {name: rings[name][:, self._stride - 1 :: self._stride] for name in self._cameras}
        streams[schema.ACTION_HISTORY] = rings[schema.ACTION_HISTORY][:, :: self._stride]
        streams[schema.STATE] = self._state(observation[schema.STATE])
        streams[schema.INSTRUCTION] = observation[schema.INSTRUCTION]
        return {name: streams[name] for name in self._names}

    def _state(self, state: Tensor) -> Tensor:
        """Return the robot's state, about -1 to 1, in the 32-dim layout."""
        arm = state[:, :NUM_JOINTS] if self._mode == "delta_qpos" else state[:, 15:18]
        if self._mode == "delta_ee":
            first, second = state[:, 18:21], state[:, 21:24]
            rotation = torch.stack([first, second, torch.linalg.cross(first, second)], 2)
            arm = torch.cat([arm, _rotation_vectors(rotation @ self._tensor(hand_down(0.0).T, torch.float32))], 1)
        raw = torch.cat([arm, state[:, 14:15]], 1)
        padded = torch.zeros(len(state), PADDED_SIZE, device=self.device)
        padded[:, self._state_index] = 2 * (raw - self._lower) / (self._upper - self._lower) - 1
        return padded


def _rotation_vectors(rotation: Tensor) -> Tensor:
    """Return axis times angle of rotation matrices [N, 3, 3] by less than half a turn."""
    twice = torch.stack(
        [
            rotation[:, 2, 1] - rotation[:, 1, 2],
            rotation[:, 0, 2] - rotation[:, 2, 0],
            rotation[:, 1, 0] - rotation[:, 0, 1],
        ],
        1,
    )
    sine = 0.5 * twice.norm(dim=1, keepdim=True)
    cosine = 0.5 * (rotation.diagonal(dim1=1, dim2=2).sum(1, keepdim=True) - 1)
    return 0.5 * twice * torch.where(sine > 1e-6, torch.atan2(sine, cosine) / sine.clamp(min=1e-6), 1.0)


class WarpTeacherEnv(WarpF1Env):
    """Phase 1: head and wrist camera."""

    def __init__(self, num_envs: int, task_config: Mapping[str, Any] | None = None, **arguments: Any) -> None:
        """The arguments of `WarpF1Env` except `kind`."""
        super().__init__(TeacherEnv, num_envs, task_config, **arguments)


class WarpStudentEnv(WarpF1Env):
    """Phases 2 and 3: only the wrist camera."""

    def __init__(self, num_envs: int, task_config: Mapping[str, Any] | None = None, **arguments: Any) -> None:
        """The arguments of `WarpF1Env` except `kind`."""
        super().__init__(StudentEnv, num_envs, task_config, **arguments)
