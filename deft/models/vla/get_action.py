"""Wrap an object with `get_action(obs, deterministic=False)` as a policy that PPO, GRPO and SAC can train.

`build_trainer` calls `wrap_policy` for a `policy` argument that is not a `Policy`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDictBase
from torch import Tensor, nn

from deft import schema
from deft.config.settings import PolicyConfig
from deft.errors import DeftError, InputError, RunError
from deft.models.distributions import GaussianHead
from deft.models.encoders import ObservationEncoder, is_image
from deft.models.mlp import BatchedMLP
from deft.models.policy import Policy
from deft.models.privileged import public_space
from deft.models.vla.interface import BaseVLAModel, missing_methods, takes_keyword
from deft.models.vla.policy import VLAPolicy

MOST_LEVELS = 4  # of nested objects and containers that are searched for a user's modules
SAME_ACTION = 1e-3  # tolerance between two calls with one observation, in half ranges of the action


def wrap_policy(
    policy: Any,
    observation_space: gymnasium.Space,
    action_space: gymnasium.Space,
    config: PolicyConfig,
) -> Policy:
    """Wrap a VLA model, or an object with `get_action`, as a `Policy`."""
    if isinstance(policy, Policy):
        return policy
    lacks = missing_methods(policy)
    if lacks and not callable(getattr(policy, "get_action", None)):
        raise InputError(
            f"policy: {type(policy).__name__} is no deft.Policy, has no get_action(obs, deterministic=False), and "
            f"lacks {', '.join(lacks)} of deft.VLAModelInterface"
        )
    given: dict[str, Any] = {"observation_space": observation_space, "action_space": action_space, "config": config}
    if not lacks:
        return VLAPolicy(policy, **given)
    public = public_space(observation_space, config.critic_observation)
    return GetActionPolicy(GetActionModel(policy, public, action_space, config), **given)


class GetActionModel(BaseVLAModel):
    """`VLAModelInterface` around `get_action`, whose action is the mean of a Gaussian with a learned deviation.

    The torch modules and parameters in the object's attributes are registered here: they are trained, saved and moved
    with the policy, and the object keeps using them. The value has an encoder of its own over all streams. With
    `unit_actions` actions are in [-1, 1], the range of the Box; with `separate_value` the policy has the value.
    """

    center: Tensor
    width: Tensor

    def __init__(
        self,
        policy: Any,
        observation_space: gymnasium.Space,
        action_space: gymnasium.Space,
        config: PolicyConfig,
    ) -> None:
        super().__init__()
        self.name = type(policy).__name__
        if not isinstance(action_space, spaces.Box):
            raise InputError(
                f"{self.name}.get_action gives the mean of a Gaussian, which needs actions in a Box; the environment's "
                f"are {action_space}: leave `policy` out, or write a deft.Policy"
            )
        self.policy = policy  # registered here if it is a module
        self.parts = nn.ModuleDict()
        self.weights = nn.ParameterDict()
        if not isinstance(policy, nn.Module):
            for path, part in find_modules(policy):
                if isinstance(part, nn.Module):
                    self.parts[path] = part
                else:
                    self.weights[path] = part
        if not any(parameter.requires_grad for parameter in self.parameters()):
            raise InputError(
                f"nothing to train in {self.name}: none of its attributes holds a torch module or parameter that "
                "requires a gradient"
            )
        self._takes_deterministic = takes_keyword(policy.get_action, "deterministic")
        self._action_shape = tuple(action_space.shape)
        self._single, self._text = _stream_names(observation_space)
        box = GaussianHead(action_space, config.log_std_init)
        self.register_buffer("center", box.center.clone())
        self.register_buffer("width", box.width.clone())
        unit_box = spaces.Box(-1.0, 1.0, self._action_shape)
        self.head = GaussianHead(unit_box, config.log_std_init) if config.unit_actions else box
        self.encoder: ObservationEncoder | None = None
        if not config.separate_value:
            self.encoder = ObservationEncoder(observation_space, config.encoder_dim, config.normalize_observation)
            self.value = BatchedMLP(1, self.encoder.dim, tuple(config.hidden_sizes), 1)
        self._is_checked = False

    def __deepcopy__(self, memo: dict[int, Any]) -> GetActionModel:
        """Copy the model and the object, for a collector in another thread and for the reference of GRPO."""
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        try:
            copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        except TypeError as error:
            raise InputError(
                f"{self.name} cannot be copied ({_one_line(error)}), which VLA mode and GRPO need: give it __deepcopy__"
            ) from error
        return copied

    # -- VLAModelInterface ---------------------------------------------------------------------------------------------

    def forward(self, observations: Any, deterministic: bool = False, action_mask: Tensor | None = None) -> Tensor:
        """Sample actions; the object's own when deterministic."""
        return self.head.sample(self._mean(observations), action_mask, deterministic)[0]

    def act(
        self, observations: Any, deterministic: bool = False, action_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Actions, their log-probs and the values, with one call of `get_action`."""
        action, log_prob = self.head.sample(self._mean(observations), action_mask, deterministic)
        return action, log_prob, self.get_value(observations)

    def evaluate_actions(
        self, observations: Any, actions: Tensor, action_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Log-prob and entropy of given actions."""
        return self.head.score(self._mean(observations), actions, action_mask)

    def noise_parameters(self) -> Iterator[Tensor]:
        """Yield the deviation of the head."""
        yield from self.head.noise_parameters()

    def gaussian(self, observations: Any) -> tuple[Tensor, Tensor]:
        """The mean in the units of the head, and the log of the deviation."""
        return self._mean(observations), self.head.log_std

    def get_value(self, observations: Any) -> Tensor:
        """V by its own encoder, [B, 1]; 0 with `separate_value`, where the policy has V."""
        if self.encoder is None:
            return torch.zeros(len(observations), 1, device=self.center.device)
        return self.value(self.encoder(observations).unsqueeze(0))[0]

    def value_parameters(self) -> Iterator[nn.Parameter]:
        """The value and its encoder."""
        assert self.encoder is not None
        yield from self.encoder.parameters()
        yield from self.value.parameters()

    # -- calls of the object -------------------------------------------------------------------------------------------

    def _mean(self, observations: Any) -> Tensor:
        """The object's action in half ranges of the Box: [B, dims of the action]."""
        streams = self._streams(observations)
        if not self._is_checked:
            self._check(streams)
        mean = self._call_object(streams)
        if torch.is_grad_enabled() and not mean.requires_grad:
            self._raise_without_gradient()
        return mean

    def _call_object(self, streams: dict[str, Any]) -> Tensor:
        keywords = {"deterministic": True} if self._takes_deterministic else {}
        try:
            action = self.policy.get_action(streams, **keywords)
        except DeftError:
            raise
        except Exception as error:
            if isinstance(error, KeyError) and error.args and error.args[0] not in streams:
                raise InputError(
                    f"{self.name}.get_action reads obs[{error}]; the environment's streams are {', '.join(streams)}"
                ) from error
            raise RunError(f"{self.name}.get_action raised {_one_line(error)}") from error
        if not isinstance(action, Tensor):
            raise InputError(
                f"{self.name}.get_action returned {type(action).__name__}; it must return a torch tensor, so that "
                "gradients flow into the object's modules"
            )
        batch = len(next(iter(streams.values())))
        if tuple(action.shape) != (batch, *self._action_shape):
            chunk = f"; for chunks give {self.name} the attribute chunk_length" if action.ndim == 3 else ""
            raise InputError(
                f"{self.name}.get_action returned actions {list(action.shape)} for {batch} observations; it must be "
                f"{[batch, *self._action_shape]}{chunk}"
            )
        return (action.float().flatten(1) - self.center) / self.width

    def _check(self, streams: dict[str, Any]) -> None:
        """Check once that gradients flow, and that equal observations give equal actions."""
        with torch.inference_mode(False), torch.enable_grad():
            copies = {name: part.clone() if isinstance(part, Tensor) else part for name, part in streams.items()}
            first, second = self._call_object(copies), self._call_object(copies)
        if not first.requires_grad:
            self._raise_without_gradient()
        if not bool(first.isfinite().all()):
            raise InputError(f"{self.name}.get_action returned actions that are not finite")
        if not torch.allclose(first, second, rtol=SAME_ACTION, atol=SAME_ACTION):
            raise InputError(
                f"{self.name}.get_action(obs, deterministic=True) returns other actions when it is called again; "
                "it must return the mean, and Deft samples around it"
            )
        self._is_checked = True

    def _raise_without_gradient(self) -> None:
        if any(parameter.requires_grad for parameter in self.parameters()):  # a frozen copy is not trained
            raise InputError(
                f"{self.name}.get_action gives actions without a gradient (torch.no_grad, detach or numpy inside it?): "
                "nothing in it could be trained"
            )

    def _streams(self, observations: Any) -> dict[str, Any]:
        """Convert a batch of observations for the object: tensors by name, instructions as a list of str."""
        if isinstance(observations, Tensor):
            return {self._single: observations}
        streams: dict[str, Any] = {_name(key): part for key, part in observations.items()}
        if self._text in streams:
            rows = streams[self._text].cpu().numpy()
            streams[self._text] = [schema.decode_text(row) for row in rows]
        return streams


class GetActionPolicy(VLAPolicy):
    """The policy around a `GetActionModel`, in any environment with a Box of actions."""

    def observe(self, td: Any) -> None:
        """Update the running statistics of the value's encoder, the only ones."""
        self.observe_value(td)

    def observe_value(self, td: Any) -> None:
        """Update the running statistics of the value's encoder, which is a part of the model or of the policy."""
        super().observe_value(td)
        model: Any = self.model
        if model.encoder is not None:
            model.encoder.observe(td[schema.OBSERVATION])

    def _observations(self, td: TensorDictBase) -> tuple[Any, int]:
        return td[schema.OBSERVATION], td.batch_size[0]


def find_modules(owner: Any) -> list[tuple[str, nn.Module | nn.Parameter]]:
    """The torch modules and parameters in an object's attributes, by path, without those inside another module."""
    found: list[tuple[str, nn.Module | nn.Parameter]] = []
    seen: set[int] = set()

    def search(value: Any, path: str, level: int) -> None:
        if id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, nn.Module | nn.Parameter):
            found.append((path, value))
        elif level < MOST_LEVELS:
            for key, inner in _attributes(value):
                search(inner, f"{path}/{key}" if path else key, level + 1)

    search(owner, "", 0)
    inside: set[int] = set()
    for _, part in found:
        if isinstance(part, nn.Module):
            inside |= {id(inner) for inner in part.modules() if inner is not part}
            inside |= {id(parameter) for parameter in part.parameters()}
    return [(path, part) for path, part in found if id(part) not in inside]


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((str(key).replace(".", "_"), inner) for key, inner in value.items())
    elif isinstance(value, list | tuple):
        yield from ((str(index), inner) for index, inner in enumerate(value))
    elif not isinstance(value, type | Tensor | np.ndarray | gymnasium.Env):
        yield from getattr(value, "__dict__", {}).items()


def _stream_names(space: gymnasium.Space) -> tuple[str, str | None]:
    """Name of a single stream, and of the stream with instructions: `instruction`, or the only row of bytes."""
    if not isinstance(space, spaces.Dict):
        return ("image" if is_image(space) else schema.STATE), None
    rows = [
        name
        for name, part in space.spaces.items()
        if isinstance(part, spaces.Box) and part.dtype == np.uint8 and len(part.shape) == 1
    ]
    if schema.INSTRUCTION in rows:
        return "", schema.INSTRUCTION
    return "", rows[0] if len(rows) == 1 else None


def _name(key: Any) -> str:
    return key if isinstance(key, str) else "/".join(key)


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ")
