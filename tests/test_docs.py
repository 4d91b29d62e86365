"""The documentation holds: commands and Python run, links lead somewhere, the site builds without a warning.

The fenced blocks of a page are executed in order, in one new folder per page, with fewer steps:

- `bash`: lines that start with `deft` (after NAME=VALUE) are run and must end with status 0. Each starts without the
  modules of the folder, as a new process does. `eval "$(deft …)"` and `deft … | …` run `deft` alone.
- `deft serve` is started on a free port until the page ends; the port 6080 in later blocks of Python stands for it.
- `console`: `$ deft …` is run as it stands, and must print the lines below it.
- `python`: run; the blocks of a page share their names.
- `<!-- file: NAME -->` before a block of any language: written to NAME, and not run.
- `<!-- setup: bash` … `-->`, a comment that readers do not see: run like a block. It makes what a page takes as given,
  such as a trained run.

Tables of settings are generated when the site is built; `docs/extensions/deft_reference.py` has the directives.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import io
import itertools
import json
import os
import pkgutil
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
import pytest
from d4rl_files import write_hopper
from served_policies import served

import deft
import deft.config
from deft import PPO, ActorCritic, Trainer, load_policy, schema
from deft.cli import main
from deft.config import algorithm_settings, aliases, settings
from deft.config.deployment_settings import ServeConfig
from deft.config.flags import parse
from deft.config.recipes import find_recipe
from deft.config.rl_yaml import PHASE_TRAINING
from deft.config.training import FLAT_TRAINING, parse_training
from deft.envs.suites import SUITES, find_suite
from deft.envs.suites.install import INSTALLED, state_of
from deft.training import preparation

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(page for page in DOCS.rglob("*.md") if "build" not in page.parts)]
PAGE_NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
OTHER_COMMANDS = {"make", "pip", "tensorboard", "wandb", "trackio", "python"}  # in `bash` blocks, and not run


# ------------------------------------------------------------------------------------------------------------ the pages


@dataclass
class Block:
    """A fenced block: its language, the file that it is written to (or None), its text."""

    language: str
    file: str | None
    text: str


def blocks(page: Path) -> list[Block]:
    pattern = r"(?:<!-- file: (\S+) -->\n+)?^```([\w{}-]*)[^\n]*\n(.*?)^```$|^<!-- setup: (\w+)\n(.*?)^-->$"
    text = page.read_text()
    matches = list(re.finditer(pattern, text, re.DOTALL | re.MULTILINE))
    shown = [match for match in matches if match[4] is None]
    assert 2 * len(shown) == len(re.findall(r"^\s*```", text, re.MULTILINE)), f"{page.name}: a block that is not found"
    return [Block(m[2], m[1], m[3]) if m[4] is None else Block(m[4], None, m[5]) for m in matches]


def commands(text: str) -> list[list[str]]:
    """The commands of a shell block as words, without what was set for them."""
    lines = re.sub(r'^eval "\$\((.*)\)"$', r"\1", text.replace("\\\n", " "), flags=re.MULTILINE).splitlines()
    words = (shlex.split(line, comments=True) for line in lines)
    lines_of_words = (itertools.takewhile(lambda word: word != "|", line) for line in words if line)
    return [list(itertools.dropwhile(lambda word: "=" in word, line)) for line in lines_of_words]


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
    if arguments[0] == "train" and "--recipe" in arguments:
        return scaled_down_recipe(arguments)
    if arguments[0] == "train" and arguments[1].startswith("waypoint-"):
        return scaled_down_waypoints(arguments)
    if arguments[:2] == ["train", "tokenizer"]:
        few = {"num-updates": "2", "num-frames": "64", "held-out-frames": "8", "num-workers": "0", "threads": "1"}
        return functools.reduce(lambda found, flag: with_flag(found, *flag), few.items(), arguments)
    if arguments[0] == "train" and arguments[1] in PHASE_TRAINING:
        episodes = "2" if "--resume" in arguments else "1"
        few = {"num-episodes": episodes, "steps-per-episode": "3", "batch-size": "1", "threads": "1"}
        return functools.reduce(lambda found, flag: with_flag(found, *flag), few.items(), [*arguments, "--no-overlap"])
    if arguments[0] == "collect" and "--only-success" in arguments:
        return with_flag(arguments, "episodes", "2")
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
    num_envs = int(arguments[given.index("--num-envs") + 1]) if "--num-envs" in given else 1
    arguments = with_flag(arguments, "total-timesteps", fewer_steps(total), "num-iterations")
    if num_envs > 8:
        arguments = with_flag(arguments, "num-envs", "8")  # every group size of the pages divides it
    named = algorithm_settings.ALGORITHM_SETTINGS.get(arguments[1])  # none with --resume or --config alone
    if named is not None and named.LEARNS_FROM == "replay":
        arguments = with_flag(arguments, "total-timesteps", str(min(200, int(fewer_steps(total)))))
        arguments = with_flag(arguments, "learning-starts", "60")
        arguments = with_flag(arguments, "eval-episodes", "1")
        return with_flag(arguments, "threads", "1")
    arguments = with_flag(arguments, "rollout-steps", "8", "buffer-size")
    arguments = with_flag(arguments, "eval-episodes", "2")
    return with_flag(arguments, "threads", "1")


def scaled_down_recipe(arguments: list[str]) -> list[str]:
    """A recipe as its algorithm with flags, on the CPU in a few environments."""
    recipe = arguments[arguments.index("--recipe") + 1]
    others = [word for word in arguments[1:] if word not in ("--recipe", recipe)]
    algorithm = parse_training(["--recipe", recipe]).name
    named = ["train", algorithm, "--config", str(find_recipe(recipe)), *others, "--device", "cpu"]
    if algorithm_settings.ALGORITHM_SETTINGS[algorithm].LEARNS_FROM != "dataset":
        named = with_flag([*named, "--vector", "sync"], "num-envs", "8")
    return scaled_down(named)


def few_first(command: str) -> list[str]:
    """A command that a recipe runs first, with two episodes or two updates."""
    words = shlex.split(command)[1:]
    return with_flag(words, "episodes", "2") if words[0] == "collect" else scaled_down(words)


def scaled_down_waypoints(arguments: list[str]) -> list[str]:
    arguments = with_flag(arguments, "threads", "1")
    if arguments[1] == "waypoint-sft":
        return with_flag(arguments, "num-epochs", "1")
    settings = {"iterations": "2", "rollout-steps": "4", "num-envs": "4", "eval-episodes": "2"}
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
    place = tmp_path_factory.mktemp("datasets")
    write_hopper(place / "hopper-medium-v2.hdf5", 90, 30)
    shutil.copy(place / "hopper-medium-v2.hdf5", place / "hopper-medium-expert-v2.hdf5")
    return place


@pytest.fixture
def folder(tmp_path: Path, datasets: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A new working folder whose modules can be imported; they and their environments are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DEFT_DATASETS", str(datasets))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(preparation, "words_of", few_first)
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
    with contextlib.ExitStack() as stack:
        run_blocks(page, stack)


def run_blocks(page: Path, stack: contextlib.ExitStack) -> None:
    names: dict[str, Any] = {"__name__": "docs"}
    ports: list[int] = []  # of the policy servers that the page started
    for block in blocks(page):
        if block.file is not None:
            Path(block.file).parent.mkdir(parents=True, exist_ok=True)
            Path(block.file).write_text(block.text)
        elif block.language == "python":
            source = re.sub(
                r"((?:total_timesteps|learning_starts)=)([\d_]+)", lambda m: m[1] + fewer_steps(m[2]), block.text
            )
            source = re.sub(r"(num_epochs=)(\d+)", lambda m: m[1] + fewer_epochs(m[2]), source)
            source = source.replace("127.0.0.1:6080", f"127.0.0.1:{ports[-1]}") if ports else source
            exec(compile(source, str(page), "exec"), names)
        elif block.language == "bash":
            run_bash(block.text, stack, ports)
        elif block.language == "console":
            run_console(block.text)
        else:
            assert block.language in ("", "text", "toml", "{toctree}"), f"```{block.language} would not be run"


def serve_in_background(arguments: list[str], stack: contextlib.ExitStack) -> int:
    """Start a policy server on a free port until the page ends, and return the port."""
    config = parse("serve", ServeConfig, [*arguments[1:], "--port", "0", "--device", "cpu"], word="path").config
    return stack.enter_context(served(load_policy(config.path, device="cpu"), mode=config.mode))[1]


def run_bash(text: str, stack: contextlib.ExitStack, ports: list[int]) -> None:
    for program, *arguments in commands(text):
        if "envpool" in arguments and importlib.util.find_spec("envpool") is None:
            continue
        if any(name in word for word in arguments for name in missing_suites()):
            continue
        if program == "deft" and arguments[0] == "serve":
            ports.append(serve_in_background(arguments, stack))
        elif program == "deft":
            forget_modules(Path.cwd())
            status, output = run_command(scaled_down(arguments))
            assert status == 0, f"deft {shlex.join(arguments)}: {output}"
        else:
            assert program in OTHER_COMMANDS, program


def missing_suites() -> list[str]:
    return [name for name in SUITES if state_of(find_suite(name)) != INSTALLED]


def run_console(text: str) -> None:
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, _, expected = part.partition("\n")
        program, *arguments = shlex.split(command)
        assert program == "deft"
        _, output = run_command(arguments)
        for line in filter(None, expected.splitlines()):
            assert line in output.splitlines(), command


def test_git_ignores_what_the_commands_write() -> None:
    """They are typed in a clone. `deft report A B` writes `report.html` beside it."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git repository")
    written = {"report.html"}
    for block in [block for page in PAGES for block in blocks(page) if block.language == "bash"]:
        for flag, value in [pair for words in commands(block.text) for pair in itertools.pairwise(words)]:
            if flag.replace("_", "-") in ("--out", "--out-dir", "--output-dir", "--video"):
                written.add(value.removeprefix("./"))
    paths = sorted(path for path in written if not Path(path).is_absolute())
    done = subprocess.run(["git", "check-ignore", *paths], cwd=ROOT, capture_output=True, text=True)
    assert set(paths) - set(done.stdout.splitlines()) == set()


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


# ------------------------------------------------------------------------------------------------------------- the site


NOT_SHOWN = {  # sections only, or views of settings that other tables show
    "AlgorithmConfig", "OfflineRunConfig", "PhaseConfig", "ReplayRunConfig", "RLConfig", "OfflineRLConfig",
    "InfoConfig", "RecipesConfig",
    "LabelledRunConfig", "SuiteListConfig",
}  # fmt: skip


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", DOCS, tmp_path / "site"]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr[-4000:]
    configuration = (tmp_path / "site" / "reference" / "configuration.html").read_text()
    assert "total_timesteps" in configuration
    assert "PPOTrainer" in (tmp_path / "site" / "reference" / "api.html").read_text()
    assert "--total-timesteps" in (tmp_path / "site" / "reference" / "cli.html").read_text()
    configure = (tmp_path / "site" / "how-to" / "configure.html").read_text()
    assert all(f">{alias}<" in configure for alias in aliases.ALIASES)


def test_every_settings_class_has_its_table() -> None:
    """Every class that no other extends; of the others those that a table shows by name."""
    shown = [name for page in PAGES for name in re.findall(r"^:::\{settings\} (\w+)$", page.read_text(), re.MULTILINE)]
    classes: dict[str, type] = {}
    for module in pkgutil.iter_modules(deft.config.__path__, "deft.config."):
        for name, value in vars(importlib.import_module(module.name)).items():
            if hasattr(value, "__pydantic_fields__") and isinstance(value, type) and value.__module__ == module.name:
                classes[name] = value
    extended = {base for cls in classes.values() for base in cls.__mro__[1:]}
    leaves = {name for name, cls in classes.items() if cls not in extended}
    assert len(shown) == len(set(shown))
    assert leaves - NOT_SHOWN <= set(shown) <= set(classes)


def test_pages_are_short() -> None:
    words = {str(page.relative_to(ROOT)): len(page.read_text().split()) for page in PAGES[1:]}
    assert {name: count for name, count in words.items() if count > 1500} == {}


def test_every_page_is_in_a_table_of_contents() -> None:
    """Sphinx warns of a page that no toctree names; the README's links must name pages that exist as well."""
    listed = {
        (page.parent / f"{line}.md").resolve()
        for page in DOCS.rglob("index.md")
        for block in blocks(page)
        if block.language == "{toctree}"
        for line in block.text.splitlines()
        if line and not line.startswith(":")
    }
    assert {page.resolve() for page in DOCS.rglob("*.md")} - listed == {(DOCS / "index.md").resolve()}


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
    pages = (DOCS / "explanation" / "ppo.md", DOCS / "reference" / "metrics.md")
    assert logged <= {name for page in pages for name in re.findall(r"`([\w/]+)`", page.read_text())}


@pytest.mark.parametrize("algorithm", ["iql", "cql", "td3-bc", "rebrac", "fql", "dt"])
def test_every_metric_of_the_offline_algorithms_is_there(algorithm: str, folder: Path) -> None:
    arguments = ["train", algorithm, "--dataset", "hopper-medium-v2", "--num-epochs", "20", "--output-dir", "run"]
    status, output = run_command(scaled_down([*arguments, "--log-freq", "1", "--eval-freq", "1", "--hidden-dim", "8"]))
    assert status == 0, output
    lines = [json.loads(line) for line in Path("run/episode_metrics.jsonl").read_text().splitlines()]
    assert {line["type"] for line in lines} == {"update", "evaluation"}
    page = DOCS / "explanation" / f"{'decision-transformer' if algorithm == 'dt' else algorithm}.md"
    documented = set(re.findall(r"`([\w/]+)`", page.read_text()))
    logged = {
        kind: {name for line in lines if line["type"] == kind for name in line} for kind in ("update", "evaluation")
    }
    assert logged["update"] - {"type", "step", "time"} <= documented
    documented |= set(re.findall(r"`([\w/]+)`", (DOCS / "how-to" / "offline.md").read_text()))
    assert logged["evaluation"] - {"step", "time"} <= documented


def test_every_key_of_the_schema_is_there() -> None:
    keys = {value for name, value in vars(schema).items() if name.isupper() and isinstance(value, str)}
    assert keys <= set(re.findall(r"`(\w+)`", (DOCS / "reference" / "schema.md").read_text()))


def map_rows() -> list[list[str]]:
    pages = (DOCS / "reference" / "from-the-documents.md", DOCS / "reference" / "from-the-documents-settings.md")
    lines = [line for page in pages for line in page.read_text().splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines]
    return [row for row in cells if row[-1] in ("yes", "stand-in")]


def test_what_the_map_names_exists() -> None:
    assert len(map_rows()) > 80
    for row in map_rows():
        text = " ".join(row[1:-1])
        for name in re.findall(r"`deft\.([A-Z]\w+|(?:load|make|get|set|setup)_\w+)", text):
            assert name in deft.__all__, name
        for name in re.findall(r"`deft train ([a-z]\S*?)[ `]", text):
            assert name in {*algorithm_settings.ALGORITHM_SETTINGS, *FLAT_TRAINING, *PHASE_TRAINING}
        for name in re.findall(r"`scripts/(\S+?\.sh)", text):
            assert (ROOT / "scripts" / name).is_file(), name


@pytest.mark.parametrize("script", sorted((ROOT / "scripts").glob("run_*.sh")), ids=lambda path: path.name)
def test_scripts_run_their_algorithm(script: Path) -> None:
    """`run_offline_rl_td3bc.sh FLAGS` is `python -m deft train td3-bc FLAGS`, and the map knows the script."""
    environment = {"PYTHON": "echo", "PATH": os.environ["PATH"]}
    completed = subprocess.run([script, "--seed", "a b"], env=environment, capture_output=True, text=True, check=True)
    name = {"td3bc": "td3-bc"}.get(script.stem.rpartition("_")[2], script.stem.rpartition("_")[2])
    assert completed.stdout == f"-m deft train {name} --seed a b\n"
    assert f"`scripts/{script.name}" in (DOCS / "reference" / "from-the-documents.md").read_text()


def test_every_name_of_the_package_is_in_the_reference() -> None:
    listed = re.findall(r"^:::\{autoapi\} (.+)$", (DOCS / "reference" / "api.md").read_text(), re.MULTILINE)
    assert sorted(" ".join(listed).split()) == sorted(set(deft.__all__) - {"__version__"})
