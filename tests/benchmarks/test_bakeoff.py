"""The bake-off: methods run from the SFT policy at toy size, all env steps count, and a second call resumes."""

import argparse
import itertools
import json
import os

import pytest

from deft.config.training import parse_training

TOY = ["--state", "--task", "reach", "--demonstrations", 2, "--sft-updates", 2, "--offline-updates", 2]
TOY += ["--episodes", 2, "--episode-steps", 8, "--marks", 2, "--steps", 160, "--hidden_dim", 8, "--batch_size", 8]


@pytest.fixture
def bakeoff(load_benchmark):
    return load_benchmark("bakeoff")


@pytest.mark.parametrize("world", ["images", "labels", "state"])
def test_every_training_command_is_understood(bakeoff, world):
    given = bakeoff.parse([] if world == "images" else [f"--{world}"])
    env = bakeoff.BakeOff(argparse.Namespace(**vars(given))).env
    for budget in (200_000, 1_000):
        for name, method in bakeoff.METHODS.items():
            is_offline = name == "iql"
            start = ["--dataset", "mixed-v0"] if is_offline else [*env, *bakeoff.WORLDS[world].online]
            words = [method.command or name, *start, "--model_path", "run", *method.flags(budget)]
            words += bakeoff.WORLDS[world].methods.get(name, [])
            config = parse_training([str(word) for word in words])[1]
            assert config.algorithm.name == (method.command or name)
            if is_offline:
                continue
            cfg = config.algorithm.cfg
            if name == "ppo":  # 25 rollouts or more, of four env steps a decision
                rollout = config.env.num_envs * config.trainer.rollout_steps
                assert rollout * bakeoff.CHUNK <= max(budget // 25, 2 * 16 * 4)
            if config.algorithm.name in ("sac", "dsrl", "fql-online"):
                assert cfg.learning_starts <= budget // 10
    for head in (bakeoff.WORLDS[world].flow, bakeoff.WORLDS[world].gaussian):
        assert parse_training(["sft", "--dataset", "demos-v0", *map(str, head)])[1].algorithm.name == "sft"


def test_the_marks_are_the_first_checkpoints_at_or_after_them(bakeoff, tmp_path):
    for step in (48, 104, 152, 201):
        (tmp_path / f"checkpoint-{step}").mkdir()
    # 200 steps in 4 parts: 50, 100, 150 and 200; the first checkpoint came before its mark
    assert [step for step, _ in bakeoff.checkpoints_at(tmp_path, 200, 4)] == [104, 152, 201]


def test_time_between_the_sessions_of_a_run_is_not_counted(bakeoff, tmp_path):
    sessions = [{"started": 1000.0, "ended": 1030.0}, {"started": 5000.0, "ended": 5100.0}]
    (tmp_path / "run.json").write_text(json.dumps({"sessions": sessions}))
    seconds = []
    for written in (1020.0, 5040.0):
        checkpoint = tmp_path / f"checkpoint-{written:.0f}"
        checkpoint.mkdir()
        (checkpoint / "deft_manifest.json").touch()
        os.utime(checkpoint / "deft_manifest.json", (written, written))
        seconds.append(bakeoff.seconds_at(tmp_path, checkpoint))
    assert seconds == [20.0, 70.0]  # 30 of the first session and 40 of the second


def test_a_method_that_fails_leaves_the_table_of_the_others(bakeoff, tmp_path, monkeypatch, capsys):
    def method(self, seed, name, start):
        if name == "dsrl" and seed == 1:
            raise RuntimeError("failed (2): deft train dsrl")
        return {"points": [[100, 1.0, 0.4], [1000, 3.0, 0.6 + 0.4 * seed]], "steps_per_second": 50.0}

    monkeypatch.setattr(bakeoff.BakeOff, "start", lambda self, seed: {})
    monkeypatch.setattr(bakeoff.BakeOff, "method", method)
    words = ["--methods", "ppo", "dsrl", "--seeds", "0", "1", "--steps", "1000", "--results", str(tmp_path)]
    assert bakeoff.main(words) == 1
    printed = capsys.readouterr()
    assert printed.err == "dsrl, seed 1: failed (2): deft train dsrl\n"
    cells = [[cell.strip() for cell in line.split("|")] for line in printed.out.splitlines() if line.startswith("| ")]
    # PPO: 60 and 100 % at the end; 80 % is reached by the second seed alone, at 100 + 900 · (80 − 40) / (100 − 40)
    assert [row[1] for row in cells[1:]] == ["PPO", "DSRL"]
    assert (cells[1][5].split(" (")[0], cells[1][6]) == ("80.0 %", "never, 700")
    assert cells[2][6] == "never"


@pytest.mark.usefixtures("no_plots")
@pytest.mark.parametrize("methods", [["qc-fql"], pytest.param(None, marks=pytest.mark.slow)])
def test_methods_run_on_one_budget(bakeoff, deft, tmp_path, monkeypatch, methods):
    commands = []

    def here(self, *words, minutes=None):
        commands.append(words)
        return {**deft(*words, "--json"), "seconds": 6.0}

    monkeypatch.setattr(bakeoff.Bench, "deft", here)
    methods = methods or list(bakeoff.METHODS)
    words = [str(word) for word in [*TOY, "--seeds", 3, "--results", tmp_path / "out", "--methods", *methods]]
    assert bakeoff.main(words) == 0
    written = json.loads((tmp_path / "out" / "results.json").read_text())
    demonstrations = json.loads((tmp_path / "out" / "seed-3" / "demos.json").read_text())["total_steps"]
    assert list(written["methods"]) == methods
    for name, found in written["methods"].items():
        points = found["3"]["points"]
        assert points[0][0] == demonstrations, name  # the SFT policy
        assert points[-1][0] >= 160, name  # the budget, with the demonstrations
        assert all(one[1] < two[1] for one, two in itertools.pairwise(points)), name  # minutes
        assert all(0 <= rate <= 1 for _, _, rate in points), name
    lines = (tmp_path / "out" / "table.md").read_text().splitlines()
    assert sum(line.startswith("| ") for line in lines) == 1 + len(methods)
    assert (tmp_path / "out" / "bakeoff.png").stat().st_size > 0
    count = len(commands)
    bakeoff.main(words)
    assert len(commands) == count  # nothing is repeated
