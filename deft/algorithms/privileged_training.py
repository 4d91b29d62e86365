"""Training of networks that read the streams of `critic_observation`, beside PPO or GRPO and on the last rollouts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from deft.algorithms import optimization
from deft.algorithms.captured_step import CapturedStep


class PrivilegedTraining(ABC):
    """An optimizer, random numbers and the last rollouts; a subclass says what these hold, and the loss."""

    def __init__(self, networks: nn.Module, learning_rate: float, seed: int, captures: bool) -> None:
        self.device = next(networks.parameters()).device
        self.generator = torch.Generator().manual_seed(seed)
        self._captured = CapturedStep(self._step) if captures else None
        self.optimizer = optimization.make_optimizer(networks.parameters(), learning_rate, capturable=captures)
        self.rollouts: list[Any] = []
        """Of each of the last rollouts: what the networks learn from."""
        self.processes: optimization.SharedTraining | None = None

    @abstractmethod
    def _loss(self, batch: TensorDictBase) -> Tensor:
        """The mean over a batch of transitions."""

    def _train(self, transitions: TensorDictBase, num_updates: int, batch_size: int) -> Tensor:
        """Gradient steps on random batches; the mean of their losses."""
        count = len(transitions)
        chosen = torch.randint(count, (num_updates, min(batch_size, count)), generator=self.generator).to(self.device)
        step = self._step if self._captured is None or self.processes is not None else self._captured
        return torch.stack([step(transitions[batch])["loss"] for batch in chosen]).mean()

    def _step(self, batch: TensorDictBase) -> dict[str, Tensor]:
        loss = self._loss(batch)
        optimization.backward(loss, self.optimizer)
        optimization.apply_gradients(self.optimizer, processes=self.processes)
        return {"loss": loss.detach()}

    def state_dict(self) -> dict[str, Any]:
        """Everything that a resumed run needs to continue bit for bit; a subclass adds networks and rollouts."""
        return {
            "optimizer": optimization.optimizer_state(self.optimizer),
            "generator": self.generator.get_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned."""
        optimization.load_optimizer_state(self.optimizer, state["optimizer"])
        self.generator.set_state(state["generator"])
