import dataclasses
import json
import os
import signal

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from worlds import Counting, Identity, Recall

from deft import GRPO, ActorCritic, GRPOTrainer, RLConfig, Trainer, schema
from deft.config.algorithm_settings import GRPOSettings
from deft.config.settings import LoggingConfig, PolicyConfig
from deft.envs.serial import SerialVectorEnv
from deft.envs.vector import VectorEnv
from deft.errors import InputError
from deft.runs.random_state import get_random_state
from deft.training.group_collection import GroupCollection

QUIET = LoggingConfig(console_level="CRITICAL", tensorboard=False, enable_file_logging=False)
NEVER = lambda: False  # noqa: E731


class Draw(gymnasium.Env):
    """The observation is drawn at the reset and shows itself; an episode takes as many steps as its actions say.

    Action 1 ends it, and every step earns 1: members that end sooner have a smaller return.
    """

    reward_terms = ("alive", "ended")

    def __init__(self, length: int = 5) -> None:
        self.observation_space = spaces.Box(0, 1, (1,), np.float32)
        self.action_space = spaces.Discrete(2)
        self.length, self.steps = length, 0
        self.drawn = np.zeros(1, np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps, self.drawn = 0, self.np_random.random(1).astype(np.float32)
        return self.drawn, {}

    def step(self, action):
        self.steps += 1
        over = bool(action == 1)
        terms = {"alive": 1.0, "ended": -float(over)}
        return self.drawn, 1.0, over, self.steps >= self.length, {"reward_terms": terms, "success": not over}


class Unrepeatable(Draw):
    """Its observations do not follow from the seed, and its state cannot be saved."""

    def __init__(self) -> None:
        super().__init__()
        self.device = object()
        self.count = 0

    def reset(self, *, seed=None, options=None):
        self.count += 1
        return np.array([(id(self) % 1000 + self.count) / 2000], np.float32), {}


class Losing(SerialVectorEnv):
    """Says that environment 1 was lost with its worker in the second step."""

    calls = 0

    def step(self, actions):
        step = super().step(actions)
        self.calls += 1
        if self.calls != 2:
            return step
        step.truncated[1] = True
        step.episodes = [episode for episode in step.episodes if episode.env_index != 1]
        index = np.union1d(step.done_index, [1])
        return dataclasses.replace(
            step, lost_index=np.array([1]), done_index=index, final_observation=step.observation[index]
        )


def make_collection(env: VectorEnv, max_steps: int = 20, seed: int = 0, **settings) -> GroupCollection:
    torch.manual_seed(0)
    np.random.seed(0)
    policy = ActorCritic(env.observation_space, env.action_space, PolicyConfig(normalize_observation=False))
    algorithm = GRPO(policy, GRPOSettings(**{"group_size": 3, "max_resamples": 0, **settings}))
    algorithm.set_reward_terms(env.reward_terms)
    collection = GroupCollection(env, policy, algorithm.experience, seed, max_steps)
    collection.algorithm = algorithm
    return collection


def play(collection: GroupCollection) -> list:
    assert collection.gather(1, NEVER)
    return list(collection.batches(1))


# ------------------------------------------------------------------------------------------------------------- rounds


def test_members_of_a_group_start_alike_and_groups_do_not():
    collection = make_collection(SerialVectorEnv([Draw() for _ in range(6)]))
    firsts = []
    for version in (0, 1):
        collection.publish(version)
        (rollout,) = play(collection)
        first = rollout[schema.OBSERVATION][0, :, 0].reshape(2, 3)
        assert (first == first[:, :1]).all()
        firsts += first[:, 0].tolist()
    assert len(set(firsts)) == 4  # two groups in each of two iterations, all from different states


def test_the_states_follow_from_the_seed_and_the_update_alone():
    def first(seed: int, version: int) -> torch.Tensor:
        collection = make_collection(SerialVectorEnv([Draw() for _ in range(6)]), seed=seed)
        collection.publish(version)
        return play(collection)[0][schema.OBSERVATION][0]

    assert torch.equal(first(3, 7), first(3, 7))
    assert not torch.equal(first(3, 7), first(4, 7))
    assert not torch.equal(first(3, 7), first(3, 8))


def test_steps_after_an_episode_are_masked_and_not_counted():
    env = SerialVectorEnv([Draw() for _ in range(6)])
    collection = make_collection(env)
    (rollout,) = play(collection)
    mask = rollout[schema.STEP_MASK]
    done = rollout[schema.NEXT_TERMINATED] | rollout[schema.NEXT_TRUNCATED]
    # An episode is all steps up to its first end: the mask at t + 1 is the mask at t where that step did not end it.
    assert mask[0].all()
    assert torch.equal(mask[1:], mask[:-1] & ~done[:-1])
    assert not (mask[-1] & ~done[-1]).any()  # every episode ended, and no step was made after the last of them
    assert mask[-1].any()
    lengths = mask.sum(0)
    episodes = sorted(collection.collector.take_episodes(), key=lambda episode: episode.env_index)
    assert [episode.length for episode in episodes] == lengths.tolist()
    assert len(lengths.unique()) > 1
    assert [episode.episode_return for episode in episodes] == lengths.tolist()  # 1 a step
    assert collection.collector.take_step_count(1) == int(mask.sum())
    assert collection.collector.take_step_count(1) == 0
    torch.testing.assert_close(rollout[schema.NEXT_REWARD_TERMS][..., 0], torch.ones(mask.shape))


def test_an_iteration_is_handed_out_once_and_leaves_nothing():
    collection = make_collection(SerialVectorEnv([Draw() for _ in range(3)]))
    play(collection)
    assert len(collection.buffer) == collection.pending == 0
    assert list(collection.batches(1)) == []
    assert collection.buffer.state_dict() == {}


def test_episodes_are_cut_at_the_longest_rollout():
    collection = make_collection(SerialVectorEnv([Counting(length=100) for _ in range(3)]), max_steps=7)
    (rollout,) = play(collection)
    assert rollout.batch_size == (7, 3)
    assert rollout[schema.STEP_MASK].all()
    episodes = collection.collector.take_episodes()
    assert [(episode.length, episode.episode_return, episode.success) for episode in episodes] == [(7, 7.0, None)] * 3


def test_episodes_that_are_cut_are_warned_of_once(caplog):
    collection = make_collection(SerialVectorEnv([Counting(length=8) for _ in range(3)]), max_steps=7)
    for _ in range(2):
        play(collection)
    warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1
    assert "3 of 3 episodes had not ended after rollout_steps 7" in warnings[0]
    caplog.clear()
    play(make_collection(SerialVectorEnv([Counting(length=7) for _ in range(3)]), max_steps=7))  # ends with the rollout
    assert not caplog.records


def test_where_seeds_do_not_repeat_the_state_is_copied():
    # `Counting` shows how often it was reset: after a round members that ended earlier have been reset more often.
    envs = [Counting(length=length) for length in (2, 4, 9)]
    collection = make_collection(SerialVectorEnv(envs))
    play(collection)
    assert len({env.episode for env in envs}) > 1
    (rollout,) = play(collection)
    first = rollout[schema.OBSERVATION][0]
    assert torch.equal(first, first[:1].expand(3, -1))


def test_states_that_can_neither_be_repeated_nor_copied_raise_an_error():
    collection = make_collection(SerialVectorEnv([Unrepeatable() for _ in range(3)]))
    with pytest.raises(InputError) as error:
        play(collection)
    assert "must start from one state" in str(error.value)
    assert "attribute 'device' of Unrepeatable" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_group_that_lost_a_member_is_dropped():
    collection = make_collection(Losing([Counting() for _ in range(6)]))
    (rollout,) = play(collection)
    assert not rollout[schema.STEP_MASK][:, :3].any()
    assert rollout[schema.STEP_MASK][:, 3:].all()
    assert collection.collector.num_lost_episodes == 1
    assert len(collection.collector.take_episodes()) == 5
    rollout[schema.NEXT_REWARD][:, 4] += 1  # the other group has a spread
    metrics = collection.algorithm.update(iter([rollout]))
    assert {name: float(metrics[name]) for name in ("groups", "dropped_groups")} == {"groups": 2, "dropped_groups": 1}
    assert float(metrics["mean_return"]) == 4  # 3, 6 and 3: the members of the lost group are no part of it


# --------------------------------------------------------------------------------------------------- dynamic sampling


@pytest.mark.parametrize(("max_resamples", "num_rounds"), [(0, 1), (2, 3)])
def test_groups_without_a_spread_are_replaced(max_resamples, num_rounds):
    # Every episode of `Counting` has the same return: no round brings a group to learn from.
    collection = make_collection(SerialVectorEnv([Counting() for _ in range(6)]), max_resamples=max_resamples)
    rounds = play(collection)
    assert len(rounds) == num_rounds
    metrics = collection.algorithm.update(iter(rounds))
    assert float(metrics["dropped_groups"]) == float(metrics["groups"]) == 2 * num_rounds
    assert collection.collector.take_step_count(1) == 6 * 3 * num_rounds


def test_enough_groups_with_a_spread_end_the_sampling():
    collection = make_collection(SerialVectorEnv([Draw(length=50) for _ in range(6)]), max_resamples=5, max_steps=50)
    rounds = play(collection)
    found = [collection.algorithm.groups_with_spread(rollout) for rollout in rounds]
    assert sum(found) >= 2 > sum(found[:-1])
    starts = [rollout[schema.OBSERVATION][0, 0].item() for rollout in rounds]
    assert len(set(starts)) == len(rounds)


def test_an_iteration_may_take_several_rounds():
    collection = make_collection(SerialVectorEnv([Draw() for _ in range(3)]), groups_per_iteration=4)
    assert collection.max_rounds == 4
    assert len(play(collection)) == 4


@pytest.mark.parametrize(
    ("num_envs", "settings", "line"),
    [
        (
            4,
            {},
            "env.num_envs: 4 is no multiple of group_size 3: every member of a group needs an environment of its own",
        ),
        (
            6,
            {"groups_per_iteration": 3},
            "groups_per_iteration: 3 is no multiple of the 2 groups that num_envs 6 holds at once",
        ),
        (
            3,
            {"reward_weights": {"speed": 1.0}},
            "reward_weights: no reward term 'speed'; the environment has alive, ended",
        ),
    ],
)
def test_settings_that_do_not_fit_the_environments_raise_an_error(num_envs, settings, line):
    with pytest.raises(InputError) as error:
        make_collection(SerialVectorEnv([Draw() for _ in range(num_envs)]), **settings)
    assert str(error.value) == line


# -------------------------------------------------------------------------------------------------------- in a trainer


def make_trainer(folder, env=None, policy=None, trainer=None, **settings) -> Trainer:
    torch.manual_seed(0)
    vector = SerialVectorEnv(env or [gymnasium.make("CartPole-v1") for _ in range(4)])
    config = PolicyConfig(**(policy or {}))
    made = ActorCritic(vector.observation_space, vector.action_space, config)
    algorithm = GRPO(made, GRPOSettings(**{"group_size": 2, "batch_size": 32, "n_epochs": 2, **settings}))
    loop = {"iterations": 6, "buffer_size": 40, "eval_freq": 0, "save_freq": 0, "log_freq": 1, **(trainer or {})}
    return Trainer(made, vector, algorithm, output_dir=folder, logging_config=QUIET, **loop)


def assert_equal(one: Trainer, other: Trainer) -> None:
    assert one.num_timesteps == other.num_timesteps
    for name, value in one.policy.state_dict().items():
        assert torch.equal(value, other.policy.state_dict()[name]), name
    first, second = (trainer.algorithm.state_dict() for trainer in (one, other))
    for saved, other_saved in zip(*(state["optimizer"]["state"].values() for state in (first, second)), strict=True):
        assert all(torch.equal(saved[name], other_saved[name]) for name in ("exp_avg", "exp_avg_sq", "step"))
    assert all(torch.equal(first["reference"][name], second["reference"][name]) for name in first["reference"])


def lines(folder) -> list[dict]:
    read = [json.loads(line) for line in (folder / "episode_metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "time"} for line in read]


@pytest.mark.parametrize("policy", [{}, {"memory_hidden": 4}], ids=["feed-forward", "recurrent"])
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path, policy):
    whole = make_trainer(tmp_path / "whole", policy=policy, sequence_length=8)
    whole.train()
    again = make_trainer(tmp_path / "again", policy=policy, sequence_length=8)
    again.train()
    assert_equal(whole, again)  # one seed, one result
    half = make_trainer(tmp_path / "half", policy=policy, trainer={"iterations": 3}, sequence_length=8)
    half.train()
    resumed = make_trainer(tmp_path / "half", policy=policy, sequence_length=8)
    torch.manual_seed(123)  # whatever this process has drawn before must not matter
    np.random.seed(5)
    resumed.load(tmp_path / "half")
    assert resumed.algorithm.version == 3
    resumed.train()
    assert_equal(whole, resumed)
    assert lines(tmp_path / "whole") == lines(tmp_path / "half")


def test_a_run_stopped_in_the_middle_of_an_iteration_is_resumed(tmp_path):
    whole = make_trainer(tmp_path / "whole")
    whole.train()
    trainer = make_trainer(tmp_path / "half")
    step, calls = trainer.env.step, []

    def interrupted(actions):
        calls.append(actions)
        if len(calls) == 100:
            os.kill(os.getpid(), signal.SIGINT)
        return step(actions)

    trainer.env.step = interrupted
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert 0 < trainer.algorithm.version < 6
    resumed = make_trainer(tmp_path / "half")
    resumed.load(tmp_path / "half")
    resumed.train()
    assert_equal(whole, resumed)
    assert lines(tmp_path / "whole") == lines(tmp_path / "half")


@pytest.mark.parametrize("policy", [{}, {"memory_hidden": 4}], ids=["feed-forward", "recurrent"])
@pytest.mark.parametrize("at", [1, 3])
def test_a_run_stopped_in_the_middle_of_an_update_is_resumed(tmp_path, policy, at):
    """The third update is stopped before one of its gradient steps."""
    settings = {"policy": policy, "sequence_length": 8, "batch_size": 8, "kl_coef": 0.1}
    whole = make_trainer(tmp_path / "whole", **settings)
    whole.train()
    stopped = make_trainer(tmp_path / "half", **settings)
    algorithm, calls = stopped.algorithm, []
    step = algorithm._step

    def signalling(minibatch):
        if algorithm.version == 2:
            calls.append(minibatch)
            if len(calls) == at:
                os.kill(os.getpid(), signal.SIGTERM)
        return step(minibatch)

    algorithm._step = signalling
    with pytest.raises(SystemExit):
        stopped.train()
    assert len(calls) == at
    resumed = make_trainer(tmp_path / "half", **settings)
    resumed.load(tmp_path / "half")
    assert resumed.algorithm.version == 2
    resumed.train()
    assert_equal(whole, resumed)


def test_the_progress_never_goes_back():
    """Environments that wait for the others' episodes to end make no steps."""
    collection = make_collection(SerialVectorEnv([Draw() for _ in range(3)]))
    seen = []
    assert collection.gather(1, lambda: seen.append(collection.steps_under_way(3)) or False)
    counted = collection.collector.take_step_count(1)
    assert seen == sorted(seen)
    assert seen[0] == 0
    assert counted - 3 <= seen[-1] < counted  # it is asked before a vector step of at most three


def test_a_stop_leaves_everything_as_it_was():
    collection = make_collection(SerialVectorEnv([Draw(length=30) for _ in range(3)]))
    before = get_random_state()
    calls = iter(range(100))
    assert not collection.gather(1, lambda: next(calls) == 1)
    assert torch.equal(before["torch"], get_random_state()["torch"])
    assert torch.equal(before["numpy"][1], get_random_state()["numpy"][1])
    assert before["numpy"][2:] == get_random_state()["numpy"][2:]
    assert collection.pending == 0
    assert not collection.collector.episodes


def test_iterations_are_counted_and_progress_follows_them(tmp_path):
    trainer = make_trainer(tmp_path, trainer={"iterations": 4}, learning_rate_schedule="linear", learning_rate=0.4)
    trainer.train()
    updates = [line for line in lines(tmp_path) if line["type"] == "update"]
    assert [line["learning_rate"] for line in updates] == pytest.approx([0.4, 0.3, 0.2, 0.1])
    episodes = [line for line in lines(tmp_path) if line["type"] == "episode"]
    assert len(episodes) == 4 * sum(line["rounds"] for line in updates)
    assert trainer.num_timesteps == sum(line["length"] for line in episodes)


def test_a_background_collector_raises_an_error(tmp_path):
    with pytest.raises(InputError, match="buffer_type: grpo"):
        make_trainer(tmp_path, trainer={"buffer_type": "vla"})


def test_one_given_environment_is_copied_for_all_members(tmp_path):
    config = RLConfig(
        algorithm="grpo",
        group_size=3,
        groups_per_iteration=2,
        iterations=2,
        eval_freq=0,
        save_freq=0,
        tensorboard=False,
        console_level="CRITICAL",
        output_dir=str(tmp_path / "run"),
    )
    trainer = GRPOTrainer(gymnasium.make("CartPole-v1"), config=config)
    assert trainer.trainer.env.num_envs == 6
    summary = trainer.train()
    assert summary["timesteps"] > 12
    assert trainer.evaluate(num_episodes=2)["episodes"] == 2
    trainer.close()


@pytest.mark.parametrize(
    ("space", "settings"),
    [
        (spaces.Discrete(4), {}),
        (spaces.MultiDiscrete([3, 3]), {"ratio": "token"}),
        (spaces.Box(-1, 1, (1,)), {"advantage": "process"}),
    ],
    ids=["discrete", "tokens", "box"],
)
def test_identity_is_learned(tmp_path, space, settings):
    """The reward is 1 for the action that the observation shows; by chance it is 1/4, 1/3 and about 1/4 a step."""
    trainer = make_trainer(
        tmp_path,
        [Identity(space) for _ in range(16)],
        trainer={"iterations": 20},
        **{"group_size": 4, "learning_rate": 1e-2, "batch_size": 64, "n_epochs": 4, "kl_coef": 0.001, **settings},
    )
    trainer.train()
    returns = [line["mean_return"] for line in lines(tmp_path) if line["type"] == "update"]
    assert np.mean(returns[-3:]) > 7.5


def test_memory_is_learned(tmp_path):
    """The cue is seen at the first step alone and asked for at the last: half of the answers are right by chance."""
    trainer = make_trainer(
        tmp_path,
        [Recall() for _ in range(32)],
        policy={"memory_hidden": 16},
        trainer={"iterations": 40},
        **{"group_size": 8, "learning_rate": 1e-2, "batch_size": 256, "n_epochs": 4, "kl_coef": 0.0},
        sequence_length=4,
    )
    trainer.train()
    returns = [line["mean_return"] for line in lines(tmp_path) if line["type"] == "update"]
    assert np.mean(returns[:5]) < 0.7
    assert np.mean(returns[-5:]) > 0.95


def test_cartpole_is_learned(tmp_path):
    """Balancing by chance lasts 22 steps; 7 iterations of 16 episodes quadruple that."""
    trainer = make_trainer(
        tmp_path,
        [gymnasium.make("CartPole-v1") for _ in range(16)],
        trainer={"iterations": 7, "buffer_size": 200},
        **{"group_size": 4, "learning_rate": 2e-3, "batch_size": 256, "n_epochs": 4, "kl_coef": 0.01},
    )
    trainer.train()
    returns = [line["mean_return"] for line in lines(tmp_path) if line["type"] == "update"]
    assert returns[0] < 30
    assert np.mean(returns[-2:]) > 88
