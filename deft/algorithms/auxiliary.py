"""What a policy learns besides its reward: `vla-tiny` to see, where the observations come with labels.

Reward is thin, and seeing takes much data: a simulator that knows where things are can say so. PPO and GRPO make one of
these where `auxiliary_learning_rate` is given, and train it on what was just collected, after their own update.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from deft.algorithms.optimization import GradientAverage, apply_gradients, backward, make_optimizer, set_learning_rate
from deft.algorithms.optimizer_state import are_sharded, load_optimizer_state, optimizer_state
from deft.config.algorithm_settings import GRPOSettings, PPOSettings
from deft.errors import InputError
from deft.models.policy import Policy

BATCH_SIZE = 32  # small, since each row is seen but a few times: two passes teach what four of 64 do, in half the time
LAST_RATE = 0.1  # of the first step size, when training ends: what was learned last settles


def make_auxiliary(policy: Policy, settings: PPOSettings | GRPOSettings) -> Auxiliary | None:
    """None where the settings ask for none."""
    if not settings.auxiliary_learning_rate:
        return None
    batch_size = min(settings.batch_size, BATCH_SIZE)
    return Auxiliary(policy, settings.auxiliary_learning_rate, batch_size, settings.auxiliary_epochs)


def check_resumed(auxiliary: object | None, state: dict[str, Any]) -> None:
    """A run goes on as it began: with one of these, or without."""
    if (auxiliary is None) != (state.get("auxiliary") is None):
        was, now = ("0", "above it") if auxiliary is not None else ("above 0", "0")
        raise InputError(
            f"auxiliary_learning_rate was {was} in this run and is {now} now: leave it as it was, or start a new run "
            "with --model_path"
        )


class Auxiliary:
    """Descends the mean of `policy.auxiliary_loss` with an optimizer of its own over `policy.auxiliary_parameters`.

    These parameters are then trained by nothing else: in between they are frozen, so that an optimizer made later
    leaves them alone.
    """

    def __init__(self, policy: Policy, learning_rate: float, batch_size: int, epochs: int = 1) -> None:
        self.policy, self.batch_size, self.epochs = policy, batch_size, epochs
        self.learning_rate = learning_rate
        self.parameters = list(policy.auxiliary_parameters())
        if are_sharded(self.parameters):
            raise InputError("auxiliary_learning_rate: not with fsdp; train without one of the two")
        self._train(True)
        self.optimizer = make_optimizer(self.parameters, learning_rate)
        self.processes: GradientAverage | None = None
        self._train(False)

    def update(self, rows: TensorDictBase, generator: torch.Generator, progress: float = 0.0) -> dict[str, Tensor]:
        """Passes over observations [B] in random minibatches; the loss is that of the first, on new rows.

        `epochs` of them when training begins, one fewer with each equal part of it (`progress`, 0 to 1), and one in the
        last: the first scenes teach most, and passes cost more time than anything else. The step size falls linearly.
        """
        self._train(True)
        rate = self.learning_rate * (1.0 - (1.0 - LAST_RATE) * min(1.0, progress))
        set_learning_rate(self.optimizer, rate)
        count = max(1, math.ceil(self.epochs * (1.0 - progress)))
        passes = [torch.stack([self._step(part) for part in self._minibatches(rows, generator)]) for _ in range(count)]
        self._train(False)
        return {"auxiliary_loss": passes[0].mean()}

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's."""
        return optimizer_state(self.optimizer)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`; the step size comes from the settings, at each update."""
        load_optimizer_state(self.optimizer, state)

    def _minibatches(self, rows: TensorDictBase, generator: torch.Generator) -> Iterator[TensorDictBase]:
        device = self.parameters[0].device
        order = torch.randperm(len(rows), generator=generator)
        yield from (rows[index].to(device) for index in order.split(self.batch_size))

    def _step(self, minibatch: TensorDictBase) -> Tensor:
        loss = self.policy.auxiliary_loss(minibatch).mean()
        backward(loss, self.optimizer)
        apply_gradients(self.optimizer, processes=self.processes)
        return loss.detach()

    def _train(self, on: bool) -> None:
        for parameter in self.parameters:
            parameter.requires_grad_(on)
