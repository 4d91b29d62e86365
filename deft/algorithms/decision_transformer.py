"""The Decision Transformer (Chen et al., 2021): supervised learning of actions, given the return that followed them.

The network and the way it acts are in `deft.models.decision_transformer`; its windows come from `deft.data.replay`.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import Space
from torch import Tensor

from deft import schema
from deft.algorithms import optimization
from deft.algorithms.algorithm import Metrics
from deft.algorithms.offline import PRECISIONS, OfflineAlgorithm
from deft.config.algorithm_settings import DTSettings
from deft.config.settings import DatasetPolicyConfig, PolicyConfig
from deft.data.datasets.dataset import Dataset
from deft.data.replay import EpisodeWindows
from deft.data.streaming import StreamingWindows, make_windows
from deft.errors import InputError
from deft.models.decision_transformer import DecisionTransformerPolicy
from deft.models.normalization import has_seen_data

log = logging.getLogger(__name__)


class DecisionTransformer(OfflineAlgorithm):
    """L = mean over real steps and action dims of (tanh(head(h_t)) − a_t)²; one batch of windows, one AdamW step.

    The learning rate is α · min((n + 1) / `warmup_steps`, 1) in update n.
    """

    name = "dt"
    exchanges_policies = False
    cannot_be_trained = "needs a target return"
    fixed_settings = ("n_head",)
    settings: DTSettings
    policy: DecisionTransformerPolicy

    def __init__(self, policy: DecisionTransformerPolicy, settings: DTSettings | None = None, seed: int = 0) -> None:
        if not isinstance(policy, DecisionTransformerPolicy):
            raise InputError(f"dt trains a DecisionTransformerPolicy; {type(policy).__name__} is not one")
        self.policy = policy
        self.settings = settings or DTSettings()
        self.device = policy.timestep.device
        decay = self.settings.weight_decay
        self.optimizer = optimization.make_optimizer(
            policy.parameters(), self.settings.learning_rate, weight_decay=decay, capturable=True
        )
        self._dropout = DropoutMasks(self.settings.dropout, self.device)

    @classmethod
    def make_policy(
        cls, observation_space: Space, action_space: Space, config: PolicyConfig, settings: DTSettings, **how: Any
    ) -> DecisionTransformerPolicy:
        """A transformer for the spaces."""
        if how.get("num_members", 1) > 1:
            raise InputError("num_seeds: dt trains one seed at a time; start a run for each")
        instead = {"hidden_dim": "embed_dim", "num_layers": "n_layer", "log_std_init": "nothing like it"}
        for name in instead:
            if getattr(config, name) != getattr(DatasetPolicyConfig, name):
                log.warning("%s: not used: dt has %s", name, instead[name])
        if config.name == "vla":
            raise InputError("policy: dt trains a transformer of its own, not a VLA model; leave policy.name out")
        return DecisionTransformerPolicy(
            observation_space, action_space, settings, config.encoder_dim, config.normalize_observation
        )

    def make_sampler(
        self, dataset: Dataset, seed: int, device: torch.device, cache_bytes: int
    ) -> EpisodeWindows | StreamingWindows:
        """Windows, out of memory or off the disk."""
        return make_windows(dataset, self.settings.context_length, seed, device, cache_bytes)

    def prepare(self, dataset: Dataset, sampler: EpisodeWindows | StreamingWindows, fresh: bool) -> None:
        """Put what the data says into the policy: normalisation, scale of returns, targets, the last timestep.

        A policy that is not fresh comes with them; targets that are given still count.
        """
        longest = int(dataset.lengths.max())
        if longest > self.settings.max_episode_length:
            raise InputError(
                f"max_episode_length: {self.settings.max_episode_length} is less than the dataset's longest episode; "
                f"set it to {longest}"
            )
        targets = self.settings.target_return
        if fresh:
            self.observe({schema.OBSERVATION: block} for block in sampler.observations())
            returns = dataset.episode_returns()
            scale = self.settings.return_scale or return_scale(returns)
            self.policy.set_data(scale, targets[0] if targets else float(returns.max()), longest)
        else:
            self.resumed()
            self.policy.last_timestep.clamp_(min=longest - 1)

    def resumed(self) -> None:
        """Aim at the targets that are given; the scale of returns is part of what was learned."""
        given, learned = self.settings.return_scale, float(self.policy.return_scale)
        if given is not None and has_seen_data(self.policy) and abs(given - learned) > 1e-6 * learned:
            raise InputError(f"return_scale: {given:g} is given, but the weights were trained with {learned:g}")
        if self.settings.target_return:
            self.policy.target_return.fill_(self.settings.target_return[0])

    def schedule(self) -> None:
        """Write the learning rate of the next update into the optimizer's tensor."""
        warmed = min((self.version + 1) / max(self.settings.warmup_steps, 1), 1.0)
        optimization.set_learning_rate(self.optimizer, self.settings.learning_rate * warmed)

    def _step(self, batch: Mapping[Any, Any]) -> Metrics:
        with self._precision():
            predicted = self.policy.predict(batch, self._masks(batch))
        weight = self._weight(batch)
        error = predicted - self.policy.to_unit(batch[schema.ACTION])
        # Σ w e² / Σ w, over steps and dims
        loss = (error.square() * weight).sum() / weight.expand_as(error).sum()
        optimization.backward(loss, self.optimizer)
        return {
            "action_loss": loss.detach(),
            "grad_norm": self.apply_gradients(self.optimizer, self.settings.max_grad_norm),
            "learning_rate": self.optimizer.param_groups[0]["lr"].clone(),
        }

    def state_dict(self) -> dict[str, Any]:
        """Optimizer and the number of updates, which the warm-up follows; dropout draws from torch's own generator."""
        return {"optimizer": optimization.optimizer_state(self.optimizer), "version": self.version}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`."""
        optimization.load_optimizer_state(self.optimizer, state["optimizer"])
        self.version = state["version"]

    def _precision(self) -> contextlib.AbstractContextManager[Any]:
        if self.settings.precision != "bf16":  # tf32 is a setting of the device
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, PRECISIONS[self.settings.precision])

    def _masks(self, batch: Mapping[Any, Any]) -> Iterator[Tensor] | None:
        if not self.settings.dropout:
            return None
        return self._dropout.draw(self.policy.mask_shapes(*batch[schema.TIMESTEP].shape))

    def _weight(self, batch: Mapping[Any, Any]) -> Tensor:
        """1 at the real dims of real steps, 0 at padding: [B, K, 1] or [B, K, A]."""
        weight = batch[schema.STEP_MASK].unsqueeze(-1).float()
        action_mask = batch.get(schema.ACTION_MASK, None)
        return weight if action_mask is None else weight * action_mask.float().unsqueeze(1)


def return_scale(returns: Sequence[float] | np.ndarray) -> float:
    """The power of ten at or below the largest return by size: 1000 for returns of some thousands."""
    largest = float(np.abs(returns).max())
    return 10.0 ** math.floor(math.log10(largest)) if largest > 0 else 1.0


class DropoutMasks:
    """Masks of 0 and 1 / (1 − p), all from one draw of 16 random bits an element; p is exact to 1 / 65,536.

    A Bernoulli draw for each mask takes four times as long on a CPU. The memory is kept: a draw overwrites the last.
    """

    def __init__(self, probability: float, device: torch.device) -> None:
        self.scale = 1.0 / (1.0 - probability) if probability < 1 else 0.0
        self.threshold = round(probability * 65536) - 32768
        self._bits = torch.empty(0, dtype=torch.int64, device=device)
        self._masks = torch.empty(0, device=device)

    def draw(self, shapes: Sequence[tuple[int, ...]]) -> Iterator[Tensor]:
        """One mask for each shape."""
        sizes = [math.prod(shape) for shape in shapes]
        if len(self._masks) != sum(sizes):
            self._masks = self._masks.new_empty(sum(sizes))
            self._bits = self._bits.new_empty((sum(sizes) + 3) // 4)
        self._bits.random_(-(2**63), None)
        torch.ge(self._bits.view(torch.int16)[: sum(sizes)], self.threshold, out=self._masks).mul_(self.scale)
        return iter([part.view(shape) for part, shape in zip(self._masks.split(sizes), shapes, strict=True)])
