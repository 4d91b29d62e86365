"""The Box is saved with a policy: weights act on the scale that they were trained for, wherever they are loaded."""

import numpy as np
import pytest
import torch
from gymnasium import spaces
from policies import actor_policy
from tensordict import TensorDict

from deft import schema
from deft.errors import InputError
from deft.models.action_scale import with_bounds
from deft.models.decision_transformer import DecisionTransformerPolicy
from deft.models.distributions import GaussianHead

OBSERVATIONS = spaces.Box(-np.inf, np.inf, (3,), np.float32)
UNIT, WIDE = spaces.Box(-1, 1, (2,), np.float32), spaces.Box(-3, 3, (2,), np.float32)


def first_action(policy) -> torch.Tensor:
    td = TensorDict({schema.OBSERVATION: torch.ones(1, 3), schema.PREVIOUS_REWARD: torch.zeros(1)}, [1])
    if policy.recurrent:
        td.set(schema.MEMORY, policy.initial_memory(1))
    return policy.act(td, deterministic=True)[schema.ACTION]


@pytest.mark.parametrize("kind", [actor_policy, DecisionTransformerPolicy])
@pytest.mark.parametrize(("trained", "rebuilt"), [(WIDE, UNIT), (UNIT, WIDE)])
def test_loaded_weights_act_as_they_were_trained(kind, trained, rebuilt):
    policy, other = kind(OBSERVATIONS, trained), kind(OBSERVATIONS, rebuilt)
    other.load_state_dict(policy.state_dict())
    assert getattr(other, "head", other).is_unit == (trained is UNIT)
    assert torch.equal(first_action(other), first_action(policy))


def test_a_member_taken_out_has_the_box_that_was_loaded():
    policy, other = (actor_policy(OBSERVATIONS, space, num_members=2) for space in (WIDE, UNIT))
    other.load_state_dict(policy.state_dict())
    assert torch.equal(first_action(other.member(1)), first_action(policy.member(1)))


def test_an_online_policys_gaussian_too():
    head, other = GaussianHead(WIDE, 0.0), GaussianHead(UNIT, 0.0)
    other.load_state_dict(head.state_dict())
    output = torch.tensor([[0.5, -0.25]])
    actions = [one.sample(output, None, deterministic=True)[0].tolist() for one in (head, other)]
    assert actions == [[[1.5, -0.75]]] * 2  # three times as much


def test_a_policy_acts_in_another_box_as_far_as_the_two_overlap(caplog):
    policy = actor_policy(OBSERVATIONS, WIDE)
    policy.check_box(WIDE)
    assert not caplog.messages
    policy.check_box(UNIT)
    assert "action dim 0: the policy acts between -3 and 3, the environment takes -1 to 1: what lies" in caplog.text
    with caplog.at_level("INFO"):
        policy.check_box(spaces.Box(-9, 9, (2,), np.float32))
    assert "keeps its own action range" in caplog.messages[-1]
    with pytest.raises(
        InputError, match="dim 1: the policy acts between -3 and 3, the environment takes 4 to 5: the two"
    ):
        policy.check_box(spaces.Box(np.array([-3, 4], np.float32), np.array([3, 5], np.float32)))
    with pytest.raises(InputError, match="made for actions of 2 numbers"):
        policy.check_box(spaces.Box(-3, 3, (1,), np.float32))


def test_weights_bring_their_scale_into_a_box_without_bounds(caplog):
    policy, unbounded = actor_policy(OBSERVATIONS, WIDE), spaces.Box(-np.inf, np.inf, (2,), np.float32)
    other = actor_policy(OBSERVATIONS, with_bounds(unbounded))
    other.load_state_dict(policy.state_dict())
    other.check_box(unbounded)  # nothing is clipped
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    assert torch.equal(first_action(other), first_action(policy))


def boxed(*bounds: tuple[float, float]) -> spaces.Box:
    return spaces.Box(*(np.array(side, np.float32) for side in zip(*bounds, strict=True)))


@pytest.mark.filterwarnings("error")
def test_a_dim_with_equal_bounds_is_checked_by_itself(caplog):
    """In float32 100 ± 1e-6 is 100: the range has the width 0, and 0 / 0 must not hide the other dims."""
    policy = actor_policy(OBSERVATIONS, boxed((-1, 1), (100, 100), (50, 60)))
    policy.check_box(boxed((-1, 1), (0, 100), (50, 60)))  # at the upper bound of the environment
    policy.check_box(boxed((-1, 1), (0, 200), (50, 60)))
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    with pytest.raises(InputError, match="dim 2: the policy acts between 50 and 60, the environment takes -1 to 1"):
        policy.check_box(boxed((-1, 1), (0, 100), (-1, 1)))
    with pytest.raises(InputError, match="dim 1: the policy acts between 100 and 100, the environment takes 0 to 99"):
        policy.check_box(boxed((-1, 1), (0, 99), (50, 60)))


@pytest.mark.filterwarnings("error")
def test_weights_with_a_dim_of_equal_bounds_are_compared_by_the_others():
    policy = actor_policy(OBSERVATIONS, boxed((-1, 1), (100, 100), (50, 60)))
    assert policy.misfit(boxed((-1, 1), (100, 100), (50, 60))) is None
    # 50 … 60 has the centre 55 and the half width 5: 75 is 4 of them away.
    found = policy.misfit(boxed((-1, 1), (100, 100), (50, 75)))
    assert found is not None
    assert "in action dim 2" in found[0]
    assert found[1] == pytest.approx(4.0)


def test_a_chunk_is_several_actions_of_a_box(caplog):
    chunks = actor_policy(OBSERVATIONS, spaces.Box(-3, 3, (2, 2), np.float32))
    chunks.head.chunk_length = 2
    chunks.check_box(WIDE)
    assert not caplog.messages
