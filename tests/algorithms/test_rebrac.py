import copy

import numpy as np
import pytest
import torch
from gymnasium import spaces
from offline_worlds import (
    assert_members_train_as_if_alone,
    batch_of,
    learned_actions,
    random_batch,
    set_known_networks,
    small_actor,
)
from shared_data import shared_data

from deft import schema
from deft.algorithms.rebrac import ReBRAC, squared_distance
from deft.config.algorithm_settings import ReBRACSettings
from deft.config.settings import DatasetPolicyConfig
from deft.data.datasets import load_dataset
from deft.data.datasets.dataset import Dataset, Episode, box
from deft.data.replay import ReplayBuffer, TransitionTable
from deft.data.streaming import StreamingBuffer

FAST = {"learning_rate": 3e-3, "tau": 0.05}


def known_batch() -> dict:
    """Two transitions: the action after the first one is 0.5, and the data ends after the second one."""
    batch = batch_of([1.0, -1.0], [0.5, -0.5], [1.0, 2.0], [2.0, 3.0], [0.0, 0.0])
    batch[schema.NEXT_ACTION] = torch.tensor([[0.5], [-1.0]])
    batch[schema.NEXT_STEP_MASK] = torch.tensor([[True], [False]])
    return batch


def known(**settings) -> ReBRAC:
    """Q = (s + 2a, 4a), Q̄ = (s + a, 4); π(s) = tanh(0) = 0, π̄(s) = tanh(20) = 1."""
    options = {"gamma": 0.9, "policy_noise": 0.0, "policy_delay": 1, "critic_layer_norm": False, **settings}
    algorithm = ReBRAC(small_actor(), ReBRACSettings(**options))
    set_known_networks(algorithm)
    return algorithm


def test_losses_of_one_update_by_hand():
    metrics = known(policy_bc_coef=0.1, critic_bc_coef=0.4).update(iter([known_batch()]))
    # min Q̄(s', 1) = min(2 + 1, 4) = 3 and min(3 + 1, 4) = 4. ‖ã − a'‖² = (1 − 0.5)² = 0.25, and none for the second.
    # Targets 1 + 0.9 (3 − 0.4 · 0.25) = 3.61 and 2 + 0.9 · 4 = 5.6; both critics have the values 2 and −2.
    assert float(metrics["q_loss"]) == pytest.approx(2 * (1.61**2 + 7.6**2) / 2, rel=1e-5)
    # π(s) = 0: min Q(s, 0) = min(s, 0) = (0, −1), the mean −½ and the mean magnitude ½; ‖0 − a‖² = 0.25.
    assert float(metrics["bc_loss"]) == pytest.approx(0.25)
    assert float(metrics["policy_loss"]) == pytest.approx(0.1 * 0.25 + 0.5 / 0.5, rel=1e-5)


def test_q_is_not_normalised_where_that_is_off():
    metrics = known(policy_bc_coef=0.1, normalize_q=False).update(iter([known_batch()]))
    assert float(metrics["policy_loss"]) == pytest.approx(0.1 * 0.25 + 0.5, rel=1e-5)


def test_without_a_critic_penalty_the_target_is_that_of_td3():
    # Targets 1 + 0.9 · 3 = 3.7 and 5.6.
    metrics = known(critic_bc_coef=0.0).update(iter([known_batch()]))
    assert float(metrics["q_loss"]) == pytest.approx(2 * (1.7**2 + 7.6**2) / 2, rel=1e-5)


def test_distances_are_sums_over_the_numbers_of_recorded_steps():
    chosen, recorded = torch.zeros(1, 2, 4), torch.tensor([[[1.0, 2.0, 3.0, 4.0]] * 2])
    mask = torch.tensor([[True, True], [True, False]])  # chunks of two steps of two numbers
    assert squared_distance(chosen, recorded, mask).tolist() == [[30.0, 5.0]]
    assert squared_distance(chosen, recorded, None).tolist() == [[30.0, 30.0]]


def test_the_policy_maximises_the_smaller_critic_near_the_data():
    algorithm = ReBRAC(small_actor(3, 2), ReBRACSettings(policy_delay=1, policy_bc_coef=0.3))
    algorithm.critic_optimizer.param_groups[0]["lr"].zero_()
    batch = random_batch(16)
    policy, critics = copy.deepcopy((algorithm.policy, algorithm.critics))
    algorithm.update(iter([batch]))
    state = policy.encode(batch[schema.OBSERVATION])
    chosen = policy.mean(state)
    q = critics(state.for_critics, chosen).amin(1)[0]
    distance = (chosen[0] - batch[schema.ACTION]).square().sum(-1)
    loss = (0.3 * distance - q / q.abs().mean().detach()).mean()
    gradients = torch.autograd.grad(loss, list(policy.actor.parameters()))
    for expected, parameter in zip(gradients, algorithm.policy.actor.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected, atol=1e-6, rtol=1e-5)


def test_batches_hold_the_next_action_of_the_same_episode():
    # Actions 1 … 5 in episodes of 3 and 2 steps: after 3 and 5 there is none.
    table = TransitionTable([3, 2], 1, 1)
    actions = torch.tensor([1.0, 2.0, 3.0, 0.0, 4.0, 5.0, 0.0]) / 10
    table.rows[:, 1] = actions
    buffer = ReplayBuffer(table, num_members=2)
    buffer.add_next_actions()
    batch = buffer.sample(64)
    assert batch[schema.NEXT_ACTION].shape == batch[schema.NEXT_STEP_MASK].shape == (2, 64, 1)
    seen = {
        (round(float(a) * 10), round(float(b) * 10) if known else None)
        for a, b, known in zip(
            batch[schema.ACTION].flatten(),
            batch[schema.NEXT_ACTION].flatten(),
            batch[schema.NEXT_STEP_MASK].flatten(),
            strict=True,
        )
    }
    assert seen == {(1, 2), (2, 3), (3, None), (4, 5), (5, None)}


class Numbered(Dataset):
    """One episode of five steps with the actions 0.1 … 0.5, read from disk."""

    def __init__(self) -> None:
        super().__init__("numbered", spaces.Dict({"state": box(1)}), box(1, -1.0, 1.0), np.array([5]))

    def episode(self, index: int) -> Episode:
        action = np.arange(1, 6, dtype=np.float32)[:, None] / 10
        ends = np.array([False] * 5)
        return Episode({"state": np.zeros((6, 1), np.float32)}, action, np.zeros(5, np.float32), ends, ends)


@pytest.mark.parametrize(
    ("length", "expected"),
    [
        (1, {1: [2], 2: [3], 3: [4], 4: [5], 5: [None]}),
        # Chunks of two: after [4, 5] and [5] the data ends, and after [3, 4] it has one step.
        (2, {1: [3, 4], 2: [4, 5], 3: [5, None], 4: [None, None], 5: [None, None]}),
    ],
)
def test_streamed_batches_hold_the_next_actions_too(length, expected):
    buffer = StreamingBuffer(Numbered(), chunk_length=length)
    buffer.add_next_actions()
    batch = buffer.sample(64)
    found = {}
    for action, following, mask in zip(
        batch[schema.ACTION], batch[schema.NEXT_ACTION], batch[schema.NEXT_STEP_MASK], strict=True
    ):
        steps = [
            round(float(step) * 10) if known else None for step, known in zip(following.flatten(), mask, strict=True)
        ]
        found[round(float(action.flatten()[0]) * 10)] = steps
    assert found == expected


def test_learns_where_cloning_fails():
    settings = ReBRACSettings(**FAST, policy_bc_coef=0.2)
    assert min(learned_actions(ReBRAC(small_actor(2, 1, members=3), settings))) > 0.4
    cloning = ReBRAC(small_actor(2, 1, members=3), ReBRACSettings(**FAST, policy_bc_coef=1e4))
    assert learned_actions(cloning) == pytest.approx([-0.24] * 3, abs=0.1)


def test_members_train_as_if_alone():
    settings = ReBRACSettings(policy_noise=0.0, num_critics=3)
    assert_members_train_as_if_alone(ReBRAC(small_actor(3, 2, members=3), settings))


def test_published_settings_are_the_defaults():
    settings = ReBRACSettings()
    assert (settings.batch_size, settings.learning_rate, settings.gamma, settings.tau) == (1024, 1e-3, 0.99, 0.005)
    assert (settings.critic_layer_norm, settings.normalize_q, settings.weight_decay) == (True, True, 0.0)
    assert (settings.policy_noise, settings.noise_clip, settings.policy_delay) == (0.2, 0.5, 2)


def test_a_real_d4rl_file():
    dataset = load_dataset(shared_data("d4rl/hopper_medium-v2.hdf5"))
    config = DatasetPolicyConfig(hidden_dim=32)
    policy = ReBRAC.make_policy(dataset.observation_space, dataset.action_space, config, ReBRACSettings())
    algorithm = ReBRAC(policy, ReBRACSettings())
    sampler = algorithm.make_sampler(dataset, 0, torch.device("cpu"), 0)
    algorithm.prepare(dataset, sampler, fresh=True)
    batch = sampler.sample(512)
    # A next action is missing at the ends of episodes alone.
    assert (~batch[schema.NEXT_STEP_MASK]).float().mean() < 0.05
    for _ in range(60):
        metrics = algorithm.update(sampler.batches(256))
    assert all(torch.isfinite(value) for value in metrics.values())
