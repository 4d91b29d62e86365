"""Heads that denoise: a network that turns noise into actions in a few steps, given features of the observation.

`FlowChunks` and `DiffusionChunks` are two schedules of one chain (`deft.models.denoising_chain`). `vla-tiny` has them
for chunks of actions, `ActorCritic` for single ones (`DenoisingHead`).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

import gymnasium
import torch
from torch import Tensor, nn
from torch.nn import functional

from deft import schema
from deft.errors import InputError
from deft.models.chunks import LOG_STD_RANGE, Chunks, Drawn
from deft.models.denoising_chain import Transition, draw, mean_real, score
from deft.models.diffusion_chain import DiffusionUpdate, cosine_signal, diffused, diffusion_times
from deft.models.distributions import BoxHead
from deft.models.flow_chain import Velocity, euler, flow_matching_error, flow_time, hold_last
from deft.models.inpainting import Inpainting, guided_noise, guided_velocity

TIME_FREQUENCIES = 8
SMALLEST_SHARE = 0.01  # distance of log σ from its bounds, relative to their distance, that its offset starts from
FROZEN, NOISE_NETWORK = "frozen.", "noise_network."  # parts of names of weights


@dataclass(frozen=True, kw_only=True)
class Denoising:
    """The settings of heads that denoise, as in `PolicyConfig` and `TinySpec`."""

    flow_steps: int = 5
    flow_noise: float = 0.1
    noise_network: bool = False
    noise_min: float = 0.05
    noise_max: float = 0.2
    diffusion_steps: int = 20
    ddim_steps: int = 5
    trained_steps: int | None = None

    @classmethod
    def of(cls, settings: Any) -> Self:
        """Those of settings that have more fields."""
        return cls(**{field.name: vars(settings)[field.name] for field in fields(cls)})

    def check(self, kind: str) -> None:
        """Raise an error for values that do not fit each other; `kind`: `flow` or `diffusion`."""
        steps = self.flow_steps if kind == "flow" else self.ddim_steps
        if self.trained_steps is not None and not 1 <= self.trained_steps <= steps:
            raise InputError(
                f"trained_steps {self.trained_steps} must be 1 to {steps}, the denoising steps of a {kind}"
            )
        if self.noise_network and self.noise_min >= self.noise_max:
            raise InputError(f"noise_min {self.noise_min:g} must be less than noise_max {self.noise_max:g}")
        if kind == "diffusion" and self.noise_network:
            raise InputError("noise_network: is for a flow; the noise of a diffusion policy is that of its schedule")
        if kind == "diffusion" and self.ddim_steps > self.diffusion_steps:
            raise InputError(f"ddim_steps {self.ddim_steps} is more than diffusion_steps {self.diffusion_steps}")


class DenoisingChunks(Chunks):
    """A chain of denoising steps on chunks, whose log-prob is exact; a subclass has the schedule and the loss.

    With `trained_steps` n only the last n steps are trained and scored: those before use a copy of the network that
    stays as it was loaded, and are a part of the environment to the algorithm (Ren et al., 2024). The features get no
    gradient then, since the frozen steps read them too.
    """

    def __init__(self, width: int, chunk_length: int, action_dim: int, spec: Denoising, num_steps: int) -> None:
        super().__init__(chunk_length, action_dim)
        self.num_steps = num_steps
        self.first_trained = 0 if spec.trained_steps is None else num_steps - spec.trained_steps
        size = chunk_length * action_dim
        self.condition = nn.Linear(width, width)
        self.noisy = nn.Linear(size + 2 * TIME_FREQUENCIES, width)
        self.hidden = nn.Linear(width, width)
        self.out = nn.Linear(width, size)
        self.frozen: nn.ModuleDict | None = None
        if self.first_trained:
            parts: dict[str, nn.Module] = {name: copy.deepcopy(part) for name, part in self._parts().items()}
            self.frozen = nn.ModuleDict(parts).requires_grad_(False)

    def _check_imitation(self) -> None:
        if self.frozen is not None:
            raise InputError("trained_steps: is for ppo and grpo from a trained policy; leave it out in sft and iql")

    def _predict(self, features: Tensor) -> Velocity:
        """The network as a function of x and the time in [0, 1]: the velocity of a flow, the noise of a diffusion."""
        return _network(self._parts(), features)

    def _parts(self) -> dict[str, nn.Module]:
        """The layers of the network."""
        return {"condition": self.condition, "noisy": self.noisy, "hidden": self.hidden, "out": self.out}

    def _predicts(self, features: Tensor) -> list[Velocity]:
        """The network of each step."""
        trained = self._predict(features)
        if self.frozen is None:
            return [trained] * self.num_steps
        frozen = _network(self.frozen, features)
        return [frozen] * self.first_trained + [trained] * (self.num_steps - self.first_trained)

    def _transition(
        self, features: Tensor, deterministic: bool = False, inpainting: Inpainting | None = None
    ) -> Transition:
        """The mean and the deviation of each step; those of deterministic steps may have another mean."""
        raise TypeError(type(self).__name__)

    def draw(self, features: Tensor, deterministic: bool, mask: Tensor | None) -> Drawn:
        """The end of a chain from sampled noise; deterministic: without further noise in its steps.

        A chain from noise 0 ends between the modes of the demonstrated actions.
        """
        start = torch.randn(len(features), *self.shape, dtype=features.dtype, device=features.device)
        chain, log_probs = draw(self._transition(features, deterministic), start, self.num_steps, deterministic, mask)
        return chain[:, -1], log_probs[:, self.first_trained :].sum(1), {schema.CHAIN: chain}

    def score(self, features: Tensor, actions: Tensor, mask: Tensor | None, sample: Any) -> tuple[Tensor, Tensor]:
        """Log-probs of each trained step of the denoising, [B, S], and the entropy of their noise."""
        if self.frozen is not None:
            features = features.detach()
        tokens, entropies = score(self._transition(features), sample[schema.CHAIN], mask, self.first_trained)
        return tokens, entropies.sum(1)

    @property
    def noise_shape(self) -> tuple[int, int]:
        """As the actions."""
        return self.shape

    def denoise(self, features: Tensor, noise: Tensor, inpainting: Inpainting | None = None) -> Tensor:
        """The deterministic action of `draw` from this noise."""
        return draw(self._transition(features, True, inpainting), noise, self.num_steps, True)[0][:, -1]


class FlowChunks(DenoisingChunks):
    """A velocity field on chunks, trained by flow matching; sampled and scored as a noised chain (`flow_chain`).

    σ of each step is learned, one for each number of the chunk. With `noise_network` it depends on the state and on x
    too (ReinFlow, Zhang et al., 2025), between `noise_min` and `noise_max`, and starts where it was without:
    log σ = l + (h − l) · sigmoid(c + g(x, t, z)),  l = log noise_min,  h = log noise_max,  g = 0 at the start.
    """

    def __init__(self, width: int, chunk_length: int, action_dim: int, spec: Denoising) -> None:
        spec.check("flow")
        super().__init__(width, chunk_length, action_dim, spec, spec.flow_steps)
        self.log_noise = nn.Parameter(torch.full((self.num_steps, *self.shape), math.log(spec.flow_noise)))
        self.log_bounds = (math.log(spec.noise_min), math.log(spec.noise_max))
        self.noise_network: nn.Sequential | None = None
        if spec.noise_network:
            size = chunk_length * action_dim
            last = nn.Linear(width, size)
            nn.init.zeros_(last.weight)
            nn.init.zeros_(last.bias)
            inputs = width + size + 2 * TIME_FREQUENCIES
            self.noise_network = nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), last)

    def noise_parameters(self) -> Iterator[nn.Parameter]:
        """Yield the deviation of each step of the chain."""
        yield self.log_noise

    @property
    def deviation(self) -> Tensor:
        """σ of each step, [S, K, A]; the initial one with a noise network."""
        return self.log_noise.clamp(*LOG_STD_RANGE).exp()

    def _transition(
        self, features: Tensor, deterministic: bool = False, inpainting: Inpainting | None = None
    ) -> Transition:
        predicts = [guided_velocity(velocity, inpainting) for velocity in self._predicts(features)]
        constant = self.deviation

        def transition(x: Tensor, step: int) -> tuple[Tensor, Tensor]:
            mean = euler(predicts[step], x, step, self.num_steps)
            if self.noise_network is None:
                return mean, constant[step]
            return mean, self._state_deviation(features, x, step)

        return transition

    def _state_deviation(self, features: Tensor, x: Tensor, step: int) -> Tensor:
        """σ by the noise network, [B, K, A]."""
        assert self.noise_network is not None
        low, high = self.log_bounds
        share = (self.log_noise[step] - low) / (high - low)
        inputs = torch.cat([features, x.flatten(1), time_features(flow_time(x, step, self.num_steps))], 1)
        offset = self.noise_network(inputs).view(x.shape)
        logit = torch.logit(share.clamp(SMALLEST_SHARE, 1.0 - SMALLEST_SHARE))
        return (low + (high - low) * torch.sigmoid(logit + offset)).exp()

    def imitation_loss(self, features: Tensor, actions: Tensor, step_mask: Tensor | None) -> Tensor:
        """‖v(x_t, t) − (ε − a)‖², with one t and one ε per row."""
        self._check_imitation()
        actions, mask = _held(actions, step_mask)
        time = torch.rand(len(actions), device=actions.device)
        return flow_matching_error(self._predict(features), actions, torch.randn_like(actions), time, mask)


class DiffusionChunks(DenoisingChunks):
    """A network that predicts the noise of a diffusion process, trained as DDPM and sampled as DDIM.

    The schedule is that of `deft.models.diffusion_chain` with the cosine schedule, T = `diffusion_steps` and
    S = `ddim_steps`. Sampling has η = 1 (DDPM if S = T), deterministic actions η = 0.
    """

    signal: Tensor

    def __init__(self, width: int, chunk_length: int, action_dim: int, spec: Denoising) -> None:
        spec.check("diffusion")
        super().__init__(width, chunk_length, action_dim, spec, spec.ddim_steps)
        self.total_steps = spec.diffusion_steps
        self.register_buffer("signal", cosine_signal(self.total_steps), persistent=False)  # ᾱ_0 = 1 … ᾱ_T
        self.times = diffusion_times(self.total_steps, self.num_steps)
        self.update = DiffusionUpdate(spec.noise_min)

    def _transition(
        self, features: Tensor, deterministic: bool = False, inpainting: Inpainting | None = None
    ) -> Transition:
        predicts = self._predicts(features)

        def transition(x: Tensor, step: int) -> tuple[Tensor, Tensor]:
            time, after = self.times[step], self.times[step + 1]
            predict = guided_noise(predicts[step], self.signal[time], inpainting)
            noise = predict(x, x.new_full((len(x),), time / self.total_steps)).float()
            return self.update(x, noise, self.signal[time], self.signal[after], not deterministic)

        return transition

    def imitation_loss(self, features: Tensor, actions: Tensor, step_mask: Tensor | None) -> Tensor:
        """‖ε̂(x_t, t) − ε‖², with one t and one ε per row."""
        self._check_imitation()
        actions, mask = _held(actions, step_mask)
        time = torch.randint(1, self.total_steps + 1, (len(actions),), device=actions.device)
        noise = torch.randn_like(actions)
        noisy = diffused(actions, noise, self.signal[time])
        error = (self._predict(features)(noisy, time / self.total_steps) - noise).float().square()
        return mean_real(error, mask)


DENOISING_CHUNKS: dict[str, type[FlowChunks] | type[DiffusionChunks]] = {
    "flow": FlowChunks,
    "diffusion": DiffusionChunks,
}


def time_features(time: Tensor) -> Tensor:
    """Sines and cosines of a time in [0, 1]: [B] → [B, 2 TIME_FREQUENCIES]."""
    angles = time[:, None] * (math.pi * 2.0 ** torch.arange(TIME_FREQUENCIES, device=time.device) / 4.0)
    return torch.cat([angles.sin(), angles.cos()], 1)


def add_new_parts(module: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights with the parts of a chain that earlier training had not: the frozen copy, and a noise network.

    The copy is that of the weights; a noise network is the module's own.
    """
    completed = dict(weights)
    for name, value in module.state_dict().items():
        if name not in completed and FROZEN in name and name.replace(FROZEN, "", 1) in completed:
            completed[name] = completed[name.replace(FROZEN, "", 1)]
        elif name not in completed and NOISE_NETWORK in name:
            completed[name] = value
    return completed


def _network(parts: Any, features: Tensor) -> Velocity:
    condition = parts["condition"](features)

    def predict(x: Tensor, time: Tensor) -> Tensor:
        inputs = torch.cat([x.flatten(1), time_features(time)], 1)
        hidden = functional.relu(parts["noisy"](inputs) + condition)
        return parts["out"](hidden + functional.relu(parts["hidden"](hidden))).view(x.shape)

    return predict


def _held(actions: Tensor, step_mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Chunks whose padded steps repeat the last real one, and the mask of the real steps."""
    if step_mask is None:
        return actions, None
    return hold_last(actions, step_mask), step_mask.unsqueeze(-1)


class DenoisingHead(BoxHead):
    """A head that denoises as the action head of an `ActorCritic`: the actor network gives it features, [B, F].

    Actions have no density of their own, only the chain that leads to one: `act` returns it, and `score` needs it.
    """

    def __init__(self, space: gymnasium.Space, chunks: Chunks, num_outputs: int) -> None:
        super().__init__()
        self.set_box(space)
        self.num_outputs = num_outputs
        self.chunks = chunks

    def noise_parameters(self) -> Iterator[Tensor]:
        """Yield those of the chain."""
        yield from self.chunks.noise_parameters()

    def act(
        self, output: Tensor, mask: Tensor | None, deterministic: bool
    ) -> tuple[Tensor, Tensor, dict[str, Tensor] | None]:
        """The end of a chain in the environment's units, its log-prob, and the chain; padded dims are 0."""
        unit, log_prob, sample = self.chunks.draw(output, deterministic, self._real(mask))
        if mask is not None:
            unit = unit.masked_fill(~mask.unsqueeze(1), 0.0)
        return self.from_unit(unit.flatten(1)), log_prob - self._log_width(mask), sample

    def score(self, output: Tensor, action: Tensor, mask: Tensor | None, sample: Any = None) -> tuple[Tensor, Tensor]:
        """Log-prob of the stored chain, and its entropy."""
        tokens, entropy = self._score(output, action, mask, sample)
        log_width = self._log_width(mask)
        return tokens.sum(1) - log_width, entropy + log_width

    def token_log_prob(self, output: Tensor, action: Tensor, mask: Tensor | None, sample: Any = None) -> Tensor:
        """One token for each step of the chain."""
        return self._score(output, action, mask, sample)[0]

    def imitation_loss(self, output: Tensor, unit: Tensor, step_mask: Tensor | None = None) -> Tensor:
        """The loss of the chunks: [members, B] of [members, B, F] and [members, B, K · A]."""
        actions = unit[0].unflatten(-1, self.chunks.shape)
        return self.chunks.imitation_loss(output[0], actions, step_mask).unsqueeze(0)

    @property
    def noise_shape(self) -> tuple[int, int] | None:
        """Shape [K, A] of the noise; K is 1 without chunks."""
        return self.chunks.noise_shape

    def denoise(self, output: Tensor, noise: Tensor, inpainting: Inpainting | None = None) -> Tensor:
        """Unit actions [B, K · A] that noise [B, K, A] leads to."""
        return self.chunks.denoise(output, noise, inpainting).flatten(1)

    def mean(self, output: Tensor) -> Tensor:
        """Raise an error: there is no mean action."""
        raise InputError("a policy that denoises has no mean action")

    def log_prob(self, output: Tensor, unit: Tensor) -> Tensor:
        """Raise an error: only a chain has a density."""
        raise InputError("the actions of a policy that denoises have no log-prob of their own: score its chain")

    def rsample(self, output: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Raise an error: its samples have no density."""
        raise InputError("a policy that denoises has no differentiable samples with a log-density")

    def _score(self, output: Tensor, action: Tensor, mask: Tensor | None, sample: Any) -> tuple[Tensor, Tensor]:
        if sample is None:
            raise InputError("the actions of a policy that denoises have no log-prob of their own: score its chain")
        unit = self.to_unit(action.flatten(1)).unflatten(-1, self.chunks.shape)
        return self.chunks.score(output, unit, self._real(mask), sample)

    def _log_width(self, mask: Tensor | None) -> Tensor:
        """Σ log(half width) over the real dims of all steps."""
        if mask is None:
            return self.width.log().sum()
        return (self.width.log() * mask.tile(self.chunks.shape[0])).sum(-1)

    def _real(self, mask: Tensor | None) -> Tensor | None:
        return None if mask is None else mask.unsqueeze(1)
