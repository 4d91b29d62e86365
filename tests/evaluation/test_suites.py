"""`deft evaluate --suite`, and the fingerprint of a suite."""

import json

import fake_suite
import pytest

from deft.cli import main
from deft.envs.suites import install
from deft.evaluation import fingerprint


def results(capsys):
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_a_suite_is_evaluated_task_by_task(installed, capsys):
    """At most 8 steps of 1: the tasks near (2) and far (5) succeed, never (1000) does not."""
    assert main(["evaluate", "--suite", "fake/all", "--policy", "expert", "--episodes", "2", "--json"]) == 0
    found = results(capsys)
    assert found["episodes"] == 6
    rates = {task: (row["episodes"], row["success_rate"]) for task, row in found["tasks"].items()}
    assert rates == {"near": (2, 1.0), "far": (2, 1.0), "never": (2, 0.0)}
    assert found["success_rate"] == pytest.approx(2 / 3)
    assert found["protocol"] == "2 episodes per task of at most 8 steps; as tests do"
    assert found["version"] == "fake-suite 1.0"
    assert found["first_seed"] == 2**30  # not those of recordings


def test_another_time_limit_is_part_of_the_protocol(installed, capsys):
    limit = ["--env-kwargs", "max_episode_steps=3"]  # far needs five steps
    assert main(["evaluate", "--suite", "fake/far", "--policy", "expert", "--episodes", "1", "--json", *limit]) == 0
    found = results(capsys)
    assert found["protocol"] == "1 episode per task of at most 3 steps; as tests do"
    assert found["success_rate"] == 0.0


def test_the_settings_of_training_are_not_those_of_the_protocol(installed, capsys, tmp_path):
    small = ["--num-envs", "2", "--rollout-steps", "4", "--total-timesteps", "8", "--eval-freq", "0"]
    run = ["--output-dir", str(tmp_path / "run"), "--max-episode-steps", "3", "--no-tensorboard", "--device", "cpu"]
    assert main(["train", "ppo", "--env", "fake/near", *small, *run, "--json"]) == 0
    results(capsys)
    assert main(["evaluate", str(tmp_path / "run"), "--suite", "fake/far", "--episodes", "1", "--json"]) == 0
    found = results(capsys)
    assert found["protocol"] == "1 episode per task of at most 8 steps; as tests do"
    assert 3 < found["mean_length"] <= 8


def test_the_table_for_a_person(installed, capsys):
    assert main(["evaluate", "--suite", "fake/both", "--policy", "random", "--episodes", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:4]] == ["together", "far", "near"]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["run", "--suite", "CartPole-v1"], "--suite CartPole-v1: no suite; use one of metaworld"),
        (
            ["run", "--suite", "fake/near", "--env", "reach"],
            "--env reach: the environment is that of --suite fake/near",
        ),
        (["--policy", "expert"], "--env: missing; --policy expert needs --env or --suite"),
        (["run", "--policy", "expert", "--suite", "fake/near"], "the policy is the run run; give one of them"),
        (["--policy", "expert", "--suite", "fake/near", "--video", "x.mp4"], "`deft play --policy expert"),
        ([], "evaluate: give one run folder or checkpoint; got none"),
        (["--suite", "fake/near"], "evaluate: give one run folder or checkpoint; got none"),
    ],
)
def test_wrong_settings_are_one_line(arguments, complaint, fake, capsys):
    assert main(["evaluate", *arguments]) == 2
    assert complaint in capsys.readouterr().err


def test_a_scripted_policy_outside_of_suites(capsys):
    assert main(["evaluate", "--env", "reach", "--policy", "expert", "--episodes", "2", "--json"]) == 0
    assert results(capsys)["success_rate"] == 1.0


def test_an_unchanged_suite_has_its_fingerprint(installed, capsys):
    assert main(["suite", "check", "fake"]) == 1
    assert "has no fingerprint" in capsys.readouterr().err
    assert main(["suite", "check", "fake", "--update"]) == 0
    written = json.loads(installed.fingerprint.read_text())
    # Seed 0: the position starts at 0, and the expert needs two steps of 1.
    assert written["tasks"]["near"] == {"state": [0.0], "image": [], "return": 1.0, "length": 2, "success": True}
    capsys.readouterr()
    assert main(["suite", "check", "fake", "--repeats", "2"]) == 0
    assert "fingerprint: unchanged" in capsys.readouterr().out


def test_drift_is_named_with_the_version_that_differs(installed, capsys, tmp_path):
    assert main(["suite", "check", "fake", "--update"]) == 0
    (tmp_path / fake_suite.DRIFT).write_text("0.001")
    assert main(["suite", "check", "fake"]) == 1
    error = capsys.readouterr().err
    assert "near: the initial state differs by 0.001" in error
    assert "all versions are those of the lock file" in error
    packages = next(install.folder_of(installed).glob("lib/python*/site-packages"))
    fake_suite.distribution(packages, version="1.1")
    assert main(["suite", "check", "fake"]) == 1
    error = capsys.readouterr().err
    assert "versions that differ: fake-suite is 1.1, the lock file has 1.0" in error
    assert error.splitlines()[-1].startswith("deft: ")


def test_numbers_that_rounding_changes_are_not_compared(installed, capsys, tmp_path):
    """Gravity changes by 1e-8 at most: 1e4 times that is 0.0001 of the first position, five times the tolerance."""
    chaos = tmp_path / fake_suite.CHAOS
    chaos.write_text("1e4")
    assert main(["suite", "check", "fake", "--update"]) == 0
    written = json.loads(installed.fingerprint.read_text())["tasks"]
    assert {task: values["state"] for task, values in written.items()} == {"near": [0.0], "far": [None], "never": [0.2]}
    assert written["far"]["success"] is True
    (tmp_path / fake_suite.DRIFT).write_text("0.001")
    assert main(["suite", "check", "fake"]) == 1
    error = capsys.readouterr().err
    assert "near: the initial state differs by 0.001; never: the initial state differs by 0.001; all" in error


def test_merging_drops_what_differs_on_this_machine(installed, capsys, tmp_path):
    assert main(["suite", "check", "fake", "--update"]) == 0
    text = installed.fingerprint.read_text()
    assert '"never": {"state": [0.2]' in text
    installed.fingerprint.write_text(text.replace('"never": {"state": [0.2]', '"never": {"state": [0.3]'))
    assert main(["suite", "check", "fake"]) == 1
    assert main(["suite", "check", "fake", "--merge"]) == 0
    written = json.loads(installed.fingerprint.read_text())["tasks"]
    assert [written[task]["state"] for task in written] == [[0.0], [0.1], [None]]
    assert main(["suite", "check", "fake"]) == 0


def test_what_counts_as_a_difference():
    expected = {"state": [1.0, 2.0], "image": [10.0, 20.0, 90.0], "return": 100.0, "length": 5, "success": True}
    assert fingerprint.compare("t", expected, expected) == []
    brighter = [1.1 * value + 9 for value in expected["image"]]  # brightness and contrast are fitted
    near = {**expected, "state": [1.00001, 2.0], "image": brighter, "return": 101.9}  # within the tolerances
    assert fingerprint.compare("t", expected, near) == []
    # Other parts are bright. The line of least squares through (90, 10), (20, 20), (10, 90) has the slope
    # (50·-30 + -20·-20 + -30·50) / (50² + 20² + 30²) = -0.684 and misses them by 4.2, 33.7 and 29.5: 22.5 in the mean.
    assert fingerprint.compare("t", expected, {**expected, "image": [90.0, 20.0, 10.0]}) == [
        "t: the first image differs by 22.5 of 255"
    ]
    assert len(fingerprint.compare("t", expected, {**expected, "return": 97.0})) == 1
    assert len(fingerprint.compare("t", expected, {**expected, "success": False})) == 1
    assert fingerprint.compare("t", expected, {**expected, "state": [1.0]}) == [
        "t: the state has 1 numbers instead of 2"
    ]


def test_a_null_is_not_compared():
    """The second play differs in one number of the state by 1e-5, and in the return by 1 %: half of the tolerances."""
    one = {"state": [1.0, 2.0], "image": [10.0], "return": 100.0, "length": 5, "success": True}
    kept = fingerprint.stable([one, {**one, "state": [1.0, 2.00001], "return": 101.0}])
    assert kept == {**one, "state": [1.0, None], "return": None}
    assert fingerprint.compare("t", kept, {**one, "state": [1.0, 9.0], "return": 0.0}) == []
    assert fingerprint.compare("t", kept, {**one, "success": False}) == [
        "t: return 100 instead of any, success False instead of True"
    ]
    assert fingerprint.stable([one, {**one, "success": False}])["success"] is None
    assert fingerprint.stable([kept, one]) == kept
