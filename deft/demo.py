"""`make demo`, `make phases` and `make reach`: short runs on the embedded environments.

`python -m deft.demo` improves a policy that ships with Deft by RL on this machine, and shows it before and after;
`python -m deft.demo phases` trains the three phases of F1 and writes an HTML report; `python -m deft.demo reach` trains
PPO and compares it with a random policy.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from deft.config.command_settings import CompareRunsConfig
from deft.config.loading import load_config, replace
from deft.config.output_base import output_base
from deft.config.rl_yaml import read_phase_config
from deft.errors import DeftError
from deft.evaluation.compare import compare_runs
from deft.evaluation.evaluate import evaluate_run
from deft.evaluation.report import COMPARISON_FILE, write_report
from deft.evaluation.side_by_side import record_side_by_side
from deft.evaluation.success import interval_text
from deft.models.f1.loading import default_teacher
from deft.models.vla.loading import PROVENANCE, shipped_policy
from deft.runs.json_files import write_json
from deft.training.phases.all_phases import train_all
from deft.training.run import train

EPISODES = 100
VIDEO_EPISODES = 6
HELD_OUT_SEED = 1_000_000  # not used in training or its evaluations
RESULTS_FILE = "demo.json"
INTRODUCTION = (
    "A robot arm picks up one of two objects: the one that the instruction names. Its policy (vla-tiny, {parameters:,} "
    "parameters) reads two cameras, the instruction and its joints. It ships with Deft, trained by a short imitation "
    "(SFT) of {demonstrations:,} noisy demonstrations. Now PPO trains it on this machine."
)
PRIVILEGES = (
    "Training uses what a simulator has and a robot lacks: a dense reward, which trains control, and object positions "
    "as labels of the images, which train the vision encoder on every new scene. Most of the gain comes from these "
    "labels. When the policy plays, it reads only cameras, instruction and joints."
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo that the command line names, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m deft.demo", description="Short runs on the embedded environments.")
    parser.add_argument("demo", nargs="?", choices=("improve", "phases", "reach"), default="improve")
    parser.add_argument("--seed", type=int, default=0, help="of `improve`")
    parser.add_argument("--steps", type=int, help="env steps of `improve`; by default those of the preset")
    parser.add_argument("--episodes", type=int, default=EPISODES, help="of each evaluation of `improve`")
    parser.add_argument("--output-dir", type=Path, help="of `improve`")
    given = parser.parse_args(arguments)
    stamp = f"{datetime.now():%Y%m%d-%H%M%S}"
    console = Console()
    try:
        if given.demo == "improve":
            root = given.output_dir or output_base() / f"demo-{stamp}"
            improve(console, root, given.seed, given.steps, given.episodes)
        else:
            (phases if given.demo == "phases" else reach)(console, stamp)
    except DeftError as error:
        print(f"deft: {error}", file=sys.stderr)
        return error.exit_status
    return 0


def improve(console: Console, root: Path, seed: int = 0, steps: int | None = None, episodes: int = EPISODES) -> None:
    """Evaluate the policy that ships with Deft, train it with PPO, evaluate it again, and record a video of both."""
    run = root / "ppo"
    config = replace(load_config("tabletop-demo"), output_dir=str(run), seed=seed)
    config = replace(config, model_path=str(shipped_policy()))
    if steps is not None:
        config = replace(config, **{"trainer.total_timesteps": steps})
    kwargs = {**config.env.kwargs, "observation": "images"}  # no policy that plays gets labels
    console.print(INTRODUCTION.format(**_provenance()), highlight=False)
    spent: dict[str, float] = {}

    with _step(console, spent, "1/4", "before", f"the policy plays {episodes} scenes that training does not contain"):
        before = evaluate_run(shipped_policy(), episodes=episodes, env_kwargs=kwargs)
    console.print(f"success {before['success_rate']:.0%} ({interval_text(before)})", highlight=False)

    timesteps = config.trainer.total_timesteps
    with _step(console, spent, "2/4", "train", f"PPO, {timesteps:,} env steps in {config.env.num_envs} environments"):
        summary = train(config)
    speed = summary["timesteps"] / summary["seconds"]
    console.print(f"{summary['timesteps']:,} env steps in {summary['seconds']:.0f} s: {speed:.0f} per second")

    with _step(console, spent, "3/4", "after", f"both policies play the same {episodes} scenes"):
        runs = {"before": str(shipped_policy()), "after": str(run)}
        compared = compare_runs(
            CompareRunsConfig(
                runs=tuple(f"{label}={run}" for label, run in runs.items()),
                episodes=episodes,
                env_kwargs=kwargs,
                split=("train",),
                out=str(run / "comparison"),
            )
        )
    with _step(console, spent, "4/4", "video", f"before and after in the first {VIDEO_EPISODES} of these scenes"):
        video = record_side_by_side(runs, run / "videos" / "before_after.mp4", VIDEO_EPISODES, env_kwargs=kwargs)

    rows = compared["columns"]["train"]
    gain, (low, high) = rows["after"]["difference"], rows["after"]["difference_interval"]
    cells = [
        [label, f"{values['success_rate']:.0%}", interval_text(values), f"{values['mean_length']:.0f}"]
        for label, values in rows.items()
    ]
    cells.append(["difference", f"{100 * gain:+.0f} points", f"{100 * low:+.1f} to {100 * high:+.1f}", ""])
    columns = ["", "success", "95 % interval", "mean length in steps"]
    console.print(table(f"{episodes} new scenes, the same before and after RL", columns, cells))
    console.print(PRIVILEGES, highlight=False)
    results = {"seed": seed, "timesteps": summary["timesteps"], "seconds": spent, "steps_per_second": speed, **rows}
    write_json(results, root / RESULTS_FILE)
    console.print(f"done in {sum(spent.values()):.0f} s")
    shown: dict[str, object] = {"page": write_report(run), "video": video, "results": root / RESULTS_FILE, "run": run}
    shown["continue"] = f"deft train --resume {run} --total_timesteps {2 * timesteps}"
    for name, value in shown.items():
        console.print(f"{name + ':':10}{value}", highlight=False, soft_wrap=True)


def _provenance() -> dict[str, Any]:
    """Return how the shipped policy was trained, as its own file records it."""
    found: dict[str, Any] = json.loads((shipped_policy() / PROVENANCE).read_text(encoding="utf-8"))
    return found


@contextmanager
def _step(console: Console, spent: dict[str, float], number: str, name: str, text: str) -> Iterator[None]:
    """Print the title of a step, and measure its seconds."""
    console.rule(f"{number} {name}: {text}", align="left")
    started = time.monotonic()
    yield
    spent[name] = round(time.monotonic() - started, 1)


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
