"""`report.html`: one page about a run of F1 training, or about all three phases of one, with everything in it.

`deft train all` and `deft report RUN` write it. The page contains its charts, images and videos: it can be
sent by mail and opened without a network. It shows what is in the run folder and computes nothing.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Mapping, Sequence
from datetime import datetime
from html import escape
from pathlib import Path
from typing import Any

from deft.config.loading import read_mapping
from deft.config.rl_yaml import CONFIG_FILE, PHASES, phase_of_file
from deft.errors import InputError, RunError
from deft.evaluation.plots import METRICS_FILE, bar_chart, line_chart, metric_curve, read_lines
from deft.evaluation.world_model import EVALUATION_FILE
from deft.ownership import record
from deft.runs import checkpoint
from deft.runs.directory import ELAPSED
from deft.runs.json_files import read_json

REPORT_FILE = "report.html"
COMPARISON_FILE = "comparison.json"  # of all phases: world models on another explorer's episodes
MOST_IMAGES, MOST_VIDEOS = 2, 2  # of a phase: the latest
LARGEST_FILE = 8 * 2**20  # bytes of an image or video in the page

TITLES = {
    "teacher": ("Phase 1 · Teacher", "A world model learns to predict the wrist camera from random exploration."),
    "student": (
        "Phase 2 · Student",
        "An explorer with the wrist camera alone learns by PPO where the frozen world model is unsure.",
    ),
    "adversarial": (
        "Phase 3 · Adversarial",
        "World model against explorer: one finds what the other cannot predict yet, the other learns it.",
    ),
}
# Charts by the names of their metrics, in this order; names that are not there are left out, the others go below.
PANELS: dict[str, tuple[str, ...]] = {
    "World model: cross-entropy, nats a code": ("train/wm_loss", "train/held_out_loss"),
    "Codes predicted": ("train/wm_acc_mean", "train/copy_acc"),
    "Motion prior: mean pixel error": ("train/motion_loss", "train/copy_loss"),
    "Reward, mean of a step": ("train/reward",),
    "World-model error on the explorer's frames": ("train/wm_error", "train/older_wm_error"),
    "Memory divergence ‖h student − h teacher‖": ("train/memory_divergence",),
    "PPO: entropy": ("ppo/entropy", "train/entropy"),
    "PPO: value loss": ("ppo/value_loss", "train/value_loss"),
    "PPO: approximate KL": ("ppo/approx_kl", "train/approx_kl"),
    "PPO: explained variance": ("ppo/explained_variance", "train/explained_variance"),
}


def write_report(folder: str | Path) -> Path:
    """Write `report.html` into a run folder: of one phase, or of all phases in it (`teacher/`, `student/`, …)."""
    folder = Path(folder)
    runs = phase_runs(folder)
    if not runs:
        raise InputError(_not_reported(folder))
    path = folder / REPORT_FILE
    temporary = folder / f".{REPORT_FILE}.{os.getpid()}"
    try:
        temporary.write_text(page(folder, runs), encoding="utf-8")
        os.replace(temporary, path)
        record(path)
    except OSError as error:
        raise RunError(f"{path}: cannot be written: {error.strerror or error}") from error
    return path


def _not_reported(folder: Path) -> str:
    """Why there is no report on a folder, and what there is instead."""
    covered = f"`deft report` writes a page about runs of {', '.join(PHASES)} and all"
    if not (folder / METRICS_FILE).is_file():
        return f"{folder}: no run in it to report on; {covered}"
    file = folder / CONFIG_FILE
    settings = read_mapping(file).get("algorithm") if file.is_file() else None
    kind = settings["name"] if isinstance(settings, dict) and "name" in settings else "another kind"
    return (
        f"{folder}: a run of {kind}; {covered} so far. For this run: its plots are in {folder / 'plots'}, `tensorboard "
        f"--logdir {folder}` shows its curves, `deft evaluate {folder}` plays its policy, and `deft compare {folder} "
        "ANOTHER_RUN` compares it with another"
    )


def phase_runs(folder: Path) -> dict[str, Path]:
    """The phases' run folders: the folder itself, or those in it."""
    own = phase_of_file(folder / CONFIG_FILE)
    if own in PHASES:
        return {str(own): folder}
    return {phase: folder / phase for phase in PHASES if phase_of_file(folder / phase / CONFIG_FILE) == phase}


def page(folder: Path, runs: Mapping[str, Path]) -> str:
    """The whole page."""
    sections = [_comparison(read_json(folder / COMPARISON_FILE) or {})]
    sections += [_phase(phase, run) for phase, run in runs.items()]
    links = "".join(f'<a href="#{phase}">{escape(TITLES[phase][0])}</a>' for phase in runs)
    name = escape(folder.resolve().name)
    style = Path(__file__).with_name("report.css").read_text(encoding="utf-8")
    written = f"{datetime.now():%Y-%m-%d %H:%M}"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8" />'
        '<meta name="viewport" content="width=device-width, initial-scale=1" />'
        f"<title>Deft · {name}</title><style>{style}</style></head><body>"
        f"<header><div><h1>{name}</h1><p>Deft · F1 training · {written}</p></div><nav>{links}</nav></header>"
        f"<main>{''.join(sections)}</main>"
        f"<footer>Written by <code>deft report {escape(str(folder))}</code>; all of it is in this one file.</footer>"
        "</body></html>\n"
    )


# -- one phase -------------------------------------------------------------------------------------------------------


def _phase(phase: str, run: Path) -> str:
    title, about = TITLES[phase]
    lines = read_lines(run)["update"] if (run / METRICS_FILE).is_file() else []
    evaluation = read_json(run / EVALUATION_FILE) or {}
    main, others = _curves(lines)
    parts = [
        f"<h2>{escape(title)}</h2><p class=lead>{escape(about)}</p>",
        _cards(_facts(phase, run, evaluation)),
        _grid(_evaluation_charts(evaluation)),
        _media(run),
        _grid(main),
    ]
    if others:
        parts.append(f"<details><summary>All other metrics ({len(others)})</summary>{_grid(others)}</details>")
    return f'<section id="{phase}">{"".join(parts)}</section>'


def _facts(phase: str, run: Path, evaluation: Mapping[str, Any]) -> dict[str, str]:
    """The figures at the top of a phase."""
    facts: dict[str, str] = {}
    checkpoints = checkpoint.list_checkpoints(run)
    if checkpoints:
        unit = "iterations" if phase == "adversarial" else "episodes"
        facts[unit] = checkpoints[-1].name.rpartition("-")[2]
        seconds = checkpoint.load_part(checkpoints[-1], checkpoint.METRICS).get(ELAPSED)
        if seconds is not None:
            facts["minutes of training"] = f"{seconds / 60:.1f}"
    if (run / checkpoint.BEST).is_symlink():
        facts["best"] = os.readlink(run / checkpoint.BEST)
    if evaluation.get("checkpoint"):
        facts["evaluated"] = Path(evaluation["checkpoint"]).name
    for name, label, scale, unit in (
        ("wm_acc", "codes predicted", 100.0, " %"),
        ("copy_acc", "by copying", 100.0, " %"),
        ("psnr", "PSNR", 1.0, " dB"),
        ("copy_psnr", "by copying (PSNR)", 1.0, " dB"),
        ("cross_entropy", "cross-entropy", 1.0, " nats"),
    ):
        if evaluation.get(name) is not None:
            facts[label] = f"{scale * evaluation[name]:.3g}{unit}"
    return facts


def _curves(lines: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[str]]:
    """The charts of a run's metrics: those of `PANELS`, and one for each other metric."""
    names = [name for name in dict.fromkeys(name for line in lines for name in line) if "/" in name]
    unit = "iteration" if any(name.startswith("game/") for name in names) else "episodes"
    charts, used = [], set()
    for title, wanted in PANELS.items():
        there = [name for name in wanted if name in names]
        used |= set(there)
        charts.append(line_chart(title, {_label(name): metric_curve(lines, name) for name in there}, unit))
    terms = [name for name in names if name.startswith("reward/") and name not in used]
    used |= set(terms)
    charts += [line_chart(f"Reward: {_label(name)}", {_label(name): metric_curve(lines, name)}, unit) for name in terms]
    others = [line_chart(name, {name: metric_curve(lines, name)}, unit) for name in names if name not in used]
    return [chart for chart in charts if chart], [chart for chart in others if chart]


def _label(name: str) -> str:
    return name.rpartition("/")[2].replace("_", " ")


def _evaluation_charts(evaluation: Mapping[str, Any]) -> list[str]:
    """Ablations, horizons and comparisons out of `evaluation.json`."""
    charts = []
    ablations = evaluation.get("ablations") or {}
    if ablations:
        bars = {"whole": 100 * evaluation["wm_acc"]}
        bars |= {name.replace("_", " "): 100 * found["wm_acc"] for name, found in ablations.items()}
        charts.append(bar_chart("Codes predicted without …, %", bars))
    horizon = evaluation.get("open_loop") or {}
    for title, own, copy in (
        ("Open loop: codes predicted", "wm_acc", "copy_acc"),
        ("Open loop: PSNR, dB", "psnr", "copy_psnr"),
    ):
        if horizon.get(own):
            ahead = list(range(1, len(horizon[own]) + 1))
            curves = {"world model": (ahead, horizon[own]), "last frame seen": (ahead, horizon[copy])}
            charts.append(line_chart(title, curves, "frames ahead"))  # type: ignore[arg-type]
    for title, bars in (evaluation.get("bars") or {}).items():
        charts.append(bar_chart(title, bars))
    return charts


def _media(run: Path) -> str:
    """The latest images and videos, inside the page."""
    parts = []
    images = [*_latest(run / "plots", "held_out*.png", 1), *_latest(run / "samples", "*.png", MOST_IMAGES)]
    for path in images:
        name = escape(f"{path.parent.name}/{path.name}")
        parts.append(
            f'<figure><img alt="{name}" src="{_data_uri(path, "image/png")}" /><figcaption>{name}</figcaption></figure>'
        )
    for path in [*_latest(run / "plots", "*.mp4", 1), *_latest(run / "videos", "*.mp4", MOST_VIDEOS)]:
        name = escape(f"{path.parent.name}/{path.name}")
        video = f'<video controls loop muted playsinline preload="auto" src="{_data_uri(path, "video/mp4")}"></video>'
        parts.append(f"<figure>{video}<figcaption>{name}</figcaption></figure>")
    return f'<div class="media">{"".join(parts)}</div>' if parts else ""


def _latest(folder: Path, pattern: str, count: int) -> list[Path]:
    """The newest files first; not those too large for a page."""
    found = [path for path in folder.glob(pattern) if path.stat().st_size <= LARGEST_FILE]
    return sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)[:count]


def _data_uri(path: Path, kind: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"


# -- all phases ------------------------------------------------------------------------------------------------------


def _comparison(found: Mapping[str, Any]) -> str:
    """The comparison of world models on the held-out episodes of another explorer."""
    if not found:
        return ""
    rows = found["rows"]
    names = list(dict.fromkeys(name for row in rows for name in row["values"]))
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    body = "".join(
        f"<tr><th>{escape(row['name'])}</th>"
        + "".join(f"<td>{_cell(row['values'].get(name))}</td>" for name in names)
        + "</tr>"
        for row in rows
    )
    charts = [bar_chart(title, bars) for title, bars in (found.get("bars") or {}).items()]
    note = f"<p class=lead>{escape(found['note'])}</p>" if found.get("note") else ""
    return (
        f'<section id="comparison"><h2>{escape(found["title"])}</h2>{note}'
        f'<div class="split"><table><thead><tr><th></th>{head}</tr></thead><tbody>{body}</tbody></table>'
        f"{_grid(charts)}</div></section>"
    )


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, list):
        mean = sum(value) / len(value)
        spread = (sum((one - mean) ** 2 for one in value) / len(value)) ** 0.5
        return f"{mean:.4g} ± {spread:.2g}"
    return f"{value:.4g}" if isinstance(value, float) else escape(str(value))


def _cards(facts: Mapping[str, str]) -> str:
    cards = "".join(f"<div><b>{escape(value)}</b><span>{escape(name)}</span></div>" for name, value in facts.items())
    return f'<div class="cards">{cards}</div>' if cards else ""


def _grid(charts: Sequence[str]) -> str:
    shown = "".join(chart for chart in charts if chart)
    return f'<div class="charts">{shown}</div>' if shown else ""
