"""GRPO on CartPole-v1: five seeds of 50 iterations, each evaluated over 100 episodes on a fresh environment.

Group size, KL weight and clip range are those of the documents. The last checkpoint is evaluated, not the best one.
Exit status 1 if any seed is below 475.

    python benchmarks/grpo_cartpole.py --seeds 5 --jobs 2
"""

from __future__ import annotations

import sys
from typing import Any

from ppo_cartpole import main

SETTINGS: list[Any] = [
    "--env",
    "CartPole-v1",
    "--group_size",
    4,
    "--num_iterations",
    50,
    "--kl_coef",
    0.1,
    "--clip_range",
    0.2,
]
SETTINGS += ["--num_envs", 16, "--learning_rate", 1e-3, "--eval_freq", 0, "--save_freq", 0]


if __name__ == "__main__":
    sys.exit(main("grpo", SETTINGS, __doc__))
