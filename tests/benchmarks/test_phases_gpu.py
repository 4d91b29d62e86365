"""The comparison of the phases at toy size, from end to end, and again where it was stopped."""

import json
import sys

import pytest
from explorers import teacher_policy

from deft.config.loading import to_dict
from deft.runs import checkpoint

TINY = (
    "--num-envs 1 --steps-per-episode 3 --explorer-batch-size 3 --sequence-length 3 --batch-size 2 --bptt-length 3 "
    "--episodes-per-update 1 --random-episodes 1 --wm-updates 1 --wm-warmup 0 --replay-capacity 4 "
    "--no-overlap --device cpu"
)


@pytest.fixture
def benchmark(load_benchmark, monkeypatch):
    """The script, in one process and without plots: worker processes and plots have tests of their own."""
    found = load_benchmark("phases_gpu")
    monkeypatch.setattr(found, "TIMED", 1)
    monkeypatch.setattr("deft.training.phases.interaction.LENGTH", 24)
    monkeypatch.setattr("deft.training.phases.explorer_rollouts.available_cores", lambda: 1)
    monkeypatch.setattr("deft.training.phases.student.plot_metrics", lambda *given, **settings: [])
    return found


def fail(*given):
    raise AssertionError("a stage that is known runs again")


def test_all_stages_and_again_from_where_it_stopped(benchmark, monkeypatch, tmp_path, capsys):
    teacher, policy = tmp_path / "teacher", teacher_policy()
    teacher.mkdir()
    checkpoint.save_checkpoint(teacher, 8, policy.state_dict(), {"phase": "teacher"}, {})
    (teacher / "f1_config.json").write_text(json.dumps(to_dict(policy.config)))
    arguments = f"--teacher {teacher} --results {tmp_path / 'out'} --seeds 4 --rewards excess --episodes 3 {TINY}"
    lengths = "--student-episodes 1 --noise-episodes 1 --iterations 1 --methods sft vision"
    imitated = {"episodes": 100, "tasks": {}, "demonstration_steps": 12_000, "video_steps": 0}
    known = {"sft": {**imitated, "success": 0.4}, "vision": {**imitated, "success": 0.52}}
    monkeypatch.setattr(benchmark.Session, "train_policies", lambda *given: known)  # `vision_results.py` has a test
    monkeypatch.setattr(sys, "argv", ["phases_gpu.py", *arguments.split(), *lengths.split()])
    assert benchmark.main() == 0
    path = tmp_path / "out" / "results.json"
    found = json.loads(path.read_text())
    seed = found["seeds"]["4"]
    stages = {"student excess", "game", "random", "world models", "noise excess", "speed", "policy"}
    assert stages <= seed.keys()
    assert seed["chosen"] == "excess"
    assert set(seed["world models"]) == {"teacher", "random", "game"}
    assert seed["student excess"]["trained"]["steps"] == 3 * 3
    assert seed["speed"]["process"] > 0
    # as many updates on as many new episodes: the explorer's one and a random one, and two random ones
    states = {
        name: checkpoint.load_training_state(checkpoint.find_checkpoint(tmp_path / "out" / "seed-4" / name))
        for name in ("game", "random")
    }
    assert states["game"]["num_updates"] == states["random"]["num_updates"] == 1
    assert [states[name]["state"]["num_random"] for name in ("game", "random")] == [1, 2]
    moved = {name: one["interaction"]["moved"]["cross_entropy"] for name, one in seed["world models"].items()}
    lower = next(bar for bar in found["bars"] if "than with random data" in bar["what"])
    assert lower["value"] == pytest.approx(100 * (1 - moved["game"] / moved["random"]))
    assert lower["reached"] == (lower["value"] >= 5)
    added = next(bar for bar in found["bars"] if "that vision adds" in bar["what"])
    assert (round(added["value"], 6), added["reached"]) == (12, True)
    # stopped before the last stage: only that is run again
    del seed["speed"]
    path.write_text(json.dumps(found))
    for name in ("train_student", "train_game", "measure_models", "train_with_noise"):
        monkeypatch.setattr(benchmark, name, fail)
    capsys.readouterr()
    benchmark.main()
    again = json.loads(path.read_text())["seeds"]["4"]
    assert again["speed"]["process"] > 0
    assert again["world models"] == seed["world models"]
    assert "moved objects: cross-entropy lower than with random data" in capsys.readouterr().out
    # the time is over before the last stage starts: the tables of the others, and exit status 1
    del again["speed"]
    path.write_text(json.dumps({**found, "seeds": {"4": again}}))
    assert benchmark.main([*sys.argv[1:], "--stop-after", "0"]) == 1
    printed = capsys.readouterr().out
    assert "| speed " in printed.partition("minutes in all")[0]  # the plan
    assert "moved objects: cross-entropy lower than with random data" in printed
    assert "stopped by --stop-after; the same command continues" in printed
