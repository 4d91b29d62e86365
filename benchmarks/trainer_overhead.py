"""What Deft's loop costs by itself: microseconds an env step where policy, environments and algorithm do nothing.

The whole of training is timed: acting, stepping, storing, episode statistics, handing rollouts over, logging, and the
checkpoint at the end. Two kinds of environment: 64 Gymnasium environments whose `step` returns a constant (so that
Deft's own stepping of them counts), and one vector environment that returns ready arrays (the loop alone).

Wall and CPU time are both shown. On a machine that does nothing else they agree, but for waits on the disk; on a busy
one the CPU time is the loop's and the rest is the neighbours'. The verdict goes by CPU time.

    python benchmarks/trainer_overhead.py
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
import torch
from common import print_machine, print_table, write_json
from tensordict import TensorDictBase

from deft import Trainer, schema
from deft.algorithms.algorithm import Algorithm, Metrics
from deft.config.algorithm_settings import PPOSettings
from deft.config.settings import LoggingConfig
from deft.envs.serial import SerialVectorEnv
from deft.envs.vector import VectorStep
from deft.models.policy import Policy

BAR_MICROSECONDS = 10.0
EPISODE_STEPS = 200
OBSERVATION = np.zeros(4, np.float32)


class FreeEnv(gymnasium.Env):
    """Nothing happens, and every 200th step it ends."""

    observation_space = gymnasium.spaces.Box(-1, 1, (4,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, first_episode: int = EPISODE_STEPS) -> None:
        self.left = first_episode

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        return OBSERVATION, {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.left -= 1
        if self.left:
            return OBSERVATION, 1.0, False, False, {}
        self.left = EPISODE_STEPS
        return OBSERVATION, 1.0, False, True, {}


class FreeVectorEnv(SerialVectorEnv):
    """The same without stepping anything: ready arrays, and no episode ever ends."""

    def step(self, actions: np.ndarray) -> VectorStep:
        return self._result(self._next_arrays(), [])


class FreePolicy(Policy):
    """The same answer to everything."""

    def __init__(self, num_envs: int) -> None:
        super().__init__()
        self.unused = torch.nn.Parameter(torch.zeros(1))
        self.action = torch.zeros(num_envs, dtype=torch.int64)
        self.zeros = torch.zeros(num_envs)

    def act(self, td: TensorDictBase, deterministic: bool = False) -> TensorDictBase:
        td.set(schema.ACTION, self.action)
        td.set(schema.LOG_PROB, self.zeros)
        td.set(schema.VALUE, self.zeros)
        return td

    def get_value(self, td: TensorDictBase) -> torch.Tensor:
        return self.zeros[: td.batch_size[0]]


class FreeAlgorithm(Algorithm):
    """Takes its rollout and learns nothing."""

    name = "free"

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.settings = PPOSettings()  # the trainer reads its discount

    def update(self, batches: Iterator[TensorDictBase]) -> Metrics:
        next(batches)
        self.version += 1
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {"version": self.version}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.version = state["version"]


def microseconds(kind: str, mode: str, num_envs: int, rollout: int, rollouts: int) -> tuple[float, float]:
    """Time one whole training run: wall and CPU microseconds for each of its env steps."""
    # Staggered first episodes: the ends are spread over the steps as in real training.
    envs = [FreeEnv(1 + (index * EPISODE_STEPS) // num_envs) for index in range(num_envs)]
    env = SerialVectorEnv(envs) if kind == "gymnasium" else FreeVectorEnv(envs)
    policy = FreePolicy(num_envs)
    steps = rollout * num_envs * rollouts
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            policy,
            env,
            FreeAlgorithm(policy),
            buffer_size=rollout,
            buffer_type=mode,
            eval_freq=0,
            save_freq=0,
            threads=1,
            logging_config=LoggingConfig(console_level="WARNING"),
            output_dir=folder,
        )
        wall, cpu = time.perf_counter(), time.process_time()
        trainer.train(total_timesteps=steps)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return wall / steps * 1e6, cpu / steps * 1e6


def main() -> None:
    """Measure both kinds of environment in both modes, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-envs", type=int, default=64)
    parser.add_argument("--rollout", type=int, default=128, help="steps of a rollout, an environment")
    parser.add_argument("--rollouts", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", help="write the figures here")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print_machine()
    microseconds("gymnasium", "standard", arguments.num_envs, arguments.rollout, 2)  # imports and first calls
    rows, results = [], {}
    for kind in ("gymnasium", "vector"):
        for mode in ("standard", "vla"):
            costs = [
                microseconds(kind, mode, arguments.num_envs, arguments.rollout, arguments.rollouts)
                for _ in range(arguments.rounds)
            ]
            results[f"{kind}/{mode}"] = costs
            wall, cpu = (statistics.median(cost) for cost in zip(*costs, strict=True))
            verdict = "yes" if cpu < BAR_MICROSECONDS else "NO"
            rows.append([kind, mode, f"{wall:.2f}", f"{cpu:.2f}", verdict])
    print(
        f"{arguments.num_envs} envs, rollouts of {arguments.rollout} steps, medians of {arguments.rounds} training runs"
    )
    print_table(["environments", "mode", "wall µs an env step", "CPU µs", f"< {BAR_MICROSECONDS:.0f} µs"], rows)
    write_json(arguments.json, {"num_envs": arguments.num_envs, "microseconds": results})


if __name__ == "__main__":
    main()
