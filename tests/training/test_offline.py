"""Offline runs: evaluations and checkpoints, the length of an epoch, what goes wrong, and the command."""

import json
import math
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from offline_runs import (
    ALGORITHMS,
    ENV,
    Late,
    assert_equal,
    lines,
    make_trainer,
    numbers,
    scripted,
    two_step_env,  # noqa: F401 (a fixture that every test uses)
)
from offline_worlds import first_action, two_step_dataset

from deft.cli import main
from deft.errors import InputError, RunError
from deft.runs import checkpoint

# -- evaluation and checkpoints ----------------------------------------------------------------------------------------


def test_a_run_is_saved_before_it_is_evaluated(tmp_path):
    trainer = make_trainer(tmp_path, env=ENV, num_epochs=2, eval_freq=1)

    def fail(*_: Any) -> Any:
        raise RunError("the gripper fell off")

    trainer.evaluator.evaluate = fail  # type: ignore[method-assign, union-attr]
    trainer.run._save_after_failure = lambda error: None  # type: ignore[method-assign]
    with pytest.raises(RunError, match="gripper"):
        trainer.train()
    assert (tmp_path / "checkpoint-13" / "model.pt").exists()
    trainer.close()


def test_an_environment_that_is_not_the_datasets_own_gives_no_score(tmp_path):
    dataset = two_step_dataset()
    dataset.env_id, dataset.reference_returns = ENV, (0.0, 1.0)
    own = make_trainer(tmp_path / "own", dataset=dataset)
    assert "normalized_score" in own.evaluate(1)
    changed = make_trainer(tmp_path / "changed", dataset=dataset, run={"env": {"id": ENV, "kwargs": {"broken": False}}})
    assert "normalized_score" not in changed.evaluate(1)
    with pytest.raises(InputError, match="num_episodes: 0"):
        own.evaluate(0)
    own.close()
    changed.close()


def test_the_best_and_the_last_are_kept(tmp_path):
    trainer = make_trainer(tmp_path, env=ENV, num_epochs=6, eval_freq=1, save_freq=1, keep_checkpoints=2)
    scripted(trainer, [0.2, 0.9, 0.5, 0.6, 0.9, 0.1])
    summary = trainer.train()
    # The second and the fifth evaluation are the best: the later one counts. Of the rest the last two are kept.
    assert (tmp_path / "best").resolve() == (tmp_path / "checkpoint-65").resolve()
    kept = [path.name for path in checkpoint.list_checkpoints(tmp_path)]
    assert kept == ["checkpoint-65", "checkpoint-78"]
    assert summary["best_reward"] == 0.9
    # The dataset's reference returns are 0 and 1: the score is a hundred times the return.
    assert summary["best_normalized_score"] == pytest.approx(90.0)
    evaluations = lines(tmp_path, "evaluation")
    assert [line["step"] for line in evaluations] == [13, 26, 39, 52, 65, 78]
    assert [line["normalized_score"] for line in evaluations] == pytest.approx([20, 90, 50, 60, 90, 10])
    trainer.close()


@pytest.mark.parametrize(("eval_freq", "steps"), [(2, [26, 39]), (3, [39])])
def test_the_end_can_be_the_best(tmp_path, eval_freq, steps):
    trainer = make_trainer(tmp_path, env=ENV, num_epochs=3, eval_freq=eval_freq)
    scripted(trainer, [0.2, 0.9][-len(steps) :])
    trainer.train(evaluates_last=True)
    # Between two periodic evaluations too, and no second one where a periodic one falls on the last update.
    assert [line["step"] for line in lines(tmp_path, "evaluation")] == steps
    assert (tmp_path / "best").resolve().name == "checkpoint-39"
    assert trainer.last_evaluation["normalized_score"] == pytest.approx(90.0)
    trainer.close()


def test_the_end_can_be_the_best_where_evaluations_run_beside(tmp_path):
    trainer = make_trainer(tmp_path, env=ENV, num_epochs=3, eval_freq=2)
    trainer.evaluator = Late([0.2, 0.9])  # type: ignore[assignment]
    assert trainer.train(evaluates_last=True)["best_reward"] == 0.9
    assert (tmp_path / "best").resolve().name == "checkpoint-39"
    assert trainer.last_evaluation["mean_reward"] == 0.9
    trainer.close()


def test_evaluation_comes_every_so_many_epochs_and_does_not_change_what_is_learned(tmp_path):
    evaluated = make_trainer(tmp_path / "a", "cql", env=ENV, num_epochs=5, eval_freq=2, eval_episodes=3)
    evaluated.train()
    assert [line["step"] for line in lines(tmp_path / "a", "evaluation")] == [26, 52]
    plain = make_trainer(tmp_path / "b", "cql", num_epochs=5)
    plain.train()
    assert_equal(evaluated, plain)
    results = evaluated.evaluate(4)
    assert results["episodes"] == 4
    expected = float(first_action(evaluated.policy) > 0)  # type: ignore[arg-type]
    assert results["mean_reward"] == expected
    assert results["normalized_score"] == 100 * expected
    evaluated.close()


@pytest.mark.parametrize(("returns", "best"), [([0.9, 0.2, 0.3], 26), ([0.2, 0.9, 0.3], 52)])
def test_the_best_is_kept_also_where_its_evaluation_comes_back_late(tmp_path, returns, best):
    trainer = make_trainer(tmp_path, num_epochs=6, eval_freq=2, save_freq=1, keep_checkpoints=1)
    trainer.evaluator = Late(returns)  # type: ignore[assignment]
    assert trainer.train()["best_reward"] == 0.9
    assert [line["step"] for line in lines(tmp_path, "evaluation")] == [26, 52, 78]
    # Later checkpoints are saved before an evaluation is back, and all evaluations come back at once: what may be the
    # best must not have been pruned meanwhile.
    assert (tmp_path / "best").resolve().name == f"checkpoint-{best}"
    assert (tmp_path / "best").exists()
    assert [path.name for path in checkpoint.list_checkpoints(tmp_path)] == [f"checkpoint-{best}", "checkpoint-78"]


def test_a_run_that_diverges_ends_with_one_line(tmp_path, caplog):
    trainer = make_trainer(tmp_path, cfg={"learning_rate": 1e30})
    with pytest.raises(RunError, match="the gradient is no longer finite, so the update was not applied"):
        trainer.train()
    assert not [record.message for record in caplog.records if record.levelname == "ERROR"]
    assert not any("nan" in record.message for record in caplog.records)  # no advice on its range besides
    (saved,) = checkpoint.list_checkpoints(tmp_path)  # the weights before the update that was not applied
    assert all(bool(weight.isfinite().all()) for weight in checkpoint.load_part(saved, checkpoint.MODEL).values())


def test_several_seeds_are_evaluated_each(tmp_path):
    trainer = make_trainer(tmp_path, env=ENV, num_seeds=3, num_epochs=1, eval_freq=1, eval_episodes=2)
    trainer.train()
    expected = [float(first_action(trainer.policy.member(index)) > 0) for index in range(3)]  # type: ignore[operator]
    (line,) = lines(tmp_path, "evaluation")
    assert line["mean_rewards"] == expected
    assert line["mean_reward"] == pytest.approx(sum(expected) / 3)
    assert line["normalized_scores"] == [100 * value for value in expected]
    assert line["std_reward"] == pytest.approx(float(np.std(expected)))
    trainer.close()


def test_a_run_without_an_environment_trains_and_says_what_evaluate_needs(tmp_path):
    trainer = make_trainer(tmp_path, eval_freq=1)
    summary = trainer.train()
    assert summary["updates"] == 39
    assert summary["best_reward"] is None
    with pytest.raises(InputError, match="--env"):
        trainer.evaluate()
    assert not (tmp_path / "best").exists()


def test_a_dataset_whose_environment_is_not_installed_trains_without_it(tmp_path, caplog):
    dataset = two_step_dataset()
    dataset.env_id = "AdroitHandDoor-v99"
    trainer = make_trainer(tmp_path, dataset=dataset, eval_freq=1)
    assert trainer.evaluator is None
    assert any("AdroitHandDoor-v99" in message and "no evaluation" in message for message in caplog.messages)
    assert trainer.train()["updates"] == 39
    with pytest.raises(InputError, match="AdroitHandDoor-v99"):  # asked for, it must be there
        make_trainer(tmp_path / "asked", dataset=dataset, env="AdroitHandDoor-v99")


@pytest.mark.parametrize(("scale", "share"), [(1.0, None), (3.0, "50 %")])
def test_actions_that_the_environment_does_not_have_cause_a_warning(tmp_path, caplog, scale, share):
    dataset = two_step_dataset()
    assert dataset.table is not None
    # The first of an episode's two actions at `scale`, the other at 0; the environment's end at ±1.
    actions = dataset.table.action.view(200, 3)
    actions[:, 0], actions[:, 1] = scale, 0.0
    make_trainer(tmp_path, dataset=dataset, env=ENV).close()
    warnings = [message for message in caplog.messages if "outside those of env" in message]
    assert warnings == [] if share is None else [message.startswith(share) for message in warnings] == [True]


def test_an_environment_that_does_not_fit_or_is_not_there_is_told_before_training(tmp_path):
    with pytest.raises(InputError, match=r"env CartPole-v1: the environment's observations"):
        make_trainer(tmp_path, env="CartPole-v1")
    with pytest.raises(InputError, match="deft-test/Twostep"):
        make_trainer(tmp_path, env="deft-test/Twostep-v0")
    assert not list(tmp_path.iterdir())


# -- how long an epoch is ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("batch_size", "updates"), [(32, 13), (40, 10), (399, 2), (400, 1), (10_000, 1)])
def test_an_epoch_is_the_dataset_once_in_number_and_never_nothing(tmp_path, batch_size, updates):
    trainer = make_trainer(tmp_path, num_epochs=2, cfg={"batch_size": batch_size})
    before = [parameter.detach().clone() for parameter in trainer.policy.parameters()]
    assert trainer.updates_per_epoch == updates == math.ceil(400 / batch_size)
    assert trainer.train()["updates"] == 2 * updates
    assert trainer.epoch == 2
    assert any(not torch.equal(a, b) for a, b in zip(before, trainer.policy.parameters(), strict=True))
    assert [line["epoch"] for line in lines(tmp_path, "update")][-1] == 2.0


def test_intervals_are_counted_in_epochs_of_the_given_length(tmp_path):
    trainer = make_trainer(tmp_path, updates_per_epoch=7, num_epochs=5, save_freq=2, log_freq=10)
    trainer.train()
    assert [path.name for path in checkpoint.list_checkpoints(tmp_path)] == [
        "checkpoint-14",
        "checkpoint-28",
        "checkpoint-35",
    ]
    assert [line["step"] for line in lines(tmp_path, "update")] == [10, 20, 30, 35]  # every 10, and the last


# -- what goes wrong ---------------------------------------------------------------------------------------------------


def assert_all_saved_is_finite(folder: Path) -> None:
    for path in checkpoint.list_checkpoints(folder):
        for part in (checkpoint.MODEL, checkpoint.TRAINING_STATE):
            for name, value in numbers(checkpoint.load_part(path, part)).items():
                assert name == ".best_reward" or bool(torch.isfinite(value).all()), f"{path.name}/{part}{name}"


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_rewards_that_are_not_numbers_end_the_run_and_nothing_of_them_is_saved(tmp_path, algorithm):
    dataset = two_step_dataset()
    dataset.table.reward[1::3] = math.nan
    trainer = make_trainer(tmp_path, algorithm, dataset=dataset, save_freq=1, updates_per_epoch=1)
    with pytest.raises(RunError, match="finite") as error:
        trainer.train()
    assert "\n" not in str(error.value)
    assert_all_saved_is_finite(tmp_path)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_huge_learning_rate_is_told_and_nothing_of_it_is_saved(tmp_path, algorithm):
    settings = {"learning_rate": 1e30, **({"policy_learning_rate": 1e30} if algorithm == "cql" else {})}
    trainer = make_trainer(tmp_path, algorithm, cfg=settings)
    with pytest.raises(RunError, match="learning_rate"):
        trainer.train()
    assert_all_saved_is_finite(tmp_path)
    assert trainer.num_updates < 39  # raised when it is logged, not after all epochs


def test_values_outside_their_range_are_told_once_with_advice(tmp_path, caplog):
    # Rewards of 0 and 1000 in batches of 32: every q_loss is far above 1.
    trainer = make_trainer(tmp_path, cfg={"reward_scaling": "return_range"})
    trainer.train()
    assert min(line["q_loss"] for line in lines(tmp_path, "update")) > 1
    warnings = [record.message for record in caplog.records if record.message.startswith("q_loss is")]
    assert len(warnings) == 1
    assert "outside 0.01 to 1" in warnings[0]
    assert "cql_alpha" in warnings[0]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_without_a_dataset_nothing_is_trained(tmp_path, algorithm, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["train", algorithm, "--num-epochs", "1"]) == 2
    captured = capsys.readouterr()
    assert captured.err == "deft: dataset: missing; give a name (hopper-medium-v2) or a path with --dataset\n"
    assert captured.out == f"starting {algorithm} in a new directory in outputs\n"
    assert not list(tmp_path.iterdir())
    assert main(["train", algorithm, "--dataset", "no-such-dataset-v0", "--num-epochs", "1"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert not list(tmp_path.iterdir())


# -- the command -------------------------------------------------------------------------------------------------------


def write_d4rl(path: Path, **changes: Any) -> Path:
    """The two-step dataset as D4RL lays files out."""
    dataset = two_step_dataset()
    episodes = [dataset.episode(index) for index in range(dataset.num_episodes)]
    columns = {
        "observations": np.concatenate([episode.observation[:-1] for episode in episodes]),
        "next_observations": np.concatenate([episode.observation[1:] for episode in episodes]),
        "actions": np.concatenate([episode.action for episode in episodes]),
        "rewards": np.concatenate([episode.reward for episode in episodes]),
        "terminals": np.concatenate([episode.terminated for episode in episodes]),
        "timeouts": np.zeros(len(dataset), bool),
        **changes,
    }
    with h5py.File(path, "w") as file:
        for name, values in columns.items():
            file[name] = values
    return path


COMMAND = ["--hidden-dim", "16", "--batch-size", "32", "--threads", "1", "--device", "cpu", "--console-level", "ERROR"]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_command_trains_on_a_d4rl_file(tmp_path, algorithm, capsys):
    path = write_d4rl(tmp_path / "hopper-medium-v2.hdf5")
    arguments = ["train", algorithm, "--dataset", str(path), "--env", ENV, *COMMAND, "--json"]
    arguments += ["--num_epochs", "2", "--eval_freq", "1", "--eval_episodes", "2"]
    arguments += ["--output_dir", str(tmp_path / "run")]
    status = main(arguments)
    captured = capsys.readouterr()
    assert status == 0, captured.err
    summary = json.loads(captured.out.splitlines()[-1])
    assert summary["updates"] == 26
    # hopper's reference returns, by the file's name: 100 · (return + 20.272305) / (3234.3 + 20.272305)
    expected = 100 * (summary["final_mean_reward"] + 20.272305) / (3234.3 + 20.272305)
    assert summary["final_normalized_score"] == pytest.approx(expected)
    assert (tmp_path / "run" / "best").exists()
    assert main(["evaluate", str(tmp_path / "run"), "--episodes", "3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["episodes"] == 3


def test_a_damaged_reward_names_the_file_and_the_field(tmp_path, capsys):
    rewards = np.zeros(400, np.float32)
    rewards[7] = np.nan
    path = write_d4rl(tmp_path / "own.hdf5", rewards=rewards)
    assert main(["train", "iql", "--dataset", str(path), *COMMAND, "--output-dir", str(tmp_path / "run")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "own.hdf5" in line
    assert "reward" in line
    assert not (tmp_path / "run").exists()
