"""Self-imitation beside PPO where only success is rewarded: an easy task and a rare one, for one policy.

    python benchmarks/self_imitation.py                                    three seeds, with and without
    python benchmarks/self_imitation.py --coefs 0 --epochs 4               PPO with as much computation
    python benchmarks/self_imitation.py --seeds 1 --rollouts 50            a first look

A point moves by half of each of 4 actions in 3 dimensions. The easy task is to end within 0.8 of a goal, the rare one
to end within 0.22 of its mirror image: at first about one episode in a thousand succeeds. Half of the episodes are of
each task, and the reward is 1 for success. All settings but `self_imitation_coef` are the same. Success is that of the
policy in training, with its exploration noise, over the last sixth of the rollouts.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from common import over_seeds, print_machine, print_table, write_json
from gymnasium import spaces
from tensordict import TensorDict

from deft import schema
from deft.algorithms.ppo import PPO
from deft.config.algorithm_settings import PPOSettings
from deft.config.settings import PolicyConfig
from deft.models.actor_critic import ActorCritic

DIMS, LENGTH, NUM_ENVS, NUM_STEPS = 3, 4, 512, 2
EASY, RARE = 0.8, 0.22  # largest distances from the goal
VECTOR = spaces.Box(-9, 9, (2 * DIMS + 2,))
SPACE = spaces.Dict({"sensor": VECTOR, "scene": VECTOR})


class Points:
    """Many episodes side by side, which start at different times."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.goal, self.position = torch.zeros(NUM_ENVS, DIMS), torch.zeros(NUM_ENVS, DIMS)
        self.is_rare = torch.zeros(NUM_ENVS, dtype=torch.bool)
        self.elapsed = torch.zeros(NUM_ENVS, dtype=torch.int64)
        self.begin(torch.ones(NUM_ENVS, dtype=torch.bool))
        self.elapsed = torch.randint(0, LENGTH, (NUM_ENVS,), generator=self.generator)
        self.counts = torch.zeros(2, 2)  # of the easy and of the rare task: successes, episodes

    def begin(self, ended: torch.Tensor) -> None:
        """Start new episodes."""
        count = int(ended.sum())
        self.goal[ended] = torch.rand(count, DIMS, generator=self.generator) * 2 - 1
        self.is_rare[ended] = torch.rand(count, generator=self.generator) < 0.5
        self.position[ended], self.elapsed[ended] = 0.0, 0

    def observe(self) -> TensorDict:
        """What the policy and the critic read."""
        rest = torch.stack([self.is_rare.float(), self.elapsed / LENGTH], 1)
        vector = torch.cat([self.goal, self.position, rest], 1)
        return TensorDict({"sensor": vector, "scene": vector.clone()}, [NUM_ENVS])

    def step(self, action: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The rewards, and which episodes have ended."""
        self.position = self.position + 0.5 * action.clamp(-1, 1)
        self.elapsed += 1
        ended, wanted = self.elapsed >= LENGTH, torch.where(self.is_rare[:, None], -self.goal, self.goal)
        is_near = (self.position - wanted).norm(dim=1) < torch.where(self.is_rare, RARE, EASY)
        for number, of_task in enumerate((~self.is_rare, self.is_rare)):
            self.counts[number] += torch.tensor([(ended & of_task & is_near).sum(), (ended & of_task).sum()])
        return (ended & is_near).float(), ended


def train(coef: float, seed: int, rollouts: int, epochs: int) -> dict[str, Any]:
    """Success in percent of both tasks, in the first and in the last sixth of the rollouts."""
    torch.manual_seed(seed)
    config = PolicyConfig(
        critic_observation=("scene",), hidden_sizes=(64, 64), normalize_reward=False, log_std_init=-0.5
    )
    policy = ActorCritic(SPACE, spaces.Box(-1, 1, (DIMS,)), config)
    given: dict[str, Any] = {"value_updates": 8, "learning_rate": 3e-4, "n_epochs": epochs, "batch_size": 256}
    given |= {"entropy_coef": 0.0, "learning_rate_schedule": "adaptive", "desired_kl": 0.02}
    algorithm, envs = PPO(policy, PPOSettings(self_imitation_coef=coef, **given), seed=seed), Points(seed)
    found, started = [], time.perf_counter()
    for number in range(rollouts):
        rows = []
        for _ in range(NUM_STEPS):
            td = TensorDict({schema.OBSERVATION: envs.observe()}, [NUM_ENVS])
            with torch.no_grad():
                policy.act(td)
                td[schema.NEXT_REWARD], ended = envs.step(td[schema.ACTION])
                following = TensorDict({schema.OBSERVATION: envs.observe()}, [NUM_ENVS])
                td[schema.NEXT_VALUE] = policy.get_value(following)
            td[schema.NEXT_TERMINATED], td[schema.NEXT_TRUNCATED] = ended, torch.zeros_like(ended)
            td[schema.POLICY_VERSION] = torch.full((NUM_ENVS,), algorithm.version)
            td[schema.STEP_MASK] = torch.ones(NUM_ENVS, dtype=torch.bool)
            envs.begin(ended)
            rows.append(td)
        algorithm.update(iter([torch.stack(rows)]))
        if (number + 1) % max(1, rollouts // 6) == 0:
            found.append((100 * envs.counts[:, 0] / envs.counts[:, 1].clamp(min=1)).tolist())
            envs.counts.zero_()
    return {"first": found[0], "last": found[-1], "seconds": time.perf_counter() - started}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--coefs", type=float, nargs="+", default=[0.0, 5.0])
    parser.add_argument("--epochs", type=int, default=2, help="of PPO; imitation takes about as long as two more")
    parser.add_argument("--rollouts", type=int, default=300)
    parser.add_argument("--out", help="write the figures here")
    arguments = parser.parse_args()
    print_machine()
    results, rows = {}, []
    for coef in arguments.coefs:
        runs = [train(coef, seed, arguments.rollouts, arguments.epochs) for seed in arguments.seeds]
        results[coef] = runs
        rare = [run["last"][1] for run in runs]
        shown = over_seeds(rare, ".1f") if len(rare) > 1 else f"{rare[0]:.1f}"
        each = ", ".join(f"{rate:.1f}" for rate in rare)
        easy = ", ".join(f"{run['last'][0]:.1f}" for run in runs)
        first = ", ".join(f"{run['first'][1]:.1f}" for run in runs)
        seconds = sum(run["seconds"] for run in runs) / len(runs)
        rows.append([f"{coef:g}", first, each, shown, easy, f"{seconds:.0f}"])
        print(rows[-1], flush=True)
    header = ["self_imitation_coef", "rare task at first, %", "at the end", "mean (95 % interval)", "easy task", "s"]
    print_table(header, rows)
    write_json(arguments.out, {"rollouts": arguments.rollouts, "results": results})


if __name__ == "__main__":
    main()
