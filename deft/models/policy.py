"""What a policy is to the rest of Deft: the base class of every trainable actor.

Collectors call `act`, algorithms call `evaluate_actions` and `get_value`; both hand over TensorDicts in the schema.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
from tensordict import TensorDictBase
from torch import Tensor, nn

from deft.errors import InputError
from deft.models.normalization import RewardNormalizer

MODE, SAMPLE, SAMPLED_NOISE = "mode", "sample", "sampled noise"  # see `Policy.action_selection`


class Policy(nn.Module):
    """An actor with a value estimate.

    `act` followed by `evaluate_actions` on the same weights gives the same log-prob: whatever was random while acting
    and is needed to score the action again goes into `schema.SAMPLE` and is stored with the transition. Padded action
    dims (`schema.ACTION_MASK`) never enter a log-prob or an entropy.
    """

    recurrent: bool = False
    """Whether `act` reads `schema.MEMORY` and writes `schema.NEXT_MEMORY`; `evaluate_actions` then takes [T, B]."""
    needs_reward: bool = False
    """Whether `act` reads `schema.PREVIOUS_REWARD`."""
    chunk_length: int = 1
    """Env steps that one call of `act` decides."""
    streams: frozenset[str] | None = None
    """Names of the observation's streams that it reads; None: all that it was made for."""
    reports_tokens: bool = False
    """Set by an algorithm that asks for `token_log_prob` [B, tokens] from `evaluate_actions`, where a policy has it."""
    reward_normalizer: RewardNormalizer | None
    """Scales rewards for the algorithm; a submodule, so that it is saved with the policy."""

    def __init__(self) -> None:
        super().__init__()
        self.reward_normalizer = None

    def complete_weights(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Weights of this policy with what checkpoints of earlier versions lack; called before they are loaded."""
        return dict(weights)

    def act(self, td: TensorDictBase, deterministic: bool = False) -> TensorDictBase:
        """Add `action`, `sample_log_prob` and `value` (and the next memory) to `td` and return it."""
        raise TypeError(f"{type(self).__name__} does not define act")

    def action_selection(self, deterministic: bool) -> str:
        """How `act` selects actions, for the results of an evaluation.

        `mode`: the most likely action. `sample`: drawn as in training. `sampled noise`: a flow's, denoised without more
        noise from a start that is drawn.
        """
        return MODE if deterministic else SAMPLE

    def auxiliary_loss(self, td: TensorDictBase) -> Tensor:
        """A loss that a policy has besides its reward, [B], for observations alone (`deft.algorithms.auxiliary`)."""
        raise InputError(f"auxiliary_learning_rate: {type(self).__name__} learns from its reward alone")

    def auxiliary_parameters(self) -> Iterable[nn.Parameter]:
        """What `auxiliary_loss` trains, and nothing else does then."""
        raise InputError(f"auxiliary_learning_rate: {type(self).__name__} learns from its reward alone")

    def act_arrays(self, observation: np.ndarray | dict[str, np.ndarray]) -> dict[str, np.ndarray] | None:
        """A quicker way to act than `act`, where a policy has one: the same keys, as arrays; None where it has not."""
        return None

    def evaluate_actions(self, td: TensorDictBase) -> dict[str, Tensor]:
        """`log_prob`, `entropy` and `value` of the stored actions, each [B] (or [T, B]) and differentiable."""
        raise TypeError(f"{type(self).__name__} does not define evaluate_actions")

    def get_value(self, td: TensorDictBase) -> Tensor:
        """V(observation), [B]."""
        raise TypeError(f"{type(self).__name__} does not define get_value")

    def initial_memory(self, num_envs: int) -> Tensor | None:
        """The memory at an episode's first step, [num_envs, layers, hidden] of zeros; None without memory."""
        return None

    def value_only_parameters(self) -> Iterable[nn.Parameter]:
        """Parameters that the value's gradient moves without changing any action: `value_warmup` trains no others."""
        raise InputError(
            f"value_warmup: {type(self).__name__} does not name the parameters that only its value depends on; define "
            "value_only_parameters(), or use value_warmup 0"
        )

    def observe_value(self, td: TensorDictBase) -> None:
        """Take a rollout's observations into statistics that only the value depends on, where there are any."""

    def observe(self, td: TensorDictBase) -> None:
        """Take a rollout's observations into the running statistics. Called after the update, never during it."""

    def freeze_statistics(self) -> None:
        """Keep the statistics observed so far for good; do nothing without any.

        Called after a dataset was observed and after the weights of a trained policy were loaded. The statistics of a
        `RunningNormalizer` need nothing here: the algorithm that trains the policy next freezes them.
        """


def members_of(policy: Policy) -> list[Policy]:
    """The policies of all seeds that were trained at once; the policy itself where there is one."""
    count = getattr(policy, "num_members", 1)
    return [policy] if count == 1 else [policy.member(index) for index in range(count)]  # type: ignore[operator]
