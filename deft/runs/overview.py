"""What a run has done, read from its directory: the rows of `deft runs`, and the texts around `deft train`.

Nothing here imports torch, so that `deft runs` and the first line of `deft train` are quick. Of a long metrics file
only the ends are read.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import logging
import os
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

from deft.config.loading import read_mapping, to_dict
from deft.config.output_base import output_base
from deft.config.training import Training, config_of_run, kind_of_file
from deft.errors import InputError, one_line
from deft.runs.json_files import read_json
from deft.runs.record import COMPLETE, METRICS_FILE, RECORD_FILE

log = logging.getLogger(__name__)
FINISHED, RUNNING, KILLED, UNKNOWN = "finished", "running", "killed", "unknown"
"""States besides `stopped` and `failed`: killed if a process ended without a record, unknown without run.json."""
BEST = "best"  # the link to the best checkpoint
REPORT_FILE = "report.html"  # of `deft.evaluation.report`
END_BYTES = 4_000_000  # how much is read at each end of a metrics file
RETURNS = {
    "evaluation": ("mean_reward", "success_rate", "normalized_score"),
    "update": ("rollout/mean_reward", "rollout/success_rate"),
}
LOSSES = {"evaluation": (), "update": ("val_loss", "loss", "q_loss", "train/reward", "train/wm_acc_mean", "train/loss")}
"""What is read of each type of line: losses where there are no returns."""
LESS_IMPORTANT = ("changed", "on", "training")  # columns of the table of runs, in the order in which they are left out
PHASES = ("teacher", "student", "adversarial")


class Reading(NamedTuple):
    """A value and the step at which it was logged."""

    step: int
    value: float


@dataclasses.dataclass(frozen=True)
class Overview:
    """A run: what it trains and where, how far it is, and the first and the last value of what was measured."""

    directory: Path
    training: str
    subject: str
    state: str
    step: int
    total: int | None
    unit: str
    first_step: int
    """At which the last session began."""
    seconds: float | None
    """Of the last session."""
    steps_per_second: float | None
    changed: float
    """Seconds since 1970."""
    measures: dict[str, tuple[Reading, Reading]]
    config: Mapping[str, Any]

    def latest(self, name: str) -> float | None:
        """The last value of a measure: of the evaluations, or else of the training episodes."""
        found = self.measures.get(f"evaluation {name}") or self.measures.get(f"training {name}")
        return found[1].value if found else None

    def row(self) -> dict[str, Any]:
        """Return what `deft runs --json` prints."""
        return {
            "run": str(self.directory),
            "training": self.training,
            "subject": self.subject,
            "state": self.state,
            "step": self.step,
            "total": self.total,
            "unit": self.unit,
            "mean_reward": self.latest("mean_reward"),
            "success_rate": self.latest("success_rate"),
            "changed": datetime.fromtimestamp(self.changed).astimezone().isoformat(timespec="seconds"),
        }


def find_runs(root: Path) -> list[Overview]:
    """Return the runs in a directory and below it, the one that changed last first."""
    if not root.is_dir():
        what = "not a directory" if root.exists() else "no such directory"
        raise InputError(f"{root}: {what}; give one that holds runs, or train one")
    found = []
    for place, folders, files in os.walk(root):
        if RECORD_FILE in files or METRICS_FILE in files:
            folders.clear()
            try:
                run = read_overview(Path(place))
            except (InputError, OSError, ValueError, TypeError, KeyError, AttributeError) as error:
                reason = error if isinstance(error, InputError) else one_line(error)
                log.warning("%s is not listed, since its files are damaged: %s", place, reason)
                continue
            found += [run] if run is not None else []
        folders[:] = [name for name in folders if not name.startswith(".")]
    return sorted(found, key=lambda run: -run.changed)


def read_overview(directory: Path) -> Overview | None:
    """Return what a run directory holds; None if it has no settings, and so is not a run of Deft."""
    source = next((file for name in ("config.yaml", "config.json") if (file := directory / name).is_file()), None)
    if source is None:
        return None
    config, kind, record = read_mapping(source), kind_of_file(source), read_json(directory / RECORD_FILE)
    record = record if isinstance(record, dict) else {}
    session: dict[str, Any] = (record.get("sessions") or [{}])[-1]
    path = directory / METRICS_FILE
    first, last = list(_lines(path)), list(_lines(path, backwards=True))
    measures = _measures(first, last, RETURNS) or _measures(first, last, LOSSES)
    step = session.get("last_step")
    ended, started = session.get("ended"), session.get("started")
    seconds = ended - started if ended and started else None
    is_measured = bool(seconds) and step is not None and step > session["first_step"]
    return Overview(
        directory,
        kind or str(_at(config, "algorithm", "name") or config.get("algorithm") or UNKNOWN),
        _subject(config),
        _state(directory, session),
        step if step is not None else last[0]["step"] if last else 0,
        int(record["total"]) if record.get("total") else None,
        record.get("unit", "steps"),
        session.get("first_step") or 0,
        seconds,
        (step - session["first_step"]) / seconds if is_measured else None,
        ended or (path if path.exists() else source).stat().st_mtime,
        measures,
        config,
    )


def _at(config: Mapping[str, Any], section: str, name: str) -> Any:
    """Return a setting of a section; None where there is neither."""
    values = config.get(section)
    return values.get(name) if isinstance(values, Mapping) else None


def _subject(config: Mapping[str, Any]) -> str:
    """Return the environment that a run trains in, or its dataset."""
    names = [_at(config, "env", "id"), _at(config, "dataset", "path"), _at(config, "environment", "task_name")]
    names += [config.get("dataset"), *(config["env"] if isinstance(config.get("env"), list) else [])]
    return next((name for name in names if isinstance(name, str)), "-")


def _state(directory: Path, session: Mapping[str, Any]) -> str:
    if not session:
        return UNKNOWN
    if session.get("status"):
        return FINISHED if session["status"] == COMPLETE else str(session["status"])
    return RUNNING if is_locked(directory) else KILLED


def is_locked(directory: Path) -> bool:
    """Whether a process trains in a run directory (`checkpoint.folder_lock`)."""
    folder = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(folder)
    return False


# ---------------------------------------------------------------------------------------------------- the metrics file


def _lines(path: Path, backwards: bool = False) -> Iterator[dict[str, Any]]:
    """Yield the updates and evaluations at one end of a metrics file, from that end; incomplete lines are left out."""
    if not path.is_file():
        return
    with open(path, "rb") as file:
        if backwards:
            file.seek(max(0, path.stat().st_size - END_BYTES))
        text = file.read(END_BYTES)
    lines = text.split(b"\n")
    for line in reversed(lines) if backwards else lines:
        if b'"type": "episode"' in line:
            continue
        try:
            found = json.loads(line)
        except ValueError:
            continue
        if isinstance(found, dict) and found.get("type") in RETURNS:
            yield found


def _measures(
    first: Sequence[dict[str, Any]], last: Sequence[dict[str, Any]], names: Mapping[str, Sequence[str]]
) -> dict[str, tuple[Reading, Reading]]:
    """Return the first and the last value of each measure that there is; both sequences start at their end."""
    found = {}
    for kind, wanted in names.items():
        for name in wanted:
            ends = [_first_reading(lines, kind, name) for lines in (first, last)]
            if ends[0] is not None and ends[1] is not None:
                label = name.removeprefix("rollout/").removeprefix("train/")
                found[f"{'training' if kind == 'update' else kind} {label}"] = (ends[0], ends[1])
    return found


def _first_reading(lines: Iterable[dict[str, Any]], kind: str, name: str) -> Reading | None:
    of_kind = (line for line in lines if line["type"] == kind and line.get(name) is not None)
    return next((Reading(int(line["step"]), float(line[name])) for line in of_kind), None)


# ------------------------------------------------------------------------------------------------------------- as text


def runs_table(runs: Iterable[Overview], width: int = 0) -> str:
    """Return a table of runs; where it is wider than the terminal, without the columns in `LESS_IMPORTANT`."""
    rows: list[tuple[str, ...]] = [("run", "training", "on", "state", "progress", "return", "success", "changed")]
    for run in runs:
        share = f" ({min(1.0, run.step / run.total):.0%})" if run.total else ""
        numbers = [run.latest("mean_reward"), run.latest("success_rate")]
        rows.append(
            (
                *(str(run.directory), run.training, run.subject, run.state, f"{run.step:,} {run.unit}{share}"),
                *("-" if number is None else f"{number:.4g}" for number in numbers),
                f"{datetime.fromtimestamp(run.changed):%Y-%m-%d %H:%M}",
            )
        )
    table = _columns(rows)
    for name in LESS_IMPORTANT:
        if width and max(map(len, table.splitlines())) > width:
            column = rows[0].index(name)
            rows = [(*row[:column], *row[column + 1 :]) for row in rows]
            table = _columns(rows)
    return table


def _columns(rows: list[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def start_line(training: Training) -> str:
    """Return what starts and where, from the settings alone: the first line of `deft train`."""
    settings = to_dict(training.config)
    own = settings.get(training.name, settings)  # of a phase, whose directory is in its section
    start = settings.get("run", settings)  # of a phase, a section too
    verb, others, place = "starting", "", own.get("output_dir") or f"a new directory in {output_base()}"
    if start.get("resume") is not None:
        resumed, source = config_of_run(Path(start["resume"])), training.source
        verb, place = "resuming", own.get("output_dir") or (resumed.parent if resumed else start["resume"])
        if source is not None and source != resumed:
            others = f" with the settings of {source}, not those of {start['resume']}"
    elif start.get("auto_resume"):
        verb = "starting or resuming"
    return f"{verb} {_what(training.name, _subject(settings))} in {place}{others}"


def _what(training: str, subject: str) -> str:
    return training if subject == "-" else f"{training} on {subject}"


def summary(run: Overview) -> str:
    """Return what a person wants to know at the end of a run: first and last values, and what to do next."""
    part = f", the last {run.step - run.first_step:,}" if run.first_step else ""  # of a run that was resumed
    took = "" if run.seconds is None else f"{part} in {timedelta(seconds=round(run.seconds))}"
    rate = "" if run.steps_per_second is None else f" ({run.steps_per_second:,.4g} {run.unit}/s)"
    best = run.directory / BEST
    chosen = f" (best: {best.readlink()})" if best.is_symlink() else ""
    lines = [
        f"{_what(run.training, run.subject)} {run.state}: {run.step:,} {run.unit}{took}{rate}",
        f"run: {run.directory}{chosen}",
    ]
    if (run.directory / REPORT_FILE).is_file():
        lines.append(f"report: {run.directory / REPORT_FILE}")
    rows: list[tuple[str, ...]] = []
    for name, (first, last) in run.measures.items():
        before = (f"{first.value:.4g}", "→") if last.step > first.step else ("", "")
        steps = f"{first.step:,} → {last.step:,}" if last.step > first.step else f"{last.step:,}"
        rows.append((f"  {name}", *before, f"{last.value:.4g}", f"({run.unit} {steps})"))
    lines += [_columns(rows)] if rows else []
    if commands := next_commands(run):
        lines += ["next:", *(f"  {command}" for command in commands)]
    return "\n".join(lines)


def next_commands(run: Overview) -> list[str]:
    """Return commands that are likely to follow: look at the policy, measure it, train it for longer."""
    place, kind = str(run.directory), run.training
    trust = ["--trust-remote-code"] if _names_code(run.config) else []
    resume = ["train", "--resume", place]
    if kind in PHASES:
        longer = [[*resume, "--num-episodes", str(2 * (run.total or run.step))]]
        commands = [["evaluate", place], *longer]
    elif kind == "waypoint-sft":
        commands = [["train", "waypoint-ppo", "--sft-checkpoint", place]]
    elif kind == "waypoint-ppo":
        sft = run.config.get("sft_checkpoint")
        commands = [["compare", "waypoints", "--sft-checkpoint", str(sft), "--rl-checkpoint", place]] if sft else []
    elif "algorithm" in run.config:
        played = [["evaluate", place, "--episodes", "100"], ["play", "--policy", place, "--video", f"{place}/play.mp4"]]
        commands = [*(played if _at(run.config, "env", "id") else []), [*resume, *_longer(run)]]
    else:
        commands = []
    return [shlex.join(["deft", *command, *trust]) for command in commands]


def _longer(run: Overview) -> list[str]:
    """Return the flags for twice as much training."""
    epochs = _at(run.config, "trainer", "num_epochs")
    if epochs is not None:
        return ["--num-epochs", str(2 * epochs)]
    iterations = _at(run.config, "trainer", "iterations")
    if iterations is not None:
        return ["--iterations", str(2 * iterations)]
    return ["--total-timesteps", str(2 * (run.total or run.step))]


def _names_code(config: Mapping[str, Any]) -> bool:
    """Whether settings name a module, which a later command imports only with --trust-remote-code."""
    env, model = _at(config, "env", "id"), _at(config, "policy", "vla_config")
    model_class = model.get("model_class") if isinstance(model, Mapping) else None
    return (isinstance(env, str) and ":" in env) or (isinstance(model_class, str) and "." in model_class)
