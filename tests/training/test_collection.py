import os
import signal

import numpy as np
import pytest
import torch
from tensordict import TensorDictBase
from worlds import Counting, Failing

from deft import schema
from deft.data.rollout import RolloutBuffer, VLABuffer
from deft.envs.process import ProcessVectorEnv
from deft.envs.serial import SerialVectorEnv
from deft.envs.wrappers import ActionChunk
from deft.errors import InputError, RunError
from deft.evaluation.rollouts import PolicyActor, play_episodes
from deft.models.actor_critic import ActorCritic
from deft.models.policy import Policy
from deft.training.collection import Collector


class Reader(Policy):
    """V(o) = 100·episode + step, so that a value says which observation it was taken from."""

    def __init__(self, memory: bool = False) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))
        self.recurrent = memory

    def initial_memory(self, num_envs):
        return torch.zeros(num_envs, 1, 1) if self.recurrent else None

    def act(self, td: TensorDictBase, deterministic: bool = False) -> TensorDictBase:
        td[schema.ACTION] = torch.zeros(td.batch_size, dtype=torch.long)
        td[schema.LOG_PROB] = torch.zeros(td.batch_size)
        td[schema.VALUE] = self.get_value(td)
        if self.recurrent:
            td[schema.NEXT_MEMORY] = td[schema.MEMORY] + 1  # counts the steps since the episode's start
        return td

    def get_value(self, td):
        observation = td[schema.OBSERVATION]
        value = 100 * observation[:, 0] + observation[:, 1]
        return value + (1000 * td[schema.MEMORY][:, 0, 0] if self.recurrent else 0)


# 1 environment: acting in numpy; 17: in torch (more than MOST_ROWS).
@pytest.mark.parametrize("num_envs", [1, 17])
@pytest.mark.parametrize("by", ["collector", "evaluation", "actor", "sampling"])
def test_a_discrete_policy_of_nan_reaches_no_environment(by, num_envs):
    envs = [Counting() for _ in range(num_envs)]
    env = SerialVectorEnv(envs)
    policy = ActorCritic(env.observation_space, env.action_space)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.fill_(torch.nan)
    calls = {
        "collector": lambda: Collector(env, policy).collect_steps(num_envs),
        "evaluation": lambda: play_episodes(policy, env, num_envs),
        "sampling": lambda: play_episodes(policy, env, num_envs, deterministic=False),
        "actor": lambda: PolicyActor(policy, num_envs, None, deterministic=True).act(env.reset(0)),
    }
    with pytest.raises(RunError, match="the policy's output for environment 0 is not a number, so no environment was"):
        calls[by]()
    assert {one.steps for one in envs} == {0}


def test_truncation_bootstraps_from_the_true_final_observation():
    collector = Collector(SerialVectorEnv([Counting(length=3)]), Reader())
    rollout = collector.collect_steps(5)
    assert rollout[schema.OBSERVATION][:, 0].tolist() == [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1]]
    assert rollout[schema.NEXT_TRUNCATED][:, 0].tolist() == [False, False, True, False, False]
    # Step 2 ends episode 0 at observation [0, 3]: V = 3. (The observation after the reset, [1, 0], would give 100.)
    # The rollout's last step leads to [1, 2]: V = 102. Elsewhere the next row has the value.
    assert rollout[schema.NEXT_VALUE][:, 0].tolist() == [0, 0, 3, 0, 102]


def test_episode_that_is_lost_bootstraps_from_the_last_observation_that_was_seen():
    env = ProcessVectorEnv([Counting] * 2, num_workers=2)
    try:
        collector = Collector(env, Reader())
        first = collector.collect_steps(4)
        os.kill(env.worker_pids[1], signal.SIGKILL)
        rollout = collector.collect_steps(6)
        episodes = collector.take_episodes()
    finally:
        env.close()
    assert first[schema.OBSERVATION][:, 1].tolist() == [[0, 0], [0, 1]]
    # The transition from [0, 2] is the one that fails: truncated there, without reward, V([0, 2]) = 2. The new
    # environment counts its episodes from 0 again; its second step is the rollout's last, with V([0, 2]) = 2.
    assert rollout[schema.OBSERVATION][:, 1].tolist() == [[0, 2], [0, 0], [0, 1]]
    assert rollout[schema.NEXT_TRUNCATED][:, 1].tolist() == [True, False, False]
    assert rollout[schema.NEXT_REWARD][:, 1].tolist() == [0, 1, 1]
    assert rollout[schema.NEXT_VALUE][:, 1].tolist() == [2, 0, 2]
    # The other one ends its episode in that very step, at [0, 3], and is none the wiser.
    assert rollout[schema.NEXT_TRUNCATED][:, 0].tolist() == [True, False, False]
    assert rollout[schema.NEXT_VALUE][:, 0].tolist() == [3, 0, 102]
    assert [(episode.env_index, episode.length) for episode in episodes] == [(0, 3)]
    assert collector.num_lost_episodes == 1


class Shaped(Counting):
    """Reward step + 0.5, in two terms."""

    reward_terms = ("half", "step")

    def step(self, action):
        observation, _, *ends, info = super().step(action)
        terms = {"step": float(self.steps), "half": 0.5}
        return observation, sum(terms.values()), *ends, {**info, "reward_terms": terms}


def test_reward_terms_are_written_where_they_are_asked_for():
    rollout = Collector(SerialVectorEnv([Shaped(length=2)]), Reader(), reward_terms=True).collect_steps(3)
    assert rollout[schema.NEXT_REWARD_TERMS][:, 0].tolist() == [[0.5, 1], [0.5, 2], [0.5, 1]]
    assert rollout[schema.NEXT_REWARD_TERMS].sum(-1).equal(rollout[schema.NEXT_REWARD])
    for env, asked in ((Shaped(), False), (Counting(), True)):
        rollout = Collector(SerialVectorEnv([env]), Reader(), reward_terms=asked).collect_steps(3)
        assert schema.NEXT_REWARD_TERMS not in rollout.keys(True)


def test_reward_terms_that_are_not_numbers_raise_an_error():
    class Broken(Shaped):
        def step(self, action):
            *rest, info = super().step(action)
            return *rest, {"reward_terms": {**info["reward_terms"], "half": float("nan")}}

    with pytest.raises(RunError, match="as its reward terms, a value that is infinite or not a number"):
        Collector(SerialVectorEnv([Broken()]), Reader(), reward_terms=True).collect_steps(1)


def test_termination_does_not_bootstrap():
    collector = Collector(SerialVectorEnv([Counting(length=3, terminates=True)]), Reader())
    rollout = collector.collect_steps(6)
    assert rollout[schema.NEXT_TERMINATED][:, 0].tolist() == [False, False, True, False, False, True]
    assert rollout[schema.NEXT_VALUE][:, 0].tolist() == [0] * 6  # the rollout's end is an episode's end too


def test_next_observation_is_the_final_one():
    collector = Collector(SerialVectorEnv([Counting(length=2)]), Reader(), next_observation=True)
    rollout = collector.collect_steps(4)
    assert rollout[schema.NEXT_OBSERVATION][:, 0].tolist() == [[0, 1], [0, 2], [1, 1], [1, 2]]
    assert schema.NEXT_VALUE not in rollout.keys(True)


def test_memory_is_zeros_at_an_episodes_first_step_and_carried_otherwise():
    collector = Collector(SerialVectorEnv([Counting(length=3)]), Reader(memory=True))
    rollout = collector.collect_steps(5)
    assert rollout[schema.MEMORY][:, 0, 0, 0].tolist() == [0, 1, 2, 0, 1]
    # V(final) uses the memory after the step: 3 → 3 + 1000·3; at the end: [1, 2] with memory 2 → 102 + 2000
    assert rollout[schema.NEXT_VALUE][:, 0].tolist() == [0, 0, 3003, 0, 2102]


def test_collect_steps_counts_over_all_environments():
    # Two environments and 50-step episodes need 100 steps for one whole episode each.
    collector = Collector(SerialVectorEnv([Counting(length=50), Counting(length=50)]), Reader())
    rollout = collector.collect_steps(100)
    assert rollout.batch_size == (50, 2)
    assert [episode.length for episode in collector.take_episodes()] == [50, 50]
    assert collector.take_episodes() == []
    with pytest.raises(InputError, match="multiple"):
        collector.collect_steps(3)


def test_rollouts_continue_where_the_last_one_ended():
    collector = Collector(SerialVectorEnv([Counting(length=3)]), Reader())
    buffer = RolloutBuffer(2)
    seen = []
    for _ in range(3):
        collector.collect(buffer, 2)
        seen += buffer.get()[schema.OBSERVATION][:, 0].tolist()
    assert seen == [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]]


def test_versions_and_chunks_are_recorded():
    env = ActionChunk(Counting(length=3), chunk_length=2, gamma=0.5)

    class Chunks(Reader):
        chunk_length = 2

        def act(self, td, deterministic=False):
            super().act(td)
            td[schema.ACTION] = torch.zeros(len(td), 2, dtype=torch.long)
            return td

    collector = Collector(SerialVectorEnv([env]), Chunks())
    collector.set_version(7)
    rollout = collector.collect_steps(3)
    assert rollout[schema.POLICY_VERSION][:, 0].tolist() == [7, 7, 7]
    # Episodes of 3 steps in chunks of 2: 2 steps, then 1 (cut by the episode's end), then 2 of the next episode.
    assert rollout[schema.NEXT_NUM_STEPS][:, 0].tolist() == [2, 1, 2]
    assert rollout[schema.NEXT_REWARD][:, 0].tolist() == [1.5, 1.0, 1.5]  # 1 + 0.5·1; 1; 1 + 0.5·1
    assert collector.take_step_count(3) == 5


@pytest.mark.parametrize(("how", "what"), [("nan", "observation"), ("nan_reward", "reward")])
def test_values_that_are_not_numbers_raise_an_error(how, what):
    collector = Collector(SerialVectorEnv([Counting(), Failing(at=3, how=how)]), Reader())
    with pytest.raises(RunError, match=f"environment 1 gave, as its {what}, a value that is infinite or not a number"):
        collector.collect_steps(20)


def test_an_exception_of_the_environment_says_which():
    collector = Collector(SerialVectorEnv([Counting(), Failing(at=3)]), Reader())
    with pytest.raises(RunError, match=r"environment 1 .*ValueError: the gripper fell off"):
        collector.collect_steps(20)


def test_state_resumes_in_the_middle_of_an_episode():
    def make():
        return Collector(SerialVectorEnv([Counting(length=5), Counting(length=3)]), Reader(memory=True))

    first = make()
    first.collect_steps(8)
    second = make()
    assert second.load_state_dict(first.state_dict())
    expected, resumed = first.collect_steps(8), second.collect_steps(8)
    for key in expected.keys(True, True):
        assert torch.equal(expected[key], resumed[key]), key


def test_action_mask_reaches_the_policy():
    class Masked(Counting):
        action_mask = np.array([True, False])

    seen = []

    class Looks(Reader):
        def act(self, td, deterministic=False):
            seen.append(td[schema.ACTION_MASK].clone())
            return super().act(td)

    ring = VLABuffer(4)
    Collector(SerialVectorEnv([Masked()]), Looks()).collect(ring, 2)
    assert seen[0].tolist() == [[True, False]]
    assert ring.get()[schema.ACTION_MASK].shape == (2, 1, 2)
