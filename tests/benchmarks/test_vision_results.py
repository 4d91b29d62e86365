"""The comparison of imitation with and without training of the encoders on video: its commands, its figures."""

import argparse
import json

import pytest

from deft.config.training import parse_training


@pytest.fixture
def script(load_benchmark):
    return load_benchmark("vision_results")


def settings(script, *flags):
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    script.add_settings(parser)
    return parser.parse_args(flags)


def test_every_command_is_understood_and_finished_steps_are_not_repeated(script, tmp_path, monkeypatch):
    asked = []

    def deft(words):
        asked.append([str(word) for word in words])
        return "\n" + json.dumps({"total_steps": 40, "success_rate": 0.5, "episodes": 20, "tasks": {}}) + "\n"

    monkeypatch.setattr(script, "run_deft", deft)
    (tmp_path / "video-v0").mkdir()  # of an interrupted recording
    arguments = settings(script, "--methods", "sft", "prediction", "fewer", "--demonstrations", "9")
    found = script.train_seed(2, tmp_path, arguments)
    assert not (tmp_path / "video-v0").exists()
    assert list(found) == ["sft", "prediction", "fewer"]
    # Recordings, SFT and evaluation of `sft`; video, encoders, SFT, evaluation; fewer demonstrations, encoders, …
    names = [words[1] if words[0] == "train" else words[0] for words in asked]
    assert names == [
        *("collect", "sft", "evaluate"),
        *("collect", "vision", "sft", "evaluate"),
        *("vision", "collect", "sft", "evaluate"),
    ]
    assert [words[words.index("--episodes") + 1] for words in asked if words[0] == "collect"] == ["9", "1500", "3"]
    runs = [parse_training(words[1:])[1] for words in asked if words[0] == "train"]
    sft, prediction, _, both, fewer = runs
    assert (sft.model_path, sft.policy.vla_config.model_class) == (None, "vla-tiny")
    assert (prediction.algorithm.cfg.text_weight, both.algorithm.cfg.text_weight) == (0.0, 1.0)
    assert fewer.model_path == both.output_dir == str(tmp_path / "encoders-vision")
    assert fewer.dataset.path == str(tmp_path / "demos-3-v0")
    assert {run.algorithm.cfg.batch_size for run in (sft, fewer)} == {128}
    model = {"switch_dims": [-1], "vision": "cells"}
    assert all(run.policy.vla_config is None or run.policy.vla_config.model_config == model for run in runs)
    assert found["sft"] | {"video_steps": 40} == found["prediction"]
    asked.clear()
    assert script.train_seed(2, tmp_path, arguments) == found
    assert not asked


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
