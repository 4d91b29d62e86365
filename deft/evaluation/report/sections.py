"""The sections of a report: what was trained and whether it got better, curves, files, settings, how to repeat it."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from functools import partial, reduce
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from deft.evaluation.plots import PHASE_PANELS, UPDATE_PANELS, Curve, metric_curve, smoothed
from deft.evaluation.report.changes import Change, Measure, changes, common_end, interval_of_line
from deft.evaluation.report.charts import Series, line_chart
from deft.evaluation.report.groups import Group, differences
from deft.evaluation.report.markup import cards, commands, details, media, table
from deft.evaluation.report.run_data import ENDED, KILLED, ReportedRun, duration, is_place, is_seed
from deft.runs.overview import next_commands, read_overview
from deft.runs.record import COMPLETE

MOST_FILES = 4  # images of a run, and videos
DRAWN = ("learning_curve.png", "updates.png", "success.png")  # plots that the page has as charts
RATE_LIMITS = (-0.02, 1.02)
DUPLICATES = ("rollout/mean_reward", "rollout/success_rate")  # of the charts of training episodes
MOST_EVALUATIONS = 40  # rows of a table


# -- the first twenty seconds ----------------------------------------------------------------------------------------


def overview(group: Group, facts: dict[str, str] | None = None) -> str:
    """Return the result and the status of one run, or of repetitions of it."""
    runs, found = group.runs, changes(group.runs)
    shown = "".join(_change_card(change) for change in found)
    seconds = [run.seconds for run in runs if run.seconds]
    rates = [run.rate for run in runs if run.rate]
    figures: dict[str, str] = {}
    if len(runs) > 1:
        seeds = list(dict.fromkeys(str(run.seed) for run in runs if run.seed is not None))
        figures[f"runs, with seed{'s' * (len(seeds) > 1)} {_listed(seeds)}" if seeds else "runs"] = str(len(runs))
    figures[runs[0].unit] = _listed(list(dict.fromkeys(f"{run.step:,}" for run in runs)))
    if seconds:
        figures["of training" if len(runs) == 1 else "of training, mean"] = duration(sum(seconds) / len(seconds))
    if rates:
        figures[f"{runs[0].unit} a second"] = f"{sum(rates) / len(rates):,.4g}"
    if len(runs) == 1 and runs[0].best:
        figures["best checkpoint"] = runs[0].best
    shown = f'<div class="changes">{shown}</div>' if shown else ""
    return warnings([group]) + shown + cards(figures | (facts or {}))


def status_line(runs: Sequence[ReportedRun]) -> str:
    """Return a mark with the status of each run; equal ones once."""
    marks = {run.status_text if len(runs) == 1 else run.status: run.status for run in runs}
    return " ".join(f'<span class="status {kind.split()[0]}">{escape(text)}</span>' for text, kind in marks.items())


def warnings(groups: Sequence[Group]) -> str:
    """Return what a reader must know: unequal lengths, values that were not finite, and a run without metrics."""
    lines = []
    for group in groups:
        end, unit = common_end(group.runs), group.first.unit
        if end is not None:
            ends = _listed([f"{step:,}" for step in sorted({run.step for run in group.runs})])
            lines.append(
                f"the runs of {group.label} end at {ends} {unit}: their results and means are those at {end:,} {unit}, "
                "which all of them have reached"
            )
    runs = [run for group in groups for run in group.runs]
    for run in runs:
        name = f"{run.name}: " if len(runs) > 1 else ""
        total = len(run.lines["update"])
        for metric, (count, first) in list(run.not_finite.items())[:5]:
            lines.append(f"{name}{metric} was not finite in {count} of {total} lines, first at step {first:,}")
        if not any(run.lines.values()):
            lines.append(f"{name}no metrics yet: nothing has been logged")
    return "".join(f'<p class="warning">{escape(line)}</p>' for line in lines)


def _listed(words: Sequence[str]) -> str:
    """`0, 1 and 2`."""
    return " and ".join([part for part in (", ".join(words[:-1]), *words[-1:]) if part])


def _change_card(change: Change) -> str:
    before = f"{_number(change.before.mean, change)} → " if change.before else ""
    intervals = [_interval(one, change) for one in (change.before, change.after) if one is not None]
    lines = [change.where]
    if any(intervals):
        over = change.after.over or ""
        lines.append(f"95 % interval {' → '.join(one or '–' for one in intervals)}, over {over}")
    if change.verdict:
        words = {"better": "better", "worse": "worse", "unclear": "no clear change: the intervals overlap"}
        lines.append(words[change.verdict])
    unit = " %" if change.is_rate else ""
    small = "".join(
        f'<span class="{change.verdict if index == 2 else ""}">{escape(line)}</span>'
        for index, line in enumerate(lines)
    )
    return (
        f'<div class="change {change.verdict}"><em>{escape(change.name)}</em>'
        f"<b>{escape(before)}{_number(change.after.mean, change)}{unit}</b>{small}</div>"
    )


def _number(value: float, change: Change) -> str:
    return f"{100 * value:.1f}" if change.is_rate else f"{value:.4g}"


def _interval(measure: Measure, change: Change) -> str:
    if measure.interval is None:
        return ""
    return " to ".join(_number(bound, change) for bound in measure.interval)


def group_table(groups: Sequence[Group]) -> str:
    """Return one line for each group: its result before and after, time and speed."""
    found = {group.label: changes(group.runs) for group in groups}
    names = list(dict.fromkeys((one.name, one.source) for own in found.values() for one in own))[:4]
    rows = []
    for group in groups:
        own = {(one.name, one.source): one for one in found[group.label]}
        seconds = [run.seconds for run in group.runs if run.seconds]
        rates = [run.rate for run in group.runs if run.rate]
        row: list[Any] = [group.label, ", ".join(str(run.seed) for run in group.runs)]
        row += [_change_cell(own.get(name)) for name in names]
        row += [f"{group.end:,}", ", ".join(dict.fromkeys(run.status for run in group.runs))]
        row += [duration(sum(seconds) / len(seconds)) if seconds else None]
        rows.append([*row, f"{sum(rates) / len(rates):,.4g}" if rates else None])
    heads = [f"{name}, {source}" for name, source in names]
    unit = " or ".join(dict.fromkeys(group.first.unit for group in groups))
    found_table = table(["", "seed", *heads, f"at {unit}", "status", "time", f"{unit} a second"], rows)
    if len({group.end for group in groups}) == 1 or len({group.first.unit for group in groups}) > 1:
        return found_table
    lengths = ", ".join(f"{group.label} at {group.end:,}" for group in groups)
    return f'<p class="lead">These runs differ in length: {escape(lengths)} {unit}.</p>{found_table}'


def _change_cell(change: Change | None) -> str | None:
    if change is None:
        return None
    unit = " %" if change.is_rate else ""
    before = f"{_number(change.before.mean, change)} → " if change.before else ""
    interval = _interval(change.after, change)
    return f"{before}{_number(change.after.mean, change)}{unit}" + (f" ({interval})" if interval else "")


# -- curves ----------------------------------------------------------------------------------------------------------


def main_charts(groups: Sequence[Group]) -> list[str]:
    """Return the charts of returns, success rates and scores, in training and in evaluations."""
    charts = []
    for title, episode_name, line_name in (
        ("Success rate", "success", "success_rate"),
        ("Episode return", "episode_return", "mean_reward"),
        ("Normalised score", None, "normalized_score"),
    ):
        limits = RATE_LIMITS if title == "Success rate" else None
        trained = [] if episode_name is None else _all_series(groups, partial(_training_curve, name=episode_name))
        evaluated = _evaluation_series(groups, line_name)
        if len(groups) == 1:
            for one in trained:
                one.name = "training, running mean"
            for one in evaluated:
                one.name, one.color = "evaluation", 1
            charts.append(line_chart(title, [*trained, *evaluated], _x_label(groups), limits))
            continue
        charts.append(line_chart(f"{title}, training episodes", trained, _x_label(groups), limits))
        charts.append(line_chart(f"{title}, evaluations", evaluated, _x_label(groups), limits))
    return [*charts, *_task_charts(groups)]


def _training_curve(run: ReportedRun, name: str) -> Curve:
    steps, values = metric_curve(run.lines["episode"], name)
    return smoothed(steps, values) if len(steps) else (steps, values)


def _task_charts(groups: Sequence[Group]) -> list[str]:
    """Return the success rate of each task, where the episodes of a single group name them."""
    tasks = dict.fromkeys(line.get("task") for group in groups for run in group.runs for line in run.lines["episode"])
    names = sorted(str(task) for task in tasks if task is not None)
    if len(groups) > 1 or len(names) < 2:
        return []

    def read(run: ReportedRun, task: str) -> Curve:
        return smoothed(*metric_curve([line for line in run.lines["episode"] if line.get("task") == task], "success"))

    found = [groups[0].series(partial(read, task=task), task, index) for index, task in enumerate(names)]
    return [line_chart("Success rate by task", [one for one in found if one], _x_label(groups), RATE_LIMITS)]


def _all_series(groups: Sequence[Group], read: Callable[[ReportedRun], Curve]) -> list[Series]:
    found = [group.series(read, group.label, index) for index, group in enumerate(groups)]
    return [one for one in found if one is not None]


def _evaluation_series(groups: Sequence[Group], name: str) -> list[Series]:
    """Return the evaluations of each group, of several runs at the steps that all have; single ones with intervals."""
    found = []
    for index, group in enumerate(groups):
        curves = [metric_curve(run.lines["evaluation"], name) for run in group.runs]
        curves = [curve for curve in curves if len(curve[0])]
        shared = reduce(np.intersect1d, [steps for steps, _ in curves]) if curves else np.array([])
        series = group.series(partial(_evaluation_curve, name=name, shared=shared), group.label, index)
        if series is not None and len(group.runs) > 1:
            series.members, series.marks = curves, len(shared) > 0 or series.low is None
        if series is not None and len(group.runs) == 1:
            lines = [line for line in group.first.lines["evaluation"] if line.get(name) is not None]
            bounds = [interval_of_line(line, name) or (np.nan, np.nan) for line in lines]
            series = Series(group.label, metric_curve(lines, name), index, marks=True)
            series.low, series.high = np.array(bounds).T
        if series is not None:
            found.append(series)
    return found


def _evaluation_curve(run: ReportedRun, name: str, shared: np.ndarray) -> Curve:
    """Return the evaluations of a run at shared steps; all of them where there are none."""
    steps, values = metric_curve(run.lines["evaluation"], name)
    chosen = np.isin(steps, shared) if len(shared) else np.ones(len(steps), bool)
    return steps[chosen], values[chosen]


def metric_charts(groups: Sequence[Group]) -> tuple[list[str], list[str]]:
    """Return the charts of the updates: the usual ones, and one for each other metric."""
    names = list(dict.fromkeys(name for group in groups for run in group.runs for name in run.metric_names))
    if any(run.lines["episode"] for group in groups for run in group.runs):
        names = [name for name in names if name not in DUPLICATES]
    usual = dict(_panels(names) if len(groups) == 1 else _single(_panels(names)))
    used = {name for own in usual.values() for name in own}
    others = {name: [name] for name in names if name not in used}
    return _charts(groups, usual), _charts(groups, others)


def _charts(groups: Sequence[Group], panels: dict[str, list[str]]) -> list[str]:
    charts = []
    for title, names in panels.items():
        series = []
        for index, name in enumerate(names):
            own = _all_series(groups, lambda run, name=name: metric_curve(run.lines["update"], name))  # type: ignore[misc]
            for one in own if len(groups) == 1 else ():
                one.name, one.color = name.rpartition("/")[2].replace("_", " "), index
            series += own
        charts.append(line_chart(title, series, _x_label(groups)))
    return [chart for chart in charts if chart]


def _panels(names: Sequence[str]) -> Iterable[tuple[str, list[str]]]:
    """Yield titles and metrics of the charts that are always shown: those of the phases, of updates, and losses."""
    left = list(names)
    wanted: list[tuple[str, Sequence[str]]] = list(PHASE_PANELS.items())
    wanted += [
        (title, [name for name in names if name.rpartition("/")[2] == part]) for part, title in UPDATE_PANELS.items()
    ]
    wanted += [(_title(name), [name]) for name in names if name.startswith("reward/") or name.endswith("loss")]
    for title, own in wanted:
        there = [name for name in own if name in left]
        left = [name for name in left if name not in there]
        if there:
            yield title, there


def _single(panels: Iterable[tuple[str, list[str]]]) -> Iterable[tuple[str, list[str]]]:
    for title, names in panels:
        yield from ((title if len(names) == 1 else f"{title}: {_title(name)}", [name]) for name in names)


def _title(name: str) -> str:
    """`reward/memory` as `Reward: memory`, `train/q_loss` as `Q loss`."""
    section, _, last = name.rpartition("/")
    words = last.replace("_", " ")
    return f"Reward: {words}" if section == "reward" else words.capitalize()


def _x_label(groups: Sequence[Group]) -> str:
    units = dict.fromkeys(group.first.unit for group in groups)
    return "environment steps" if list(units) == ["steps"] else " or ".join(units)


def evaluation_table(group: Group) -> str:
    """Return the evaluations during training of a run, the latest ones."""
    lines = group.first.lines["evaluation"][-MOST_EVALUATIONS:]
    if not lines or len(group.runs) > 1:
        return ""
    numbers = dict.fromkeys(
        name for line in lines for name, value in line.items() if isinstance(value, int | float) and "/" not in name
    )
    names = [name for name in numbers if name not in ("type", "step", "time", "iteration", "timesteps")]
    rows = [[f"{line['step']:,}", *(line.get(name) for name in names)] for line in lines]
    selection = ", ".join(dict.fromkeys(str(line["action_selection"]) for line in lines if "action_selection" in line))
    note = f"<p class=lead>Actions: {escape(selection)}.</p>" if selection else ""
    heads = [group.first.unit, *(name.replace("_", " ") for name in names)]
    return details(f"All evaluations during training ({len(lines)})", note + table(heads, rows))


# -- files -----------------------------------------------------------------------------------------------------------


def files(runs: Sequence[ReportedRun], page_folder: Path) -> str:
    """Return the videos (of a run the first and the latest) and the images of runs."""
    chosen: list[tuple[Path, str]] = []
    for run in runs:
        label = f"{run.name}: " if len(runs) > 1 else ""
        videos = _by_time(run.folder, ("videos/*.mp4", "plots/*.mp4", "videos/*.gif"))
        images = _by_time(run.folder, ("samples/*.png", "plots/*.png"))
        images = [path for path in images if path.name not in DRAWN and path.parent.name != "samples"][-MOST_FILES:] + [
            path for path in images if path.parent.name == "samples"
        ][-2:]
        count = MOST_FILES if len(runs) == 1 else 1
        shown = [*videos[:1], *videos[max(1, len(videos) - count + 1) :]] if count > 1 else videos[-1:]
        shown += images if len(runs) == 1 else []
        chosen += [(path, f"{label}{path.parent.name}/{path.name}") for path in shown]
    return media(chosen, page_folder)


def _by_time(folder: Path, patterns: Sequence[str]) -> list[Path]:
    found = [path for pattern in patterns for path in folder.glob(pattern) if path.is_file()]
    return sorted(found, key=lambda path: (path.stat().st_mtime, path.name))


# -- settings and commands -------------------------------------------------------------------------------------------


def settings(groups: Sequence[Group]) -> str:
    """Return the settings: in which the groups differ, which are not the defaults, and all."""
    parts = []
    if len(groups) > 1:
        rows = [[name, *map(_value, values)] for name, values in differences(groups).items()]
        heads = ["setting", *(group.label for group in groups)]
        parts.append("<h3>Differences between the groups</h3>")
        parts.append(table(heads, rows, "settings") if rows else "<p class=lead>None.</p>")
    run = groups[0].first
    own = {name: value for name, value in run.settings.items() if not is_place(name)}
    several = any(len(group.runs) > 1 for group in groups)
    changed = [
        [name, _value(value), _value(run.defaults.get(name))]
        for name, value in own.items()
        if run.defaults and value != run.defaults.get(name) and not (several and is_seed(name))
    ]
    of_first = f" of {groups[0].label}" if len(groups) > 1 else ""
    if changed:
        parts.append(f"<h3>Settings{escape(of_first)} that differ from the defaults</h3>")
        parts.append(table(["setting", "value", "default"], changed, "settings"))
    every = table(["setting", "value"], [[name, _value(value)] for name, value in own.items()], "settings")
    parts.append(details(f"All {len(own)} settings{of_first}", every) if own else "")
    return "".join(parts)


def _value(value: Any) -> str:
    if value is None or value == {} or value == []:
        return "none" if value is None else "empty"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def reproduction(groups: Sequence[Group]) -> str:
    """Return how the runs were started, where, with which versions, and the commands to repeat and resume them."""
    parts = []
    runs = [run for group in groups for run in group.runs]
    rows: dict[str, str] = {}
    others: dict[str, str] = {}
    for group in groups:
        rows |= _labelled_commands(group.first, runs)
        for run in group.runs[1:]:
            others |= _labelled_commands(run, runs)
    if len(runs) > 1:
        words = [
            f"{shlex.quote(group.label)}={','.join(shlex.quote(str(run.folder)) for run in group.runs)}"
            for group in groups
        ]
        rows["compare the policies on the same episodes"] = f"deft compare {' '.join(words)}"
    parts.append(commands(rows))
    parts.append(details(f"Commands of the other runs ({len(runs) - len(groups)})", commands(others)))
    sessions = [(run, session) for run in runs for session in run.sessions]
    if sessions:
        described = [_session(run, session) for run, session in sessions]
        names = dict.fromkeys(name for one in described for name in one)  # runs may count steps and updates
        rows_of = {name: [one.get(name) for one in described] for name in names}
        heads = ["", *(run.name for run, _ in sessions)]
        parts.append(table(heads, [[name, *values] for name, values in rows_of.items()], "facts"))
    return "".join(parts)


def _session(run: ReportedRun, one: dict[str, Any]) -> dict[str, Any]:
    """Return when, where and with what a run was trained, of one start."""
    first, last = one["first_step"], one["last_step"]
    ended = one["status"] or (run.status if one is run.sessions[-1] else KILLED)
    commit = f", commit {one['commit']}" if one["commit"] else ""
    return {
        "started": _clock(one["started"]),
        "ended": f"{_clock(one['ended'])}: {ended}" if one["ended"] else ended,
        run.unit: f"{first:,} to {last:,}" if last is not None else f"from {first:,}",
        "device": one["device"],
        "machine": f"{one['host']}: {one['processor']}, {one['cores']} cores, {one['memory_gib']} GiB, {one['system']}",
        "software": f"Deft {one['deft']}{commit}; Python {one['python']}, torch {one['torch']}",
        "directory": one["directory"],
    }


def _clock(when: float) -> str:
    return f"{datetime.fromtimestamp(when):%Y-%m-%d %H:%M:%S}"


def _labelled_commands(run: ReportedRun, runs: Sequence[ReportedRun]) -> dict[str, str]:
    """Return the commands of one of several runs, labelled with its name, or its path where others have that name."""
    names = [other.name for other in runs]
    label = run.name if names.count(run.name) == 1 else str(run.folder)
    return {f"{label}: {name}" if len(runs) > 1 else name: line for name, line in _commands(run).items()}


def _commands(run: ReportedRun) -> dict[str, str]:
    folder = shlex.quote(str(run.folder))
    found: dict[str, str] = {}
    started = [session["command"] for session in run.sessions if session.get("command")]
    if started:
        found["started as"] = started[0]
    file = next((name for name in ("config.yaml", "config.json") if (run.folder / name).is_file()), None)
    if file is not None:
        found["repeat it"] = f"deft train --config {shlex.quote(str(run.folder / file))} --output-dir NEW_FOLDER"
        if run.checkpoints and run.status not in (COMPLETE, ENDED):
            found["resume it"] = f"deft train --resume {folder}"
    known = read_overview(run.folder)
    following = [] if known is None else next_commands(known)
    if following and run.status in (COMPLETE, ENDED):
        found["what may follow"] = "\n".join(following)
    return found
