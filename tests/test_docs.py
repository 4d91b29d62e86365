"""The documentation holds: settings and defaults are the code's, commands and Python run, links lead somewhere.

What stands in a page's fenced blocks is done in order, in one new folder a page, with fewer steps:

- `bash`: lines that start with `deft` (after NAME=VALUE) are run and must end with status 0. Each starts without the
  modules of the folder, as a new process does.
- `console`: `$ deft …` is run as it stands, and must print the lines below it.
- `python`: run; the blocks of a page share their names.
- `<!-- file: NAME -->` before a block of any language: written to NAME, and not run.

`<!-- settings: CLASS -->` … `<!-- end -->` holds a table of a settings class; `python tests/test_docs.py` writes the
tables anew.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import io
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium
import h5py
import numpy as np
import pytest
from pydantic import TypeAdapter

import deft
from deft import PPO, ActorCritic, Trainer, schema
from deft.cli import PHASE_TRAINING, WAYPOINT_TRAINING, main
from deft.config import algorithm_settings, f1_settings, settings, waypoint_settings
from deft.config.fields import nested_class, setting_names
from deft.config.flags import Flag, class_flags, run_flags
from deft.config.loading import PRESETS, resolve, to_dict
from deft.config.offline_rl_config import OfflineRLConfig
from deft.config.rl_config import RLConfig

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
PAGE_NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
CONFIGURATION = DOCS / "configuration.md"
OTHER_COMMANDS = {"make", "pip", "tensorboard", "wandb", "trackio", "python"}  # in `bash` blocks, and not run


# ------------------------------------------------------------------------------------------------------------ the pages


@dataclass
class Block:
    """A fenced block: its language, the file that it is written to (or None), its text."""

    language: str
    file: str | None
    text: str


def blocks(page: Path) -> list[Block]:
    pattern = r"(?:<!-- file: (\S+) -->\n+)?^```(\w*)\n(.*?)^```$"
    text = page.read_text()
    found = [Block(m[2], m[1], m[3]) for m in re.finditer(pattern, text, re.DOTALL | re.MULTILINE)]
    assert 2 * len(found) == len(re.findall(r"^\s*```", text, re.MULTILINE)), f"{page.name}: a block that is not found"
    return found


def commands(text: str) -> list[list[str]]:
    """The commands of a shell block as words, without what was set for them."""
    lines = text.replace("\\\n", " ").splitlines()
    words = (shlex.split(line, comments=True) for line in lines)
    return [list(itertools.dropwhile(lambda word: "=" in word, line)) for line in words if line]


# ----------------------------------------------------------------------------------------------------- scaled-down runs


def fewer_steps(total: str) -> str:
    return str(max(64, int(float(total.replace("_", ""))) // 1000))


def fewer_epochs(total: str) -> str:
    return str(max(1, int(total) // 20))


def with_flag(arguments: list[str], name: str, value: str, *other_names: str) -> list[str]:
    """The arguments with one flag set, whatever it was before, under whatever name."""
    spelled = {f"--{one}" for one in (name, *other_names)}
    kept, skipping = [], False
    for argument in arguments:
        if argument.startswith("--"):
            skipping = argument.replace("_", "-") in spelled
        if not skipping:
            kept.append(argument)
    return [*kept, f"--{name}", value]


def scaled_down(arguments: list[str]) -> list[str]:
    if arguments[0] in ("evaluate", "play"):
        return with_flag(arguments, "episodes", "2")
    if arguments[0] == "compare":
        return with_flag(arguments, "episodes", "2")
    if arguments[:2] == ["collect", "waypoints"]:
        return with_flag(arguments, "episodes", "2")
    if arguments[0] == "train" and arguments[1] in WAYPOINT_TRAINING:
        return scaled_down_waypoints(arguments)
    if arguments[:2] == ["train", "tokenizer"]:
        few = {"num-updates": "2", "num-frames": "64", "held-out-frames": "8", "num-workers": "0", "threads": "1"}
        return functools.reduce(lambda found, flag: with_flag(found, *flag), few.items(), arguments)
    if arguments[0] == "train" and arguments[1] in PHASE_TRAINING:
        episodes = "2" if "--resume" in arguments else "1"
        few = {"num-episodes": episodes, "steps-per-episode": "3", "batch-size": "1", "threads": "1"}
        return functools.reduce(lambda found, flag: with_flag(found, *flag), few.items(), [*arguments, "--no-overlap"])
    if arguments[0] == "collect":
        return with_flag(arguments, "steps", "200", "episodes")
    if arguments[0] != "train":
        return arguments
    given = [word.replace("_", "-") for word in arguments]
    if is_offline(arguments):
        epochs = arguments[given.index("--num-epochs") + 1] if "--num-epochs" in given else "20"
        arguments = with_flag(arguments, "num-epochs", fewer_epochs(epochs))
        arguments = with_flag(arguments, "updates-per-epoch", "2")
        arguments = with_flag(arguments, "batch-size", "8")
        arguments = with_flag(arguments, "eval-episodes", "2")
        return with_flag(arguments, "threads", "1")
    total = arguments[given.index("--total-timesteps") + 1] if "--total-timesteps" in given else "100000"
    arguments = with_flag(arguments, "total-timesteps", fewer_steps(total), "num-iterations")
    if arguments[1] == "sac":
        arguments = with_flag(arguments, "learning-starts", "60")
        arguments = with_flag(arguments, "eval-episodes", "1")
        return with_flag(arguments, "threads", "1")
    arguments = with_flag(arguments, "rollout-steps", "8", "buffer-size")
    arguments = with_flag(arguments, "eval-episodes", "2")
    return with_flag(arguments, "threads", "1")


def scaled_down_waypoints(arguments: list[str]) -> list[str]:
    arguments = with_flag(arguments, "threads", "1")
    if arguments[1] == "waypoint-sft":
        return with_flag(arguments, "num-epochs", "1")
    settings = {"num-iterations": "2", "rollout-steps": "4", "num-envs": "4", "eval-episodes": "2"}
    if "--safety" in arguments:
        settings["safety-episodes"] = "2"
    for name, value in settings.items():
        arguments = with_flag(arguments, name, value)
    return arguments


def is_offline(arguments: list[str]) -> bool:
    """Whether a `train` command is of an offline algorithm: by its name, by the run that it resumes, or by its file."""
    algorithm = algorithm_settings.ALGORITHM_SETTINGS.get(arguments[1])
    for flag, name in {"--resume": "config.yaml", "--config": ""}.items():
        if flag in arguments and (file := Path(arguments[arguments.index(flag) + 1], name)).is_file():
            return re.search("^dataset:", file.read_text(), re.MULTILINE) is not None
    return algorithm is not None and algorithm.LEARNS_FROM == "dataset"


def run_command(arguments: list[str]) -> tuple[int, str]:
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        status = main(arguments)
    return status, output.getvalue()


@pytest.fixture(scope="session")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with datasets of the names in the examples: Hopper's shapes, three episodes of noise."""
    place, generator = tmp_path_factory.mktemp("datasets"), np.random.default_rng(0)
    with h5py.File(place / "hopper-medium-v2.hdf5", "w") as file:
        file["observations"] = generator.normal(size=(90, 11)).astype(np.float32)
        file["actions"] = generator.uniform(-1, 1, (90, 3)).astype(np.float32)
        file["rewards"] = generator.normal(size=90).astype(np.float32)
        file["terminals"] = np.arange(90) % 30 == 29
        file["timeouts"] = np.zeros(90, bool)
    shutil.copy(place / "hopper-medium-v2.hdf5", place / "hopper-medium-expert-v2.hdf5")
    return place


@pytest.fixture
def folder(tmp_path: Path, datasets: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A new working folder whose modules can be imported; they and their environments are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DEFT_DATASETS", str(datasets))
    monkeypatch.syspath_prepend(tmp_path)
    environments, modules = dict(gymnasium.registry), set(sys.modules)
    yield tmp_path
    gymnasium.registry.clear()
    gymnasium.registry.update(environments)
    forget_modules(tmp_path, modules)


def forget_modules(folder: Path, kept: Collection[str] = ()) -> None:
    for name in set(sys.modules) - set(kept):
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(folder)):
            del sys.modules[name]


@pytest.mark.parametrize("page", PAGES, ids=PAGE_NAMES)
def test_commands_and_python_run(page: Path, folder: Path) -> None:
    names: dict[str, Any] = {"__name__": "docs"}
    for block in blocks(page):
        if block.file is not None:
            Path(block.file).parent.mkdir(parents=True, exist_ok=True)
            Path(block.file).write_text(block.text)
        elif block.language == "python":
            source = re.sub(
                r"((?:total_timesteps|learning_starts)=)([\d_]+)", lambda m: m[1] + fewer_steps(m[2]), block.text
            )
            source = re.sub(r"(num_epochs=)(\d+)", lambda m: m[1] + fewer_epochs(m[2]), source)
            exec(compile(source, str(page), "exec"), names)
        elif block.language == "bash":
            run_bash(block.text)
        elif block.language == "console":
            run_console(block.text)
        else:
            assert block.language in ("", "text", "toml"), f"```{block.language} would not be run"


def run_bash(text: str) -> None:
    for program, *arguments in commands(text):
        if "envpool" in arguments and importlib.util.find_spec("envpool") is None:
            continue
        if program == "deft":
            forget_modules(Path.cwd())
            status, output = run_command(scaled_down(arguments))
            assert status == 0, f"deft {shlex.join(arguments)}: {output}"
        else:
            assert program in OTHER_COMMANDS, program


def run_console(text: str) -> None:
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, _, expected = part.partition("\n")
        program, *arguments = shlex.split(command)
        assert program == "deft"
        _, output = run_command(arguments)
        for line in filter(None, expected.splitlines()):
            assert line in output.splitlines(), command


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    used = set(re.findall(r"\bmake ([a-z-]+)\b", "\n".join(b.text for p in PAGES for b in blocks(p))))
    assert used <= targets


@pytest.mark.parametrize("page", PAGES, ids=PAGE_NAMES)
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", page.read_text()):
        if target.startswith("http"):
            continue
        linked = page.parent / target if target else page
        assert linked.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(linked), f"{page.name} links to {target}#{anchor}"


def anchors(page: Path) -> set[str]:
    """What a page's headings are called in links."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


# ------------------------------------------------------------------------------------------------------------- settings


SETTINGS_CLASSES: dict[str, tuple[str, str]] = {  # class → an algorithm whose runs have it, where it stands in a file
    "RunConfig": ("ppo", ""),
    "EnvConfig": ("ppo", "env"),
    "CurriculumConfig": ("ppo", "env.curriculum"),
    "PolicyConfig": ("ppo", "policy"),
    "VLAConfig": ("ppo", "policy.vla_config"),
    "TrainerConfig": ("ppo", "trainer"),
    "ClusterConfig": ("ppo", "cluster"),
    "LoggingConfig": ("ppo", "logging"),
    **{cls.__name__: (name, "algorithm.cfg") for name, cls in algorithm_settings.ALGORITHM_SETTINGS.items()},
    "ReplayPolicyConfig": ("sac", "policy"),
    "DatasetConfig": ("iql", "dataset"),
    "EvaluationEnvConfig": ("iql", "env"),
    "DatasetPolicyConfig": ("iql", "policy"),
    "OfflineTrainerConfig": ("iql", "trainer"),
}
COMMAND_CLASSES = (
    "EvaluateConfig", "CompareRunsConfig", "CollectConfig", "PlayConfig", "FetchConfig", "PPOConfig",
    "WaypointSFTConfig",
    "WaypointRecordingConfig", "CompareConfig", "ModelSection", "TrainingConfig", "TeacherSection", "RunSection",
    "StudentSection", "StudentRewards", "ExplorerSettings", "AdversarialSection", "AllSection",
)  # fmt: skip
NOT_SHOWN = {  # bases, and classes whose settings are all in another's table
    "LoopConfig", "ReplayRunConfig",
    "AlgorithmConfig", "AlgorithmSettings", "OfflineSettings", "OffPolicySettings", "RunSettings", "OfflineRunConfig",
    "PhaseConfig",
}  # fmt: skip


@functools.cache
def settings_class(name: str) -> Any:
    """A class of settings, of a run or of an algorithm."""
    modules = (settings, algorithm_settings, waypoint_settings, f1_settings)
    return next(getattr(module, name) for module in modules if hasattr(module, name))


def flags_of(class_name: str) -> dict[str, Flag]:
    """The flags of a settings class by the setting's name."""
    if class_name in COMMAND_CLASSES:
        return {flag.path: flag for flag in class_flags(settings_class(class_name))}
    algorithm, section = SETTINGS_CLASSES[class_name]
    flags = [flag for group in run_flags(algorithm) for flag in group.flags]
    return {f.path.rpartition(".")[2]: f for f in flags if f.path.rpartition(".")[0] == section}


def allowed(values: dict[str, Any]) -> str:
    """What a setting may be, from its JSON schema."""
    if "anyOf" in values:
        return " or ".join("none" if v.get("type") == "null" else allowed(v) for v in values["anyOf"])
    if "enum" in values or "const" in values:
        return ", ".join(f"`{value}`" for value in values.get("enum", [values.get("const")]))
    if "prefixItems" in values:
        return f"list of {len(values['prefixItems'])} numbers"
    if values["type"] == "array":
        return f"list of {allowed(values['items']).replace('number', 'numbers', 1)}"
    word = {
        "integer": "whole number",
        "number": "number",
        "string": "text",
        "boolean": "true, false",
        "object": "mapping",
    }
    limits = [
        f"{sign} {values[key]}"
        for key, sign in {"exclusiveMinimum": ">", "minimum": "≥", "exclusiveMaximum": "<", "maximum": "≤"}.items()
        if key in values and values[key] < 2**63  # which is where seeds end
    ]
    return " ".join([word[values["type"]], ", ".join(limits)]).strip()


def shown_default(values: dict[str, Any]) -> str:
    if "default" not in values:
        return "`{}`" if values.get("type") == "object" else "required"
    default = values["default"]
    if isinstance(default, bool):
        text = str(default).lower()
    elif isinstance(default, float):
        text = f"{default:g}"
    else:
        text = "none" if default is None else str(default)
    return f"`{text}`"


def rows(class_name: str) -> Iterator[tuple[str, str, str, str, str]]:
    """Setting, flags, what it may be, default, meaning."""
    cls = settings_class(class_name)
    properties = TypeAdapter(cls).json_schema()["properties"]
    for name in setting_names(cls):
        if nested_class(cls, name) is not None:
            continue
        flag = flags_of(class_name)[name]
        spelled = [f"`--{other.replace('_', '-')}`" for other in (flag.name, *flag.aliases)]
        if (class_name, name) in (("EvaluateConfig", "path"), ("FetchConfig", "name")):
            spelled = ["the first word"]
        if class_name == "CompareRunsConfig" and name == "runs":
            spelled = ["the first words"]
        yield f"`{name}`", ", ".join(spelled), allowed(properties[name]), shown_default(properties[name]), flag.help


def table(class_name: str) -> str:
    header = ("setting", "flag", "value", "default", "meaning")
    lines = [header, tuple("---" for _ in header), *rows(class_name)]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


TABLE = re.compile(r"(<!-- settings: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def with_tables(text: str) -> str:
    """The page with every table as the classes are now."""
    return TABLE.sub(lambda match: f"{match[1]}\n{table(match[2])}\n\n{match[3]}", text)


def test_every_setting_is_there_with_its_default() -> None:
    """Each class has its table on the page of the settings, or on that of its algorithm."""
    shown = [match[2] for page in PAGES for match in TABLE.finditer(page.read_text())]
    assert sorted(shown) == sorted([*SETTINGS_CLASSES, *COMMAND_CLASSES])


@pytest.mark.parametrize("page", PAGES, ids=PAGE_NAMES)
def test_tables_of_settings_are_of_the_classes_now(page: Path) -> None:
    assert page.read_text() == with_tables(page.read_text()), "python tests/test_docs.py writes the tables anew"


def test_every_settings_class_is_there() -> None:
    everything = vars(settings) | vars(algorithm_settings) | vars(waypoint_settings) | vars(f1_settings)
    classes = {n for n, v in everything.items() if isinstance(v, type) and hasattr(v, "__pydantic_fields__")}
    assert classes - NOT_SHOWN == {*SETTINGS_CLASSES, *COMMAND_CLASSES}
    assert set(setting_names(settings.AlgorithmConfig)) == {"name", "cfg"}
    own = {
        name for name in setting_names(settings.OfflineRunConfig) if not nested_class(settings.OfflineRunConfig, name)
    }
    assert own == set(setting_names(settings.RunSettings))  # the table of RunConfig shows these


def test_flat_names_presets_and_aliases_are_there() -> None:
    text = CONFIGURATION.read_text()
    words = set(re.findall(r"`(?:--)?([\w.-]+)`", text))
    words |= {word.replace("-", "_") for word in words}
    words |= {word for page in PAGES for word in re.findall(r"^\| `(\w+)` \|", page.read_text(), re.MULTILINE)}
    assert set(setting_names(RLConfig)) | set(setting_names(OfflineRLConfig)) <= words
    assert {preset.stem for preset in PRESETS.glob("*.yaml")} <= words
    assert set(settings.MOVED_SETTINGS) <= words
    for cls in algorithm_settings.ALGORITHM_SETTINGS.values():
        assert set(cls.ALIASES) <= words


# --------------------------------------------------------------------------------------------------- other enumerations


def test_every_metric_of_ppo_is_there(tmp_path: Path) -> None:
    env = gymnasium.make("CartPole-v1")
    policy = ActorCritic(env.observation_space, env.action_space)
    quiet = settings.LoggingConfig(console_level="CRITICAL", tensorboard=False, enable_file_logging=False)
    trainer = Trainer(
        policy, env, PPO(policy), buffer_size=32, output_dir=tmp_path, logging_config=quiet, log_freq=1, eval_freq=0
    )
    trainer.train(total_timesteps=32)
    trainer.close()
    lines = [json.loads(line) for line in (tmp_path / "episode_metrics.jsonl").read_text().splitlines()]
    logged = {name for line in lines for name in line}
    documented = set(re.findall(r"`([\w/]+)`", (DOCS / "algorithms" / "ppo.md").read_text()))
    assert logged <= documented


@pytest.mark.parametrize("algorithm", ["iql", "cql", "td3-bc", "dt"])
def test_every_metric_of_the_offline_algorithms_is_there(algorithm: str, folder: Path) -> None:
    arguments = ["train", algorithm, "--dataset", "hopper-medium-v2", "--num-epochs", "20", "--output-dir", "run"]
    status, output = run_command(scaled_down([*arguments, "--log-freq", "1", "--eval-freq", "1", "--hidden-dim", "8"]))
    assert status == 0, output
    lines = [json.loads(line) for line in Path("run/episode_metrics.jsonl").read_text().splitlines()]
    assert {line["type"] for line in lines} == {"update", "evaluation"}
    page = DOCS / "algorithms" / f"{'decision-transformer' if algorithm == 'dt' else algorithm}.md"
    documented = set(re.findall(r"`([\w/]+)`", page.read_text()))
    logged = {
        kind: {name for line in lines if line["type"] == kind for name in line} for kind in ("update", "evaluation")
    }
    assert logged["update"] - {"type", "step", "time"} <= documented
    documented |= set(re.findall(r"`([\w/]+)`", (DOCS / "offline.md").read_text()))
    assert logged["evaluation"] - {"step", "time"} <= documented


def test_every_key_of_the_schema_is_there() -> None:
    keys = {value for name, value in vars(schema).items() if name.isupper() and isinstance(value, str)}
    assert keys <= set(re.findall(r"`(\w+)`", (DOCS / "extending.md").read_text()))


def map_rows() -> list[list[str]]:
    lines = (DOCS / "from-the-documents.md").read_text().splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if line.startswith("| ")]
    return [row for row in cells if row[-1].strip() in ("now", "later")]


def test_what_the_map_says_is_there_and_what_is_not_is_not() -> None:
    found = map_rows()
    assert {row[-1] for row in found} <= {"now", "later"}
    for *row, when in found:
        text = " ".join(row[1:])
        for name in re.findall(r"`deft\.([A-Z]\w+|(?:load|make|get|set|setup)_\w+)", text):
            assert (name in deft.__all__) == (when == "now"), f"{name} is said to be here {when}"
        for name in re.findall(r"`deft train ([a-z]\S*?)[ `]", text):
            known = {*algorithm_settings.ALGORITHM_SETTINGS, *WAYPOINT_TRAINING, *PHASE_TRAINING, "tokenizer"}
            assert (name in known) == (when == "now"), f"{name} is said to be here {when}"
        for name in re.findall(r"`scripts/(\S+?\.sh)", text):
            assert (ROOT / "scripts" / name).is_file() == (when == "now"), f"{name} is said to be here {when}"


@pytest.mark.parametrize("script", sorted((ROOT / "scripts").glob("run_*.sh")), ids=lambda path: path.name)
def test_scripts_run_their_algorithm(script: Path) -> None:
    """`run_offline_rl_td3bc.sh FLAGS` is `python -m deft train td3-bc FLAGS`, and the map knows the script."""
    environment = {"PYTHON": "echo", "PATH": os.environ["PATH"]}
    told = subprocess.run([script, "--seed", "a b"], env=environment, capture_output=True, text=True, check=True)
    name = {"td3bc": "td3-bc"}.get(script.stem.rpartition("_")[2], script.stem.rpartition("_")[2])
    assert told.stdout == f"-m deft train {name} --seed a b\n"
    assert f"`scripts/{script.name}" in (DOCS / "from-the-documents.md").read_text()


def test_every_name_of_the_package_is_in_the_map() -> None:
    text = (DOCS / "from-the-documents.md").read_text()
    assert {name for name in deft.__all__ if name != "__version__" and f"`deft.{name}" not in text} == set()


def test_defaults_in_the_tables_are_those_of_a_run() -> None:
    """The JSON schema that the tables are made from agrees with what a run without settings has."""
    for class_name, (algorithm, section) in SETTINGS_CLASSES.items():
        if class_name in ("VLAConfig", "CurriculumConfig"):  # none by default
            continue
        run = to_dict(resolve({"algorithm": algorithm}))
        values = functools.reduce(lambda part, name: part[name], filter(None, section.split(".")), run)
        for name, _, _, default, _ in rows(class_name):
            assert default == shown_default({"default": values[name.strip("`")]}), name


if __name__ == "__main__":
    for page in PAGES:
        if (text := page.read_text()) != with_tables(text):
            page.write_text(with_tables(text))
            print(f"{page}: written", file=sys.stderr)
