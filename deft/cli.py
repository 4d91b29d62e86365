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
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from deft import trust
from deft.errors import CommandExit, DeftError, InputError, printable

if TYPE_CHECKING:
    from deft.config.training import Training


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
    "evaluate": Command("command_settings:EvaluateConfig", "cli:evaluate", "path"),
    "collect": Command("command_settings:CollectConfig", "training.collect:collect"),
    "collect waypoints": Command("waypoint_settings:WaypointRecordingConfig", "training.waypoints.record:record"),
    "compare": Command("command_settings:CompareRunsConfig", "cli:compare", "runs"),
    "compare waypoints": Command("waypoint_settings:CompareConfig", "cli:compare_waypoints"),
    "play": Command("command_settings:PlayConfig", "evaluation.play:play"),
    "suite install": Command("suite_settings:SuiteInstallConfig", "evaluation.suites:install_suite", "suite"),
    "suite download": Command("suite_settings:SuiteDownloadConfig", "evaluation.suites:download_suite", "suite"),
    "suite list": Command("suite_settings:SuiteListConfig", "cli:list_suites"),
    "suite check": Command("suite_settings:SuiteCheckConfig", "evaluation.suites:check_suite", "suite"),
    "datasets fetch": Command("command_settings:FetchConfig", "cli:fetch", "name"),
    "recipes": Command("recipes:RecipesConfig", "cli:recipes"),
    "recipes show": Command("recipes:ShowRecipeConfig", "cli:show_recipe", "recipe"),
    "report": Command("command_settings:ReportConfig", "cli:report", "directories"),
    "runs": Command("command_settings:RunsConfig", "cli:runs", "directory"),
    "view": Command("command_settings:ViewConfig", "view.server:view", "run"),
    "serve": Command("deployment_settings:ServeConfig", "deployment.server:serve", "path"),
    "export": Command("deployment_settings:ExportConfig", "deployment.export:export", "path"),
    "doctor": Command("command_settings:DoctorConfig", "cli:doctor"),
    "info": Command("command_settings:InfoConfig", "cli:info"),
    "completion": Command("command_settings:CompletionConfig", "cli:completion", "shell"),
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

  recipes   list recipes:        deft recipes
            print the file of one: deft recipes show NAME
  train     train a policy:      deft train [ALGORITHM] [--recipe NAME | --config FILE] [flags]
  evaluate  evaluate a policy:   deft evaluate RUN|CHECKPOINT [--episodes N] [flags]
            on a benchmark:      deft evaluate [RUN] --suite metaworld/MT10 [--policy expert] [flags]
  collect   record a dataset:    deft collect --policy RUN|random|expert --out DATASET [flags]
            of waypoints:        deft collect waypoints --out FILE [flags]
  compare   compare policies:    deft compare RUN RUN … [--env ID] [--episodes N] [flags]
            of waypoints:        deft compare waypoints --sft-checkpoint RUN --rl-checkpoint RUN [flags]
  play      watch a policy:      deft play --env ID [--task NAME] --policy RUN|random|expert --video FILE
  suite     benchmark suites:    deft suite install|list|check|download [NAME]
  datasets  download a dataset:  deft datasets fetch NAME [--sha256 HEX] [--out FOLDER]
  view      view a run live:     deft view RUN [--view-port N]
  serve     policy for a robot:  deft serve RUN|CHECKPOINT [--mode MODE] [--port N] [flags]
  export    for other programs:  deft export RUN|CHECKPOINT --format safetensors|torch-export|onnx
  report    report on runs:      deft report RUN … [--out FILE]
  runs      list runs:           deft runs [DIR] [--json]
  doctor    examine the machine: deft doctor [--cluster] [--json]
  info      for a bug report:    deft info
  completion  for a shell:       deft completion bash|zsh|fish

  deft COMMAND --help shows its flags; deft --version shows the version."""
IN_SUMMARY = (
    "run_dir",
    "timesteps",
    "episodes",
    "updates",
    "epochs",
    "seconds",
    "mean_reward",
    "best_",
    "final_",
    "report",
)
"""Results of training that the summary for a person replaces."""
GROUPS = {
    "datasets": ("deft datasets fetch NAME", "Download a dataset. deft datasets fetch --help: flags."),
    "suite": (
        "deft suite install|list|check|download [NAME]",
        "Benchmark suites in interpreters of their own. deft suite install --help: flags.",
    ),
}
"""First words of commands that have no meaning alone: their usage."""
WAYPOINT_RUNS = ("--sft-checkpoint", "--rl-checkpoint")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status."""
    if "_ARGCOMPLETE" in os.environ:  # the shell asks for completions of a command line
        from deft.completion import complete

        complete()
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        with trust.command_line(trust.FLAG in [word.replace("_", "-") for word in arguments]):
            return dispatch(arguments)
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


def dispatch(arguments: list[str]) -> int:
    """Run one command, whose errors are raised, and return the exit status."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(HELP)
        return 0
    if arguments[0] == "--version":
        from deft import __version__

        print(f"deft {__version__}")
        return 0
    if arguments[0] == "train":
        return train(arguments[1:])
    outcome, as_json = _run(arguments)
    if not isinstance(outcome, Outcome):
        return _report(outcome, as_json)
    if as_json:
        return _report(outcome.results, as_json=True)
    print(outcome.text, flush=True)
    below = {name: outcome.results[name] for name in outcome.below if outcome.results.get(name, []) != []}
    return _report(below, as_json=False)


def _run(arguments: list[str]) -> tuple[Outcome | Mapping[str, Any], bool]:
    """Run a command other than `train`, and return its results and whether to print them as JSON."""
    name, rest = _command(arguments)
    command = COMMANDS[name]

    from deft.config.flags import parse

    parsed = parse(name, settings_class(name), rest, word=command.word)
    return _load(command.call)(parsed.config), parsed.as_json


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
    if name in GROUPS:
        usage, about = GROUPS[name]
        if not rest or rest[0] in ("-h", "--help"):
            print(f"usage: {usage} [flags]\n\n{about}")
            raise CommandExit(0)
        if f"{name} {rest[0]}" not in COMMANDS:
            raise InputError(f"{name} {rest[0]}: no such command; use `{usage}`")
    if name == "recipes" and rest and not rest[0].startswith("-") and rest[0] != "show":
        raise InputError(f"recipes {rest[0]}: no such command; use `deft recipes show {rest[0]}`")
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
    """Run `deft train [ALGORITHM] [--recipe NAME | --config FILE] [flags]`."""
    from deft.config.training import parse_training

    name, config, as_json, _ = training = parse_training(arguments)
    is_shown = not as_json and os.environ.get("RANK", "0") == "0"
    if is_shown:
        from deft.runs.overview import start_line

        print(start_line(training), flush=True)  # at once: the imports and the environments take seconds
    results = _train(training)
    if is_shown:
        from deft.runs.overview import read_overview, summary

        place = _run_directory(results, config)
        if place is not None and (run := read_overview(place)) is not None:
            shown = ("run_dir", "report") if name in TRAINING else IN_SUMMARY
            _report({key: value for key, value in results.items() if not key.startswith(shown)}, as_json=False)
            print(summary(run), flush=True)
            return 0
    return _report(results, as_json)


def _train(training: Training) -> Mapping[str, Any]:
    """Make what a recipe starts from, train, and return the results of the run."""
    from deft.config.recipes import read_recipe
    from deft.config.settings import OfflineRunConfig

    recipe = None if training.source is None else read_recipe(training.source)
    if recipe is not None:
        _load("training.preparation:prepare")(recipe, training, _run_first, _load("doctor:extras")())
    is_offline = isinstance(training.config, OfflineRunConfig)
    algorithm = "training.offline_run:train" if is_offline else "training.run:train"
    results: Mapping[str, Any] = _load(TRAINING.get(training.name, algorithm))(training.config)
    place = _run_directory(results, training.config)
    if place is not None and "report" not in results and os.environ.get("RANK", "0") == "0":
        results = {**results, **_load("evaluation.report:attempt_report")(place)}
    return results


def _run_directory(results: Mapping[str, Any], config: Any) -> Path | None:
    """Return where a run was written."""
    place = results.get("run_dir") or getattr(config, "output_dir", None)
    return None if place is None else Path(place)


def _run_first(arguments: list[str]) -> None:
    """Run a command that a recipe needs first; its results are not printed."""
    from deft.config.training import parse_training

    if arguments[0] == "train":
        _train(parse_training(arguments[1:]))
    else:
        _run(arguments)


def evaluate(config: Any) -> Outcome | Mapping[str, Any]:
    """Evaluate a run or checkpoint (of an algorithm, or of a phase of F1 training) or a scripted policy."""
    from deft.config.training import config_of_run, kind_of_file

    if config.path is None and config.policy is None:
        raise InputError("evaluate: give one run folder or checkpoint; got none")
    if config.suite is not None or config.policy is not None:
        if config.vector is not None:
            raise InputError("--vector: is for the policy of a run; leave it out with --suite and --policy")
        function = "evaluate_scripted" if config.suite is None else "evaluate_suite"
        return _success_outcome(_load(f"evaluation.suites:{function}")(config))
    assert config.path is not None
    settings = config_of_run(Path(config.path))
    phase = None if settings is None else kind_of_file(settings)
    if phase == "all":
        raise InputError(f"{config.path}: holds three phases; evaluate one, as in {config.path}/teacher")
    if phase in ("teacher", "student", "adversarial"):
        return _evaluate_phase(phase, config)
    if config.inference_delay is not None:
        return _success_outcome(_load("evaluation.delayed:evaluate_delayed")(config))
    return _success_outcome(_load("evaluation.evaluate:evaluate_run")(**config.of_run()))


def _success_outcome(results: Mapping[str, Any]) -> Outcome | Mapping[str, Any]:
    """Return the results of an evaluation, with a table where the environment reports success."""
    if "success_interval" not in results:
        return results
    below = [name for name in results if name not in ("tasks", "instructions")]
    return Outcome(results, _load("evaluation.success:success_lines")(results), below)


def _evaluate_phase(phase: str, config: Any) -> Outcome:
    if not config.deterministic:
        raise InputError(f"--stochastic: a run of phase {phase} has one way to act in evaluation; leave the flag out")
    if config.inference_delay is not None:
        raise InputError(f"--inference-delay: a run of phase {phase} decides single actions; leave it out")
    fixed = ("env", "env_kwargs", "task", "split", "shuffle_instructions", "videos", "random_policy", "vector")
    for name in (*fixed, "suite_path"):
        if getattr(config, name):
            flag = "--" + name.replace("_", "-")
            raise InputError(f"{flag}: a run of phase {phase} is evaluated on held-out scenes of its own environment")
    module = "training.phases.evaluation"
    table = f"{module}:world_model_table" if phase == "teacher" else f"{module}:explorer_table"
    given = (config.path, config.episodes, config.video, config.seed, config.device)
    results = _load(f"{module}:evaluate_{phase}")(*given)
    below = ("episodes", "frames", "action_selection", "checkpoint", "checkpoint_choice", "plots", "video")
    return Outcome(results, _load(table)(results), below)


def compare(config: Any) -> Outcome:
    """Compare policies of runs."""
    from deft.evaluation.compare import compare_runs
    from deft.evaluation.comparison_table import comparison_lines

    results = compare_runs(config)
    results |= _load("evaluation.report:attempt_report")(Path(results["comparison"]).parent)
    return Outcome(results, comparison_lines(results), ("comparison", "plots", "report"))


def compare_waypoints(config: Any) -> Outcome:
    """Compare a supervised waypoint policy with the one that PPO trained from it."""
    from deft.training.waypoints.compare import compare_policies, comparison_table

    results = compare_policies(config)
    results |= _load("evaluation.report:attempt_report")(Path(results["comparison"]).parent)
    return Outcome(results, comparison_table(results), ("comparison", "plots", "report"))


def list_suites(config: Any) -> Outcome:
    """List the suites."""
    from deft.evaluation.suites import list_suites, suite_lines

    results = list_suites()
    return Outcome(results, suite_lines(results))


def fetch(config: Any) -> Mapping[str, Any]:
    """Download a dataset."""
    from deft.data.datasets import download_folder
    from deft.data.datasets.fetch import fetch_dataset, shown_progress

    folder = download_folder() if config.out is None else Path(config.out)
    with shown_progress(config.name) as progress:
        found = fetch_dataset(config.name, folder, config.url, config.sha256, config.overwrite, progress)
    return dataclasses.asdict(found)


def recipes(config: Any) -> Outcome:
    """List the recipes."""
    from deft.config.recipes import describe_recipes, recipe_table

    found = describe_recipes()
    return Outcome(found, recipe_table(found))


def show_recipe(config: Any) -> Outcome:
    """Print the file of a recipe."""
    from deft.config.recipes import find_recipe

    file = find_recipe(config.recipe)
    text = file.read_text(encoding="utf-8").rstrip()
    return Outcome({"recipe": file.stem, "file": str(file), "text": text}, text)


def report(config: Any) -> Mapping[str, Any]:
    """Write the report of runs or of a comparison."""
    from deft.evaluation.report import write_report

    return {"report": str(write_report(config.directories, config.out))}


def runs(config: Any) -> Outcome:
    """List the runs in a directory."""
    from deft.config.output_base import output_base
    from deft.runs.overview import find_runs, runs_table

    folder = output_base() if config.directory is None else Path(config.directory)
    found = find_runs(folder) if config.directory or folder.is_dir() else []
    width = shutil.get_terminal_size((0, 0)).columns  # 0 without a terminal: the whole table
    text = runs_table(found, width) if found else f"no runs in {folder}"
    return Outcome({"runs": [run.row() for run in found]}, text)


def doctor(config: Any) -> Outcome:
    """Examine this machine, or a Ray cluster."""
    if config.cluster:
        from deft.training.cluster.report import describe_cluster, examine_cluster

        results = examine_cluster(config.ray_address)
        return Outcome(results, describe_cluster(results))
    from deft.doctor import describe, examine

    results = examine()
    return Outcome(results, describe(results))


def info(config: Any) -> Outcome:
    """Print what belongs into a bug report."""
    from deft.info import collect, describe

    results = collect()
    return Outcome(results, describe(results))


def completion(config: Any) -> Outcome:
    """Print the completion script of a shell."""
    from deft.completion import script

    text = script(config.shell)
    return Outcome({"script": text}, text)


def settings_class(command: str) -> Any:
    """Return the class of a command's settings."""
    return _load(f"config.{COMMANDS[command].settings}")


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
            print(f"{name}: {', '.join(map(str, value)) if isinstance(value, list) else value}", flush=True)
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
