"""What a report is about, its sections, and the file."""

from __future__ import annotations

import logging
import os
import shlex
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from deft.errors import InputError, RunError, one_line
from deft.evaluation.report import sections
from deft.evaluation.report.comparison import compared_runs, comparison
from deft.evaluation.report.groups import Group, group_runs
from deft.evaluation.report.markup import details, grid, heading, page
from deft.evaluation.report.phases import TITLES, evaluation_charts, phase_facts, phase_folders
from deft.evaluation.report.run_data import ReportedRun
from deft.evaluation.run_groups import SCRIPTED, named_groups
from deft.ownership import keep_foreign, record
from deft.runs.checkpoint import MODEL
from deft.runs.json_files import read_json
from deft.runs.overview import REPORT_FILE

log = logging.getLogger(__name__)
COMPARISON_FILE = "comparison.json"
MARK = "<title>Deft · "  # in every report; another file is not replaced
NAMES = {
    "grpo": "GRPO",
    "dsrl": "DSRL",
    "dt": "Decision Transformer",
    "td3-bc": "TD3+BC",
    "rebrac": "ReBRAC",
    "cal-ql": "Cal-QL",
    "fql": "FQL",
    "fql-online": "FQL online",
    "waypoint-sft": "waypoint SFT",
}


def write_report(words: str | Path | Sequence[str | Path], out: str | Path | None = None) -> Path:
    """Write the report of a run, of several runs, or of a comparison, and return its path.

    Several runs are compared: those that differ in their seed alone form a group, as do those of `LABEL=RUN,RUN`.
    """
    given = [str(words)] if isinstance(words, str | Path) else [str(word) for word in words]
    if not given:
        raise InputError("report: give the directory of a run")
    single = Path(given[0]) if len(given) == 1 and not _labels(given) else None
    folder = Path() if single is None else single if single.is_dir() else single.parent
    if single is not None and (single / MODEL).is_file():  # a checkpoint stands for its run
        single = folder = single.parent
    path = folder / REPORT_FILE if out is None else Path(out)
    command = f"deft report {shlex.join(given)}" + ("" if out is None else f" --out {shlex.quote(str(out))}")
    title, about, content = _single(single, path.parent) if single is not None else _several(given, path.parent)
    _write(page(title, about, {name: one for name, one in content.items() if one}, command), path)
    return path


def attempt_report(folder: Path) -> dict[str, str]:
    """Write the report of a run or a comparison that is complete, and return its path for the results.

    A failure is logged, since what the report is about was written before.
    """
    try:
        return {"report": str(write_report(folder))}
    except Exception as error:
        log.warning("%s: the report was not written: %s", folder, one_line(error))
        return {}


def _single(path: Path, page_folder: Path) -> tuple[str, str, dict[str, str]]:
    """Return title, description and sections of a page about one folder."""
    file = path if path.is_file() else path / COMPARISON_FILE
    found = read_json(file) if file.name == COMPARISON_FILE and file.is_file() else None
    phases = phase_folders(path)
    if phases:
        return _phases(path, phases, found or {}, page_folder)
    try:
        run = ReportedRun.read(path)
    except InputError:
        if not isinstance(found, dict):
            raise
        return _comparison(path.resolve(), found, page_folder)
    group = Group(run.name, [run])
    own = {"Result": heading("Result") + _result(group), **_sections([group], page_folder)}
    played = found if found is not None else read_json(path / "comparison" / COMPARISON_FILE)
    if isinstance(played, dict):
        own["Comparison"] = comparison(played)
    return run.name, _about([run]), own


def _result(group: Group) -> str:
    evaluation = group.first.evaluation
    charts = grid(sections.main_charts([group]), "large") + grid(evaluation_charts(evaluation))
    return sections.overview(group, phase_facts(evaluation)) + charts


def _sections(groups: Sequence[Group], page_folder: Path) -> dict[str, str]:
    """Return the sections after the result."""
    usual, others = sections.metric_charts(groups)
    runs = [run for group in groups for run in group.runs]
    parts = {
        "Videos and images": sections.files(runs if len(runs) == 1 else [group.first for group in groups], page_folder),
        "Training": grid(usual)
        + details(f"All other metrics ({len(others)})", grid(others))
        + (sections.evaluation_table(groups[0]) if len(groups) == 1 else ""),
        "Settings": sections.settings(groups),
        "How to repeat it": sections.reproduction(groups),
    }
    return {name: heading(name) + content for name, content in parts.items() if content}


def _several(words: Sequence[str], page_folder: Path) -> tuple[str, str, dict[str, str]]:
    """Return title, description and sections of a page about several runs."""
    groups = []
    named = named_groups(words)
    for name in SCRIPTED:
        if name in named:
            raise InputError(f"{name}: not a run; `deft compare` plays it beside runs, and writes a report")
    singles = {label: names for label, names in named.items() if label not in _labels(words)}
    runs = [ReportedRun.read(_run_folder(name)) for names in singles.values() for name in names]
    groups = group_runs(runs)
    groups += [
        Group(label, [ReportedRun.read(_run_folder(name)) for name in names])
        for label, names in named.items()
        if label not in singles
    ]
    every = [run for group in groups for run in group.runs]
    title = groups[0].label if len(groups) == 1 else " against ".join(group.label for group in groups[:4])
    return title, _about(every), _compared(groups, page_folder)


def _compared(groups: Sequence[Group], page_folder: Path, title: str = "Result") -> dict[str, str]:
    """Return the sections about groups of runs; `title` is that of the first."""
    if len(groups) == 1 and len(groups[0].runs) == 1:
        result = _result(groups[0])
    elif len(groups) == 1:
        result = sections.overview(groups[0]) + grid(sections.main_charts(groups), "large")
    else:
        result = sections.warnings(groups) + sections.group_table(groups) + grid(sections.main_charts(groups), "large")
    note = "Bands are 95 % intervals over seeds by Student's t, of two seeds their range; pale lines: single runs."
    lead = note if any(len(group.runs) > 1 for group in groups) else ""
    return {title: heading(title, lead) + result, **_sections(groups, page_folder)}


def _labels(words: Sequence[str]) -> set[str]:
    return {word.partition("=")[0] for word in words if "=" in word and not Path(word).exists()}


def _run_folder(name: str) -> Path:
    path = Path(name)
    return path.parent if (path / MODEL).is_file() else path


def _comparison(path: Path, found: Mapping[str, Any], page_folder: Path) -> tuple[str, str, dict[str, str]]:
    """Return title, description and sections of a page about a comparison, with the runs that are still there."""
    section = comparison(found)
    if not section:
        raise InputError(f"{path}: not a comparison that `deft compare` wrote")
    groups = []
    for label, folders in compared_runs(found).items():
        runs = [ReportedRun.read(Path(folder).parent) for folder in folders if Path(folder).parent.is_dir()]
        groups += [Group(label, runs)] if runs else []
    parts = _compared(groups, page_folder, "Training runs") if groups else {}
    rows: dict[str, Any] = next(iter(found.get("columns", {}).values()), {})
    title = " against ".join(list(rows)[:4]) or path.name
    return title, "Comparison of policies on the same episodes", {"Comparison": section, **parts}


def _phases(
    path: Path, folders: Mapping[str, Path], found: Mapping[str, Any], page_folder: Path
) -> tuple[str, str, dict[str, str]]:
    """Return title, description and sections of a page about the phases of `deft train all`."""
    parts = {"Before and after": comparison(found) if found else ""}
    for phase, folder in folders.items():
        group = Group(phase, [ReportedRun.read(folder)])
        title, lead = TITLES[phase]
        rest = _sections([group], page_folder)
        folded = "".join(
            content if name == "Videos and images" else details(name, content) for name, content in rest.items()
        )
        parts[title] = heading(title, lead) + f"<p>{sections.status_line(group.runs)}</p>" + _result(group) + folded
    return path.resolve().name, "F1 training in phases", parts


def _named(run: ReportedRun) -> str:
    """Return what was trained: `PPO in CartPole-v1`."""
    if run.kind in TITLES:
        return TITLES[run.kind][0]
    name = NAMES.get(run.kind, run.kind.upper() if len(run.kind) <= 4 else run.kind)
    return f"{name} · {run.subject}" if run.subject else name


def _about(runs: Sequence[ReportedRun]) -> str:
    names = dict.fromkeys(_named(run) for run in runs)
    return f"{escape('; '.join(names))} {sections.status_line(runs)}"


def _write(text: str, path: Path) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        if path.is_dir():
            raise InputError(f"--out {path}: is a folder; name a file, as in {path / REPORT_FILE}")
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_file() and MARK not in path.read_text(encoding="utf-8", errors="replace")[:1000]:
            keep_foreign(path)
            if path.exists():
                raise InputError(f"{path}: exists and is no report of Deft; give another file with --out")
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
        record(path)
    except OSError as error:
        raise RunError(f"{path}: cannot be written: {error.strerror or error}") from error
