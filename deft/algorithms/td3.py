"""TD3 (Fujimoto et al., 2018): a deterministic policy that explores with Gaussian noise; off-policy, online."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from deft.algorithms.algorithm import Metrics
from deft.algorithms.off_policy import TwinDelayed
from deft.algorithms.replay import ReplayLearner
from deft.config.algorithm_settings import TD3Settings
from deft.errors import InputError
from deft.models.policy import Encoded, Policy

SMALLEST_NOISE = 1e-8


class TD3(ReplayLearner, TwinDelayed):
    """With ã = clip(π̄(s') + clip(ε, ±c)) and the target critics and policy Q̄, π̄:

    L_Q = E (r + γ min Q̄(s', ã) − Q(s, a))²,   L_π = −E Q₁(s, π(s)).
    The policy and all targets move every `policy_delay` updates. It acts with a = clip(π(s) + N(0, σ²)), where σ is
    `exploration_noise`: the deviation of its Gaussian, which is not trained.
    """

    name = "td3"
    settings: TD3Settings

    def __init__(self, policy: Policy, settings: TD3Settings | None = None, seed: int = 0) -> None:
        if not list(policy.noise_parameters()):
            raise InputError(
                f"policy: td3 explores with one standard deviation per action dimension, and {type(policy).__name__} "
                "here has none (squashed Gaussians have their own): use distribution gaussian, as the runs of td3-bc, "
                "rebrac, iql and sft have, or train it with sac"
            )
        super().__init__(policy, settings or TD3Settings(), seed)
        self._set_noise()

    def _set_noise(self) -> None:
        for parameter in self.policy.noise_parameters():
            parameter.data.fill_(math.log(max(self.settings.exploration_noise, SMALLEST_NOISE)))

    def _actor_trains(self) -> Iterator[nn.Parameter]:
        noise = {id(parameter) for parameter in self.policy.noise_parameters()}
        yield from (parameter for parameter in super()._actor_trains() if id(parameter) not in noise)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state. The exploration noise is a setting: a resumed run may have another one."""
        super().load_state_dict(state)
        self._set_noise()

    def _step(self, batch: Mapping[Any, Any]) -> Metrics:
        return super()._step(self._shifted(batch))

    def _read(self, batch: Mapping[Any, Any]) -> tuple[Encoded, Tensor, Encoded, Tensor, Tensor]:
        """The batch with the actions that the environment executed: clipped to its bounds."""
        state, action, next_state, reward, discount = super()._read(batch)
        return state, action.clamp(-1.0, 1.0), next_state, reward, discount

    def _improve(self, state: Encoded, action: Tensor) -> Metrics:
        """One policy step, after `critic_warmup`."""
        if self._warms_up:
            return {}
        chosen = self.policy.mean(state)
        policy_loss = -self.critics.first_values(state.for_critics, chosen).mean(-1)
        self.descend(policy_loss.sum(), self.actor_optimizer)
        return {"policy_loss": policy_loss.detach().mean()}
