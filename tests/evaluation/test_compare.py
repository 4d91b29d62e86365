"""`deft compare` of runs: the same episodes for all, intervals, an image, and errors."""

import json
import statistics
from pathlib import Path

import pytest

from deft import cli
from deft.config.command_settings import CompareRunsConfig
from deft.config.settings import EnvConfig
from deft.envs.make import SHORT_NAMES
from deft.envs.vector import Episode
from deft.errors import InputError
from deft.evaluation import compare
from deft.evaluation.compare import compare_runs
from deft.evaluation.comparison_table import comparison_lines

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
    starts = [line.split()[0] for line in lines if line]
    assert starts == ["train", "random", "expert", "held-out", "random", "expert", "actions:"]


def test_worlds_without_splits_and_success_are_compared_by_reward(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["compare", "random", "--env", "CartPole-v1", "--episodes", "2", "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out.split()[:2] == ["mean", "reward"]


def test_other_episodes_raise_an_error() -> None:
    played = {
        name: [[Episode(0, 0.0, 1, True, {}, labels={"task": task, "instruction": f"{task} it"})]]
        for name, task in (("a", "pick"), ("b", "push"))
    }
    with pytest.raises(InputError, match="a and b do not play the same episodes: number 0 is 'pick it' for one"):
        compare._check_same_episodes(played, "b")


def test_other_scenes_raise_an_error() -> None:
    def contender(**kwargs: object) -> compare._Contender:
        return compare._Contender("run", EnvConfig(id="tabletop", kwargs=dict(kwargs)), 1)

    plain, lit = contender(observation="images"), contender(domain_randomization={"random_light": True})
    off = contender(domain_randomization={"random_light": False})
    compare._check_same_scenes({"a": [plain], "b": [contender(domain_randomization=None), off]})
    with pytest.raises(InputError, match=r"a and b do not play in the same scenes: domain_randomization is \{\} for"):
        compare._check_same_scenes({"a": [plain], "b": [plain, lit]})


def test_runs_of_different_environments_raise_an_error_without_env(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train = ["--total-timesteps", "16", "--eval-freq", "0", "--threads", "1", "--console-level", "CRITICAL"]
    for env in ("CartPole-v1", "Acrobot-v1"):
        run = ["--rollout-steps", "16", "--output-dir", str(tmp_path / env)]
        assert cli.main(["train", "ppo", "--env", env, *train, *run]) == 0
    capsys.readouterr()
    runs = [str(tmp_path / env) for env in ("CartPole-v1", "Acrobot-v1")]
    assert cli.main(["compare", *runs, "--episodes", "1"]) == 2
    line = capsys.readouterr().err
    assert "were trained in different environments, CartPole-v1 and Acrobot-v1" in line
    assert "give --env ID" in line
    # With --env both would play in it: then only the policy of another environment is rejected.
    assert cli.main(["compare", *runs, "--episodes", "1", "--env", "CartPole-v1"]) == 2
    assert "different environments" not in capsys.readouterr().err


def test_short_and_full_ids_name_one_environment() -> None:
    short, full = next(iter(SHORT_NAMES.items()))
    compare._check_same_env({"a": short, "b": full, "c": f"some.module:{full}"})
    compare._check_same_env({})


def test_several_runs_make_one_row() -> None:
    def run(*successes: bool) -> list[Episode]:
        return [Episode(0, float(success), 1, success, {}, labels={"task": "pick"}) for success in successes]

    measures = compare._measures({"sft": [run(True, False)], "ppo": [run(True, True), run(True, False)]})
    assert measures["ppo"]["episodes"] == 4
    assert measures["ppo"]["success_rate"] == 0.75
    assert measures["ppo"]["success_rates"] == [1.0, 0.5]
    assert measures["ppo"]["difference"] == 0.25  # each run against the one of the first row: won 1 of 4


def test_three_seeds_give_intervals_over_seeds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed in (0, 1, 2):
        train = ["train", "ppo", "--env", "CartPole-v1", "--total-timesteps", "64", "--rollout-steps", "32"]
        train += ["--eval-freq", "0", "--threads", "1", "--console-level", "CRITICAL", "--seed", str(seed)]
        assert cli.main([*train, "--output-dir", str(tmp_path / f"ppo_{seed}")]) == 0
    capsys.readouterr()
    command = ["compare", "random", f"ppo={tmp_path}/ppo_*", "--episodes", "4", "--out", str(tmp_path), "--seed", "5"]
    assert cli.main([*command, "--json"]) == 0
    results = json.loads(capsys.readouterr().out.splitlines()[-1])
    found = results["columns"]["success"]["ppo"]
    means = found["mean_rewards"]
    assert len(set(means)) == 3  # other policies
    # x̄ ± 4.3027 s / √3, or wider where the 12 episodes say so
    mean, deviation = statistics.fmean(means), statistics.stdev(means)
    low, high = found["mean_reward_interval"]
    assert low <= mean - 4.302 * deviation / 3**0.5
    assert high >= mean + 4.302 * deviation / 3**0.5
    assert (found["interval_over"], found["seeds"], results["seed"]) == ("seeds", 3, 5)
    assert len(found["reward_differences"]) == 3
    assert [run["training_seed"] for run in results["runs"]["ppo"]] == [0, 1, 2]
    assert cli.main(command) == 0
    table = capsys.readouterr().out.splitlines()
    assert "4 episodes" in table[1]
    assert "3 seeds" in table[2]
    assert " ".join(f"{mean:.2f}" for mean in means) in table[2]
    assert found["reward_difference_over"] == "seeds"  # random actions have no training seeds
    assert cli.main(["compare", f"one={tmp_path}/ppo_0", *command[2:]]) == 0
    table, warning = (text.splitlines() for text in capsys.readouterr())
    assert table[0].split()[-5:] == ["the", "first", "over", "by", "seed"]
    assert "3 seeds of the other side only" in table[2]
    [line] = [line for line in warning if "single trained run" in line]
    assert "ppo: its difference to one is over seeds of the other side only" in line
    assert "give several training seeds of it, as in one=RUN,RUN,RUN" in line


def test_runs_of_one_seed_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    def run(name: str, seed: int) -> compare._Contender:
        return compare._Contender(name, EnvConfig(id="tabletop"), 1, about={"training_seed": seed})

    compare._warn_of_equal_seeds({"sft": [run("a", 0), run("b", 1)]})
    assert not caplog.records
    compare._warn_of_equal_seeds({"sft": [run("a", 0), run("b", 0)]})
    assert "sft: a and b were both trained with seed 0" in caplog.text


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
