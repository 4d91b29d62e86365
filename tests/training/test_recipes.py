"""Every recipe of the package trains for two updates in small form, with what it starts from, and resumes."""

import shlex
from pathlib import Path

import pytest
from commands import succeed
from d4rl_files import write_hopper

from deft.config.recipes import find_recipe, read_recipe, recipe_names
from deft.config.rl_yaml import ALL_PHASES
from deft.config.training import parse_training
from deft.envs.suites import find_suite, install
from deft.runs import checkpoint
from deft.training import preparation
from deft.training.phases.all_phases import phase_settings
from deft.training.phases.teacher import TeacherTrainer

QUIET = ["--console-level", "ERROR", "--no-tensorboard", "--save-freq", "0"]
TINY = [*QUIET, "--batch-size", "4", "--device", "cpu", "--threads", "1"]
EPISODE = ["--max-episode-steps", "8"]
ROLLOUTS = [*TINY, *EPISODE, "--vector", "sync", "--eval-freq", "0", "--n-epochs", "1"]
DATASET = [*TINY, "--eval-freq", "0", "--updates-per-epoch", "1"]
SMALL = {
    "ppo": [*ROLLOUTS, "--num-envs", "2", "--rollout-steps", "2"],
    "grpo": [*ROLLOUTS, "--group-size", "2", "--num-envs", "2"],
    "dagger": [
        *(*TINY, *EPISODE, "--vector", "sync", "--eval-freq", "0", "--num-envs", "2", "--rollout-steps", "2"),
        *("--updates-per-round", "1"),
    ],
    "sft": DATASET,
    "iql": [*DATASET, "--hidden-dim", "8"],
}
BEGINS_NEAR_SUCCESS = ("tabletop-ppo-sparse",)  # episodes may end within a chunk, which then has fewer env steps
LENGTH = {
    **dict.fromkeys(("ppo", "grpo", "dagger"), "--iterations"),
    **dict.fromkeys(("sft", "iql"), "--num-epochs"),
}


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder for datasets and runs that several recipes start from; a dataset of the shape of hopper-medium-v2."""
    folder = tmp_path_factory.mktemp("outputs")
    write_hopper(folder / "hopper-medium-v2.hdf5", 40, 20)
    return folder


def small_step(command: str) -> list[str]:
    """A command that a recipe runs first, with two episodes or two updates."""
    words = shlex.split(command)[1:]
    if words[0] == "train":
        kind = parse_training(words[1:]).name
        return [*words, *SMALL[kind], LENGTH[kind], "2"]
    words[words.index("--episodes") + 1] = "2"
    words = [word for word in words if word != "--only-success"]  # eight steps are not enough for it
    return [*words, *EPISODE]


@pytest.fixture
def few(outputs, monkeypatch):
    """Run in the folder of the module, with few episodes and updates of what a recipe starts from."""
    words_of = preparation.words_of
    monkeypatch.chdir(outputs)
    monkeypatch.setenv("DEFT_DATASETS", str(outputs))
    monkeypatch.setattr(preparation, "words_of", lambda command: small_step(shlex.join(["deft", *words_of(command)])))


def trained(name: str) -> str:
    return parse_training(["--recipe", name]).name


def skip_without_suites(name: str) -> None:
    for suite in map(find_suite, read_recipe(find_recipe(name)).suites):
        if install.state_of(suite) != install.INSTALLED:
            pytest.skip(f"the suite {suite.name} is {install.state_of(suite)}: deft suite install {suite.name}")


RUNS = [name for name in recipe_names() if trained(name) in SMALL]
PHASES = [name for name in recipe_names() if trained(name) == ALL_PHASES]


def test_every_recipe_is_trained_here():
    assert set(RUNS + PHASES) == set(recipe_names())


@pytest.mark.usefixtures("few", "no_plots")
@pytest.mark.parametrize("name", RUNS)
def test_a_recipe_trains_and_resumes(name, outputs, capsys):
    skip_without_suites(name)
    kind, run = trained(name), str(outputs / "run" / name)

    small = [*SMALL[kind], "--json"]
    assert succeed(capsys, "train", "--recipe", name, LENGTH[kind], 2, "--output-dir", run, *small)["run_dir"] == run
    first = checkpoint.find_checkpoint(run)
    succeed(capsys, "train", "--resume", run, LENGTH[kind], 3, *small)
    two, three = checkpoint.step_of(first), checkpoint.step_of(checkpoint.find_checkpoint(run))
    assert two < three <= two * 3 / 2
    assert three == two * 3 / 2 or name in BEGINS_NEAR_SUCCESS


@pytest.mark.parametrize("name", PHASES)
def test_the_first_phase_of_a_recipe_trains_and_resumes(name, tmp_path):
    """Evaluations of the phases take a minute; test_all_phases.py runs them with a smaller model."""
    flags = ["--steps-per-episode", "3", "--batch-size", "1", "--no-overlap", "--threads", "1", "--device", "cpu"]
    for episodes in (2, 3):
        config = parse_training(["--recipe", name, *flags, "--teacher-episodes", str(episodes)]).config
        trainer = TeacherTrainer(phase_settings(config, "teacher", tmp_path))
        assert (trainer.resume_from is None) == (episodes == 2)
        trainer.train()
        assert checkpoint.step_of(checkpoint.find_checkpoint(tmp_path / "teacher")) == episodes
