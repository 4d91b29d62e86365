"""The comparison of imitation with and without training of the encoders on video: its commands, its figures."""

import argparse
import json

import pytest

from deft.config.training import parse_training


@pytest.fixture
def script(load_benchmark):
    return load_benchmark("vision_results")


def settings(script, results, *flags):
    parser = argparse.ArgumentParser()
    for name in ("--device", "--stop-after"):
        parser.add_argument(name)
    script.add_settings(parser)
    arguments = parser.parse_args(["--device", "cpu", *flags])
    arguments.seeds, arguments.results, arguments.tables = [2], results, False
    return arguments


@pytest.fixture
def asked(script, monkeypatch):
    """The commands that the script runs, which all succeed."""
    commands = []

    def deft(self, *words, minutes=None):
        commands.append([str(word) for word in words])
        found = {"total_steps": 40, "success_rate": 0.5, "episodes": 20, "tasks": {}}
        return {**found, "seconds": 1.0, "status": 0}

    monkeypatch.setattr(script.TimedBench, "deft", deft)
    return commands


def test_every_command_is_understood_and_finished_steps_are_not_repeated(script, asked, tmp_path, capsys):
    folder = tmp_path / "seed-2"
    (folder / "video-v0").mkdir(parents=True)  # of an interrupted recording
    arguments = settings(script, tmp_path, "--methods", "sft", "prediction", "fewer", "--demonstrations", "9")
    assert script.compare(arguments) == 0
    assert not (folder / "video-v0").exists()
    found = json.loads((tmp_path / "results.json").read_text())["seeds"]["2"]
    assert list(found) == ["sft", "prediction", "fewer"]
    assert "| SFT alone " in (tmp_path / "table.md").read_text()
    # Both recordings of demonstrations, and the video; SFT and evaluation; twice encoders, SFT, evaluation
    names = [words[1] if words[0] == "train" else words[0] for words in asked]
    assert names == [
        *("collect", "collect", "collect", "sft", "evaluate"),
        *("vision", "sft", "evaluate"),
        *("vision", "sft", "evaluate"),
    ]
    assert [words[words.index("--episodes") + 1] for words in asked if words[0] == "collect"] == ["3", "9", "1500"]
    runs = [parse_training(words[1:])[1] for words in asked if words[0] == "train"]
    sft, prediction, _, both, fewer = runs
    assert (sft.model_path, sft.policy.vla_config.model_class) == (None, "vla-tiny")
    assert (prediction.algorithm.cfg.text_weight, both.algorithm.cfg.text_weight) == (0.0, 1.0)
    assert fewer.model_path == both.output_dir == str(folder / "encoders-vision")
    assert fewer.dataset.path == str(folder / "demos-3-v0")
    assert {run.algorithm.cfg.batch_size for run in (sft, fewer)} == {128}
    model = {"switch_dims": [-1], "vision": "cells"}
    assert all(run.policy.vla_config is None or run.policy.vla_config.model_config == model for run in runs)
    assert found["sft"] | {"video_steps": 40} == found["prediction"]
    asked.clear()
    assert script.compare(arguments) == 0
    assert not asked
    arguments.sft_epochs = 7
    with pytest.raises(SystemExit, match=r"other settings \(sft_epochs: 30, not 7\); use another --results"):
        script.compare(arguments)
    (tmp_path / "results.json").unlink()  # as after a call that has only recorded
    with pytest.raises(SystemExit, match=r"sft_epochs: 30, not 7"):
        script.compare(arguments)


def test_the_plan_has_what_is_left(script, asked, tmp_path, capsys):
    """A third of the demonstrations of `fewer`: 100 scenes; the encoders of `fewer` are those of `vision`."""
    arguments = settings(script, tmp_path, "--methods", "vision", "fewer", "--parallel", "2")
    bench = script.VisionBench(arguments)
    assert [part.name for part in bench.plan({}).parts] == ["demonstrations", "video", "vision", "fewer"]
    seconds = {part.name: part.seconds for part in bench.plan({"2": {"vision": {}}}).parts}
    assert list(seconds) == ["demonstrations", "video", "fewer"]
    # 100 episodes of 45 steps at 150 steps per second and core, 0.1 s of each scene, and 10 s at the start
    assert seconds["demonstrations"] == pytest.approx(10 + 100 * (45 / (150 * bench.width) + 0.1))
    assert script.compare(arguments, only_plan=True) == 0
    assert "minutes in all with 2 commands side by side" in capsys.readouterr().out
    assert not asked


def test_what_is_stopped_or_fails_leaves_the_table_of_the_others(
    script, load_benchmark, asked, tmp_path, monkeypatch, capsys
):
    stopped = load_benchmark("timed_bench").StoppedError
    arguments = settings(script, tmp_path, "--methods", "sft", "vision", "text")
    method = script.VisionBench.method

    def fail(self, seed, name):
        if name == "vision":
            raise stopped("stopped: deft train vision")
        if name == "text":
            raise RuntimeError("failed (1): deft train vision")
        return method(self, seed, name)

    monkeypatch.setattr(script.VisionBench, "method", fail)
    assert script.compare(arguments) == 1
    printed = capsys.readouterr()
    assert "text, seed 2: failed (1)" in printed.err
    assert "stopped by --stop-after; the same command continues" in printed.out
    assert list(json.loads((tmp_path / "results.json").read_text())["seeds"]["2"]) == ["sft"]


def test_the_bars_are_ten_points_or_as_much_with_a_third(script, capsys):
    def policy(success):
        return {"success": success, "episodes": 100, "tasks": {}, "demonstration_steps": 12_000, "video_steps": 0}

    seeds = {
        "0": {"sft": policy(0.40), "vision": policy(0.55), "fewer": policy(0.38)},
        "1": {"sft": policy(0.40), "vision": policy(0.45), "fewer": policy(0.41)},
    }
    found = [(bar["seed"], round(bar["value"], 6), bar["reached"]) for bar in script.bars(seeds)]
    assert found == [("0", 15, True), ("0", -2, False), ("1", 5, False), ("1", 1, True)]
    script.show(seeds)
    shown = capsys.readouterr().out
    row = next(line for line in shown.splitlines() if "vision, then SFT " in line)
    assert "50.0 %" in row
    assert "55.0, 45.0" in row
    assert "+10.0 (" in row  # the mean of 15 and 5
    assert shown.count("MISSED") == 2
