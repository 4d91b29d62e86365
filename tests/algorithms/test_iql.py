import copy
import math

import numpy as np
import pytest
import torch
from gymnasium import spaces
from offline_worlds import (
    assert_members_train_as_if_alone,
    batch_of,
    learned_actions,
    make_linear,
    random_batch,
    schema_row,
    small_actor,
    two_step_dataset,
)
from torch.nn import functional

from deft import schema
from deft.algorithms.iql import IQL
from deft.config.algorithm_settings import IQLSettings
from deft.config.settings import DatasetPolicyConfig
from deft.data.datasets.dataset import box
from deft.errors import InputError

FAST = {"learning_rate": 3e-3, "tau": 0.05}


def known_iql(**settings) -> IQL:
    """Observation s and action a of one dim; V = 2s − 1, Q = (s, 4a), Q̄ = (s + a, 0), π = N(tanh s, 0.5)."""
    algorithm = IQL(small_actor(), IQLSettings(gamma=0.9, learning_rate_schedule="constant", **settings))
    make_linear(algorithm.policy.value, 0, [[2.0]], [-1.0])
    make_linear(algorithm.policy.actor, 0, [[1.0]], [0.0])
    make_linear(algorithm.critics.online, 0, [[1.0], [0.0]], [0.0])
    make_linear(algorithm.critics.online, 1, [[0.0], [4.0]], [0.0])
    make_linear(algorithm.critics.target, 0, [[1.0], [1.0]], [0.0])
    make_linear(algorithm.critics.target, 1, [[0.0], [0.0]], [0.0])
    with torch.no_grad():
        algorithm.policy.head.log_std.fill_(math.log(0.5))
    return algorithm


# The second transition terminates: its V(s') = 5 must not be in the target.
BATCH = batch_of([1.0, -1.0], [0.5, -0.5], [1.0, 2.0], [2.0, 3.0], [0.0, 1.0])


def log_normal(x: float, mean: float, deviation: float) -> float:
    return -0.5 * ((x - mean) / deviation) ** 2 - math.log(deviation) - 0.5 * math.log(2 * math.pi)


@pytest.mark.parametrize(("temperature", "clipped"), [(2.0, False), (4.0, True)])
def test_losses_of_one_update_by_hand(temperature, clipped):
    metrics = known_iql(expectile=0.7, temperature=temperature).update(iter([BATCH]))
    # V(s) = (1, −3); min Q̄ = (min(1.5, 0), min(−1.5, 0)) = (0, −1.5); u = (−1, 1.5).
    assert float(metrics["mean_q"]) == pytest.approx(-0.75)
    assert float(metrics["mean_advantage"]) == pytest.approx(0.25)
    # |0.7 − 1(u < 0)| u² = 0.3 · 1 and 0.7 · 2.25
    assert float(metrics["v_loss"]) == pytest.approx((0.3 + 0.7 * 2.25) / 2)
    # Targets r + 0.9 V(s') = 1 + 0.9 · 3 and 2; critics (1, −1) and (2, −2).
    squares = [(1 - 3.7) ** 2, (-1 - 2) ** 2, (2 - 3.7) ** 2, (-2 - 2) ** 2]
    assert float(metrics["q_loss"]) == pytest.approx(sum(squares) / 4)
    # β = 4: exp(6) = 403 is clipped at 100.
    weights = [math.exp(-temperature), 100.0 if clipped else math.exp(1.5 * temperature)]
    assert clipped == (math.exp(1.5 * temperature) > 100)
    assert float(metrics["mean_weight"]) == pytest.approx(sum(weights) / 2)
    log_probs = [log_normal(0.5, math.tanh(1), 0.5), log_normal(-0.5, math.tanh(-1), 0.5)]
    expected = -(weights[0] * log_probs[0] + weights[1] * log_probs[1]) / 2
    assert float(metrics["policy_loss"]) == pytest.approx(expected, rel=1e-5)


def test_the_return_in_place_of_the_critics_weighs_the_actions_alone():
    batch = {**BATCH, schema.VALUE_TARGET: torch.tensor([1.5, -3.5])}
    settings = {"expectile": 0.7, "temperature": 2.0}
    metrics = known_iql(**settings, advantage="return").update(iter([batch]))
    # V(s) = (1, −3), so G − V = (0.5, −0.5): weights e and 1/e
    assert float(metrics["mean_advantage"]) == pytest.approx(0.0, abs=1e-6)
    assert float(metrics["mean_weight"]) == pytest.approx(math.cosh(1.0))
    actions = [log_normal(0.5, math.tanh(1.0), 0.5), log_normal(-0.5, math.tanh(-1.0), 0.5)]
    assert float(metrics["policy_loss"]) == pytest.approx(-(math.e * actions[0] + actions[1] / math.e) / 2)
    for name in ("v_loss", "q_loss"):  # these depend on the critics
        assert float(metrics[name]) == pytest.approx(float(known_iql(**settings).update(iter([BATCH]))[name]))


def test_weights_follow_a_plain_restatement():
    """Three updates with torch's own AdamW, one optimizer and one backward pass a loss."""
    torch.manual_seed(1)
    settings = IQLSettings(expectile=0.8, temperature=2.0, learning_rate=1e-3, learning_rate_schedule="constant")
    algorithm = IQL(small_actor(3, 2), settings)
    plain = copy.deepcopy((algorithm.policy, algorithm.critics))
    policy, critics = plain
    groups = [policy.value.parameters(), critics.online.parameters(), policy.actor_parameters()]
    optimizers = [torch.optim.AdamW(list(group), 1e-3, weight_decay=1e-6) for group in groups]
    for _ in range(3):
        batch = random_batch()
        observation, action = batch[schema.OBSERVATION], batch[schema.ACTION]
        following = batch[schema.NEXT_OBSERVATION]

        def mlp(network, index, x):
            for layer in range(3):
                x = x @ network.weights[layer][index] + network.biases[layer][index]
                x = functional.relu(x) if layer < 2 else x
            return x

        both = torch.cat([observation, action], -1)
        target = torch.minimum(mlp(critics.target, 0, both), mlp(critics.target, 1, both))[:, 0].detach()
        value, next_value = mlp(policy.value, 0, observation)[:, 0], mlp(policy.value, 0, following)[:, 0].detach()
        advantage = target - value
        v_loss = (torch.abs(0.8 - (advantage < 0).float()) * advantage**2).mean()
        backup = batch[schema.NEXT_REWARD] + 0.99 * (1 - batch[schema.NEXT_TERMINATED]) * next_value
        q_loss = sum(functional.mse_loss(mlp(critics.online, i, both)[:, 0], backup) for i in (0, 1)) / 2
        normal = torch.distributions.Normal(mlp(policy.actor, 0, observation).tanh(), policy.head.log_std[0].exp())
        weight = torch.exp(2.0 * advantage.detach()).clamp(max=100)
        policy_loss = -(weight * normal.log_prob(action).sum(-1)).mean()
        for loss, optimizer in zip((v_loss, q_loss, policy_loss), optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            for slow, quick in zip(critics.target.parameters(), critics.online.parameters(), strict=True):
                slow.copy_(0.995 * slow + 0.005 * quick)
        algorithm.update(iter([batch]))
    for own, other in zip((algorithm.policy, algorithm.critics), plain, strict=True):
        for name, value in own.state_dict().items():
            torch.testing.assert_close(value, other.state_dict()[name], atol=1e-6, rtol=1e-5, msg=name)


def test_the_log_prob_that_is_trained_is_that_of_the_actions_it_takes():
    space = spaces.Box(np.array([-2, 0], np.float32), np.array([2, 1], np.float32))
    policy = small_actor(3, 2, action_space=space, log_std_init=-1.5)
    observation = torch.randn(1, 3)
    td = policy.act(schema_row(observation.expand(20_000, 3).contiguous()))
    unit = policy.to_unit(td[schema.ACTION])
    mean = policy.mean(policy.encode(observation))[0, 0]
    # 20 000 draws: the mean's deviation is 0.22 / √20 000 = 0.0016; five of them allowed.
    assert (unit.mean(0) - mean).abs().max() < 0.008
    assert (unit.std(0) - math.exp(-1.5)).abs().max() < 0.008
    trained = policy.log_prob(policy.encode(observation), unit.unsqueeze(0))[0]
    by_hand = torch.distributions.Normal(mean, math.exp(-1.5)).log_prob(unit).sum(-1)
    torch.testing.assert_close(trained, by_hand, atol=1e-4, rtol=1e-4)
    # The Box is 2 and 0.5 times as wide as the unit actions: log widths sum to 0, so acting says the same.
    torch.testing.assert_close(td[schema.LOG_PROB], trained, atol=1e-4, rtol=1e-4)
    best = policy.act(schema_row(observation), deterministic=True)[schema.ACTION]
    torch.testing.assert_close(policy.to_unit(best)[0], mean)  # where the trained density is highest


def test_the_target_moves_by_tau_after_the_step():
    algorithm = IQL(small_actor(3, 2), IQLSettings(tau=0.25))
    before = [parameter.clone() for parameter in algorithm.critics.target.parameters()]
    algorithm.update(iter([random_batch()]))
    for old, new, online in zip(
        before, algorithm.critics.target.parameters(), algorithm.critics.online.parameters(), strict=True
    ):
        torch.testing.assert_close(new, 0.75 * old + 0.25 * online)


def test_learns_where_cloning_fails():
    # Three seeds at once, as members of one update.
    settings = IQLSettings(**FAST, reward_scaling="none", temperature=10.0)
    assert min(learned_actions(IQL(small_actor(2, 1, members=3), settings))) > 0.4
    # With the dataset's own returns, 1 and 0, in place of the critics' values it must find the same.
    settings = IQLSettings(**FAST, reward_scaling="none", temperature=10.0, advantage="return")
    assert min(learned_actions(IQL(small_actor(2, 1, members=3), settings))) > 0.4
    # With temperature 0 every weight is 1: behaviour cloning finds the mean, 0.3 · 0.6 − 0.7 · 0.6 = −0.24.
    settings = IQLSettings(**FAST, reward_scaling="none", temperature=0.0)
    assert learned_actions(IQL(small_actor(2, 1, members=3), settings)) == pytest.approx([-0.24] * 3, abs=0.1)


def test_rewards_are_scaled_by_the_range_of_returns():
    # Returns of the dataset are 0 and 1: rewards are multiplied by 1000 / (1 − 0).
    dataset = two_step_dataset()
    for scaling, largest in (("none", 1.0), ("return_range", 1000.0)):
        algorithm = IQL(small_actor(2, 1), IQLSettings(reward_scaling=scaling))
        sampler = algorithm.make_sampler(dataset, 0, torch.device("cpu"), 0)
        algorithm.prepare(dataset, sampler, fresh=True)
        assert float(sampler.sample(256)[schema.NEXT_REWARD].max()) == largest


@pytest.mark.parametrize(
    ("reward", "terminates", "is_constant"), [(0.0, True, True), (1.0, False, True), (1.0, True, False)]
)
def test_a_constant_reward_is_an_error_unless_it_is_allowed(reward, terminates, is_constant):
    """A reward of 1 at each step says how long an episode lasts, where it can terminate (CartPole)."""
    dataset = two_step_dataset()
    dataset.table.reward[dataset.table.transition_rows()] = reward
    if not terminates:
        dataset.table.terminated.zero_()
    for allowed in (False, True):
        algorithm = IQL(small_actor(2, 1), IQLSettings(allow_constant_reward=allowed))
        sampler = algorithm.make_sampler(dataset, 0, torch.device("cpu"), 0)
        if is_constant and not allowed:
            with pytest.raises(InputError, match=rf"every reward is {reward:g}, .*--allow_constant_reward"):
                algorithm.prepare(dataset, sampler, fresh=True)
        else:
            algorithm.prepare(dataset, sampler, fresh=True)


def test_rewards_that_sum_to_the_same_are_not_constant():
    dataset = two_step_dataset()
    dataset.table.rows.view(200, 3, 5)[:, :2, 3] = torch.tensor([1.0, -1.0])  # every return is 0
    algorithm = IQL(small_actor(2, 1))
    algorithm.prepare(dataset, algorithm.make_sampler(dataset, 0, torch.device("cpu"), 0), fresh=True)


def test_equal_returns_leave_the_rewards_and_log_a_warning(caplog):
    dataset = two_step_dataset()
    dataset.table.reward.zero_()
    algorithm = IQL(small_actor(2, 1), IQLSettings(allow_constant_reward=True))
    sampler = algorithm.make_sampler(dataset, 0, torch.device("cpu"), 0)
    algorithm.prepare(dataset, sampler, fresh=True)
    assert "every episode has the return 0" in caplog.text
    assert float(sampler.sample(256)[schema.NEXT_REWARD].abs().max()) == 0.0


def test_the_policy_rate_falls_along_a_cosine():
    algorithm = IQL(small_actor(3, 2), IQLSettings(learning_rate=1e-3))
    rates = []
    for progress in (0.0, 1 / 3, 0.5, 1.0):
        algorithm.progress = progress
        algorithm.update(iter([random_batch()]))
        rates.append(float(algorithm.actor_optimizer.param_groups[0]["lr"]))
    # (1 + cos π t) / 2 at t = 0, 1/3, 1/2, 1
    assert rates == pytest.approx([1e-3, 0.75e-3, 0.5e-3, 0.0], abs=1e-9)
    assert float(algorithm.critic_optimizer.param_groups[0]["lr"]) == pytest.approx(1e-3)


def test_members_train_as_if_alone():
    settings = IQLSettings(num_critics=3, learning_rate=1e-3)
    assert_members_train_as_if_alone(IQL(small_actor(3, 2, members=3), settings))


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without bf16 units: slower, and as close
@pytest.mark.parametrize("layer_norm", [False, True])
def test_bf16_is_close_to_float32(layer_norm):
    results = {}
    for precision in ("float32", "bf16"):
        torch.manual_seed(0)
        settings = IQLSettings(precision=precision, critic_layer_norm=layer_norm)
        algorithm = IQL(
            IQL.make_policy(box(3), box(2, -1.0, 1.0), DatasetPolicyConfig(hidden_dim=16), settings), settings
        )
        torch.manual_seed(1)
        metrics = [algorithm.update(iter([random_batch(64)])) for _ in range(5)][-1]
        results[precision] = {name: float(value) for name, value in metrics.items()}
        assert {parameter.dtype for parameter in algorithm.policy.parameters()} == {torch.float32}
    # bf16 keeps 8 bits: relative errors of 0.4 % a product.
    assert results["bf16"] == pytest.approx(results["float32"], rel=0.03, abs=0.01)
    assert results["bf16"] != results["float32"]
