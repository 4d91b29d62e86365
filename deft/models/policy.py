"""The contract of a policy: the base class of everything that acts and is trained.

Collectors call `act`; PPO and GRPO call `evaluate_actions` and `get_value`; the off-policy and offline algorithms call
`encode`, `sample`, `log_prob`, `mean`, `imitation_loss` and `state_value`. `ActorCritic` implements all of it for
networks from scratch, `VLAPolicy` for VLA models, so that every algorithm continues with the policy of any other.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDictBase
from torch import Tensor, nn

from deft import schema
from deft.config.settings import PolicyConfig
from deft.errors import InputError
from deft.models.inpainting import Inpainting
from deft.models.normalization import RewardNormalizer
from deft.models.privileged import PrivilegedValue, public_space

logger = logging.getLogger(__name__)
CRITIC = "critic."  # prefix of the weights of `Policy.critic`
MODE, SAMPLE, SAMPLED_NOISE = "mode", "sample", "sampled noise"  # see `Policy.action_selection`


class Encoded(NamedTuple):
    """An observation with its features, which policy and critics share: [members, B, F]."""

    observation: Any
    features: Tensor
    shared_features: Tensor | None = None  # [B, F]: features of a VLA model with the gradient of its own loss
    auxiliary_loss: Tensor | None = None  # [members]: loss of labels, where the observation has any
    step_mask: Tensor | None = None  # bool [B, K]: which steps of the chunks are real
    output: Tensor | None = None  # of the actor network, where it is known already
    privileged: Tensor | None = None  # [members, B, P]: what critics read beside the features (`critic_observation`)
    base_action: Tensor | None = None  # [members, B, A]: unit action of the frozen policy in a residual policy
    action_mask: Tensor | None = None  # bool [B, A]: which action dims are real, where some are padded

    @property
    def for_critics(self) -> Tensor:
        """The input of critics, [members, B, F + P]."""
        return self.features if self.privileged is None else torch.cat([self.features, self.privileged], -1)


class Policy(nn.Module):
    """π(a | o) with a value estimate.

    `act` followed by `evaluate_actions` on the same weights gives the same log-prob: whatever was random while acting
    and is needed to score the action again goes into `schema.SAMPLE` and is stored with the transition. Padded action
    dims (`schema.ACTION_MASK`) never enter a log-prob or an entropy.

    Off-policy methods take and return unit actions, [members, B, A]: [-1, 1] in each dim is the range of the Box.
    Several members (seeds) may share one policy object, their layers batched.
    """

    recurrent: bool = False
    """Whether `act` reads `schema.MEMORY` and writes `schema.NEXT_MEMORY`; `evaluate_actions` then takes [T, B]."""
    needs_reward: bool = False
    """Whether `act` reads `schema.PREVIOUS_REWARD`."""
    capturable: bool = False
    """Whether a gradient step on `evaluate_actions` may be captured as a CUDA graph: it never waits for the GPU."""
    chunk_length: int = 1
    """Env steps that one call of `act` decides."""
    streams: frozenset[str] | None = None
    """Names of the observation's streams that it reads; None: all that it was made for."""
    reports_tokens: bool = False
    """Set by an algorithm that needs `token_log_prob` [B, tokens] from `evaluate_actions`, where a policy has it."""
    reparameterizes: bool = False
    """Set by an algorithm that needs the stored actions as functions of the weights from `evaluate_actions`:
    `reparameterized`, rows of unit actions [B, A] whose noise is held fixed; and for dims that are drawn from a few
    values, `alternatives` [B, n, A], which differ in one such dim, and `alternative_probs` [B, n]."""
    critic_streams: tuple[str, ...] = ()
    """Names of the streams that V alone reads (`critic_observation`); an observation without them is enough to act."""
    critic: PrivilegedValue | None
    """V of those streams; None in a policy that was built without them."""
    reward_normalizer: RewardNormalizer | None
    """Scales rewards for the algorithm; a submodule, so that it is saved with the policy."""
    policy_config: PolicyConfig | None = None
    """The settings that it was built from; None for a policy of another kind."""

    is_continuous: bool = False
    """Whether the off-policy methods below are defined: its actions lie in a Box."""
    has_mean: bool = False
    """Whether `mean` is defined."""
    can_reparameterize: bool = False
    """Whether `evaluate_actions` can return actions with a gradient; see `reparameterizes`."""
    has_samples: bool = True
    """Whether the samples of `sample` are differentiable and have a log-density, where it is defined."""
    acts_on_features: bool = False
    """Whether its actions depend on the observation through the features of `encode` alone."""
    noise_shape: tuple[int, int] | None = None
    """Shape [K, D] of the noise that `denoise` starts from, in a policy that denoises; None in any other."""
    can_inpaint: bool = False
    """Whether `denoise` can be guided towards a running chunk (`deft.models.inpainting`)."""
    num_members: int = 1
    action_dim: Any = None
    center: Any
    """Centre of the action range, [A]."""
    feature_dim: int
    hidden_sizes: tuple[int, ...]
    """Hidden layers of critics."""
    reward_scale: Tensor
    """Factor on the rewards that V and critics were trained with."""

    def __init__(self) -> None:
        super().__init__()
        self.reward_normalizer = None
        self.critic = None

    def executed(self, unit: Tensor) -> Tensor:
        """Unit actions as the environment executes them: clipped, if the action range is bounded."""
        raise InputError(f"{type(self).__name__} has no unit actions")

    # -- privileged streams --------------------------------------------------------------------------------------------

    def _add_critic(self, space: gymnasium.Space | None, config: PolicyConfig) -> gymnasium.Space | None:
        """Build V of the privileged streams, if the space has them; return the space without them."""
        self.critic_streams = names = tuple(config.critic_observation)
        if not names or not isinstance(space, spaces.Dict):
            return space
        if all(name in space.spaces for name in names):
            hidden_sizes = (config.hidden_dim,) * config.num_layers
            self.critic = PrivilegedValue(space, names, hidden_sizes, self.num_members)
        return public_space(space, names)

    def _privileged_value(self, td: TensorDictBase) -> Tensor:
        """V of the privileged streams."""
        if self.critic is None:
            raise InputError(
                f"the value reads {', '.join(self.critic_streams)} (critic_observation), and this policy was built for "
                "observations without these streams: it acts, but has no value"
            )
        return self.critic(td[schema.OBSERVATION])

    def _privileged_features(self, observation: Any) -> Tensor | None:
        """What critics read beside the features of the policy, [members, B, P]."""
        if self.critic is None:
            return None
        features = self.critic.encoder(observation)
        return features if features.ndim == 3 else features.unsqueeze(0)

    @property
    def critic_dim(self) -> int:
        """Number of features that critics read."""
        return self.feature_dim + (0 if self.critic is None else self.critic.encoder.dim)

    def value_of(self, state: Encoded) -> Tensor:
        """V of encoded observations, [members, B]: of their privileged streams where the policy has these."""
        if self.critic is None or state.privileged is None:
            return self.state_value(state.features)
        return self.critic.network(state.privileged).squeeze(-1)

    def _set_value(self, td: TensorDictBase, value: Tensor) -> None:
        """Add V to what `act` returns; none where it reads privileged streams and the observation has none."""
        if self.critic_streams:
            given = td[schema.OBSERVATION].keys()
            if self.critic is None or any(name not in given for name in self.critic_streams):
                return
            value = self.critic(td[schema.OBSERVATION])
        td.set(schema.VALUE, value)

    def _keep_critic(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Weights with the policy's own `critic` where they have none, and without one where it has none."""
        own = {name: value for name, value in self.state_dict().items() if name.startswith(CRITIC)}
        if own and not any(name.startswith(CRITIC) for name in weights):
            logger.warning("the value of critic_observation starts from new weights: the policy was trained without it")
            return own | dict(weights)
        return {name: value for name, value in weights.items() if own or not name.startswith(CRITIC)}

    # -- weights -------------------------------------------------------------------------------------------------------

    def complete_weights(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Translate weights of the previous version; called before they are checked and loaded."""
        return dict(weights)

    def check_box(self, space: gymnasium.Space) -> None:
        """Raise an error where the policy's action range and the environment's do not overlap."""

    def misfit(self, space: gymnasium.Space, weights: Mapping[str, Tensor] | None = None) -> tuple[str, float] | None:
        """Return how the action range differs from a Box, and by which factor; None where it does not."""
        return None

    # -- for collectors and on-policy algorithms -----------------------------------------------------------------------

    def act(self, td: TensorDictBase, deterministic: bool = False) -> TensorDictBase:
        """Add `action`, `sample_log_prob` and `value` (and the next memory) to `td` and return it."""
        raise TypeError(f"{type(self).__name__} does not define act")

    def action_selection(self, deterministic: bool) -> str:
        """How `act` selects actions, for the results of an evaluation.

        `mode`: the most likely action. `sample`: sampled as in training. `sampled noise`: that of a flow, denoised
        without further noise from a sampled start.
        """
        return MODE if deterministic else SAMPLE

    def act_arrays(self, observation: np.ndarray | dict[str, np.ndarray]) -> dict[str, np.ndarray] | None:
        """Act faster than `act`, with the same keys as arrays; None where a policy cannot."""
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
        """Parameters that change V without changing any action: `value_warmup` trains no others."""
        raise InputError(
            f"value_warmup: {type(self).__name__} does not name the parameters that only its value depends on; define "
            "value_only_parameters(), or use value_warmup 0"
        )

    def auxiliary_loss(self, td: TensorDictBase) -> Tensor:
        """A loss on observations alone, [B] (`deft.algorithms.auxiliary`)."""
        raise InputError(f"auxiliary_learning_rate: {type(self).__name__} has no auxiliary loss; set it to 0")

    def auxiliary_parameters(self) -> Iterable[nn.Parameter]:
        """Return the parameters that `auxiliary_loss` trains; nothing else trains them then."""
        raise InputError(f"auxiliary_learning_rate: {type(self).__name__} has no auxiliary loss; set it to 0")

    def describe_frames(self, observation: Any, num_texts: int = 0) -> tuple[Tensor, Tensor | None]:
        """Features of images, and scores of instructions (`deft.algorithms.vision`)."""
        raise InputError(f"vision: {type(self).__name__} is no VLA model with camera encoders; use --model vla-tiny")

    def vision_parameters(self) -> Iterable[nn.Parameter]:
        """Return the parameters that `describe_frames` depends on."""
        raise InputError(f"vision: {type(self).__name__} is no VLA model with camera encoders; use --model vla-tiny")

    @property
    def frame_shape(self) -> tuple[int, int]:
        """Number of cameras and of features of each in `describe_frames`."""
        raise InputError(f"vision: {type(self).__name__} is no VLA model with camera encoders; use --model vla-tiny")

    def set_env_steps(self, num_env_steps: int) -> None:
        """Take the number of env steps of training so far, which exploration may depend on; called between updates."""

    def observe_value(self, td: TensorDictBase) -> None:
        """Update the running statistics that only the value depends on."""
        if self.critic is not None:
            self.critic.encoder.observe(td[schema.OBSERVATION])

    def observe(self, td: TensorDictBase) -> None:
        """Update the running statistics. Called after the update, never during it."""

    def set_precision(self, dtype: torch.dtype) -> None:
        """Compute most of the forward pass in `dtype`, and log-probs, entropy and value in float32."""
        raise InputError(f"precision: bf16 is for vla-tiny; {type(self).__name__} learns in fp32 or tf32 here")

    def freeze_statistics(self) -> None:
        """Keep the statistics observed so far; called after a dataset was observed and after weights were loaded.

        The statistics of a `RunningNormalizer` need nothing here: the algorithm that trains the policy next freezes
        them.
        """

    # -- for off-policy, offline and supervised algorithms -------------------------------------------------------------

    def to_unit(self, action: Tensor) -> Tensor:
        """Actions in the environment's units as unit actions."""
        raise self._not_continuous()

    def from_unit(self, unit: Tensor) -> Tensor:
        """Unit actions as actions in the environment's units."""
        raise self._not_continuous()

    def encode(self, observation: Any, object_positions: Tensor | None = None) -> Encoded:
        """Encode observations, differentiable; `object_positions` replace labels of them."""
        raise self._not_continuous()

    def encode_to_act(self, observation: Any) -> Encoded:
        """Encode observations as `act` does: without labels that only training has."""
        return self.encode(observation)

    def object_positions(self, observation: Any) -> Tensor:
        """Predict object positions from images, as `encode` of a later policy takes them."""
        raise InputError(
            "position_source: 'start' is for vla-tiny with a bottleneck, on a dataset with labels of object positions; "
            f"{type(self).__name__} predicts no object positions"
        )

    def with_output(self, state: Encoded) -> Encoded:
        """Add the output of the actor network to the state, where `sample` and `divergence` can share it."""
        return state

    def mean(self, state: Encoded) -> Tensor:
        """The most likely unit action [members, B, A], differentiable."""
        raise self._not_continuous()

    def check_mean(self, algorithm: str) -> None:
        """Raise an error if `mean`, which an algorithm trains, is not defined."""
        if not self.has_mean:
            raise self._not_trainable(algorithm, "the most likely action", "no mean action")

    def check_samples(self, algorithm: str) -> None:
        """Raise an error if an algorithm that trains samples with a log-density cannot train those of `sample`."""
        if not self.has_samples:
            wanted = "samples with a log-density"
            raise self._not_trainable(algorithm, wanted, "no differentiable samples with a log-density")

    def _not_trainable(self, algorithm: str, trained: str, missing: str) -> Exception:
        return InputError(
            f"policy: {algorithm} trains {trained}, and {self.described} has {missing} (flow, diffusion and token "
            "heads and switches have none): train it with ppo, grpo or dsrl (which needs a flow or diffusion head), on "
            "a dataset with iql or sft with --loss log_prob; or start from a policy with a Gaussian head"
        )

    @property
    def described(self) -> str:
        """What it is called in errors."""
        return type(self).__name__

    def log_prob(self, state: Encoded, unit: Tensor) -> Tensor:
        """Log-density of unit actions under the distribution that acts, [members, B], differentiable."""
        raise self._not_continuous()

    def sample(self, state: Encoded, count: int = 1) -> tuple[Tensor, Tensor]:
        """`count` unit actions per state, [count, members, B, A], and their log-densities; differentiable."""
        raise self._not_continuous()

    def divergence(self, state: Encoded, other: Policy, other_state: Encoded) -> Tensor:
        """KL(π ‖ π_other) at the same observations, [members, B], differentiable; estimated from one action each."""
        samples, log_probs = self.sample(state)
        return log_probs[0] - other.log_prob(other_state, samples[0])

    def denoise(
        self,
        state: Encoded,
        noise: Tensor,
        action_mask: Tensor | None = None,
        inpainting: Inpainting | None = None,
    ) -> Tensor:
        """Unit actions [B, A] that noise [B, *noise_shape] leads to, before clipping; no further random values.

        With `inpainting` (of unit actions) they are guided towards its target, if `can_inpaint`.
        """
        raise InputError(f"{type(self).__name__} does not start from noise: it has no flow or diffusion head")

    def state_value(self, features: Tensor) -> Tensor:
        """V, [members, B]."""
        raise self._not_continuous()

    def imitation_loss(self, state: Encoded, unit: Tensor) -> Tensor:
        """The loss of behaviour cloning, [members, B]: −log π, or that of a VLA model.

        Steps of a chunk outside `state.step_mask` are padding. A sampled action is scored there, whose gradient has
        mean 0, E_π[∇ log π(a)] = 0: exact in expectation where steps are independent given the state.
        """
        if state.step_mask is not None:
            unit = real_steps(unit, self._sampled_action(state), state.step_mask)
        return -self.log_prob(state, unit)

    @torch.no_grad()
    def _sampled_action(self, state: Encoded) -> Tensor:
        return self.sample(state)[0][0]

    def imitation(self, observation: Any, unit: Tensor, step_mask: Tensor | None, loss: str) -> dict[str, Tensor]:
        """The loss of supervised training, [members], as `bc_loss`, and further metrics."""
        state = self.encode(observation)._replace(step_mask=step_mask)
        if loss == "mse":
            error = squared_error(self.mean(state), unit, step_mask)
            return {"bc_loss": error, "action_error": error}
        losses = {"bc_loss": self.imitation_loss(state, unit).mean(-1)}
        if self.has_mean:
            with torch.no_grad():
                losses["action_error"] = squared_error(self.mean(state), unit, step_mask)
        return losses

    def actor_parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters that the policy loss trains."""
        raise self._not_continuous()

    def encoder_parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters of the encoder that critics share; their loss trains it."""
        raise self._not_continuous()

    def noise_parameters(self) -> Iterator[Tensor]:
        """Yield the logarithms of standard deviations that do not depend on the observation; none by default."""
        yield from ()

    def value_parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters of V that are not among `actor_parameters`."""
        raise self._not_continuous()

    def member(self, index: int) -> Policy:
        """One member as a policy of its own, with a copy of its weights; the policy itself where it has one member."""
        return self

    def _not_continuous(self) -> Exception:
        return InputError(f"{type(self).__name__} has no continuous actions in a Box, which this algorithm needs")


def real_steps(unit: Tensor, other: Tensor, step_mask: Tensor | None) -> Tensor:
    """Unit actions [members, B, K · A] with `other` in the padded steps, outside `step_mask` (bool [B, K])."""
    if step_mask is None:
        return unit
    size = unit.shape[-1] // step_mask.shape[-1]
    return torch.where(step_mask.repeat_interleave(size, -1), unit, other)


def squared_error(chosen: Tensor, unit: Tensor, step_mask: Tensor | None) -> Tensor:
    """(chosen − unit)² of the real steps, a mean over all rows and numbers, [members]."""
    return (chosen - real_steps(unit, chosen.detach(), step_mask)).square().mean((-1, -2))


def members_of(policy: Policy) -> list[Policy]:
    """The policies of all seeds that were trained at once; the policy itself where there is one."""
    return [policy.member(index) for index in range(policy.num_members)]
