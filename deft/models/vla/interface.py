"""What Deft asks of a vision-language-action model: three methods on an `nn.Module`.

`VLAPolicy` wraps any class that has them; `load_vla_model` refuses a class that lacks one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from tensordict import TensorDictBase
from torch import Tensor, nn


@runtime_checkable
class VLAModelInterface(Protocol):
    """The three methods of a VLA model; B is the batch, A the action dims, K the steps of an action chunk.

    `observations` is a TensorDict of batch [B] with the named streams of the environment or the dataset: images as
    uint8 [B, C, h, w], instructions as uint8 rows of UTF-8 bytes padded with zeros (`deft.schema.encode_text`), the
    rest as the environment gives it.

    A model may also offer these, each found by its name:

    - `forward(observations, deterministic=True)`: the most likely action. Without this keyword evaluation samples.
      A flow draws the noise that it denoises all the same, and says so by an attribute `starts_from_noise` that is
      True: the action that noise 0 leads to lies between the modes of what was demonstrated.
    - `has_mean`: an attribute that is False if that action is no mean with a gradient in every dim (tokens, switches;
      a flow's default). TD3+BC and SFT with `--loss mse` then raise an error.
    - `action_mask`, a keyword of the methods that draw or score actions: bool [B, A], True where a dim is real. Padded
      dims must not enter log-prob or entropy. Environments with padded dims need a model with this keyword.
    - `act(observations, deterministic=False) -> (action, log_prob [B], value [B, 1])`: acting in one forward pass.
    - `evaluate(observations, actions) -> (log_prob [B], entropy [B], value [B, 1])`: scoring in one forward pass.
    - `sample`, a keyword of `evaluate`: for a model whose log-prob needs more than the action, such as the denoising
      chain of a flow. `act` then returns a fourth value, tensors [B, …] by name, which come back here. An attribute
      `keeps_sample` that is False says that the model as it was built does without.
    - `gaussian(observations) -> (mean [B, A], log_std [A] or [B, A])`: which Gaussian `forward` draws from, its dims
      independent. CQL draws many actions a state; with it they cost one forward pass.
    - `sample_many(observations, count) -> (actions [count, B, …], log_prob [count, B])`: the same for any distribution.
    - `imitation_loss(observations, actions, step_mask=None) -> [B]`: what SFT minimises and IQL weighs, in place of
      −log_prob; for heads that are not trained by their likelihood, such as a flow. `step_mask` is bool [B, K]: which
      steps of a chunk lie within the episode.
    - `step_mask`, a keyword of `evaluate_actions`, for a model of chunks without `imitation_loss`: the log-prob of
      these steps alone. Without it cloning scores the model's own actions in the padding, whose gradient has mean 0 if
      the steps of a chunk are independent given the observation; it is an error if they are not.
    - `features(observations) -> [B, F]`, `value_of(features) -> [B, 1]`, `value_parameters()` and the attribute
      `feature_dim`: a trunk that the critics of IQL, CQL and TD3+BC read too. `imitation_loss` then takes a keyword
      `features`, so that one pass serves all. With `taught(observations) -> (features, loss [B] or None)` the
      features that they learn from may know more than those that it acts on (labels), and IQL adds the loss.
    - `value_parameters()`: the parameters that only the value depends on. PPO's `value_warmup` needs it.
    - `observe(observations)`: takes observations into a normalisation of the model's own, between updates. Statistics
      in a `deft.models.normalization.RunningNormalizer` are frozen when a trained model is trained further; a model
      with statistics of another kind does that in `settle()`, which is called after a dataset was observed and after
      weights were loaded with `model_path`.
    - `gathered_layers() -> [nn.Module]`: layers that are called as modules, whose weights FSDP gathers one at a time.
    - `chunk_length`, `action_dim`: attributes, checked against what the policy is told.
    """

    def forward(self, observations: TensorDictBase) -> Tensor:
        """Draw actions from the distribution that `evaluate_actions` scores: [B, A], or [B, K, A] for a chunk."""

    def get_value(self, observations: TensorDictBase) -> Tensor:
        """Value of each observation: [B, 1]."""

    def evaluate_actions(self, observations: TensorDictBase, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Log-prob [B] of given actions and entropy [B] of the distribution, summed over dims and chunk steps."""


class ScoredInParts:
    """Of a model whose `evaluate_tokens` scores the parts of a decision (tokens, steps, denoising): what follows."""

    def evaluate_tokens(
        self,
        observations: TensorDictBase,
        actions: Tensor,
        action_mask: Tensor | None = None,
        sample: Mapping[str, Tensor] | TensorDictBase | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Log-prob of each part [B, n], entropy [B] and value [B, 1], in one pass; `sample` is what `act` kept."""
        raise TypeError(f"{type(self).__name__} does not define evaluate_tokens")

    def evaluate(
        self,
        observations: TensorDictBase,
        actions: Tensor,
        action_mask: Tensor | None = None,
        sample: Mapping[str, Tensor] | TensorDictBase | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Log-prob [B], entropy [B] and value [B, 1], in one pass; of what is in `sample`, where it is given."""
        parts, entropy, value = self.evaluate_tokens(observations, actions, action_mask, sample)
        return parts.sum(1), entropy, value

    def evaluate_actions(
        self, observations: TensorDictBase, actions: Tensor, action_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Log-prob [B] and entropy [B] over the real dims of the whole chunk."""
        log_prob, entropy, _ = self.evaluate(observations, actions, action_mask)
        return log_prob, entropy


REQUIRED_METHODS = ("forward", "get_value", "evaluate_actions")


def missing_methods(model: object) -> list[str]:
    """Names of the required methods that a model, or a model class, does not have."""
    # nn.Module has a `forward` that only raises, which isinstance(model, VLAModelInterface) would accept.
    owner = model if isinstance(model, type) else type(model)
    has_own_forward = getattr(owner, "forward", None) is not nn.Module.forward
    return [
        name
        for name in REQUIRED_METHODS
        if not callable(getattr(model, name, None)) or (name == "forward" and not has_own_forward)
    ]
