"""The command `deft`: it parses and calls, nothing else.

Errors are one line on stderr. Exit status: 0 done, 1 failed, 2 bad input, 130 after Ctrl-C, 143 after SIGTERM,
129 after SIGHUP, 138 after SIGUSR1.
What a command needs is imported when it runs, so that `deft --help` is quick.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deft import trust
from deft.errors import CommandExit, DeftError, InputError, printable

if TYPE_CHECKING:
    from deft.config.settings import EvaluateConfig, RunConfig


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
    except BrokenPipeError:  # the reader of our output has seen enough, as in `deft --help | head`
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


def train(arguments: list[str]) -> int:
    """`deft train [ALGORITHM] [--config FILE] [flags]`."""
    if arguments and arguments[0] in WAYPOINT_TRAINING:
        return _train_waypoints(arguments[0], arguments[1:])
    if arguments and arguments[0] == "tokenizer":
        return _train_tokenizer(arguments[1:])
    phase = _phase(arguments)
    if phase is not None:
        return _train_phase(phase, arguments[1:] if arguments[0] == phase else arguments)
    config, as_json = parse_train(arguments)

    from deft.config.settings import OfflineRunConfig

    if isinstance(config, OfflineRunConfig):
        from deft.training.offline_run import train as run_offline

        return _report(run_offline(config), as_json)
    from deft.training.run import train as run

    return _report(run(config), as_json)


def parse_train(arguments: list[str]) -> tuple[RunConfig, bool]:
    """The run that `deft train` is asked for (defaults, then the file, then the flags), and whether to print JSON."""
    from deft.config.flags import (
        CONFIG_FLAG,
        MODEL_CLASS,
        OUTPUT_DEFAULTS,
        OUTPUT_FLAGS,
        FlagGroup,
        parse_flags,
        run_flags,
    )
    from deft.config.loading import resolve, set_path, to_dict, value_at

    has_algorithm = bool(arguments) and not arguments[0].startswith("-")
    flags = arguments[1:] if has_algorithm else arguments
    base = _base_config(arguments[0] if has_algorithm else None, flags)
    name, settings = base.algorithm.name, to_dict(base)
    groups = run_flags(name)
    defaults = {flag.path: value_at(settings, flag.path) for group in groups for flag in group.flags}
    given = parse_flags(
        [FlagGroup("command", "The command itself.", (CONFIG_FLAG, *OUTPUT_FLAGS)), *groups],
        {**defaults, "config": _peek(flags, "config"), **OUTPUT_DEFAULTS},
        flags,
        usage=f"deft train {name}",
        description=f"Train with {name}. Settings: defaults, then --config, then flags (- and _ alike).",
    )
    if given.words:
        raise InputError(
            f"train: unexpected '{given.words[0]}'; a value follows its flag, and the algorithm comes first"
        )
    for path in defaults:
        if path in given.values:
            set_path(settings, path, given.values[path])
    trust.name([given.values.get(path) for path in ("env.id", "env.kwargs", MODEL_CLASS, "cluster.ray_address")])
    _complete_model(settings, given.values)
    if "trainer.total_timesteps" in given.values:
        if "trainer.iterations" in given.values:
            raise InputError("--iterations: says how long to train, as --total-timesteps does; give one of them")
        if "iterations" in settings["trainer"]:
            settings["trainer"]["iterations"] = None  # a flag comes before the file
    return resolve(settings, written=given.written), given.values.get("json", False)


def _complete_model(settings: dict[str, Any], given: Mapping[str, Any]) -> None:
    """Make the policy that of a model that is named, with the chunks it is made for, but for SAC's single steps."""
    from deft.config.algorithm_settings import ALGORITHM_SETTINGS
    from deft.config.flags import MODEL_CLASS
    from deft.config.settings import MODEL_CHUNKS

    model = given.get(MODEL_CLASS)
    if model is not None and "policy.name" not in given:
        settings["policy"]["name"] = "vla"
        learns_chunks = ALGORITHM_SETTINGS[settings["algorithm"]["name"]].LEARNS_FROM != "replay"
        is_open = "policy.chunk_length" not in given and "chunk_length" in settings["policy"]
        if model in MODEL_CHUNKS and learns_chunks and is_open:
            settings["policy"]["chunk_length"] = MODEL_CHUNKS[model]


def _train_waypoints(name: str, arguments: list[str]) -> int:
    """`deft train waypoint-sft --dataset FILE [flags]`, `deft train waypoint-ppo --sft-checkpoint FILE [flags]`."""
    from deft.config.waypoint_settings import PPOConfig, WaypointSFTConfig

    cls: type[Any] = WaypointSFTConfig if name == "waypoint-sft" else PPOConfig
    config, as_json = _parse_command(cls, arguments, f"train {name}", WAYPOINT_TRAINING[name])
    if name == "waypoint-sft":
        from deft.training.waypoints.sft import train_sft

        return _report(train_sft(config), as_json)
    from deft.training.waypoints.ppo import train_ppo

    return _report(train_ppo(config), as_json)


def _train_tokenizer(arguments: list[str]) -> int:
    """`deft train tokenizer [--dataset DATASET] [flags]`."""
    from deft.config.tokenizer_settings import TokenizerTrainingConfig

    description = "Train the image tokenizer of an F1 model, on rendered pictures or on those of a dataset."
    config, as_json = _parse_command(TokenizerTrainingConfig, arguments, "train tokenizer", description)

    if _peek(arguments, "output-dir") is None and _peek(arguments, "output_dir") is None:
        from deft.config.output_base import below_output_base

        config.output_dir = below_output_base(config.output_dir)
    from deft.training.phases.tokenizer import train_tokenizer

    return _report(train_tokenizer(config), as_json)


def _phase(arguments: list[str]) -> str | None:
    """The phase of F1 training that is asked for: by its name, by the run that is resumed, or by the file."""
    if arguments and arguments[0] in PHASE_TRAINING:
        return arguments[0]
    if arguments and not arguments[0].startswith("-"):
        return None
    from deft.config.rl_yaml import phase_of_file

    config_file, resume = _peek(arguments, "config"), _peek(arguments, "resume")
    source = Path(config_file) if config_file else _config_of_run(Path(resume)) if resume else None
    return None if source is None else phase_of_file(source)


def _train_phase(phase: str, arguments: list[str]) -> int:
    """`deft train teacher|student|adversarial|all [--config FILE] [flags]`."""
    from deft.config.rl_yaml import parse_phase

    resume = _peek(arguments, "resume")
    base = _peek(arguments, "config") or (_config_of_run(Path(resume)) if resume else None)
    config, as_json = parse_phase(phase, arguments, base or "rl_config")
    if phase == "all":
        from deft.training.phases.all_phases import train_all

        return _report(train_all(config), as_json)
    if resume and _peek(arguments, "output-dir") is None and _peek(arguments, "output_dir") is None:
        from deft.runs.checkpoint import find_checkpoint

        getattr(config, phase).output_dir = str(find_checkpoint(resume).parent)

    if phase == "student":
        from deft.training.phases.student import train_student

        return _report(train_student(config), as_json)
    if phase == "adversarial":
        from deft.training.phases.adversarial import train_adversarial

        return _report(train_adversarial(config), as_json)
    from deft.training.phases.teacher import train_teacher

    return _report(train_teacher(config), as_json)


def _base_config(algorithm: str | None, flags: Sequence[str]) -> RunConfig:
    """What the flags are put on: the file of `--config`, the run of `--resume`, or the defaults."""
    from deft.config.algorithm_settings import ALGORITHM_SETTINGS
    from deft.config.loading import find_config, read_mapping, reject_overwrite, resolve

    known = ", ".join([*ALGORITHM_SETTINGS, *WAYPOINT_TRAINING, "tokenizer", *PHASE_TRAINING])
    if algorithm is not None and algorithm not in ALGORITHM_SETTINGS:
        raise InputError(f"train {algorithm}: no such algorithm; one of {known}")
    config_file, resume = _peek(flags, "config"), _peek(flags, "resume")
    source = find_config(config_file) if config_file else _config_of_run(Path(resume)) if resume else None
    if source is None and algorithm is None:
        if {"-h", "--help"} & set(flags):
            print(
                f"{TRAIN_HELP}\n\nAlgorithms: {known}. `deft train {next(iter(ALGORITHM_SETTINGS))} --help`: its flags."
            )
            raise CommandExit(0)
        if resume:
            raise InputError(f"--resume {resume}: no run: there is no config.yaml in it, nor in the folder above")
        raise InputError(f"train: give an algorithm ({known}), or --config FILE")
    mapping = read_mapping(source) if source else {}
    if not config_file:
        mapping.pop("output_dir", None)  # where the run was when it was written; it may have been moved or copied since
    if algorithm is not None and "algorithm" not in mapping:
        mapping["algorithm"] = algorithm
    base = resolve(mapping)
    reject_overwrite(base.overwrite, source)
    if algorithm not in (None, base.algorithm.name):
        raise InputError(f"train {algorithm}: {source} says algorithm.name '{base.algorithm.name}'; give one of them")
    return base


def evaluate(arguments: list[str]) -> int:
    """`deft evaluate RUN|CHECKPOINT [flags]`."""
    from deft.config.settings import EvaluateConfig

    config, as_json = _parse_command(
        EvaluateConfig,
        arguments,
        "evaluate RUN|CHECKPOINT",
        "Play episodes with a trained policy and measure them; its most likely actions, or sampled ones.",
        word=("path", "one run folder or checkpoint"),
    )

    from deft.config.rl_yaml import phase_of_file

    settings = _config_of_run(Path(config.path))
    phase = None if settings is None else phase_of_file(settings)
    if phase == "all":
        raise InputError(f"{config.path}: holds three phases; evaluate one, as in {config.path}/teacher")
    if phase is not None:
        return _evaluate_phase(phase, config, as_json)

    from deft.evaluation.evaluate import evaluate_run

    results = evaluate_run(**dataclasses.asdict(config))
    if "success_interval" in results and not as_json:
        from deft.evaluation.success import success_lines

        print(success_lines(results), flush=True)
        results = {name: value for name, value in results.items() if name not in ("tasks", "instructions")}
    return _report(results, as_json)


def _evaluate_phase(phase: str, config: EvaluateConfig, as_json: bool) -> int:
    unused: dict[str, Any] = {
        "--env": config.env,
        "--env-kwargs": config.env_kwargs,
        "--task": config.task,
        "--split": config.split,
    }
    unused |= {"--shuffle-instructions": config.shuffle_instructions, "--videos": config.videos}
    if not config.deterministic:
        raise InputError(f"--stochastic: a run of phase {phase} has one way to act in evaluation; leave the flag out")
    for flag, value in {**unused, "--random-policy": config.random_policy}.items():
        if value:
            raise InputError(f"{flag}: a run of phase {phase} is evaluated on held-out scenes of its own world")
    given = (config.path, config.episodes, config.video, config.seed, config.device)
    if phase == "teacher":
        from deft.evaluation.world_model import teacher_table
        from deft.training.phases.teacher_evaluation import evaluate_teacher

        results, table = evaluate_teacher(*given), teacher_table
    else:
        from deft.training.phases.explorer_evaluation import evaluate_adversarial, evaluate_student, explorer_table

        results, table = (evaluate_student if phase == "student" else evaluate_adversarial)(*given), explorer_table
    if not as_json:
        print(table(results), flush=True)
        shown = ("episodes", "frames", "action_selection", "checkpoint", "checkpoint_choice", "plots", "video")
        results = {name: results[name] for name in shown if name in results}
    return _report(results, as_json)


def collect(arguments: list[str]) -> int:
    """`deft collect --policy CHECKPOINT|random|expert --out DATASET [flags]`, `deft collect waypoints --out FILE`."""
    if arguments[:1] == ["waypoints"]:
        return _collect_waypoints(arguments[1:])
    from deft.config.settings import CollectConfig

    description = "Play a policy in an environment and record the episodes as a Minari or LeRobot dataset."
    config, as_json = _parse_command(CollectConfig, arguments, "collect", description)

    from deft.training.collect import collect as record

    return _report(record(config), as_json)


def _collect_waypoints(arguments: list[str]) -> int:
    from deft.config.waypoint_settings import WaypointRecordingConfig

    description = "Record what a world's scripted driver sees and plans, for `deft train waypoint-sft`."
    config, as_json = _parse_command(WaypointRecordingConfig, arguments, "collect waypoints", description)

    from deft.training.waypoints.record import record

    return _report(record(config), as_json)


def compare(arguments: list[str]) -> int:
    """`deft compare RUN RUN … [flags]`; `deft compare --sft-checkpoint A --rl-checkpoint B [flags]` for waypoints."""
    words = [word for word in arguments[:3] if not word.startswith("-")]
    if len(words) == 2 and all(_is_waypoint_run(Path(word)) for word in words):
        arguments = ["--sft-checkpoint", words[0], "--rl-checkpoint", words[1], *arguments[2:]]
    is_waypoints = any(word.partition("=")[0].replace("_", "-") in WAYPOINT_RUNS for word in arguments)
    return _compare_waypoints(arguments) if is_waypoints else _compare_runs(arguments)


def _is_waypoint_run(path: Path) -> bool:
    folder = path if path.is_dir() else path.parent
    return path.exists() and _config_of_run(path) is None and (folder / "config.json").is_file()


def _compare_runs(arguments: list[str]) -> int:
    from deft.config.settings import CompareRunsConfig

    description = "Play the same episodes with several policies: success with intervals, by task, as table and picture."
    config, as_json = _parse_command(
        CompareRunsConfig,
        arguments,
        "compare RUN RUN …",
        f"{description} Waypoint policies: --sft-checkpoint A --rl-checkpoint B.",
        word=("runs", "the runs to compare (or --sft-checkpoint and --rl-checkpoint, for waypoint policies)"),
        several=True,
    )

    from deft.evaluation.compare import compare_runs, comparison_lines

    results = compare_runs(config)
    if not as_json:
        print(comparison_lines(results), flush=True)
        results = {name: results[name] for name in ("comparison", "plots")}
    return _report(results, as_json)


def _compare_waypoints(arguments: list[str]) -> int:
    from deft.config.waypoint_settings import CompareConfig

    description = "Drive the same held-out episodes with a supervised waypoint policy and with what PPO made of it."
    config, as_json = _parse_command(CompareConfig, arguments, "compare", description)

    from deft.training.waypoints.compare import compare_policies, comparison_table

    results = compare_policies(config)
    if not as_json:
        print(comparison_table(results), flush=True)
        results = {name: results[name] for name in ("comparison", "plots")}
    return _report(results, as_json)


def play(arguments: list[str]) -> int:
    """`deft play [--env ID] [--task NAME] [--policy RUN|random|expert] [--video FILE] [flags]`."""
    from deft.config.settings import PlayConfig

    description = "Watch a policy, a scripted expert or random actions in an environment."
    config, as_json = _parse_command(PlayConfig, arguments, "play", description)

    from deft.evaluation.play import play as watch

    return _report(watch(config), as_json)


def datasets(arguments: list[str]) -> int:
    """`deft datasets fetch NAME [flags]`."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print("usage: deft datasets fetch NAME [flags]\n\nDownload a dataset. deft datasets fetch --help: its flags.")
        return 0
    if arguments[0] != "fetch":
        raise InputError(f"datasets {arguments[0]}: no such command; the one there is, is `deft datasets fetch NAME`")
    from deft.config.settings import FetchConfig

    config, as_json = _parse_command(
        FetchConfig,
        arguments[1:],
        "datasets fetch NAME",
        "Download a dataset of D4RL, resumed where it was interrupted, and verify it.",
        word=("name", "one dataset's name"),
    )
    from deft.data.datasets import download_folder
    from deft.data.datasets.fetch import fetch_dataset, shown_progress

    folder = download_folder() if config.out is None else Path(config.out)
    with shown_progress(config.name) as progress:
        found = fetch_dataset(config.name, folder, config.url, config.sha256, config.overwrite, progress)
    return _report(dataclasses.asdict(found), as_json)


def _parse_command(
    cls: type[Any],
    arguments: list[str],
    usage: str,
    description: str,
    word: tuple[str, str] | None = None,
    several: bool = False,
) -> tuple[Any, bool]:
    """The settings of a command out of its flags, and whether to print JSON.

    `word`: the setting that is given without a flag, and what it is to the user; with `several`, one or more of them.
    """
    from deft.config.fields import default_of
    from deft.config.flags import OUTPUT_DEFAULTS, OUTPUT_FLAGS, FlagGroup, class_flags, parse_flags
    from deft.config.validation import checked

    name = usage.split()[0]
    resumes_here = _is_bare_resume(cls, arguments)
    if resumes_here:
        arguments = [word for word in arguments if word != "--resume"]
    flags = [flag for flag in class_flags(cls) if word is None or flag.path != word[0]]
    given = parse_flags(
        [FlagGroup(name, cls.__doc__ or "", (*flags, *OUTPUT_FLAGS))],
        {**{flag.path: default_of(cls, flag.path) for flag in flags}, **OUTPUT_DEFAULTS},
        arguments,
        usage=f"deft {usage}",
        description=description,
    )
    settings = {flag.path: given.values[flag.path] for flag in flags if flag.path in given.values}
    if resumes_here:
        settings["resume"] = True
    if word is not None:
        if not given.words or (len(given.words) > 1 and not several):
            raise InputError(f"{name}: give {word[1]}; got {' '.join(given.words) or 'none'}")
        settings[word[0]] = tuple(given.words) if several else given.words[0]
    elif given.words:
        raise InputError(f"{name}: unexpected '{given.words[0]}'; a value follows its flag")
    spelled = {flag.path: f"--{flag.name}".replace("_", "-") for flag in flags}
    return checked(cls, settings, written=spelled | given.written), given.values.get("json", False)


def _is_bare_resume(cls: type[Any], arguments: list[str]) -> bool:
    """Whether `--resume` is written as a switch, as waypoint runs have it: from the run in `output_dir`."""
    from deft.config.fields import setting_names

    following = dict(zip(arguments, [*arguments[1:], "--"], strict=False))
    is_bare = following.get("--resume", "").startswith("--")
    return is_bare and {"resume", "output_dir"} <= set(setting_names(cls))


def report(arguments: list[str]) -> int:
    """`deft report RUN`."""
    from deft.config.flags import OUTPUT_DEFAULTS, OUTPUT_FLAGS, FlagGroup, parse_flags

    given = parse_flags(
        [FlagGroup("report", "The command itself.", OUTPUT_FLAGS)],
        OUTPUT_DEFAULTS,
        arguments,
        usage="deft report RUN",
        description="Write report.html, one page with all there is to see of a run of the F1 phases, into its folder.",
    )
    if len(given.words) != 1:
        raise InputError(f"report: give one run folder; got {' '.join(given.words) or 'none'}")

    from deft.evaluation.report import write_report

    return _report({"report": str(write_report(given.words[0]))}, given.values.get("json", False))


def doctor(arguments: list[str]) -> int:
    """`deft doctor [--cluster [--ray-address ADDRESS]] [--json]`."""
    from deft.config.flags import OUTPUT_DEFAULTS, OUTPUT_FLAGS, Flag, FlagGroup, parse_flags

    flags = (
        Flag("cluster", "cluster", (), bool, "Say what the Ray cluster has, and what a run would put where."),
        Flag("ray_address", "ray_address", (), str, "With --cluster: which one; `auto`, `local` or `host:port`."),
    )
    given = parse_flags(
        [FlagGroup("doctor", "The command itself.", (*flags, *OUTPUT_FLAGS))],
        {"cluster": False, "ray_address": "auto", **OUTPUT_DEFAULTS},
        arguments,
        usage="deft doctor",
        description="Say what this machine can render with, how fast, what it has, and what to install for the rest.",
    )
    if given.words:
        raise InputError(f"doctor: unexpected '{given.words[0]}'; it takes flags alone")

    describe: Callable[[Any], str]
    if given.values.get("cluster", False):
        from deft.training.cluster.report import describe_cluster as describe
        from deft.training.cluster.report import examine_cluster

        trust.name(given.values.get("ray_address"))
        results = examine_cluster(given.values.get("ray_address", "auto"))
    else:
        from deft.doctor import describe, examine

        results = examine()
    if given.values.get("json", False):
        return _report(results, as_json=True)
    print(describe(results), flush=True)
    return 0


COMMANDS: dict[str, tuple[Callable[[list[str]], int], str]] = {
    "train": (train, "train a policy:      deft train [ALGORITHM] [--config FILE] [flags]"),
    "evaluate": (evaluate, "evaluate a policy:   deft evaluate RUN|CHECKPOINT [--episodes N] [flags]"),
    "collect": (collect, "record a dataset:    deft collect --policy RUN|random|expert --out DATASET [flags]"),
    "compare": (compare, "compare policies:    deft compare RUN RUN … [--env ID] [--episodes N] [flags]"),
    "play": (play, "watch a policy:      deft play --env ID [--task NAME] --policy RUN|random|expert --video FILE"),
    "datasets": (datasets, "download a dataset:  deft datasets fetch NAME [--sha256 HEX] [--out FOLDER]"),
    "report": (report, "report on a run:     deft report RUN"),
    "doctor": (doctor, "examine the machine: deft doctor [--cluster] [--json]"),
}
WAYPOINT_TRAINING = {
    "waypoint-sft": "Train a waypoint policy on recorded driving (`deft collect waypoints` records it).",
    "waypoint-ppo": "Train a residual on the waypoints of a frozen supervised policy with PPO.",
}
WAYPOINT_RUNS = ("--sft-checkpoint", "--rl-checkpoint")
PHASE_TRAINING = {
    "teacher": "Train an F1 world model on random exploration, or on recorded video.",
    "student": "Train an explorer by PPO to find what a teacher's world model does not know.",
    "adversarial": "Train world model and explorer against each other.",
    "all": "Train the three phases in order, and write a report.",
}
TRAIN_HELP = """usage: deft train [ALGORITHM] [--config FILE] [flags]

Train a policy. The settings come from the defaults, then the file, then the flags.
FILE is JSON or YAML, or the name of a preset; the config.yaml of a run repeats it."""


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print("usage: deft COMMAND ...\n\nTrain vision-language-action robot policies with reinforcement learning.\n")
        for name, (_, summary) in COMMANDS.items():
            print(f"  {name:10}{summary}")
        print("\n  deft COMMAND --help shows its flags; deft --version the version.")
        return 0
    if arguments[0] == "--version":
        from deft import __version__

        print(f"deft {__version__}")
        return 0
    if arguments[0] not in COMMANDS:
        from deft.config.validation import suggestion

        raise InputError(f"{arguments[0]}: no such command; {suggestion(arguments[0], COMMANDS)}")
    command, _ = COMMANDS[arguments[0]]
    return command(arguments[1:])


def _peek(flags: Sequence[str], name: str) -> str | None:
    """The value of a flag that decides which flags there are; None where it is not given, or has no value."""
    for flag, following in zip(flags, [*flags[1:], "--"], strict=False):
        if flag.startswith(f"--{name}="):
            return flag.partition("=")[2]
        if flag == f"--{name}" and not following.startswith("--"):
            return following
    return None


def _config_of_run(path: Path) -> Path | None:
    """The settings of the run that a run folder, or a checkpoint in one, belongs to."""
    places = (path / "config.yaml", path.parent / "config.yaml")
    return next((place for place in places if os.path.isfile(place)), None)  # unlike Path, not an error of a long name


def _report(results: Mapping[str, Any], as_json: bool) -> int:
    """Print the results, for a person or as one line of JSON; the exit status is that of a command that is done."""
    if os.environ.get("RANK", "0") != "0":  # of several processes that train together, the first one tells
        return 0
    plain = _plain(results)
    if as_json:
        print(json.dumps(plain, allow_nan=False), flush=True)
    else:
        for name, value in plain.items():
            print(f"{name}: {value}", flush=True)
    return 0


def _plain(value: Any) -> Any:
    """Results as JSON has them: NumPy's and torch's scalars as numbers, paths as text, NaN and infinity as null."""
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
    """Where the traceback of an unexpected error is: above, or in a file."""
    if show:
        traceback.print_exc()
        return "traceback above"
    with tempfile.NamedTemporaryFile("w", prefix="deft-", suffix=".log", delete=False, encoding="utf-8") as file:
        traceback.print_exc(file=file)
    return f"traceback in {file.name}; --debug shows it"
