"""From the experience that an algorithm declares to the collection that gathers it, in this process or on Ray workers.

`Trainer` calls `make_collection`. Nothing here depends on which algorithm is trained.
"""

from __future__ import annotations

from deft.algorithms.algorithm import Algorithm
from deft.algorithms.experience import DatasetBatches, Groups, Labels, Replay, Rollouts
from deft.config.settings import TrainerConfig
from deft.data.rollout import RolloutBuffer, VLABuffer
from deft.envs.host import on_host
from deft.envs.vector import VectorEnv
from deft.errors import InputError
from deft.models.policy import Policy
from deft.runs.compute import set_precision
from deft.training.cluster.building import open_workers
from deft.training.cluster.collectors import RayCollector, RayGroupCollector
from deft.training.cluster.pool import ClusterEnv
from deft.training.collection import BackgroundCollection, Collection, Collector
from deft.training.group_collection import GroupCollection, GroupCollector
from deft.training.labelled_collection import ExpertCollector, LabelledCollection
from deft.training.replay_collection import ReplayCollection


def steps_per_update(algorithm: Algorithm, rollout_steps: int) -> int:
    """Vector steps between two updates: `rollout_steps`, unless the algorithm itself defines them."""
    experience = algorithm.experience
    return experience.train_freq if isinstance(experience, Replay) else rollout_steps


def make_collection(
    env: VectorEnv,
    policy: Policy,
    algorithm: Algorithm,
    settings: TrainerConfig,
    seed: int,
    fresh_policy: bool,
    planned_steps: int,
    timeout: float,
) -> Collection:
    """The collection of `algorithm.experience`; `policy` is the one that acts in `env`.

    `planned_steps`: transitions that the run collects in this process, for buffers that keep them.
    """
    experience = algorithm.experience
    if isinstance(experience, DatasetBatches):
        raise InputError(f"algorithm: {algorithm.name} learns from a dataset; use OfflineTrainer")
    in_background = settings.buffer_type == "vla"
    if in_background and isinstance(experience, Groups | Replay | Labels):
        raise InputError(f"buffer_type: {algorithm.name} collects and learns in turns; use 'standard'")
    if in_background and isinstance(env, ClusterEnv):
        raise InputError("buffer_type: 'vla' collects in a thread here; with collectors ray use 'standard'")
    is_asynchronous = in_background or (isinstance(env, ClusterEnv) and settings.max_staleness > 0)
    if is_asynchronous and isinstance(experience, Rollouts) and experience.consecutive:
        raise InputError(
            f"{experience.consecutive}: {algorithm.name} joins rollouts in time, and those of asynchronous collection "
            "may be left out or come in another order; use buffer_type 'standard' and max_staleness 0, or 0 for this "
            "setting"
        )
    # Steps stay on the environments' device where the policy is there too; a background collector's ring is in main
    # memory.
    if in_background or env.device != next(policy.parameters()).device:
        env = on_host(env)
    precision = getattr(getattr(algorithm, "settings", None), "precision", "fp32")
    if experience.on_policy and precision != "fp32":  # a collection of replay sets its own
        set_precision(next(policy.parameters()).device, precision)
    kept = experience.next_observation, experience.reward_terms
    if isinstance(experience, Labels):
        if isinstance(env, ClusterEnv):
            raise InputError(f"collectors: {algorithm.name} needs the expert in this process; use 'here'")
        has_expert, finishes = experience.expert == "scripted", experience.expert_finishes
        expert = ExpertCollector(on_host(env), policy, seed, has_expert, finishes)
        return LabelledCollection(expert, algorithm, experience, seed)
    if isinstance(env, ClusterEnv):
        open_workers(env, policy, kept)
    if experience.reward_terms:
        algorithm.set_reward_terms(env.reward_terms)
    if isinstance(experience, Groups):
        collector_class = RayGroupCollector if isinstance(env, ClusterEnv) else GroupCollector
        return GroupCollection(env, policy, experience, seed, settings.rollout_steps, collector_class)
    if isinstance(env, ClusterEnv):
        collector: Collector = RayCollector(env, policy, seed, *kept, settings.max_staleness)
    else:
        collector = Collector(env, policy, seed, *kept)
    if isinstance(experience, Replay):
        return ReplayCollection(collector, algorithm, experience, seed, fresh_policy, planned_steps)
    if in_background:
        ring = VLABuffer(settings.rollout_steps * max(1, settings.max_staleness))
        return BackgroundCollection(collector, ring, policy, settings.max_staleness, timeout)
    return Collection(collector, RolloutBuffer(settings.rollout_steps, env.device))
