"""Builds the workers of a run on a cluster, and the collector that uses them.

Called by `deft.training.run` (the environments) and `deft.training.trainer` (the collectors).
"""

from __future__ import annotations

import copy
import functools
import importlib
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec

from deft import trust
from deft.config.settings import EnvConfig, RunConfig
from deft.envs.make import check_id, full_id, make_vector_env
from deft.envs.vector import VectorEnv
from deft.errors import InputError
from deft.machine import available_cores
from deft.models.policy import Policy
from deft.models.vla.loading import find_vla_class
from deft.training.cluster import connection
from deft.training.cluster.inference import LARGE_POLICY
from deft.training.cluster.pool import ClusterEnv, WorkerPool


def make_cluster_env(config: RunConfig, chunk_length: int, gamma: float) -> ClusterEnv:
    """The environments of a run, in workers on its cluster."""
    cluster, env = config.cluster, config.env.for_training
    if env.vector == "process":
        raise InputError("env.vector: Ray workers are processes already; with collectors ray use sync")
    unit = config.algorithm.cfg.envs_per_group
    most = env.num_envs // unit
    what = "environments" if unit == 1 else f"groups of {unit}"
    if env.num_workers is not None and env.num_workers > most:
        raise InputError(
            f"num_workers: {env.num_workers} workers cannot share {most} {what}; use num_envs "
            f"{env.num_workers * unit} or more, or fewer workers"
        )
    check_id(env)  # a Ray that is started takes seconds
    if config.policy.vla_config is not None:
        find_vla_class(config.policy.vla_config.model_class)
    wanted = env.num_workers or min(most, max(1, available_cores() - 1))
    opened = connection.connect(cluster.ray_address, (wanted + cluster.spare_workers) * cluster.worker_cpus + 1)
    try:
        cpus = connection.total("CPU")
        if env.num_workers is None and cluster.ray_address != "local":
            wanted = max(1, min(most, int((cpus - 1) / cluster.worker_cpus)))
        acting = 1 if cluster.inference == "actor" else 0  # a CPU for the actor that acts for all
        if wanted * cluster.worker_cpus + acting > cpus:
            raise InputError(
                f"num_workers: {wanted} workers of {cluster.worker_cpus:g} CPUs{' and the inference actor' * acting} "
                f"do not fit the cluster's {cpus:g}; use fewer, or a smaller worker_cpus"
            )
        make = functools.partial(_make, trust.snapshot(), _registered(env), env, chunk_length, gamma)
        return ClusterEnv(WorkerPool(config, wanted, make), opened)
    except BaseException:
        if opened:
            connection.disconnect()
        raise


def _registered(config: EnvConfig) -> EnvSpec | None:
    """What this process has registered under the id: a worker may not have run what registers it."""
    spec = copy.deepcopy(gymnasium.registry.get(full_id(config.id).rpartition(":")[2]))
    if spec is not None and isinstance(spec.entry_point, str) and spec.entry_point.startswith("__main__:"):
        spec.entry_point = getattr(importlib.import_module("__main__"), spec.entry_point.partition(":")[2])
    return spec


def _make(
    state: Any, spec: EnvSpec | None, config: EnvConfig, chunk_length: int, gamma: float, num_envs: int
) -> VectorEnv:
    """Some of the environments, in a worker; `state` is what the learner's process may import."""
    trust.restore(state)
    if spec is not None:
        gymnasium.registry.setdefault(spec.id, spec)
    return make_vector_env(config, chunk_length=chunk_length, gamma=gamma, num_envs=num_envs)


def open_workers(env: ClusterEnv, policy: Policy, kept: tuple[bool, bool]) -> None:
    """Give the workers their policy, or one actor that acts for them where the policy is large.

    `kept` as in `WorkerPool.open`.
    """
    config, pool = env.config, env.pool
    in_actor = config.inference == "actor"
    if config.inference == "auto":
        in_actor = sum(parameter.numel() for parameter in policy.parameters()) >= LARGE_POLICY
    if not in_actor:
        pool.open(policy, kept)
        return
    if config.inference_gpus > connection.total("GPU"):
        raise InputError(
            f"inference_gpus: {config.inference_gpus:g} is requested, the cluster has {connection.total('GPU'):g}"
        )
    device = "cuda" if config.inference_gpus else "cpu"
    pool.open(policy, kept, device, config.inference_gpus)
