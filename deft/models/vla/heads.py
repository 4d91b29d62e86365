"""Action heads of `vla-tiny`: distributions over chunks of actions [B, K, A], given features [B, F].

`gaussian` and `token`; those that denoise are in `deft.models.denoising`. Each can be combined with dims that only
open or close (`SwitchedChunks`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from deft.models.chunks import LOG_STD_RANGE, Chunks, Drawn
from deft.models.distributions import HALF_LOG_2PI
from deft.models.inpainting import Inpainting

ROUNDING = 0.1  # below this the absolute error becomes a squared one, e² / 0.2, whose gradient vanishes at 0
SWITCH_WEIGHT = 0.1  # weight of −log p of the switches in the imitation loss, relative to the error of the other dims


class GaussianChunks(Chunks):
    """a_k = μ_k + σ_k n_k + c n, with independent noise n_k per step and noise n that is shared by the chunk.

    The return depends on where the hand ends up. Independent noise averages out over the steps; shared noise adds up
    and makes exploration effective. The log-prob is computed step by step: given the previous steps, n has mean m and
    variance v (initially c²), so that
    log p(a_k | a_<k) = log N(a_k − μ_k; m, σ_k² + v); then g = v / (σ_k² + v), m += g (a_k − μ_k − m), v ← (1 − g) v.
    """

    can_reparameterize = True

    def __init__(
        self,
        width: int,
        chunk_length: int,
        action_dim: int,
        log_std_init: float,
        log_common_init: float,
        imitation: str,
    ) -> None:
        super().__init__(chunk_length, action_dim)
        self.imitation = imitation
        self.out = _small_output(width, chunk_length * action_dim)
        self.log_std_free = nn.Parameter(torch.full(self.shape, float(log_std_init)))
        self.log_common_free = nn.Parameter(torch.full((action_dim,), float(log_common_init)))

    def noise_parameters(self) -> Iterator[nn.Parameter]:
        """Yield both deviations."""
        yield from (self.log_std_free, self.log_common_free)

    @property
    def deviations(self) -> tuple[Tensor, Tensor]:
        """σ [K, A] and c [A]; a single step has no shared noise."""
        common = self.log_common_free.clamp(*LOG_STD_RANGE).exp()
        return self.log_std_free.clamp(*LOG_STD_RANGE).exp(), common if self.shape[0] > 1 else torch.zeros_like(common)

    @property
    def log_std(self) -> Tensor:
        """Log deviation of each number by itself, ½ log(σ² + c²): [K, A]."""
        own, common = self.deviations
        return 0.5 * (own.square() + common.square()).log()

    def mean(self, features: Tensor) -> Tensor:
        """[B, K, A]."""
        return self.out(features).view(-1, *self.shape)

    def draw(self, features: Tensor, deterministic: bool, mask: Tensor | None) -> Drawn:
        """Mean plus noise."""
        mean = self.mean(features)
        action = mean
        if not deterministic:
            own, common = self.deviations
            action = torch.addcmul(mean, torch.randn_like(mean), own)
            action = torch.addcmul(action, torch.randn_like(mean[:, :1]), common)
        return action, self._log_prob(mean, action, mask).sum((1, 2)), {}

    def score(self, features: Tensor, actions: Tensor, mask: Tensor | None, sample: Any) -> tuple[Tensor, Tensor]:
        """Score by the density; the entropy of a dim of a step, given the steps before, is ½ log 2πe (σ_k² + v)."""
        mean = self.mean(features)
        variances = torch.stack([variance for variance, _ in self._steps()])
        entropy = _real((0.5 * variances.log() + (0.5 + HALF_LOG_2PI)).expand_as(mean), mask)
        return self._log_prob(mean, actions, mask).sum(2), entropy.sum((1, 2))

    def reparameterize(self, features: Tensor, actions: Tensor) -> Tensor:
        """μ plus the noise that the actions have."""
        mean = self.mean(features)
        return actions + (mean - mean.detach())

    def _steps(self) -> list[tuple[Tensor, Tensor]]:
        """σ_k² + v and g of each step, [A]."""
        own, common = self.deviations
        unknown, steps = common.square(), []
        for variance in own.square():
            total = variance + unknown
            gain = unknown / total
            steps.append((total, gain))
            unknown = (1.0 - gain) * unknown
        return steps

    def _log_prob(self, mean: Tensor, actions: Tensor, mask: Tensor | None) -> Tensor:
        """[B, K, A]."""
        offsets, known, parts = actions - mean, torch.zeros_like(mean[:, 0]), []
        for step, (variance, gain) in enumerate(self._steps()):
            rest = offsets[:, step] - known
            known = torch.addcmul(known, gain, rest)
            parts.append(-0.5 * (rest.square() / variance + variance.log()) - HALF_LOG_2PI)
        return _real(torch.stack(parts, 1), mask)

    def imitation_loss(self, features: Tensor, actions: Tensor, step_mask: Tensor | None) -> Tensor:
        """|a − μ|, or ½ (a − μ)², of the real steps, as a mean over all numbers of the chunk: [B].

        The absolute error makes μ the median of the demonstrated actions, the squared error the mean. A gripper opens
        or closes, and its mean is neither; noise that is clipped at the bounds of an action moves the mean inwards but
        not the median.

        The deviation is not learned: the spread of the demonstrations is no measure of how far to explore, and with it
        the steps of a chunk, which do not depend on each other, would drift.
        """
        mean = self.mean(features)
        if self.imitation == "squared":
            error = 0.5 * (actions - mean).square()
        else:
            error = functional.smooth_l1_loss(mean, actions, reduction="none", beta=ROUNDING)
        return _real(error, None if step_mask is None else step_mask.unsqueeze(-1).expand_as(error)).mean((1, 2))


class TokenChunks(Chunks):
    """Each dim of each step is one of `num_bins` bins of [-1, 1], independent given the features; a bin acts as its
    centre, c_i = −1 + (2 i + 1) / bins.
    """

    centers: Tensor

    def __init__(self, width: int, chunk_length: int, action_dim: int, num_bins: int) -> None:
        super().__init__(chunk_length, action_dim)
        self.num_bins = num_bins
        self.out = _small_output(width, chunk_length * action_dim * num_bins)
        self.register_buffer("centers", (2 * torch.arange(num_bins) + 1) / num_bins - 1.0, persistent=False)

    def _log_probs(self, features: Tensor) -> Tensor:
        return self.out(features).view(-1, *self.shape, self.num_bins).log_softmax(-1)

    def _bins(self, actions: Tensor) -> Tensor:
        return ((actions + 1.0) * (0.5 * self.num_bins)).long().clamp(0, self.num_bins - 1)

    def draw(self, features: Tensor, deterministic: bool, mask: Tensor | None) -> Drawn:
        """Sample bins; deterministic: the most likely bin of each dim, since the mean of two modes is neither."""
        logs = self._log_probs(features)
        bins = logs.argmax(-1) if deterministic else _sample(logs)
        chosen = logs.gather(-1, bins.unsqueeze(-1)).squeeze(-1)
        return self.centers[bins], _real(chosen, mask).sum((1, 2)), {}

    def score(self, features: Tensor, actions: Tensor, mask: Tensor | None, sample: Any) -> tuple[Tensor, Tensor]:
        """Score by the bins that contain the actions."""
        logs = self._log_probs(features)
        chosen = logs.gather(-1, self._bins(actions).unsqueeze(-1)).squeeze(-1)
        entropy = _real(-(logs.exp() * logs).sum(-1), mask)
        return _real(chosen, mask).sum(2), entropy.sum((1, 2))


class SwitchedChunks(Chunks):
    """Some dims of an action are switches, such as a gripper that is open (1) or closed (−1); a head has the rest.

    Within a chunk a switch stays or changes once: 2K sequences, and a categorical over them. Imitation learns their
    probabilities, and reinforcement learning then explores the uncertain ones. A Gaussian around "closed" never opens.
    """

    switches: Tensor
    others_at: Tensor
    ways: Tensor

    def __init__(self, others: Chunks, width: int, chunk_length: int, action_dim: int, dims: Sequence[int]) -> None:
        super().__init__(chunk_length, action_dim)
        self.others, self.dims = others, list(dims)
        self.can_reparameterize = others.can_reparameterize
        self.rest = [dim for dim in range(action_dim) if dim not in self.dims]
        # Tensors on the device of the actions: to index with a list would copy it there each time, and wait for it.
        self.register_buffer("switches", torch.tensor(self.dims), persistent=False)
        self.register_buffer("others_at", torch.tensor(self.rest), persistent=False)
        self.out = _small_output(width, len(self.dims) * 2 * chunk_length)
        opened = [[1.0] * steps + [-1.0] * (chunk_length - steps) for steps in range(chunk_length + 1)]
        closed = [[-1.0] * steps + [1.0] * (chunk_length - steps) for steps in range(1, chunk_length)]
        self.register_buffer("ways", torch.tensor(opened + closed), persistent=False)  # [2K, K]

    def noise_parameters(self) -> Iterator[nn.Parameter]:
        """Yield those of the other dims."""
        yield from self.others.noise_parameters()

    def draw(self, features: Tensor, deterministic: bool, mask: Tensor | None) -> Drawn:
        """The sample of the other dims, and a sequence for each switch; deterministic: the most likely one."""
        drawn, log_prob, sample = self.others.draw(features, deterministic, self._mask_of_others(mask))
        logs = self._log_probs(features)
        way = logs.argmax(-1) if deterministic else _sample(logs)
        return self._joined(drawn, way), log_prob + self._chosen(logs, way, mask).sum(1), sample

    def score(self, features: Tensor, actions: Tensor, mask: Tensor | None, sample: Any) -> tuple[Tensor, Tensor]:
        """Score with the head of the other dims; the log-prob of a switch is added to the first step."""
        tokens, entropy = self.others.score(features, actions[..., self.others_at], self._mask_of_others(mask), sample)
        logs = self._log_probs(features)
        chosen = self._chosen(logs, self.way(actions), mask).sum(1)
        switch_entropy = -(logs.exp() * logs).sum(-1)
        if mask is not None:
            switch_entropy = switch_entropy.masked_fill(~mask[:, 0, self.switches], 0.0)
        return torch.cat([tokens[:, :1] + chosen.unsqueeze(1), tokens[:, 1:]], 1), entropy + switch_entropy.sum(1)

    def reparameterize(self, features: Tensor, actions: Tensor) -> Tensor:
        """The other dims as by their head; a switch has no gradient."""
        moved = actions.clone()
        moved[..., self.others_at] = self.others.reparameterize(features, actions[..., self.others_at])
        return moved

    def alternatives(self, features: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Each sequence of each switch, the other switches and dims as they are: n = switches · 2K."""
        changed = actions[:, None, None].repeat(1, len(self.dims), len(self.ways), 1, 1)  # [B, S, 2K, K, A]
        for number, dim in enumerate(self.dims):
            changed[:, number, :, :, dim] = self.ways.to(actions)
        return changed.flatten(1, 2), self._log_probs(features).exp().flatten(1)

    @property
    def noise_shape(self) -> tuple[int, int] | None:
        """That of the other dims."""
        return self.others.noise_shape

    def denoise(self, features: Tensor, noise: Tensor, inpainting: Inpainting | None = None) -> Tensor:
        """Denoise the other dims; each switch takes its most likely sequence.

        With `inpainting`, the most likely one of those that agree with its target in the most frozen steps: in all of
        them, where the target is the rest of such a sequence.
        """
        logs = self._log_probs(features)
        if inpainting is None:
            return self._joined(self.others.denoise(features, noise), logs.argmax(-1))
        agreeing = self._agreement(inpainting.of_dims(self.dims))
        logs = logs.masked_fill(agreeing < agreeing.amax(-1, keepdim=True), -torch.inf)
        return self._joined(self.others.denoise(features, noise, inpainting.of_dims(self.rest)), logs.argmax(-1))

    def imitation_loss(self, features: Tensor, actions: Tensor, step_mask: Tensor | None) -> Tensor:
        """The loss of the other dims, and −log p of the switches in chunks that end within the episode."""
        loss = self.others.imitation_loss(features, actions[..., self.others_at], step_mask)
        chosen = self._chosen(self._log_probs(features), self.way(actions), None).mean(1)
        if step_mask is not None:
            chosen = chosen * step_mask.all(1)
        share = len(self.rest) / self.shape[1]
        return share * loss - SWITCH_WEIGHT * chosen

    def way(self, actions: Tensor) -> Tensor:
        """The sequence of each switch, [B, switches]: the one that agrees with the sign of the most steps."""
        signs = torch.where(actions[..., self.switches] > 0, 1.0, -1.0).to(self.ways)  # [B, K, S]
        return torch.einsum("bks,wk->bsw", signs, self.ways).argmax(-1)

    def _agreement(self, inpainting: Inpainting) -> Tensor:
        """The number of frozen steps in which each sequence agrees with the target, [B, switches, 2K]."""
        signs = torch.where(inpainting.target > 0, 1.0, -1.0).to(self.ways)  # [B, K, S]
        return torch.einsum("bks,wk->bsw", signs * inpainting.frozen, self.ways)

    def _log_probs(self, features: Tensor) -> Tensor:
        return self.out(features).view(-1, len(self.dims), len(self.ways)).log_softmax(-1)

    def _chosen(self, logs: Tensor, way: Tensor, mask: Tensor | None) -> Tensor:
        """log p of the sequences, [B, switches]; 0 for padded dims."""
        chosen = logs.gather(-1, way.unsqueeze(-1)).squeeze(-1)
        return chosen if mask is None else chosen.masked_fill(~mask[:, 0, self.switches], 0.0)

    def _joined(self, others: Tensor, way: Tensor) -> Tensor:
        """Whole actions of the other dims and the sequences of the switches."""
        action = others.new_empty(len(others), *self.shape)
        action[..., self.others_at] = others
        action[..., self.switches] = self.ways[way].transpose(1, 2).to(others)
        return action

    def _mask_of_others(self, mask: Tensor | None) -> Tensor | None:
        return None if mask is None else mask[..., self.others_at]


def _small_output(width: int, size: int) -> nn.Linear:
    """A last layer with outputs near 0 at initialisation."""
    out = nn.Linear(width, size)
    nn.init.normal_(out.weight, std=0.01)
    nn.init.zeros_(out.bias)
    return out


def _sample(logs: Tensor) -> Tensor:
    """Sample an index of the last dim by its log-probs: the argmax of log p + Gumbel noise."""
    return (logs - torch.empty_like(logs).exponential_().log()).argmax(-1)


def _real(values: Tensor, mask: Tensor | None) -> Tensor:
    """0 in the dims where `mask` [B, K, A] is False."""
    return values if mask is None else values.masked_fill(~mask, 0.0)
