"""How the score of a CQL policy depends on its entropy temperature, the critics being what they are.

    python benchmarks/cql_temperature.py RUN [--temperatures 0.28 1 2.5] [--updates 4000] [--episodes 30]

From the weights of a finished run (its latest checkpoint, or the one given), on its own dataset, the policy is trained
on at each of the temperatures with the critics left alone: L = mean[α log π(ã | s) − min_i Q_i(s, ã)], with a step size
that falls from 3e-4 to 0. Prints the deterministic policy's score (or return) of each seed, and its entropy.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
from pathlib import Path

import torch

from deft import schema
from deft.config.loading import load_config, replace
from deft.runs.checkpoint import find_checkpoint
from deft.training.offline import OfflineTrainer
from deft.training.offline_run import build_offline_trainer

LEARNING_RATE = 3e-4


def trained_on(trainer: OfflineTrainer, temperature: float, updates: int) -> torch.Tensor:
    """Train the policy in place; returns the last batch's entropy, one for each seed."""
    policy, critics = trainer.policy, trainer.algorithm.critics
    optimizer = torch.optim.Adam(policy.actor_parameters(), LEARNING_RATE)
    falling = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, updates)
    for _ in range(updates):
        state = policy.encode(trainer.sampler.sample(trainer.batch_size)[schema.OBSERVATION])
        actions, log_probs = policy.sample(state)
        values = critics(state.features, actions[0], frozen=True).amin(1)
        optimizer.zero_grad()
        (temperature * log_probs[0] - values).mean(-1).sum().backward()
        optimizer.step()
        falling.step()
    return -log_probs[0].detach().mean(-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.28, 0.5, 0.75, 1.0, 1.5, 2.5])
    parser.add_argument("--updates", type=int, default=4000)
    parser.add_argument("--episodes", type=int, default=30)
    args = parser.parse_args()
    folder = find_checkpoint(args.run)
    with tempfile.TemporaryDirectory() as scratch:
        config = replace(load_config(folder.parent / "config.yaml"), output_dir=scratch, overwrite=True)
        trainer = build_offline_trainer(config)
        trainer.load(folder)
        start = copy.deepcopy(trainer.policy.state_dict())
        for temperature in args.temperatures:
            trainer.policy.load_state_dict(start)
            entropy = trained_on(trainer, temperature, args.updates)
            result = trainer.evaluate(args.episodes)
            kind = "normalized_score" if "normalized_score" in result else "mean_reward"
            scores = result.get(f"{kind}s", [result[kind]])
            numbers = ", ".join(f"{score:.1f}" for score in scores)
            print(f"temperature {temperature}: {numbers} (entropy {', '.join(f'{value:.2f}' for value in entropy)})")
        trainer.close()


if __name__ == "__main__":
    main()
