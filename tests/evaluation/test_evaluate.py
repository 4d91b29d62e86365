"""Evaluation of runs from their folder, and the demo's parts."""

import json
import shutil
from contextlib import closing

import imageio.v3 as iio
import numpy as np
import pytest

from deft import PPOTrainer, RLConfig
from deft.cli import main
from deft.config.command_settings import CompareRunsConfig, PlayConfig
from deft.config.deployment_settings import ExportConfig
from deft.config.settings import EnvConfig, RunConfig
from deft.deployment.export import export
from deft.envs.make import make_vector_env
from deft.errors import InputError
from deft.evaluation.compare import compare_runs
from deft.evaluation.comparison_table import comparison_lines
from deft.evaluation.evaluate import FIRST_HELD_OUT_SEED, env_of_run, evaluate_run, first_seed, merge_env_kwargs
from deft.evaluation.play import play
from deft.runs.logging import logged_evaluations


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


def test_it_is_said_which_checkpoint_was_played_and_why(run, tmp_path):
    results = evaluate_run(run, episodes=1, seed=3)
    best = (run / "best").resolve()
    assert results["checkpoint"] == str(best)
    assert results["first_seed"] == 3
    evaluations = logged_evaluations(run, 512)
    (chosen,) = [line for line in evaluations if f"checkpoint-{line['step']}" == best.name]
    assert chosen["mean_reward"] == max(line["mean_reward"] for line in evaluations)
    assert f"mean_reward {chosen['mean_reward']:.4g} over 4 episodes of other seeds" in results["checkpoint_choice"]
    assert evaluate_run(best, episodes=1)["checkpoint_choice"] == "the checkpoint that was given"
    assert evaluate_run(run, episodes=1, random_policy=True)["checkpoint_choice"] == "none: the actions are random"
    copied = tmp_path / "unmarked"
    shutil.copytree(run, copied, ignore=shutil.ignore_patterns("best"))
    assert evaluate_run(copied, episodes=1)["checkpoint_choice"].startswith("the latest of the run: no evaluation")
    export(ExportConfig(path=str(run), out=str(tmp_path / "exported")))
    assert evaluate_run(tmp_path / "exported", episodes=1)["checkpoint_choice"] == "the policy that was exported"


def test_actions_are_the_likeliest_or_sampled_and_the_results_say_which(run, capsys):
    results = [evaluate_run(run, episodes=4), evaluate_run(run, episodes=4, deterministic=False)]
    assert [result["action_selection"] for result in results] == ["mode", "sample"]
    assert results[0]["mean_reward"] != results[1]["mean_reward"]
    assert results[1] == evaluate_run(run, episodes=4, deterministic=False)  # the seed decides what is drawn
    for flags, result in ((["--stochastic"], results[1]), (["--deterministic"], results[0]), ([], results[0])):
        assert main(["evaluate", str(run), "--episodes", "4", "--json", *flags]) == 0
        assert json.loads(capsys.readouterr().out)["mean_reward"] == result["mean_reward"]
    assert evaluate_run(run, episodes=1, random_policy=True)["action_selection"] == "random"


def test_a_flow_draws_its_noise_by_the_seed_wherever_it_is_evaluated(tmp_path):
    """Evaluated, compared and played on the same seed it does the same, from drawn noise."""
    flags = (
        "--env-kwargs observation=vla image_size=32 --model vla-tiny --vla-model-config head=flow width=16 "
        "--chunk-length 1 --total-timesteps 16 --rollout-steps 16 --n-epochs 1 --eval-freq 0 --max-episode-steps 5"
    )
    quiet = "--console-level CRITICAL --no-tensorboard"
    assert main(["train", "ppo", "--output-dir", str(tmp_path / "run"), *flags.split(), *quiet.split()]) == 0
    run = str(tmp_path / "run")
    evaluated = evaluate_run(run, episodes=3, seed=1)
    assert evaluated["action_selection"] == "sampled noise"
    assert evaluate_run(run, episodes=3, seed=1) == evaluated
    compared = compare_runs(CompareRunsConfig((run, "random"), episodes=3, seed=1))
    assert compared["action_selection"] == {"run": "sampled noise", "random": "random"}
    assert compared["columns"]["success"]["run"]["mean_reward"] == evaluated["mean_reward"]
    assert comparison_lines(compared).splitlines()[-1] == "actions: run: sampled noise, random: random"
    played = [play(PlayConfig(policy=run, episodes=2, deterministic=drawn)) for drawn in (True, True, False)]
    assert played[0] == played[1]
    assert played[0]["returns"] != played[2]["returns"]
    assert [one["action_selection"] for one in played] == ["sampled noise", "sampled noise", "sample"]


@pytest.mark.parametrize("command", ["evaluate", "compare"])
def test_progress_is_shown_while_episodes_are_played(run, tmp_path, monkeypatch, capsys, command):
    """Lines on stderr where it is no terminal; here after every step. Two policies play in the comparison."""
    monkeypatch.setattr("deft.runs.progress.LINE_INTERVAL", 0.0)
    words = {"evaluate": [str(run)], "compare": [str(run), "random", "--out", str(tmp_path)]}[command]
    assert main([command, *words, "--episodes", "4", "--json"]) == 0
    shown = capsys.readouterr()
    total = {"evaluate": 4, "compare": 8}[command]
    lines = [line for line in shown.err.splitlines() if f"% of {total} · " in line]
    assert f"100% of {total} · {total} episodes" in lines[-1]
    assert len(lines) > 4
    assert json.loads(shown.out)  # the results alone


def test_arguments_of_the_environment_may_be_others(run):
    # The run's time limit is 50 steps; a limit of 3 ends every episode that has not succeeded before.
    results = evaluate_run(run, episodes=4, seed=3, random_policy=True, env_kwargs={"max_episode_steps": 3})
    assert results["mean_length"] <= 3


def test_worker_processes_play_the_same_episodes(run, capsys):
    assert evaluate_run(run, episodes=4, vector="process") == evaluate_run(run, episodes=4)
    assert main(["evaluate", "--policy", "random", "--env", "CartPole-v1", "--vector", "process"]) == 2
    assert "--vector: is for the policy of a run" in capsys.readouterr().err


def test_random_actions_play_the_same_seeds(run):
    assert evaluate_run(run, episodes=5, random_policy=True) == evaluate_run(run, episodes=5, random_policy=True)


def test_videos_show_the_world(run, tmp_path):
    results = evaluate_run(run, episodes=2, video=tmp_path / "reach.mp4")
    frames = iio.imread(results["video"])
    assert len(frames) >= 2
    assert frames.std() > 10  # not flat
    assert sorted(path.name for path in (run / "videos").iterdir()) == ["step_256.mp4", "step_512.mp4"]


def test_outcomes_are_filmed_by_their_names(run, tmp_path):
    results = evaluate_run(run, episodes=3, seed=3, random_policy=True, videos=tmp_path / "videos")
    names = sorted(path.name for path in (tmp_path / "videos").iterdir())
    assert len(names) == 3
    assert len(results["videos"]) == 3
    assert all(name.startswith(("success_", "failure_")) for name in names)
    # A picture of the start and of every step; chance takes all 50 of them.
    lengths = [len(iio.imread(path)) for path in results["videos"]]
    assert np.mean(lengths) == results["mean_length"] + 1
    assert results["success_interval"][0] <= results["success_rate"] <= results["success_interval"][1]


def test_flags_of_the_world_and_its_kwargs_agree():
    assert merge_env_kwargs({"image_size": 32}, "pick", "held-out", True) == {
        "image_size": 32, "task": "pick", "split": "held-out", "shuffle_instructions": True,
    }  # fmt: skip
    assert merge_env_kwargs(None, None, None) == {}
    with pytest.raises(InputError, match="--split train: --env-kwargs sets 'all'"):
        merge_env_kwargs({"split": "all"}, None, "train")


def test_worlds_with_splits_begin_at_seeds_that_training_does_not():
    tabletop = make_vector_env(EnvConfig(id="tabletop"))
    reach = make_vector_env(EnvConfig(id="deft/Reach-v0"))
    assert first_seed(tabletop, 7) == FIRST_HELD_OUT_SEED + 7
    with closing(make_vector_env(EnvConfig(id="tabletop", vector="process", num_workers=1))) as workers:
        assert first_seed(workers, 7) == FIRST_HELD_OUT_SEED + 7
    assert first_seed(reach, 7) == 7


def test_the_run_keeps_its_arguments_in_its_own_environment():
    config = RunConfig(env=EnvConfig(id="tabletop", kwargs={"image_size": 32}))
    assert env_of_run(config, "deft/Tabletop-v0", {"split": "all"}).kwargs == {"image_size": 32, "split": "all"}
    assert env_of_run(config, "CartPole-v1", {}).kwargs == {}


def test_a_time_limit_that_is_given_replaces_that_of_the_run():
    trained = RunConfig(env=EnvConfig(id="tabletop", max_episode_steps=100))
    played = env_of_run(trained, None, {"max_episode_steps": 150})
    assert (played.time_limit, played.arguments) == (150, {})
    assert env_of_run(trained, None, {}).time_limit == 100
    assert env_of_run(trained, None, {}, max_episode_steps=150).time_limit == 150
    assert env_of_run(trained, None, {"max_episode_steps": None}).time_limit is None  # the environment's own
    with pytest.raises(InputError, match=r"max_episode_steps is 3, and the environment's arguments .* set it to 5"):
        env_of_run(trained, None, {"max_episode_steps": 5}, max_episode_steps=3)


def test_a_policy_of_other_spaces_is_described_with_both(tmp_path, capsys):
    """CartPole-v1: 4 numbers and 2 actions; Pendulum-v1: 3 numbers, actions of 1 number."""
    train = "--total-timesteps 16 --rollout-steps 16 --eval-freq 0 --console-level CRITICAL --no-tensorboard"
    cart = "observations vector of shape (4,) and actions Discrete(2)"
    pendulum = "observations vector of shape (3,) and actions vector of shape (1,)"
    for own, other, words in (
        ("CartPole-v1", "Pendulum-v1", (cart, pendulum)),
        ("Pendulum-v1", "CartPole-v1", (pendulum, cart)),
    ):
        run = str(tmp_path / own)
        assert main(["train", "ppo", "--env", own, "--output-dir", run, *train.split()]) == 0
        assert main(["evaluate", run, "--env", other, "--episodes", "1"]) == 2
        line = capsys.readouterr().err.splitlines()[-1]
        assert f"the policy was trained for {own} with {words[0]}; this environment has {words[1]}" in line
