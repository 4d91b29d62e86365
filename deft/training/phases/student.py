"""Phase 2, `deft train student`: an explorer that learns by PPO to go where the teacher's world model does not know.

A round is one PPO iteration: whole episodes of the explorer (wrist camera alone), the frozen world model's look at them
(head and wrist), a reward for every step, and the update. The explorer's F1 policy is the run's policy, so that a
checkpoint is one of an F1 model; `explorer.pt` beside it holds the rest.
"""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from deft.config.f1_settings import ExplorerSettings, PhaseConfig
from deft.config.rl_yaml import CONFIG_FILE, phase_of_file
from deft.errors import InputError, Stopped
from deft.evaluation.plots import plot_metrics
from deft.models.f1.explorer import (
    EXPLORER_FILE,
    ExplorerPolicy,
    explorer_extras,
    load_explorer,
    new_explorer,
    world_model_weights,
)
from deft.models.f1.loading import default_teacher, load_f1_policy
from deft.models.f1.optimization import has_lora, merge_lora
from deft.models.f1.policy import F1Policy
from deft.runs.compute import autocast, set_precision
from deft.runs.directory import MODEL_FILE
from deft.training.phases.base import BaseRLTrainer, Metrics, find_start, moved_with
from deft.training.phases.exploration import make_exploration
from deft.training.phases.explorer_rollouts import Collected, ExplorerPPO, ExplorerRollouts, measure, open_envs
from deft.training.phases.novelty import FURTHER, Novelty
from deft.training.phases.rewards import Measures, StudentReward

log = logging.getLogger(__name__)
NUM_ENVS = 8
PANELS = {
    "train/reward": "Reward",
    "train/memory_divergence": "Memory divergence D",
    "train/wm_error": "World model's error, nats",
    "train/wm_uncertainty": "World model's uncertainty, nats",
    "train/contacts_per_1000": "Contacts per 1,000 steps",
    "train/approx_kl": "Approximate KL",
    "train/explained_variance": "Explained variance",
    **{
        f"reward/{name}": f"Reward: {name.replace('_', ' ')}"
        for name in ("memory", "uncertainty", "error", "error_progress", "uncertainty_progress", "action", *FURTHER)
    },
}


class StudentTrainer(BaseRLTrainer):
    """Phase 2. `teacher` replaces the one of `student.teacher_checkpoint`."""

    phase: ClassVar[str] = "student"
    parts: ClassVar[tuple[str, ...]] = (EXPLORER_FILE,)
    shown: ClassVar[tuple[str, ...]] = ("reward", "memory_divergence", "wm_error", "approx_kl")

    def __init__(self, config: PhaseConfig, teacher: F1Policy | None = None) -> None:
        self.teacher: F1Policy
        self.explorer: ExplorerPolicy
        self.rollouts: ExplorerRollouts
        self._given_teacher = teacher
        super().__init__(config)
        if config.training.precision == "auto":
            # Ratios of 1 need products that do not depend on the batch's shape beyond float32's own rounding.
            set_precision(self.device, "fp32")
        settings = config.student.explorer
        self.reward = StudentReward(config.student.rewards, self.processes.merge_statistics)
        self.ppo = ExplorerPPO.of_run(self.explorer, settings, config.training.seed, self.processes)
        self.novelty = Novelty(config.student.rewards, self.teacher, self.processes)
        self.stateful = {"ppo": self.ppo, "reward": self.reward, "rollouts": self.rollouts}
        if self.novelty.is_active:
            self.stateful["novelty"] = self.novelty

    def train(self) -> dict[str, Any]:
        """Train, and plot the curves: `plots/rewards.png`."""
        results = super().train()
        drawn = plot_metrics(self.run_dir, PANELS, "rewards.png", "Episodes") if self.processes.is_first else None
        return results if drawn is None else {**results, "plots": [str(drawn)]}

    # -- a round -------------------------------------------------------------------------------------------------------

    def train_round(self) -> tuple[int, Metrics]:
        """Run one PPO iteration on new episodes."""
        self.ppo.progress, self.ppo.should_stop = self.progress, self.stop_requested
        rollouts = []
        if self.partial is None:
            with self.stoppable():
                found = self.rollouts.collect(version=self.ppo.version)
                with autocast(self.device, self.autocast_dtype):
                    measures = measure(self.teacher, found)
            batch = found.batch(self.teacher)
            found.pay(*self.reward(measures, self.novelty.measure(batch, found, measures)))
            self.shown_episodes = batch if self.processes.is_first else None
            self.partial = {**exploration_metrics(found, measures), **self.novelty.learn(batch)}, []
            rollouts.append(found.rollout)
        learned = self.ppo.update(iter(rollouts))
        if self.ppo.unfinished is not None:
            raise Stopped
        self.num_updates = self.ppo.version
        metrics, self.partial = self.partial[0], None
        metrics |= {f"train/{name}": value for name, value in learned.items()}
        return self.rollouts.num_episodes * self.processes.count, metrics

    def collection_state(self) -> dict[str, Any]:
        """Return which scenes come next."""
        return self.rollouts.state_dict()

    def restore_collection(self, state: dict[str, Any]) -> None:
        """Restore a `collection_state`."""
        self.rollouts.load_state_dict(state)

    def choose_trained_weights(self) -> None:
        """The explorer chose when it was built: all but the world model."""

    def make_optimizer(self) -> None:
        """PPO has its own."""

    # -- models and environments ---------------------------------------------------------------------------------------

    def _load_policy(self) -> F1Policy:
        """Load the teacher, open the environments, and build the explorer, or load it from a checkpoint."""
        section, training = self.config.student, self.training
        for name in ("lora", "checkpoint_path"):
            if getattr(self.config.model, name) is not None:
                log.warning("model.%s: ignored; the student has new weights, which are all trained", name)
        if self.config.model.tokenizer_weights is not None:
            raise InputError("tokenizer_weights: the student uses its teacher's tokenizer; leave it out")
        teacher = self._given_teacher
        if teacher is None:
            section.teacher_checkpoint = self.fixed_start("student", "teacher_checkpoint")
        self.teacher = load_teacher(self.config, self.device) if teacher is None else teacher.to(self.device)
        self.teacher.requires_grad_(False).eval()
        exploration = make_exploration(self.config, self.teacher)
        num_envs = training.num_envs or NUM_ENVS
        env, num_steps = open_envs(exploration, num_envs, vector=training.vector, device=self.device)
        if self.resume_from is None:
            self.explorer = new_explorer(self.teacher, env.action_mask, section.explorer)
        else:
            self.explorer = load_explorer(self.resume_from, self.resume_from.parent / MODEL_FILE, self.device)
            check_world_model(self.teacher, self.explorer.f1, self.resume_from)
            check_chain(self.explorer, section.explorer, self.resume_from)
            limit = section.explorer.action_limit
            check_same("action_limit", float(self.explorer.action_scale), limit, self.resume_from)
            check_mask(self.explorer, env.action_mask, self.resume_from)
        rank, count = self.processes.rank, self.processes.count
        episodes = section.explorer.episodes_per_update
        self.rollouts = ExplorerRollouts(self.explorer, env, exploration, num_steps, episodes, rank, count)
        return self.explorer.f1

    @property
    def world_model(self) -> F1Policy:
        """The teacher's."""
        return self.teacher

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def write_files(self, folder: Path) -> None:
        """Write the value head and the settings of acting."""
        super().write_files(folder)
        torch.save(explorer_extras(self.explorer), folder / EXPLORER_FILE)

    def load_phase_state(self, state: dict[str, Any], folder: Path) -> None:
        """Load it, and the explorer's weights unless the trainer was built from this checkpoint."""
        super().load_phase_state({"novelty": None, **state}, folder)  # of a run without further terms
        self.processes.remember_statistics(self.reward.scales)
        self.processes.remember_statistics(self.reward.further)
        if self.resume_from is None:
            found = load_explorer(folder, folder.parent / MODEL_FILE, self.device)
            check_chain(found, self.config.student.explorer, folder)
            self.explorer.load_state_dict(found.state_dict())
            self.processes.remember_statistics(self.explorer)

    def close(self) -> None:
        """Free the environments."""
        self.rollouts.close()
        super().close()


def exploration_metrics(found: Collected, measures: Measures) -> Metrics:
    """Return the metrics of a rollout: the reward, its terms by name, and their inputs."""
    rollout = found.rollout
    return {
        "train/reward": rollout["next", "reward"].mean(),
        "train/memory_divergence": measures.divergence.mean(),
        "train/wm_error": measures.error.mean(),
        "train/wm_uncertainty": measures.uncertainty.mean(),
        "train/action_size": measures.action_size.mean(),
        **{f"train/{name}": value for name, value in found.observed().items()},
        **{f"reward/{name}": term.mean() for name, term in found.terms.items()},
    }


def load_teacher(
    config: PhaseConfig,
    device: torch.device,
    phase: Literal["student", "adversarial"] = "student",
    run: Path | None = None,
) -> F1Policy:
    """Load the teacher of phase 2 or 3: from a run, a checkpoint, or a file of weights; by default the one that ships.

    `run` is the run that started from it, where there is one: both may have been moved since.
    """
    setting = "teacher_checkpoint"
    given: str | None = getattr(config, phase).teacher_checkpoint
    model = config.model.config_file
    if given is None and model != "tiny":
        raise InputError(f"{setting}: missing; give --teacher-checkpoint RUN or CHECKPOINT of `deft train teacher`")
    path = default_teacher() if given is None else Path(given) if run is None else moved_with(run, given)
    if path.is_file():
        if phase_of_file(path.parent.parent / CONFIG_FILE) == "student":
            raise InputError(f"{setting}: {path} is of phase student; give weights of `deft train teacher`")
        policy = load_f1_policy(model, device, checkpoint_path=path).policy
    else:
        folder = find_start(setting, path)
        if phase_of_file(folder.parent / CONFIG_FILE) == "student":
            raise InputError(f"{setting}: {path} is of phase student; give a run of `deft train teacher`")
        own = folder.parent / MODEL_FILE
        policy = load_f1_policy(own if own.is_file() else model, device, checkpoint_path=folder).policy
    if has_lora(policy):
        merge_lora(policy)
    for name, tensor in policy.state_dict().items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise InputError(f"{setting}: {path}: {name} has values that are not finite; give an earlier checkpoint")
    return policy


def check_world_model(teacher: F1Policy, student: F1Policy, where: Path) -> None:
    """Raise an error if the teacher's world model is not the one that the student was built with."""
    name = first_difference(world_model_weights(student), world_model_weights(teacher))
    if name is not None:
        raise InputError(
            f"teacher_checkpoint: not the teacher of {where}: {name} differs; give the one it was made with"
        )


def first_difference(own: dict[str, Tensor], theirs: dict[str, Tensor]) -> str | None:
    """Return the name of a tensor that only one side has, or that differs in `own`'s dtype; None if all are equal."""
    for name in sorted(own.keys() | theirs.keys()):
        if name not in own or name not in theirs or not torch.equal(theirs[name].to(own[name].dtype), own[name]):
            return name
    return None


def check_mask(explorer: ExplorerPolicy, action_mask: Any, where: Path) -> None:
    """Raise an error if the environment uses other dims of an action than the explorer was trained with."""
    own = explorer.action_mask.cpu().numpy().reshape(-1).astype(bool)
    given = np.asarray(action_mask).reshape(-1).astype(bool)
    if not np.array_equal(own, given):
        raise InputError(
            f"{where}: its actions have the dims {np.flatnonzero(own).tolist()}, this environment's "
            f"{np.flatnonzero(given).tolist()}; use the control_mode that it was trained with"
        )


def check_chain(explorer: ExplorerPolicy, settings: ExplorerSettings, where: Path) -> None:
    """Raise an error if the settings of acting differ from those that the explorer was trained with."""
    found = {
        "denoising_steps": len(explorer.deviation),
        "action_noise": float(explorer.deviation[0]),
        "initial_noise": float(explorer.initial_deviation),
        "noise_correlation": float(explorer.noise_correlation),
    }
    for name, old in found.items():
        check_same(name, old, getattr(settings, name), where)


def check_same(name: str, old: float, new: float, where: Path) -> None:
    """Raise an error if a setting differs from the one that an explorer was trained with."""
    if not math.isclose(old, new, rel_tol=1e-6):
        raise InputError(f"{name}: {where} was trained with {old:g}, not {new:g}; resume with the same")


def train_student(config: PhaseConfig) -> dict[str, Any]:
    """`deft train student`."""
    return StudentTrainer(config).train()
