"""Waypoint policies: a supervised policy from camera to waypoints, and a PPO residual on top of it (frozen).

    final_waypoints = sft_waypoints + delta_head(z)

`deft.training.waypoints` trains both; collectors and algorithms use `PPOPolicy` as any other `Policy`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

from deft import schema
from deft.errors import InputError
from deft.models.distributions import GaussianHead
from deft.models.normalization import RewardNormalizer, RunningNormalizer
from deft.models.policy import Policy


@dataclass(frozen=True)
class WaypointShape:
    """The sizes of a waypoint model; saved with its weights."""

    camera_size: int
    motion_dim: int
    num_waypoints: int
    encoder_dim: int = 64
    hidden_sizes: tuple[int, ...] = (64,)

    def to_dict(self) -> dict[str, Any]:
        """Return the sizes as plain data."""
        return asdict(self) | {"hidden_sizes": list(self.hidden_sizes)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> WaypointShape:
        """Create from the result of `to_dict`."""
        return cls(**{**values, "hidden_sizes": tuple(values["hidden_sizes"])})


def _perceptron(in_dim: int, hidden_sizes: Sequence[int], out_dim: int, last_gain: float) -> nn.Sequential:
    """Build an MLP with tanh and orthogonal weights; the last layer is linear, scaled by `last_gain`."""
    layers: list[nn.Module] = []
    sizes = (in_dim, *hidden_sizes, out_dim)
    for fan_in, fan_out in pairwise(sizes):
        layer = nn.Linear(fan_in, fan_out)
        nn.init.orthogonal_(layer.weight, math.sqrt(2))
        nn.init.zeros_(layer.bias)
        layers += [layer, nn.Tanh()]
    last = layers[-2]
    assert isinstance(last, nn.Linear)
    with torch.no_grad():
        last.weight.mul_(last_gain / math.sqrt(2))
    return nn.Sequential(*layers[:-1])


class CameraEncoder(nn.Module):
    """uint8 images [B, 3, S, S] through three strided convolutions to `dim` features between −1 and 1.

    It needs a sixth of the operations of `ImageEncoder`, because it runs at every decision of every environment.
    """

    def __init__(self, size: int, dim: int) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(3, 16, 5, stride=4, padding=2),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 32, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
        )
        with torch.no_grad():
            flat = self.convolutions(torch.zeros(1, 3, size, size)).shape[1]
        self.projection = nn.Sequential(nn.Linear(flat, dim), nn.LayerNorm(dim), nn.Tanh())

    def forward(self, images: Tensor) -> Tensor:
        """Features [B, dim]."""
        return self.projection(self.convolutions(images.float() / 255.0 - 0.5))


class WaypointSFT(nn.Module):
    """The supervised policy: a camera encoder and a waypoint head.

    z = [encoder(camera), motion normalised];  waypoints = mean + deviation · head(z), with statistics of the dataset.
    """

    target_mean: Tensor
    target_deviation: Tensor

    def __init__(self, shape: WaypointShape) -> None:
        super().__init__()
        self.shape = shape
        self.encoder = CameraEncoder(shape.camera_size, shape.encoder_dim)
        self.motion = RunningNormalizer((shape.motion_dim,), clip=5.0, epsilon=1e-4)
        self.latent_dim = shape.encoder_dim + shape.motion_dim
        self.head = _perceptron(self.latent_dim, shape.hidden_sizes, 2 * shape.num_waypoints, 1.0)
        self.register_buffer("target_mean", torch.zeros(shape.num_waypoints, 2))
        self.register_buffer("target_deviation", torch.ones(shape.num_waypoints, 2))

    def encode(self, observation: TensorDictBase | Mapping[str, Tensor]) -> Tensor:
        """z [B, Z]."""
        return torch.cat([self.encoder(observation[schema.CAMERA]), self.motion(observation[schema.MOTION])], -1)

    def decode(self, latent: Tensor) -> Tensor:
        """Waypoints [B, K, 2] in metres from z."""
        return torch.addcmul(self.target_mean, self.normalized(latent), self.target_deviation)

    def normalized(self, latent: Tensor) -> Tensor:
        """Waypoints [B, K, 2] in standard deviations from the dataset's mean."""
        return self.head(latent).unflatten(-1, (self.shape.num_waypoints, 2))

    def forward(self, observation: TensorDictBase | Mapping[str, Tensor]) -> Tensor:
        """Waypoints [B, K, 2] in metres."""
        return self.decode(self.encode(observation))

    @torch.no_grad()
    def fit_scales(self, motion: Tensor, waypoints: Tensor) -> None:
        """Set the mean and standard deviation of motion and waypoints from a dataset."""
        self.motion.observe(motion)
        self.target_mean.copy_(waypoints.mean(0))
        self.target_deviation.copy_(waypoints.std(0).clamp(min=0.05))


def smooth_modes(num_waypoints: int, num_modes: int) -> Tensor:
    """Shift, slope, bend, … along the waypoints: orthogonal polynomials [K, M], each with a mean square of 1."""
    steps = np.linspace(-1, 1, num_waypoints)
    basis, _ = np.linalg.qr(np.stack([steps**power for power in range(num_modes)], 1))
    return torch.as_tensor(basis * math.sqrt(num_waypoints) * np.sign(basis[-1]), dtype=torch.float32)


class DeltaHead(nn.Module):
    """A small MLP, with a linear layer beside it, from z to the correction of every waypoint; zero at the start.

    δ = modes · c: the correction is smooth, with few coefficients per axis (any correction if modes = waypoints).
    An axis whose largest correction is m is scaled by b tanh(m / b) / m: no coordinate changes by more than b. For
    m ≪ b the bound has no effect, so raising it does not change corrections learned within it.
    """

    modes: Tensor

    def __init__(
        self, in_dim: int, num_waypoints: int, hidden_sizes: Sequence[int] = (64, 64), num_modes: int = 3
    ) -> None:
        super().__init__()
        self.num_modes = num_modes
        self.network = _perceptron(in_dim, hidden_sizes, 2 * num_modes, 0.0)
        self.direct = _perceptron(in_dim, (), 2 * num_modes, 0.0)
        self.register_buffer("modes", smooth_modes(num_waypoints, num_modes), persistent=False)

    def forward(self, latent: Tensor, bound: Tensor | float) -> Tensor:
        """Return the correction of each waypoint."""
        return self.expand(self.coefficients(latent, bound))

    def coefficients(self, latent: Tensor, bound: Tensor | float) -> Tensor:
        """c [B, M, 2], bounded."""
        raw = (self.network(latent) + self.direct(latent)).unflatten(-1, (self.num_modes, 2))
        largest = self.expand(raw).abs().amax(-2, keepdim=True).clamp(min=1e-6)
        return raw * (bound * torch.tanh(largest / bound) / largest)

    def expand(self, coefficients: Tensor) -> Tensor:
        """modes · c."""
        return self.modes @ coefficients

    def project(self, correction: Tensor) -> Tensor:
        """The inverse of `expand`: c of a correction [B, K, 2]."""
        return self.modes.T @ correction / len(self.modes)


class ValueHead(nn.Module):
    """A small MLP from z to V, [B]."""

    def __init__(self, in_dim: int, hidden_sizes: Sequence[int] = (64, 64)) -> None:
        super().__init__()
        self.network = _perceptron(in_dim, hidden_sizes, 1, 1.0)

    def forward(self, latent: Tensor) -> Tensor:
        """V."""
        return self.network(latent).squeeze(-1)


class PPOPolicy(Policy):
    """A Gaussian over waypoints around sft_waypoints + delta_head(z), and a value.

    The Gaussian is over the coefficients of the correction, so that exploration is smooth too. Coefficients and
    waypoints determine each other, so the log-prob is exact.

    z is the frozen encoder's output; the heads also read the supervised policy's waypoints. Only the two heads and the
    standard deviation are trained; an untrained policy acts as the supervised one. The frozen part runs once per
    decision: its outputs are stored with the transition in `schema.SAMPLE`.
    """

    residual_scale: Tensor

    def __init__(
        self,
        sft: WaypointSFT,
        hidden_sizes: Sequence[int] = (64, 64),
        residual_bound: float = 4.0,
        residual_modes: int = 3,
        log_std_init: float = -1.0,
        normalize_reward: bool = True,
    ) -> None:
        super().__init__()
        count = sft.shape.num_waypoints
        if residual_modes > count:
            raise InputError(
                f"residual_modes {residual_modes} is more than the {count} waypoints; choose at most {count}"
            )
        self.sft = sft.requires_grad_(False).eval()
        in_dim = sft.latent_dim + 2 * count
        self.delta_head = DeltaHead(in_dim, count, hidden_sizes, residual_modes)
        self.value_head = ValueHead(in_dim, hidden_sizes)
        self.distribution = GaussianHead(spaces.Box(-np.inf, np.inf, (residual_modes, 2), np.float32), log_std_init)
        self.reward_normalizer = RewardNormalizer() if normalize_reward else None
        self.residual_bound = residual_bound
        self.reference_log_std = float(log_std_init)
        self.register_buffer("residual_scale", torch.ones(()))

    def train(self, mode: bool = True) -> PPOPolicy:
        """Set the mode; the supervised policy always stays in evaluation mode."""
        super().train(mode)
        self.sft.eval()
        return self

    def act(self, td: TensorDictBase, deterministic: bool = False) -> TensorDictBase:
        """Sample waypoints (their mean if deterministic) and add them with their log-prob and the value."""
        latent, base = self._frozen(td)
        inputs = self._inputs(latent, base)
        coefficients, log_prob = self.distribution.sample(self._coefficients(inputs).flatten(-2), None, deterministic)
        td.set(schema.ACTION, base + self.delta_head.expand(coefficients))
        td.set(schema.LOG_PROB, log_prob)
        td.set(schema.VALUE, self.value_head(inputs))
        kept = {schema.LATENT: latent, schema.SFT_WAYPOINTS: base}
        td.set(schema.SAMPLE, TensorDict(kept, batch_size=td.batch_size, device=td.device))
        return td

    def evaluate_actions(self, td: TensorDictBase) -> dict[str, Tensor]:
        """Score stored waypoints; `reference_kl` is KL(policy ‖ supervised policy with the initial deviation)."""
        latent, base = self._frozen(td)
        inputs = self._inputs(latent, base)
        mean = self._coefficients(inputs).flatten(-2)
        log_prob, entropy = self.distribution.score(mean, self.delta_head.project(td[schema.ACTION] - base), None)
        return {
            "log_prob": log_prob,
            "entropy": entropy,
            "value": self.value_head(inputs),
            "reference_kl": self._reference_kl(mean),
        }

    def get_value(self, td: TensorDictBase) -> Tensor:
        """V(observation) [B]."""
        return self.value_head(self._inputs(*self._frozen(td)))

    def value_only_parameters(self) -> Iterator[nn.Parameter]:
        """Return the parameters of the value head."""
        return self.value_head.parameters()

    def set_residual_scale(self, share: float) -> None:
        """Set the fraction of `residual_bound` that the correction may use."""
        self.residual_scale.fill_(share)

    def _frozen(self, td: TensorDictBase) -> tuple[Tensor, Tensor]:
        """Return z and the supervised policy's waypoints: those stored while acting, else computed."""
        kept = td.get(schema.SAMPLE, None)
        if kept is not None and schema.LATENT in kept:
            return kept[schema.LATENT], kept[schema.SFT_WAYPOINTS]
        observation = td[schema.OBSERVATION]
        with torch.no_grad():
            latent = self.sft.encode(observation)
            return latent, self.sft.decode(latent) + observation[schema.SFT_OFFSET]

    def _inputs(self, latent: Tensor, base: Tensor) -> Tensor:
        """Return the input of both heads: z, and the waypoints normalised by the dataset's statistics."""
        normalized = (base - self.sft.target_mean) / self.sft.target_deviation
        return torch.cat([latent, normalized.clamp(-10, 10).flatten(-2)], -1)

    def _coefficients(self, inputs: Tensor) -> Tensor:
        bound = self.residual_bound * self.residual_scale.clamp(min=1e-6)
        return self.delta_head.coefficients(inputs, bound)

    def _reference_kl(self, mean: Tensor) -> Tensor:
        """KL(N(c, σ) ‖ N(0, σ₀)) = Σ [ log σ₀ − log σ + (σ² + c²) / 2σ₀² − ½ ]."""
        log_std, reference = self.distribution.log_std, self.reference_log_std
        squares = ((2 * log_std).exp() + mean.square()) * (0.5 * math.exp(-2 * reference))
        return (reference - log_std + squares - 0.5).sum(-1)
