"""What a report shows of one run, read from its directory: settings, metrics, status, time, files.

Runs of every kind are read here: of an algorithm, of a phase, of waypoints, of the tokenizer. What an earlier version
did not write is left out.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from deft.config.aliases import translate
from deft.config.fields import default_of, setting_names
from deft.config.loading import read_mapping, resolve, to_dict
from deft.config.rl_yaml import PHASES, phase_config, read_phase_config
from deft.config.training import FLAT_TRAINING, kind_of_file
from deft.errors import InputError
from deft.evaluation.plots import METRICS_FILE, read_lines
from deft.evaluation.world_model import EVALUATION_FILE
from deft.runs import checkpoint
from deft.runs.directory import ELAPSED
from deft.runs.json_files import read_json
from deft.runs.overview import is_locked
from deft.runs.record import COMPLETE, FAILED, RECORD_FILE, STOPPED
from deft.runs.waypoint_files import EVAL_METRICS

CONFIG_FILES = ("config.yaml", "config.json")
RUNNING, KILLED, ENDED = "in progress", "killed", "ended"  # beside the status of a session
# Settings that do not change what is learned; runs that differ in them alone, or in the seed, are repetitions.
PLACES = ("output_dir", "resume", "auto_resume", "overwrite")
SEED = "seed"


@dataclass
class ReportedRun:
    """A run directory as a report shows it."""

    folder: Path
    kind: str
    settings: dict[str, Any]
    defaults: dict[str, Any]
    lines: dict[str, list[dict[str, Any]]]
    record: dict[str, Any] = field(default_factory=dict)
    is_running: bool = False

    @classmethod
    def read(cls, folder: Path) -> ReportedRun:
        """Read a run directory; an error if the folder is none."""
        config = next((folder / name for name in CONFIG_FILES if (folder / name).is_file()), None)
        has_metrics = (folder / METRICS_FILE).is_file()
        if config is None and not has_metrics:
            raise InputError(not_a_run(folder))
        kind, settings, defaults = ("run", {}, {}) if config is None else read_settings(config)
        record = read_json(folder / RECORD_FILE)
        lines: dict[str, list[dict[str, Any]]] = read_lines(folder) if has_metrics else {}
        lines["evaluation"] = [*_baseline(folder), *lines.get("evaluation", [])]
        return cls(
            folder,
            kind,
            settings,
            defaults,
            {name: lines.get(name, []) for name in ("update", "episode", "evaluation")},
            record if isinstance(record, dict) else {},
            is_locked(folder),
        )

    @property
    def name(self) -> str:
        """The name of the directory."""
        return self.folder.resolve().name

    @property
    def subject(self) -> str:
        """What it is trained on: the environment, or the dataset."""
        found = [self.settings.get(name) for name in ("dataset.path", "dataset", "env.id", "env")]
        words = ["+".join(map(str, one)) if isinstance(one, list) else str(one) for one in found if one]
        return " → ".join(dict.fromkeys(words))

    @property
    def seed(self) -> Any:
        """The seed of the run, under whatever path it is set."""
        return next((value for name, value in self.settings.items() if is_seed(name)), None)

    @cached_property
    def evaluation(self) -> dict[str, Any]:
        """The results of `deft evaluate` on a phase."""
        found = read_json(self.folder / EVALUATION_FILE)
        return found if isinstance(found, dict) else {}

    # -- progress ----------------------------------------------------------------------------------------------------

    @property
    def sessions(self) -> list[dict[str, Any]]:
        """Each start of the run, as in `run.json`; empty for a run of an earlier version."""
        return self.record.get("sessions", [])

    @property
    def unit(self) -> str:
        """What steps count."""
        if "unit" in self.record:
            return str(self.record["unit"])
        if self.kind in PHASES:
            return "iterations" if self.kind == "adversarial" else "episodes"
        return "updates" if "dataset.path" in self.settings or "dataset" in self.settings else "steps"

    @property
    def total(self) -> int | None:
        """The steps of a complete run, if they are known."""
        return self.record.get("total")

    @cached_property
    def step(self) -> int:
        """The last step that is known of."""
        logged = [line["step"] for lines in self.lines.values() for line in lines[-1:]]
        saved = [checkpoint.step_of(path) for path in checkpoint.list_checkpoints(self.folder)]
        ended = [session["last_step"] for session in self.sessions if session.get("last_step")]
        return int(max([0, *logged, *saved, *ended]))

    @property
    def last_time(self) -> float | None:
        """When something was logged last, in seconds since 1970."""
        return max((lines[-1]["time"] for lines in self.lines.values() if lines and "time" in lines[-1]), default=None)

    @cached_property
    def seconds(self) -> float | None:
        """Seconds of training, of all sessions; of a run without `run.json` between its first and last line."""
        if not self.sessions:
            kept = checkpoint.list_checkpoints(self.folder)[-1:] if self.kind in PHASES else []
            stored = [checkpoint.load_part(path, checkpoint.METRICS).get(ELAPSED) for path in kept]
            times = [line["time"] for lines in self.lines.values() for line in lines if "time" in line]
            return stored[0] if stored and stored[0] is not None else max(times) - min(times) if times else None
        return sum(end - start for start, end in self._spans())

    def _spans(self) -> Iterator[tuple[float, float]]:
        """Start and end of each session; one without an end lasted until its last line."""
        times = [line["time"] for lines in self.lines.values() for line in lines if "time" in line]
        for index, session in enumerate(self.sessions):
            start, end = session["started"], session.get("ended")
            if end is None and index == len(self.sessions) - 1 and self.is_running:
                end = time.time()
            if end is None:
                later = self.sessions[index + 1]["started"] if index + 1 < len(self.sessions) else float("inf")
                end = max((one for one in times if start <= one <= later), default=start)
            yield start, end

    @property
    def rate(self) -> float | None:
        """Steps in a second of training, evaluations included."""
        return self.step / self.seconds if self.seconds and self.step else None

    @property
    def status(self) -> str:
        """How the run is: in progress, complete, stopped, failed, killed; `ended` if nothing is known."""
        if self.is_running:
            return RUNNING
        if not self.sessions:
            return ENDED
        return self.sessions[-1].get("status") or KILLED

    @property
    def status_text(self) -> str:
        """The status in a sentence."""
        of_total = f"{self.step:,} of {self.total:,} {self.unit}" if self.total else f"{self.step:,} {self.unit}"
        reason = self.sessions[-1].get("reason", "") if self.sessions else ""
        if self.status == RUNNING:
            left = (self.total - self.step) / self.rate if self.total and self.rate else None
            return f"in progress: {of_total}" + (f", about {duration(left)} left" if left and left > 0 else "")
        if self.status == KILLED:
            return f"killed: the process ended at about {of_total} without closing the run"
        if self.status in (STOPPED, FAILED):
            return f"{self.status} at {of_total}: {reason}"
        if self.status == COMPLETE and self.total and self.step < self.total:
            return f"complete: ended early, at {of_total}"
        return f"{self.status}: {self.step:,} {self.unit}"

    # -- metrics -----------------------------------------------------------------------------------------------------

    @cached_property
    def metric_names(self) -> list[str]:
        """The metrics of the updates, in the order in which they were first logged."""
        names = dict.fromkeys(name for line in self.lines["update"] for name in line)
        return [name for name in names if name not in ("type", "step", "time", "epoch")]

    @cached_property
    def not_finite(self) -> dict[str, tuple[int, int]]:
        """Metrics that were not finite: in how many lines, and the first step."""
        found: dict[str, tuple[int, int]] = {}
        for line in self.lines["update"]:
            for name, value in line.items():
                if value is None:
                    count, first = found.get(name, (0, line["step"]))
                    found[name] = count + 1, first
        return found

    @property
    def checkpoints(self) -> list[str]:
        """The names of the checkpoints, the oldest first."""
        return [path.name for path in checkpoint.list_checkpoints(self.folder)]

    @property
    def best(self) -> str | None:
        """The name of the best checkpoint."""
        link = self.folder / checkpoint.BEST
        return link.readlink().name if link.is_symlink() else None


def _baseline(folder: Path) -> list[dict[str, Any]]:
    """Return the evaluation of the supervised waypoint policy, which waypoint PPO makes before its log is opened."""
    found = [line for line in read_json(folder / EVAL_METRICS) if line.get("iteration") == 0]
    return [{"step": line.get("timesteps", 0), **line} for line in found]


def not_a_run(folder: Path) -> str:
    """Return the error message for a path that is no run."""
    if not folder.exists():
        return f"{folder}: no such folder; give the directory of a run, or of a comparison"
    if not folder.is_dir():
        return f"{folder}: not a folder; give the directory of a run, or of a comparison"
    runs = [path.name for path in sorted(folder.iterdir()) if (path / METRICS_FILE).is_file()]
    below = f"; it holds {len(runs)} runs: deft report {folder / '*'}" if runs else ""
    return f"{folder}: no run in it: neither {METRICS_FILE} nor a config file{below}"


def read_settings(path: Path) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Return the kind of a run, its settings and their defaults, by dotted path.

    Settings that this version does not know are returned as they are written, without defaults.
    """
    mapping = read_mapping(path)
    kind = kind_of_file(path)
    try:
        if kind in FLAT_TRAINING:
            cls = FLAT_TRAINING[kind]
            settings, _ = translate(cls, mapping)
            return kind, flat(settings), flat({name: default_of(cls, name) for name in setting_names(cls)})
        if kind is not None:
            return kind, flat(to_dict(phase_config(mapping))), flat(to_dict(read_phase_config("rl_config")))
        settings = to_dict(resolve(mapping))
        kind = settings["algorithm"]["name"]
        return kind, flat(settings), flat(to_dict(resolve({"algorithm": {"name": kind}})))
    except InputError:
        section = mapping.get("algorithm")
        name = section.get("name") if isinstance(section, Mapping) else section
        return str(name or kind or "run"), flat(mapping), {}


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings by dotted path; an empty section is a value."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        path = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{path}.")
        else:
            found[path] = list(value) if isinstance(value, tuple) else value
    return found


def is_seed(path: str) -> bool:
    """Whether a setting is the seed of a run."""
    return path in (SEED, f"training.{SEED}")


def is_place(path: str) -> bool:
    """Whether a setting is about the run directory or the log."""
    return path.rpartition(".")[2] in PLACES or path.startswith("logging.")


def duration(seconds: float) -> str:
    """`48 s`, `3 min 20 s`, `2 h 5 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
