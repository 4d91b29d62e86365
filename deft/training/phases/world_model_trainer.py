"""What phases 1 and 3 share, which train a world model: chunks of episodes in order, micro-batches, codes.

The episodes of a round are an `EpisodeBatch`; each phase has its own source of episodes.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from deft import schema
from deft.data.episodes import EpisodeBatch
from deft.data.robot_episode import RobotEpisode
from deft.errors import InputError
from deft.models.f1.batch import MemoryStateManager
from deft.models.f1.policy import encode_frames
from deft.runs.compute import autocast
from deft.training.phases.base import BaseRLTrainer, Metrics

log = logging.getLogger(__name__)
TRUST_RATE = 10.0  # times the learning rate of the rest
Update: TypeAlias = Callable[[dict[str, Tensor], Tensor | None, float], tuple[dict[str, Tensor], Tensor]]


class WorldModelTrainer(BaseRLTrainer):
    """Trains the policy's world model on episodes."""

    def train_chunks(self, batch: EpisodeBatch, update: Update | None = None) -> Metrics:
        """Train in order: the memory is zeros at the first frame, and is carried, detached, from chunk to chunk.

        `update` takes a step on a chunk: `update_on`, by default.
        """
        update = self.update_on if update is None else update
        memory = MemoryStateManager()
        has_memory = self.policy.config.memory_enabled
        if has_memory:
            memory.update(self.policy.initial_memory(len(batch.lengths)))
        sums = Means()
        for start in range(0, int(self.processes.maximum(batch.longest, self.device)), self.training.bptt_length):
            found = batch.chunk(start, self.training.bptt_length)
            is_spare = found is None  # other processes have longer episodes: they wait for this one's gradients
            chunk, rows = found if found is not None else batch.chunk(0, 1)  # type: ignore[misc]
            rows, current = rows.to(self.device), memory.get_current()
            if has_memory and current is None:
                raise InputError("memory_state cannot be None: it is zeros at an episode's first frame")
            before = None if current is None else current[:, rows]
            results, norm = update(chunk, before, 0.0 if is_spare else 1.0)
            if current is not None:
                after = current.clone()
                after[:, rows] = results[schema.MEMORY_STATE]
                memory.update(after)
            if not is_spare:
                num_steps = chunk[schema.STATE].shape[:-1].numel()  # with padding
                sums.add({**scalars(results), "grad_norm": norm, "copy_acc": copy_accuracy(chunk)}, num_steps)
        last = memory.get_current()
        if last is not None and log.isEnabledFor(logging.DEBUG):  # reading the values waits for the device
            sizes = (float(last.abs().mean()), float(last.abs().max()))
            log.debug("memory state after the last chunk: mean |m| %.4f, largest %.4f", *sizes)
        return sums.means() | {"train/learning_rate": self.optimizer.param_groups[0]["lr"]}

    def update_on(
        self, batch: dict[str, Tensor], memory: Tensor | None, weight: float = 1.0
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Update on the policy's loss, times `weight`; return the detached results and the gradient norm."""
        forward = partial(self.policy, memory_backprop=self.training.memory_backprop)
        return self.update_in_parts(forward, batch, memory, weight=weight)

    def update_in_parts(
        self,
        forward: Callable[..., dict[str, Tensor]],
        batch: dict[str, Tensor],
        memory: Tensor | None,
        optimizer: torch.optim.Optimizer | None = None,
        weight: float = 1.0,
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Update on `loss` of `forward(batch, memory)`, with rows split into `gradient_accumulation` micro-batches.

        The loss is a mean over the real steps: ∇L = Σ (n_i / n) ∇L_i.
        """
        (self.optimizer if optimizer is None else optimizer).zero_grad(set_to_none=True)
        axis = batch[schema.STATE].ndim - 2
        parts = self._parts(batch[schema.STATE].shape[axis])
        total = _num_real(batch) if len(parts) > 1 else 0.0  # asking waits for the device
        merged: dict[str, Tensor] = {}
        memories = []
        for rows in parts:
            part = {name: value[:, rows] if axis else value[rows] for name, value in batch.items()}
            with autocast(self.device, self.autocast_dtype):
                results = forward(part, memory_state=None if memory is None else memory[:, rows])
            share = _num_real(part) / total if len(parts) > 1 else 1.0
            (results["loss"] * (weight * share)).backward()
            for name, value in scalars(results).items():
                merged[name] = merged.get(name, 0.0) + value * share
            if schema.MEMORY_STATE in results:
                memories.append(results[schema.MEMORY_STATE].detach())
        if memories:
            merged[schema.MEMORY_STATE] = torch.cat(memories, 1)
        return merged, self.apply_gradients(optimizer)

    def _parts(self, num_rows: int) -> list[slice]:
        """Return the rows of each micro-batch: as many as configured, and as all processes have rows for."""
        count = min(self.training.gradient_accumulation, num_rows)
        if self.training.gradient_accumulation > 1:
            count = -int(self.processes.maximum(-count, self.device))
        ends = [num_rows * number // count for number in range(count + 1)]
        return [slice(start, end) for start, end in itertools.pairwise(ends)]

    def coded(self, episodes: list[RobotEpisode]) -> list[RobotEpisode]:
        """Add the codes of their frames to the episodes that have none."""
        new = [episode for episode in episodes if episode.codes is None]
        if new:
            codes = encode_frames(self.policy, torch.cat([torch.as_tensor(episode.wrist) for episode in new]))
            for episode, own in zip(new, codes.split([len(episode.wrist) for episode in new]), strict=True):
                episode.codes = own if isinstance(episode.wrist, Tensor) else own.cpu().numpy()
        return episodes

    def make_optimizer(self) -> torch.optim.Optimizer:
        """Return the optimizer; the trust in the motion prior has a higher learning rate than the rest."""
        optimizer = super().make_optimizer()
        assert optimizer is not None
        motion = self.policy.model.motion
        if motion is None:
            return optimizer
        named = [(name, one) for name, one in motion.named_parameters() if one.requires_grad]
        trusted = [one for name, one in named if "trust." in name or "log_sharpness" in name]
        chosen = {id(one) for one in trusted}
        for group in optimizer.param_groups:
            group["params"] = [one for one in group["params"] if id(one) not in chosen]
        if trusted:
            rate = TRUST_RATE * self.training.learning_rate
            optimizer.add_param_group({"params": trusted, "lr": rate, "weight_decay": 0.0})
        return optimizer


def copy_accuracy(batch: dict[str, Tensor]) -> Tensor:
    """Return the fraction of the next frame's codes that equal the last frame's."""
    codes = batch[schema.FRAME_TOKENS]
    same = (codes[..., -1, :] == codes[..., -2, :]).float().mean(-1)
    real = batch.get(schema.STEP_MASK)
    return same.mean() if real is None else (same * real).sum() / real.sum()


def _num_real(batch: dict[str, Tensor]) -> float:
    """Return the number of steps in a batch's loss."""
    real = batch.get(schema.STEP_MASK)
    return float(batch[schema.STATE].shape[:-1].numel() if real is None else real.sum())


def scalars(results: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the losses and accuracies among the results of a pass, detached."""
    return {name: value.detach() for name, value in results.items() if value.ndim == 0}


class Means:
    """Means of metrics over updates, weighted; they stay tensors."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._weight = 0.0

    def add(self, values: dict[str, Tensor], weight: float) -> None:
        """Add the metrics of an update."""
        self._weight += weight
        for name, value in values.items():
            self._sums[name] = self._sums.get(name, 0.0) + value * weight

    def means(self) -> Metrics:
        """Return the means, under the names that are logged."""
        return {f"train/{name}": value / self._weight for name, value in self._sums.items()}
