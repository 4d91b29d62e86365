"""`make demo` in a very small form, and the policy that it starts from."""

import json
from pathlib import Path

import pytest

from deft import demo
from deft.config.loading import load_config, replace
from deft.evaluation.evaluate import find_run
from deft.models.vla.loading import PROVENANCE, shipped_policy
from deft.runs.policy_spaces import PolicySpaces

SMALL = {
    "env.num_envs": 2,
    "env.vector": "sync",
    "trainer.buffer_size": 4,
    "algorithm.cfg.batch_size": 8,
    "algorithm.cfg.value_warmup": 0,
}


def test_the_demo_improves_evaluates_and_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = replace(load_config("tabletop-demo"), **SMALL)
    small = replace(small, **{"env.kwargs": {**small.env.kwargs, "max_episode_steps": 8}})
    monkeypatch.setattr(demo, "load_config", lambda name: small)
    monkeypatch.setattr(demo, "VIDEO_EPISODES", 1)
    root = tmp_path / "demo"
    assert demo.main(["--steps", "64", "--episodes", "2", "--seed", "3", "--output-dir", str(root)]) == 0
    results = json.loads((root / demo.RESULTS_FILE).read_text())
    # Two rollouts of 2 environments × 4 decisions × 4 env steps; an episode of 8 steps ends with a decision
    assert results["timesteps"] == 64
    assert results["seed"] == load_config(root / "ppo" / "config.yaml").seed == 3
    assert results["before"]["episodes"] == results["after"]["episodes"] == 2
    assert set(results["seconds"]) == {"before", "train", "after", "video"}
    assert results["after"]["difference"] == results["after"]["success_rate"] - results["before"]["success_rate"]
    assert (root / "ppo" / "videos" / "before_after.mp4").stat().st_size > 1000
    printed = capsys.readouterr().out
    assert demo.PRIVILEGES in " ".join(printed.split())
    assert "difference" in printed
    assert (root / "ppo" / "comparison" / "success.png").is_file()
    assert "before" in (root / "ppo" / "report.html").read_text()


def test_bad_input_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert demo.main(["--steps", "0", "--output-dir", str(tmp_path)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_the_shipped_policy_is_small_and_says_how_it_was_trained() -> None:
    folder, config = find_run(shipped_policy())
    assert sum(file.stat().st_size for file in shipped_policy().rglob("*") if file.is_file()) < 3_000_000
    provenance = json.loads((shipped_policy() / PROVENANCE).read_text())
    assert provenance["command"].startswith("python benchmarks/demo_policy.py")
    assert config.algorithm.name == "sft"
    assert config.policy.vla_config.model_class == "vla-tiny"
    streams = set(PolicySpaces.read(folder).observation.spaces)
    assert {"head_rgb", "wrist_rgb", "instruction", "state"} <= streams


def test_the_preset_trains_with_the_privileges_that_the_demo_names() -> None:
    config = load_config("tabletop-demo")
    assert config.env.kwargs["observation"] == "labelled"
    assert config.algorithm.cfg.auxiliary_learning_rate > 0
    assert config.policy.vla_config.model_config["freeze_vision"] is True
    assert "a dense reward" in demo.PRIVILEGES
    assert "object positions as labels" in demo.PRIVILEGES
