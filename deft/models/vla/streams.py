"""Base classes of the models that ship with Deft: named observation streams, action chunks, and a Gaussian over them.

`vla-tiny` and the adapters of `openvla` and `pi0` are `StreamVLA`; `gpt-vla`, `vlm` and `lerobot` are `GaussianVLA`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.nn import functional

from deft.errors import InputError
from deft.models.distributions import HALF_LOG_2PI
from deft.models.vla.interface import BaseVLAModel, Sample
from deft.models.vla.spec import ProprioSpec, StreamSpec

Observations: TypeAlias = TensorDictBase | Mapping[str, Tensor]


def read_stream(observations: Observations, key: str) -> Tensor:
    """Return a named stream of the observation."""
    stream = observations.get(key, None)
    if stream is None:
        raise InputError(
            f"the observation has no {key!r}; it has {sorted(map(str, observations.keys()))}: "
            "set image_keys, proprio_key and instruction_key in model_config"
        )
    return stream


def check_images(images: Tensor, key: str) -> Tensor:
    """Return uint8 images with their channels first, [B, 3, h, w]; raise an error for anything else."""
    if images.ndim == 4 and images.shape[1] != 3 and images.shape[-1] == 3:  # channels last
        images = images.permute(0, 3, 1, 2)
    if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1] != 3:
        raise InputError(
            f"observation {key!r} is {str(images.dtype).removeprefix('torch.')} {list(images.shape)}; images are uint8 "
            "[B, 3, h, w]: give 3 channels, first, with values of 0 to 255"
        )
    return images


def square_images(images: Tensor, size: int, key: str) -> Tensor:
    """Scale images [B, 3, h, w] to size × size by area averaging; the aspect ratio may change.

    The option `image_size` of the LeRobot loader scales images in the same way.
    """
    images = check_images(images, key)
    if images.shape[2:] == (size, size):
        return images
    return functional.interpolate(images.float(), size=(size, size), mode="area").round_().to(torch.uint8)


class StreamVLA(BaseVLAModel):
    """A model that reads the streams of a `StreamSpec`.

    A subclass defines `act`, `get_value`, `value_head`, and `evaluate_tokens`, which scores the parts of a decision.
    """

    value_head: nn.Module

    def __init__(self, spec: StreamSpec) -> None:
        super().__init__()
        self.action_dim, self.chunk_length = spec.action_dim, spec.chunk_length
        self.image_keys, self.instruction_key = tuple(spec.image_keys), spec.instruction_key
        self.proprio_key, self.proprio_dim = None, 1
        if isinstance(spec, ProprioSpec):
            self.proprio_key, self.proprio_dim = spec.proprio_key, spec.proprio_dim

    def forward(
        self, observations: TensorDictBase, deterministic: bool = False, action_mask: Tensor | None = None
    ) -> Tensor:
        """Actions [B, A], or [B, K, A] with chunks of K > 1 steps; padded dims are 0."""
        return self.act(observations, deterministic, action_mask)[0]

    def evaluate(
        self, observations: TensorDictBase, actions: Tensor, action_mask: Tensor | None = None, sample: Sample = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Log-prob [B], entropy [B] and value [B, 1], in one pass."""
        parts, entropy, value = self.evaluate_tokens(observations, actions, action_mask, sample)
        return parts.sum(1), entropy, value

    def evaluate_actions(
        self, observations: TensorDictBase, actions: Tensor, action_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Log-prob [B] and entropy [B] over the real dims of the whole chunk."""
        log_prob, entropy, _ = self.evaluate(observations, actions, action_mask)
        return log_prob, entropy

    def value_parameters(self) -> Iterator[nn.Parameter]:
        """Return the parameters that only the value depends on."""
        return self.value_head.parameters()

    # -- inputs and outputs --------------------------------------------------------------------------------------------

    def vectors(self, observations: Observations, key: str, size: int, setting: str) -> Tensor:
        """A stream of vectors, float32 […, size]."""
        vectors = read_stream(observations, key)
        if vectors.shape[-1] != size:
            raise InputError(
                f"observation {key!r} has shape {list(vectors.shape)}; the model was built for "
                f"{[*vectors.shape[:-1], size]} ({setting})"
            )
        return vectors.float()

    def proprio_vectors(self, observations: Observations, batch: int, device: torch.device) -> Tensor:
        """Proprioception [B, P]; zeros where the environment has none."""
        if self.proprio_key is None:
            return torch.zeros(batch, self.proprio_dim, device=device)
        return self.vectors(observations, self.proprio_key, self.proprio_dim, "proprio_dim")

    def instructions(self, observations: Observations) -> Tensor | None:
        """The instructions as rows of bytes, uint8 [B, length]; None without instructions."""
        if self.instruction_key is None:
            return None
        text = read_stream(observations, self.instruction_key)
        if text.dtype != torch.uint8 or text.ndim != 2:
            raise InputError(
                f"observation {self.instruction_key!r} is {text.dtype} {list(text.shape)}; instructions are rows of "
                "bytes, uint8 [B, length]"
            )
        return text

    def chunk(self, actions: Tensor) -> Tensor:
        """Stored actions as [B, K, A]."""
        return actions.reshape(len(actions), self.chunk_length, self.action_dim)

    def shaped(self, actions: Tensor, action_mask: Tensor | None = None) -> Tensor:
        """Actions [B, K, A] as the environment accepts them: padded dims are 0; [B, A] without chunks."""
        if action_mask is not None:
            actions = actions.masked_fill(~action_mask.unsqueeze(1), 0.0)
        return actions.squeeze(1) if self.chunk_length == 1 else actions

    def real(self, action_mask: Tensor | None) -> Tensor | None:
        """Mask of the real dims, bool [B, 1, A]; None if all are real."""
        return None if action_mask is None else action_mask.unsqueeze(1)

    def mean_over_steps(self, values: Tensor, step_mask: Tensor | None) -> Tensor:
        """Sum [B, K, A] over the steps in `step_mask` [B, K], divided by the numbers of a whole chunk: [B]."""
        return masked_sum(values, None if step_mask is None else step_mask.unsqueeze(-1)) / values[0].numel()


class Statistics(nn.Module):
    """Normalise environment values for the model: normalised = (x − shift) / scale, in each dim.

    From mean and std, or from q01 and q99 (which become −1 and 1); a dim whose `mask` is False is not changed. Without
    values nothing is changed; `persistent` as of `register_buffer`.
    """

    shift: Tensor
    scale: Tensor

    def __init__(self, size: int, values: Mapping[str, Any] | None, name: str, persistent: bool = True) -> None:
        super().__init__()
        values = values or {}
        shift, scale = torch.zeros(size), torch.ones(size)
        if "q01" in values and "q99" in values:
            low, high = (_numbers(values[key], size, f"{name}.{key}") for key in ("q01", "q99"))
            shift, scale = (low + high) / 2, (high - low) / 2
        elif "mean" in values and "std" in values:
            shift, scale = (_numbers(values[key], size, f"{name}.{key}") for key in ("mean", "std"))
        elif values:
            raise InputError(f"statistics.{name} has {', '.join(values)}; it needs mean and std, or q01 and q99")
        real = _numbers(values.get("mask", [True] * size), size, f"{name}.mask").bool()
        self.register_buffer("shift", torch.where(real, shift, 0.0), persistent)
        self.register_buffer("scale", torch.where(real, scale, 1.0).clamp(min=1e-6), persistent)

    def normalize(self, x: Tensor) -> Tensor:
        """Convert environment units to model units."""
        return (x.float() - self.shift) / self.scale

    def denormalize(self, x: Tensor) -> Tensor:
        """Convert model units to environment units."""
        return x.float() * self.scale + self.shift


def _numbers(values: Any, size: int, name: str) -> Tensor:
    found = torch.as_tensor(values, dtype=torch.float32).flatten()
    if len(found) != size:
        raise InputError(f"statistics.{name} has {len(found)} numbers; there are {size} dims")
    return found


class GaussianVLA(StreamVLA):
    """A Gaussian over action chunks with a learned deviation of each dim and step, independent of the observation.

    A subclass defines `mean_and_value`, `log_std` [K, A] and `action_statistics`, which convert the units of mean and
    deviation to those of the environment.
    """

    log_std: nn.Parameter
    action_statistics: Statistics

    def noise_parameters(self) -> Iterator[nn.Parameter]:
        """Yield the deviation."""
        yield self.log_std

    def mean_and_value(self, observations: TensorDictBase, sample: Sample = None) -> tuple[Tensor, Tensor]:
        """Normalised mean actions [B, K, A] and the value [B, 1], in one pass."""
        raise TypeError(f"{type(self).__name__} does not define mean_and_value")

    def draw_sample(self, observations: TensorDictBase) -> dict[str, Tensor]:
        """Random values beside the action that the mean depends on; `act` returns them if `keeps_sample`."""
        return {}

    def get_value(self, observations: TensorDictBase) -> Tensor:
        """Value of each observation: [B, 1]."""
        return self.mean_and_value(observations)[1]

    def act(
        self, observations: TensorDictBase, deterministic: bool = False, action_mask: Tensor | None = None
    ) -> tuple[Any, ...]:
        """Actions, their log-prob [B], the value [B, 1], and the sample if `keeps_sample`; in one forward pass."""
        sample = self.draw_sample(observations)
        mean, value = self.mean_and_value(observations, sample)
        drawn = mean if deterministic else mean + self.log_std.exp() * torch.randn_like(mean)
        log_prob = self.log_probs(mean, drawn, self.real(action_mask)).sum(2).sum(1)
        outputs = (self.shaped(self.action_statistics.denormalize(drawn), action_mask), log_prob, value)
        return (*outputs, sample) if self.keeps_sample else outputs

    def evaluate_tokens(
        self, observations: TensorDictBase, actions: Tensor, action_mask: Tensor | None = None, sample: Sample = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As `evaluate`, with the log-prob of each step of the chunk, [B, K]."""
        mean, value = self.mean_and_value(observations, sample)
        mask = self.real(action_mask)
        log_probs = self.log_probs(mean, self.action_statistics.normalize(self.chunk(actions)), mask)
        # Entropy of a Gaussian dim: ½ log 2πe + log σ, in the environment's units + log scale
        entropy = (0.5 + HALF_LOG_2PI + self.log_std + self.action_statistics.scale.log()).expand_as(mean)
        return log_probs.sum(2), masked_sum(entropy, mask), value

    def gaussian(self, observations: TensorDictBase) -> tuple[Tensor, Tensor] | None:
        """Mean and log-deviation of the distribution of `forward`, in the environment's units: [B, K, A] and [K, A].

        [B, A] and [A] without chunks; None where the mean depends on a sample.
        """
        if self.keeps_sample:
            return None
        mean = self.action_statistics.denormalize(self.mean_and_value(observations)[0])
        log_std = self.log_std + self.action_statistics.scale.log()
        return (mean.squeeze(1), log_std.squeeze(0)) if self.chunk_length == 1 else (mean, log_std)

    def log_probs(self, mean: Tensor, normalised: Tensor, mask: Tensor | None = None) -> Tensor:
        """log N(a; μ, σ) of every dim, [B, K, A], as a density in the environment's units; 0 in padded dims."""
        if mask is not None:  # values in padded dims must not affect the gradient either
            normalised = normalised.masked_fill(~mask, 0.0)
        standardised = (normalised - mean) * (-self.log_std).exp()
        log_probs = -0.5 * standardised.square() - self.log_std - HALF_LOG_2PI - self.action_statistics.scale.log()
        return log_probs if mask is None else log_probs.masked_fill(~mask, 0.0)


def masked_sum(values: Tensor, mask: Tensor | None) -> Tensor:
    """Sum [B, K, A] over the real dims and steps: [B]."""
    return (values if mask is None else values.masked_fill(~mask, 0.0)).sum((1, 2))
