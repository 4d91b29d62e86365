"""An auxiliary loss beside the reward: `vla-tiny` predicts object positions, where the observations have labels.

Rewards are sparse, and a vision encoder needs much data; a simulator can provide labels. PPO and GRPO train it on each
rollout, after their own update, if `auxiliary_learning_rate` is given.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from tensordict import TensorDictBase
from torch import Tensor

from deft.algorithms import optimization
from deft.config.algorithm_settings import GRPOSettings, PPOSettings
from deft.errors import InputError
from deft.models.policy import Policy

BATCH_SIZE = 32  # small: two epochs then learn as much as four with 64, in half the time
LAST_RATE = 0.1  # of the initial learning rate, at the end of training


def make_auxiliary(policy: Policy, settings: PPOSettings | GRPOSettings) -> Auxiliary | None:
    """None where the settings ask for none."""
    if not settings.auxiliary_learning_rate:
        return None
    batch_size = min(settings.batch_size, BATCH_SIZE)
    return Auxiliary(policy, settings.auxiliary_learning_rate, batch_size, settings.auxiliary_epochs)


def check_resumed(setting: str, part: object | None, saved: object | None) -> None:
    """Raise an error if a resumed run had a part that `setting` above 0 adds and has none now, or the other way round.

    `part` is what the run has now, `saved` its state in the checkpoint; None: none.
    """
    if (part is None) != (saved is None):
        was, now = ("0", "above it") if part is not None else ("above 0", "0")
        raise InputError(
            f"{setting} was {was} in this run and is {now} now: leave it as it was, or start a new run with "
            "--model_path"
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
        if optimization.are_sharded(self.parameters):
            raise InputError("auxiliary_learning_rate: not with fsdp; train without one of the two")
        self._train(True)
        self.optimizer = optimization.make_optimizer(self.parameters, learning_rate)
        self.processes: optimization.SharedTraining | None = None
        self._train(False)

    def update(self, rows: TensorDictBase, generator: torch.Generator, progress: float = 0.0) -> dict[str, Tensor]:
        """Train for some epochs over observations [B] in random minibatches; return the loss of the first, on new rows.

        The number of epochs decreases from `epochs` to 1 with `progress` (0 to 1), since the first rollouts teach most,
        and the learning rate decreases linearly.
        """
        self._train(True)
        rate = self.learning_rate * (1.0 - (1.0 - LAST_RATE) * min(1.0, progress))
        optimization.set_learning_rate(self.optimizer, rate)
        count = max(1, math.ceil(self.epochs * (1.0 - progress)))
        passes = [torch.stack([self._step(part) for part in self._minibatches(rows, generator)]) for _ in range(count)]
        self._train(False)
        return {"auxiliary_loss": passes[0].mean()}

    def _minibatches(self, rows: TensorDictBase, generator: torch.Generator) -> Iterator[TensorDictBase]:
        device = self.parameters[0].device
        order = torch.randperm(len(rows), generator=generator)
        order = order.to(next(iter(rows.values(True, True))).device)
        yield from (rows[index].to(device) for index in order.split(self.batch_size))

    def _step(self, minibatch: TensorDictBase) -> Tensor:
        loss = self.policy.auxiliary_loss(minibatch).mean()
        optimization.backward(loss, self.optimizer)
        optimization.apply_gradients(self.optimizer, processes=self.processes)
        return loss.detach()

    def _train(self, on: bool) -> None:
        for parameter in self.parameters:
            parameter.requires_grad_(on)
