"""Waypoint PPO as a whole: it learns the toy, leaves the supervised policy alone, and writes what it says."""

import json
import os
import signal
from typing import Any, ClassVar

import pytest
import torch

from deft.config.waypoint_settings import CompareConfig, PPOConfig
from deft.errors import InputError
from deft.evaluation.waypoints import HeldOut
from deft.models.waypoint import PPOPolicy
from deft.runs.random_state import EVALUATION_SEED
from deft.runs.waypoint_files import load_ppo, load_sft, same_sft
from deft.training.waypoints.compare import compare_policies
from deft.training.waypoints.ppo import SAFETY_SEED, SafetyCheck, WaypointTrainer, build_waypoint_trainer, train_ppo


@pytest.fixture(autouse=True)
def _few_plots(request, monkeypatch):
    """Pictures take longer than these trainings; one test draws them."""
    if "files_of_a_run" not in request.node.name:
        monkeypatch.setattr("deft.training.waypoints.ppo.plot_run", lambda folder: [])
        monkeypatch.setattr("deft.training.waypoints.ppo.plot_waypoints", lambda *given: given[2])
        monkeypatch.setattr("deft.training.waypoints.compare.plot_waypoints", lambda *given: given[2])


def config(sft, folder, toy, **settings):
    defaults = {"num_envs": 8, "rollout_steps": 8, "num_iterations": 4, "eval_episodes": 8, "eval_interval": 2}
    defaults |= {"save_interval": 2, "residual_modes": 2, "threads": 1, "env_kwargs": toy, "device": "cpu"}
    return PPOConfig(sft_checkpoint=str(sft), out_dir=str(folder), **(defaults | settings))


def test_it_takes_out_the_error_of_the_supervised_policy(sft, tmp_path, toy, quiet):
    """ADE falls by 80 % and more on episodes that were never trained on; the frozen weights stay bit for bit."""
    learning = {"num_envs": 64, "rollout_steps": 16, "num_iterations": 22, "batch_size": 128, "lr": 1.5e-3}
    settings = config(sft, tmp_path, toy, **learning, eval_interval=0, save_interval=0)
    model, _ = load_sft(sft)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trainer = build_waypoint_trainer(settings, model, quiet)
    held_out = HeldOut(["toy"], "medium", 200, 1_000_000, toy)
    supervised = held_out.evaluate(trainer.policy)["ade"]
    trainer.train()
    refined = held_out.evaluate(trainer.policy)["ade"]
    trainer.close()
    assert supervised > 0.4
    assert refined < 0.2 * supervised
    for name, value in trainer.policy.sft.state_dict().items():
        assert torch.equal(value, before[name]), name
    # The supervised policy is used: without its waypoints' error in the observation, nothing is left to take out.
    without = HeldOut(["toy"], "medium", 50, 1_000_000, {**toy, "sft_noise": 0.0})
    assert without.evaluate(PPOPolicy(model))["ade"] < 0.3 * supervised


def test_the_files_of_a_run(sft, tmp_path, toy, quiet):
    summary = train_ppo(config(sft, tmp_path, toy), quiet)
    files = {path.name for path in tmp_path.iterdir()}
    wanted = {"config.json", "train_metrics.json", "eval_metrics.json", "final.pt"}
    assert wanted | {"checkpoint_iter_2.pt", "checkpoint_iter_4.pt"} <= files
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["clip_range"] == 0.2
    assert written["env"] == ["toy"]
    lines = json.loads((tmp_path / "train_metrics.json").read_text())
    assert [line["iteration"] for line in lines] == [1, 2, 3, 4]
    assert {"policy_loss", "value_loss", "entropy", "clip_fraction"} <= lines[0].keys()
    evaluations = json.loads((tmp_path / "eval_metrics.json").read_text())
    assert [line["iteration"] for line in evaluations] == [0, 2, 4]
    assert {"ade", "fde", "success_rate", "collision_rate"} <= evaluations[0].keys()
    assert summary["sft_ade"] == evaluations[0]["ade"]
    assert all((tmp_path / "plots" / name).exists() for name in ("waypoints_toy.png", "learning_curve.png"))
    policy, settings = load_ppo(tmp_path)
    assert settings["iterations"] == 4
    assert same_sft(policy, load_sft(sft)[0])


def test_the_first_evaluation_is_the_supervised_policy(sft, tmp_path, toy, quiet):
    train_ppo(config(sft, tmp_path, toy, num_iterations=1), quiet)
    first = json.loads((tmp_path / "eval_metrics.json").read_text())[0]
    model, _ = load_sft(sft)
    held_out = HeldOut(["toy"], "medium", 8, EVALUATION_SEED, toy)
    assert held_out.evaluate(PPOPolicy(model))["ade"] == pytest.approx(first["ade"], rel=1e-5)


def test_a_run_that_goes_on_is_as_one_that_was_not_stopped(sft, tmp_path, toy, quiet):
    whole = config(sft, tmp_path / "whole", toy, num_iterations=4)
    train_ppo(whole, quiet)
    train_ppo(config(sft, tmp_path / "half", toy, num_iterations=2), quiet)
    train_ppo(config(sft, tmp_path / "half", toy, num_iterations=4, resume=True), quiet)
    one, other = (load_ppo(tmp_path / name)[0].state_dict() for name in ("whole", "half"))
    for name in one:
        assert torch.equal(one[name], other[name]), name
    lines = json.loads((tmp_path / "half" / "train_metrics.json").read_text())
    assert [line["iteration"] for line in lines] == [1, 2, 3, 4]


def test_resuming_with_other_settings_is_an_error(sft, tmp_path, toy, quiet):
    """A flag that was not repeated has its default: the run would silently continue with other settings."""
    train_ppo(config(sft, tmp_path, toy, num_iterations=1, residual_bound=1.0), quiet)
    with pytest.raises(InputError, match=r"resume: residual_bound 4.0 \(the run's is 1.0\): repeat the flags"):
        train_ppo(config(sft, tmp_path, toy, num_iterations=2, resume=True), quiet)


def test_several_processes_are_an_error(sft, tmp_path, toy, quiet, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match="deft train waypoint-ppo: trains in one process, started in 2"):
        train_ppo(config(sft, tmp_path, toy), quiet)
    assert not list(tmp_path.iterdir())


def test_more_modes_than_waypoints_are_an_error(sft, tmp_path, toy, quiet):
    with pytest.raises(InputError, match="residual_modes 20 is more than the"):
        train_ppo(config(sft, tmp_path, toy, residual_modes=20), quiet)


def test_safety_watches_each_environment():
    """Better in one environment by more than it is worse in the other: the mean falls, and it is still rejected."""

    class Played:
        results: ClassVar = [
            {"ade": 1.0, "toy/ade": 1.0, "driving/ade": 1.0},
            {"ade": 0.8, "toy/ade": 0.5, "driving/ade": 1.1},
            {"ade": 0.9, "toy/ade": 0.9, "driving/ade": 0.9},
        ]

        def evaluate(self, policy: Any) -> dict[str, float]:
            return self.results.pop(0)

    check = SafetyCheck(Played(), ("ade", "collision_rate"))
    check.set_baseline(None)
    assert check.measures == ["toy/ade", "driving/ade"]
    assert [check(None), check(None)] == [False, True]


def test_one_seed_one_result(sft, tmp_path, toy, quiet):
    runs = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        train_ppo(config(sft, tmp_path / name, toy, num_iterations=2, seed=seed), quiet)
        runs.append(load_ppo(tmp_path / name)[0].delta_head.direct[0].weight)
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])


def test_a_run_is_not_overwritten_unasked(sft, tmp_path, toy, quiet):
    train_ppo(config(sft, tmp_path, toy, num_iterations=1), quiet)
    with pytest.raises(InputError, match="already holds a run"):
        train_ppo(config(sft, tmp_path, toy), quiet)
    train_ppo(config(sft, tmp_path, toy, num_iterations=1, overwrite=True), quiet)


def test_several_environments_in_one_run(tmp_path, quiet):
    """The toy and the driving world share a policy; each is measured by itself too."""
    from deft.config.waypoint_settings import WaypointRecordingConfig, WaypointSFTConfig
    from deft.training.waypoints.record import record
    from deft.training.waypoints.sft import train_sft

    size = {"camera_size": 16}
    record(WaypointRecordingConfig(out=str(tmp_path / "d.npz"), env="driving", episodes=4, env_kwargs=size))
    train_sft(WaypointSFTConfig(dataset=str(tmp_path / "d.npz"), out_dir=str(tmp_path / "sft"), num_epochs=1))
    settings = {"env": ("toy", "driving"), "num_iterations": 1, "eval_episodes": 4}
    train_ppo(config(tmp_path / "sft", tmp_path / "run", size | {"toy": {"horizon": 8}}, **settings), quiet)
    one = CompareConfig(
        sft_checkpoint=str(tmp_path / "sft"), rl_checkpoint=str(tmp_path / "run"), env=("driving",), episodes=2
    )
    assert compare_policies(one)["env"] == ["driving"]  # without the toy's own arguments
    last = json.loads((tmp_path / "run" / "eval_metrics.json").read_text())[-1]
    assert last["ade"] == pytest.approx((last["toy/ade"] + last["driving/ade"]) / 2)
    assert {"toy/success_rate", "driving/collision_rate"} <= last.keys()


def test_the_curriculum_rises_to_the_difficulty(sft, tmp_path, toy, quiet):
    """A level begins when enough of the last 100 episodes succeeded; here all levels are passed at once."""
    levels = {"curriculum": True, "curriculum_success": 0.0, "difficulty": "hard"}
    train_ppo(config(sft, tmp_path, toy, **levels, num_envs=32, num_iterations=3), quiet)
    lines = json.loads((tmp_path / "train_metrics.json").read_text())
    assert [line["level"] for line in lines] == ["easy", "medium", "hard"]
    with pytest.raises(InputError, match="give --difficulty medium or hard"):
        train_ppo(config(sft, tmp_path / "b", toy, curriculum=True, difficulty="easy"), quiet)


def test_safety_never_deploys_what_is_worse_than_supervised(sft, tmp_path, toy, quiet):
    """A wild learning rate makes updates that are worse; they are taken back, and what is deployed never is."""
    wild = {"lr": 0.3, "num_iterations": 8, "safety": True, "safety_episodes": 16, "num_envs": 16}
    train_ppo(config(sft, tmp_path, toy, **wild, rollout_steps=16), quiet)
    lines = json.loads((tmp_path / "train_metrics.json").read_text())
    baseline = HeldOut(["toy"], "medium", 16, SAFETY_SEED, toy).evaluate(PPOPolicy(load_sft(sft)[0]))["ade"]
    assert all(line["safety/ade"] <= baseline * (1 + 1e-6) for line in lines)
    rejected = [line for line in lines if line["rolled_back"]]
    assert rejected
    assert all(line["safety/candidate_ade"] > baseline for line in rejected)
    final = HeldOut(["toy"], "medium", 16, SAFETY_SEED, toy).evaluate(load_ppo(tmp_path)[0])["ade"]
    assert final == pytest.approx(lines[-1]["safety/ade"], rel=1e-5)
    assert (tmp_path / "plots" / "safety.png").exists()


@pytest.mark.parametrize("which", ["the safety check", "an evaluation", "the last evaluation"])
def test_a_signal_ends_what_is_played_within_a_step_and_the_resumed_run_is_the_same(
    sft, tmp_path, toy, quiet, monkeypatch, which
):
    """The toy's episodes have four decisions here: evaluations are stopped at their second step of eight."""
    settings = {"safety": which == "the safety check", "safety_episodes": 16, "eval_interval": 2, "num_iterations": 3}
    toy = {**toy, "horizon": 4}
    train_ppo(config(sft, tmp_path / "whole", toy, **settings), quiet)
    steps, at_iteration = [], {"the safety check": 1, "an evaluation": 2, "the last evaluation": 3}[which]

    class Signalling(WaypointTrainer):
        def __init__(self, *given):
            super().__init__(*given)
            played = self.safety.held_out if self.safety is not None else self.held_out
            env = played.envs["toy"]
            step = env.step

            def signalling(actions):
                # The safety check plays in an update, which the algorithm has counted by then.
                if self.algorithm.version == at_iteration and self.run.log is not None:
                    steps.append(len(steps))
                    if len(steps) == 2:
                        os.kill(os.getpid(), signal.SIGTERM)
                return step(actions)

            env.step = signalling

    monkeypatch.setattr("deft.training.waypoints.ppo.WaypointTrainer", Signalling)
    with pytest.raises(SystemExit):
        train_ppo(config(sft, tmp_path / "half", toy, **settings), quiet)
    assert len(steps) == 2
    monkeypatch.setattr("deft.training.waypoints.ppo.WaypointTrainer", WaypointTrainer)
    train_ppo(config(sft, tmp_path / "half", toy, **settings, resume=True), quiet)
    one, other = (load_ppo(tmp_path / name)[0].state_dict() for name in ("whole", "half"))
    for name in one:
        assert torch.equal(one[name], other[name]), name
    for file in ("train_metrics.json", "eval_metrics.json"):
        first, second = (json.loads((tmp_path / name / file).read_text()) for name in ("whole", "half"))
        for line in (*first, *second):  # means over the episodes that had been written by then
            line.pop("mean_reward")
            line.pop("success_rate")
        assert first == second


def test_the_comparison_drives_both_policies(sft, tmp_path, toy, quiet):
    train_ppo(config(sft, tmp_path, toy, num_iterations=1), quiet)
    results = compare_policies(
        CompareConfig(sft_checkpoint=str(sft), rl_checkpoint=str(tmp_path / "final.pt"), episodes=12, device="cpu")
    )
    held_out = HeldOut(["toy"], "medium", 12, 1_000_000, toy)
    for label, policy in (("supervised", PPOPolicy(load_sft(sft)[0])), ("with PPO", load_ppo(tmp_path)[0])):
        assert results[label]["ade"] == pytest.approx(held_out.evaluate(policy)["ade"], rel=1e-5)
    assert results["supervised"]["ade"] != results["with PPO"]["ade"]
    written = json.loads((tmp_path / "comparison.json").read_text())
    assert written["with PPO"]["episodes"] == 12
    assert results["plots"] == [str(tmp_path / "plots" / "comparison_toy.png")]


def test_a_wrong_checkpoint_is_one_line(recording, sft, tmp_path, toy, quiet):
    train_ppo(config(sft, tmp_path / "run", toy, num_iterations=1), quiet)
    final = tmp_path / "run" / "final.pt"
    cases = {
        tmp_path / "nothing.pt": "does not exist; `deft train waypoint-sft` makes one",
        recording: "damaged, cut short, or not a file written by torch.save",
        final: "is a PPO waypoint policy, not a supervised waypoint policy",
    }
    for path, message in cases.items():
        with pytest.raises(InputError, match=message):
            train_ppo(config(path, tmp_path / "other", toy), quiet)
    with pytest.raises(InputError, match="is a supervised waypoint policy, not a PPO waypoint policy"):
        compare_policies(CompareConfig(sft_checkpoint=str(sft), rl_checkpoint=str(sft / "model.pt")))
    with pytest.raises(InputError, match=r"made for images of 16 px.*toy has images of 32 px"):
        train_ppo(config(sft, tmp_path / "other", {**toy, "camera_size": 32}), quiet)


def test_the_comparison_refuses_policies_that_do_not_belong_together(recording, sft, tmp_path, toy, quiet):
    from deft.config.waypoint_settings import WaypointSFTConfig
    from deft.training.waypoints.sft import train_sft

    train_ppo(config(sft, tmp_path / "run", toy, num_iterations=1), quiet)
    train_sft(WaypointSFTConfig(dataset=str(recording), out_dir=str(tmp_path / "sft"), num_epochs=1, seed=5))
    with pytest.raises(InputError, match="another supervised policy's"):
        compare_policies(CompareConfig(sft_checkpoint=str(tmp_path / "sft"), rl_checkpoint=str(tmp_path / "run")))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"env": ("tooy",)}, "'tooy' is no waypoint environment; one of 'toy', 'driving', 'highway', 'carla'"),
        ({"env": ("toy", "toy")}, "give one environment, or several different ones"),
        ({"kl_target": 1.0}, "kl_target needs a kl_coef above 0"),
        ({"env": ("toy", "driving"), "num_envs": 1}, "num_envs 1 is less than one for each"),
        ({"gamma": 1.5}, "gamma: 1.5 is out of range"),
    ],
)
def test_wrong_settings_are_one_line(settings, message):
    with pytest.raises(InputError, match=message):
        PPOConfig(sft_checkpoint="x", **settings)


def test_the_documents_defaults():
    values = PPOConfig(sft_checkpoint="x")
    assert (values.output_dir, values.env, values.iterations) == ("out/rl_delta_ppo_v0", ("toy",), 100)
    assert (values.batch_size, values.learning_rate, values.clip_range) == (64, 3e-4, 0.2)
    assert (values.value_coef, values.entropy_coef, values.gamma, values.gae_lambda) == (0.5, 0.01, 0.99, 0.95)
