"""Draws what `bakeoff.py` found: success against env steps, and against minutes.

python benchmarks/bakeoff_picture.py outputs/bakeoff/results.json --out bakeoff.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np

mpl.use("Agg")
from matplotlib import pyplot as plt


def curves(found: dict[str, Any]) -> np.ndarray:
    """Points [seeds, marks, 3] of a method: env steps, minutes, success; the marks that all seeds have."""
    points = [one["points"] for one in found.values()]
    length = min(map(len, points))
    return np.array([one[:length] for one in points], dtype=float)


def draw(results: dict[str, Any], path: Path) -> None:
    """Draw the mean over seeds of every method, and the range of its seeds."""
    figure, panels = plt.subplots(1, 2, figsize=(11, 5), sharey=True)
    colours = plt.get_cmap("tab10")
    for index, (name, found) in enumerate(results["methods"].items()):
        points, colour = curves(found), colours(index % 10)
        success = 100 * points[..., 2]
        for axes, x in ((panels[0], points[..., 0] / 1e3), (panels[1], points[..., 1])):
            style = ".-" if points.shape[1] > 2 else ".:"  # nothing was evaluated on the way
            axes.plot(x.mean(0), success.mean(0), style, color=colour, label=results["words"][name])
            axes.fill_between(x.mean(0), success.min(0), success.max(0), color=colour, alpha=0.12, linewidth=0)
    panels[0].set(xlabel="thousand env steps, demonstrations included", ylabel="success in %", ylim=(0, 102))
    panels[1].set(xlabel="minutes, with demonstrations and SFT")
    for axes in panels:
        axes.grid(axis="y", alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    lines = sorted(panels[1].get_lines(), key=lambda line: -line.get_ydata()[-1])  # the highest first
    panels[1].legend(handles=lines, loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8, frameon=False)
    figure.suptitle(f"tabletop, {results['task']}: {results['observation']}", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="?", default=Path("outputs/bakeoff/results.json"))
    parser.add_argument("--out", type=Path, default=Path("bakeoff.png"))
    arguments = parser.parse_args()
    draw(json.loads(arguments.results.read_text()), arguments.out)
    print(f"written: {arguments.out}")


if __name__ == "__main__":
    main()
