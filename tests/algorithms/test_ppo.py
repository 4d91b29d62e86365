import copy
import math
import shutil

import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict

from deft import schema
from deft.algorithms.optimization import FlatAdam, apply_gradients
from deft.algorithms.policy_gradient import OLD_LOG_PROB
from deft.algorithms.ppo import BEHAVIOR_WEIGHT, PPO
from deft.config.algorithm_settings import PPOSettings
from deft.config.settings import PolicyConfig
from deft.errors import InputError, RunError
from deft.models.actor_critic import ActorCritic

OBSERVATIONS = spaces.Box(-1, 1, (3,), np.float32)
PLAIN = {"normalize_observation": False, "normalize_reward": False}


def minibatches(algorithm: PPO, rollout):
    """Those of one epoch."""
    return algorithm._parts(rollout, algorithm._order(rollout))


def make_policy(action_space=None, **settings) -> ActorCritic:
    torch.manual_seed(0)
    return ActorCritic(OBSERVATIONS, action_space or spaces.Box(-1, 1, (2,)), PolicyConfig(**{**PLAIN, **settings}))


@torch.no_grad()
def make_rollout(policy: ActorCritic, steps: int = 8, num_envs: int = 4, version: int = 0) -> TensorDict:
    """A rollout that `policy` acted on random observations, with episodes ending here and there."""
    torch.manual_seed(1)
    memory = policy.initial_memory(num_envs)
    rows = []
    for _ in range(steps):
        td = TensorDict({schema.OBSERVATION: torch.rand(num_envs, 3) * 2 - 1}, batch_size=[num_envs])
        if memory is not None:
            td[schema.MEMORY] = memory
        policy.act(td)
        terminated = torch.rand(num_envs) < 0.1
        truncated = ~terminated & (torch.rand(num_envs) < 0.1)
        if memory is not None:
            memory = td[schema.NEXT_MEMORY] * (~(terminated | truncated))[:, None, None]
        td = td.exclude(schema.NEXT)
        td[schema.NEXT_REWARD] = torch.rand(num_envs)
        td[schema.NEXT_TERMINATED], td[schema.NEXT_TRUNCATED] = terminated, truncated
        td[schema.NEXT_VALUE] = torch.rand(num_envs)
        td[schema.POLICY_VERSION] = torch.full((num_envs,), version)
        rows.append(td)
    return torch.stack(rows)


def losses_of(algorithm: PPO, minibatch: TensorDict) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        losses = algorithm._loss(algorithm.policy.evaluate_actions(minibatch), minibatch)[1]
    return {name: value if name == "log_ratio" else value.mean() for name, value in losses.items()}


@pytest.mark.parametrize("clip_range_vf", [None, 0.2])
@pytest.mark.parametrize("stale", [False, True])
def test_the_gradient_is_that_of_the_loss(clip_range_vf, stale):
    """L = −mean(w·min(r A, clip(r) A)) + c_v·½ mean(max((V−R)², (V_clip−R)²)) − c_e·mean(H), by autograd."""
    torch.manual_seed(0)
    settings = PPOSettings(clip_range_vf=clip_range_vf, entropy_coef=0.03, value_coef=0.7)
    algorithm = PPO(make_policy(), settings)
    names = (schema.LOG_PROB, schema.VALUE, schema.ADVANTAGE, schema.VALUE_TARGET)
    minibatch = TensorDict({name: torch.randn(200) for name in names}, batch_size=[200])
    weight = torch.rand(200) * 2 if stale else torch.ones(200)
    if stale:
        minibatch[BEHAVIOR_WEIGHT] = weight
    scored = {
        "log_prob": (minibatch[schema.LOG_PROB] + 0.3 * torch.randn(200)).requires_grad_(),
        "value": (minibatch[schema.VALUE] + 0.3 * torch.randn(200)).requires_grad_(),
        "entropy": torch.rand(200).requires_grad_(),
    }
    advantage = minibatch[schema.ADVANTAGE]
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    ratio = (scored["log_prob"] - minibatch[schema.LOG_PROB]).exp()
    surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    error = (scored["value"] - minibatch[schema.VALUE_TARGET]).square()
    if clip_range_vf is not None:
        moved = (scored["value"] - minibatch[schema.VALUE]).clamp(-clip_range_vf, clip_range_vf)
        error = torch.maximum(error, (minibatch[schema.VALUE] + moved - minibatch[schema.VALUE_TARGET]).square())
    loss = -(weight * surrogate).mean() + 0.7 * 0.5 * error.mean() - 0.03 * scored["entropy"].mean()
    loss.backward()
    own = {name: value.detach().requires_grad_() for name, value in scored.items()}
    found, losses = algorithm._loss(own, minibatch)
    found.backward()
    for name, value in scored.items():
        torch.testing.assert_close(own[name].grad, value.grad)
    means = {name: value.mean() for name, value in losses.items()}
    total = means["policy_loss"] + 0.7 * means["value_loss"] - 0.03 * means["entropy"]
    torch.testing.assert_close(total, loss.detach())


@pytest.mark.parametrize("memory_hidden", [0, 8])
def test_a_minibatch_in_parts_takes_the_step_of_the_whole(memory_hidden):
    found = []
    for parts in (1, 3):  # minibatches of 16 steps: 6, 6 and 4, or of 4 sequences of 4: 2 and 2
        settings = PPOSettings(n_epochs=2, batch_size=16, sequence_length=4, gradient_accumulation=parts)
        policy = make_policy(memory_hidden=memory_hidden)
        rollout = make_rollout(policy)
        metrics = PPO(policy, settings).update(iter([rollout]))
        found.append((torch.cat([one.detach().flatten() for one in policy.parameters()]), metrics))
    (whole, metrics), (in_parts, others) = found
    torch.testing.assert_close(in_parts, whole, rtol=1e-6, atol=1e-6)
    for name, value in metrics.items():
        torch.testing.assert_close(others[name], value, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize(
    "policy",
    [
        make_policy(),
        make_policy(spaces.Box(-3, 5, (2,))),
        make_policy(spaces.Discrete(4)),
        make_policy(spaces.MultiDiscrete([2, 3])),
        make_policy(memory_hidden=8),
        make_policy(spaces.Discrete(4), memory_hidden=8, memory_num_layers=2),
    ],
    ids=["box", "scaled box", "discrete", "multidiscrete", "recurrent", "recurrent discrete"],
)
def test_before_the_first_gradient_step_every_ratio_is_one(policy):
    algorithm = PPO(policy, PPOSettings(batch_size=16, sequence_length=4))
    rollout = algorithm._with_advantages(make_rollout(policy))
    for minibatch in minibatches(algorithm, rollout):
        log_ratio = losses_of(algorithm, minibatch)["log_ratio"]
        torch.testing.assert_close(log_ratio.exp(), torch.ones_like(log_ratio), atol=1e-5, rtol=0)


def test_losses_by_hand():
    # Two transitions, one action dim, mean m = 0 (zero last layer) and log σ = 0:
    #   log π(a) = −½a² − ½log 2π:  a = 0 → −0.9189, a = 1 → −1.4189;  entropy = ½ + ½log 2π = 1.4189
    # Behaviour log-probs are chosen so that the ratios are 2 (clipped to 1.2) and 0.9.
    # advantages [1, −1]: min(2·1, 1.2·1) = 1.2;  min(0.9·−1, 0.9·−1) = −0.9   → policy loss −(1.2 − 0.9)/2 = −0.15
    # values 0, targets [1, 3]: ½·(1 + 9)/2 = 2.5
    policy = make_policy(spaces.Box(-1, 1, (1,)))
    torch.nn.init.zeros_(policy.towers.head_weight_0)
    torch.nn.init.zeros_(policy.towers.head_weight_1)
    algorithm = PPO(policy, PPOSettings(normalize_advantage=False))
    constant = 0.5 * math.log(2 * math.pi)
    log_prob = torch.tensor([-constant, -0.5 - constant])
    minibatch = TensorDict(
        {
            schema.OBSERVATION: torch.zeros(2, 3),
            schema.ACTION: torch.tensor([[0.0], [1.0]]),
            schema.LOG_PROB: log_prob - torch.log(torch.tensor([2.0, 0.9])),
            schema.VALUE: torch.zeros(2),
            schema.ADVANTAGE: torch.tensor([1.0, -1.0]),
            schema.VALUE_TARGET: torch.tensor([1.0, 3.0]),
        },
        batch_size=[2],
    )
    losses = losses_of(algorithm, minibatch)
    assert losses["policy_loss"].item() == pytest.approx(-0.15, abs=1e-6)
    assert losses["value_loss"].item() == pytest.approx(2.5, abs=1e-6)
    assert losses["entropy"].item() == pytest.approx(0.5 + constant, abs=1e-6)

    # A behaviour weight multiplies each surrogate: −(0.5·1.2 − 2·0.9)/2 = 0.6
    minibatch[BEHAVIOR_WEIGHT] = torch.tensor([0.5, 2.0])
    assert losses_of(algorithm, minibatch)["policy_loss"].item() == pytest.approx(0.6, abs=1e-6)

    # Value clipping around old values [0, 0] with range 0.5, prediction moved to 2 by the bias:
    # unclipped errors (2−1)² = 1, (2−3)² = 1; clipped (0.5−1)² = 0.25, (0.5−3)² = 6.25 → ½·(1 + 6.25)/2 = 1.8125
    torch.nn.init.constant_(policy.towers.head_bias_1, 2.0)
    algorithm.settings.clip_range_vf = 0.5
    assert losses_of(algorithm, minibatch)["value_loss"].item() == pytest.approx(1.8125, abs=1e-6)


def test_ratios_of_denoising_steps_by_hand():
    """DPPO: each step of the chain has a ratio of its own, and earlier steps a discounted advantage."""
    algorithm = PPO(make_policy(), PPOSettings(normalize_advantage=False, ratio="token", denoising_discount=0.5))
    tokens = torch.tensor([[2.0, 0.9], [1.1, 0.5]]).log()
    scored = {"token_log_prob": tokens, "value": torch.zeros(2), "entropy": torch.zeros(2)}
    columns = {
        OLD_LOG_PROB: torch.zeros(2, 2),
        schema.ADVANTAGE: torch.tensor([1.0, -1.0]),
        schema.VALUE_TARGET: torch.zeros(2),
    }
    _, losses = algorithm._loss(scored, TensorDict(columns, batch_size=[2]))
    # Advantages [0.5, 1] and [−0.5, −1]; ratios clipped to 0.8 … 1.2:
    # (min(2·0.5, 1.2·0.5) + 0.9·1) / 2 = 0.75 and (1.1·−0.5 + min(0.5·−1, 0.8·−1)) / 2 = −0.675
    assert losses["policy_loss"].tolist() == pytest.approx([-0.75, 0.675])
    with pytest.raises(InputError, match="ratio: 'token' needs a policy that reports token_log_prob"):
        algorithm._loss({"log_prob": tokens[:, 0], "value": torch.zeros(2)}, TensorDict(columns, [2]))


def test_next_value_is_the_next_row_and_the_bootstrap_at_a_segment_end():
    policy = make_policy()
    algorithm = PPO(policy, PPOSettings(gamma=0.5, gae_lambda=0.0))
    rollout = make_rollout(policy, steps=3, num_envs=3)
    rollout[schema.VALUE] = torch.tensor([[1.0, 2, 3], [4, 5, 6], [7, 8, 9]])
    rollout[schema.NEXT_VALUE] = torch.full((3, 3), 100.0)
    rollout[schema.NEXT_REWARD] = torch.zeros(3, 3)
    rollout[schema.NEXT_TERMINATED] = torch.tensor([[False, True, False], [False] * 3, [False] * 3])
    rollout[schema.NEXT_TRUNCATED] = torch.tensor([[False, False, True], [False] * 3, [False] * 3])
    # λ = 0: A = γ V(next) − V. Row 0: 0.5·4 − 1 = 1; terminated 0 − 2 = −2; truncated 0.5·100 − 3 = 47.
    # Last row: 0.5·100 − [7, 8, 9].
    advantage = algorithm._with_advantages(rollout)[schema.ADVANTAGE]
    assert advantage[0].tolist() == [1.0, -2.0, 47.0]
    assert advantage[2].tolist() == [43.0, 42.0, 41.0]


def test_without_stored_bootstraps_the_next_observations_are_valued():
    policy = make_policy()
    algorithm = PPO(policy, PPOSettings(gamma=0.5, gae_lambda=0.0))
    rollout = make_rollout(policy, steps=2, num_envs=2).exclude(schema.NEXT_VALUE)
    rollout[schema.NEXT_OBSERVATION] = torch.rand(2, 2, 3)
    expected = policy.get_value(TensorDict({schema.OBSERVATION: rollout[schema.NEXT_OBSERVATION][1]}, [2]))
    live = (~rollout[schema.NEXT_TERMINATED][1]).float()
    delta = rollout[schema.NEXT_REWARD][1] + 0.5 * expected * live - rollout[schema.VALUE][1]
    torch.testing.assert_close(algorithm._with_advantages(rollout)[schema.ADVANTAGE][1], delta)


def test_every_transition_is_trained_on_and_small_rollouts_too():
    policy = make_policy()
    algorithm = PPO(policy, PPOSettings(batch_size=10))
    rollout = algorithm._with_advantages(make_rollout(policy, steps=8, num_envs=4))
    sizes = [len(minibatch) for minibatch in minibatches(algorithm, rollout)]
    assert sizes == [10, 10, 10, 2]  # 32 = 3·10 + 2: the partial one is not dropped
    algorithm.settings.batch_size = 1000  # more than there is: one minibatch of all
    assert [len(minibatch) for minibatch in minibatches(algorithm, rollout)] == [32]
    before = copy.deepcopy(policy.state_dict())
    algorithm.update(iter([make_rollout(policy, steps=1, num_envs=1)]))  # a single transition: no NaN from its spread
    assert all(torch.isfinite(value).all() for value in policy.state_dict().values())
    assert any(not torch.equal(before[name], value) for name, value in policy.state_dict().items())


def test_sequences_keep_an_environments_steps_together():
    policy = make_policy(memory_hidden=4)
    algorithm = PPO(policy, PPOSettings(batch_size=8, sequence_length=4))
    rollout = make_rollout(policy, steps=8, num_envs=3)
    for t in range(8):
        for env in range(3):
            rollout[schema.OBSERVATION][t, env] = torch.tensor([t, env, 0.0])
    seen = []
    for minibatch in minibatches(algorithm, algorithm._with_advantages(rollout)):
        assert minibatch.batch_size[0] == 4
        for column in minibatch[schema.OBSERVATION].unbind(1):
            assert (column[1:, 0] - column[:-1, 0] == 1).all()  # consecutive steps
            assert (column[:, 1] == column[0, 1]).all()  # of one environment
            seen.append((int(column[0, 0]), int(column[0, 1])))
    assert sorted(seen) == [(t, env) for t in (0, 4) for env in range(3)]


def test_stale_data_is_weighed_by_the_proximal_policy():
    behavior = make_policy()
    learner = copy.deepcopy(behavior)
    with torch.no_grad():
        learner.head.log_std += 0.1
    rollout = make_rollout(behavior, version=3)
    algorithm = PPO(learner, PPOSettings(batch_size=7))
    algorithm.version = 4
    prepared = algorithm._with_advantages(rollout)
    algorithm._score_again(prepared, is_stale=True)
    expected = learner.evaluate_actions(rollout.flatten(0, 1))["log_prob"].reshape(8, 4)
    torch.testing.assert_close(prepared[schema.LOG_PROB], expected)
    weight = (expected - rollout[schema.LOG_PROB]).exp().clamp(max=5.0)
    torch.testing.assert_close(prepared[BEHAVIOR_WEIGHT], weight)
    # … and the ratio to the proximal policy starts at 1, so that the clip range is around it
    minibatch = next(minibatches(algorithm, prepared))
    assert losses_of(algorithm, minibatch)["log_ratio"].abs().max() < 1e-5
    assert algorithm.update(iter([rollout]))["staleness"].item() == 1.0


def test_stale_recurrent_data_is_put_back_in_its_place():
    behavior = make_policy(memory_hidden=4)
    rollout = make_rollout(behavior, version=0)
    algorithm = PPO(behavior, PPOSettings(batch_size=8, sequence_length=4))
    algorithm.version = 1
    prepared = algorithm._with_advantages(rollout)
    algorithm._score_again(prepared, is_stale=True)
    # The weights did not change, so each recomputed log-prob must land where the old one was.
    torch.testing.assert_close(prepared[schema.LOG_PROB], rollout[schema.LOG_PROB], atol=1e-5, rtol=0)


def test_target_kl_stops_the_epochs():
    policy = make_policy()
    algorithm = PPO(policy, PPOSettings(n_epochs=50, learning_rate=0.01, target_kl=0.01, batch_size=32))
    metrics = algorithm.update(iter([make_rollout(policy)]))
    assert metrics["epochs_stopped_early"].item() == 1.0
    assert metrics["approx_kl"].item() > 0.015


def test_learning_rate_schedules():
    policy = make_policy()
    algorithm = PPO(policy, PPOSettings(learning_rate=1e-3, learning_rate_schedule="linear"))
    algorithm.progress = 0.75
    algorithm.update(iter([make_rollout(policy)]))
    assert algorithm.learning_rate == pytest.approx(2.5e-4)
    algorithm = PPO(policy, PPOSettings(learning_rate=1e-3, learning_rate_schedule="adaptive", desired_kl=10.0))
    algorithm.update(iter([make_rollout(policy)]))  # moved less than half of the wanted KL: × 1.5
    assert algorithm.learning_rate == pytest.approx(1.5e-3)


def test_the_adaptive_rate_waits_for_the_policy():
    policy = make_policy()
    settings = PPOSettings(learning_rate=1e-3, learning_rate_schedule="adaptive", desired_kl=10.0, value_warmup=1)
    algorithm = PPO(policy, settings)
    algorithm.update(iter([make_rollout(policy)]))  # the value alone: a KL of 0 says nothing
    assert algorithm.learning_rate == 1e-3
    rollout = make_rollout(policy)
    rollout[schema.POLICY_VERSION].fill_(1)
    algorithm.update(iter([rollout]))
    assert algorithm.learning_rate == pytest.approx(1.5e-3)


def test_the_first_step_after_the_warm_up_is_that_of_a_new_optimizer():
    policy = make_policy()
    settings = PPOSettings(learning_rate=1e-3, value_warmup=20, batch_size=32, n_epochs=1, adam_epsilon=1e-12)
    algorithm = PPO(policy, settings)
    for version in range(20):
        algorithm.update(iter([make_rollout(policy, version=version)]))
    before = policy.head.log_std.detach().clone()
    algorithm.update(iter([make_rollout(policy, version=20)]))
    # Adam's first step is α · g / |g|. With the 20 steps of the value counted as steps of the policy it would be
    # α · 0.1 g / (1 − 0.9²¹) / √(0.001 g² / (1 − 0.999²¹)) = 0.51 α, and a multiple of α with a longer warm-up.
    assert (policy.head.log_std - before).abs().tolist() == pytest.approx([1e-3, 1e-3], rel=1e-2)


def test_reward_normalisation_is_part_of_the_policy():
    policy = make_policy(normalize_reward=True)
    algorithm = PPO(policy, PPOSettings(gamma=0.0))
    rollout = make_rollout(policy, steps=64)
    rollout[schema.NEXT_REWARD] = torch.randn(64, 4) * 50.0
    algorithm.update(iter([rollout]))
    assert policy.reward_normalizer is not None
    # γ = 0: the return is the reward itself, so the divisor is its deviation
    deviation = float(rollout[schema.NEXT_REWARD].double().std(correction=0))
    assert policy.state_dict()["reward_normalizer.statistics.scale"].item() == pytest.approx(1 / deviation, rel=1e-4)


def test_observation_statistics_change_after_the_update_only():
    policy = make_policy(normalize_observation=True)
    algorithm = PPO(policy, PPOSettings())
    rollout = make_rollout(policy)
    mean = rollout[schema.OBSERVATION].double().mean((0, 1))
    algorithm.update(iter([rollout]))
    normalizer = policy.encoder.streams["observation"].normalizer
    torch.testing.assert_close(normalizer.mean, mean)


def test_nan_loss_is_a_clear_failure():
    policy = make_policy()
    rollout = make_rollout(policy)
    rollout[schema.NEXT_REWARD][0, 0] = float("nan")
    with pytest.raises(RunError, match="the gradient is no longer finite, so the update was not applied"):
        PPO(policy, PPOSettings()).update(iter([rollout]))


def test_frozen_policy_is_rejected():
    with pytest.raises(InputError, match="frozen"):
        FlatAdam(make_policy().requires_grad_(False).parameters(), 1e-3)


def test_flat_adam_equals_adam():
    flat_policy, plain_policy = make_policy(), make_policy()
    flat = FlatAdam(flat_policy.parameters(), 1e-2, eps=1e-5)
    plain = torch.optim.Adam(plain_policy.parameters(), 1e-2, eps=1e-5)
    observation = torch.rand(16, 3)
    for _ in range(5):
        for policy in (flat_policy, plain_policy):
            output, value = policy.towers(observation)
            loss = (output.square().sum() + value.square().sum() * 10) + policy.head.log_std.sum()
            flat.zero_grad() if policy is flat_policy else plain.zero_grad()
            loss.backward()
        norm = apply_gradients(flat, max_grad_norm=0.5)
        expected = torch.nn.utils.clip_grad_norm_(plain_policy.parameters(), 0.5)
        torch.testing.assert_close(norm, expected, rtol=1e-5, atol=0)
        plain.step()
    for mine, reference in zip(flat_policy.parameters(), plain_policy.parameters(), strict=True):
        torch.testing.assert_close(mine, reference, atol=1e-6, rtol=1e-5)


def test_state_dict_resumes_bit_for_bit():
    policy = make_policy(normalize_reward=True)
    algorithm = PPO(policy, PPOSettings(batch_size=8), seed=5)
    algorithm.update(iter([make_rollout(policy)]))
    other = make_policy(normalize_reward=True)
    other.load_state_dict(copy.deepcopy(policy.state_dict()))
    resumed = PPO(other, PPOSettings(batch_size=8), seed=99)
    resumed.load_state_dict(copy.deepcopy(algorithm.state_dict()))
    rollout = make_rollout(policy, version=1)
    algorithm.update(iter([rollout.clone()]))
    resumed.update(iter([rollout.clone()]))
    for name, value in policy.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_eager_and_compiled_agree():
    eager_policy, compiled_policy = make_policy(), make_policy()
    rollout = make_rollout(eager_policy)
    eager = PPO(eager_policy, PPOSettings(batch_size=16))
    compiled = PPO(compiled_policy, PPOSettings(batch_size=16, compile=True))
    for version in range(3):
        rollout[schema.POLICY_VERSION] = torch.full((8, 4), version)
        eager_metrics = eager.update(iter([rollout]))
        compiled_metrics = compiled.update(iter([rollout]))
        for name in ("policy_loss", "value_loss", "entropy", "approx_kl"):
            torch.testing.assert_close(eager_metrics[name], compiled_metrics[name], atol=1e-5, rtol=1e-4)
    for mine, other in zip(eager_policy.parameters(), compiled_policy.parameters(), strict=True):
        torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-4)


def test_a_flow_from_new_weights_is_an_error_and_not_ignored():
    config = PolicyConfig(distribution="flow")
    with pytest.raises(InputError, match=r"distribution: PPO and GRPO create Gaussian policies; .*model_path"):
        ActorCritic(spaces.Box(-1, 1, (2,)), spaces.Box(-1, 1, (1,)), config)
