"""From the experience that an algorithm declares to the collection that gathers it."""

from typing import Any

import pytest
from worlds import Counting

from deft.algorithms.grpo import GRPO
from deft.algorithms.ppo import PPO
from deft.config.settings import TrainerConfig
from deft.data.rollout import RolloutBuffer, VLABuffer
from deft.envs.serial import SerialVectorEnv
from deft.errors import InputError
from deft.models.actor_critic import ActorCritic
from deft.training.collection import BackgroundCollection, Collection
from deft.training.experience import make_collection, steps_per_update
from deft.training.group_collection import GroupCollection


def collection(kind: type, num_envs: int = 4, **settings: Any) -> Collection:
    env = SerialVectorEnv([Counting() for _ in range(num_envs)])
    policy = ActorCritic(env.observation_space, env.action_space)
    return make_collection(env, policy, kind(policy), TrainerConfig(rollout_steps=8, **settings), 0, True, 64, 5.0)


def test_each_kind_of_experience_has_its_collection() -> None:
    standard = collection(PPO)
    assert type(standard) is Collection
    assert isinstance(standard.buffer, RolloutBuffer)
    background = collection(PPO, buffer_type="vla", max_staleness=2)
    assert isinstance(background, BackgroundCollection)
    assert isinstance(background.buffer, VLABuffer)
    assert background.buffer.capacity == 16  # two rollouts of 8 steps
    groups = collection(GRPO)
    assert isinstance(groups, GroupCollection)
    assert groups.groups_at_once == 1  # four environments, groups of four


def test_groups_are_not_collected_in_the_background() -> None:
    with pytest.raises(InputError, match="buffer_type: grpo collects and learns in turns"):
        collection(GRPO, buffer_type="vla")


def test_a_rollout_has_the_length_of_the_settings() -> None:
    env = Counting()
    assert steps_per_update(PPO(ActorCritic(env.observation_space, env.action_space)), 32) == 32
