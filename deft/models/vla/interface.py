"""The interface of a vision-language-action model: `BaseVLAModel`, or any `nn.Module` with its three methods.

`VLAPolicy` calls a model through this interface. `as_vla_model` adds the defaults of `BaseVLAModel` to a plain module.
"""

from __future__ import annotations

import functools
import inspect
import types
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from deft.errors import InputError
from deft.models.distributions import HALF_LOG_2PI
from deft.models.inpainting import Inpainting

Sample: TypeAlias = Mapping[str, Tensor] | TensorDictBase | None
"""What `act` returned beside an action, if the model keeps it."""
REQUIRED_METHODS = ("forward", "get_value", "evaluate_actions")


@runtime_checkable
class VLAModelInterface(Protocol):
    """The three methods that every VLA model has; `BaseVLAModel` documents them and what a model may add."""

    def forward(self, observations: TensorDictBase) -> Tensor:
        """Sample actions: [B, A], or [B, K, A] for a chunk."""

    def get_value(self, observations: TensorDictBase) -> Tensor:
        """Value of each observation: [B, 1]."""

    def evaluate_actions(self, observations: TensorDictBase, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Log-prob [B] of given actions and entropy [B] of the distribution."""


class BaseVLAModel(nn.Module, ABC):
    """A VLA model: three abstract methods, and defaults for everything else that Deft can use.

    B is the batch size, A the number of action dims, K the number of steps of an action chunk. `observations` is a
    TensorDict of batch size [B] with the named streams of the environment or the dataset: images as uint8
    [B, C, h, w], instructions as uint8 rows of UTF-8 bytes padded with zeros (`deft.schema.encode_text`), the rest as
    the environment returns it. `actions` are [B, A], or [B, K, A] for chunks.

    Override a method to make something faster (`act`, `evaluate`, `sample_many`), to train with another loss than
    the likelihood (`imitation_loss`), or to share features with the critics (`features`, `value_of`).
    """

    spec_class: type | None = None
    """The specification of a constructor with the parameter `spec` (`deft.models.vla.spec`)."""
    action_dim: Any = None
    """Number of action dims; None: not fixed by the model."""
    chunk_length: Any = None
    """Number of action steps per inference; None: not fixed by the model."""
    image_keys: Any = ""
    """Names of the image streams; "": not set."""
    proprio_key: Any = ""
    """Name of the stream of proprioception; None: the model reads none; "": not set."""
    instruction_key: Any = ""
    """Name of the stream of instructions; None: the model reads none; "": not set."""
    takes_deterministic: bool = True
    """Whether `forward` and `act` have the keyword `deterministic`. Without it, evaluation samples."""
    takes_action_mask: bool = True
    """Whether the methods that sample or score actions have the keyword `action_mask`. Environments with padded action
    dims need it."""
    takes_step_mask: bool = False
    """Whether `evaluate_actions` has the keyword `step_mask` (bool [B, K]) and scores these steps of a chunk alone."""
    capturable: bool = False
    """Whether a gradient step may be captured as a CUDA graph: scoring actions never waits for the GPU."""
    keeps_sample: bool = False
    """Whether a log-prob needs more than the action, such as the denoising chain of a flow. `act` then returns a fourth
    value, tensors [B, …] by name, which `evaluate` receives as `sample`."""
    starts_from_noise: bool = False
    """Whether deterministic actions are denoised from sampled noise, as those of a flow: the action that noise 0 leads
    to lies between the modes of the demonstrations."""
    noise_shape: tuple[int, int] | None = None
    """Shape [K, D] of the noise that `denoise` starts from; None for a model without that method."""
    can_inpaint: bool = False
    """Whether `denoise` has the keyword `inpainting`, which real-time chunking needs."""
    reads_folder: bool = False
    """Whether `load_vla_model` passes a pretrained folder to the constructor, as the keyword `folder`."""
    image_multiple: int = 1
    """Image sizes that the model accepts are multiples of this."""
    feature_dim: int = 0
    """Number of features F that `features` returns."""

    # -- required ------------------------------------------------------------------------------------------------------

    @abstractmethod
    def forward(
        self, observations: TensorDictBase, deterministic: bool = False, action_mask: Tensor | None = None
    ) -> Tensor:
        """Sample actions from the distribution that `evaluate_actions` scores: [B, A], or [B, K, A] for a chunk.

        `deterministic` selects the most likely action. `action_mask` is bool [B, A], True where a dim is real; padded
        dims must not enter log-prob or entropy.
        """

    @abstractmethod
    def get_value(self, observations: TensorDictBase) -> Tensor:
        """Value of each observation: [B, 1]."""

    @abstractmethod
    def evaluate_actions(
        self, observations: TensorDictBase, actions: Tensor, action_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Log-prob [B] of given actions and entropy [B] of the distribution, summed over dims and chunk steps."""

    # -- acting and scoring in one forward pass ------------------------------------------------------------------------

    def act(
        self, observations: TensorDictBase, deterministic: bool = False, action_mask: Tensor | None = None
    ) -> tuple[Any, ...]:
        """Actions, their log-prob [B] and the value [B, 1]; then the sample, if `keeps_sample`."""
        mask = {} if action_mask is None else {"action_mask": action_mask}
        how = {"deterministic": deterministic} if self.takes_deterministic else {}
        action = self(observations, **how, **mask)
        if action.ndim < 2 or len(action) != len(observations):
            raise InputError(
                f"the action of {type(self).__name__}.forward has shape {list(action.shape)}; it must have "
                f"[{len(observations)}, A]"
            )
        log_prob, _ = check_outputs(self, "evaluate_actions", 2, self.evaluate_actions(observations, action, **mask))
        return action, log_prob, self.get_value(observations)

    def evaluate(
        self, observations: TensorDictBase, actions: Tensor, action_mask: Tensor | None = None, sample: Sample = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Log-prob [B], entropy [B] and value [B, 1]; `sample` is what `act` returned, if `keeps_sample`."""
        mask = {} if action_mask is None else {"action_mask": action_mask}
        scored = check_outputs(self, "evaluate_actions", 2, self.evaluate_actions(observations, actions, **mask))
        return scored[0], scored[1], self.get_value(observations)

    def evaluate_tokens(
        self, observations: TensorDictBase, actions: Tensor, action_mask: Tensor | None = None, sample: Sample = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return what `evaluate` returns, with the log-probs of the parts of a decision (tokens, steps): [B, n]."""
        raise TypeError(f"{type(self).__name__} does not define evaluate_tokens")

    def evaluate_path(
        self, observations: TensorDictBase, actions: Tensor, action_mask: Tensor | None = None, sample: Sample = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, tuple[Tensor, Tensor] | None]:
        """Return what `evaluate` returns, the actions as functions of the weights with their noise held fixed, and
        their `alternatives` in dims that have a few values: see `Chunks`.
        """
        raise TypeError(f"{type(self).__name__} does not define evaluate_path")

    @property
    def can_reparameterize(self) -> bool:
        """Whether `evaluate_path` returns actions with a gradient; a critic of actions needs it."""
        return overrides(self, "evaluate_path")

    def set_precision(self, dtype: torch.dtype) -> None:
        """Compute most of the forward pass in `dtype`, and log-probs, entropy and value in float32."""
        raise InputError(
            f"precision: bf16 is for vla-tiny; {type(self).__name__} computes in the type of its weights: use fp32"
        )

    # -- learning from a dataset or a replay buffer --------------------------------------------------------------------

    @property
    def has_mean(self) -> bool:
        """Whether the deterministic action is a mean with a gradient in every dim; TD3+BC and `--loss mse` need it."""
        return self.takes_deterministic and not self.starts_from_noise

    @property
    def has_samples(self) -> bool:
        """Whether `sample_many` is differentiable and has log-densities; SAC and CQL need it."""
        return not self.starts_from_noise

    def gaussian(self, observations: TensorDictBase) -> tuple[Tensor, Tensor] | None:
        """Mean [B, A] and log-deviation ([A] or [B, A]) of the Gaussian that `forward` samples, dims independent.

        None for any other distribution. CQL samples many actions per state; with this they cost one forward pass.
        """
        return None

    def sample_many(self, observations: TensorDictBase, count: int) -> tuple[Tensor, Tensor]:
        """`count` differentiable samples per observation, [count, B, …], and their log-probs [count, B]."""
        batch = len(observations)
        gaussian = self.gaussian(observations)
        if gaussian is None:
            repeated = torch.cat([observations] * count)
            actions = self(repeated)
            scored = check_outputs(self, "evaluate_actions", 2, self.evaluate_actions(repeated, actions))
            return actions.unflatten(0, (count, batch)), scored[0].unflatten(0, (count, batch))
        mean, log_std = check_outputs(self, "gaussian", 2, gaussian)
        log_std = log_std.expand_as(mean)
        noise = torch.randn(count, *mean.shape, dtype=mean.dtype, device=mean.device)
        # log N(μ + σε; μ, σ) = −½ ε² − log σ − ½ log 2π
        log_prob = (-0.5 * noise.square() - log_std - HALF_LOG_2PI).flatten(2).sum(-1)
        return torch.addcmul(mean, noise, log_std.exp()), log_prob

    def imitation_loss(self, observations: TensorDictBase, actions: Tensor, step_mask: Tensor | None = None) -> Tensor:
        """Loss [B] that SFT minimises and IQL weighs in place of −log_prob, for heads such as a flow.

        `step_mask` is bool [B, K]: which steps of a chunk lie within the episode. A model with `shares_features` has
        a further keyword `features`, those of the observations if they are already computed. A model without this
        method is trained by its log-prob: with `takes_step_mask` that of the real steps, else with its own actions
        in the padded steps.
        """
        raise TypeError(f"{type(self).__name__} does not define imitation_loss")

    def denoise(
        self,
        observations: TensorDictBase,
        noise: Tensor,
        action_mask: Tensor | None = None,
        features: Tensor | None = None,
        inpainting: Inpainting | None = None,
    ) -> Tensor:
        """The actions that noise [B, *noise_shape] leads to, as `forward` shapes them, without further random values.

        `features` of the observations, if given, are used as they are. `inpainting`, in the units of the actions that
        are returned, guides them towards a running chunk.
        """
        raise InputError(f"{type(self).__name__} does not start from noise: it has no flow or diffusion head")

    # -- features that critics share -----------------------------------------------------------------------------------

    def features(self, observations: TensorDictBase) -> Tensor:
        """Features [B, F] that critics and V read too; define it together with `value_of` and `feature_dim`."""
        raise TypeError(f"{type(self).__name__} does not define features")

    def value_of(self, features: Tensor) -> Tensor:
        """Value of features […, F]: […, 1]."""
        raise TypeError(f"{type(self).__name__} does not define value_of")

    def training_features(
        self, observations: TensorDictBase, object_positions: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Features [B, F] to learn from, which may use labels, and the auxiliary loss [B] of these labels, if any.

        `object_positions` replace the labels (`object_positions` of an earlier policy).
        """
        return self.features(observations), None

    def object_positions(self, observations: TensorDictBase) -> Tensor:
        """Object positions that the model predicts from images, [B, P]."""
        raise InputError(
            "position_source: 'start' is for vla-tiny with a bottleneck, on a dataset with labels of object positions; "
            f"{type(self).__name__} predicts no object positions"
        )

    # -- parameters and statistics -------------------------------------------------------------------------------------

    def value_parameters(self) -> Iterable[nn.Parameter]:
        """Return the parameters that only the value depends on; `value_warmup` trains no others."""
        raise InputError(
            f"value_warmup: {type(self).__name__} does not name the parameters that only its value depends on; give it "
            "a method `value_parameters()` that returns them, or use value_warmup 0"
        )

    def auxiliary_loss(self, observations: TensorDictBase) -> Tensor:
        """A loss on observations alone, such as that of labels: [B]."""
        raise InputError(f"auxiliary_learning_rate: {type(self).__name__} has no `auxiliary_loss`; set it to 0")

    def auxiliary_parameters(self) -> Iterable[nn.Parameter]:
        """Return the parameters that `auxiliary_loss` trains."""
        missing = "auxiliary_parameters" if overrides(self, "auxiliary_loss") else "auxiliary_loss"
        raise InputError(f"auxiliary_learning_rate: {type(self).__name__} has no `{missing}`; set it to 0")

    def describe_frames(self, observations: TensorDictBase, num_texts: int = 0) -> tuple[Tensor, Tensor | None]:
        """Features of each camera image, [B, cameras, F], by which `deft train vision` predicts later images.

        If they depend on a text, it is the same for all rows (that of the first one): their own would be a hint.
        With `num_texts` n the second value is how well instructions fit each image, [B, cameras, n]: that of its own
        row i first, then those of the rows i + 1 … i + n − 1 of the batch, modulo B; `NO_ALTERNATIVE`, −10⁴, for an
        instruction with the words of the own one.
        """
        raise InputError(f"vision: {type(self).__name__} has no `describe_frames`; use --model vla-tiny")

    def vision_parameters(self) -> Iterable[nn.Parameter]:
        """Return the parameters that `describe_frames` depends on."""
        missing = "vision_parameters" if overrides(self, "describe_frames") else "describe_frames"
        raise InputError(f"vision: {type(self).__name__} has no `{missing}`; use --model vla-tiny")

    @property
    def frame_shape(self) -> tuple[int, int]:
        """Number of cameras and of features of each in `describe_frames`."""
        missing = "frame_shape" if overrides(self, "describe_frames") else "describe_frames"
        raise InputError(f"vision: {type(self).__name__} has no `{missing}`; use --model vla-tiny")

    def noise_parameters(self) -> Iterable[Tensor]:
        """Return the logarithms of standard deviations that do not depend on the observation; none by default."""
        return ()

    def observe(self, observations: TensorDictBase) -> None:
        """Update the model's running statistics between updates.

        Statistics in a `deft.models.normalization.RunningNormalizer` are frozen when a trained model is trained
        further; statistics of another kind are frozen in `freeze_statistics`.
        """

    def freeze_statistics(self) -> None:
        """Keep the running statistics; called after a dataset was observed and after weights were loaded."""

    def gathered_layers(self) -> list[nn.Module]:
        """Layers that are called as modules, whose weights FSDP gathers one at a time."""
        return []

    # -- derived properties -------------------------------------------------------------------------------------------

    @property
    def streams(self) -> frozenset[str] | None:
        """Names of the streams in `image_keys`, `proprio_key` and `instruction_key`; None (all) if one is not set."""
        keys = [self.image_keys, self.proprio_key, self.instruction_key]
        if "" in keys:
            return None
        images, *others = keys
        return frozenset([*images, *(key for key in others if key is not None)])

    @property
    def shares_features(self) -> bool:
        """Whether critics and V read the model's own features."""
        return overrides(self, "features") and overrides(self, "value_of")


def missing_methods(model: object) -> list[str]:
    """Names of the required methods that a model, or a model class, does not have."""
    kind = model if isinstance(model, type) else type(model)
    undefined: set[str] = set()
    if issubclass(kind, BaseVLAModel):
        undefined |= kind.__abstractmethods__
    elif issubclass(kind, nn.Module) and kind.forward is nn.Module.forward:  # which only raises
        undefined.add("forward")
    return [name for name in REQUIRED_METHODS if name in undefined or not callable(getattr(model, name, None))]


def as_vla_model(model: Any) -> BaseVLAModel:
    """Add the defaults of `BaseVLAModel` to a plain module with the three methods, and return it.

    Its class is replaced in place by a subclass of the same name; the object stays the same.
    """
    name = type(model).__name__
    if missing := missing_methods(model):
        raise InputError(f"VLA model {name} lacks {', '.join(missing)}: see deft.VLAModelInterface")
    if not isinstance(model, nn.Module):
        raise InputError(f"VLA model {name} must be a torch.nn.Module")
    plain: Any = model
    plain.__class__ = as_vla_class(type(model))
    return plain


def as_vla_class(kind: Any) -> type[BaseVLAModel]:
    """Return a model class, or a subclass of a plain one with the defaults of `BaseVLAModel`."""
    return kind if issubclass(kind, BaseVLAModel) else _with_defaults(kind)


@functools.cache
def _with_defaults(kind: Any) -> type[BaseVLAModel]:
    """A subclass of a plain class; what its methods accept is inspected."""
    own: Any = {name: getattr(kind, name, None) for name in dir(BaseVLAModel)}
    samples, scores = own["act"] or own["forward"], own["evaluate"] or own["evaluate_actions"]
    masked = [samples, scores] if own["act"] else [samples, scores, own["evaluate_actions"]]
    found = {
        "takes_deterministic": takes_keyword(samples, "deterministic"),
        "takes_action_mask": all(takes_keyword(method, "action_mask") for method in masked),
        "takes_step_mask": takes_keyword(own["evaluate_actions"], "step_mask"),
        "keeps_sample": bool(own["act"] and own["evaluate"] and "sample" in keywords_of(own["evaluate"])),
    }
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    names |= {name: value for name, value in found.items() if own[name] is None}
    return types.new_class(kind.__name__, (kind, BaseVLAModel), {}, lambda space: space.update(names))


def overrides(model: nn.Module, name: str) -> bool:
    """Whether a model defines this method of `BaseVLAModel` itself."""
    return name in vars(model) or getattr(type(model), name) is not vars(BaseVLAModel)[name]


def check_outputs(model: nn.Module, method: str, number: int, outputs: Any) -> tuple[Tensor, ...]:
    """Return the outputs of a method; raise an error if their number is not `number`."""
    if not isinstance(outputs, tuple | list) or len(outputs) != number:
        what = f"{len(outputs)} values" if isinstance(outputs, tuple | list) else type(outputs).__name__
        raise InputError(f"{type(model).__name__}.{method} must return {number} tensors; it returned {what}")
    return tuple(outputs)


def keywords_of(function: Any) -> dict[str, inspect.Parameter]:
    """The parameters of a method, or of a constructor, by name; `*args` and `**keywords` among them."""
    return dict(inspect.signature(function).parameters)


def takes_keyword(method: Any, keyword: str) -> bool:
    """Whether a method may be called with this keyword."""
    parameters = keywords_of(method)
    return keyword in parameters or any(one.kind is one.VAR_KEYWORD for one in parameters.values())
