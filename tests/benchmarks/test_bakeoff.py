"""The bake-off: methods run from the SFT policy at toy size, all env steps count, and a second call resumes."""

import argparse
import itertools
import json
import os
import signal
import time

import pytest

from deft.config.training import parse_training

CHUNK = 4  # env steps per decision
TOY = ["--state", "--task", "reach", "--demonstrations", 2, "--sft-updates", 2, "--offline-updates", 2]
TOY += ["--episodes", 2, "--episode-steps", 8, "--marks", 2, "--steps", 160, "--hidden_dim", 8, "--batch_size", 8]


@pytest.fixture
def bakeoff(load_benchmark):
    return load_benchmark("bakeoff")


@pytest.mark.parametrize("world", ["images", "scene", "labels", "state"])
@pytest.mark.parametrize("vector", ["cpu", "warp"])
def test_every_training_command_is_understood(bakeoff, world, vector):
    given = bakeoff.parse(["--vector", vector, *([] if world == "images" else [f"--{world}"])])
    bench = bakeoff.BakeOff(argparse.Namespace(**vars(given)))
    for budget in (200_000, 1_000):
        for name, method in bakeoff.METHODS.items():
            is_offline, scale = name == "iql", bench.scale(method, budget)
            start = ["--dataset", "mixed-v0"] if is_offline else bench.online(method)
            words = [method.command or name, *start, "--model_path", "run", *method.flags(scale)]
            words += [*bench.privileges(method), *bakeoff.WORLDS[world].methods.get(name, [])]
            config = parse_training([str(word) for word in words])[1]
            assert config.algorithm.name == (method.command or name)
            assert config.policy.critic_observation == (("scene_state",) if bench.privileges(method) else ())
            if is_offline:
                continue
            cfg = config.algorithm.cfg
            assert (config.env.vector == "warp") == (vector == "warp" and name != "dagger")
            assert scale.budget == (100_000 if name == "dagger" and budget > 100_000 else budget)
            if name == "ppo":  # 25 rollouts or more, of four env steps a decision
                num_envs = config.env.num_envs
                rollout = num_envs * config.trainer.rollout_steps
                assert rollout * CHUNK <= max(budget // 25, 2 * num_envs * CHUNK)
            if config.algorithm.name in ("sac", "dsrl", "fql-online"):
                assert cfg.learning_starts <= budget // 10
                assert cfg.critic_warmup <= 0.05 * cfg.updates_per_step * budget
    for head in (bakeoff.WORLDS[world].flow, bakeoff.WORLDS[world].gaussian):
        assert parse_training(["sft", "--dataset", "demos-v0", *map(str, head)])[1].algorithm.name == "sft"


def test_the_plan_has_what_is_left(bakeoff, tmp_path, capsys):
    words = ["--plan", "--methods", "ppo", "dsrl", "--seeds", "0", "1", "--state", "--results", str(tmp_path)]
    assert bakeoff.main(words) == 0
    assert [line.split("|")[1:3] for line in capsys.readouterr().out.splitlines() if line.startswith("| ")][1:] == [
        [" demonstrations, SFT ", " 2    "],
        [" ppo                 ", " 2    "],
        [" dsrl                ", " 2    "],
    ]
    (tmp_path / "seed-1").mkdir()
    for name in ("sft-success", "dsrl-points"):
        (tmp_path / "seed-1" / f"{name}.json").write_text("{}")
    plan = bakeoff.BakeOff(bakeoff.parse(words)).plan()
    assert [(part.name, part.seed) for part in plan.parts] == [
        ("demonstrations, SFT", 0), ("ppo", 0), ("dsrl", 0), ("ppo", 1),
    ]  # fmt: skip
    # The first part took twice its estimate: so will the others.
    before = plan.minutes_left()
    first = plan.parts[0]
    plan.finish(first.name, first.seed, 2 * first.seconds)
    assert plan.minutes_left() == pytest.approx(2 * (before - first.seconds / 60))


def test_results_of_other_settings_are_not_reused(bakeoff, tmp_path, monkeypatch):
    calls = []
    found = {"points": [[100, 1.0, 0.4], [1000, 3.0, 0.6]], "steps_per_second": 50.0}
    monkeypatch.setattr(bakeoff.BakeOff, "start", lambda self, seed: {})

    def method(self, seed, name, start):
        calls.append(name)
        (tmp_path / f"seed-{seed}").mkdir()
        (tmp_path / f"seed-{seed}" / f"{name}-points.json").write_text(json.dumps(found))
        return found

    monkeypatch.setattr(bakeoff.BakeOff, "method", method)
    monkeypatch.setattr("bakeoff_picture.draw", lambda *_: None)
    start = ["--methods", "ppo", "--seeds", "0", "--task", "reach", "--results", str(tmp_path), "--hidden_dim", "8"]
    assert bakeoff.main([*start, "--plan", "--steps", "5"]) == 0
    assert not (tmp_path / "settings.json").exists()
    assert bakeoff.main([*start, "--start-only", "--steps", "7000"]) == 0
    (tmp_path / "seed-9").mkdir()
    for name in ("demos-v0", "demos.json", "sft", "sft.json"):  # of a call that was stopped before a method
        (tmp_path / "seed-9" / name).touch()
    bakeoff.same_settings(bakeoff.parse([*start, "--steps", "9000"]))
    full = [*start, "--steps", "1000", "--episodes", "4"]  # steps that the call for starts had otherwise
    for words in (full, [*full, "--seeds", "1", "--level", "0.5", "--parallel", "2", "--stop-after", "9"]):
        assert bakeoff.main(words) == 0
    assert bakeoff.main([*start, "--start-only", "--seeds", "2", "--steps", "7000"]) == 0
    assert len(calls) == 2
    for words, other in (
        (["--task", "pick", "--episodes", "50"], "task: reach, not pick; episodes: 4, not 50"),
        (["--state"], "observation: images, not state"),
        (["--lr", "1"], "flags: ['--hidden_dim', '8'], not ['--hidden_dim', '8', '--lr', '1']"),
        (["--start-only", "--noise", "0.1"], "noise: 0.3, not 0.1"),
        (["--plan", "--marks", "2"], "marks: 5, not 2"),
    ):
        with pytest.raises(SystemExit) as error:
            bakeoff.main([*full, *words])
        assert str(error.value) == f"{tmp_path} has results of other settings ({other}); use another --results"
    assert len(calls) == 2


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--steps", "0"], "--steps: must be an integer of 1 or more, not 0"),
        (["--episodes", "-1"], "--episodes: must be an integer of 1 or more, not -1"),
        (["--marks", "two"], "--marks: must be an integer of 1 or more, not two"),
        (["--task", "fly"], "--task: invalid choice: 'fly'"),
    ],
)
def test_settings_that_cannot_be_are_rejected(bakeoff, tmp_path, capsys, words, error):
    with pytest.raises(SystemExit, match="2"):
        bakeoff.main(["--plan", "--results", str(tmp_path / "out"), *words])
    assert error in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_what_is_stopped_is_left_for_the_next_call(bakeoff, tmp_path, monkeypatch, capsys):
    def deft(self, *words, minutes=None):
        assert 0 < minutes <= 1e-3
        time.sleep(0.1)  # longer than --stop-after
        return {"seconds": 0.1, "status": 128 + signal.SIGTERM}

    monkeypatch.setattr("headline.Bench.deft", deft)
    words = ["--methods", "ppo", "--seeds", "0", "1", "--stop-after", "1e-3", "--results", str(tmp_path)]
    assert bakeoff.main(words) == 1
    assert "the same command continues" in capsys.readouterr().out
    assert not list(tmp_path.rglob("demos.json"))  # of a recording that was not finished


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
    shown = printed.out[printed.out.index("| method") :]
    cells = [[cell.strip() for cell in line.split("|")] for line in shown.splitlines() if line.startswith("| ")]
    # PPO: 60 and 100 % at the end; 80 % is reached by the second seed alone, at 100 + 900 · (80 − 40) / (100 − 40)
    assert [row[1] for row in cells[1:]] == ["PPO", "DSRL"]
    assert (cells[1][5].split(" (")[0], cells[1][6:8]) == ("80.0 %", ["1,000 (1,000 to 1,000)", "never, 700"])
    assert cells[2][6:8] == ["1,000", "never"]


@pytest.mark.usefixtures("no_plots")
@pytest.mark.parametrize("methods", [["qc-fql"], pytest.param(None, marks=pytest.mark.slow)])
def test_methods_run_on_one_budget(bakeoff, deft, tmp_path, monkeypatch, methods):
    commands = []

    def here(self, *words, minutes=None):
        commands.append(words)
        return {**deft(*words, "--json"), "seconds": 6.0, "status": 0}

    monkeypatch.setattr("headline.Bench.deft", here)
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
