import copy
import json
import math
import os
import signal
from pathlib import Path
from typing import Any

import gymnasium
import h5py
import numpy as np
import pytest
import torch
from offline_worlds import first_action, two_step_dataset

from deft.cli import main
from deft.config.loading import resolve
from deft.data.datasets.dataset import box
from deft.errors import InputError, RunError
from deft.runs import checkpoint
from deft.training.offline import OfflineTrainer
from deft.training.offline_run import build_offline_trainer

ENV = "deft-test/TwoStep-v0"
ALGORITHMS = ["iql", "cql", "td3-bc", "rebrac"]
SETTINGS: dict[str, dict[str, Any]] = {
    "iql": {"reward_scaling": "none"},
    "cql": {"cql_samples": 2},
    "td3-bc": {},
    "rebrac": {},
    "dt": {"embed_dim": 8, "n_layer": 1, "context_length": 2},
}
QUIET = {"console_level": "CRITICAL", "tensorboard": False, "progress_bar": False}


@pytest.fixture(autouse=True)
def _two_step_has_an_id():
    gymnasium.register(ENV, entry_point="offline_worlds:TwoStep")
    yield
    del gymnasium.registry[ENV]


def make_trainer(
    folder: Path, algorithm: str = "iql", dataset: Any = None, env: str | None = None, run: Any = None, **trainer: Any
) -> OfflineTrainer:
    """On 400 transitions (of 200 episodes) in batches of 32: an epoch is ⌈400 / 32⌉ = 13 updates."""
    settings = {"batch_size": 32, **SETTINGS[algorithm], **trainer.pop("cfg", {})}
    config = resolve(
        {
            "algorithm": {"name": algorithm, "cfg": settings},
            "env": {"id": env},
            "policy": {"hidden_dim": 16},
            "trainer": {"log_freq": 1, "eval_freq": 0, "save_freq": 0, "num_epochs": 3, **trainer},
            "logging": QUIET,
            "output_dir": str(folder),
            "device": "cpu",
            "threads": 1,
            **(run or {}),
        }
    )
    return build_offline_trainer(config, dataset or two_step_dataset())


def lines(folder: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """What was logged, without the time."""
    found = [json.loads(line) for line in (folder / "episode_metrics.jsonl").read_text().splitlines()]
    return [{n: v for n, v in line.items() if n != "time"} for line in found if kind in (None, line["type"])]


def numbers(value: Any, name: str = "") -> dict[str, torch.Tensor]:
    """Every tensor of a nested state, by its path."""
    if isinstance(value, dict):
        return {k: v for part, nested in value.items() for k, v in numbers(nested, f"{name}.{part}").items()}
    return {name: torch.as_tensor(value)} if isinstance(value, torch.Tensor | int | float) else {}


def everything(trainer: OfflineTrainer) -> dict[str, torch.Tensor]:
    return numbers(
        {
            "policy": dict(trainer.policy.state_dict()),
            "algorithm": trainer.algorithm.state_dict(),
            "sampler": trainer.sampler.state_dict(),
        }
    )


def assert_equal(first: OfflineTrainer, second: OfflineTrainer) -> None:
    one, other = everything(first), everything(second)
    assert one.keys() == other.keys()
    assert any("critics" in name for name in one)
    assert any("exp_avg" in name for name in one)
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


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


# -- evaluation and checkpoints ----------------------------------------------------------------------------------------


def scripted(trainer: OfflineTrainer, returns: list[float]) -> None:
    """The evaluations' results, in place of episodes."""
    results = iter(returns)
    trainer.evaluator.evaluate = lambda policies, episodes, watch: [  # type: ignore[method-assign, union-attr]
        {"episodes": episodes, "mean_reward": next(results), "std_reward": 0.0, "action_selection": "mode"}
        for _ in policies
    ]


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


class Late:
    """An evaluator beside the training whose results come when they are waited for."""

    in_background = True

    def __init__(self, returns: list[float]) -> None:
        self.returns, self._waiting = iter(returns), []

    def start(self, step: int, policies: Any, episodes: int, watch: Any) -> list[Any]:
        result = {"episodes": episodes, "mean_reward": next(self.returns), "std_reward": 0.0}
        result["action_selection"] = "mode"
        self._waiting.append((step, [result]))
        return []

    @property
    def pending(self) -> list[int]:
        return [step for step, _ in self._waiting]

    def finished(self, wait: bool, stop: Any) -> list[Any]:
        done, self._waiting = (self._waiting, []) if wait else ([], self._waiting)
        return done

    def close(self) -> None:
        pass


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


def test_a_run_that_diverges_ends_with_one_line(tmp_path, caplog):
    trainer = make_trainer(tmp_path, cfg={"learning_rate": 1e30})
    with pytest.raises(RunError, match="the gradient is no longer finite, so the update was not applied"):
        trainer.train()
    assert not [record.message for record in caplog.records if record.levelname == "ERROR"]
    assert not any("nan" in record.message for record in caplog.records)  # no advice on its range besides
    (saved,) = checkpoint.list_checkpoints(tmp_path)  # the weights before the update that was not applied
    assert all(bool(weight.isfinite().all()) for weight in checkpoint.load_part(saved, checkpoint.MODEL).values())


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
