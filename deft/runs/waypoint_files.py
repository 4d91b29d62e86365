"""The files of waypoint training: `model.pt` of the supervised policy, `final.pt` and `checkpoint_iter_X.pt` of PPO's.

Each is one file of tensors and plain data, and is complete: PPO's includes the frozen weights.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from deft.errors import InputError, RunError
from deft.models.targets import cpu_weights
from deft.models.waypoint import PPOPolicy, WaypointSFT, WaypointShape
from deft.ownership import record
from deft.runs import checkpoint
from deft.runs.processes import Processes

SFT_FORMAT, PPO_FORMAT = "deft-waypoint-sft-1", "deft-waypoint-ppo-1"
MODEL, FINAL = "model.pt", "final.pt"
PPO_SHAPE = ("hidden_sizes", "residual_bound", "residual_modes", "log_std_init")  # what PPO's policy is built with
CONFIG, TRAIN_METRICS, EVAL_METRICS = "config.json", "train_metrics.json", "eval_metrics.json"


def save_sft(model: WaypointSFT, path: Path, about: Mapping[str, Any]) -> None:
    """Write the supervised policy."""
    weights = cpu_weights(model.state_dict())
    _save({"format": SFT_FORMAT, "shape": model.shape.to_dict(), "about": dict(about), "weights": weights}, path)


def load_sft(path: str | Path) -> tuple[WaypointSFT, dict[str, Any]]:
    """Load the supervised policy of a file or directory, and the description of its training."""
    file, content = _load(path, MODEL, SFT_FORMAT)
    model = WaypointSFT(WaypointShape.from_dict(content["shape"]))
    checkpoint.load_weights(model, content["weights"], file)
    return model.eval(), content["about"]


def save_ppo(policy: PPOPolicy, path: Path, config: Mapping[str, Any], iteration: int) -> None:
    """Write PPO's policy, which includes the supervised one."""
    about = {"format": PPO_FORMAT, "shape": policy.sft.shape.to_dict(), "config": dict(config), "iteration": iteration}
    _save(about | {"weights": cpu_weights(policy.state_dict())}, path)


def load_ppo(path: str | Path) -> tuple[PPOPolicy, dict[str, Any]]:
    """Load PPO's policy of a file or directory, and the settings of its run."""
    file, content = _load(path, FINAL, PPO_FORMAT)
    config, sft = content["config"], WaypointSFT(WaypointShape.from_dict(content["shape"]))
    policy = PPOPolicy(sft, *(config[name] for name in PPO_SHAPE))
    checkpoint.load_weights(policy, content["weights"], file)
    return policy.eval(), config


def same_sft(policy: PPOPolicy, sft: WaypointSFT) -> bool:
    """Whether a policy's frozen part is bit for bit this supervised policy."""
    frozen, other = policy.sft.state_dict(), sft.state_dict()
    return frozen.keys() == other.keys() and all(torch.equal(frozen[name].cpu(), other[name].cpu()) for name in other)


def _save(content: dict[str, Any], path: Path) -> None:
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(content, unfinished)
        record(unfinished.replace(path))
    except (OSError, RuntimeError) as error:
        unfinished.unlink(missing_ok=True)
        raise RunError(f"{path}: cannot be written: {' '.join(str(error).split())[:200]}") from error


def _load(path: str | Path, name: str, expected: str) -> tuple[Path, dict[str, Any]]:
    file = Path(path) / name if Path(path).is_dir() else Path(path)
    command = "waypoint-sft" if expected == SFT_FORMAT else "waypoint-ppo"
    advice = f"`deft train {command}` makes one"
    if not file.is_file():
        raise InputError(f"{file}: does not exist; {advice}")
    content = checkpoint.load_tensors(file)
    found = content.get("format") if isinstance(content, dict) else None
    if found != expected:
        kinds = {SFT_FORMAT: "a supervised waypoint policy", PPO_FORMAT: "a PPO waypoint policy"}
        raise InputError(f"{file}: is {kinds.get(str(found), 'something else')}, not {kinds[expected]}; {advice}")
    return file, content


def check_alone(command: str) -> None:
    """Raise an error if several processes were started: waypoint policies train in one."""
    count = Processes().count
    if count > 1:
        raise InputError(f"deft train {command}: trains in one process, started in {count}; start it alone")
