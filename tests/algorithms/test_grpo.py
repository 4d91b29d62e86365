import copy
import math

import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict

from deft import schema
from deft.algorithms.grpo import GRPO, OLD_LOG_PROB, REFERENCE_LOG_PROB, group_normalized, k3
from deft.config.algorithm_settings import GRPOSettings
from deft.config.settings import PolicyConfig
from deft.errors import InputError, RunError
from deft.models.actor_critic import ActorCritic
from deft.models.policy import Policy

OBSERVATIONS = spaces.Box(-1, 1, (3,), np.float32)
PLAIN = {"normalize_observation": False, "normalize_reward": False}


def make_policy(action_space=None, **settings) -> ActorCritic:
    torch.manual_seed(0)
    return ActorCritic(OBSERVATIONS, action_space or spaces.Box(-1, 1, (2,)), PolicyConfig(**{**PLAIN, **settings}))


def make_grpo(policy: Policy | None = None, **settings) -> GRPO:
    return GRPO(policy or make_policy(), GRPOSettings(**{"group_size": 2, **settings}))


def rewarded(rewards: list[list[float]], lengths: list[int]) -> TensorDict:
    """A round [T, N] of rewards (one list an episode) of which the first `lengths` steps are real."""
    reward = torch.tensor(rewards).T
    mask = torch.arange(len(reward))[:, None] < torch.tensor(lengths)
    td = TensorDict({schema.STEP_MASK: mask}, batch_size=reward.shape)
    td[schema.NEXT_REWARD] = reward
    return td


@torch.no_grad()
def make_round(policy: ActorCritic, steps: int = 6, num_envs: int = 4) -> TensorDict:
    """A round that `policy` acted on random observations; episodes have different lengths and rewards."""
    torch.manual_seed(1)
    memory = policy.initial_memory(num_envs)
    rows = []
    for step in range(steps):
        td = TensorDict({schema.OBSERVATION: torch.rand(num_envs, 3) * 2 - 1}, batch_size=[num_envs])
        if memory is not None:
            td[schema.MEMORY] = memory
        policy.act(td)
        if memory is not None:
            memory = td[schema.NEXT_MEMORY]
        td = td.exclude(schema.NEXT)
        td[schema.NEXT_REWARD] = torch.rand(num_envs)
        td[schema.NEXT_TERMINATED] = torch.tensor([step == steps - 1 - index for index in range(num_envs)])
        td[schema.NEXT_TRUNCATED] = torch.zeros(num_envs, dtype=torch.bool)
        td[schema.POLICY_VERSION] = torch.zeros(num_envs, dtype=torch.int64)
        td[schema.STEP_MASK] = torch.tensor([step <= steps - 1 - index for index in range(num_envs)])
        rows.append(td)
    return torch.stack(rows)


def prepared(algorithm: GRPO, rollout: TensorDict) -> TensorDict:
    steps = algorithm._training_steps([rollout], [algorithm.advantages(rollout)])
    assert steps is not None
    return steps


POLICIES = {
    "box": lambda: make_policy(),
    "scaled box": lambda: make_policy(spaces.Box(-3, 5, (2,))),
    "chunk": lambda: make_policy(spaces.Box(-1, 1, (3, 2))),
    "discrete": lambda: make_policy(spaces.Discrete(4)),
    "multidiscrete": lambda: make_policy(spaces.MultiDiscrete([2, 3])),
    "recurrent": lambda: make_policy(memory_hidden=8),
    "recurrent multidiscrete": lambda: make_policy(spaces.MultiDiscrete([2, 3]), memory_hidden=8, memory_num_layers=2),
}

# ------------------------------------------------------------------------------------------------------- advantages


def test_outcome_advantages_by_hand():
    # Group 0: returns 1+1+1 = 3 and 1 (its second and third step are not its own): mean 2, deviation 1 → +1, −1
    # Group 1: returns 0 and 4: mean 2, deviation 2 → −1, +1
    # Group 2: returns 2 and 2: no spread → 0
    rollout = rewarded(
        [[1, 1, 1], [1, 100, 100], [0, 0, 0], [4, 0, 0], [2, 9, 9], [1, 1, 9]],
        [3, 1, 3, 2, 1, 2],
    )
    algorithm = make_grpo()
    advantage = algorithm.advantages(rollout)
    expected = torch.tensor([[1.0, 1, 1], [-1, 0, 0], [-1, -1, -1], [1, 1, 0], [0, 0, 0], [0, 0, 0]]).T
    torch.testing.assert_close(advantage, expected)
    assert algorithm.groups_with_spread(rollout) == 2


def test_process_advantages_by_hand():
    # Returns from each step on, of the members that still act:
    #   t = 0: 6, 3, 3 → mean 4, deviation √((4 + 1 + 1)/3) = √2 → 2/√2 = √2, −1/√2, −1/√2
    #   t = 1: 5, 1 (the third is over) → mean 3, deviation 2 → +1, −1
    #   t = 2: 3 alone: nothing to compare with → 0
    rollout = rewarded([[1, 2, 3], [2, 1, 50], [3, 50, 50]], [3, 2, 1])
    advantage = make_grpo(group_size=3, advantage="process").advantages(rollout)
    half = 1 / math.sqrt(2)
    torch.testing.assert_close(advantage, torch.tensor([[2 * half, -half, -half], [1, -1, 0], [0, 0, 0]]))


def test_without_the_deviation_only_the_mean_is_subtracted():
    # Returns 5 and 1: mean 3 → +2, −2 (Dr. GRPO)
    advantage = make_grpo(normalize_std=False).advantages(rewarded([[5.0], [1.0]], [1, 1]))
    torch.testing.assert_close(advantage, torch.tensor([[2.0, -2.0]]))


def test_the_discount_and_the_steps_of_a_chunk_count():
    # γ = ½. First member: decisions of 2 and 1 steps: 4 + ½² · 8 = 6; second: 4 + ½ · 8 = 8; third: 4
    # mean 6 → 0, +2, −2
    rollout = rewarded([[4, 8], [4, 8], [4, 0]], [2, 2, 2])
    rollout[schema.NEXT_NUM_STEPS] = torch.tensor([[2, 1, 1], [1, 1, 1]])
    advantage = make_grpo(group_size=3, gamma=0.5, normalize_std=False).advantages(rollout)
    torch.testing.assert_close(advantage, torch.tensor([[0.0, 2, -2], [0, 2, -2]]))


def test_named_terms_are_normalized_apart_and_weighted():
    # progress: 10 and 30 → −1, +1;  comfort: −0.1 and −0.3 → +1, −1;  collision: 0 and 0 → 0, 0
    # weights 1 (not named), 3 and 5: −1 + 3 = 2 and 1 − 3 = −2
    rollout = rewarded([[10.0], [30.0]], [1, 1])
    rollout[schema.NEXT_REWARD_TERMS] = torch.tensor([[[10, -0.1, 0], [30, -0.3, 0]]])
    algorithm = make_grpo(reward_weights={"comfort": 3.0, "collision": 5.0})
    algorithm.set_reward_terms(("progress", "comfort", "collision"))
    torch.testing.assert_close(algorithm.advantages(rollout), torch.tensor([[2.0, -2.0]]))
    metrics = algorithm._group_metrics([rollout], [algorithm.advantages(rollout)])
    means = {name: float(value) for name, value in metrics.items() if name.startswith("term_")}
    assert means == pytest.approx({"term_progress": 20, "term_comfort": -0.2, "term_collision": 0})


@pytest.mark.parametrize(
    ("names", "line"),
    [
        (("progress", "comfort"), "reward_weights: no reward term 'speed'; the environment has progress, comfort"),
        ((), "reward_weights: speed given, but the environment names no reward terms"),
    ],
)
def test_weights_of_unknown_terms_are_rejected(names, line):
    with pytest.raises(InputError) as error:
        make_grpo(reward_weights={"speed": 1.0}).set_reward_terms(names)
    assert str(error.value) == line


def test_equal_returns_are_no_spread_whatever_their_rounding():
    # 0.1 + 0.2 ≠ 0.3 in floats: the two returns differ by rounding alone
    values = torch.tensor([[[0.1 + 0.2], [0.3]]], dtype=torch.float64)
    assert values[0, 0] != values[0, 1]
    assert not group_normalized(values, torch.ones(1, 2, 1, dtype=torch.bool), True).any()


# ------------------------------------------------------------------------------------------------------------- loss


def loss_of(algorithm: GRPO, log_prob, old, reference, advantage, mask=None):
    size = len(advantage)
    minibatch = TensorDict(
        {
            schema.ADVANTAGE: torch.tensor(advantage),
            schema.STEP_MASK: torch.ones(size, dtype=torch.bool) if mask is None else torch.tensor(mask),
            OLD_LOG_PROB: torch.tensor(old),
            REFERENCE_LOG_PROB: torch.tensor(reference),
        },
        batch_size=[size],
    )
    scored = {"log_prob": torch.tensor(log_prob), "entropy": torch.full((size,), 0.5)}
    return algorithm._loss(scored, minibatch)


def test_clip_higher_by_hand():
    # ratios 1.5, 0.5, 1.5, 0.5; advantages 1, 1, −1, −1; ε_low 0.2, ε_high 0.28:
    #   min(1.5, 1.28) = 1.28;  min(0.5, 0.8) = 0.5;  min(−1.5, −1.28) = −1.5;  min(−0.5, −0.8) = −0.8
    # loss −(1.28 + 0.5 − 1.5 − 0.8) / 4 = 0.13; every ratio is outside [0.8, 1.28]
    log = [math.log(1.5), math.log(0.5)] * 2
    algorithm = make_grpo(clip_range_high=0.28, kl_coef=0.0)
    loss, metrics = loss_of(algorithm, log, [0.0] * 4, [0.0] * 4, [1.0, 1.0, -1.0, -1.0])
    assert float(loss) == pytest.approx(0.13, abs=1e-6)
    assert metrics["is_clipped"].all()
    # without clip_range_high 1.2 is the bound: −(1.2 + 0.5 − 1.5 − 0.8) / 4 = 0.15
    loss, _ = loss_of(make_grpo(kl_coef=0.0), log, [0.0] * 4, [0.0] * 4, [1.0, 1.0, -1.0, -1.0])
    assert float(loss) == pytest.approx(0.15, abs=1e-6)


def test_kl_entropy_and_mask_by_hand():
    # k3 with d = log π_ref − log π: d = log 2 → 2 − log 2 − 1 = 0.30685; d = −log 2 → 0.5 + log 2 − 1 = 0.19315
    # ratios 1, advantages 0 and 2; the third step is not real.
    # loss −(0 + 2)/2 + 0.1 · (0.30685 + 0.19315)/2 − 0.01 · 0.5 = −1 + 0.025 − 0.005 = −0.98
    log_2 = math.log(2)
    torch.testing.assert_close(
        k3(torch.tensor([0.0, 0.0]), torch.tensor([log_2, -log_2])), torch.tensor([1 - log_2, log_2 - 0.5])
    )
    algorithm = make_grpo(kl_coef=0.1, entropy_coef=0.01)
    loss, metrics = loss_of(
        algorithm, [0.0] * 3, [0.0, 0.0, 50.0], [log_2, -log_2, 9.0], [0.0, 2.0, 7.0], [True, True, False]
    )
    assert float(loss) == pytest.approx(-0.98, abs=1e-6)
    assert float(metrics["kl"]) == pytest.approx(0.25, abs=1e-6)
    assert metrics["log_ratio"].tolist() == [0.0, 0.0, 0.0]


def test_k3_is_an_estimate_of_the_kl_divergence():
    # Categoricals p = (0.7, 0.3) and q = (0.4, 0.6): KL(p ‖ q) = 0.7 log(0.7/0.4) + 0.3 log(0.3/0.6) = 0.18379
    p, q = torch.tensor([0.7, 0.3]).double(), torch.tensor([0.4, 0.6]).double()
    assert float((p * k3(p.log(), q.log())).sum()) == pytest.approx(0.18379, abs=1e-5)


def test_token_ratios_by_hand():
    # One step of two tokens, advantage 1, ratios 2 and 0.5: (min(2, 1.2) + min(0.5, 0.8)) / 2 = 0.85
    algorithm = make_grpo(make_policy(spaces.MultiDiscrete([2, 3])), ratio="token", kl_coef=0.0)
    minibatch = TensorDict(
        {
            schema.ADVANTAGE: torch.ones(1),
            schema.STEP_MASK: torch.ones(1, dtype=torch.bool),
            OLD_LOG_PROB: torch.zeros(1, 2),
        },
        batch_size=[1],
    )
    scored = {"token_log_prob": torch.tensor([[2.0, 0.5]]).log(), "entropy": torch.zeros(1)}
    loss, metrics = algorithm._loss(scored, minibatch)
    assert float(loss) == pytest.approx(-0.85, abs=1e-6)
    assert metrics["log_ratio"].shape == (1, 2)


@pytest.mark.parametrize("ratio", ["step", "token"])
@pytest.mark.parametrize("name", POLICIES)
def test_before_the_first_gradient_step_every_ratio_is_one_and_the_kl_zero(name, ratio):
    policy = POLICIES[name]()
    algorithm = make_grpo(policy, batch_size=8, sequence_length=4, ratio=ratio)
    steps = prepared(algorithm, make_round(policy))
    num_real = 0
    order, size = torch.arange(steps.batch_size[-1]), algorithm._minibatch_size(steps)
    for minibatch in algorithm._minibatches(steps, order, size):
        _, metrics = algorithm._loss(policy.evaluate_actions(minibatch), minibatch)
        torch.testing.assert_close(metrics["log_ratio"].exp(), torch.ones_like(metrics["log_ratio"]), atol=1e-4, rtol=0)
        assert float(metrics["kl"]) == pytest.approx(0, abs=1e-6)
        num_real += int(minibatch[schema.STEP_MASK].sum())
    assert num_real == 6 + 5 + 4 + 3


@pytest.mark.parametrize("name", POLICIES)
def test_token_log_probs_sum_to_the_log_prob(name):
    policy = POLICIES[name]()
    policy.reports_tokens = True
    scored = policy.evaluate_actions(make_round(policy) if policy.recurrent else make_round(policy).flatten(0, 1))
    num_tokens = {"chunk": 3, "multidiscrete": 2, "recurrent multidiscrete": 2}.get(name, 1)
    assert scored["token_log_prob"].shape == (*scored["log_prob"].shape, num_tokens)
    torch.testing.assert_close(scored["token_log_prob"].sum(-1), scored["log_prob"])


def test_token_ratios_need_a_policy_that_reports_them():
    class Silent(ActorCritic):
        def evaluate_actions(self, td):
            scored = super().evaluate_actions(td)
            scored.pop("token_log_prob")
            return scored

    policy = Silent(OBSERVATIONS, spaces.Discrete(2), PolicyConfig(**PLAIN))
    algorithm = make_grpo(policy, ratio="token")
    with pytest.raises(InputError, match=r"ratio: 'token' needs a policy that reports token_log_prob; Silent does not"):
        algorithm.update(iter([make_round(policy)]))


# ----------------------------------------------------------------------------------------------------------- update


def test_what_happens_after_an_episode_changes_nothing():
    rollout, results = make_round(make_policy()), []
    for scale in (1.0, 100.0):
        changed = rollout.clone()
        idle = ~changed[schema.STEP_MASK]
        changed[schema.NEXT_REWARD][idle] *= scale
        changed[schema.OBSERVATION][idle] *= scale
        changed[schema.ACTION][idle] *= scale
        algorithm = make_grpo()
        algorithm.update(iter([changed]))
        results.append(torch.cat([parameter.flatten() for parameter in algorithm.policy.parameters()]))
    assert torch.equal(*results)


@pytest.mark.parametrize("memory_hidden", [0, 8])
def test_a_minibatch_in_parts_takes_the_step_of_the_whole(memory_hidden):
    found = []
    for parts in (1, 3):
        # 6 + 5 + 4 + 3 = 18 real steps: minibatches of 16, in parts 6 + 6 + 4, and of 2; with memory 4 sequences of 4
        # steps, in parts 2 + 2, and 2, some with steps that are not real: parts weigh by those that are
        policy = make_policy(memory_hidden=memory_hidden)
        settings = {"n_epochs": 2, "batch_size": 16, "sequence_length": 4, "entropy_coef": 0.1, "kl_coef": 0.3}
        algorithm = make_grpo(policy, gradient_accumulation=parts, **settings)
        metrics = algorithm.update(iter([make_round(policy)]))
        found.append((torch.cat([one.detach().flatten() for one in policy.parameters()]), metrics))
    (whole, metrics), (in_parts, others) = found
    torch.testing.assert_close(in_parts, whole, rtol=1e-6, atol=1e-6)
    for name, value in metrics.items():
        torch.testing.assert_close(others[name], value, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("name", POLICIES)
def test_the_policy_learns_and_the_value_is_left_alone(name):
    policy = POLICIES[name]()
    algorithm = make_grpo(policy, n_epochs=2, batch_size=8, entropy_coef=0.01, sequence_length=4)
    before = copy.deepcopy(policy.state_dict())
    metrics = algorithm.update(iter([make_round(policy)]))
    after = policy.state_dict()
    assert not torch.equal(before["towers.head_weight_0"], after["towers.head_weight_0"])
    for part in ("head_weight_1", "head_bias_1"):
        assert torch.equal(before[f"towers.{part}"], after[f"towers.{part}"])
    assert torch.equal(before["towers.weight_0"][1], after["towers.weight_0"][1])  # the critic's tower
    assert float(metrics["grad_norm"]) > 0
    assert float(metrics["approx_kl"]) > 0
    assert algorithm.version == 1


def test_a_policy_without_a_value_learns():
    class Actor(ActorCritic):
        def act(self, td, deterministic=False):
            return super().act(td, deterministic).exclude(schema.VALUE)

        def evaluate_actions(self, td):
            scored = super().evaluate_actions(td)
            return {name: scored[name] for name in ("log_prob", "entropy")}

    policy = Actor(OBSERVATIONS, spaces.Discrete(2), PolicyConfig(**PLAIN))
    before = policy.towers.head_weight_0.clone()
    make_grpo(policy).update(iter([make_round(policy).exclude(schema.VALUE)]))
    assert not torch.equal(before, policy.towers.head_weight_0)


def test_an_iteration_without_a_spread_moves_nothing():
    policy = make_policy()
    algorithm = make_grpo(policy)
    algorithm.update(iter([make_round(policy)]))  # Adam has momentum now
    before = copy.deepcopy(policy.state_dict())
    rollout = make_round(policy)
    rollout[schema.NEXT_REWARD] = torch.zeros(6, 4)
    metrics = algorithm.update(iter([rollout, rollout]))
    assert all(torch.equal(before[name], value) for name, value in policy.state_dict().items())
    assert {name: float(metrics[name]) for name in ("groups", "dropped_groups", "rounds", "grad_norm")} == {
        "groups": 4,
        "dropped_groups": 4,
        "rounds": 2,
        "grad_norm": 0,
    }
    assert algorithm.version == 2


def test_group_metrics_by_hand():
    # Returns 3, 1 | 2, 2: mean 2; deviations 1 and 0: mean ½; rows that belong to no episode: 0 + 2 + 2 + 1 = 5
    algorithm = make_grpo()
    rollout = rewarded([[1, 1, 1], [1, 7, 7], [2, 7, 7], [1, 1, 7]], [3, 1, 1, 2])
    metrics = algorithm._group_metrics([rollout], [algorithm.advantages(rollout)])
    expected = {"mean_return": 2, "return_spread": 0.5, "groups": 2, "dropped_groups": 1, "rounds": 1, "idle_steps": 5}
    assert {name: float(value) for name, value in metrics.items()} == expected


def test_groups_without_a_spread_are_not_trained_on():
    algorithm = make_grpo()
    rollout = make_round(algorithm.policy)
    rollout[schema.NEXT_REWARD][:, 2:] = 0.0
    steps = prepared(algorithm, rollout)
    assert len(steps) == 6 + 5
    torch.testing.assert_close(steps[schema.ADVANTAGE].abs(), torch.ones(11))


@pytest.mark.parametrize("interval", [None, 2])
def test_the_reference_stays_or_follows(interval):
    algorithm = make_grpo(reference_update_interval=interval)
    start = copy.deepcopy(algorithm.policy.state_dict())
    followed = []
    for _ in range(3):
        algorithm.update(iter([make_round(algorithm.policy)]))
        reference, policy = algorithm.reference.state_dict(), algorithm.policy.state_dict()
        followed.append(all(torch.equal(reference[name], policy[name]) for name in policy))
        if interval is None:
            assert all(torch.equal(reference[name], start[name]) for name in start)
    assert followed == ([False] * 3 if interval is None else [False, True, False])


def test_a_loaded_state_goes_on_bit_for_bit():
    one = make_grpo(batch_size=8)
    one.update(iter([make_round(one.policy)]))
    weights, state = copy.deepcopy(one.policy.state_dict()), copy.deepcopy(one.state_dict())
    one.update(iter([make_round(one.policy)]))
    other = make_grpo(batch_size=8)
    other.policy.load_state_dict(weights)
    other.load_state_dict(state)
    other.update(iter([make_round(other.policy)]))
    for name, value in one.policy.state_dict().items():
        assert torch.equal(value, other.policy.state_dict()[name])
    assert one.version == other.version == 2


def test_a_reference_that_was_not_kept_is_said(caplog):
    without = make_grpo(kl_coef=0.0)
    assert without.reference is None
    algorithm = make_grpo()
    algorithm.load_state_dict(without.state_dict())
    assert "kl_coef was 0 until now" in caplog.text


def test_target_kl_stops_the_epochs():
    algorithm = make_grpo(target_kl=1e-6, n_epochs=50, learning_rate=0.01)
    metrics = algorithm.update(iter([make_round(algorithm.policy)]))
    assert float(metrics["epochs_stopped_early"]) == 1
    assert float(metrics["approx_kl"]) < 0.05


def test_the_linear_schedule_ends_at_zero():
    algorithm = make_grpo(learning_rate_schedule="linear", learning_rate=0.5)
    algorithm.progress = 0.75
    assert float(algorithm.update(iter([make_round(algorithm.policy)]))["learning_rate"]) == 0.125


def test_the_adaptive_rate_follows_the_kl_of_updates_that_moved_the_policy():
    algorithm = make_grpo(learning_rate=1e-3, learning_rate_schedule="adaptive", desired_kl=10.0)
    rollout = make_round(algorithm.policy)
    rollout[schema.NEXT_REWARD] = torch.zeros(6, 4)
    algorithm.update(iter([rollout]))  # no spread, so no step: a KL of 0 says nothing
    assert algorithm.learning_rate == 1e-3
    algorithm.update(iter([make_round(algorithm.policy)]))  # moved less than half of the wanted KL: × 1.5
    assert algorithm.learning_rate == pytest.approx(1.5e-3)


def test_a_loss_that_is_not_finite_ends_the_run():
    algorithm = make_grpo()
    rollout = make_round(algorithm.policy)
    rollout[schema.LOG_PROB][0] = float("nan")
    with pytest.raises(RunError, match="the gradient is no longer finite"):
        algorithm.update(iter([rollout]))


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"group_size": 1}, "group_size: 1 is out of range; must be at least 2"),
        ({"clip_range": 1.0}, "clip_range: 1.0 is out of range; must be less than 1"),
        ({"advantage": "gae"}, "advantage: 'gae' is not allowed; one of 'outcome', 'process'"),
    ],
)
def test_wrong_settings_are_rejected(settings, line):
    with pytest.raises(InputError) as error:
        GRPOSettings(**settings)
    assert str(error.value) == line
