"""Cal-QL's online phase; the losses themselves are those of `test_cql.py`."""

import copy

import pytest
import torch
from offline_worlds import random_batch, small_actor

from deft import schema
from deft.algorithms.cal_ql import CalQL
from deft.algorithms.cql import CQL
from deft.algorithms.sac import SAC
from deft.config.algorithm_settings import CalQLSettings, CQLSettings


def cal_ql(**settings) -> CalQL:
    policy = small_actor(3, 2, "tanh_gaussian", normalize_observation=False)
    return CalQL(policy, CalQLSettings(cql_samples=2, **settings))


def calibrated_batch(level: float = 0.5) -> dict:
    return {**random_batch(16), schema.VALUE_TARGET: torch.full((16,), level)}


def test_an_update_is_that_of_calibrated_cql():
    torch.manual_seed(0)
    online = cal_ql(weight_decay=1e-6)
    offline = CQL(copy.deepcopy(online.policy), CQLSettings(cql_samples=2, cal_ql=True))
    offline.load_critics(online.state_dict())
    batch, metrics = calibrated_batch(), []
    for algorithm in (online, offline):
        torch.manual_seed(1)
        metrics.append({name: float(value) for name, value in algorithm.step(batch).items()})
    assert metrics[0] == metrics[1]
    for own, theirs in zip(online.critics.parameters(), offline.critics.parameters(), strict=True):
        assert torch.equal(own, theirs)


def test_the_bound_has_the_scale_of_the_rewards():
    """Returns far above every Q replace the values of the policy's actions, so that log Σ exp is about G.

    With G = 50 the gap is above 40; with rewards, and so returns, at a hundredth it is below 10.
    """
    gaps = []
    for scale in (1.0, 0.01):
        torch.manual_seed(0)
        algorithm = cal_ql()
        algorithm.policy.reward_scale.fill_(scale)
        gaps.append(float(algorithm.step(calibrated_batch(50.0))["cql_gap"]))
    assert gaps[0] > 40 > 10 > gaps[1]


def test_it_asks_for_returns_and_a_mix_of_data():
    experience = cal_ql(prior_data="data", prior_fraction=0.25).experience
    assert (experience.returns, experience.prior_data, experience.prior_fraction) == (True, "data", 0.25)
    assert cal_ql(cal_ql=False).experience.returns is False  # then it is plain CQL, which needs none


def test_critics_temperature_and_factor_are_those_of_the_offline_run():
    offline = CQL(small_actor(3, 2, "tanh_gaussian"), CQLSettings(cql_samples=2))
    offline.log_alpha.data.fill_(-1.5)
    offline.log_factor.data.fill_(0.7)
    algorithm = cal_ql()
    algorithm.start_from_a_policy()
    assert float(algorithm.log_alpha.detach().exp()) == pytest.approx(0.05)
    algorithm.load_critics(offline.state_dict())
    assert (float(algorithm.log_alpha.detach()), float(algorithm.log_factor.detach())) == pytest.approx((-1.5, 0.7))
    for own, theirs in zip(algorithm.critics.parameters(), offline.critics.parameters(), strict=True):
        assert torch.equal(own, theirs)
    algorithm.load_critics(SAC(small_actor(3, 2, "tanh_gaussian")).state_dict())  # which has no factor
    assert float(algorithm.log_alpha.detach()) == 0.0


def test_the_warm_up_trains_the_critics_alone():
    algorithm = cal_ql(critic_warmup=2)
    actor = [parameter.detach().clone() for parameter in algorithm.policy.actor.parameters()]
    moved = []
    for _ in range(3):
        algorithm.step(calibrated_batch())
        now = algorithm.policy.actor.parameters()
        moved.append(any(not torch.equal(a, b) for a, b in zip(actor, now, strict=True)))
    assert moved == [False, False, True]
