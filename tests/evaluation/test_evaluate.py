"""Evaluation of runs from their folder, and the demo's parts."""

import imageio.v3 as iio
import numpy as np
import pytest
from worlds import Counting

from deft import PPOTrainer, RLConfig
from deft.envs.make import wrap
from deft.evaluation.evaluate import evaluate_run
from deft.evaluation.rollouts import play_episodes, summarize


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    config = RLConfig(
        total_timesteps=512, rollout_steps=64, num_envs=2, eval_freq=256, eval_episodes=4, video_freq=256,
        output_dir=str(folder), console_level="CRITICAL", tensorboard=False,
    )  # fmt: skip
    trainer = PPOTrainer(env="deft/Reach-v0", config=config)
    trainer.train()
    trainer.close()
    return folder


def test_a_run_is_evaluated_from_its_folder(run):
    results = evaluate_run(run, episodes=6, seed=3)
    assert results["episodes"] == 6
    assert 0 <= results["success_rate"] <= 1
    assert results == evaluate_run(run, episodes=6, seed=3)  # same seeds, same episodes
    assert results["mean_reward"] != evaluate_run(run, episodes=6, seed=100)["mean_reward"]


def test_arguments_of_the_environment_may_be_others(run):
    # The run's time limit is 50 steps; a limit of 3 ends every episode that has not succeeded before.
    results = evaluate_run(run, episodes=4, seed=3, random_policy=True, env_kwargs={"max_episode_steps": 3})
    assert results["mean_length"] <= 3


def test_random_actions_play_the_same_seeds(run):
    assert evaluate_run(run, episodes=5, random_policy=True) == evaluate_run(run, episodes=5, random_policy=True)


def test_videos_show_the_world(run, tmp_path):
    results = evaluate_run(run, episodes=2, video=tmp_path / "reach.mp4")
    frames = iio.imread(results["video"])
    assert len(frames) >= 2
    assert frames.std() > 10  # not flat
    assert sorted(path.name for path in (run / "videos").iterdir()) == ["step_256.mp4", "step_512.mp4"]


def test_each_environment_plays_its_own_episode():
    """Seven episodes on three copies: waves of three, three and one; long and short ones count alike."""
    env = wrap([Counting(length=2), Counting(length=5), Counting(length=9)])
    episodes = play_episodes(None, env, 7)
    # copy i plays episodes i, i + 3, i + 6: lengths 2, 5, 9, 2, 5, 9, 2
    assert [episode.length for episode in episodes] == [2, 5, 9, 2, 5, 9, 2]
    summary = summarize(episodes)
    assert summary["mean_reward"] == pytest.approx(np.mean([2, 5, 9, 2, 5, 9, 2]))
    assert "success_rate" not in summary
