import copy

import pytest
import torch
from offline_worlds import (
    assert_members_train_as_if_alone,
    batch_of,
    learned_actions,
    make_linear,
    random_batch,
    schema_row,
    set_known_networks,
    small_actor,
    two_step_dataset,
)
from torch.nn import functional

from deft import schema
from deft.algorithms.td3_bc import TD3BC
from deft.config.algorithm_settings import TD3BCSettings
from deft.config.settings import DatasetPolicyConfig
from deft.data.datasets.dataset import box

FAST = {"learning_rate": 3e-3, "tau": 0.05}


def clones(module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in module.parameters()]


def moved(before: list[torch.Tensor], module) -> bool:
    return any(not torch.equal(old, new) for old, new in zip(before, module.parameters(), strict=True))


def plain(network, index, x):
    """One of the batched networks, written with torch's own operations."""
    last = len(network.weights) - 1
    for layer in range(last + 1):
        x = x @ network.weights[layer][index] + network.biases[layer][index]
        x = functional.relu(x) if layer < last else x
    return x


# The second transition terminates: its target is its reward alone.
BATCH = batch_of([1.0, -1.0], [0.5, -0.5], [1.0, 2.0], [2.0, 3.0], [0.0, 1.0])


def test_losses_of_one_update_by_hand():
    algorithm = TD3BC(small_actor(), TD3BCSettings(gamma=0.9, policy_noise=0.0, policy_delay=1, alpha=2.5))
    set_known_networks(algorithm)
    metrics = algorithm.update(iter([BATCH]))
    # min Q̄(s', 1) = min(2 + 1, 4) = 3 and min(3 + 1, 4) = 4; targets 1 + 0.9 · 3 = 3.7 and 2.
    # Q₁ = (1 + 1, −1 − 1) = (2, −2), Q₂ = (2, −2): each has the errors −1.7 and −4; summed over the two critics.
    assert float(metrics["q_loss"]) == pytest.approx(2 * (1.7**2 + 4.0**2) / 2, rel=1e-5)
    assert float(metrics["mean_q"]) == pytest.approx(0.0, abs=1e-6)
    # π(s) = 0: Q₁(s, 0) = (1, −1), mean |Q₁| = 1 and mean Q₁ = 0; (0 − a)² = 0.25.
    assert float(metrics["bc_loss"]) == pytest.approx(0.25)
    assert float(metrics["policy_loss"]) == pytest.approx(0.25, abs=1e-5)


def test_lambda_is_alpha_over_the_mean_magnitude_of_q():
    algorithm = TD3BC(small_actor(3, 2), TD3BCSettings(alpha=2.5, policy_delay=1, policy_noise=0.0))
    algorithm.critic_optimizer.param_groups[0]["lr"].zero_()
    batch = random_batch(16)
    policy, critics = copy.deepcopy((algorithm.policy, algorithm.critics))
    algorithm.update(iter([batch]))
    observation = batch[schema.OBSERVATION]
    chosen = plain(policy.actor, 0, observation).tanh()
    q = plain(critics.online, 0, torch.cat([observation, chosen], -1))[:, 0]
    scale = 2.5 / q.abs().mean().detach()  # α / mean |Q₁|, with no gradient of its own
    loss = -scale * q.mean() + functional.mse_loss(chosen, batch[schema.ACTION])
    gradients = torch.autograd.grad(loss, list(policy.actor.parameters()))
    for expected, parameter in zip(gradients, algorithm.policy.actor.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected, atol=1e-6, rtol=1e-5)


def test_alpha_zero_is_cloning():
    algorithm = TD3BC(small_actor(3, 2), TD3BCSettings(alpha=0.0, policy_delay=1))
    policy, batch = copy.deepcopy(algorithm.policy), random_batch(16)
    metrics = algorithm.update(iter([batch]))
    loss = functional.mse_loss(plain(policy.actor, 0, batch[schema.OBSERVATION]).tanh(), batch[schema.ACTION])
    gradients = torch.autograd.grad(loss, list(policy.actor.parameters()))
    for expected, parameter in zip(gradients, algorithm.policy.actor.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected, atol=1e-7, rtol=1e-5)
    assert float(metrics["policy_loss"]) == float(metrics["bc_loss"]) == pytest.approx(loss.item(), rel=1e-5)


def test_the_policy_and_all_targets_move_every_policy_delay_updates():
    algorithm = TD3BC(small_actor(3, 2), TD3BCSettings(policy_delay=3, tau=0.25))
    slow = {
        "policy": algorithm.policy.actor,
        "target policy": algorithm.target_policy.actor,
        "target critics": algorithm.critics.target,
    }
    for update in range(1, 7):
        before = {name: clones(module) for name, module in slow.items()}
        online = clones(algorithm.critics.online)
        algorithm.update(iter([random_batch()]))
        assert moved(online, algorithm.critics.online)
        assert {name: moved(before[name], module) for name, module in slow.items()} == dict.fromkeys(
            slow, update % 3 == 0
        )
        if update % 3 == 0:  # target ← (1 − τ) target + τ trained, after the step
            for old, new, trained in zip(
                before["target policy"],
                algorithm.target_policy.actor.parameters(),
                algorithm.policy.actor.parameters(),
                strict=True,
            ):
                torch.testing.assert_close(new, 0.75 * old + 0.25 * trained)


@pytest.mark.parametrize(("noise", "clip", "expected"), [(0.0, 0.5, 0.0), (1e6, 0.5, 0.5), (1e6, 0.1, 0.1)])
def test_the_noise_of_the_target_action_is_clipped_and_so_is_the_action(noise, clip, expected, monkeypatch):
    algorithm = TD3BC(small_actor(), TD3BCSettings(policy_noise=noise, noise_clip=clip))
    seen = []
    original = algorithm.critics.target_values
    monkeypatch.setattr(
        algorithm.critics, "target_values", lambda features, action: seen.append(action) or original(features, action)
    )
    make_linear(algorithm.target_policy.actor, 0, [[0.0]], [0.0])  # π̄ = 0: the action is the noise
    algorithm.update(iter([BATCH]))
    assert seen[-1].abs().flatten().tolist() == pytest.approx([expected] * 2)
    make_linear(algorithm.target_policy.actor, 0, [[0.0]], [20.0])  # π̄ = 1: nothing beyond the Box
    for _ in range(5):
        algorithm.update(iter([BATCH]))
        assert float(seen[-1].max()) <= 1.0


def test_the_normalisation_is_of_the_dataset_and_travels_with_the_policy():
    dataset = two_step_dataset()
    algorithm = TD3BC(small_actor(2, 1))
    sampler = algorithm.make_sampler(dataset, 0, torch.device("cpu"), 0)
    algorithm.prepare(dataset, sampler, fresh=True)
    # The observations that transitions start from: step 0 and 1 in equal parts, mean ½ and deviation ½; the sign is 0
    # at the first step and ±1 (3 : 7) at the second, mean ½ · (0.3 − 0.7) = −0.2 and variance ½ − 0.04 = 0.46.
    features = algorithm.policy.encode(torch.tensor([[0.5, -0.2], [1.0, -0.2 + 0.46**0.5]])).features[0]
    torch.testing.assert_close(features, torch.tensor([[0.0, 0.0], [1.0, 1.0]]), atol=1e-4, rtol=0)
    stored = small_actor(2, 1)
    stored.load_state_dict(algorithm.policy.state_dict())
    row = schema_row(torch.tensor([[1.0, -1.0]]))
    assert torch.equal(
        stored.act(row.clone(), True)[schema.ACTION], algorithm.policy.act(row.clone(), True)[schema.ACTION]
    )
    # The policy of a resumed run keeps its own.
    resumed = TD3BC(small_actor(2, 1))
    resumed.prepare(dataset, resumed.make_sampler(dataset, 0, torch.device("cpu"), 0), fresh=False)
    assert torch.equal(resumed.policy.encode(torch.ones(1, 2)).features[0], torch.ones(1, 2))


def test_learns_where_cloning_fails():
    settings = TD3BCSettings(**FAST, alpha=2.5)
    assert min(learned_actions(TD3BC(small_actor(2, 1, members=3), settings))) > 0.4
    cloning = TD3BC(small_actor(2, 1, members=3), TD3BCSettings(**FAST, alpha=0.0))
    assert learned_actions(cloning) == pytest.approx([-0.24] * 3, abs=0.1)


def test_members_train_as_if_alone():
    settings = TD3BCSettings(policy_noise=0.0, num_critics=3, learning_rate=1e-3)
    assert_members_train_as_if_alone(TD3BC(small_actor(3, 2, members=3), settings))


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without bf16 units: slower, and as close
def test_bf16_is_close_to_float32():
    results = {}
    for precision in ("float32", "bf16"):
        torch.manual_seed(0)
        settings = TD3BCSettings(precision=precision)
        algorithm = TD3BC(
            TD3BC.make_policy(box(3), box(2, -1.0, 1.0), DatasetPolicyConfig(hidden_dim=16), settings), settings
        )
        torch.manual_seed(1)
        metrics = [algorithm.update(iter([random_batch(64)])) for _ in range(6)][-1]
        results[precision] = {name: float(value) for name, value in metrics.items()}
    assert results["bf16"] == pytest.approx(results["float32"], rel=0.05, abs=0.02)
    assert results["bf16"] != results["float32"]


def test_an_update_after_loading_logs_what_the_uninterrupted_one_logs():
    """Between two policy updates the latest policy loss is logged again; a loaded state has it too."""
    torch.manual_seed(3)
    first = TD3BC(small_actor(3, 2), TD3BCSettings(policy_noise=0.0))
    batches = [random_batch() for _ in range(3)]
    for batch in batches[:2]:
        first.update(iter([batch]))
    second = TD3BC(copy.deepcopy(first.policy), TD3BCSettings(policy_noise=0.0))
    second.load_state_dict(first.state_dict())
    expected, got = first.update(iter(batches[2:])), second.update(iter(batches[2:]))
    assert {name: float(value) for name, value in got.items()} == {
        name: float(value) for name, value in expected.items()
    }
