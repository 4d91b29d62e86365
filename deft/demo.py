"""`make demo` and `make reach`: short runs on the embedded tabletop and on the reach environment.

`python -m deft.demo` trains the three phases of F1 and writes an HTML report; `python -m deft.demo reach` trains PPO
and compares it with a random policy.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path

from rich.console import Console
from rich.table import Table

from deft.config.loading import load_config, replace
from deft.config.output_base import output_base
from deft.config.rl_yaml import read_phase_config
from deft.errors import DeftError
from deft.evaluation.evaluate import evaluate_run
from deft.evaluation.report import COMPARISON_FILE
from deft.models.f1.loading import default_teacher
from deft.training.phases.all_phases import train_all
from deft.training.run import train

EPISODES = 100
HELD_OUT_SEED = 1_000_000  # not used in training or its evaluations


def main() -> int:
    """Run the demo that the command line names, and return the exit status."""
    demo = reach if sys.argv[1:] == ["reach"] else phases
    try:
        demo(Console(), f"{datetime.now():%Y%m%d-%H%M%S}")
    except DeftError as error:
        print(f"deft: {error}", file=sys.stderr)
        return error.exit_status
    return 0


def phases(console: Console, time_stamp: str) -> None:
    """Train the phases in order, and print the results and the path of the report."""
    root = output_base() / f"demo-{time_stamp}"
    config = read_phase_config("phases-demo")
    config.phase, config.all.output_dir = "all", str(root)
    config.model.checkpoint_path = str(default_teacher())
    whole = config.all
    minutes = sum(part or 0.0 for part in (whole.teacher_minutes, whole.student_minutes, whole.adversarial_minutes))
    console.print(
        f"Deft trains a robot that explores a table, in three phases of {minutes:g} minutes in all: a world model that "
        "predicts its camera, an explorer that looks for what it cannot predict, and the two against each other."
    )
    started = time.monotonic()
    results = train_all(config)
    found = json.loads((root / COMPARISON_FILE).read_text(encoding="utf-8"))
    names = list(found["rows"][0]["values"])
    rows = [[row["name"], *(f"{row['values'][name]:.4g}" for name in names)] for row in found["rows"]]
    console.print(table("World models on held-out episodes of another explorer", ["", *names], rows))
    console.print(f"trained and evaluated in {time.monotonic() - started:.0f} s")
    console.print(f"run directory: {root}")
    console.print(f"resume:        deft train all --resume {root}")
    console.print(f"report:        {Path(results['report']).resolve()}")


def reach(console: Console, time_stamp: str) -> None:
    """Train PPO, evaluate on held-out episodes, record a video, and print a table and the paths."""
    run_dir = Path("outputs") / f"reach-{time_stamp}"
    config = replace(load_config("demo"), output_dir=str(run_dir))
    console.print(
        f"Deft trains PPO for {config.trainer.total_timesteps:,} steps in {config.env.id}: a robot arm on a table, "
        "with an instruction that names one of two coloured targets."
    )
    summary = train(config)
    video = run_dir / "videos" / "reach.mp4"
    trained = evaluate_run(run_dir, episodes=EPISODES, seed=HELD_OUT_SEED, video=video)
    random = evaluate_run(run_dir, episodes=EPISODES, seed=HELD_OUT_SEED, random_policy=True)
    rows = [
        [name, f"{results['mean_reward']:.2f} ± {results['std_reward']:.2f}", f"{results['success_rate']:.0%}"]
        for name, results in (("random actions", random), ("PPO", trained))
    ]
    title = f"{EPISODES} held-out episodes, the same for both"
    console.print(table(title, ["policy", "mean return", "success"], rows))
    console.print(f"trained in {summary['seconds']:.0f} s")
    console.print(f"run directory: {run_dir}")
    console.print(f"video:         {video}")
    for path in summary["plots"]:
        console.print(f"plot:          {path}")
    console.print(f"evaluate:      deft evaluate {run_dir}")


def table(title: str, columns: Iterable[str], rows: Iterable[Iterable[str]]) -> Table:
    """Return a table whose first column is aligned to the left and the others to the right."""
    made = Table(title=title)
    for number, name in enumerate(columns):
        made.add_column(name, justify="right" if number else "left")
    for row in rows:
        made.add_row(*row)
    return made


if __name__ == "__main__":
    sys.exit(main())
