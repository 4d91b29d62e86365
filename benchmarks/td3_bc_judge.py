"""TD3+BC written plainly (`plain_updates.py`) on a D4RL file, scored as it learns: the judge of Deft's on that file.

    python benchmarks/td3_bc_judge.py FOLDER/hopper-medium-v2.hdf5 --seeds 3

Observations are normalised by the mean and deviation of the dataset, as the paper has it. Every `--every` updates 10
episodes are played without noise; the last lines have the mean score over each 50,000 updates. Deft's is measured by
`offline_results.py`.
"""

from __future__ import annotations

import argparse

import gymnasium
import numpy as np
import torch
from plain_updates import PlainTD3BC

from deft import load_dataset
from deft.data.datasets.dataset import VectorDataset

WINDOW = 50_000  # updates that a mean is over


def make_columns(dataset: VectorDataset) -> tuple[tuple[np.ndarray, ...], np.ndarray, np.ndarray]:
    """Observation, action, reward, next observation and terminal of all transitions; mean and deviation."""
    table, rows = dataset.table, dataset.table.transition_rows()
    observation, following = table.observation[rows].numpy(), table.observation[rows + 1].numpy()
    mean, deviation = observation.mean(0), observation.std(0) + 1e-3
    observation, following = ((values - mean) / deviation for values in (observation, following))
    reward, terminal = (column[rows].float().numpy()[:, None] for column in (table.reward, table.terminated))
    return (observation, table.action[rows].numpy(), reward, following, terminal), mean, deviation


@torch.no_grad()
def play(actor: torch.nn.Module, env: gymnasium.Env, mean: np.ndarray, deviation: np.ndarray, episodes: int) -> float:
    """The mean return."""
    total = 0.0
    for episode in range(episodes):
        observation, _ = env.reset(seed=10_000 + episode)
        done = False
        while not done:
            state = torch.as_tensor((observation - mean) / deviation, dtype=torch.float32)
            observation, reward, terminated, truncated, _ = env.step(actor(state[None])[0].numpy())
            total += float(reward)
            done = terminated or truncated
    return total / episodes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset")
    parser.add_argument("--updates", type=int, default=100_000)
    parser.add_argument("--every", type=int, default=5_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dataset = load_dataset(args.dataset)
    assert isinstance(dataset, VectorDataset)
    assert dataset.env_id is not None
    columns, mean, deviation = make_columns(dataset)
    env = gymnasium.make(dataset.env_id)
    for seed in range(args.seed, args.seed + args.seeds):
        torch.manual_seed(seed)
        np.random.seed(seed)
        learner, scores = PlainTD3BC(columns), []  # type: ignore[arg-type]
        for update in range(1, args.updates + 1):
            learner.update()
            if update % args.every == 0:
                scores.append((update, dataset.score(play(learner.actor, env, mean, deviation, 10))))
                print(f"seed {seed}, {update} updates: {scores[-1][1]:.1f}", flush=True)
        for start in range(0, args.updates, WINDOW):
            part = [score for update, score in scores if start < update <= start + WINDOW]
            print(f"seed {seed}, updates {start} to {start + WINDOW}: {np.mean(part):.1f} ± {np.std(part):.1f}")


if __name__ == "__main__":
    main()
