"""What is made before a recipe is trained: which commands run, and what a machine must have."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from deft.cli import main
from deft.config.loading import PRESETS
from deft.config.recipes import read_recipe
from deft.config.training import parse_training
from deft.errors import InputError
from deft.training import preparation
from deft.training.preparation import prepare

COLLECT = "deft collect --env driving --policy expert --num-envs 2 --max-episode-steps 4"


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def commands(name, *flags, by="--recipe", **missing):
    """The commands that a recipe with these flags runs first; here they make nothing. `missing` are those of extras."""
    extras = {extra: {"missing": packages, "install": f"install {extra}"} for extra, packages in missing.items()}
    training, ran = parse_training([by, name, *flags]), []
    prepare(read_recipe(training.source), training, ran.append, extras)
    return ran


def test_what_is_missing_is_made_in_order(capsys):
    sft, demonstrations, own = commands("tabletop-iql-labels")
    assert sft == ["train", "--recipe", "tabletop-sft-labels"]
    assert demonstrations[0] == "collect"
    assert own[:3] == ["collect", "--policy", "outputs/tabletop-sft-labels"]
    first = capsys.readouterr().out.splitlines()[0]
    assert first == (
        "tabletop-iql-labels: outputs/tabletop-sft-labels is missing; running first: "
        "deft train --recipe tabletop-sft-labels"
    )


def test_another_policy_or_dataset_needs_less():
    assert commands("tabletop-ppo-labels", "--model-path", "mine") == []
    assert commands("tabletop-ppo-labels", "--resume", "mine", by="--config") == []
    assert commands("tabletop-iql-labels", "--dataset", "mine") == [["train", "--recipe", "tabletop-sft-labels"]]
    # The recorded episodes are those of the policy of the recipe, whatever policy IQL starts from.
    assert len(commands("tabletop-iql-labels", "--model-path", "mine")) == 3


@pytest.mark.parametrize("data_format", ["minari", "lerobot"])
def test_an_interrupted_recording_is_continued(data_format):
    """2 + 3 episodes by two commands. The dataset has 1, then 2, then 4 and then all 5 of them."""
    path = "outputs/driving/expert-v0"
    collect = f"{COLLECT} --format {data_format}"
    header = dataclasses.replace(
        read_recipe(PRESETS / "driving-sft.yaml"),
        prepare=(f"{collect} --episodes 2 --out {path}", f"{collect} --episodes 3 --append --out {path}"),
    )
    config = parse_training(["--recipe", "driving-sft"]).config

    def first():
        step, state = next(preparation.unfinished(header, config), (None, None))
        return step and (state, preparation.flag(step.words, "--episodes"), "--append" in step.words)

    assert first() == ("is missing", "2", False)
    for episodes, left in (
        (1, ("has 1 of 2 episodes", "1", True)),
        (1, ("has 2 of 5 episodes", "3", True)),
        (2, ("has 4 of 5 episodes", "1", True)),
        (1, None),
    ):
        assert main(preparation.words_of(f"{collect} --episodes {episodes} --append --out {path}")) == 0
        assert first() == left


@pytest.mark.usefixtures("no_plots")
def test_an_interrupted_run_is_continued():
    assert main(preparation.words_of(f"{COLLECT} --episodes 2 --out outputs/driving/expert-v0")) == 0
    quiet = ["--console-level", "ERROR", "--no-tensorboard", "--device", "cpu"]
    few = ["--batch-size", "2", "--updates-per-epoch", "1", "--num-epochs", "1"]
    config = parse_training(["--recipe", "driving-grpo"]).config
    header = read_recipe(PRESETS / "driving-grpo.yaml")

    def unfinished():
        return [(step.words, state) for step, state in preparation.unfinished(header, config)]

    command = ["train", "--recipe", "driving-sft"]
    assert unfinished() == [(command, "is missing")]
    dataset = ["--dataset", "./outputs/driving/expert-v0"]  # as it is, with two episodes
    assert main([*command, *dataset, *few, *quiet]) == 0
    assert unfinished() == []
    record = json.loads((file := Path("outputs/driving-sft/run.json")).read_text())
    record["sessions"][-1]["status"] = None  # as a process that was killed leaves it
    file.write_text(json.dumps(record))
    assert unfinished() == [([*command, "--auto-resume"], "is not complete")]


def test_commands_of_a_copy_are_shown_and_not_run(capsys):
    (copy := Path("mine.yaml")).write_text((PRESETS / "tabletop-ppo-labels.yaml").read_text())
    assert main(["train", "--config", str(copy)]) == 2
    assert capsys.readouterr().err == (
        "deft: mine: outputs/tabletop-sft-labels is missing; run this first: deft train --recipe tabletop-sft-labels\n"
    )


def test_several_processes_prepare_nothing(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match="run this first: deft train --recipe driving-sft"):
        commands("driving-grpo")


def test_a_missing_gpu_or_extra_is_one_line_before_anything_is_made(monkeypatch):
    monkeypatch.setattr(preparation.torch.cuda, "is_available", lambda: False)
    with pytest.raises(
        InputError, match=r"recipe tabletop-ppo: needs a CUDA GPU \(vector: warp\), and torch finds none"
    ):
        commands("tabletop-ppo")
    with pytest.raises(InputError) as error:
        commands("tabletop-ppo", "--device", "cpu", data=[], warp=["warp-lang", "mujoco-warp"])
    assert str(error.value) == "recipe tabletop-ppo: needs warp-lang, mujoco-warp: install warp"
    # Without Warp neither is needed.
    first = commands("tabletop-ppo", "--vector", "process", data=[], warp=["warp-lang"])
    assert first == [["train", "--recipe", "tabletop-sft"]]
    with pytest.raises(InputError, match="recipe driving-sft: needs h5py: install data"):
        commands("driving-sft", data=["h5py"])


def test_rl_from_a_policy_that_is_there_needs_no_datasets():
    online = ["tabletop-ppo", "--vector", "process", "--device", "cpu"]
    with pytest.raises(InputError, match="recipe tabletop-ppo: needs minari: install data"):
        commands(*online, data=["minari"])
    assert commands(*online, "--model-path", "mine", data=["minari"]) == []
    with pytest.raises(InputError, match="needs minari"):
        commands("metaworld-mt10-dagger-labels", "--model-path", "mine", "--prior_data", "demos", data=["minari"])


def test_data_that_is_learned_from_beside_own_episodes_is_recorded_too(monkeypatch):
    monkeypatch.setattr(preparation, "find_suite", lambda name: SimpleNamespace(check_installed=lambda where: None))
    policy, *recordings = commands("metaworld-mt10-dagger-labels")
    assert policy == ["train", "--recipe", "metaworld-mt10-sft-labels"]
    recorded = [words[words.index("--episodes") + 1] for words in recordings]
    assert recorded == ["250", "1050", "1850", "2650", "3450"]  # 250 and 4 · 800, in one dataset
    assert {words[words.index("--out") + 1] for words in recordings} == {"outputs/metaworld/mt10-scenes-v0"}
    assert commands("metaworld-mt10-dagger-labels", "--prior_data", "mine") == [policy]


def test_a_suite_that_is_missing_is_an_error_before_anything_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("DEFT_SUITES", str(tmp_path))
    for name in ("metaworld-mt10-sft", "metaworld-mt10-ppo"):
        with pytest.raises(
            InputError, match=f"recipe {name}: the suite metaworld is not installed: deft suite install"
        ):
            commands(name)
