"""A policy that is conditioned on an advantage indicator: whether an action is better than what is usual in its state.

`deft train recap` trains it; it acts with the indicator "positive". Built from `PolicyConfig` with a section
`advantage` (`deft.models.building`). V of the returns, which labels the data, is a part of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

from deft import schema
from deft.config.settings import PolicyConfig
from deft.errors import InputError
from deft.models.action_scale import into_box
from deft.models.encoders import make_encoder
from deft.models.legacy_weights import keep_reward_normalizer
from deft.models.mlp import BatchedMLP
from deft.models.normalization import RewardNormalizer, RunningNormalizer
from deft.models.policy import SAMPLE, Encoded, Policy
from deft.models.wrapping import WrappingPolicy

POSITIVE, NEGATIVE, NONE = 1.0, -1.0, 0.0  # values of the indicator; NONE: it is not given
FIRST_LAYER = ".weights.0"  # of an MLP, by the end of its name
WORDS = (b" positive", b" negative")  # the indicator in the text of an instruction


class ReturnModel(nn.Module):
    """V(o): the mean return from an observation on, fitted to recorded returns-to-go."""

    def __init__(self, space: gymnasium.Space, config: PolicyConfig) -> None:
        super().__init__()
        self.encoder = make_encoder(space, config)
        self.network = BatchedMLP(1, self.encoder.dim, (config.hidden_dim,) * config.num_layers, 1)
        self.statistics = RunningNormalizer((), clip=float("inf"), epsilon=1e-6)  # of the first returns, then frozen

    def normalized(self, observation: Any) -> Tensor:
        """V in standard deviations from the mean of the returns, [B]."""
        return self.network(self.encoder(observation).unsqueeze(0))[0, :, 0]

    def forward(self, observation: Any) -> Tensor:
        """V(o), [B]."""
        return self.statistics.inverse(self.normalized(observation))


class AdvantagePolicy(WrappingPolicy):
    """π(a | o, I) by another policy, whose observation has the indicator I ∈ {1, −1, 0 (none)}.

    With a stream `instruction` I is the last word of its text, so that weights of a policy without an indicator fit.
    Otherwise it is one more number of the vector, for which such weights are widened, or a stream `advantage`. It acts
    with I = 1; with a guidance w ≠ 1 (classifier-free guidance) its mean is μ(o, 0) + w (μ(o, 1) − μ(o, 0)).
    """

    def __init__(self, base: Policy, observation_space: gymnasium.Space, config: PolicyConfig) -> None:
        super().__init__()
        assert config.advantage is not None
        self.wrap(base)
        self.policy_config, self.guidance = config, config.advantage.guidance
        self.returns = ReturnModel(observation_space, config)
        self.is_continuous, self.has_mean, self.recurrent = base.is_continuous, base.has_mean, base.recurrent
        self.acts_on_features = base.acts_on_features
        if isinstance(observation_space, spaces.Dict):
            read = frozenset(observation_space)
            self.streams = read if base.streams is None else (base.streams | read) - {schema.ADVANTAGE}
        self.reward_normalizer = RewardNormalizer() if config.normalize_reward else None
        if not self.is_continuous:
            raise InputError("recap: needs continuous actions in a Box and a policy without recurrent memory")
        if self.guidance != 1.0 and not self.has_mean:
            raise InputError("guidance: shifts the most likely action, which this policy's head has not; use 1")

    # -- the indicator -------------------------------------------------------------------------------------------------

    def conditioned(self, observation: Any, indicator: Tensor | float = POSITIVE) -> Any:
        """Return observations with the indicator, [B] or one for all."""
        if isinstance(observation, Tensor):
            column = _column(indicator, len(observation), observation.device)
            return torch.cat([observation.float(), column.unsqueeze(-1)], -1)
        rows = dict(observation.items())
        example = next(iter(rows.values()))
        column = _column(indicator, len(example), example.device)
        if schema.INSTRUCTION in rows:
            rows[schema.INSTRUCTION] = _with_word(rows[schema.INSTRUCTION], column)
        else:
            rows[schema.ADVANTAGE] = column.unsqueeze(-1)
        return TensorDict(rows, batch_size=[len(example)]) if isinstance(observation, TensorDictBase) else rows

    def _conditioned_rows(self, td: TensorDictBase, indicator: float = POSITIVE) -> TensorDictBase:
        rows = td.copy()
        rows.set(schema.OBSERVATION, self.conditioned(td[schema.OBSERVATION], indicator))
        return rows

    # -- for collectors and on-policy algorithms -----------------------------------------------------------------------

    def act(self, td: TensorDictBase, deterministic: bool = False) -> TensorDictBase:
        """Act with the positive indicator."""
        acted = self.base.act(self._conditioned_rows(td), deterministic)
        for key in (schema.ACTION, schema.LOG_PROB, schema.SAMPLE, schema.VALUE):
            if acted.get(key, None) is not None:
                td.set(key, acted[key])
        if self.guidance != 1.0:
            with torch.no_grad():
                shift = self._guidance_shift(td[schema.OBSERVATION])[0]
                unit = self.to_unit(td[schema.ACTION]) + shift
                td.set(schema.ACTION, self.from_unit(unit.clamp(-1.0, 1.0)))
        return td

    def _guidance_shift(self, observation: Any) -> Tensor:
        """(w − 1) (μ(o, 1) − μ(o, 0)), [1, B, A]."""
        states = [self.base.encode_to_act(self.conditioned(observation, one)) for one in (POSITIVE, NONE)]
        means = [self.base.mean(state) for state in states]
        return (self.guidance - 1.0) * (means[0] - means[1])

    def action_selection(self, deterministic: bool) -> str:
        """As the conditioned policy selects."""
        return self.base.action_selection(True) if deterministic else SAMPLE

    def evaluate_actions(self, td: TensorDictBase) -> dict[str, Tensor]:
        """Score stored actions under the positive indicator; without guidance, whose actions have no density."""
        if self.guidance != 1.0:
            raise InputError("guidance: actions of a guided policy cannot be scored; use --guidance 1 for ppo and grpo")
        return self.base.evaluate_actions(self._conditioned_rows(td))

    def get_value(self, td: TensorDictBase) -> Tensor:
        """V of the conditioned policy, [B]."""
        return self.base.get_value(self._conditioned_rows(td))

    def observe(self, td: TensorDictBase | Mapping[str, Any]) -> None:
        """Update the observation normalisation of the policy and of the model of returns; none is of the indicator."""
        if isinstance(td, TensorDictBase) and td.batch_dims > 1:  # a rollout [T, N]
            td = td.select(schema.OBSERVATION).flatten(0, 1)
        observation = td[schema.OBSERVATION]
        self.returns.encoder.observe(observation)
        rows = len(observation) if isinstance(observation, Tensor) else len(next(iter(observation.values())))
        # Both signs: mean 0 and deviation 1, so that normalisation leaves the indicator as it is.
        signs = torch.ones(rows).index_fill_(0, torch.arange(0, rows - rows % 2, 2), NEGATIVE)
        self.base.observe({schema.OBSERVATION: self.conditioned(observation, signs)})

    # -- for off-policy, offline and supervised algorithms -------------------------------------------------------------

    @property
    def reward_scale(self) -> Tensor:  # type: ignore[override]
        """Factor on the rewards of the conditioned policy's V."""
        return self.base.reward_scale

    def encode(self, observation: Any, object_positions: Tensor | None = None) -> Encoded:
        """Encode observations with the positive indicator."""
        return self.base.encode(self.conditioned(observation), object_positions)

    def mean(self, state: Encoded) -> Tensor:
        """The most likely unit action under the positive indicator, without guidance."""
        return into_box(self.base.mean(state))

    def log_prob(self, state: Encoded, unit: Tensor) -> Tensor:
        """Log-density of unit actions under the positive indicator."""
        return self.base.log_prob(state, unit)

    def sample(self, state: Encoded, count: int = 1) -> tuple[Tensor, Tensor]:
        """Unit actions under the positive indicator, and their log-densities."""
        return self.base.sample(state, count)

    def state_value(self, features: Tensor) -> Tensor:
        """V of the conditioned policy."""
        return self.base.state_value(features)

    def imitation(self, observation: Any, unit: Tensor, step_mask: Tensor | None, loss: str) -> dict[str, Tensor]:
        """The loss of imitating actions as positive ones."""
        return self.base.imitation(self.conditioned(observation), unit, step_mask, loss)

    def actor_parameters(self) -> Iterator[nn.Parameter]:
        """Those of the conditioned policy."""
        yield from self.base.actor_parameters()

    def encoder_parameters(self) -> Iterator[nn.Parameter]:
        """Those of the conditioned policy."""
        yield from self.base.encoder_parameters()

    def value_parameters(self) -> Iterator[nn.Parameter]:
        """Those of the conditioned policy's V."""
        yield from self.base.value_parameters()

    def complete_weights(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Weights of such a policy, or those of one without an indicator with a new model of returns."""
        completed, is_alone = self.with_base_weights(weights)
        if is_alone:
            completed = self._with_indicator(completed)
        return keep_reward_normalizer(self, completed)

    def _with_indicator(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Weights of a policy of a vector, with rows for the indicator that leave its actions as they are.

        The rows of the first layers are 0, the statistics those of a number with mean 0 and deviation 1.
        """
        widened = dict(weights)
        for name, own in self.state_dict().items():
            given = weights.get(name)
            is_statistic = ".normalizer." in name
            if given is None or not (is_statistic or name.endswith(FIRST_LAYER)) or given.dim() != own.dim():
                continue
            axis = max(own.dim() - 2, 0)  # of the inputs: [inputs] or [1, inputs, outputs]
            if own.dim() and given.shape == (*own.shape[:axis], own.shape[axis] - 1, *own.shape[axis + 1 :]):
                filling = 1.0 if name.endswith((".variance", ".scale")) else 0.0
                row = torch.full_like(given.narrow(axis, 0, 1), filling)
                widened[name] = torch.cat([given, row], axis)
        return widened


def conditioned_space(space: gymnasium.Space, is_vla: bool) -> gymnasium.Space:
    """Return the observation space of the policy that reads the indicator."""
    if isinstance(space, spaces.Dict) and schema.INSTRUCTION in space.spaces:
        length = int(np.prod(space[schema.INSTRUCTION].shape or ())) + len(WORDS[0])
        return spaces.Dict({**space.spaces, schema.INSTRUCTION: spaces.Box(0, 255, (length,), np.uint8)})
    if is_vla:
        raise InputError("recap: a VLA model reads the indicator in its instruction, and the observation has none")
    if isinstance(space, spaces.Dict):
        return spaces.Dict({**space.spaces, schema.ADVANTAGE: spaces.Box(-1.0, 1.0, (1,), np.float32)})
    if isinstance(space, spaces.Box) and len(space.shape) == 1 and space.dtype != np.uint8:
        low, high = (np.append(bound, one) for bound, one in ((space.low, -1.0), (space.high, 1.0)))
        return spaces.Box(low.astype(np.float32), high.astype(np.float32))
    raise InputError(f"recap: adds an indicator to a vector or to named streams; the observation is {space}")


def _column(indicator: Tensor | float, count: int, device: torch.device) -> Tensor:
    if isinstance(indicator, Tensor):
        return indicator.to(device)
    return torch.full((count,), indicator, device=device)


def _with_word(text: Tensor, indicator: Tensor) -> Tensor:
    """Texts, uint8 [B, L], with the indicator as their last word; without one they are padded to the same length."""
    words = torch.tensor([list(word) for word in WORDS], dtype=torch.uint8, device=text.device)
    chosen = torch.where((indicator == NONE).unsqueeze(-1), 0, words[(indicator < 0).long()])
    padded = torch.cat([text, torch.zeros_like(chosen)], -1)
    ends = (text != 0).sum(-1, keepdim=True) + torch.arange(chosen.shape[-1], device=text.device)
    return padded.scatter(-1, ends, chosen)
