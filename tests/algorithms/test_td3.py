import copy
import math

import pytest
import torch
from offline_worlds import batch_of, random_batch, schema_row, set_known_networks, small_actor

from deft import schema
from deft.algorithms.rebrac import ReBRAC
from deft.algorithms.td3 import TD3
from deft.algorithms.td3_bc import TD3BC
from deft.config.algorithm_settings import ReBRACSettings, TD3Settings
from deft.errors import InputError

# The second transition terminates, and its stored action −1.5 is executed as −1.
BATCH = batch_of([1.0, -1.0], [0.5, -1.5], [1.0, 2.0], [2.0, 3.0], [0.0, 1.0])


def td3(observation_dim: int = 1, action_dim: int = 1, **settings) -> TD3:
    return TD3(small_actor(observation_dim, action_dim, normalize_observation=False), TD3Settings(**settings))


def test_losses_of_one_update_by_hand():
    algorithm = td3(gamma=0.9, policy_noise=0.0, policy_delay=1)
    set_known_networks(algorithm)
    metrics = algorithm.step(BATCH)
    # Targets 1 + 0.9 min(2 + 1, 4) = 3.7 and 2. Q₁ = (1 + 1, −1 − 2) = (2, −3), Q₂ = (2, −4).
    errors = [1.7**2 + 1.7**2, 5.0**2 + 6.0**2]
    assert float(metrics["q_loss"]) == pytest.approx(sum(errors) / 2, rel=1e-5)
    assert float(metrics["mean_q"]) == pytest.approx((2 - 3 + 2 - 4) / 4, rel=1e-5)
    assert float(metrics["policy_loss"]) == pytest.approx(0.0, abs=1e-6)  # −mean Q₁(s, 0) = −(1 − 1) / 2


def test_rewards_are_scaled_as_for_the_critics_that_are_loaded():
    policy = small_actor()
    policy.reward_scale.fill_(10.0)
    algorithm = TD3(policy, TD3Settings())
    algorithm.start_from_a_policy()
    assert algorithm._read(BATCH)[3].tolist() == [[1.0, 2.0]]
    algorithm.load_critics(TD3BC(small_actor()).state_dict())
    assert algorithm._read(BATCH)[3].tolist() == [[10.0, 20.0]]


def test_it_explores_with_the_noise_that_is_set():
    algorithm = td3(2, 1, exploration_noise=0.3)
    rows = schema_row(torch.zeros(20_000, 2))
    torch.manual_seed(0)
    policy = algorithm.policy
    acted, mean = (policy.act(rows.clone(), deterministic)[schema.ACTION].detach() for deterministic in (False, True))
    assert float((acted - mean).std()) == pytest.approx(0.3, rel=0.03)
    before = [parameter.clone() for parameter in policy.noise_parameters()]
    for _ in range(4):
        algorithm.step(random_batch(observation_dim=2, action_dim=1))
    assert all(torch.equal(a, b) for a, b in zip(before, policy.noise_parameters(), strict=True))


def test_a_resumed_run_may_have_another_noise_and_continues_bit_for_bit_otherwise():
    torch.manual_seed(0)
    algorithm = td3(3, 2)
    batches = [random_batch() for _ in range(5)]
    for batch in batches[:3]:
        algorithm.step(batch)
    other = td3(3, 2, exploration_noise=0.5)
    other.policy.load_state_dict(algorithm.policy.state_dict())
    other.load_state_dict(copy.deepcopy(algorithm.state_dict()))
    assert [float(value.detach().mean()) for value in other.policy.noise_parameters()] == pytest.approx([math.log(0.5)])
    for one in (algorithm, other):
        torch.manual_seed(1)
        for batch in batches[3:]:
            metrics = one.step(batch)
    for own, theirs in zip(algorithm.policy.actor.parameters(), other.policy.actor.parameters(), strict=True):
        assert torch.equal(own, theirs)
    assert metrics.keys() == {"q_loss", "mean_q", "policy_loss"}


def test_the_warm_up_trains_the_critics_alone():
    algorithm = td3(3, 2, critic_warmup=4)
    actor = [parameter.detach().clone() for parameter in algorithm.policy.actor.parameters()]
    moved = []
    for _ in range(6):
        algorithm.step(random_batch())
        now = algorithm.policy.actor.parameters()
        moved.append(any(not torch.equal(a, b) for a, b in zip(actor, now, strict=True)))
    # The policy learns in every second update, first in the sixth: those up to version 3 are the warm-up.
    assert moved == [False] * 5 + [True]


@pytest.mark.parametrize("source", [TD3BC, lambda policy: ReBRAC(policy, ReBRACSettings())])
def test_critics_of_its_offline_relatives_are_loaded(source):
    offline = source(small_actor(3, 2))
    algorithm = td3(3, 2, critic_layer_norm=offline.settings.critic_layer_norm)
    algorithm.load_critics(offline.state_dict())
    for own, theirs in zip(algorithm.critics.parameters(), offline.critics.parameters(), strict=True):
        assert torch.equal(own, theirs)


def test_a_squashed_gaussian_is_rejected():
    with pytest.raises(InputError, match=r"td3 explores with one standard deviation.*or train it with sac"):
        TD3(small_actor(distribution="tanh_gaussian"))
