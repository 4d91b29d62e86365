"""Online runs of PPO: resuming, collection beside training, evaluations, checkpoints, and learning."""

import signal
import threading

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from online_runs import QUIET, assert_equal, make_trainer, metrics
from worlds import Counting, Failing, Identity, Recall, Signalling

from deft import PPO, ActorCritic, Trainer
from deft.config.algorithm_settings import PPOSettings
from deft.config.settings import PolicyConfig
from deft.envs.make import wrap
from deft.errors import InputError, RunError

FAST = {"learning_rate": 3e-3, "n_epochs": 8, "batch_size": 64}


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


@pytest.mark.parametrize(("value_warmup", "warns"), [(3, False), (4, True)])
def test_a_warm_up_that_does_not_end_causes_a_warning(tmp_path, value_warmup, warns, caplog):
    """256 env steps in rollouts of 2 · 32 are 4 updates."""
    make_trainer(tmp_path, algorithm={"value_warmup": value_warmup}, total_timesteps=256).train()
    found = [message for message in caplog.messages if "and the run makes 4: the policy will not be trained" in message]
    assert bool(found) == warns


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
