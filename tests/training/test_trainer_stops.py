"""Online runs that end early, by a failure or a signal, and how they are resumed."""

import itertools
import os
import signal
import threading
import time
from functools import partial

import gymnasium
import pytest
import torch
from online_runs import assert_equal, make_trainer, metrics
from worlds import Counting, Failing, Signalling

from deft import Trainer
from deft.config.settings import EnvConfig
from deft.envs.make import make_vector_env
from deft.envs.process import ProcessVectorEnv
from deft.errors import RunError


@pytest.mark.parametrize("mode", ["standard", "vla"])
def test_an_environment_that_fails_ends_the_run_with_a_checkpoint(tmp_path, mode):
    trainer = make_trainer(tmp_path, env=[Failing(at=100)], buffer_type=mode)
    with pytest.raises(RunError, match="the gripper fell off"):
        trainer.train(1000)
    assert list(tmp_path.glob("checkpoint-*"))  # the updates before it are not lost
    assert not [thread for thread in threading.enumerate() if thread.name == "deft-collector"]
    resumed = make_trainer(tmp_path, env=[Counting()], buffer_type=mode)
    resumed.load(tmp_path)
    resumed.train(resumed.global_step + 64)


def test_a_collector_that_dies_ends_the_run(tmp_path):
    trainer = make_trainer(tmp_path, env=[Counting()], buffer_type="vla", buffer_size=100_000)

    def die(buffer, ends_segment):
        raise ConnectionError("the robot is not there")

    trainer.collection.collector.step = die  # type: ignore[method-assign]
    with pytest.raises(ConnectionError):
        trainer.train(1000)


def test_an_environment_that_hangs_ends_the_run(tmp_path):
    trainer = make_trainer(tmp_path, env=[Failing(at=40, how="hang")], buffer_type="vla")
    trainer.collection.timeout = 0.3  # type: ignore[union-attr]
    with pytest.raises(RunError, match="did not answer"):
        trainer.train(1000)
    assert list(tmp_path.glob("checkpoint-32"))


@pytest.mark.parametrize("mode", ["standard", "vla"])
def test_a_worker_that_is_killed_costs_its_episode_alone(tmp_path, mode, monkeypatch):
    env = make_vector_env(EnvConfig(id="CartPole-v1", num_envs=2, vector="process", num_workers=2))
    trainer = make_trainer(tmp_path, env=env, buffer_type=mode)
    step, count = env.step, itertools.count(1)

    def step_and_kill(actions):
        if next(count) == 40:  # in the middle of the second rollout of 32
            os.kill(env.worker_pids[1], signal.SIGKILL)
        return step(actions)

    monkeypatch.setattr(env, "step", step_and_kill)
    try:
        assert trainer.train(256)["timesteps"] == 256
    finally:
        trainer.close()
    lost = [line.get("rollout/lost_episodes") for line in metrics(tmp_path) if line["type"] == "update"]
    assert lost[-1] == 1
    assert lost[0] is None or mode == "vla"  # where collection is ahead of training


def test_an_environment_that_hangs_in_a_worker_is_replaced(tmp_path):
    # It hangs in its 40th step, and the new one would in its own 40th: 64 steps see one of them. The watchdog of VLA
    # mode has the same patience, and must leave it to the vector environment.
    env = ProcessVectorEnv([partial(Failing, at=40, how="hang")], timeout=1.0)
    trainer = make_trainer(tmp_path, env=env, buffer_type="vla", timeout=1.0)
    try:
        assert trainer.train(64)["timesteps"] == 64
    finally:
        trainer.close()
    assert trainer.collection.collector.num_lost_episodes == 1


@pytest.mark.parametrize("mode", [{"buffer_type": "standard"}, {"buffer_type": "vla", "max_staleness": 0}])
@pytest.mark.parametrize(("number", "raised"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_a_signal_stops_between_steps_and_the_resumed_run_is_the_same(tmp_path, mode, number, raised):
    whole = make_trainer(tmp_path / "whole", **mode)
    whole.train(512)

    trainer = make_trainer(tmp_path / "half", **mode)
    step, calls = trainer.env.step, 0

    def interrupted(actions):
        nonlocal calls
        calls += 1
        if calls == 100:  # in the middle of the fourth rollout of 32
            os.kill(os.getpid(), number)
        return step(actions)

    trainer.env.step = interrupted  # type: ignore[method-assign]
    handler = signal.getsignal(number)
    with pytest.raises(raised):
        trainer.train(512)
    assert signal.getsignal(number) is handler  # handlers are put back
    assert 0 < trainer.num_timesteps < 512
    resumed = make_trainer(tmp_path / "half", **mode)
    resumed.load(tmp_path / "half")
    resumed.train(512)
    assert_equal(whole, resumed)


STOP_SIGNALS = [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGUSR1, 138)]


@pytest.fixture
def signal_defaults():
    """Signals as a terminal leaves them: under nohup SIGHUP is ignored, and Deft then ignores it too."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number, _ in STOP_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("signal_defaults")
@pytest.mark.parametrize(("number", "status"), STOP_SIGNALS)
@pytest.mark.parametrize("total", [192, 96], ids=["in a periodic evaluation", "in the last evaluation"])
def test_a_signal_ends_an_evaluation_within_a_step_and_nothing_is_lost(tmp_path, number, status, total):
    def run(folder, eval_env):
        settings = {"env": [Counting(7)], "eval_freq": 96, "eval_episodes": 2, "eval_env": eval_env}
        return make_trainer(tmp_path / folder, **settings)

    whole = run("whole", Counting(50))
    whole.train(total, evaluates_last=True)
    signalling = Signalling(at=20, number=number)
    stopped = run("stopped", signalling)
    with pytest.raises(SystemExit) as ended:
        stopped.train(total, evaluates_last=True)
    assert ended.value.code == status
    assert signalling.life == 20  # of 100 that two episodes have
    assert [path.name for path in (tmp_path / "stopped").glob("checkpoint-*")] == ["checkpoint-96"]
    assert not [line for line in metrics(tmp_path / "stopped") if line["type"] == "evaluation"]
    resumed = run("stopped", Counting(50))
    resumed.load(tmp_path / "stopped")
    resumed.train(total, evaluates_last=True)
    assert_equal(whole, resumed)
    assert metrics(tmp_path / "whole") == metrics(tmp_path / "stopped")  # the evaluation was made up for
    assert (tmp_path / "stopped" / "best").resolve().name == f"checkpoint-{total}"


def stop_in_update(trainer: Trainer, at: int, number: signal.Signals = signal.SIGTERM) -> list[int]:
    """Send a signal before the `at`-th gradient step of the run; the steps that were made all the same are counted."""
    step, made = trainer.algorithm._step, [0]

    def signalling(minibatch):
        made[0] += 1
        if made[0] == at:
            os.kill(os.getpid(), number)
        return step(minibatch)

    trainer.algorithm._step = signalling
    return made


@pytest.mark.parametrize("mode", [{"buffer_type": "standard"}, {"buffer_type": "vla", "max_staleness": 0}])
@pytest.mark.parametrize("policy", [{}, {"memory_hidden": 8}], ids=["feed-forward", "recurrent"])
@pytest.mark.parametrize("at", [18, 17, 24])
def test_a_signal_stops_between_minibatches_and_the_resumed_run_is_the_same(tmp_path, mode, policy, at):
    """8 gradient steps an update: 64 transitions in minibatches of 16, two epochs. The third update has 17 to 24."""
    algorithm = {"target_kl": 10.0, "batch_size": 16}
    settings = {"policy": policy, "algorithm": algorithm, "save_freq": 64, "eval_freq": 128, **mode}
    settings["eval_env"] = gymnasium.make("CartPole-v1")
    whole = make_trainer(tmp_path / "whole", **settings)
    whole.train(300)  # the last rollout is a short one
    stopped = make_trainer(tmp_path / "half", **settings)
    made = stop_in_update(stopped, at)
    with pytest.raises(SystemExit):
        stopped.train(300)
    assert made == [at]
    assert stopped.num_timesteps == (128 if at < 24 else 192)  # after the last minibatch there is nothing left to do
    best = (tmp_path / "half" / "best").resolve().name
    assert best == "checkpoint-128"  # what was evaluated, not the weights in the midst of the next update
    assert (tmp_path / "half" / "checkpoint-192").exists()
    resumed = make_trainer(tmp_path / "half", **settings)
    resumed.load(tmp_path / "half")
    assert resumed.num_timesteps == stopped.num_timesteps
    resumed.train(300)
    assert_equal(whole, resumed)
    # Episodes that ended before the stop are written at the step of then, not at that of the update they belong to.
    one, other = (
        [{**line, "step": 0} if line["type"] == "episode" else line for line in metrics(tmp_path / folder)]
        for folder in ("whole", "half")
    )
    assert sorted(one, key=str) == sorted(other, key=str)


def stop_in_call(owner, name: str, at: int) -> list[int]:
    """Send a signal in the `at`-th call of a method; counts the calls."""
    method, made = getattr(owner, name), [0]

    def signalling(*given):
        made[0] += 1
        if made[0] == at:
            os.kill(os.getpid(), signal.SIGTERM)
        return method(*given)

    setattr(owner, name, signalling)
    return made


def test_a_signal_stops_between_the_parts_of_a_minibatch(tmp_path):
    """64 transitions in minibatches of 16, each in four parts, two epochs: 32 passes an update."""
    settings = {"algorithm": {"gradient_accumulation": 4}}
    whole = make_trainer(tmp_path / "whole", **settings)
    whole.train(192)
    stopped = make_trainer(tmp_path / "half", **settings)
    passes = stop_in_call(stopped.algorithm, "_scored", 32 + 6)  # the second part of a minibatch in the second update
    with pytest.raises(SystemExit):
        stopped.train(192)
    assert passes == [32 + 6]
    resumed = make_trainer(tmp_path / "half", **settings)
    resumed.load(tmp_path / "half")
    resumed.train(192)
    assert_equal(whole, resumed)


def test_a_signal_stops_while_an_older_policys_rollout_is_weighed(tmp_path):
    """Every rollout is marked as an older policy's: four passes weigh its 64 transitions."""

    def run(folder) -> Trainer:
        trainer = make_trainer(tmp_path / folder)
        batches = trainer.collection.batches

        def stale(steps):
            for rollout in batches(steps):
                rollout["policy_version"] -= 1
                yield rollout

        trainer.collection.batches = stale  # type: ignore[method-assign]
        return trainer

    whole = run("whole")
    whole.train(192)
    stopped = run("half")
    passes = stop_in_call(stopped.policy, "evaluate_actions", 4 + 2)  # in the second update
    with pytest.raises(SystemExit):
        stopped.train(192)
    assert passes == [4 + 2]
    resumed = run("half")
    resumed.load(tmp_path / "half")
    resumed.train(192)
    assert_equal(whole, resumed)


def test_a_short_last_rollout_that_was_being_learned_from_is_not_dropped(tmp_path):
    whole = make_trainer(tmp_path / "whole")
    whole.train(80)  # a rollout of 64 and one of 16: 8 and 2 gradient steps
    stopped = make_trainer(tmp_path / "half")
    stop_in_update(stopped, at=9)
    with pytest.raises(SystemExit):
        stopped.train(80)
    resumed = make_trainer(tmp_path / "half")
    resumed.load(tmp_path / "half")
    resumed.train(80)
    assert_equal(whole, resumed)


def test_a_run_stopped_in_its_first_rollout_is_resumed(tmp_path):
    whole = make_trainer(tmp_path / "whole")
    whole.train(256)
    trainer = make_trainer(tmp_path / "half")
    step, calls = trainer.env.step, itertools.count(1)

    def interrupted(actions):
        if next(calls) == 10:
            os.kill(os.getpid(), signal.SIGINT)
        return step(actions)

    trainer.env.step = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        trainer.train(256)
    assert trainer.num_timesteps == 0
    resumed = make_trainer(tmp_path / "half")
    resumed.load(tmp_path / "half")
    resumed.train(256)
    assert_equal(whole, resumed)


@pytest.mark.parametrize("mode", ["standard", "vla"])
@pytest.mark.parametrize("change", [{"total": 70}, {"buffer_size": 8}])
def test_a_half_rollout_that_no_longer_fits_is_dropped(tmp_path, mode, change, caplog):
    """Stopped in the second rollout of 32, then resumed with an earlier end, or with shorter rollouts."""
    trainer = make_trainer(tmp_path, buffer_type=mode, max_staleness=0)
    step, calls = trainer.env.step, itertools.count(1)

    def interrupted(actions):
        if next(calls) == 32 + 20:
            os.kill(os.getpid(), signal.SIGINT)
            if mode == "vla":
                time.sleep(
                    1.0
                )  # this is the collector's thread: the main one is to see the signal before the next step
        return step(actions)

    trainer.env.step = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        trainer.train(256)
    settings = {"buffer_size": change.get("buffer_size", 32)}
    resumed = make_trainer(tmp_path, buffer_type=mode, max_staleness=0, **settings)
    resumed.load(tmp_path)
    total = change.get("total", 128)
    resumed.train(total)
    assert resumed.num_timesteps == total
    assert "collected steps are dropped" in caplog.text


def test_a_failure_does_not_replace_a_better_checkpoint(tmp_path):
    trainer = make_trainer(tmp_path, env=[Failing(at=100)], save_freq=32)
    with pytest.raises(RunError):
        trainer.train(1000)  # fails in the rollout after checkpoint-96
    state = torch.load(tmp_path / "checkpoint-96" / "training_state.pt", weights_only=True)
    assert state["collector"]["env"] is not None
