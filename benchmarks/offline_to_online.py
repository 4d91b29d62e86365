"""Offline to online: IQL or CQL on a dataset, then SAC and PPO from that policy, with the score along the way.

For each seed: one offline run, then one online run of each algorithm from it, evaluated at step 0 and at every tenth of
the way. Prints the score at the start, the lowest and the last, and draws the curves.

    python benchmarks/offline_to_online.py --dataset hopper-medium-v2 --offline cql --updates 100000 --steps 200000 \
        --seeds 3 --jobs 3 --plot docs/pictures/offline_to_online.png
"""

from __future__ import annotations

import argparse
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from common import print_machine, print_table, read_metrics, run_deft, write_json

POINTS = 10
# What holds the start: critics that have learned from the policy before it moves, a slow policy, and an anchor. What
# holds the end: an anchor that never lets go altogether, and a policy that comes to rest.
SAC = ["--num_envs", 8, "--learning_starts", 5_000, "--updates_per_step", 0.5, "--critic_warmup", 2_500]
SAC += ["--policy_learning_rate", 6e-5, "--learning_rate_schedule", "cosine"]
SAC += ["--anchor_coef", 0.1, "--anchor_half_life", 7_500, "--anchor_floor", 0.001]
ONLINE = {
    "sac": SAC,
    "sac+data": SAC,
    "ppo": ["--num_envs", 8, "--rollout_steps", 256, "--batch_size", 256, "--learning_rate", 1e-4, "--value_warmup", 5],
}


def run_seed(arguments: argparse.Namespace, seed: int, folder: Path) -> list[dict[str, Any]]:
    """The offline run of a seed and what each online algorithm makes of it."""
    from deft import load_dataset
    from deft.data.datasets.dataset import normalized_score

    dataset = load_dataset(arguments.dataset)
    references, env = dataset.reference_returns, arguments.env or dataset.env_id
    dataset.close()
    common = ["--seed", seed, "--device", arguments.device, "--threads", 1, "--eval_episodes", arguments.episodes]
    source = folder / f"{arguments.offline}-{seed}"
    offline = ["--dataset", arguments.dataset, "--num_epochs", 1, "--updates_per_epoch", arguments.updates]
    offline += ["--eval_freq", 1, "--save_freq", 0]
    run_deft(["train", arguments.offline, *offline, *common, "--output_dir", source])
    results = []
    for name in arguments.online:
        run_dir = folder / f"{name}-{seed}"
        flags = ["--model_path", source, "--env", env, "--total_timesteps", arguments.steps, *ONLINE[name]]
        flags += ["--eval_freq", arguments.steps // POINTS, "--save_freq", 0, *common]
        flags += ["--prior_data", arguments.dataset] if "+" in name else []
        run_deft(["train", name.partition("+")[0], *flags, "--output_dir", run_dir])
        lines = read_metrics(run_dir, "evaluation")
        curve = [(line["step"], normalized_score(line["mean_reward"], reference_returns=references)) for line in lines]
        results.append({"online": name, "seed": seed, "curve": curve})
    return results


def draw(results: list[dict[str, Any]], path: str) -> None:
    """One line a run, one colour an algorithm."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for result in results:
        steps, scores = zip(*result["curve"], strict=True)
        colour = f"C{list(ONLINE).index(result['online'])}"
        axes.plot(steps, scores, color=colour, label=result["online"] if result["seed"] == 0 else None)
    axes.set_xlabel("env steps online")
    axes.set_ylabel("normalised score")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Run all seeds, print the table, draw the curves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default="hopper-medium-v2")
    parser.add_argument("--env", help="by default the dataset's own")
    parser.add_argument("--offline", default="iql", choices=("iql", "cql", "td3-bc", "sft"))
    parser.add_argument("--updates", type=int, default=100_000)
    parser.add_argument("--online", nargs="+", default=["sac+data", "ppo"], choices=ONLINE)
    parser.add_argument("--steps", type=int, default=200_000)
    parser.add_argument("--episodes", type=int, default=50)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1, help="seeds at a time")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--plot", help="draw the curves into this file")
    parser.add_argument("--json", help="write the figures here")
    arguments = parser.parse_args()
    print_machine()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(arguments.jobs) as pool:
        work = [pool.submit(run_seed, arguments, seed, Path(folder)) for seed in range(arguments.seeds)]
        results = [result for job in work for result in job.result()]
    rows = []
    for result in results:
        scores = [score for _, score in result["curve"]]
        rows.append([result["online"], result["seed"], *(f"{s:.1f}" for s in (scores[0], min(scores), scores[-1]))])
    print_table([f"{arguments.offline} →", "seed", "start", "lowest", "last"], rows)
    if arguments.plot:
        draw(results, arguments.plot)
    write_json(arguments.json, {"results": results})


if __name__ == "__main__":
    main()
