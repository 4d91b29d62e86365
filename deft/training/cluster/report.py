"""`deft doctor --cluster`: what a Ray cluster has, and what a run would put where."""

from __future__ import annotations

import socket
from typing import Any

import torch

from deft.errors import InputError
from deft.machine import available_cores, physical_memory
from deft.training.cluster import connection
from deft.training.cluster.inference import LARGE_POLICY

GIB = 2**30


def examine_cluster(address: str) -> dict[str, Any]:
    """The nodes at an address, or this machine where no cluster answers, and the plan for a run there."""
    found, reason = None, None
    try:
        opened = connection.connect(address)
    except InputError as error:
        if address != "auto":
            raise
        reason = str(error)
    else:
        found = connection.nodes()
        if opened:
            connection.disconnect()
    nodes = found or [_this_machine()]
    return {"address": address if found else "local", "reason": reason, "nodes": nodes, "plan": plan(nodes)}


def plan(nodes: list[dict[str, Any]]) -> dict[str, Any]:
    """Learners on the GPUs (or one on a CPU), a worker on every CPU that they and Ray's own processes leave.

    The node of the learner is the one that the command is given on, else the one with the most GPUs.
    """
    first = max(nodes, key=lambda node: (node["here"], node["gpus"]))
    with_gpus = [node for node in nodes if node["gpus"] >= 1]
    learners = [(node["host"], int(node["gpus"])) for node in with_gpus] or [(first["host"], 1)]
    processes = dict(learners)
    workers = {}
    for node in nodes:
        taken = processes.get(node["host"], 0) or (1 if node is first else 0)
        workers[node["host"]] = max(0, int(node["cpus"]) - taken)
    if not any(workers.values()):
        workers[first["host"]] = 1
    return {
        "learners": [{"host": host, "processes": count} for host, count in learners],
        "device": "cuda" if with_gpus else "cpu",
        "workers": [{"host": host, "workers": count} for host, count in workers.items() if count],
        "num_workers": sum(workers.values()),
        "large_policy": LARGE_POLICY,
    }


def describe_cluster(results: dict[str, Any]) -> str:
    """The same for a person to read."""
    lines = [] if results["reason"] is None else [f"{results['reason']}; this machine alone:", ""]
    for node in results["nodes"]:
        store = f", object store {node['object_store'] / GIB:.1f} GiB" if node["object_store"] else ""
        here = " (here)" if node["here"] else ""
        lines.append(
            f"node {node['host']}{here}: {node['cpus']:g} CPUs, {node['gpus']:g} GPUs, memory "
            f"{node['memory'] / GIB:.1f} GiB{store}"
        )
    chosen = results["plan"]
    lines += ["", "A run would put there:"]
    for learner in chosen["learners"]:
        count, kind = learner["processes"], "GPU" if chosen["device"] == "cuda" else "CPU"
        lines.append(f"- learner: {count} process{'es' if count > 1 else ''} on {learner['host']}, one a {kind}")
    lines += [f"- workers: {part['workers']} on {part['host']}, one a CPU" for part in chosen["workers"]]
    lines.append(
        f"- the policy acts in each worker below {chosen['large_policy'] / 1e6:.0f} M parameters, above in one actor "
        "for all (on a GPU with --inference-gpus)"
    )
    count = chosen["num_workers"]
    address = "local" if results["address"] == "local" else results["address"]
    flags = f"--collectors ray --ray-address {address} --num-workers {count} --num-envs {count}"
    lines += ["", f"deft train ppo --env ID {flags}"]
    total = sum(learner["processes"] for learner in chosen["learners"])
    if total > 1:
        machines = len(chosen["learners"])
        lines.append(f"accelerate launch --num_machines {machines} --num_processes {total} -m deft train ppo --env ID")
    return "\n".join(lines)


def _this_machine() -> dict[str, Any]:
    return {
        "host": socket.gethostname(),
        "address": "127.0.0.1",
        "cpus": float(available_cores()),
        "gpus": float(torch.cuda.device_count()),
        "memory": float(physical_memory()),
        "object_store": 0.0,
        "here": True,
    }
