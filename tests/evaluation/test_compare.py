"""`deft compare` of runs: the same episodes for all, intervals, a picture, and what it refuses."""

import json
from pathlib import Path

import pytest

from deft import cli
from deft.config.settings import CompareRunsConfig, EnvConfig
from deft.envs.vector import Episode
from deft.errors import InputError
from deft.evaluation import compare
from deft.evaluation.compare import compare_runs, comparison_lines

STATE = {"control_mode": "delta_ee_pos", "max_episode_steps": 60}


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> dict:
    out = tmp_path_factory.mktemp("compared")
    config = CompareRunsConfig(
        runs=("random", "expert"), env="tabletop", task="reach", env_kwargs=STATE, episodes=3, out=str(out)
    )
    return compare_runs(config)


def test_each_split_is_a_column_with_intervals(compared: dict) -> None:
    assert list(compared["columns"]) == ["train", "held-out"]
    for policies in compared["columns"].values():
        assert policies["expert"]["success_rate"] == 1.0
        # 3 of 3: 3 / (3 + 1.96²)
        assert policies["expert"]["success_interval"] == pytest.approx([0.4385, 1.0], abs=1e-4)
        assert policies["expert"]["difference"] == 1.0 - policies["random"]["success_rate"]
        assert policies["expert"]["instructions"].keys() == policies["random"]["instructions"].keys()
    held_out = " ".join(compared["columns"]["held-out"]["expert"]["instructions"])
    assert any(name in held_out for name in ("red cylinder", "green cube", "yellow cylinder", "purple cube"))


def test_it_is_written_and_drawn(compared: dict) -> None:
    assert json.loads(Path(compared["comparison"]).read_text())["columns"] == compared["columns"]
    assert all(Path(plot).stat().st_size > 5_000 for plot in compared["plots"])
    lines = comparison_lines(compared).splitlines()
    assert [line.split()[0] for line in lines if line] == ["train", "random", "expert", "held-out", "random", "expert"]


def test_worlds_without_splits_and_success_are_compared_by_reward(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["compare", "random", "--env", "CartPole-v1", "--episodes", "2", "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out.split()[:2] == ["mean", "reward"]


def test_other_episodes_are_refused() -> None:
    played = {
        name: [[Episode(0, 0.0, 1, True, {}, labels={"task": task, "instruction": f"{task} it"})]]
        for name, task in (("a", "pick"), ("b", "push"))
    }
    with pytest.raises(InputError, match="a and b do not play the same episodes: number 0 is 'pick it' for one"):
        compare._check_same_episodes(played, "b")


def test_other_scenes_are_refused() -> None:
    def contender(**kwargs: object) -> compare._Contender:
        return compare._Contender("run", EnvConfig(id="tabletop", kwargs=dict(kwargs)), 1)

    plain, lit = contender(observation="images"), contender(domain_randomization={"random_light": True})
    off = contender(domain_randomization={"random_light": False})
    compare._check_same_scenes({"a": [plain], "b": [contender(domain_randomization=None), off]})
    with pytest.raises(InputError, match=r"a and b do not play in the same scenes: domain_randomization is \{\} for"):
        compare._check_same_scenes({"a": [plain], "b": [plain, lit]})


def test_several_runs_make_one_row() -> None:
    def run(*successes: bool) -> list[Episode]:
        return [Episode(0, float(success), 1, success, {}, labels={"task": "pick"}) for success in successes]

    measures = compare._measures({"sft": [run(True, False)], "ppo": [run(True, True), run(True, False)]})
    assert measures["ppo"]["episodes"] == 4
    assert measures["ppo"]["success_rate"] == 0.75
    assert measures["ppo"]["success_rates"] == [1.0, 0.5]
    assert measures["ppo"]["difference"] == 0.25  # each run against the one of the first row: won 1 of 4
    assert compare._groups(["a/sft", "ppo=x,y", "random"]) == {
        "sft": ["a/sft"],
        "ppo": ["x", "y"],
        "random": ["random"],
    }
    with pytest.raises(InputError, match="ppo=: give a label of its own and its runs"):
        compare._groups(["ppo="])


def test_labels_tell_the_runs_apart() -> None:
    assert compare._labels(["/x/sft", "/x/ppo"]) == {"/x/sft": "sft", "/x/ppo": "ppo"}
    assert compare._labels(["/x/a/best", "/x/b/best"]) == {"/x/a/best": "a/best", "/x/b/best": "b/best"}


@pytest.mark.parametrize(
    ("command", "line"),
    [
        (
            "compare",
            "compare: give the runs to compare (or --sft-checkpoint and --rl-checkpoint, for waypoint policies); "
            "got none",
        ),
        ("compare random", "--env: missing; random actions and the expert have no environment of their own"),
        ("compare a a --env tabletop", "runs: a run is named twice; give each once"),
    ],
)
def test_bad_input(command: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(command.split()) == 2
    assert capsys.readouterr().err == f"deft: {line}\n"
