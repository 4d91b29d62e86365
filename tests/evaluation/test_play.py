"""`deft play`: results that can be trusted, and a video that shows them."""

import json

import imageio.v3 as iio
import numpy as np
import pytest

from deft.cli import main
from deft.config.command_settings import PlayConfig
from deft.envs.wrappers import CAPTION_HEIGHT
from deft.errors import InputError
from deft.evaluation.play import play


def test_the_expert_plays_from_numbered_seeds_and_is_filmed(tmp_path):
    results = play(PlayConfig(env="reach", episodes=3, seed=4, video=str(tmp_path / "videos" / "expert.mp4")))
    assert results["successes"] == [True] * 3
    assert results["success_rate"] == 1.0
    assert results["mean_reward"] == pytest.approx(np.mean(results["returns"]), abs=1e-4)
    frames = iio.imread(results["video"])
    assert len(frames) == sum(results["lengths"])  # every step of every episode
    assert frames[0][:-CAPTION_HEIGHT].std() > 10
    strip = frames[0][-CAPTION_HEIGHT:]
    assert strip.max() > 200  # the words,
    assert np.median(strip) < 20  # on black
    again = play(PlayConfig(env="reach", episodes=2, seed=5))  # without a video: the same episodes, one seed later
    assert again["returns"] == results["returns"][1:]
    assert "video" not in again


def test_random_actions_are_no_expert():
    results = play(PlayConfig(env="reach", policy="random", episodes=10, max_episode_steps=10))
    assert max(results["lengths"]) == 10
    assert results["success_rate"] < 0.5
    assert results == play(PlayConfig(env="reach", policy="random", episodes=10, max_episode_steps=10))


def test_a_trained_policy_plays_where_it_was_trained(tmp_path):
    flags = "--total-timesteps 64 --rollout-steps 64 --max-episode-steps 7 --eval-freq 0 --env-kwargs num_targets=3"
    quiet = "--console-level CRITICAL --no-tensorboard"
    assert main(["train", "ppo", "--output-dir", str(tmp_path / "run"), *flags.split(), *quiet.split()]) == 0
    results = play(PlayConfig(policy=str(tmp_path / "run"), video=str(tmp_path / "run.mp4"), episodes=2))
    assert results["env"] == "deft/Reach-v0"
    assert max(results["lengths"]) <= 7
    assert len(iio.imread(results["video"])) == sum(results["lengths"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"env": "CartPole-v1"}, "CartPole-v1 offers no scripted expert"),
        ({"env": "reach", "policy": "nowhere"}, "nowhere"),
        ({"env": "reach", "task": "pick"}, "do not fit deft/Reach-v0"),
        ({"task": "pick", "env_kwargs": {"task": "push"}}, "--task pick: --env-kwargs sets 'push'"),
    ],
)
def test_what_cannot_be_played_is_said(settings, message):
    with pytest.raises(InputError, match=message) as caught:
        play(PlayConfig(**settings))
    assert "\n" not in str(caught.value)


def test_the_command_prints_json(capsys):
    assert main(["play", "--env", "reach", "--episodes", "1", "--env-kwargs", "num_targets=1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["successes"] == [True]
    assert main(["play", "reach"]) == 2
    assert "unexpected 'reach'" in capsys.readouterr().err


def test_task_is_the_environments_own():
    results = play(PlayConfig(env="tabletop", task="reach", episodes=1))
    assert results["successes"] == [True]


@pytest.mark.parametrize("command", [["play", "--env", "reach"], ["evaluate", "run"]])
def test_a_video_does_not_replace_a_file_of_another_kind(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "thesis.txt").write_text("mine")
    assert main([*command, "--video", "thesis.txt"]) == 2
    assert "--video: 'thesis.txt' does not end in .mp4" in capsys.readouterr().err
    assert (tmp_path / "thesis.txt").read_text() == "mine"
