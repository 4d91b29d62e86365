"""The commands of PushT's results are ones that Deft understands; its tables are computed as they are written."""

import argparse
from concurrent.futures import ThreadPoolExecutor

import pytest

from deft.config.training import parse_training


@pytest.fixture
def script(load_benchmark):
    return load_benchmark("pusht_results")


def settings(folder, **changes):
    given = {"dataset": None, "demonstrations": 5, "demonstration_seed": 7, "expert_episodes": 3, "epochs": 2}
    given |= {"sft": "--batch_size 64", "steps": 9000, "episodes": 20, "flags": ["--n_epochs", "2"]}
    given |= {"minutes": 1.0, "cores": 1, "device": "cpu", "results": folder}
    return argparse.Namespace(**given | changes)


@pytest.fixture
def asked(script, tmp_path, monkeypatch):
    """The commands that the script runs, without running them."""
    found = []

    def deft(self, *words, minutes=None):
        found.append([str(word) for word in words])
        if words[0] == "train":
            (tmp_path / "seed-3" / found[-1][found[-1].index("--output_dir") + 1] / "checkpoint-8").mkdir(parents=True)
        return {"seconds": 1.0, "success_rate": 0.5}

    monkeypatch.setattr(script.PushTBench, "deft", deft)
    return found


def test_every_command_is_understood_and_finished_steps_are_not_repeated(script, tmp_path, asked):
    bench = script.PushTBench(settings(tmp_path))
    demos = tmp_path / "demos"
    demos.mkdir()  # of an interrupted recording
    recorded = bench.record()
    assert not demos.exists()
    with ThreadPoolExecutor(1) as pool:
        found = bench.seed(3, pool)
    played = bench.expert()
    collect, sft, *first, ppo, one, two, expert = asked
    assert collect[:5] == ["collect", "--env", "pusht", "--env-kwargs", "observation=keypoints"]
    assert (collect[collect.index("--episodes") + 1], collect[collect.index("--seed") + 1]) == ("5", "7")
    assert collect[collect.index("--format") + 1] == "lerobot"
    assert expert[expert.index("--episodes") + 1] == "3"
    run = parse_training(sft[1:])[1]
    assert (run.algorithm.cfg.batch_size, run.trainer.num_epochs, run.seed) == (64, 2, 3)
    assert run.dataset.path == str(demos)
    run = parse_training(ppo[1:])[1]
    assert (run.algorithm.name, run.algorithm.cfg.n_epochs, run.trainer.total_timesteps) == ("ppo", 2, 9000)
    assert run.env.kwargs == {"observation": "keypoints", "reward": "progress"}
    assert run.model_path == str(tmp_path / "seed-3" / "sft")
    evaluations = [*first, one, two]
    assert [words[1] for words in evaluations] == [
        str(tmp_path / "seed-3" / name / "checkpoint-8") for name in ("sft", "sft", "ppo", "ppo")
    ]
    assert ["--stochastic" in words for words in evaluations] == [False, True, False, True]
    # The suite's reward, also where the run was trained with another.
    assert all(
        words[2:7] == ["--suite", "pusht", "--env-kwargs", "observation=keypoints", "reward=coverage"]
        for words in evaluations
    )
    asked.clear()
    with ThreadPoolExecutor(1) as pool:
        assert (bench.record(), bench.seed(3, pool), bench.expert()) == (recorded, found, played)
    assert asked == []


def test_a_dataset_that_exists_is_not_recorded(script, tmp_path, asked):
    bench = script.PushTBench(settings(tmp_path, dataset="lerobot/pusht_keypoints"))
    assert bench.record() == {}
    with ThreadPoolExecutor(1) as pool:
        bench.seed(3, pool)
    assert [words[0] for words in asked] == ["train", "evaluate", "evaluate", "train", "evaluate", "evaluate"]
    assert parse_training(asked[0][1:])[1].dataset.path == "lerobot/pusht_keypoints"


def result(sft, sft_sampled, ppo, ppo_sampled):
    found = {"sft-evaluation": sft, "sft-sampled": sft_sampled, "ppo-evaluation": ppo, "ppo-sampled": ppo_sampled}
    keys = {"success_rate": 1, "measures/max_coverage": 2, "measures/max_reward": 4}
    return {"taken": {name: {key: rate / part for key, part in keys.items()} for name, rate in found.items()}}


def test_table_and_bars(script):
    """PPO with sampled actions, 40 and 50 %, against the better of both kinds of SFT, 20 and 20 %.

    Gains of 20 and 30 points: 25 ± 12.71 · 5, with one degree of freedom; those of coverage are half as large.
    """
    seeds = {0: result(0.2, 0.1, 0.0, 0.4), 1: result(0.1, 0.2, 0.9, 0.5)}
    assert script.bars(seeds) == [
        ("PPO above SFT in every seed, points of success", "+25.0 (-38.5 to +88.5)", True),
        ("the interval of the gain excludes 0", "from -38.5", False),
        ("PPO above SFT in every seed, largest coverage", "+0.125 (-0.193 to +0.443)", True),
    ]
    expert = {"episodes": 10, "success_rate": 1.0, "measures/max_coverage": 0.96, "measures/max_reward": 1.0}
    rows = script.table({0: seeds[0], 1: result(0.2, 0.2, 0.4, 0.4)}, expert, episodes=100)
    assert [row[0] for row in rows[:5]] == [
        "sft, most likely actions",
        "sft, sampled actions",
        "ppo, most likely actions",
        "ppo, sampled actions",
        "scripted expert",
    ]
    # Wilson's interval of 40 of 200 episodes; the seeds agree
    assert rows[0] == ["sft, most likely actions", "20.0 % (15.0 to 26.1)", "20, 20", *rows[0][3:]]
    assert rows[0][3:] == ["0.100 (0.100 to 0.100)", "0.050 (0.050 to 0.050)"]
    assert rows[2][2] == "0, 40"
    assert rows[4][1:] == ["100.0 % (72.2 to 100.0)", "", "0.960", "1.000"]  # Wilson: 10 / (10 + 3.84)
    worse = script.bars({0: result(0.5, 0.1, 0.9, 0.4), 1: result(0.2, 0.1, 0.2, 0.4)})
    assert [met for _, _, met in worse] == [False, False, False]
