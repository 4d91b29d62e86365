"""The commands of MetaWorld's results are ones that Deft understands; its tables are computed as they are written."""

import argparse
import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from deft.config.training import parse_training

SMALL = ("reach-v3", "push-v3", "pick-place-v3", "peg-insert-side-v3")  # of MT10, by the order of its tasks


@pytest.fixture
def script(load_benchmark):
    return load_benchmark("metaworld_results")


def settings(folder, **changes):
    given = {"group": "MT10", "method": "dagger", "demonstrations": 5, "noise": 0.1, "dagger": [], "ppo": []}
    given |= {"epochs": 3, "sft": ["--batch_size", "64"], "steps": 4000, "num_envs": 20, "episodes": 20, "horizon": 400}
    given |= {
        "scenes": 30,
        "scene_tasks": None,
        "image_size": 96,
        "rendering": "fast",
        "specialists": [],
        "successes": 0,
    }
    given |= {"minutes": 1.0, "cores": 1, "device": "cpu", "results": folder, "flags": []}
    return argparse.Namespace(**given | changes)


def play_seed(script, folder, monkeypatch, **changes):
    """The commands of seed 3, and what the benchmark found; commands do nothing but leave a checkpoint."""
    asked = []

    def deft(self, *words, minutes=None):
        asked.append([str(word) for word in words])
        if "--out" in words:
            words[words.index("--out") + 1].mkdir(parents=True, exist_ok=True)
        if "--output_dir" in words:
            run = words[words.index("--output_dir") + 1]
            (run / "checkpoint-8").mkdir(parents=True, exist_ok=True)
            (run / "episode_metrics.jsonl").touch()
        return {"seconds": 1.0, "tasks": {"a": {"success_rate": 0.5}}}

    monkeypatch.setattr(script.MetaWorldBench, "deft", deft)
    bench = script.MetaWorldBench(settings(folder, **changes))
    with ThreadPoolExecutor(1) as pool:
        return asked, bench.seed(3, pool)


@pytest.mark.parametrize(
    ("method", "flag", "recorded", "kwargs"),
    [
        ("dagger", "--updates_per_round", "labelled", {"observation": "labelled"}),
        ("ppo", "--n_epochs", "images", {"observation": "privileged"}),
    ],
)
def test_every_command_is_understood_and_finished_steps_are_not_repeated(
    script, tmp_path, monkeypatch, method, flag, recorded, kwargs
):
    given = {"method": method, "flags": [flag, "2"]}
    demos = tmp_path / "seed-3" / "demos-v0"
    (demos / "old").mkdir(parents=True)  # of an interrupted recording
    asked, found = play_seed(script, tmp_path, monkeypatch, **given)
    assert not (demos / "old").exists()
    scenes = [asked.pop(1) for _ in SMALL] if method == "dagger" else []
    collect, sft, first_evaluation, online, second_evaluation = asked
    assert collect[:3] == ["collect", "--env", "metaworld/MT10"]
    assert f"observation={recorded}" in collect
    assert collect[collect.index("--episodes") + 1] == "50"  # 5 of each of 10 tasks
    assert collect[collect.index("--seed") + 1] == "3000000"
    run = parse_training(sft[1:])[1]
    assert (run.algorithm.cfg.batch_size, run.trainer.num_epochs, run.seed) == (64, 3, 3)
    assert run.dataset.path == str(demos)
    run = parse_training(online[1:])[1]
    assert run.algorithm.name == method
    assert vars(run.algorithm.cfg)[flag[2:]] == 2
    assert run.env.kwargs == {**kwargs, "rendering": "fast", "image_size": 96}
    assert (run.trainer.total_timesteps, run.env.num_envs) == (4000, 20)
    assert run.model_path == str(tmp_path / "seed-3" / "sft")
    if method == "dagger":
        both = str(tmp_path / "seed-3" / "scenes-v0")  # a copy of the demonstrations, and further episodes
        assert run.algorithm.cfg.prior_data == both
        seeds = [3_500_000, 3_625_000, 3_750_000, 3_875_000]  # 500,000 different ones for four tasks
        for words, task, first in zip(scenes, SMALL, seeds, strict=True):
            assert words[words.index("--env") + 1] == f"metaworld/{task}"
            assert words[words.index("--out") + 1] == both
            assert "--append" in words
            assert words[words.index("--episodes") + 1] == "30"
            assert words[words.index("--seed") + 1] == str(first)
    evaluations = (first_evaluation, second_evaluation)
    assert [words[1] for words in evaluations] == [
        str(tmp_path / "seed-3" / name / "checkpoint-8") for name in ("sft", method)
    ]
    assert all({"max_episode_steps=400", "observation=images"} <= set(words) for words in evaluations)
    kept = json.loads((tmp_path / "seed-3" / f"{method}-evaluation.json").read_text())
    assert kept["tasks"] == {"a": {"success_rate": 0.5}}
    assert play_seed(script, tmp_path, monkeypatch, **given) == ([], found)


def test_the_control_continues_for_as_many_rounds_without_specialists(script, tmp_path, monkeypatch):
    """Rounds of 100 steps: 6,000 env steps of 20 environments, and 5,400 of 18, are three of 1,000 updates."""
    given = {"num_envs": None, "steps": None, "scene_tasks": ["reach-v3"]}
    runs = {}
    for method, alone in (("distilled", ["reach-v3"]), ("further", [])):
        folder = tmp_path / method
        asked, found = play_seed(script, folder, monkeypatch, method=method, specialists=alone, **given)
        runs[method] = parse_training(dict(zip(found["taken"], asked, strict=True))[method][1:])[1]
        assert runs[method].model_path == str(folder / "seed-3" / "dagger")
    rounds = [run.trainer.total_timesteps / (run.env.num_envs * run.trainer.rollout_steps) for run in runs.values()]
    assert rounds == [3, 3]
    one, other = (run.algorithm.cfg for run in runs.values())
    assert (one.learning_rate, one.updates_per_round) == (other.learning_rate, other.updates_per_round) == (5e-4, 1000)
    assert runs["further"].algorithm.cfg.prior_data == str(tmp_path / "further" / "seed-3" / "scenes-v0")
    assert runs["further"].env.training_kwargs == {}


def test_specialists_are_distilled(script, tmp_path, monkeypatch):
    """PPO on two tasks from DAgger's policy; DAgger continues on the eight others with a dataset of both successes."""
    given = {"method": "distilled", "num_envs": None, "steps": None, "scene_tasks": ["reach-v3"], "successes": 7}
    given |= {
        "specialists": ["reach-v3", "push-v3"],
        "dagger": ["--updates_per_round", "9"],
        "ppo": ["--n_epochs", "2"],
    }
    asked, found = play_seed(script, tmp_path, monkeypatch, **given)
    seed = tmp_path / "seed-3"
    names = ["demos", "scenes-reach-v3", "sft", "sft-evaluation", "dagger", "dagger-evaluation"]
    names += ["ppo-reach-v3", "ppo-push-v3", "successes-reach-v3", "successes-push-v3"]
    assert list(found["taken"]) == [*names, "distilled", "distilled-evaluation"]
    commands = dict(zip(found["taken"], asked, strict=True))
    assert parse_training(commands["dagger"][1:])[1].algorithm.cfg.updates_per_round == 9
    for task, first in (("reach-v3", "3900000"), ("push-v3", "3910000")):
        run = parse_training(commands[f"ppo-{task}"][1:])[1]
        assert (run.algorithm.name, run.algorithm.cfg.n_epochs) == ("ppo", 2)
        assert (run.env.id, run.env.kwargs["reward"]) == (f"metaworld/{task}", "progress")
        assert run.model_path == str(seed / "dagger")
        words = commands[f"successes-{task}"]
        assert words[words.index("--policy") + 1] == str(seed / f"ppo-{task}")
        assert (words[words.index("--episodes") + 1], words[words.index("--seed") + 1]) == ("7", first)
        assert {"--only-success", "--append"} <= set(words)
    run = parse_training(commands["distilled"][1:])[1]
    assert run.model_path == str(seed / "dagger")
    assert run.algorithm.cfg.prior_data == str(seed / "specialists-v0")
    assert run.env.training_kwargs == {"task_weights": {"reach-v3": 0, "push-v3": 0}}
    assert (run.env.num_envs, run.trainer.total_timesteps) == (16, 5400)  # two of each of eight tasks
    assert play_seed(script, tmp_path, monkeypatch, **given) == ([], found)


def test_results_of_other_settings_are_not_mixed(script, tmp_path, monkeypatch):
    """Other cores may continue a benchmark: they change the number of recording environments and workers."""
    play_seed(script, tmp_path, monkeypatch)
    assert play_seed(script, tmp_path, monkeypatch, cores=2, device="cuda")[0] == []
    with pytest.raises(SystemExit, match=r"demos\.json is of other settings; name another folder with --results"):
        play_seed(script, tmp_path, monkeypatch, group="MT25")


def test_specialists_are_some_of_the_tasks(script, monkeypatch, capsys):
    for group in ("reach-v3", "hard"):  # hard has no reach
        monkeypatch.setattr("sys.argv", ["metaworld_results.py", "--method", "distilled", "--group", group])
        with pytest.raises(SystemExit):
            script.main()
        wanted = f"--specialists reach-v3: name some of the tasks of {group}, and not all"
        assert wanted in capsys.readouterr().err


def result(sft, after):
    rows = [{task: {"success_rate": rate} for task, rate in zip("ab", rates, strict=True)} for rates in (sft, after)]
    return {"taken": {"sft-evaluation": {"tasks": rows[0]}, "ppo-evaluation": {"tasks": rows[1]}}}


def test_tables_and_bars(script):
    """Means over both tasks: SFT 60 and 70 %, PPO 85 and 95 %: + 25 points in each seed, and 90 % in the mean."""
    seeds = {0: result((0.5, 0.7), (0.8, 0.9)), 1: result((0.6, 0.8), (0.9, 1.0))}
    # t = 12.71 with one degree of freedom, times half the difference of two seeds: 90 ± 12.71 · 5
    assert script.bars(seeds, "ppo", "MT10") == [
        ("ppo ≥ SFT + 15 points", "+25.0 (+25.0 to +25.0)", True),
        ("ppo ≥ 85 %", "90.0 (26.5 to 153.5)", True),
    ]
    rows = script.table(seeds, ["sft", "ppo"], episodes=20)
    assert [row[0] for row in rows] == ["a", "b", "mean"]
    assert [cell.split(" %")[0] for cell in rows[2][1:]] == ["65.0", "90.0"]
    missed = {0: result((0.8, 0.8), (0.8, 0.88))}
    assert [met for _, _, met in script.bars(missed, "ppo", "MT10")] == [False, False]
    found = script.bars({0: result((0.5, 0.5), (0.7, 0.68))}, "ppo", "MT50")  # 50 and 69 %
    assert [(name, met) for name, _, met in found] == [("SFT ≥ 50 %", True), ("ppo ≥ 70 %", False)]


@pytest.mark.parametrize(("cores", "tasks", "count"), [(16, 10, 13), (2, 10, 3), (5, 10, 3), (8, 50, 7), (4, 1, 4)])
def test_recordings_play_every_task_in_every_environment(script, cores, tasks, count):
    """The largest number of environments up to that of the cores, at least 3, without a common divisor."""
    assert script.recording_envs(cores, tasks) == count
