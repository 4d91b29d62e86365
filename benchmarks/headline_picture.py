"""Draws what `headline.py` found: success by task, and on the way.

python benchmarks/headline_picture.py outputs/headline/results.json --out headline.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from headline import POLICIES

mpl.use("Agg")
from matplotlib import pyplot as plt

TASKS = ("reach", "pick", "push", "place")
UNSEEN = {"success_rate": float("nan")}  # of a task that a few episodes did not draw
NAMES = {"sft": "SFT", "iql": "IQL", "grpo": "GRPO", "ppo": "PPO", "ppo_iql": "PPO from IQL"}
COLOURS = {"sft": "#9aa0a6", "iql": "#e8a33d", "grpo": "#4a9d6f", "ppo": "#2f6db5", "ppo_iql": "#b5482f"}


def by_task(axes: Any, seeds: list[dict[str, Any]]) -> None:
    """A bar for the mean over the seeds, a dot for each."""
    columns = [seed["taken"]["compare"]["columns"]["train"] for seed in seeds]
    shown = ("sft", "iql", "grpo", "ppo")
    for index, name in enumerate(shown):
        place = POLICIES.index(name)
        found = [list(column.values())[place] for column in columns]
        rows = [[one, *(one["tasks"].get(task, UNSEEN) for task in TASKS)] for one in found]
        values = np.array([[100 * cell["success_rate"] for cell in row] for row in rows])
        x = np.arange(5) + 0.2 * (index - 1.5)
        axes.bar(x, np.nan_to_num(np.nanmean(values, axis=0)), 0.18, color=COLOURS[name], label=NAMES[name])
        axes.plot(np.tile(x, (len(values), 1)), values, ".", color="black", markersize=3)
    axes.set_xticks(range(5), ["all", *TASKS])
    axes.set(ylabel="success in %", ylim=(0, 105), title=f"new scenes, mean of {len(seeds)} seeds")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=len(shown), fontsize=8, frameon=False)


def on_the_way(axes: Any, seeds: list[dict[str, Any]]) -> None:
    """Evaluations while training: each seed thin, their mean at the steps that all have reached."""
    for name in ("ppo", "grpo", "ppo_iql"):
        curves = [np.array(seed["curves"][name]) * [1e-3, 100] for seed in seeds]
        for curve in curves:
            axes.plot(*curve.T, color=COLOURS[name], linewidth=0.6, alpha=0.5)
        steps = np.linspace(0, min(curve[-1, 0] for curve in curves), 50)
        mean = np.mean([np.interp(steps, *curve.T) for curve in curves], axis=0)
        axes.plot(steps, mean, color=COLOURS[name], linewidth=2, label=NAMES[name])
    axes.set(xlabel="thousand env steps", ylim=(0, 105), title="while they learn")
    axes.legend(loc="lower right", fontsize=8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="?", default=Path("outputs/headline/results.json"))
    parser.add_argument("--out", type=Path, default=Path("headline.png"))
    arguments = parser.parse_args()
    seeds = list(json.loads(arguments.results.read_text())["seeds"].values())
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), width_ratios=[3, 2])
    by_task(left, seeds)
    on_the_way(right, seeds)
    for axes in (left, right):
        axes.grid(axis="y", alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(arguments.out, dpi=120)
    print(f"written: {arguments.out}")


if __name__ == "__main__":
    main()
