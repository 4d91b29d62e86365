"""Weights under the names of the previous version, which kept scale and deviation outside the head."""

import pytest
import torch
from gymnasium import spaces
from policies import actor_policy, vla_policy
from tensordict import TensorDict
from vla_worlds import PlainModel

from deft import schema
from deft.algorithms.td3_bc import TD3BC
from deft.config.loading import resolve
from deft.config.settings import DatasetPolicyConfig, PolicyConfig
from deft.models.actor_critic import ActorCritic
from deft.models.vla.policy import VLAPolicy
from deft.runs.checkpoint import load_weights

OBSERVATION, ACTION = spaces.Box(-1, 1, (3,)), spaces.Box(-2, 4, (2,))
SMALL = DatasetPolicyConfig(hidden_dim=8)
STREAMS = spaces.Dict({"proprio": spaces.Box(-1, 1, (3,))})


def of_previous_version(weights):
    """The weights of an actor as the previous version named them."""
    old = {"head.center": "center", "head.width": "width", "head.log_std": "log_std"}
    return {old.get(name, name): value for name, value in weights.items()}


def act(policy):
    observation = TensorDict({schema.OBSERVATION: torch.ones(4, 3)}, [4])
    return policy.act(observation, deterministic=True)[schema.ACTION]


@pytest.mark.parametrize("distribution", ["gaussian", "tanh_gaussian"])
def test_an_actor_loads_the_names_of_the_previous_version(distribution):
    policy, other = (actor_policy(OBSERVATION, ACTION, SMALL, distribution) for _ in range(2))
    old = of_previous_version(policy.state_dict())
    assert {"center", "width", "reward_scale"} <= old.keys()
    load_weights(other, old, "run")
    assert torch.equal(act(other), act(policy))


def test_a_policy_of_ppo_gets_the_reward_scale_1():
    policy, other = (ActorCritic(OBSERVATION, ACTION, PolicyConfig()) for _ in range(2))
    old = {name: value for name, value in policy.state_dict().items() if name != "reward_scale"}
    load_weights(other, old, "run")
    assert torch.equal(act(other), act(policy))
    assert float(other.reward_scale) == 1.0


def test_a_target_policy_in_the_state_of_an_algorithm_loads_too():
    policy, other = (TD3BC(actor_policy(OBSERVATION, ACTION, SMALL)) for _ in range(2))
    state = policy.state_dict()
    state["target_policy"] = of_previous_version(state["target_policy"])
    other.load_state_dict(state)
    assert torch.equal(act(other.target_policy), act(policy.target_policy))


def test_a_vla_policy_of_ppo_loads_without_reward_scale():
    policy, other = VLAPolicy(PlainModel(), chunk_length=1), VLAPolicy(PlainModel(), chunk_length=1)
    old = {name: value for name, value in policy.state_dict().items() if name != "reward_scale"}
    load_weights(other, old, "run")
    assert other.state_dict().keys() == policy.state_dict().keys()


def test_reward_statistics_come_and_go_with_the_algorithm():
    with_statistics = ActorCritic(OBSERVATION, ACTION, PolicyConfig())
    without = ActorCritic(OBSERVATION, ACTION, PolicyConfig(normalize_reward=False))
    load_weights(without, with_statistics.state_dict(), "run")
    load_weights(with_statistics, without.state_dict(), "run")
    assert torch.equal(act(with_statistics), act(without))


def test_a_nested_actor_section_is_read():
    actor = {"name": "actor", "hidden_dim": 32, "num_layers": 2, "distribution": "gaussian"}
    config = resolve({"algorithm": "ppo", "policy": {"name": "actor", "normalize_reward": True, "actor": actor}})
    assert (config.policy.name, config.policy.hidden_dim) == ("actor", 32)
    assert config.policy.distribution == "gaussian"
    assert not config.policy.normalize_reward  # as the previous version trained it
    assert resolve({"algorithm": "ppo", "policy": {"name": "actor_critic", "actor": None}}).policy == PolicyConfig()


def test_separate_value_is_part_of_the_weights():
    model = PlainModel()
    action = spaces.Box(-1, 1, (2,))
    policy = vla_policy(model, STREAMS, action, SMALL)
    assert {"model", "encoder", "value", "center", "width", "reward_scale"} == {
        name.partition(".")[0] for name in policy.state_dict()
    }
