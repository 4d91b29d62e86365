"""Offline runs that are stopped and resumed, or that start from the weights of another run."""

import copy
import os
import signal
from typing import Any

import pytest
import torch
from offline_runs import (
    ALGORITHMS,
    ENV,
    Late,
    assert_equal,
    everything,
    lines,
    make_trainer,
    scripted,
    two_step_env,  # noqa: F401 (a fixture that every test uses)
)
from offline_worlds import two_step_dataset

from deft.data.datasets.dataset import box
from deft.errors import InputError
from deft.runs import checkpoint
from deft.training.offline import OfflineTrainer


def interrupt(trainer: OfflineTrainer, at: int, action: Any) -> None:
    """Do something when the trainer draws its `at`-th batch."""
    sample, calls = trainer.sampler.sample, 0

    def interrupted(batch_size: int) -> Any:
        nonlocal calls
        calls += 1
        if calls == at:
            action()
        return sample(batch_size)

    trainer.sampler.sample = interrupted  # type: ignore[method-assign]


# -- resume ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_signal_saves_in_the_middle_of_an_epoch_and_the_resumed_run_is_the_same(tmp_path, algorithm):
    options = {"algorithm": algorithm, "env": ENV, "eval_freq": 1, "eval_episodes": 2}
    whole = make_trainer(tmp_path / "whole", **options)
    whole.train()
    assert whole.num_updates == 39

    half = make_trainer(tmp_path / "half", **options)
    interrupt(half, 18, lambda: os.kill(os.getpid(), signal.SIGTERM))  # the fifth update of the second epoch
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as stopped:
        half.train()
    assert stopped.value.code == 143
    assert signal.getsignal(signal.SIGTERM) is handler
    assert half.num_updates == 18
    assert (tmp_path / "half" / "checkpoint-18").is_dir()
    half.close()

    torch.manual_seed(99)  # whatever this process has drawn before must not matter
    resumed = make_trainer(tmp_path / "half", **options, run={"auto_resume": True, "seed": 0})
    assert resumed.num_updates == 18
    resumed.train()
    assert_equal(whole, resumed)
    assert lines(tmp_path / "whole") == lines(tmp_path / "half")
    assert whole.best_reward == resumed.best_reward
    for trainer in (whole, resumed):
        trainer.close()


@pytest.mark.parametrize("num_epochs", [2, 1], ids=["in a periodic evaluation", "in the last evaluation"])
def test_a_signal_ends_an_evaluation_within_a_step_and_nothing_is_lost(tmp_path, num_epochs):
    """13 updates an epoch. The signal comes in the third of the eight steps that four episodes have."""
    settings = {"env": ENV, "num_epochs": num_epochs, "eval_freq": 1, "eval_episodes": 4}
    whole = make_trainer(tmp_path / "whole", **settings)
    whole.train(evaluates_last=True)
    stopped = make_trainer(tmp_path / "stopped", **settings)
    env, steps = stopped.evaluator.env(), 0
    step = env.step

    def signalling(actions):
        nonlocal steps
        steps += 1
        if steps == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(actions)

    env.step = signalling  # type: ignore[method-assign]
    with pytest.raises(SystemExit) as ended:
        stopped.train(evaluates_last=True)
    assert (ended.value.code, steps) == (143, 1)
    assert [path.name for path in (tmp_path / "stopped").glob("checkpoint-*")] == ["checkpoint-13"]
    assert not lines(tmp_path / "stopped", "evaluation")
    resumed = make_trainer(tmp_path / "stopped", **settings, run={"auto_resume": True})
    resumed.train(evaluates_last=True)
    assert_equal(whole, resumed)
    assert lines(tmp_path / "whole") == lines(tmp_path / "stopped")  # the evaluation was made up for
    for trainer in (whole, stopped, resumed):
        trainer.close()


def test_a_failure_saves_what_was_learned_since(tmp_path):
    def fail() -> None:
        raise OSError("the disk is gone")

    trainer = make_trainer(tmp_path)
    interrupt(trainer, 20, fail)
    with pytest.raises(OSError, match="the disk is gone"):
        trainer.train()
    assert [path.name for path in checkpoint.list_checkpoints(tmp_path)] == ["checkpoint-19"]
    resumed = make_trainer(tmp_path, run={"resume": str(tmp_path)})
    resumed.train()
    whole = make_trainer(tmp_path / "whole")
    whole.train()
    assert_equal(whole, resumed)


def test_a_run_is_made_longer(tmp_path):
    make_trainer(tmp_path, num_epochs=1).train()
    longer = make_trainer(tmp_path, num_epochs=2, run={"auto_resume": True})
    assert longer.train()["updates"] == 26
    assert [line["step"] for line in lines(tmp_path, "update")] == list(range(1, 27))


def test_another_dataset_of_the_same_size_is_refused_at_resume(tmp_path):
    make_trainer(tmp_path, num_epochs=1).train()
    other = two_step_dataset()
    other.table.reward.add_(1.0)
    with pytest.raises(InputError, match="trained on another dataset"):
        make_trainer(tmp_path, dataset=other, run={"auto_resume": True})


def test_one_other_value_in_the_middle_of_the_dataset_is_refused_at_resume(tmp_path):
    make_trainer(tmp_path, num_epochs=1).train()
    other = two_step_dataset()
    other.table.reward[301] += 1.0
    with pytest.raises(InputError, match="trained on another dataset"):
        make_trainer(tmp_path, dataset=other, run={"auto_resume": True})


def test_a_resumed_run_takes_the_learning_rate_that_it_is_given(tmp_path):
    constant = {"learning_rate_schedule": "constant"}
    make_trainer(tmp_path, num_epochs=1, cfg=constant).train()
    resumed = make_trainer(tmp_path, num_epochs=2, cfg={**constant, "learning_rate": 0.05}, run={"auto_resume": True})
    for optimizer in (resumed.algorithm.actor_optimizer, resumed.algorithm.critic_optimizer):  # type: ignore[attr-defined]
        assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(0.05)


def test_a_dataset_of_another_size_is_refused_at_resume(tmp_path):
    make_trainer(tmp_path, num_epochs=1).train()
    with pytest.raises(InputError, match=r"\(400 transitions; this one has 20\): .*--model-path") as error:
        make_trainer(tmp_path, dataset=two_step_dataset(10), run={"auto_resume": True})
    assert "\n" not in str(error.value)


def test_another_algorithm_or_another_ensemble_is_refused_at_resume(tmp_path):
    make_trainer(tmp_path, num_epochs=1).train()
    with pytest.raises(InputError, match="a checkpoint of iql, not of td3-bc"):
        make_trainer(tmp_path, "td3-bc", run={"auto_resume": True})
    with pytest.raises(InputError, match=r"does not fit|parameters"):
        make_trainer(tmp_path, cfg={"num_critics": 5}, run={"auto_resume": True})


def test_weights_of_another_run_are_a_start_with_their_normalisation(tmp_path):
    first = make_trainer(tmp_path / "first", "td3-bc", num_epochs=1)
    first.train()
    second = make_trainer(
        tmp_path / "second", "td3-bc", dataset=two_step_dataset(10), run={"model_path": str(tmp_path / "first")}
    )
    assert second.num_updates == 0
    for name, value in second.policy.state_dict().items():
        assert torch.equal(value, first.policy.state_dict()[name]), name
    second.train()


def test_going_on_from_an_earlier_checkpoint_replaces_the_later_ones(tmp_path):
    """With another step size what comes after is another run: its checkpoints must be its own."""
    make_trainer(tmp_path, save_freq=1, num_epochs=2).train()
    later = tmp_path / "checkpoint-26" / checkpoint.MODEL
    before = torch.load(later, weights_only=True)
    branch = make_trainer(
        tmp_path,
        save_freq=1,
        num_epochs=2,
        cfg={"learning_rate": 0.01, "learning_rate_schedule": "constant"},
        run={"resume": str(tmp_path / "checkpoint-13")},
    )
    branch.train()
    after = torch.load(later, weights_only=True)
    assert not all(torch.equal(before[name], after[name]) for name in before)
    assert all(torch.equal(after[name], value) for name, value in branch.policy.state_dict().items())


def test_a_resumed_run_knows_the_best_that_came_back_late(tmp_path):
    trainer = make_trainer(tmp_path, num_epochs=2, eval_freq=1)
    trainer.evaluator = Late([0.2, 0.9])  # type: ignore[assignment]
    trainer.train()
    resumed = make_trainer(tmp_path, num_epochs=3, eval_freq=1, run={"auto_resume": True})
    assert resumed.best_reward == 0.9
    resumed.evaluator = Late([0.5])  # type: ignore[assignment]
    resumed.train()
    assert (tmp_path / "best").resolve().name == "checkpoint-26"


def test_a_finished_run_that_is_resumed_is_not_evaluated_again(tmp_path):
    trainer = make_trainer(tmp_path, env=ENV, num_epochs=3, eval_freq=2)
    trainer.train(evaluates_last=True)
    trainer.close()
    before = lines(tmp_path)
    resumed = make_trainer(tmp_path, env=ENV, num_epochs=3, eval_freq=2, run={"auto_resume": True})
    resumed.train(evaluates_last=True)
    assert lines(tmp_path) == before
    assert resumed.last_evaluation == trainer.last_evaluation != {}
    resumed.close()
    # But where it is asked for otherwise, or elsewhere, it is.
    again = make_trainer(tmp_path, env=ENV, num_epochs=3, eval_freq=2, eval_episodes=3, run={"auto_resume": True})
    again.train(evaluates_last=True)
    assert again.last_evaluation["episodes"] == 3
    again.close()
    moved = make_trainer(tmp_path / "b", env=ENV, num_epochs=3, eval_freq=2, run={"resume": str(tmp_path)})
    summary = moved.train(evaluates_last=True)
    assert summary["best_reward"] == moved.last_evaluation["mean_reward"] == trainer.last_evaluation["mean_reward"]
    assert (tmp_path / "b" / "config.yaml").exists()
    moved.close()


def test_a_run_resumed_in_another_folder_has_a_best_of_its_own(tmp_path):
    first = make_trainer(tmp_path / "a", env=ENV, num_epochs=2, eval_freq=1)
    scripted(first, [0.9, 0.8])
    first.train()
    first.close()
    second = make_trainer(tmp_path / "b", env=ENV, num_epochs=3, eval_freq=1, run={"resume": str(tmp_path / "a")})
    scripted(second, [0.5])
    assert second.train()["best_reward"] == 0.5
    assert (tmp_path / "b" / "best").resolve() == (tmp_path / "b" / "checkpoint-39").resolve()
    second.close()


# -- the weights of another run ----------------------------------------------------------------------------------------


def wide_dataset(factor: float) -> Any:
    """Without an environment, so that the Box is that of the recorded actions."""
    dataset = two_step_dataset()
    dataset.table.action.mul_(factor)  # type: ignore[union-attr]
    dataset.action_space = box(1, -factor, factor)
    return dataset


@pytest.mark.parametrize("algorithm", ["td3-bc", "dt"])
def test_weights_keep_their_range_and_are_not_trained_far_outside_it(tmp_path, algorithm, caplog):
    make_trainer(tmp_path / "a", algorithm, num_epochs=1).train()
    start = {"model_path": str(tmp_path / "a")}
    for factor in (0.5, 1.2):  # another recording of the same robot
        caplog.clear()
        trainer = make_trainer(tmp_path / "b", algorithm, wide_dataset(factor), run=start)
        assert trainer.policy.bounds == (-1.0, 1.0)  # type: ignore[comparison-overlap]
        assert f"between -1 and 1 in action dim 0, where actions here go from -{factor} to {factor}" in caplog.text
    with pytest.raises(InputError, match="go from -2 to 2: it was trained on another scale"):
        make_trainer(tmp_path / "c", algorithm, wide_dataset(2.0), run=start)
    # One that is resumed in an environment keeps its range too: there it is evaluated, and clipped.
    make_trainer(tmp_path / "d", algorithm, wide_dataset(2.0), num_epochs=1).train()
    resumed = make_trainer(tmp_path / "d", algorithm, wide_dataset(2.0), env=ENV, run={"resume": str(tmp_path / "d")})
    assert resumed.policy.bounds == (-2.0, 2.0)  # type: ignore[comparison-overlap]
    resumed.close()


def test_weights_that_are_refused_change_nothing(tmp_path):
    make_trainer(tmp_path / "a", num_epochs=1, cfg={"reward_scaling": "return_range"}).train()
    trainer = make_trainer(tmp_path / "b")
    before = copy.deepcopy(everything(trainer))
    with pytest.raises(InputError, match="reward_scaling"):
        trainer.load(tmp_path / "a")
    assert all(torch.equal(value, before[name]) for name, value in everything(trainer).items())


def test_the_scale_of_rewards_is_that_of_the_critics_and_cannot_change_in_a_run(tmp_path):
    # The episodes return 0 or 1, so that IQL multiplies by 1000 / (1 − 0).
    first = make_trainer(tmp_path / "a", num_epochs=1, cfg={"reward_scaling": "return_range"})
    first.train()
    assert float(first.policy.reward_scale) == 1000.0
    start = {"model_path": str(tmp_path / "a")}
    for name, algorithm, cfg in (("b", "td3-bc", {}), ("c", "iql", {"reward_scaling": "none"})):
        assert float(make_trainer(tmp_path / name, algorithm, cfg=cfg, run=start).policy.reward_scale) == 1.0
    with pytest.raises(InputError, match=r"reward_scaling: this run's rewards were multiplied by 1000.* by 1 now"):
        make_trainer(tmp_path / "a", cfg={"reward_scaling": "none"}, run={"resume": str(tmp_path / "a")})
    resumed = make_trainer(tmp_path / "a", cfg={"reward_scaling": "return_range"}, run={"resume": str(tmp_path / "a")})
    assert float(resumed.policy.reward_scale) == 1000.0


@pytest.mark.parametrize("way", ["model_path", "resume"])
def test_a_transformer_keeps_its_heads(tmp_path, way):
    make_trainer(tmp_path / "a", "dt", num_epochs=1, cfg={"n_head": 2}).train()
    with pytest.raises(InputError, match=r"n_head: 1, and the weights of .* were trained with 2; give --n_head 2"):
        make_trainer(tmp_path / "b", "dt", cfg={"n_head": 1}, run={way: str(tmp_path / "a")})
    make_trainer(tmp_path / "b", "dt", cfg={"n_head": 2}, run={way: str(tmp_path / "a")})
