"""Phase 1, `deft train teacher`: a world model that predicts the wrist camera's next frame, from random exploration.

Episodes come from `TeacherEnv` in other processes (`exploration`), or from a recorded dataset. Their frames are
coded once, when they arrive. A round trains on `batch_size` episodes: chunk after chunk with the memory carried and
detached between them, or on random steps; at first the motion prior alone, then what the memory adds to it.
"""

from __future__ import annotations

import logging
import math
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from deft import schema
from deft.algorithms.optimization import load_optimizer_state, optimizer_state, shard_like
from deft.config.f1_settings import PhaseConfig
from deft.data.episodes import EpisodeBatch, EpisodeBuffer
from deft.data.robot_episode import RobotEpisode
from deft.errors import InputError
from deft.machine import available_cores
from deft.models.f1.config import F1Config
from deft.models.f1.loading import find_tokenizer
from deft.models.f1.motion import TAIL, fit_sharpness
from deft.models.f1.optimization import setup_optimizer
from deft.models.f1.policy import F1Policy
from deft.runs import sharding
from deft.runs.compute import autocast
from deft.training.phases.base import Metrics
from deft.training.phases.exploration import Exploration, Explorer, InlineExplorer, ProcessExplorer, make_exploration
from deft.training.phases.recorded import DatasetExplorer, warn_of_seen_episodes
from deft.training.phases.world_model_trainer import Means, WorldModelTrainer, copy_accuracy, scalars

log = logging.getLogger(__name__)
WARMUPS = {"motion": 0.15, "memory": 0.05}  # parts of new weights that are trained alone, and fractions of the run
MOST_WORKERS = 64
FITTED_STEPS = 512
OF_RECORDINGS = {"frame_skip": 1, "shift_augmentation": 0, "wrist_camera": None, "head_camera": None}
MOST_COPIES = 64  # augmented episodes in the buffer, where only few are recorded


class TeacherTrainer(WorldModelTrainer):
    """Phase 1."""

    phase: ClassVar[str] = "teacher"
    can_shard: ClassVar[bool] = True
    shown: ClassVar[tuple[str, ...]] = ("loss", "wm_acc_mean", "copy_acc", "motion_loss")

    def __init__(self, config: PhaseConfig, policy: F1Policy | None = None, explorer: Explorer | None = None) -> None:
        self._dataset: DatasetExplorer | None = None
        given = [name for name, unset in OF_RECORDINGS.items() if getattr(config.training, name) != unset]
        if config.training.dataset is None and given:
            raise InputError(f"{given[0]}: for recordings alone; name one with dataset")
        if config.training.vector != "process":
            raise InputError(
                f"vector: {config.training.vector} is for the explorers of phases 2 and 3; `deft train teacher` "
                "collects in worker processes (--num-envs); leave it out"
            )
        super().__init__(config, policy)
        training = self.training
        self.generator = np.random.default_rng([training.seed, self.processes.rank])
        self.num_taken = 0  # episodes that the explorer of this process has returned
        self.explorer: Explorer | None = explorer
        if explorer is None and training.dataset is None:
            self.exploration()  # checks the environment's settings before anything is written
        self.buffer = EpisodeBuffer(0, 0)  # created with the explorer
        self._buffer_state: dict[str, Any] | None = None
        rate, decay = training.motion_learning_rate, training.weight_decay
        self.warmup_optimizers = {
            name: setup_optimizer(getattr(self.policy.model, name), rate, decay)
            for name, share in zip(WARMUPS, self._warmup_shares, strict=True)
            if share
        }

    @property
    def warms_up(self) -> str | None:
        """The part that is trained alone: "motion", then "memory"; None: the whole model is trained."""
        motion, memory = self._warmup_shares
        if self.progress < motion:
            return "motion"
        return "memory" if self.progress < motion + memory else None

    @property
    def schedule_progress(self) -> float:
        """The fraction of the learning rate schedule, which starts after the warm-ups."""
        share = sum(self._warmup_shares)
        return max(0.0, self.progress - share) / max(1e-9, 1.0 - share)

    @property
    def _warmup_shares(self) -> tuple[float, float]:
        """Fractions of the run in which the motion prior, then the memory, is trained alone."""
        training, model = self.training, self.policy.model
        # A new optimizer at a high learning rate would damage trained weights.
        usual = WARMUPS.values() if self.config.model.checkpoint_path is None else (0.0, 0.0)
        asked = (training.motion_warmup, training.memory_warmup)
        motion, memory = (own if share is None else share for own, share in zip(usual, asked, strict=True))
        motion = motion if model.motion is not None else 0.0
        draws = model.memory is not None and model.memory.to_picture is not None
        return motion, min(memory, 1.0 - motion) if draws else 0.0

    def train_round(self) -> tuple[int, Metrics]:
        """Train on `batch_size` episodes, new ones first."""
        with self.stoppable():
            self._gather()
        config, num_new = self.policy.config, self.buffer.num_unseen
        rows = self.buffer.draw(self.training.batch_size, self.generator)
        batch = self.buffer.batch(rows, config.n_obs_img_steps, config.obs_img_stride)
        self.shown_episodes = batch
        hides_head = bool(self.training.head_dropout) and bool(self.generator.random() < self.training.head_dropout)
        if self.is_sharded:  # the passes of all processes are alike
            hides_head = self.processes.broadcast(hides_head)
        if hides_head:
            batch = batch.without_head()
        self.policy.train()
        warms_up = self.warms_up
        if warms_up is None and self.config.model.checkpoint_path is None and not self.optimizer.state:
            self._fit_sharpness(batch)
        if warms_up == "motion":
            metrics = self._train_motion(batch)
        elif warms_up == "memory":
            metrics = self.train_chunks(batch.without_head(), self._update_memory)
        elif self.training.sequential_training:
            metrics = self.train_chunks(batch)
        else:
            metrics = self._train_random(batch, hides_head)
        metrics |= {"collect/episodes": self.num_taken, "collect/new": self.buffer.num_unseen}
        # Episodes that are trained on again are not counted, unless all come from a recording.
        count = len(rows) if self.training.dataset is not None else min(num_new, len(rows))
        if self.processes.count > 1:
            count = round(self.processes.total(count, self.device))
        return count, metrics

    def _fit_sharpness(self, batch: EpisodeBatch) -> None:
        """Initialise the sharpness of the motion prior on steps of the first episodes of all processes."""
        motion, tokenizer = self.policy.model.motion, self.policy.tokenizer
        if motion is None:
            return
        rows, times = batch.all_steps()
        num_steps = int(self.processes.maximum(len(rows), self.device)) * self.processes.count
        kept = times % math.ceil(num_steps / FITTED_STEPS) == 0
        steps = batch.steps(rows[kept], times[kept])
        memory = self.policy.initial_memory(int(kept.sum())) if self.policy.config.memory_enabled else None
        with autocast(self.device, self.autocast_dtype):
            missing, codes = self.policy.predicted_residuals(steps, memory)
        found = fit_sharpness(missing, codes, tokenizer.quantize, tokenizer.sizes, self.processes.sum, motion.tail)
        sharding.reshard(self.policy)
        with torch.no_grad():
            motion.log_sharpness.copy_(shard_like(found, motion.log_sharpness))

    # -- four ways to train on episodes --------------------------------------------------------------------------------

    def _train_random(self, batch: EpisodeBatch, hides_head: bool) -> Metrics:
        """Train on random steps of the buffer; the memory before each is computed from the steps before it."""
        config = self.policy.config
        everything = self.buffer.batch(np.arange(len(self.buffer)), config.n_obs_img_steps, config.obs_img_stride)
        if hides_head:
            everything = everything.without_head()
        count = self.training.batch_size * self.training.bptt_length
        sums = Means()
        for _ in range(math.ceil(int(self.processes.maximum(batch.longest, self.device)) / self.training.bptt_length)):
            rows = torch.as_tensor(self.generator.integers(len(everything.lengths), size=count))
            times = torch.as_tensor(self.generator.random(count) * everything.lengths[rows].numpy()).long()
            steps = everything.steps(rows, times)
            memory = self.memory_before(everything, rows, times) if config.memory_enabled else None
            results, norm = self.update_on(steps, memory)
            sums.add({**scalars(results), "grad_norm": norm, "copy_acc": copy_accuracy(steps)}, count)
        return sums.means() | {"train/learning_rate": self.optimizer.param_groups[0]["lr"]}

    @torch.no_grad()
    def memory_before(self, batch: EpisodeBatch, rows: Tensor, times: Tensor) -> Tensor:
        """Return the memory (layers, N, hidden) of the current policy before step `times` of the episodes `rows`."""
        memory = self.policy.initial_memory(len(rows))
        for time in range(int(times.max()) if len(times) else 0):
            going = torch.nonzero(times > time).flatten()
            step = batch.steps(rows[going], torch.full((len(going),), time))
            columns = going.to(memory.device)
            memory[:, columns] = self.policy.forward_memory_only(step, memory[:, columns])
        return memory

    def _train_motion(self, batch: EpisodeBatch) -> Metrics:
        """Train the motion prior alone on the steps of the episodes, in recordings more on those with motion."""
        optimizer = self.warmup_optimizers["motion"]
        # The learning rate falls in the second half: a constant one leaves jitter in what does not move.
        left = 1.0 - self.progress / self._warmup_shares[0]
        for group in optimizer.param_groups:
            group["lr"] = self.training.motion_learning_rate * min(1.0, max(2.0 * left, 0.02))
        rows, times = batch.all_steps()
        if self.training.dataset is None:
            order = torch.as_tensor(self.generator.permutation(len(rows)))
        else:  # half of them in proportion to the change: most steps of a recording have little motion
            change = step_changes(batch)[rows, times]
            shares = (change + change.mean()).clamp(min=1e-9).double().cpu().numpy()
            order = torch.as_tensor(self.generator.choice(len(rows), len(rows), p=shares / shares.sum()))
        size = self.training.batch_size * self.training.bptt_length
        num_updates = math.ceil(int(self.processes.maximum(len(rows), self.device)) / size)
        sums = Means()
        for part in torch.tensor_split(order, num_updates):
            steps = batch.steps(rows[part], times[part], motion_only=True)
            results, norm = self.update_in_parts(self._motion_losses, steps, None, optimizer)
            found = {"motion_loss": results["motion_loss"], "grad_norm": norm, "copy_loss": copy_loss(steps)}
            sums.add(found, len(part))
        return sums.means()

    def _motion_losses(self, steps: dict[str, Tensor], memory_state: Tensor | None) -> dict[str, Tensor]:
        """The motion prior has no memory."""
        return self.policy.forward_motion_only(steps)

    def _update_memory(
        self, chunk: dict[str, Tensor], memory: Tensor | None, weight: float
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Update the memory alone, on what it adds to the image that the motion prior predicts."""
        forward = partial(self.policy.forward_memory_correction, memory_backprop=self.training.memory_backprop)
        results, norm = self.update_in_parts(forward, chunk, memory, self.warmup_optimizers["memory"], weight)
        del results["loss"]  # in other units than that of the whole model
        return results, norm

    # -- episodes ------------------------------------------------------------------------------------------------------

    def _gather(self) -> None:
        """Add new episodes to the buffer: as many as a round trains on, or those collected meanwhile."""
        explorer, batch_size = self._open_explorer(), self.training.batch_size
        if isinstance(explorer, ProcessExplorer):
            if not len(self.buffer):
                self._keep(explorer.take(self.training.learning_starts or batch_size))
            else:
                self._keep(explorer.ready())
            explorer.allow(max(2 * batch_size, self.num_workers) - self.buffer.num_unseen)
        elif isinstance(explorer, DatasetExplorer):
            missing = min(explorer.num_episodes, self.buffer.capacity) - len(self.buffer)
            if missing > 0 or explorer.varies or explorer.num_episodes > self.buffer.capacity:
                self._keep(explorer.take(missing if missing > 0 else batch_size))
        else:
            self._keep(explorer.take(batch_size))

    def _keep(self, episodes: list[RobotEpisode]) -> None:
        """Put new episodes into the buffer."""
        for episode in self.coded(episodes):
            self.buffer.add(episode)
        self.num_taken += len(episodes)

    def _make_buffer(self, explorer: Explorer) -> EpisodeBuffer:
        training = self.training
        longest, capacity = training.steps_per_episode, training.buffer_capacity
        if isinstance(explorer, DatasetExplorer):
            most = max(explorer.num_episodes, MOST_COPIES) if explorer.varies else explorer.num_episodes
            longest, capacity = explorer.longest, min(capacity, most)
        elif training.sequential_training and not isinstance(explorer, ProcessExplorer):
            capacity = training.batch_size  # each is trained on once, when it is new
        return EpisodeBuffer(capacity, longest, self.device)

    @property
    def num_workers(self) -> int:
        """Processes that collect episodes."""
        if self.training.num_envs is not None:
            return self.training.num_envs
        cores = available_cores() // self.processes.count
        return max(1, min(MOST_WORKERS, cores - 1 if self.device.type == "cuda" else cores // 2))

    def _open_explorer(self) -> Explorer:
        """Return the explorer, after a resume at the episode of the checkpoint; the buffer is then filled again."""
        if self.explorer is not None:
            if not self.buffer.capacity:
                self.buffer = self._make_buffer(self.explorer)
            return self.explorer
        rank, count = self.processes.rank, self.processes.count
        if self.training.dataset is None and self.training.overlap:
            # The scenes in progress at the checkpoint are not known: new ones follow, and the buffer is filled again.
            first = -(-self.num_taken // self.exploration().scenes_kept)
            self.explorer = ProcessExplorer(self.exploration(), self.num_workers, first * count + rank, count)
            self.buffer, self._buffer_state = self._make_buffer(self.explorer), None
            return self.explorer
        explorer: InlineExplorer | DatasetExplorer
        if self.training.dataset is not None:
            explorer = self._dataset or self._open_dataset(self.policy.config)
        else:
            explorer = InlineExplorer(self.exploration(), rank, count)
        self.explorer, buffer = explorer, self._make_buffer(explorer)
        held = min(self.num_taken, buffer.capacity)
        explorer.skip(self.num_taken - held)
        if held and self._buffer_state is not None and len(self._buffer_state["drawn"]) == buffer.capacity:
            buffer.refill(self.coded(explorer.take(held)), self._buffer_state)
        else:
            explorer.skip(held)
        self.buffer, self._buffer_state = buffer, None
        return explorer

    def model_config(self) -> F1Config:
        """Return the model's config, with sizes for a dataset's states and actions, and a prior for recordings."""
        config = super().model_config()
        if self.training.dataset is not None:
            if config.motion_prior and self.resume_from is None and self.config.model.checkpoint_path is None:
                config.motion_tail = config.motion_tail or TAIL
            self._dataset = self._open_dataset(config)
            if self.config.model.tokenizer_weights is not None and self.resume_from is None:
                tokenizer = find_tokenizer(self.config.model.tokenizer_weights)
                warn_of_seen_episodes(tokenizer, self._dataset.dataset, self._dataset.held_out_episodes)
            needed = max(self._dataset.state_dim, self._dataset.action_dim)
            if needed > min(config.max_state_dim, config.max_action_dim):
                log.info("states and actions of %d dims: the model is built for as many", needed)
                config.max_state_dim = max(config.max_state_dim, self._dataset.state_dim)
                config.max_action_dim = max(config.max_action_dim, self._dataset.action_dim)
        return config

    def _open_dataset(self, config: F1Config) -> DatasetExplorer:
        return DatasetExplorer(self.training, config.tokenizer.image_size, self.processes.rank, self.processes.count)

    def exploration(self, held_out: bool = False) -> Exploration:
        """Return the settings of exploration."""
        return make_exploration(self.config, self.policy, held_out)

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def phase_state(self) -> dict[str, Any]:
        """Return which episodes come next; those in the buffer are not saved: `_open_explorer` gets them again."""
        optimizers = {f"{name}_optimizer": self.warmup_optimizers.get(name) for name in WARMUPS}
        normalization = self.explorer.normalization if isinstance(self.explorer, DatasetExplorer) else None
        return {
            "num_taken": self.num_taken,
            "generator": self.generator.bit_generator.state,
            **{name: None if one is None else optimizer_state(one) for name, one in optimizers.items()},
            "normalization": normalization,
            # A run that stopped before the buffer was filled again saves the state that it loaded.
            "buffer": self.buffer.state_dict() if self._buffer_state is None else self._buffer_state,
        }

    def load_phase_state(self, state: dict[str, Any], folder: Path) -> None:
        """Continue with the episodes after those."""
        self.num_taken, self._buffer_state = state["num_taken"], state["buffer"]
        if self.processes.is_first:
            self.generator.bit_generator.state = state["generator"]
        for name, optimizer in self.warmup_optimizers.items():
            if (saved := state[f"{name}_optimizer"]) is not None:
                load_optimizer_state(optimizer, saved, hyperparameters=True)
        if self.training.overlap and self.training.dataset is None:
            log.info("collected in other processes: the run continues with new scenes, not bit for bit")

    def close(self) -> None:
        """End the processes that collect."""
        if self.explorer is not None:
            self.explorer.close()
        super().close()


def step_changes(batch: EpisodeBatch) -> Tensor:
    """Return the mean difference of frame t + 1 from frame t, in grey levels, of every step: [B, T]."""
    frames = batch.streams["wrist"]
    return torch.stack([one.float().diff(dim=0).abs().flatten(1).mean(1) for one in frames])


def copy_loss(batch: dict[str, Tensor]) -> Tensor:
    """Return the mean difference of the next frame from the last, in the units of the motion loss."""
    frames = batch[schema.IMAGE0_HISTORY]
    return (frames[..., -1, :, :, :].float() - frames[..., -2, :, :, :].float()).abs().mean() / 127.5


def train_teacher(config: PhaseConfig) -> dict[str, Any]:
    """`deft train teacher`."""
    return TeacherTrainer(config).train()
