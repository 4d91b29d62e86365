import itertools
import os
import signal
import threading
import time
from functools import partial

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from worlds import Counting, Failing, Identity, Recall, Signalling

from deft import PPO, ActorCritic, Trainer
from deft.config.algorithm_settings import PPOSettings
from deft.config.settings import EnvConfig, LoggingConfig, PolicyConfig
from deft.envs.make import make_vector_env, wrap
from deft.envs.process import ProcessVectorEnv
from deft.errors import InputError, RunError

FAST = {"learning_rate": 3e-3, "n_epochs": 8, "batch_size": 64}
QUIET = LoggingConfig(console_level="CRITICAL", tensorboard=False)


def make_trainer(tmp_path, env=None, num_envs=2, policy=None, algorithm=None, **settings) -> Trainer:
    torch.manual_seed(0)
    envs = env if env is not None else [gymnasium.make("CartPole-v1") for _ in range(num_envs)]
    vector = wrap(envs)
    made = ActorCritic(vector.observation_space, vector.action_space, PolicyConfig(**(policy or {})))
    ppo = PPO(made, PPOSettings(**{"batch_size": 16, "n_epochs": 2, **(algorithm or {})}))
    defaults = {"buffer_size": 32, "eval_freq": 0, "save_freq": 0, "log_freq": 1}
    return Trainer(made, vector, ppo, **{**defaults, **settings}, output_dir=tmp_path, logging_config=QUIET)


def everything(trainer: Trainer) -> dict[str, torch.Tensor]:
    """All numbers that a run is made of."""
    state = {f"policy.{name}": value for name, value in trainer.policy.state_dict().items()}
    adam = trainer.algorithm.state_dict()["optimizer"]["state"]
    names = ("exp_avg", "exp_avg_sq", "step")
    return state | {f"adam.{index}.{name}": saved[name] for index, saved in adam.items() for name in names}


def assert_equal(first: Trainer, second: Trainer) -> None:
    one, other = everything(first), everything(second)
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


def metrics(run_dir) -> list[dict]:
    import json

    lines = [json.loads(line) for line in (run_dir / "episode_metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "time"} for line in lines]


@pytest.mark.parametrize("mode", [{"buffer_type": "standard"}, {"buffer_type": "vla", "max_staleness": 0}])
@pytest.mark.parametrize("policy", [{}, {"memory_hidden": 8}], ids=["feed-forward", "recurrent"])
def test_twice_n_steps_equal_n_resumed_for_n_more(tmp_path, mode, policy):
    whole = make_trainer(tmp_path / "whole", policy=policy, **mode)
    whole.train(512)
    half = make_trainer(tmp_path / "half", policy=policy, **mode)
    half.train(256)
    resumed = make_trainer(tmp_path / "half", policy=policy, **mode)
    torch.manual_seed(123)  # whatever this process has drawn before must not matter
    np.random.seed(5)
    resumed.load(tmp_path / "half")
    assert resumed.global_step == 256
    resumed.train(512)
    assert_equal(whole, resumed)
    assert metrics(tmp_path / "whole") == metrics(tmp_path / "half")


def test_vla_mode_at_staleness_zero_equals_standard_mode(tmp_path):
    standard = make_trainer(tmp_path / "standard", eval_freq=128, eval_env=gymnasium.make("CartPole-v1"))
    vla = make_trainer(
        tmp_path / "vla", eval_freq=128, eval_env=gymnasium.make("CartPole-v1"), buffer_type="vla", max_staleness=0
    )
    standard.train(500)  # the last rollout is a short one
    vla.train(500)
    assert standard.num_timesteps == vla.num_timesteps == 500
    assert_equal(standard, vla)
    assert metrics(tmp_path / "standard") == metrics(tmp_path / "vla")


def test_vla_mode_bounds_the_age_and_hands_out_once(tmp_path):
    trainer = make_trainer(tmp_path, buffer_type="vla", max_staleness=2)
    trainer.train(64 * 12)
    ages = [line["staleness"] for line in metrics(tmp_path) if line["type"] == "update"]
    assert len(ages) == 12
    assert 0 <= min(ages) <= max(ages) <= 2
    statistics = trainer.collection.buffer.statistics()
    assert statistics["overwritten"] == 0
    assert statistics["handed_out"] == statistics["written"] == 12 * 32
    assert not [thread for thread in threading.enumerate() if thread.name == "deft-collector"]


def test_collection_runs_beside_training(tmp_path):
    """Environments step during an update in VLA mode, and never in standard mode (`benchmarks/vla_mode.py`: speed)."""
    updating, stepped, overlapping = threading.Event(), threading.Event(), []

    class Watched(Counting):
        def step(self, action):
            if updating.is_set():
                overlapping.append(1)
                stepped.set()
            return super().step(action)

    class SlowPPO(PPO):
        def update(self, batches):
            result = super().update(batches)
            updating.set()
            if not overlapping:
                stepped.wait(limit)
            updating.clear()
            return result

    def run(folder, **mode):
        overlapping.clear()
        vector = wrap([Watched()])
        policy = ActorCritic(vector.observation_space, vector.action_space)
        algorithm = SlowPPO(policy, PPOSettings(n_epochs=1))
        trainer = Trainer(policy, vector, algorithm, 20, eval_freq=0, output_dir=folder, logging_config=QUIET, **mode)
        trainer.train(160)
        return len(overlapping)

    limit = 0.02
    assert run(tmp_path / "a", buffer_type="standard") == 0
    limit = 1.0  # reached only if nothing collects: it may be ahead in some of the eight updates
    assert run(tmp_path / "b", buffer_type="vla") > 0


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


def test_a_run_is_saved_before_it_is_evaluated(tmp_path):
    trainer = make_trainer(tmp_path, env=[Counting()], eval_freq=32, eval_env=Failing(at=5, length=50))
    with pytest.raises(RunError, match="gripper"):
        trainer.train(96)
    state = torch.load(tmp_path / "checkpoint-32" / "training_state.pt", weights_only=True)
    assert state["collector"]["env"] is not None  # a whole checkpoint, not one that was rescued from the failure


def test_a_policy_that_was_given_is_saved_before_its_first_evaluation(tmp_path):
    signalling = Signalling(at=20, number=signal.SIGTERM)
    trainer = make_trainer(tmp_path, env=[Counting()], eval_freq=32, eval_env=signalling, fresh_policy=False)
    with pytest.raises(SystemExit):
        trainer.train(64)
    assert (tmp_path / "checkpoint-0" / "model.pt").exists()
    resumed = make_trainer(tmp_path, env=[Counting()], eval_freq=32, eval_env=Counting(), fresh_policy=False)
    resumed.load(tmp_path)
    resumed.train(64)
    assert [line["step"] for line in metrics(tmp_path) if line["type"] == "evaluation"] == [0, 32, 64]


def test_the_best_is_known_also_where_its_evaluation_came_after_the_checkpoint(tmp_path):
    """Checkpoints are written before they are evaluated; the metrics have the results."""
    trainer = make_trainer(tmp_path, env=[Counting()], eval_freq=32, eval_env=Counting(9))
    trainer.train(32)
    assert trainer.best_reward == 9.0
    resumed = make_trainer(tmp_path, env=[Counting()], eval_freq=32, eval_env=Counting(5))
    resumed.load(tmp_path)
    assert resumed.best_reward == 9.0
    resumed.train(64)
    assert (tmp_path / "best").resolve().name == "checkpoint-32"


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


class Blinking(gymnasium.Env):
    """A random image with its channels last; the action should say whether it is bright."""

    def __init__(self) -> None:
        self.observation_space = spaces.Box(0, 255, (8, 10, 3), np.uint8)
        self.action_space = spaces.Discrete(2)
        self.level = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._image(), {}

    def step(self, action):
        reward = float(action == (self.level > 127))
        return self._image(), reward, bool(self.np_random.random() < 0.2), False, {}

    def _image(self):
        self.level = int(self.np_random.integers(256))
        return self.np_random.integers(0, self.level + 1, (8, 10, 3), np.uint8)


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


def test_evaluation_of_a_random_model_leaves_training_alone(tmp_path):
    """A policy whose deterministic actions still draw numbers: its evaluations draw from a state of their own."""

    class Noisy(ActorCritic):
        def act(self, td, deterministic=False):
            return super().act(td, deterministic=False)

        def act_arrays(self, observation):
            return None

    def run(folder, eval_freq):
        torch.manual_seed(0)
        env = gymnasium.make("CartPole-v1")
        policy = Noisy(env.observation_space, env.action_space)
        trainer = Trainer(policy, env, PPO(policy), 32, eval_freq=eval_freq, output_dir=folder, logging_config=QUIET)
        trainer.train(128)
        return trainer

    assert_equal(run(tmp_path / "a", 0), run(tmp_path / "b", 32))


def test_evaluation_leaves_the_training_environment_alone(tmp_path):
    evaluated = make_trainer(tmp_path / "a", eval_freq=64, eval_env=lambda: wrap(gymnasium.make("CartPole-v1")))
    plain = make_trainer(tmp_path / "b")
    evaluated.train(256)
    plain.train(256)
    assert_equal(evaluated, plain)
    assert len([line for line in metrics(tmp_path / "a") if line["type"] == "evaluation"]) == 4


def test_evaluation_works_during_vla_training(tmp_path):
    trainer = make_trainer(tmp_path, eval_freq=64, eval_env=gymnasium.make("CartPole-v1"), buffer_type="vla")
    trainer.train(256)
    results = [line for line in metrics(tmp_path) if line["type"] == "evaluation"]
    assert [line["step"] for line in results] == [64, 128, 192, 256]
    assert all(line["episodes"] == 10 for line in results)


def test_checkpoints_are_kept_by_number_and_the_best(tmp_path):
    trainer = make_trainer(tmp_path, save_freq=64, keep_checkpoints=2)
    trainer.train(64 * 5)
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-256", "checkpoint-320"]


@pytest.mark.parametrize("eval_freq", [10_000, 128])
def test_the_end_can_be_the_best(tmp_path, eval_freq):
    trainer = make_trainer(tmp_path, eval_freq=eval_freq, eval_episodes=2, eval_env=gymnasium.make("CartPole-v1"))
    trainer.train(128, evaluates_last=True)
    # Once, and no more where a periodic one fell on the last step.
    assert [line["step"] for line in metrics(tmp_path) if line["type"] == "evaluation"] == [128]
    assert (tmp_path / "best").resolve().name == "checkpoint-128"
    assert trainer.last_evaluation["mean_reward"] == trainer.best_reward


def test_of_equal_evaluations_the_last_is_the_best(tmp_path):
    """Every episode of `Counting` returns 3, whoever plays it: the weights that saw most count."""
    trainer = make_trainer(tmp_path, env=[Counting()], eval_freq=32, eval_episodes=2, eval_env=Counting())
    trainer.train(96)
    assert [line["mean_reward"] for line in metrics(tmp_path) if line["type"] == "evaluation"] == [3.0, 3.0, 3.0]
    assert (tmp_path / "best").resolve().name == "checkpoint-96"


def test_an_end_that_is_worse_is_not_the_best(tmp_path):
    trainer = make_trainer(tmp_path, eval_freq=64, eval_episodes=2, eval_env=gymnasium.make("CartPole-v1"))
    trainer.train(64)
    trainer.run.best_reward = 1e9
    trainer.train(96, evaluates_last=True)
    assert [line["step"] for line in metrics(tmp_path) if line["type"] == "evaluation"] == [64, 96]
    assert (tmp_path / "best").resolve().name == "checkpoint-64"


def test_no_more_steps_than_asked_for(tmp_path):
    trainer = make_trainer(tmp_path)
    trainer.train(100)  # rollouts of 64: 64, then 36
    assert trainer.num_timesteps == 100


def test_means_are_over_as_many_episodes_as_there_are_environments(tmp_path):
    # 20 environments with episodes of 1 step and 100 of 2, begun together: after 2 steps 20 · 2 + 100 episodes have
    # ended, and the last 120 of them are 20 of 1 step and 100 of 2. The last 100 alone would all be of 2.
    envs = [Counting(length=1) for _ in range(20)] + [Counting(length=2) for _ in range(100)]
    make_trainer(tmp_path, env=envs, buffer_size=2).train(240)
    lengths = [line["rollout/mean_length"] for line in metrics(tmp_path) if line["type"] == "update"]
    assert lengths == [pytest.approx((20 * 1 + 100 * 2) / 120)]


def test_iterations_count_updates_also_with_chunks(tmp_path):
    # Episodes of 3 steps in chunks of 2: a rollout of 8 chunks is 12 env steps, not 16, and 3 rollouts are 36.
    policy = ActorCritic(Counting().observation_space, spaces.MultiDiscrete([2, 2]), PolicyConfig(chunk_length=2))
    trainer = Trainer(
        policy,
        [Counting(length=3)],
        PPO(policy),
        8,
        iterations=3,
        eval_freq=0,
        output_dir=tmp_path,
        logging_config=QUIET,
    )
    trainer.train()
    assert trainer.algorithm.version == 3
    assert trainer.num_timesteps == 36


def test_a_run_by_hand_does_not_write_over_another(tmp_path):
    make_trainer(tmp_path).train(64)
    with pytest.raises(InputError, match="already holds a run"):
        make_trainer(tmp_path).train(64)


def test_wrong_checkpoints_raise_an_error(tmp_path):
    trainer = make_trainer(tmp_path / "a")
    trainer.train(64)
    with pytest.raises(InputError, match="its observation_space is"):
        make_trainer(tmp_path / "b", env=[Counting()]).load(tmp_path / "a")
    with pytest.raises(InputError, match="saved with 2 environments, now 3"):
        make_trainer(tmp_path / "c", num_envs=3).load(tmp_path / "a")
    with pytest.raises(InputError, match="does not fit this policy"):
        make_trainer(tmp_path / "d", policy={"hidden_sizes": (8,)}).load(tmp_path / "a")


def test_settings_are_checked(tmp_path):
    with pytest.raises(InputError, match="buffer_type"):
        make_trainer(tmp_path, buffer_type="ring")
    with pytest.raises(InputError, match="did you mean 'eval_freq'"):
        make_trainer(tmp_path, evl_freq=3)


@pytest.mark.parametrize(
    ("space", "steps"),
    [
        (spaces.Discrete(3), 4000),
        (spaces.Discrete(3, start=2), 4000),
        (spaces.MultiDiscrete([2, 3]), 6000),
        (spaces.Box(-1, 1, (1,), np.float32), 8000),
        (spaces.Box(2, 6, (1,), np.float32), 8000),
    ],
    ids=["discrete", "discrete from 2", "multidiscrete", "box", "box off centre"],
)
def test_identity_is_learned(tmp_path, space, steps):
    """Any correct learner solves it: random actions earn 1/3 (discrete) or about 0.44 (box) a step, perfect ones 1."""
    trainer = make_trainer(
        tmp_path,
        env=[Identity(space) for _ in range(4)],
        eval_env=Identity(space),
        buffer_size=64,
        algorithm={**FAST, "learning_rate_schedule": "linear", "gamma": 0.5},
    )
    trainer.train(steps)
    assert trainer.evaluate(20)["mean_reward"] > 9.0  # of 10


@pytest.mark.parametrize("memory_hidden", [0, 16])
def test_recall_is_learned_with_memory_and_cannot_be_without(tmp_path, memory_hidden):
    """Without memory the last observation is the same for both cues: half of the answers are right."""
    trainer = make_trainer(
        tmp_path,
        env=[Recall() for _ in range(8)],
        eval_env=Recall(),
        buffer_size=32,
        policy={"memory_hidden": memory_hidden, "normalize_observation": False},
        algorithm={"learning_rate": 5e-3, "n_epochs": 4, "batch_size": 64, "sequence_length": 4, "entropy_coef": 0.005},
    )
    trainer.train(12_000)
    score = trainer.evaluate(200)["mean_reward"]
    assert score > 0.95 if memory_hidden else score < 0.65


def test_evaluations_during_training_may_sample(tmp_path):
    results = []
    for name, deterministic in (("mode", True), ("sample", False)):
        settings = {"eval_env": gymnasium.make("CartPole-v1"), "eval_deterministic": deterministic}
        trainer = make_trainer(tmp_path / name, eval_episodes=2, **settings)
        results.append(trainer.evaluate())
        trainer.close()
    assert [result["action_selection"] for result in results] == ["mode", "sample"]
    assert results[0]["mean_reward"] != results[1]["mean_reward"]


@pytest.mark.parametrize("mode", [{"buffer_type": "standard"}, {"buffer_type": "vla"}])
def test_the_latest_observation_is_that_of_the_environments(tmp_path, mode):
    trainer = make_trainer(tmp_path, [Counting(), Counting()], **mode)
    assert trainer.latest_observation() is None
    trainer.train(64)
    assert np.array_equal(trainer.latest_observation(), trainer.env.observation)
    trainer.close()
