"""VLA mode against standard mode: a policy whose inference takes 100 ms and whose update takes as long as collection.

The model is a small network that learns a small task; its cost is added on top. By default the cost is a *sleep*, which
stands for an accelerator or a remote server that leaves this CPU free. With `--compute` it is real single-thread matrix
multiplication on this CPU, so that the two sides of VLA mode compete for cores as they would without an accelerator.

A gradient step costs three shares: one for the forward pass, two for the backward pass. The share is chosen so that one
standard update takes as long as one rollout's inference. VLA mode then pays one more forward pass a rollout, to score
the actions of the older policy. Both modes have the same settings, seeds and env steps.

    python benchmarks/vla_mode.py --seeds 3
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from common import print_machine, print_table, read_metrics, run_worker, write_json
from tensordict import TensorDictBase
from torch import Tensor, nn

NUM_ENVS, ROLLOUT_STEPS, MINIBATCH, EPOCHS = 8, 64, 64, 10
EPISODE_STEPS, STEP_SIZE = 20, 0.15
MODES = ("standard", "vla")
BAR = 1.8


class PointEnv(gymnasium.Env):
    """A point moves in the plane towards a goal; the reward is minus the distance, for 20 steps."""

    observation_space = gymnasium.spaces.Dict({"state": gymnasium.spaces.Box(-4, 4, (4,), np.float32)})
    action_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[dict, dict]:
        super().reset(seed=seed)
        self.position, self.goal = self.np_random.uniform(-1, 1, (2, 2))
        self.steps = 0
        return self._observation(), {}

    def step(self, action: np.ndarray) -> tuple[dict, float, bool, bool, dict]:
        self.position = self.position + STEP_SIZE * np.clip(action, -1, 1)
        self.steps += 1
        reward = -float(np.linalg.norm(self.goal - self.position))
        return self._observation(), reward, False, self.steps == EPISODE_STEPS, {}

    def _observation(self) -> dict[str, np.ndarray]:
        return {"state": np.concatenate([self.position, self.goal - self.position]).astype(np.float32)}


class _Cost(torch.autograd.Function):
    """The identity, which spends one share on the way forward and two on the way back."""

    @staticmethod
    def forward(context: Any, x: Tensor, spend: Callable[[float], None], share: float) -> Tensor:
        context.spend, context.share = spend, share
        spend(share)
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        context.spend(2 * context.share)
        return gradient, None, None


class SlowModel(nn.Module):
    """A small actor-critic behind `VLAModelInterface` whose passes take the time of a large one."""

    def __init__(self, inference: float, share: float, spend: Callable[[float], None]) -> None:
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
        self.critic = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
        self.log_std = nn.Parameter(torch.full((2,), -0.5))
        self.inference, self.share, self.spend = inference, share, spend

    def _distribution(self, state: Tensor) -> torch.distributions.Independent:
        return torch.distributions.Independent(torch.distributions.Normal(self.actor(state), self.log_std.exp()), 1)

    def act(self, observations: TensorDictBase, deterministic: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """One inference: action, log-prob and value."""
        self.spend(self.inference)
        state = observations["state"]
        distribution = self._distribution(state)
        action = distribution.mean if deterministic else distribution.sample()
        return action, distribution.log_prob(action), self.critic(state)

    def evaluate(self, observations: TensorDictBase, actions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The pass of a gradient step: log-prob, entropy and value."""
        state = observations["state"]
        distribution = self._distribution(state)
        log_prob = _Cost.apply(distribution.log_prob(actions), self.spend, self.share)
        return log_prob, distribution.entropy(), self.critic(state)

    def forward(self, observations: TensorDictBase, deterministic: bool = False) -> Tensor:
        return self.act(observations, deterministic)[0]

    def get_value(self, observations: TensorDictBase) -> Tensor:
        self.spend(self.inference)
        return self.critic(observations["state"])

    def evaluate_actions(self, observations: TensorDictBase, actions: Tensor) -> tuple[Tensor, Tensor]:
        log_prob, entropy, _ = self.evaluate(observations, actions)
        return log_prob, entropy


def collection_seconds(inference: float) -> float:
    """A rollout's inferences: its steps, a value where its episodes are cut off, and one at its end."""
    return inference * (ROLLOUT_STEPS + ROLLOUT_STEPS // EPISODE_STEPS + 1)


def spender(compute: bool) -> Callable[[float], None]:
    """A function that takes so many seconds: asleep, or multiplying matrices on this thread."""
    if not compute:
        return time.sleep
    matrix = torch.randn(256, 256) / 16

    def multiply(count: int) -> None:
        with torch.no_grad():
            for _ in range(count):
                torch.mm(matrix, matrix)

    multiply(20)
    start = time.thread_time()
    multiply(200)
    seconds_each = (time.thread_time() - start) / 200
    return lambda seconds: multiply(max(1, round(seconds / seconds_each)))


def work(mode: str, seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """One training run in one mode; its rates and what it learned."""
    from deft import PPO, Trainer, VLAPolicy
    from deft.config.algorithm_settings import PPOSettings
    from deft.config.settings import LoggingConfig

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    rollout = NUM_ENVS * ROLLOUT_STEPS
    share = collection_seconds(arguments.inference) / (EPOCHS * (rollout // MINIBATCH)) / 3
    model = SlowModel(arguments.inference, share, spender(arguments.compute))
    policy = VLAPolicy(model)
    settings = PPOSettings(n_epochs=EPOCHS, batch_size=MINIBATCH, learning_rate=1e-3, gamma=0.9, entropy_coef=0.0)
    steps = rollout * arguments.rollouts
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            policy,
            [PointEnv() for _ in range(NUM_ENVS)],
            PPO(policy, settings, seed=seed),
            buffer_size=ROLLOUT_STEPS,
            buffer_type=mode,
            batch_size=MINIBATCH,
            max_staleness=1,
            eval_freq=0,
            log_freq=1,
            seed=seed,
            threads=1,
            logging_config=LoggingConfig(console_level="WARNING"),
            output_dir=folder,
        )
        start = time.perf_counter()
        trainer.train(total_timesteps=steps)
        seconds = time.perf_counter() - start
        updates = read_metrics(Path(folder), "update")
        returns = [episode["episode_return"] for episode in read_metrics(Path(folder), "episode")]
    # Between the first and the last update: without the first rollout, which nothing can overlap with.
    steady = (updates[-1]["step"] - updates[0]["step"]) / (updates[-1]["time"] - updates[0]["time"])
    model.inference = 0.0
    return {
        "mode": mode,
        "seed": seed,
        "steps_per_s": steps / seconds,
        "steady_steps_per_s": steady,
        "seconds": seconds,
        "return_first": statistics.mean(returns[:50]),
        "return_last": statistics.mean(returns[-50:]),
        "return_evaluation": evaluate(policy, seed),
    }


def evaluate(policy: Any, seed: int, episodes: int = 200) -> float:
    """Mean return of the most likely actions, on fresh environments."""
    from tensordict import TensorDict

    envs = [PointEnv() for _ in range(episodes)]
    states = [env.reset(seed=100_000 + seed * episodes + index)[0]["state"] for index, env in enumerate(envs)]
    total = 0.0
    for _ in range(EPISODE_STEPS):
        observation = TensorDict({"state": torch.from_numpy(np.stack(states))}, [episodes])
        with torch.no_grad():
            td = policy.act(TensorDict({"observation": observation}, [episodes]), deterministic=True)
        steps = [env.step(action) for env, action in zip(envs, td["action"].numpy(), strict=True)]
        states = [step[0]["state"] for step in steps]
        total += sum(step[1] for step in steps)
    return total / episodes


def main() -> None:
    """Run both modes for every seed, side by side, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rollouts", type=int, default=30)
    parser.add_argument("--inference", type=float, default=0.1, help="seconds of one inference")
    parser.add_argument("--compute", action="store_true", help="spend the time computing on this CPU, not asleep")
    parser.add_argument("--jobs", type=int, help="runs at a time; 2 by default, 1 with --compute")
    parser.add_argument("--json", help="write the figures here")
    parser.add_argument("--worker", choices=MODES, help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        print(json.dumps(work(arguments.worker, arguments.seed, arguments)))
        return
    print_machine()
    options = ["--rollouts", arguments.rollouts, "--inference", arguments.inference]
    options += ["--compute"] if arguments.compute else []
    jobs = arguments.jobs or (1 if arguments.compute else len(MODES))
    with ThreadPoolExecutor(jobs) as pool:
        work_items = [
            pool.submit(run_worker, "vla_mode.py", ["--worker", mode, "--seed", seed, *options])
            for seed in range(arguments.seeds)
            for mode in MODES
        ]
        results = [item.result() for item in work_items]
    summarise(results, arguments)
    write_json(arguments.json, {"compute": arguments.compute, "inference": arguments.inference, "results": results})


def summarise(results: list[dict[str, Any]], arguments: argparse.Namespace) -> None:
    """Print the runs, the ratio of the modes and their final returns."""
    rows = [
        [
            result["mode"],
            result["seed"],
            f"{result['steps_per_s']:.1f}",
            f"{result['steady_steps_per_s']:.1f}",
            f"{result['return_first']:.2f}",
            f"{result['return_last']:.2f}",
            f"{result['return_evaluation']:.2f}",
        ]
        for result in results
    ]
    cost = "computing on this CPU" if arguments.compute else "asleep (stands for an accelerator or server)"
    inference = f"inference {arguments.inference * 1e3:.0f} ms a step of {NUM_ENVS} envs"
    print(f"{inference}, {cost}; an update takes as long as a rollout")
    header = ["mode", "seed", "env steps/s", "after the first update", "first 50 returns", "last 50", "evaluation"]
    print_table(header, rows)
    of_mode = {mode: [result for result in results if result["mode"] == mode] for mode in MODES}

    def ratio(name: str) -> float:
        medians = [statistics.median(result[name] for result in of_mode[mode]) for mode in MODES]
        return medians[1] / medians[0]

    whole, steady = ratio("steps_per_s"), ratio("steady_steps_per_s")
    print(f"VLA / standard: {whole:.2f}x of the whole run, {steady:.2f}x after the first update (bar {BAR}x)")
    # Collection and update of the same length, and a forward pass over the rollout: a third of an epoch.
    print(f"the limit, with that forward pass and no overhead: {2 / (1 + 1 / (3 * EPOCHS)):.2f}x")
    for mode in MODES:
        finals = [result["return_evaluation"] for result in of_mode[mode]]
        print(f"{mode}: final return {statistics.mean(finals):.2f} ± {statistics.pstdev(finals):.2f}")


if __name__ == "__main__":
    main()
