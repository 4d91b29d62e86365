"""`make reach`: train PPO on the embedded environment and compare it with a random policy."""

from __future__ import annotations

import sys
from datetime import datetime
from pathlib import Path

from rich.console import Console
from rich.table import Table

from deft.config.loading import find_config, load_config, replace
from deft.errors import DeftError
from deft.evaluation.evaluate import evaluate_run
from deft.training.run import train

EPISODES = 100
HELD_OUT_SEED = 1_000_000  # not used in training or its evaluations


def main() -> int:
    """Train, evaluate on held-out episodes, record a video, and print a table and the paths."""
    console = Console()
    run_dir = Path("outputs") / f"reach-{datetime.now():%Y%m%d-%H%M%S}"
    config = replace(load_config(find_config("demo")), output_dir=str(run_dir))
    console.print(
        f"Deft trains PPO for {config.trainer.total_timesteps:,} steps in {config.env.id}: a robot arm on a table, "
        "with an instruction that names one of two coloured targets."
    )
    try:
        summary = train(config)
        video = run_dir / "videos" / "reach.mp4"
        trained = evaluate_run(run_dir, episodes=EPISODES, seed=HELD_OUT_SEED, video=video)
        random = evaluate_run(run_dir, episodes=EPISODES, seed=HELD_OUT_SEED, random_policy=True)
    except DeftError as error:
        print(f"deft: {error}", file=sys.stderr)
        return error.exit_status
    table = Table(title=f"{EPISODES} held-out episodes, the same for both")
    for heading in ("policy", "mean return", "success"):
        table.add_column(heading, justify="left" if heading == "policy" else "right")
    for name, results in (("random actions", random), ("PPO", trained)):
        table.add_row(
            name, f"{results['mean_reward']:.2f} ± {results['std_reward']:.2f}", f"{results['success_rate']:.0%}"
        )
    console.print(table)
    console.print(f"trained in {summary['seconds']:.0f} s")
    console.print(f"run directory: {run_dir}")
    console.print(f"video:         {video}")
    for path in summary["plots"]:
        console.print(f"plot:          {path}")
    console.print(f"evaluate:      deft evaluate {run_dir}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
