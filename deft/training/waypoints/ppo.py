"""`deft train waypoint-ppo`: PPO in the online loop, on a frozen supervised waypoint policy.

Beside what every run writes, the directory holds `config.json`, `train_metrics.json` (one entry per iteration),
`eval_metrics.json`, `checkpoint_iter_X.pt` and `final.pt`.
"""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from deft import schema
from deft.algorithms.waypoint_ppo import WaypointPPO
from deft.config.algorithm_settings import PPOSettings
from deft.config.aliases import translate
from deft.config.loading import to_dict
from deft.config.settings import CurriculumConfig, LoggingConfig
from deft.config.waypoint_settings import PPOConfig
from deft.envs.checks import DIFFICULTIES
from deft.envs.vector import VectorEnv
from deft.envs.waypoints.make import MixedVectorEnv, make_waypoint_env
from deft.envs.waypoints.protocol import WaypointVectorEnv
from deft.errors import InputError
from deft.evaluation.plots import plot_run
from deft.evaluation.waypoints import HeldOut, plot_safety, plot_waypoints
from deft.models.waypoint import PPOPolicy, WaypointSFT
from deft.runs.compute import choose_device
from deft.runs.directory import directory_opener, place_directory
from deft.runs.json_files import read_json, write_json
from deft.runs.random_state import EVALUATION_SEED, seed_everything, training_seed
from deft.runs.waypoint_files import (
    CONFIG,
    EVAL_METRICS,
    FINAL,
    PPO_SHAPE,
    TRAIN_METRICS,
    check_alone,
    load_sft,
    same_sft,
    save_ppo,
)
from deft.training.loop import Metrics, floats
from deft.training.trainer import Trainer

log = logging.getLogger(__name__)
# Settings that a resumed run may change; of the supervised policy the weights are compared
LENGTHS = ("iterations", "eval_freq", "save_freq")
VIEW = ("view", "view_port")
MAY_CHANGE = {
    "output_dir",
    "sft_checkpoint",
    "resume",
    "auto_resume",
    "overwrite",
    "device",
    "threads",
    *VIEW,
    *LENGTHS,
}
SAFETY_SEED = EVALUATION_SEED + 2**20  # the safety set's episodes start from the run's seed plus this


class SafetyCheck:
    """Checks whether a policy's measures on held-out episodes are at most the supervised policy's.

    `WaypointPPO` calls it after every update, and reverts the update if it returns False. A measure that the
    environment does not have (ADE without a ground truth) is left out. Each of several environments is checked.
    """

    def __init__(self, held_out: HeldOut, measures: Sequence[str] = ("collision_rate", "ade")) -> None:
        self.held_out, self._wanted = held_out, measures
        self.baseline: dict[str, Any] = {}
        self.deployed: dict[str, Any] = {}
        self.candidate: dict[str, Any] = {}
        self.measures: list[str] = []

    def set_baseline(self, policy: PPOPolicy) -> None:
        """Measure the policy as it is before training: the supervised one."""
        self.baseline = self.deployed = self.held_out.evaluate(policy)
        watched = [name for name in self.baseline if name.rpartition("/")[2] in self._wanted]
        # Of several environments each by itself: a gain in one must not hide a loss in another.
        self.measures = [name for name in watched if "/" in name] or watched

    def __call__(self, policy: PPOPolicy) -> bool:
        """Whether the policy may be deployed."""
        self.candidate = self.held_out.evaluate(policy)
        accepted = all(self.candidate[name] <= self.baseline[name] for name in self.measures)
        if accepted:
            self.deployed = self.candidate
        return accepted

    def metrics(self) -> dict[str, float]:
        """Return the measures of the deployed policy and of the last candidate on the held-out set."""
        values = {f"safety/{name}": self.deployed[name] for name in self.measures}
        return values | {f"safety/candidate_{name}": self.candidate[name] for name in self.measures}


class WaypointTrainer(Trainer):
    """The online trainer, which also measures waypoints and writes the files of waypoint training."""

    policy: PPOPolicy

    def __init__(
        self,
        config: PPOConfig,
        policy: PPOPolicy,
        env: VectorEnv,
        algorithm: WaypointPPO,
        held_out: HeldOut,
        safety: SafetyCheck | None,
        logging_config: LoggingConfig | None = None,
        on_start: Callable[[], None] | None = None,
    ) -> None:
        per_iteration = config.rollout_steps * config.copies
        super().__init__(
            policy,
            env,
            algorithm,
            rollout_steps=config.rollout_steps,
            eval_env=next(iter(held_out.envs.values())),
            output_dir=config.output_dir,
            logging_config=logging_config or LoggingConfig.with_view(config),
            seed=config.seed,
            threads=config.threads,
            config={"env": {"id": "+".join(config.env), "kwargs": config.env_kwargs}},
            iterations=config.iterations,
            eval_freq=config.eval_freq * per_iteration,
            eval_episodes=config.eval_episodes,
            save_freq=config.save_freq * per_iteration,
            log_freq=per_iteration,
            curriculum=_curriculum(config) if config.curriculum else None,
            on_start=on_start,
        )
        self.config, self.held_out, self.safety = config, held_out, safety
        self.played = [held_out] if safety is None else [held_out, safety.held_out]
        for played in self.played:
            played.watching = self.run.evaluation
        self.train_metrics: list[dict[str, Any]] = []
        self.eval_metrics: list[dict[str, Any]] = []

    def evaluate(self, num_episodes: int | None = None, video: Path | None = None) -> dict[str, Any]:
        """Return success, collisions, ADE and FDE of the current policy on the held-out episodes."""
        results = {**self.held_out.evaluate(self.policy), "action_selection": self.policy.action_selection(True)}
        iteration = self.algorithm.version
        self.eval_metrics = [entry for entry in self.eval_metrics if entry["iteration"] != iteration]
        self.eval_metrics.append({"iteration": iteration, "timesteps": self.num_timesteps, **results})
        write_json(self.eval_metrics, self.run_dir / EVAL_METRICS)
        return results

    def save(self, path: str | Path | None = None) -> Path:
        """Write a checkpoint, and the metrics up to it."""
        write_json(self.train_metrics, self.run_dir / TRAIN_METRICS)
        return super().save(path)

    def load(self, path: str | Path) -> None:
        """Resume from a checkpoint, with the metrics up to it."""
        super().load(path)
        reached = self.algorithm.version
        for name, lines in ((TRAIN_METRICS, self.train_metrics), (EVAL_METRICS, self.eval_metrics)):
            lines[:] = [line for line in read_json(self.run_dir / name) if line["iteration"] <= reached]

    def finish_step(self, previous: int, metrics: Metrics) -> None:
        """Measure safety, keep the metrics, and write the policy file that is due."""
        iteration, run_log = self.algorithm.version, self.run.log
        assert run_log is not None
        if self.safety is not None:
            metrics = {**metrics, **self.safety.metrics()}
        entry: dict[str, Any] = {"iteration": iteration, "timesteps": self.num_timesteps, **floats(metrics)}
        if self.curriculum is not None:
            entry["level"] = self.curriculum.level
        self.train_metrics.append(entry | {"mean_reward": run_log.mean_reward, "success_rate": run_log.success_rate})
        super().finish_step(previous, metrics)
        self._reset_disturbed_envs()
        if self.config.save_freq and iteration % self.config.save_freq == 0:
            self.write_policy(f"checkpoint_iter_{iteration}.pt")

    def _reset_disturbed_envs(self) -> None:
        """Start new episodes if an evaluation used the training environment (a CARLA server has only one)."""
        for played in self.played:
            if played.disturbed:
                played.disturbed = False
                collector = self.collection.collector
                collector.load_state_dict({"env": None, "started": True})
                # Other episodes than at the last start.
                collector.seed = training_seed(self.seed, self.algorithm.version)

    def write_policy(self, name: str) -> Path:
        """Write the policy as one file, and the metrics so far."""
        path = self.run_dir / name
        save_ppo(self.policy, path, to_dict(self.config), self.algorithm.version)
        write_json(self.train_metrics, self.run_dir / TRAIN_METRICS)
        return path


def train_ppo(config: PPOConfig, logging_config: LoggingConfig | None = None) -> dict[str, Any]:
    """Train, evaluate before and after, and write the documents' files; returns a summary."""
    check_alone("waypoint-ppo")
    sft, _ = load_sft(config.sft_checkpoint)
    trainer = build_waypoint_trainer(config, sft, logging_config)
    try:
        baseline = trainer.evaluate() if not trainer.eval_metrics else trainer.eval_metrics[0]
        write_json(to_dict(config), trainer.run_dir / CONFIG)
        summary = trainer.train(evaluates_last=True)
        final = trainer.last_evaluation
        summary["checkpoint"] = str(trainer.write_policy(FINAL))
        for name in ("success_rate", "collision_rate", "ade", "fde"):
            if name in final:
                summary |= {f"sft_{name}": baseline[name], f"final_{name}": final[name]}
        summary["plots"] = [str(path) for path in _plots(trainer, sft)]
    finally:
        trainer.close()
        for played in trainer.played:
            played.close()
    return summary


def build_waypoint_trainer(
    config: PPOConfig, sft: WaypointSFT, logging_config: LoggingConfig | None = None
) -> WaypointTrainer:
    """Build environment, policy, algorithm and trainer in the run directory."""
    folder = Path(config.output_dir)
    resume_from, replaces = place_directory(folder, config.resume, config.auto_resume, config.overwrite)
    if resume_from is not None:
        _check_same_settings(config, resume_from.parent)
    seed_everything(config.seed)
    env = make_waypoint_env(config.env, config.copies, config.difficulty, config.env_kwargs)
    try:
        check_fits(sft, env, "+".join(config.env))
        policy = PPOPolicy(sft, *(getattr(config, name) for name in PPO_SHAPE))
        policy.to(choose_device(config.device))
        shared = _shared_envs(config, env)
        episodes_of = partial(HeldOut, config.env, config.difficulty, kwargs=config.env_kwargs, shared=shared)
        held_out = episodes_of(config.eval_episodes, config.seed + EVALUATION_SEED)
        safety = None
        if config.safety:
            watched = episodes_of(config.safety_episodes, config.seed + SAFETY_SEED)
            safety = SafetyCheck(watched, config.safety_measures)
        algorithm = WaypointPPO(
            policy,
            _ppo_settings(config),
            config.seed,
            kl_coef=config.kl_coef,
            kl_target=config.kl_target,
            residual_start=config.residual_start,
            residual_open_at=config.residual_open_at,
            accept=safety,
        )
        written_before = (CONFIG, TRAIN_METRICS, EVAL_METRICS)  # by this run, before it starts
        write_settings = partial(write_json, to_dict(config), folder / CONFIG)
        on_start = directory_opener(folder, replaces, write_settings, written_before)
        trainer = WaypointTrainer(config, policy, env, algorithm, held_out, safety, logging_config, on_start)
        if safety is not None:
            safety.set_baseline(policy)
        if resume_from is not None:
            given = copy.deepcopy(sft)
            trainer.load(resume_from)
            if not same_sft(policy, given):
                raise InputError(
                    f"--sft-checkpoint {config.sft_checkpoint}: the run in {config.output_dir} started from another "
                    "supervised policy; give that one, or another --output-dir"
                )
            if safety is not None:
                safety.deployed = safety.held_out.evaluate(policy)
    except BaseException:
        env.close()
        raise
    return trainer


def _shared_envs(config: PPOConfig, env: VectorEnv) -> dict[str, WaypointVectorEnv]:
    """Return the environments that evaluations must share with training: a CARLA server has only one."""
    parts = env.parts if isinstance(env, MixedVectorEnv) else [env]
    named = zip(config.env, parts, strict=True)
    return {name: part for name, part in named if name == "carla" and isinstance(part, WaypointVectorEnv)}


def _curriculum(config: PPOConfig) -> CurriculumConfig:
    """Return the levels up to `difficulty`."""
    levels = DIFFICULTIES[: DIFFICULTIES.index(config.difficulty) + 1]
    if len(levels) < 2:
        raise InputError("curriculum: rises to `difficulty`, which is easy; give --difficulty medium or hard")
    return CurriculumConfig(levels=levels, success_rate=config.curriculum_success)


def _ppo_settings(config: PPOConfig) -> PPOSettings:
    """Return PPO's settings: those with the same names."""
    given = vars(config)
    return PPOSettings(**{field.name: given[field.name] for field in fields(PPOSettings) if field.name in given})


def check_fits(sft: WaypointSFT, env: VectorEnv, name: str) -> None:
    """Raise an error if a supervised policy was built for other images or another number of waypoints."""
    space: Any = env.observation_space
    own = (sft.shape.camera_size, sft.shape.motion_dim, sft.shape.num_waypoints)
    theirs = (space[schema.CAMERA].shape[-1], space[schema.MOTION].shape[0], space[schema.SFT_OFFSET].shape[0])
    if own != theirs:
        words = "images of {0} px, {1} motion values and {2} waypoints"
        raise InputError(
            f"sft_checkpoint: made for {words.format(*own)}; {name} has {words.format(*theirs)}: record and train it "
            "with the same env_kwargs"
        )


def _check_same_settings(config: PPOConfig, folder: Path) -> None:
    """Raise an error if a resumed run has other settings: a flag that is not repeated has its default again."""
    if not (folder / CONFIG).is_file():
        return  # stopped before it began
    saved = translate(PPOConfig, read_json(folder / CONFIG))[0]  # may be written by an earlier version
    given = json.loads(json.dumps(to_dict(config)))
    changed = sorted(name for name in given if name in saved and name not in MAY_CHANGE and given[name] != saved[name])
    if changed:
        words = ", ".join(f"{name} {given[name]} (the run's is {saved[name]})" for name in changed)
        raise InputError(f"resume: {words}: repeat the flags of the run, which are in {folder / CONFIG}")


def _plots(trainer: WaypointTrainer, sft: WaypointSFT) -> list[Path]:
    """Plot learning curves, the waypoints before and after training, and the measures of the safety set."""
    folder = trainer.run_dir / "plots"
    drawn = plot_run(trainer.run_dir)
    policies = {"supervised": PPOPolicy(sft).to(next(trainer.policy.parameters()).device), "with PPO": trainer.policy}
    for name, env in trainer.held_out.envs.items():
        drawn.append(plot_waypoints(policies, env, folder / f"waypoints_{name}.png", trainer.held_out.seed))
    if trainer.safety is not None and trainer.train_metrics:
        measures = trainer.safety.measures
        drawn.append(plot_safety(trainer.train_metrics, trainer.safety.baseline, measures, folder / "safety.png"))
    return drawn
