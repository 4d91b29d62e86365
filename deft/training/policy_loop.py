"""What online and offline training share: one policy, one algorithm, the acting copy of sharded weights."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from deft.algorithms.algorithm import Algorithm
from deft.errors import InputError, RunError
from deft.models.policy import Policy
from deft.runs import sharding
from deft.runs.compute import is_small, threads_for
from deft.training.lifecycle import Run, RunSpec
from deft.training.loop import Loop


class PolicyLoop(Loop):
    """A loop that trains one policy by one algorithm.

    `state_keys` are the parts that its training state must have; `cures` is the advice if weights are not finite.
    """

    state_keys: tuple[str, ...]
    cures = "lower learning_rate"

    def __init__(self, policy: Policy, algorithm: Any, spec: RunSpec, directory: Path, reserved: int = 0) -> None:
        """`reserved`: cores that work during an update."""
        self.policy, self.seed = policy, spec.seed
        self.algorithm: Algorithm = algorithm
        self.device = next(iter(policy.parameters())).device
        processes = spec.processes
        processes.open(self.device)
        if processes.count > 1:
            algorithm.share(processes)
        threads = threads_for(spec.threads, policy, algorithm.settings.batch_size, reserved, processes.cores)
        self.run = Run(self, spec, directory, threads)

    @property
    def memory_advice(self) -> str:
        """Name the settings that an update's memory depends on, with their values."""
        settings: Any = self.algorithm.settings
        advice = f"use a smaller batch_size than {settings.batch_size}"
        if hasattr(settings, "gradient_accumulation"):
            advice += f", a larger gradient_accumulation than {settings.gradient_accumulation}"
        return f"{advice}, or a smaller model"

    @property
    def uses_small_matrices(self) -> bool:
        """Whether oneDNN is left out; without it bf16 products are emulated."""
        return is_small(self.policy) and getattr(self.algorithm.settings, "precision", None) != "bf16"

    @property
    def modules(self) -> Iterable[nn.Module]:
        """The policy and the networks of the algorithm."""
        parts = [part for part in vars(self.algorithm).values() if isinstance(part, nn.Module)]
        return [self.policy, *(part for part in parts if part is not self.policy)]

    # -- sharded weights -----------------------------------------------------------------------------------------------

    @property
    def acting(self) -> Policy:
        """The policy that acts: the trained one, or its copy with whole weights where parameters are sharded."""
        return self.policy if self.run.spec.acting is None else self.run.spec.acting.policy

    def gather_weights(self) -> None:
        """Give the acting copy of sharded parameters the current weights; all processes call it."""
        if self.run.spec.acting is not None:
            self.run.spec.acting.take()

    def free_weights(self) -> None:
        """Free the weights of the acting copy."""
        if self.run.spec.acting is not None:
            self.run.spec.acting.free()

    def weights(self) -> Mapping[str, Tensor]:
        """The policy's, whole."""
        return sharding.full_weights(self.policy) if self.is_sharded else self.policy.state_dict()

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def check_finite(self, state: dict[str, Any]) -> None:
        """Raise an error if the policy's weights are not finite."""
        if not sharding.are_finite(self.policy, self.processes, self.device):
            raise self.not_finite()

    def not_finite(self) -> RunError:
        """Return the error of networks that are not finite."""
        return RunError(
            f"weights of the networks are no longer finite after {self.global_step} {self.unit}, so nothing was saved: "
            f"{self.cures}; any checkpoint saved before is good"
        )

    def check_state(self, state: dict[str, Any], folder: Path) -> None:
        """Raise an error if a training state lacks a part, or is of another algorithm."""
        if missing := [name for name in self.state_keys if name not in state]:
            raise InputError(
                f"{folder}: its training state lacks {', '.join(missing)}; {type(self).__name__} cannot resume it"
            )
        if state["algorithm_name"] != self.algorithm.name:
            raise InputError(f"{folder}: a checkpoint of {state['algorithm_name']}, not of {self.algorithm.name}")

    def summary(self) -> dict[str, Any]:
        """Return what a command reports at the end."""
        best = self.best_reward if math.isfinite(self.best_reward) else None
        return {"run_dir": str(self.run_dir), **self.counts(), "best_reward": best, "seconds": self.run.seconds}

    @abstractmethod
    def counts(self) -> dict[str, Any]:
        """Return how far training is, for the summary."""
