"""Base class of pretrained models that denoise a chunk of actions: flows (`flow`) and diffusion policies.

They act by denoising, and PPO and GRPO score the denoising chain (`denoising_chain`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torch.nn import functional

from deft import schema
from deft.errors import InputError
from deft.models.denoising_chain import Transition, draw, score
from deft.models.inpainting import Inpainting
from deft.models.vla.interface import Sample
from deft.models.vla.pretrained import PretrainedVLA
from deft.models.vla.streams import Statistics

Steps = Callable[[bool, Tensor, Inpainting | None], Transition]
"""(deterministic, mask of the executed dims, what guides it) → mean and deviation of each step of the chain."""


@dataclass(frozen=True)
class ChainShape:
    """The chunk that a model denoises, and its number of steps; steps before `first` of the chunk are in the past."""

    name: str
    chunk_size: int
    dims: int
    num_steps: int
    first: int = field(default=0, kw_only=True)


class DenoisingVLA(PretrainedVLA):
    """A denoising chain over the chunk of a pretrained model, of which K steps and A dims are executed.

    The chain covers the whole chunk of the model and all of its dims; only the executed dims get noise in the steps of
    the chain and have a log-prob. A subclass defines `steps`, and calls `add_chain` in its constructor.
    """

    keeps_sample = True
    starts_from_noise = True
    can_inpaint = True
    action_statistics: Statistics
    shape: ChainShape
    num_steps: int

    def add_chain(self, shape: ChainShape, num_steps: int | None) -> None:
        """Set the shape; raise an error if chunks or actions of the environment are larger than those of the model.

        `num_steps` None: that of the model.
        """
        most = shape.chunk_size - shape.first
        check_at_most(shape.name, action_dim=(self.action_dim, shape.dims), chunk_length=(self.chunk_length, most))
        self.shape, self.num_steps = shape, num_steps or shape.num_steps
        self.noise_shape = (shape.chunk_size, shape.dims)

    def steps(self, observations: TensorDictBase) -> tuple[Steps, Tensor]:
        """The steps of the chain given an observation, and the features of the value, [B, F]."""
        raise TypeError(f"{type(self).__name__} does not define steps")

    # The interface of a VLA model ------------------------------------------------------------------------------------

    def get_value(self, observations: TensorDictBase) -> Tensor:
        """Value of each observation: [B, 1]."""
        return self.value_head(self.steps(observations)[1])

    def act(
        self, observations: TensorDictBase, deterministic: bool = False, action_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
        """Actions, log-prob of the chain [B], value [B, 1], and the chain. Deterministic: only the first noise."""
        steps, features = self.steps(observations)
        noise = torch.randn(len(features), self.shape.chunk_size, self.shape.dims, device=features.device)
        executed = self.executed(action_mask, features.device)
        chain, log_probs = draw(steps(deterministic, executed, None), noise, self.num_steps, deterministic, executed)
        value = self.value_head(features)
        return self._actions(chain[:, -1], action_mask), log_probs.sum(1), value, {schema.CHAIN: chain}

    def denoise(
        self,
        observations: TensorDictBase,
        noise: Tensor,
        action_mask: Tensor | None = None,
        features: Tensor | None = None,
        inpainting: Inpainting | None = None,
    ) -> Tensor:
        """The actions that noise [B, *noise_shape] leads to."""
        guide = None if inpainting is None else self._of_chain(inpainting.masked(action_mask))
        transition = self.steps(observations)[0](True, self.executed(action_mask, noise.device), guide)
        return self._actions(draw(transition, noise, self.num_steps, deterministic=True)[0][:, -1], action_mask)

    def evaluate_actions(
        self, observations: TensorDictBase, actions: Tensor, action_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """An action alone has no log-prob: `evaluate` scores the chain that it came from."""
        raise InputError(
            f"{self.shape.name} has no log-prob of an action alone, only of its denoising chain, which ppo and grpo "
            "store: train on a dataset with sft"
        )

    def evaluate_tokens(
        self, observations: TensorDictBase, actions: Tensor, action_mask: Tensor | None = None, sample: Sample = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As `evaluate`, with the log-prob of each step of the denoising, [B, S]."""
        if sample is None:
            raise InputError(
                f"{self.shape.name} scores the denoising chain of an action, and no chain is stored with this action"
            )
        steps, features = self.steps(observations)
        mask = self.executed(action_mask, features.device)
        log_probs, entropies = score(steps(False, mask, None), sample[schema.CHAIN], mask)
        return log_probs, entropies.sum(1), self.value_head(features)

    # Computation -----------------------------------------------------------------------------------------------------

    def executed(self, action_mask: Tensor | None, device: torch.device) -> Tensor:
        """Mask of the executed steps and dims of the chain, bool, broadcast to [B, chunk, dims]."""
        mask = torch.zeros(1, self.shape.chunk_size, self.shape.dims, dtype=torch.bool, device=device)
        mask[:, self.shape.first : self.shape.first + self.chunk_length, : self.action_dim] = True
        if action_mask is None:
            return mask
        return mask & functional.pad(action_mask, (0, self.shape.dims - self.action_dim)).unsqueeze(1)

    def _of_chain(self, inpainting: Inpainting) -> Inpainting:
        """A target in the environment's units as that of the chain; its further steps and dims have none."""
        first, shape = self.shape.first, self.shape
        around = (0, shape.dims - self.action_dim, first, shape.chunk_size - first - self.chunk_length)
        target = self.action_statistics.normalize(inpainting.target)
        weights = inpainting.weights.expand_as(target)
        return replace(inpainting, target=functional.pad(target, around), weights=functional.pad(weights, around))

    def _actions(self, end: Tensor, action_mask: Tensor | None) -> Tensor:
        """The executed part of a chain's end, in the environment's units."""
        executed = end[:, self.shape.first : self.shape.first + self.chunk_length, : self.action_dim]
        return self.shaped(self.action_statistics.denormalize(executed), action_mask)


def check_at_most(name: str, **sizes: tuple[int, int]) -> None:
    """Raise an error if a size of the environment is larger than that of the model."""
    for key, (size, most) in sizes.items():
        if size > most:
            raise InputError(f"{key} {size} is more than this {name} has: {most}")
