"""The policy around a vision-language-action model: what a collector and an algorithm see of it.

Built from `PolicyConfig` with `name: vla`, or by hand around any module with the methods of `VLAModelInterface`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any, Self

import gymnasium
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

from deft import schema
from deft.errors import InputError
from deft.models.normalization import RewardNormalizer
from deft.models.policy import MODE, SAMPLE, SAMPLED_NOISE
from deft.models.unit_actions import ActionScale
from deft.models.vla.interface import as_vla_model, check_outputs, overrides

logger = logging.getLogger(__name__)


class VLAPolicy(ActionScale):
    """A VLA model as a `Policy`; every shape that the model gives is checked here.

    A new policy has the action scale 1: the model gives actions in the environment's units. Weights bring the scale
    that they were trained with, so that a model trained on the unit actions of a dataset acts in the robot's units.

    The model stays in `eval()` whatever the mode of the policy: dropout while acting would draw another network than
    the one that scores the action later, and PPO's ratios would not start at 1. So it also learns with dropout off.
    """

    def __init__(
        self,
        model: nn.Module,
        action_dim: int | None = None,
        chunk_length: int | None = None,
        normalize_reward: bool = False,
    ) -> None:
        super().__init__()
        self.model = as_vla_model(model)
        self.model_name = type(model).__name__
        self.action_dim = self.step_dim = self._agree("action_dim", action_dim)
        self.chunk_length = self._agree("chunk_length", chunk_length) or 1
        # Where neither model nor caller says how many dims there are, one number stands for all of them.
        size = 1 if self.step_dim is None else self.chunk_length * self.step_dim
        self.action_shape = (self.chunk_length, self.step_dim or -1)[self.chunk_length == 1 :]
        self.set_scale(torch.zeros(size), torch.ones(size))
        self._draw_method = "act" if overrides(model, "act") else "forward"
        self._score_method = "evaluate" if overrides(model, "evaluate") else "evaluate_actions"
        self._warned_of_sampling = False
        self.streams = self.model.streams
        self.reward_normalizer = RewardNormalizer() if normalize_reward else None
        self.model.eval()

    def train(self, mode: bool = True) -> Self:
        """Set the policy's mode; the model stays in evaluation mode (see the class)."""
        super().train(mode)
        self.model.eval()
        return self

    def act(self, td: TensorDictBase, deterministic: bool = False) -> TensorDictBase:
        """Draw actions (the most likely ones when deterministic) and add them with their log-prob and the value."""
        observations, batch = self._observations(td)
        model, method = self.model, self._draw_method
        if deterministic and not model.takes_deterministic and not self._warned_of_sampling:
            self._warned_of_sampling = True
            logger.warning("%s has no `deterministic` keyword: its actions are sampled", self.model_name)
        how: dict[str, Any] = {"deterministic": deterministic} if model.takes_deterministic else {}
        outputs = model.act(observations, **how, **self._mask_keyword(td))
        action, log_prob, value, *rest = check_outputs(model, "act", 4 if model.keeps_sample else 3, outputs)
        if model.keeps_sample:  # random values beside the action, such as the denoising chain of a flow
            td.set(schema.SAMPLE, TensorDict(dict(rest[0]), batch_size=[batch]))
        self._check_action(f"the action of {self.model_name}.{method}", action, batch)
        is_one_pass = method == "act"
        log_prob = self._scalar("act" if is_one_pass else "evaluate_actions", "log_prob", log_prob, batch)
        if not self.is_unit:
            action, log_prob = self.from_unit(action.flatten(1)), log_prob - self._log_widths(td)
        td.set(schema.ACTION, action)
        td.set(schema.LOG_PROB, log_prob)
        td.set(schema.VALUE, self._value("act" if is_one_pass else "get_value", value, batch))
        return td

    def action_selection(self, deterministic: bool) -> str:
        """A model without the keyword `deterministic` samples; a flow draws the noise that it starts from."""
        if not deterministic or not self.model.takes_deterministic:
            return SAMPLE
        return SAMPLED_NOISE if self.model.starts_from_noise else MODE

    def evaluate_actions(self, td: TensorDictBase) -> dict[str, Tensor]:
        """`log_prob`, `entropy` and `value` of stored actions, each [B] and differentiable."""
        observations, batch = self._observations(td)
        action = td[schema.ACTION]
        self._check_action("the stored action", action, batch)
        if self.is_unit:
            return self._evaluate(td, observations, action, batch)
        scored = self._evaluate(td, observations, self._as_chunks(self.to_unit(action)), batch)
        log_widths = self._log_widths(td)
        scored["log_prob"] = scored["log_prob"] - log_widths
        scored["entropy"] = scored["entropy"] + log_widths
        return scored

    def _evaluate(
        self, td: TensorDictBase, observations: TensorDictBase, action: Tensor, batch: int
    ) -> dict[str, Tensor]:
        """The model's scores of its own, unscaled actions."""
        keywords: dict[str, Any] = self._mask_keyword(td)
        if self.model.keeps_sample:
            if td.get(schema.SAMPLE, None) is None:
                raise InputError(f"{self.model_name} needs what an action was sampled with; no `sample` is stored")
            keywords["sample"] = td[schema.SAMPLE]
        if self.reports_tokens and overrides(self.model, "evaluate_tokens"):
            return self._evaluate_tokens(observations, action, keywords, batch)
        method = self._score_method
        scored = check_outputs(self.model, method, 3, self.model.evaluate(observations, action, **keywords))
        return {
            "log_prob": self._scalar(method, "log_prob", scored[0], batch),
            "entropy": self._scalar(method, "entropy", scored[1], batch),
            "value": self._value("evaluate" if method == "evaluate" else "get_value", scored[2], batch),
        }

    def _evaluate_tokens(
        self, observations: TensorDictBase, action: Tensor, keywords: dict[str, Any], batch: int
    ) -> dict[str, Tensor]:
        """By the model's optional method `evaluate_tokens`, which gives a log-prob for each token, [B, tokens]."""
        scored = self.model.evaluate_tokens(observations, action, **keywords)
        tokens, entropy, value = check_outputs(self.model, "evaluate_tokens", 3, scored)
        if tokens.ndim != 2 or len(tokens) != batch:
            raise InputError(
                f"log_prob of {self.model_name}.evaluate_tokens has shape {list(tokens.shape)}; it must have "
                f"[{batch}, tokens]"
            )
        return {
            "log_prob": tokens.sum(1),
            "token_log_prob": tokens,
            "entropy": self._scalar("evaluate_tokens", "entropy", entropy, batch),
            "value": self._value("evaluate_tokens", value, batch),
        }

    def get_value(self, td: TensorDictBase) -> Tensor:
        """V(observation), [B]."""
        observations, batch = self._observations(td)
        return self._value("get_value", self.model.get_value(observations), batch)

    def observe(self, td: TensorDictBase) -> None:
        """Update the running statistics of the model."""
        self.model.observe(td[schema.OBSERVATION])

    def freeze_statistics(self) -> None:
        """Freeze the running statistics of the model."""
        self.model.freeze_statistics()

    def value_only_parameters(self) -> Iterable[nn.Parameter]:
        """Return the model's `value_parameters`."""
        return self.model.value_parameters()

    def auxiliary_loss(self, td: TensorDictBase) -> Tensor:
        """The model's auxiliary loss, [B]."""
        observations, batch = self._observations(td)
        return self._scalar("auxiliary_loss", "loss", self.model.auxiliary_loss(observations), batch)

    def auxiliary_parameters(self) -> Iterable[nn.Parameter]:
        """Return the parameters that the model's auxiliary loss trains."""
        return self.model.auxiliary_parameters()

    # The action scale ---------------------------------------------------------------------------------------------

    def to_unit(self, action: Tensor) -> Tensor:
        """Actions, or chunks […, K, A] of them, as unit actions, a chunk in one row […, K · A]."""
        return super().to_unit(action.flatten(-2) if self.chunk_length > 1 else action)

    def complete_weights(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Those of checkpoints from before the policy had a scale: they act in the environment's units, scale 1."""
        scale = {"center": torch.zeros_like(self.center), "width": torch.ones_like(self.width)}
        completed = scale | dict(weights)
        if self.step_dim is None and completed["center"].shape != self.center.shape:
            self.set_scale(torch.zeros_like(completed["center"]), torch.ones_like(completed["width"]))
        return completed

    def check_box(self, space: gymnasium.Space) -> None:
        """As every scale; without one the model gives actions in the environment's units, whatever they are."""
        if not self.is_unit:
            super().check_box(space)

    def _as_chunks(self, unit: Tensor) -> Tensor:
        """Unit actions [B, K · A] as the model has them: [B, K, A], or [B, A] without chunks."""
        return unit.unflatten(-1, (self.chunk_length, -1)) if self.chunk_length > 1 else unit

    def _log_widths(self, td: TensorDictBase) -> Tensor:
        """Σ log(half width) over the real dims: from a density of unit actions to one in the environment's units."""
        mask = td.get(schema.ACTION_MASK, None)
        logs = self.width.log().view(self.chunk_length, -1).sum(0)
        return logs.sum() if mask is None else (logs * mask).sum(-1)

    # The border between Deft and the model ---------------------------------------------------------------------------

    def _agree(self, name: str, given: int | None) -> int | None:
        """The size that the caller gives and the model says, where they do not contradict each other."""
        own = getattr(self.model, name)
        if given is not None and own is not None and given != own:
            raise InputError(f"{name} {given} does not fit VLA model {self.model_name}, built with {name} {own}")
        return own if given is None else given

    def _observations(self, td: TensorDictBase) -> tuple[TensorDictBase, int]:
        observations = td[schema.OBSERVATION]
        if not isinstance(observations, TensorDictBase):
            raise InputError(
                f"VLA model {self.model_name} reads named streams; this environment's observation is one tensor "
                f"{list(observations.shape)}: use an environment with a Dict observation space"
            )
        if td.batch_dims != 1:
            raise InputError(f"VLAPolicy takes a batch [B]; this one is {list(td.batch_size)}: flatten it first")
        return observations, td.batch_size[0]

    def _mask_keyword(self, td: TensorDictBase) -> dict[str, Any]:
        mask = td.get(schema.ACTION_MASK, None)
        if mask is None:
            return {}
        if self.model.takes_action_mask:
            return {"action_mask": mask}
        if not bool(mask.all()):
            raise InputError(
                f"the environment pads its actions, but VLA model {self.model_name} takes no `action_mask`: "
                "the padded dims would enter its log-probs"
            )
        return {}

    def _check_action(self, source: str, action: Tensor, batch: int) -> None:
        steps = [self.chunk_length] if self.chunk_length > 1 else []
        dims = action.shape[-1:] if self.step_dim is None else [self.step_dim]
        if action.ndim != 2 + len(steps) or list(action.shape) != [batch, *steps, *dims]:
            expected = ", ".join(map(str, [batch, *steps, self.step_dim or "A"]))
            raise InputError(f"{source} has shape {list(action.shape)}; it must have [{expected}]")

    def _scalar(self, method: str, name: str, values: Tensor, batch: int) -> Tensor:
        if tuple(values.shape) != (batch,):
            raise InputError(
                f"{name} of {self.model_name}.{method} has shape {list(values.shape)}; it must have [{batch}]"
            )
        return values

    def _value(self, method: str, values: Tensor, batch: int) -> Tensor:
        if tuple(values.shape) != (batch, 1):
            raise InputError(
                f"value of {self.model_name}.{method} has shape {list(values.shape)}; it must have [{batch}, 1]"
            )
        return values.squeeze(1)
