"""From a config to an online run: builds environment, policy, algorithm and trainer in the run directory.

`deft train` calls `train`; `PPOTrainer` and `deft evaluate` use the same builders.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import torch
from gymnasium import spaces

from deft.algorithms.registry import ONLINE_ALGORITHMS
from deft.config.loading import replace, to_dict
from deft.config.settings import GPU_VECTORS, RunConfig
from deft.data.augmentation import has_images
from deft.envs.make import make_another, make_env, make_vector_env, wrap
from deft.envs.vector import VectorEnv
from deft.envs.wrappers import chunk_space, rename, weigh
from deft.errors import InputError, fits_memory
from deft.evaluation.plots import plot_run
from deft.evaluation.rollouts import EVALUATION_ENVS
from deft.models.policy import Policy
from deft.models.privileged import public_space, with_critic_streams
from deft.models.vla.get_action import wrap_policy
from deft.models.vla.loading import find_vla_class
from deft.models.vla.spec import model_keywords
from deft.runs import model_files, sharding
from deft.runs.compute import choose_device, choose_online_device, log_device
from deft.runs.directory import place_run, run_opener
from deft.runs.logging import logged_from_start
from deft.runs.policies import build_policy, load_policy_weights, space_for_weights
from deft.runs.policy_spaces import PolicySpaces, check_streams
from deft.runs.processes import Processes
from deft.runs.random_state import process_seed, seed_everything
from deft.runs.sinks import check_extras
from deft.schema import LABELS
from deft.training.cluster.building import make_cluster_env
from deft.training.handover import check_fixed_settings, load_critics, log_changes, use_policy_section
from deft.training.reward_model import with_reward_model
from deft.training.trainer import OnlineSpec, Trainer


def train(config: RunConfig) -> dict[str, Any]:
    """Train as configured, evaluate at the end, and return a summary of the run."""
    trainer = build_trainer(config)
    return run_trainer(trainer, evaluates=trainer.is_evaluated)


def run_trainer(trainer: Any, evaluates: bool) -> dict[str, Any]:
    """Train to the end, evaluate and plot, and close the trainer of an online or an offline run."""
    try:
        summary: dict[str, Any] = trainer.train(evaluates_last=evaluates)
        if not trainer.processes.is_first:
            return summary
        if evaluates:
            summary |= {f"final_{name}": value for name, value in trainer.last_evaluation.items()}
        summary["plots"] = [str(path) for path in plot_run(trainer.run_dir)]
    finally:
        trainer.close()
    return summary


@dataclasses.dataclass
class OpenRun:
    """A run whose trainer is being built: its directory, its processes, and the checkpoint that it resumes from."""

    config: Any
    algorithm_class: Any
    processes: Processes
    device: torch.device
    resume_from: Path | None
    replaces: bool
    shards: bool

    @property
    def starts_from(self) -> str | None:
        """The weights that a new run starts from; a resumed run has its own."""
        return self.config.model_path if self.resume_from is None else None

    def build_policy(self, policy: Any, given: gymnasium.Space, action: gymnasium.Space, where: str) -> tuple[Any, Any]:
        """Return the policy, built unless it is given, and the observation space that it is built for.

        `given` is the observation space of `where`, an environment or a dataset.
        """
        names, name = tuple(self.config.policy.critic_observation), self.algorithm_class.name
        cfg = self.config.algorithm.cfg
        if names and not self.algorithm_class.reads_critic_observation(cfg):
            advice = "give action_critic_coef, or " if hasattr(cfg, "action_critic_coef") else ""
            raise InputError(
                f"critic_observation {' '.join(names)}: {name} trains no value function that reads privileged streams; "
                f"{advice}leave it out"
            )
        if isinstance(policy, Policy) and policy.critic_streams != names:
            raise InputError(
                f"critic_observation {' '.join(names)}: the policy given was built with critic_observation "
                f"{policy.critic_streams}; build it with the streams that its value is to read"
            )
        observation = space_for_weights(self.config, self.resume_from, given, where)
        observation = with_critic_streams(observation, names, given, where)
        if policy is None:
            weights_follow = self.resume_from is not None or self.config.model_path is not None
            policy = build_policy(self.config, observation, action, weights_follow)
            self._record_number_of_labels(observation)
        return policy, observation

    def _record_number_of_labels(self, observation: gymnasium.Space) -> None:
        """Set `places_dim` of a VLA model that has it to the number of labels of `observation`, if there are any.

        Weights may depend on it, and the policy later acts in environments without labels.
        """
        vla = self.config.policy.vla_config
        if vla is None or not isinstance(observation, spaces.Dict):
            return
        labels = [space for name, space in observation.items() if name in LABELS]
        if labels and "places_dim" in model_keywords(find_vla_class(vla.model_class))[0]:
            known = {"places_dim": spaces.flatdim(labels[0]), **vla.model_config}
            self.config = replace(self.config, **{"policy.vla_config.model_config": known})

    def choose_online_device(self, policy: Policy, env: VectorEnv) -> None:
        """Resolve `device: auto` for a policy that acts during training; a small one trains on the CPU."""
        if self.device.type == "cpu":
            return
        config, cfg = self.config, self.config.algorithm.cfg
        capture = getattr(cfg, "capture", "off")
        if self.processes.count > 1:
            reason = "each of several processes has a GPU"
        elif config.env.vector in GPU_VECTORS or getattr(env.device, "type", None) == "cuda":
            reason = "the environments are simulated on the GPU"
        elif next(policy.parameters()).device.type == "cuda":
            reason = "the given policy is on a GPU"
        elif capture == "on":
            reason = "capture is on"
        elif has_images(env.observation_space):
            reason = "the observations contain images"
        else:
            # With rollouts only the gradient steps are captured; a small network acts faster on the CPU.
            captured = capture == "auto" and cfg.LEARNS_FROM != "rollouts" and not getattr(cfg, "compile", False)
            self.device = choose_online_device(config.device, policy, cfg.batch_size, captured)
            return
        log_device(config.device, self.device, reason)

    def place(self, policy: Policy) -> None:
        """Move a policy to its device, and load the weights that the run starts from."""
        with fits_memory("use a smaller model, or --device cpu"):
            policy.to("cpu" if self.shards else self.device)  # a device may not hold all of a policy that is sharded
        if self.starts_from is not None:
            load_policy_weights(policy, self.starts_from)

    def spec_fields(self, acting: sharding.WholeCopy | None, policy_spaces: PolicySpaces) -> dict[str, Any]:
        """Return the fields of `RunSpec`."""
        config = self.config
        return {
            "output_dir": config.output_dir,
            "logging_config": config.logging,
            "seed": config.seed,
            "threads": config.threads,
            "config": to_dict(config),
            "on_start": run_opener(config, self.replaces),
            "processes": self.processes,
            "acting": acting,
            "spaces": policy_spaces,
        }


def open_run(config: Any, subject: str, algorithm_class: Any, policy: Any) -> OpenRun:
    """Find the run directory, initialise the process group, and complete the config by the policy that is trained.

    `subject`, the environment or the dataset, names a directory that is not given.
    """
    processes = Processes()
    device = processes.device(choose_device(config.device))
    processes.open(device)
    placed = place_run(config, subject) if processes.is_first else None
    config, resume_from, replaces = processes.broadcast(placed)
    shards = sharding.should_shard(config.fsdp, config.algorithm.name, algorithm_class.can_shard, processes)
    if shards and getattr(config.algorithm.cfg, "compile", False):
        raise InputError(sharding.NOT_COMPILED)
    config = model_files.with_absolute_paths(use_policy_section(config, policy, resume_from))
    check_fixed_settings(config, resume_from or config.model_path)
    if processes.is_first:
        log_changes(config, resume_from)
    seed_everything(config.seed)
    check_extras(config.logging)
    return OpenRun(config, algorithm_class, processes, device, resume_from, replaces, shards)


@logged_from_start
def build_trainer(
    config: RunConfig,
    env: gymnasium.Env | list[gymnasium.Env] | gymnasium.vector.VectorEnv | VectorEnv | None = None,
    policy: Any = None,
    eval_env: Callable[[], VectorEnv | gymnasium.Env] | VectorEnv | gymnasium.Env | None = None,
    critics: dict[str, Any] | None = None,
) -> Trainer:
    """Return a trainer for a config, in its run directory; environment and policy may be given instead of built.

    `critics`: the state of the off-policy algorithm that trained the given policy.
    """
    run = open_run(config, config.env.id, ONLINE_ALGORITHMS[config.algorithm.name], policy)
    config, processes = run.config, run.processes
    is_asynchronous = config.cluster.collectors == "ray" and config.trainer.max_staleness > 0
    uses_replay = config.algorithm.cfg.LEARNS_FROM == "replay"
    if processes.count > 1 and is_asynchronous and uses_replay:
        name = config.algorithm.name.upper()
        raise InputError(f"max_staleness: {name} in several processes cannot collect during updates; use 0")
    if config.reward_model is not None and not run.algorithm_class.reads_reward:
        raise InputError(f"reward_model: {config.algorithm.name} learns from no reward; leave it out")
    if config.reward_model is not None and config.cluster.collectors == "ray":
        raise InputError("reward_model: Ray workers do not evaluate it; use collectors 'here'")
    fresh_policy = policy is None and config.model_path is None
    chunk_length: int = getattr(policy, "chunk_length", config.policy.chunk_length)
    if uses_replay and chunk_length > 1 and not run.algorithm_class.takes_chunks:
        raise InputError(_no_chunks(config, policy, chunk_length))
    gamma = config.algorithm.cfg.gamma
    steps_singly = run.algorithm_class.steps_singly and chunk_length > 1
    played_length = 1 if steps_singly else chunk_length
    video_env: Callable[[], gymnasium.Env]
    if env is None:
        config = run.config = replace(config, **{"env.num_envs": config.algorithm.cfg.copies(config.env.num_envs)})
        if config.cluster.collectors == "ray":
            vector_env: VectorEnv = make_cluster_env(config, played_length, gamma)
        else:
            vector_env = make_vector_env(
                config.env.for_training,
                chunk_length=played_length,
                gamma=gamma,
                device=config.device,
                tensors=True,
                renders=config.algorithm.cfg.takes_over,
            )
        eval_env = eval_env or _evaluation_factory(config, chunk_length)
        video_env = partial(make_env, config.env, render_mode="rgb_array")
    else:
        if config.cluster.collectors == "ray":
            raise InputError("collectors: Ray workers create their own environments; give an id, not an environment")
        weights, names = config.env.reward_weights, config.env.rename_streams
        vector_env = wrap(weigh(rename(env, names), weights), chunk_length=played_length, gamma=gamma)
        eval_env = eval_env or (lambda: weigh(rename(make_another(env), names), weights))
        video_env = lambda: rename(make_another(env, render_mode="rgb_array"), names)  # noqa: E731
    try:
        vector_env = with_reward_model(vector_env, config.reward_model, run.device)
        where = f"environment {config.env.id}" if env is None else "the environment"
        action = vector_env.action_space
        action = chunk_space(action, chunk_length) if steps_singly else action
        policy, observation = run.build_policy(policy, vector_env.observation_space, action, where)
        policy = wrap_policy(policy, observation, action, config.policy)
        observation = getattr(getattr(policy, "encoder", None), "space", observation)  # of a policy that was given
        run.choose_online_device(policy, vector_env)
        run.place(policy)
        if run.starts_from is not None:
            policy.freeze_statistics()
        check_streams(policy, observation, vector_env.observation_space, where)
        policy.check_box(action)
        acting = sharding.shard_policy(policy, processes, run.device) if run.shards else None
        algorithm = run.algorithm_class(policy, config.algorithm.cfg, seed=process_seed(config.seed, processes.rank))
        if not fresh_policy:
            algorithm.start_from_a_policy()
        if run.resume_from is None and getattr(config.algorithm.cfg, "keep_critics", False):
            load_critics(algorithm, config.model_path, critics)
        public = public_space(observation, policy.critic_streams)
        own_action = vector_env.env_action_space
        own_action = chunk_space(own_action, chunk_length) if steps_singly else own_action
        policy_spaces = PolicySpaces(public, own_action, vector_env.action_mask)
        spec = OnlineSpec(
            **run.spec_fields(acting, policy_spaces),
            video_env=video_env,
            timeout=config.env.timeout,
            fresh_policy=fresh_policy,
            curriculum=config.env.curriculum,
        )
        trainer = Trainer(policy, vector_env, algorithm, eval_env=eval_env, spec=spec, **to_dict(config.trainer))
        if run.resume_from is not None:
            trainer.load(run.resume_from)
    except BaseException:
        vector_env.close()
        raise
    return trainer


def _no_chunks(config: RunConfig, policy: Any, length: int) -> str:
    """Return the error message for a policy of action chunks, where the replay buffer holds single steps."""
    name = config.algorithm.name
    if policy is not None:
        what, cure = f"policy: {type(policy).__name__} decides", "build the policy with chunk_length 1"
    elif config.model_path is not None:
        what = f"model_path: the policy of {config.model_path} decides"
        cure = "train that run again with --chunk_length 1 and start from it"
    else:
        what, cure = "chunk_length: the policy would decide", "use --chunk_length 1"
    return f"{what} {length} steps at a time, and {name} learns from single steps: {cure}, or train it with ppo or grpo"


def _evaluation_factory(config: RunConfig, chunk_length: int) -> Callable[[], VectorEnv]:
    """Return a function that creates serial environments for evaluation."""
    env_config = replace(config, **{"env.vector": "sync"}).env
    count = min(config.trainer.eval_episodes, EVALUATION_ENVS)
    return lambda: make_vector_env(env_config, chunk_length=chunk_length, num_envs=count)
