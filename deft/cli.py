"""The command `deft`: a table of commands, their settings and the functions that they call.

Errors are one line on stderr. Exit status: 0 done, 1 failed, 2 bad input, 130 after Ctrl-C, 143 after SIGTERM,
129 after SIGHUP, 138 after SIGUSR1. What a command needs is imported when it runs, so that `deft --help` is quick.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import math
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from deft import trust
from deft.errors import CommandExit, DeftError, InputError, printable


class Command(NamedTuple):
    """One command: `module:Class` of its settings, the function that gets them, and the setting without a flag."""

    settings: str
    call: str
    word: str | None = None


class Outcome(NamedTuple):
    """Results with a text for a person; `below` are the results that are printed after it."""

    results: Mapping[str, Any]
    text: str
    below: Sequence[str] = ()


COMMANDS = {
    "evaluate": Command("settings:EvaluateConfig", "cli:evaluate", "path"),
    "collect": Command("settings:CollectConfig", "training.collect:collect"),
    "collect waypoints": Command("waypoint_settings:WaypointRecordingConfig", "training.waypoints.record:record"),
    "compare": Command("settings:CompareRunsConfig", "cli:compare", "runs"),
    "compare waypoints": Command("waypoint_settings:CompareConfig", "cli:compare_waypoints"),
    "play": Command("settings:PlayConfig", "evaluation.play:play"),
    "datasets fetch": Command("settings:FetchConfig", "cli:fetch", "name"),
    "report": Command("settings:ReportConfig", "cli:report", "run"),
    "doctor": Command("settings:DoctorConfig", "cli:doctor"),
}
TRAINING = {
    "waypoint-sft": "training.waypoints.sft:train_sft",
    "waypoint-ppo": "training.waypoints.ppo:train_ppo",
    "tokenizer": "training.phases.tokenizer:train_tokenizer",
    "teacher": "training.phases.teacher:train_teacher",
    "student": "training.phases.student:train_student",
    "adversarial": "training.phases.adversarial:train_adversarial",
    "all": "training.phases.all_phases:train_all",
}
"""What is not the training of one algorithm, and what trains it."""
HELP = """usage: deft COMMAND ...

Train vision-language-action robot policies with reinforcement learning.

  train     train a policy:      deft train [ALGORITHM] [--config FILE] [flags]
  evaluate  evaluate a policy:   deft evaluate RUN|CHECKPOINT [--episodes N] [flags]
  collect   record a dataset:    deft collect --policy RUN|random|expert --out DATASET [flags]
            of waypoints:        deft collect waypoints --out FILE [flags]
  compare   compare policies:    deft compare RUN RUN … [--env ID] [--episodes N] [flags]
            of waypoints:        deft compare waypoints --sft-checkpoint RUN --rl-checkpoint RUN [flags]
  play      watch a policy:      deft play --env ID [--task NAME] --policy RUN|random|expert --video FILE
  datasets  download a dataset:  deft datasets fetch NAME [--sha256 HEX] [--out FOLDER]
  report    report on a run:     deft report RUN
  doctor    examine the machine: deft doctor [--cluster] [--json]

  deft COMMAND --help shows its flags; deft --version shows the version."""
WAYPOINT_RUNS = ("--sft-checkpoint", "--rl-checkpoint")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        with trust.command_line(trust.FLAG in [word.replace("_", "-") for word in arguments]):
            return _dispatch(arguments)
    except CommandExit as stop:  # the end of --help, or of a run that a signal stopped
        code = int(stop.code or 0)
        if code - 128 in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            _complain(f"stopped by {signal.Signals(code - 128).name}")
        return code
    except BrokenPipeError:  # the reader of the output ended, as in `deft --help | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        _complain("stopped by Ctrl-C")
        return 128 + signal.SIGINT
    except DeftError as error:
        if "--debug" in arguments:
            traceback.print_exc()
        _complain(str(error))
        return error.exit_status
    except BaseException as error:
        message = f"{type(error).__name__}: {error}"
        if isinstance(error, SystemExit):  # of code that is not Deft's: the command is not done, whatever the status
            message = f"the command is not done: code that it ran called sys.exit({error.code!r})"
        _complain(f"{message} ({_keep_traceback('--debug' in arguments)})")
        return 1


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(HELP)
        return 0
    if arguments[0] == "--version":
        from deft import __version__

        print(f"deft {__version__}")
        return 0
    if arguments[0] == "train":
        return train(arguments[1:])
    name, rest = _command(arguments)
    command = COMMANDS[name]

    from deft.config.flags import parse

    parsed = parse(name, _load(f"config.{command.settings}"), rest, word=command.word)
    outcome = _load(command.call)(parsed.config)
    if not isinstance(outcome, Outcome):
        return _report(outcome, parsed.as_json)
    if parsed.as_json:
        return _report(outcome.results, as_json=True)
    print(outcome.text, flush=True)
    return _report({name: outcome.results[name] for name in outcome.below if name in outcome.results}, as_json=False)


def _command(arguments: list[str]) -> tuple[str, list[str]]:
    """Return the name of the command, of one or two words, and its arguments."""
    name, rest = arguments[0], arguments[1:]
    if name == "compare":
        is_named = rest[:1] == ["waypoints"]
        rest = rest[is_named:]
        words = [word for word in rest[:3] if not word.startswith("-")]
        if len(words) == 2 and all(_is_waypoint_run(Path(word)) for word in words):
            rest = ["--sft-checkpoint", words[0], "--rl-checkpoint", words[1], *rest[2:]]
        if is_named or any(word.partition("=")[0].replace("_", "-") in WAYPOINT_RUNS for word in rest):
            return "compare waypoints", rest
    if name == "datasets":
        if not rest or rest[0] in ("-h", "--help"):
            print("usage: deft datasets fetch NAME [flags]\n\nDownload a dataset. deft datasets fetch --help: flags.")
            raise CommandExit(0)
        if rest[0] != "fetch":
            raise InputError(f"datasets {rest[0]}: no such command; use `deft datasets fetch NAME`")
    if f"{name} {rest[0] if rest else ''}" in COMMANDS:
        return f"{name} {rest[0]}", rest[1:]
    if name not in COMMANDS:
        from deft.config.validation import suggestion

        raise InputError(f"{name}: no such command; {suggestion(name, ['train', *COMMANDS])}")
    return name, rest


def _is_waypoint_run(path: Path) -> bool:
    folder = path if path.is_dir() else path.parent
    is_other = any((place / "config.yaml").is_file() for place in (path, path.parent))
    return path.exists() and not is_other and (folder / "config.json").is_file()


def train(arguments: list[str]) -> int:
    """Run `deft train [ALGORITHM] [--config FILE] [flags]`."""
    from deft.config.settings import OfflineRunConfig
    from deft.config.training import parse_training

    name, config, as_json = parse_training(arguments)
    algorithm = "training.offline_run:train" if isinstance(config, OfflineRunConfig) else "training.run:train"
    return _report(_load(TRAINING.get(name, algorithm))(config), as_json)


def evaluate(config: Any) -> Outcome | Mapping[str, Any]:
    """Evaluate a run or checkpoint: of an algorithm, or of a phase of F1 training."""
    from deft.config.training import config_of_run, kind_of_file

    settings = config_of_run(Path(config.path))
    phase = None if settings is None else kind_of_file(settings)
    if phase == "all":
        raise InputError(f"{config.path}: holds three phases; evaluate one, as in {config.path}/teacher")
    if phase in ("teacher", "student", "adversarial"):
        return _evaluate_phase(phase, config)
    results = _load("evaluation.evaluate:evaluate_run")(**dataclasses.asdict(config))
    if "success_interval" not in results:
        return results
    below = [name for name in results if name not in ("tasks", "instructions")]
    return Outcome(results, _load("evaluation.success:success_lines")(results), below)


def _evaluate_phase(phase: str, config: Any) -> Outcome:
    if not config.deterministic:
        raise InputError(f"--stochastic: a run of phase {phase} has one way to act in evaluation; leave the flag out")
    for name in ("env", "env_kwargs", "task", "split", "shuffle_instructions", "videos", "random_policy"):
        if getattr(config, name):
            flag = "--" + name.replace("_", "-")
            raise InputError(f"{flag}: a run of phase {phase} is evaluated on held-out scenes of its own environment")
    module = "training.phases.evaluation"
    table = "evaluation.world_model:teacher_table" if phase == "teacher" else f"{module}:explorer_table"
    given = (config.path, config.episodes, config.video, config.seed, config.device)
    results = _load(f"{module}:evaluate_{phase}")(*given)
    below = ("episodes", "frames", "action_selection", "checkpoint", "checkpoint_choice", "plots", "video")
    return Outcome(results, _load(table)(results), below)


def compare(config: Any) -> Outcome:
    """Compare policies of runs."""
    from deft.evaluation.compare import compare_runs, comparison_lines

    results = compare_runs(config)
    return Outcome(results, comparison_lines(results), ("comparison", "plots"))


def compare_waypoints(config: Any) -> Outcome:
    """Compare a supervised waypoint policy with the one that PPO trained from it."""
    from deft.training.waypoints.compare import compare_policies, comparison_table

    results = compare_policies(config)
    return Outcome(results, comparison_table(results), ("comparison", "plots"))


def fetch(config: Any) -> Mapping[str, Any]:
    """Download a dataset."""
    from deft.data.datasets import download_folder
    from deft.data.datasets.fetch import fetch_dataset, shown_progress

    folder = download_folder() if config.out is None else Path(config.out)
    with shown_progress(config.name) as progress:
        found = fetch_dataset(config.name, folder, config.url, config.sha256, config.overwrite, progress)
    return dataclasses.asdict(found)


def report(config: Any) -> Mapping[str, Any]:
    """Write the report of a run."""
    from deft.evaluation.report import write_report

    return {"report": str(write_report(config.run))}


def doctor(config: Any) -> Outcome:
    """Examine this machine, or a Ray cluster."""
    if config.cluster:
        from deft.training.cluster.report import describe_cluster, examine_cluster

        results = examine_cluster(config.ray_address)
        return Outcome(results, describe_cluster(results))
    from deft.doctor import describe, examine

    results = examine()
    return Outcome(results, describe(results))


def _load(place: str) -> Any:
    """Return what `module:name` below `deft` names; its module is imported here."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(f"deft.{module}"), name)


def _report(results: Mapping[str, Any], as_json: bool) -> int:
    """Print the results as text or as one line of JSON, and return the exit status."""
    if os.environ.get("RANK", "0") != "0":  # of several processes that train together, only the first prints
        return 0
    plain = _plain(results)
    if as_json:
        print(json.dumps(plain, allow_nan=False), flush=True)
    else:
        for name, value in plain.items():
            print(f"{name}: {value}", flush=True)
    return 0


def _plain(value: Any) -> Any:
    """Return results as JSON types: NumPy and torch scalars as numbers, paths as text, NaN and infinity as null."""
    if isinstance(value, Mapping):
        return {str(name): _plain(nested) for name, nested in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(nested) for nested in value]
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, bool | int | str) else str(value)


def _complain(message: str) -> None:
    with contextlib.suppress(OSError):  # of a terminal that was closed
        print(f"deft: {printable(message)}", file=sys.stderr, flush=True)


def _keep_traceback(show: bool) -> str:
    """Print the traceback of an unexpected error or write it to a file, and return where it is."""
    if show:
        traceback.print_exc()
        return "traceback above"
    with tempfile.NamedTemporaryFile("w", prefix="deft-", suffix=".log", delete=False, encoding="utf-8") as file:
        traceback.print_exc(file=file)
    return f"traceback in {file.name}; --debug shows it"
