"""Offline runs on the two-step dataset, small enough to test with, and comparisons of two runs."""

import json
from pathlib import Path
from typing import Any

import gymnasium
import pytest
import torch
from offline_worlds import two_step_dataset

from deft.config.loading import resolve
from deft.training.offline import OfflineTrainer
from deft.training.offline_run import build_offline_trainer

ENV = "deft-test/TwoStep-v0"
ALGORITHMS = ["iql", "cql", "td3-bc", "rebrac"]
SETTINGS: dict[str, dict[str, Any]] = {
    "iql": {"reward_scaling": "none"},
    "cql": {"cql_samples": 2},
    "td3-bc": {},
    "rebrac": {},
    "dt": {"embed_dim": 8, "n_layer": 1, "context_length": 2},
}
QUIET = {"console_level": "CRITICAL", "tensorboard": False, "progress_bar": False}


@pytest.fixture(autouse=True)
def two_step_env():
    """The environment of the two-step dataset is registered as `ENV`, in every test of a module that imports this."""
    gymnasium.register(ENV, entry_point="offline_worlds:TwoStep")
    yield
    del gymnasium.registry[ENV]


def make_trainer(
    folder: Path, algorithm: str = "iql", dataset: Any = None, env: str | None = None, run: Any = None, **trainer: Any
) -> OfflineTrainer:
    """On 400 transitions (of 200 episodes) in batches of 32: an epoch is ⌈400 / 32⌉ = 13 updates."""
    settings = {"batch_size": 32, **SETTINGS[algorithm], **trainer.pop("cfg", {})}
    config = resolve(
        {
            "algorithm": {"name": algorithm, "cfg": settings},
            "env": {"id": env},
            "policy": {"hidden_dim": 16},
            "trainer": {"log_freq": 1, "eval_freq": 0, "save_freq": 0, "num_epochs": 3, **trainer},
            "logging": QUIET,
            "output_dir": str(folder),
            "device": "cpu",
            "threads": 1,
            **(run or {}),
        }
    )
    return build_offline_trainer(config, dataset or two_step_dataset())


def lines(folder: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """What was logged, without the time."""
    found = [json.loads(line) for line in (folder / "episode_metrics.jsonl").read_text().splitlines()]
    return [{n: v for n, v in line.items() if n != "time"} for line in found if kind in (None, line["type"])]


def numbers(value: Any, name: str = "") -> dict[str, torch.Tensor]:
    """Every tensor of a nested state, by its path."""
    if isinstance(value, dict):
        return {k: v for part, nested in value.items() for k, v in numbers(nested, f"{name}.{part}").items()}
    return {name: torch.as_tensor(value)} if isinstance(value, torch.Tensor | int | float) else {}


def everything(trainer: OfflineTrainer) -> dict[str, torch.Tensor]:
    """All numbers that a run consists of."""
    return numbers(
        {
            "policy": dict(trainer.policy.state_dict()),
            "algorithm": trainer.algorithm.state_dict(),
            "sampler": trainer.sampler.state_dict(),
        }
    )


def assert_equal(first: OfflineTrainer, second: OfflineTrainer) -> None:
    one, other = everything(first), everything(second)
    assert one.keys() == other.keys()
    assert any("critics" in name for name in one)
    assert any("exp_avg" in name for name in one)
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


def scripted(trainer: OfflineTrainer, returns: list[float]) -> None:
    """The evaluations' results, in place of episodes."""
    results = iter(returns)
    trainer.evaluator.evaluate = lambda policies, episodes, watch: [  # type: ignore[method-assign, union-attr]
        {"episodes": episodes, "mean_reward": next(results), "std_reward": 0.0, "action_selection": "mode"}
        for _ in policies
    ]


class Late:
    """An evaluator beside the training whose results come when they are waited for."""

    in_background = True

    def __init__(self, returns: list[float]) -> None:
        self.returns, self._waiting = iter(returns), []

    def start(self, step: int, policies: Any, episodes: int, watch: Any) -> list[Any]:
        result = {"episodes": episodes, "mean_reward": next(self.returns), "std_reward": 0.0}
        result["action_selection"] = "mode"
        self._waiting.append((step, [result]))
        return []

    @property
    def pending(self) -> list[int]:
        return [step for step, _ in self._waiting]

    def finished(self, wait: bool, stop: Any) -> list[Any]:
        done, self._waiting = (self._waiting, []) if wait else ([], self._waiting)
        return done

    def close(self) -> None:
        pass
