"""Recipes: their headers, the list, and the settings that they stand for."""

import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest

from deft.cli import main
from deft.config import loading
from deft.config.loading import PRESETS, read_mapping, to_dict
from deft.config.recipes import find_recipe, read_recipe, recipe_names
from deft.config.training import parse_training
from deft.errors import InputError

ROOT = Path(__file__).parents[2]
TUTORIAL = ROOT / "docs" / "tutorials" / "demonstrations-to-rl.md"


@pytest.mark.parametrize("name", recipe_names())
def test_a_header_names_what_exists(name):
    recipe = read_recipe(PRESETS / f"{name}.yaml")
    assert recipe.results is None or (ROOT / recipe.results).is_file()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(recipe.extras) <= project["optional-dependencies"].keys()
    assert "recipe" not in read_mapping(PRESETS / f"{name}.yaml")
    for command in recipe.prepare:
        assert shlex.split(command)[:2] in (["deft", "train"], ["deft", "collect"])


def test_the_list_has_every_recipe(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert main(["recipes"]) == 0
    table = capsys.readouterr().out
    assert all(re.search(rf"^ {name} ", table, re.MULTILINE) for name in recipe_names())
    assert max(map(len, table.splitlines())) <= 100
    assert "…" not in table
    for columns in (60, 80):  # too narrow for a table
        monkeypatch.setenv("COLUMNS", str(columns))
        assert main(["recipes"]) == 0
        *listed, _, _ = text = capsys.readouterr().out.splitlines()
        assert set(recipe_names()) <= set(text)
        assert max(map(len, listed)) <= columns
    assert main(["recipes", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["tabletop-ppo"]["needs"] == "CUDA GPU; extras data, warp"
    assert found["metaworld-mt10-ppo"]["needs"] == "extra data; suite metaworld"
    assert found["tabletop-ppo"]["first"] == ["deft train --recipe tabletop-sft"]


def test_show_prints_the_file_which_trains_the_same(tmp_path, capsys):
    assert main(["recipes", "show", "tabletop-grpo-labels"]) == 0
    copy = tmp_path / "mine.yaml"
    copy.write_text(capsys.readouterr().out)
    assert copy.read_text() == (PRESETS / "tabletop-grpo-labels.yaml").read_text()
    assert parse_training(["--config", str(copy)]).config == parse_training(["--recipe", "tabletop-grpo-labels"]).config


def test_config_accepts_a_recipe_and_former_names_work():
    assert parse_training(["--config", "hopper-iql"]).config == parse_training(["--recipe", "hopper-iql"]).config
    for former, name in loading.FORMER_NAMES.items():
        assert find_recipe(former) == find_recipe(name)


def test_flags_override_a_recipe_and_its_algorithm_may_be_named():
    config = parse_training(["grpo", "--recipe", "driving-grpo", "--num-envs", "16", "--seed", "3"]).config
    assert (config.env.num_envs, config.seed, config.algorithm.cfg.group_size) == (16, 3, 8)


def test_paths_of_recipes_are_below_output_base(monkeypatch):
    monkeypatch.setenv("OUTPUT_BASE", "/scratch")
    config = parse_training(["--recipe", "tabletop-iql-labels"]).config
    assert config.output_dir == "/scratch/tabletop-iql-labels"
    assert config.model_path == "/scratch/tabletop-sft-labels"
    assert config.dataset.path == "/scratch/tabletop/labelled-mixed-v0"
    config = parse_training(["--recipe", "metaworld-mt10-dagger-labels"]).config
    assert config.algorithm.cfg.prior_data == "/scratch/metaworld/mt10-scenes-v0"


@pytest.mark.parametrize("algorithm", ["sft", "ppo", "grpo", "iql"])
def test_the_flags_of_the_tutorial_are_the_recipe(algorithm):
    """The tutorial keeps the flags; they differ from the recipe in paths only."""
    text = TUTORIAL.read_text().replace("\\\n", " ")
    command = next(line for line in text.splitlines() if line.startswith(f"deft train {algorithm} "))
    by_flags, by_recipe = (
        to_dict(parse_training(words).config)
        for words in (shlex.split(command)[2:], ["--recipe", f"tabletop-{algorithm}-labels"])
    )
    for settings in (by_flags, by_recipe):
        for name in ("output_dir", "model_path"):
            settings.pop(name)
        settings.get("dataset", {}).pop("path", None)
    assert by_recipe == by_flags


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--recipe", "tabletop-pp"], "tabletop-pp: no such recipe; did you mean 'tabletop-ppo'?"),
        (["train", "--recipe", "zzz"], "zzz: no such recipe; one of 'cartpole-ppo', "),
        (
            ["train", "--recipe", "a.yaml"],
            "a.yaml: not the name of a recipe; --config reads a file, ",
        ),
        (["train", "--recipe", "../x"], "../x: not the name of a recipe; "),
        (["train", "--recipe", "rl_config"], "rl_config: settings without the header of a recipe; use --config rl_con"),
        (["train", "--recipe"], "--recipe: needs a name; one of 'cartpole-ppo', "),
        (["train", "ppo", "--recipe"], "--recipe: needs a value (TEXT|none)"),
        (["train", "sac", "--recipe", "hopper-iql"], "train sac: recipe hopper-iql trains iql; use `deft train --reci"),
        (["train", "all", "--recipe", "hopper-iql"], "train all: recipe hopper-iql trains iql; use `deft train --reci"),
        (
            ["train", "ppo", "--recipe", "phases"],
            "train ppo: recipe phases trains all; use `deft train --recipe phases`",
        ),
        (["train", "--recipe", "demo", "--config", "demo"], "--recipe demo: a recipe is a config file; give --recipe "),
        (
            ["train", "--recipe", "cartpole-ppo", "--resume", "runs/a"],
            "--recipe cartpole-ppo: a resumed run has its own settings; leave --recipe out (--auto-resume",
        ),
        (["recipes", "show"], "recipes: give one recipe's name (`deft recipes` lists them); got none"),
        (["recipes", "show", "hopper-iq"], "hopper-iq: no such recipe; did you mean 'hopper-iql'?"),
        (["recipes", "hopper-iql"], "recipes hopper-iql: no such command; use `deft recipes show hopper-iql`"),
    ],
)
def test_bad_input_is_one_line(arguments, message, capsys):
    assert main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"deft: {message}")


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ("recipe: tabletop-ppo\n", "recipe: is not a mapping; copy the header of `deft recipes show NAME`"),
        ("recipe: {trains: x, tiem: 1}\n", "recipe.tiem: unknown setting; did you mean 'time'?"),
    ],
)
def test_a_wrong_header_is_one_line(header, message, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(header)
    with pytest.raises(InputError) as error:
        read_recipe(file)
    assert str(error.value).endswith(message)
