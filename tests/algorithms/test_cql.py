import copy
import math

import pytest
import torch
from offline_worlds import (
    batch_of,
    learned_actions,
    make_linear,
    random_batch,
    small_actor,
    two_step_dataset,
)
from torch.nn import functional

from deft import schema
from deft.algorithms.cql import CQL
from deft.algorithms.optimization import gradients_of
from deft.config.algorithm_settings import CQLSettings
from deft.config.settings import DatasetPolicyConfig
from deft.data.datasets.dataset import box

FAST = {"learning_rate": 3e-3, "policy_learning_rate": 3e-3, "tau": 0.05, "cql_samples": 4}
# The second transition terminates: its target is its reward alone.
BATCH = batch_of([1.0, -1.0], [0.5, -0.5], [1.0, 2.0], [2.0, 3.0], [0.0, 1.0])
UNIFORM = 0.6


class FixedSampling:
    """In place of `policy.sample`: two actions a state, the first for the policy's own loss or for the target.

    Here 0.1 and 0.2 with log-densities −0.3 and −0.7; at the next state 0.4 and 0.6 with −1.1 and 0.5.
    """

    here = ((0.1, -0.3), (0.2, -0.7))
    following = ((0.4, -1.1), (0.6, 0.5))

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, state, count):
        pairs = (self.here, self.following)[self.calls % 2]
        self.calls += 1
        assert count == len(pairs)
        members, rows = state.features.shape[:2]
        actions, log_densities = (torch.tensor(column)[:, None, None] for column in zip(*pairs, strict=True))
        return actions[..., None].expand(-1, members, rows, 1), log_densities.expand(-1, members, rows)


@pytest.fixture
def known(monkeypatch):
    """A maker of CQL with Q = (s + 2a, a), Q̄ = (s + a, 2), and the actions above; the random action is 0.6."""

    def make(**settings) -> CQL:
        settings = {"gamma": 0.9, "cql_samples": 1, **settings}
        algorithm = CQL(small_actor(distribution="tanh_gaussian"), CQLSettings(**settings))
        make_linear(algorithm.critics.online, 0, [[1.0], [2.0]], [0.0])
        make_linear(algorithm.critics.online, 1, [[0.0], [1.0]], [0.0])
        make_linear(algorithm.critics.target, 0, [[1.0], [1.0]], [0.0])
        make_linear(algorithm.critics.target, 1, [[0.0], [0.0]], [2.0])
        monkeypatch.setattr(algorithm.policy, "sample", FixedSampling())
        monkeypatch.setattr(torch, "rand_like", lambda tensor: torch.full_like(tensor, (UNIFORM + 1) / 2))
        return algorithm

    return make


def logsumexp(*values: float) -> float:
    return math.log(sum(math.exp(value) for value in values))


def q_1(s: float, a: float) -> float:
    return s + 2 * a


def q_2(s: float, a: float) -> float:
    return a


def gap_by_hand(q, s: float, a: float) -> float:
    """log Σ exp(Q(s, a_i) − log p_i) − Q(s, a), over the random action, the policy's here and the policy's at s'."""
    terms = ((UNIFORM, math.log(0.5)), FixedSampling.here[1], FixedSampling.following[1])
    return logsumexp(*(q(s, action) - log_density for action, log_density in terms)) - q(s, a)


def gaps() -> list[float]:
    """Of each critic, the mean over the batch."""
    return [(gap_by_hand(q, 1.0, 0.5) + gap_by_hand(q, -1.0, -0.5)) / 2 for q in (q_1, q_2)]


def td_loss(first_target: float) -> float:
    # Q₁ = (1 + 1, −1 − 1), Q₂ = (0.5, −0.5); the second target is the reward 2.
    return ((2 - first_target) ** 2 + (-2 - 2) ** 2) / 2 + ((0.5 - first_target) ** 2 + (-0.5 - 2) ** 2) / 2


def test_losses_of_one_update_by_hand(known):
    metrics = known(cql_alpha=5.0).update(iter([BATCH]))
    # Target 1 + 0.9 · min(2 + 0.4, 2); the policy's entropy is not in it.
    assert float(metrics["q_loss"]) == pytest.approx(td_loss(2.8), rel=1e-5)
    assert float(metrics["cql_gap"]) == pytest.approx(sum(gaps()) / 2, rel=1e-5)
    assert float(metrics["cql_penalty"]) == pytest.approx(5.0 * sum(gaps()), rel=1e-5)
    assert float(metrics["mean_q"]) == pytest.approx(0.0, abs=1e-6)
    assert float(metrics["entropy"]) == pytest.approx(0.3)
    assert float(metrics["alpha"]) == pytest.approx(1.0)
    # α log π − min Q at the action 0.1: min(1.2, 0.1) and min(−0.8, 0.1).
    assert float(metrics["policy_loss"]) == pytest.approx(-0.3 - (0.1 - 0.8) / 2, rel=1e-5)


def test_random_actions_have_the_density_of_the_unit_cube():
    """Where Q does not depend on the action, the gap is log(n · 2^A + Σ 1 / p) over the policy's actions."""
    algorithm = CQL(small_actor(3, 2, "tanh_gaussian"), CQLSettings(cql_samples=3))
    for critic in range(2):
        make_linear(algorithm.critics.online, critic, [[1.0], [1.0], [1.0], [0.0], [0.0]], [0.0])
    original, densities = algorithm.policy.sample, []

    def recorded(state, count):
        actions, log_densities = original(state, count)
        densities.append(log_densities[1:].detach())  # the first is for the policy's own loss, or for the target
        return actions, log_densities

    algorithm.policy.sample = recorded  # type: ignore[method-assign]
    metrics = algorithm.update(iter([random_batch(8)]))
    assert [tuple(part.shape) for part in densities] == [(3, 1, 8)] * 2  # of s and of s'
    policy_part = sum(torch.exp(-part).sum(0)[0] for part in densities)
    expected = torch.log(3 * 2.0**2 + policy_part).mean()
    assert float(metrics["cql_gap"]) == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize(("weight", "value"), [(1.0, 2.0), (0.0, 2.4), (0.75, 0.75 * 2.0 + 0.25 * 2.4)])
def test_min_q_weight_goes_from_the_largest_to_the_smallest_target(known, weight, value):
    # Q̄(s', 0.4) = (2.4, 2) in the first row.
    metrics = known(min_q_weight=weight).update(iter([BATCH]))
    assert float(metrics["q_loss"]) == pytest.approx(td_loss(1 + 0.9 * value), rel=1e-5)


def test_the_target_is_of_the_likeliest_action_where_asked(known, monkeypatch):
    algorithm = known(backup_action="likeliest")
    monkeypatch.setattr(algorithm.policy, "mean", lambda state: torch.full((1, 2, 1), -0.2))
    metrics = algorithm.update(iter([BATCH]))
    # Q̄(s', −0.2) = (2 − 0.2, 2) in the first row.
    assert float(metrics["q_loss"]) == pytest.approx(td_loss(1 + 0.9 * 1.8), rel=1e-5)


def test_the_entropy_enters_the_target_where_it_is_asked_for(known):
    # − α log π(0.4 | s') = 1.1
    metrics = known(backup_entropy=True).update(iter([BATCH]))
    assert float(metrics["q_loss"]) == pytest.approx(td_loss(1 + 0.9 * (2.0 + 1.1)), rel=1e-5)


def plain_values(network, x: torch.Tensor) -> torch.Tensor:
    """All critics of [B, D], with torch's own operations: [critics, B]."""
    columns = []
    for index in range(network.num):
        y, last = x, len(network.weights) - 1
        for layer in range(last + 1):
            y = y @ network.weights[layer][index] + network.biases[layer][index]
            y = functional.relu(y) if layer < last else y
        columns.append(y[:, 0])
    return torch.stack(columns)


def restated(algorithm: CQL, batch, cql_alpha: float, returns: torch.Tensor | None = None) -> list[torch.Tensor]:
    """The gradients of the critics' loss, written plainly, for the fixed actions above and `cql_samples` 1."""
    critics = copy.deepcopy(algorithm.critics)
    observation, following = batch[schema.OBSERVATION], batch[schema.NEXT_OBSERVATION]

    def values(network, state, action):
        return plain_values(network, torch.cat([state, torch.as_tensor(action).expand(len(state), 1)], -1))

    going_on = 1 - batch[schema.NEXT_TERMINATED]
    next_q = values(critics.target, following, FixedSampling.following[0][0]).amin(0)
    target = (batch[schema.NEXT_REWARD] + 0.9 * going_on * next_q).detach()
    q = values(critics.online, observation, batch[schema.ACTION])
    loss = (q - target).square().mean(-1).sum()
    policy_terms = []
    for action, log_density in (FixedSampling.here[1], FixedSampling.following[1]):
        term = values(critics.online, observation, action)
        if returns is not None:
            term = torch.where(term < returns, returns, term)  # a constant where the return is larger
        policy_terms.append(term - log_density)
    uniform = values(critics.online, observation, UNIFORM) - math.log(0.5)
    gap = torch.logsumexp(torch.stack([uniform, *policy_terms]), 0) - q
    loss = loss + cql_alpha * gap.mean(-1).sum()
    return list(torch.autograd.grad(loss, list(critics.online.parameters())))


def assert_gradients(algorithm: CQL, expected: list[torch.Tensor]) -> None:
    for parameter, gradient in zip(algorithm.critics.online.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("cql_alpha", [0.0, 5.0])
def test_the_gradient_is_that_of_a_plain_restatement(known, cql_alpha):
    """With cql_alpha 0 that is SAC's: the temporal difference alone."""
    algorithm = known(cql_alpha=cql_alpha)
    expected = restated(algorithm, BATCH, cql_alpha)
    metrics = algorithm.update(iter([BATCH]))
    assert_gradients(algorithm, expected)
    assert (float(metrics["cql_penalty"]) == 0.0) == (cql_alpha == 0.0)


@pytest.mark.parametrize("level", [100.0, -100.0])
def test_cal_ql_pushes_no_action_below_the_return_of_the_data(known, level):
    """Returns above every Q: only the random action is pushed down. Returns below: nothing changes."""
    algorithm, returns = known(cql_alpha=5.0, cal_ql=True), torch.full((2,), level)
    expected = restated(algorithm, BATCH, 5.0, returns)
    plain = restated(algorithm, BATCH, 5.0)
    assert all(torch.allclose(a, b) for a, b in zip(expected, plain, strict=True)) == (level < 0)
    algorithm.update(iter([{**BATCH, schema.VALUE_TARGET: returns}]))
    assert_gradients(algorithm, expected)


def test_cal_ql_gets_the_returns_of_the_dataset():
    dataset = two_step_dataset()
    algorithm = CQL(small_actor(2, 1, "tanh_gaussian"), CQLSettings(cal_ql=True, gamma=0.9))
    sampler = algorithm.make_sampler(dataset, 0, torch.device("cpu"), 0)
    algorithm.prepare(dataset, sampler, fresh=True)
    batch = sampler.sample(256)
    # A good episode pays 1 at its second step: 0.9 from its first, 1 from its second; the sign of the first action, or
    # at the second step that in the observation, identifies it.
    second = batch[schema.OBSERVATION][:, 0] == 1
    good = torch.where(second, batch[schema.OBSERVATION][:, 1], batch[schema.ACTION][:, 0]) > 0
    torch.testing.assert_close(batch[schema.VALUE_TARGET], good * torch.where(second, 1.0, 0.9))
    algorithm.update(iter([batch]))


@pytest.mark.parametrize(("target", "grows"), [(-50.0, True), (50.0, False)])
def test_the_lagrange_factor_grows_while_the_gap_is_above_its_target(known, target, grows):
    algorithm = known(cql_alpha=5.0, cql_lagrange=True, cql_target_action_gap=target)
    metrics = algorithm.update(iter([BATCH]))
    # The factor starts at 1; the penalty is factor · cql_alpha · Σ (gap − target).
    assert float(metrics["cql_penalty"]) == pytest.approx(sum(5.0 * (gap - target) for gap in gaps()), rel=1e-5)
    assert (float(algorithm.log_factor.detach()) > 0) == grows
    for _ in range(3):
        before = float(algorithm.log_factor.detach())
        algorithm.update(iter([BATCH]))
        assert (float(algorithm.log_factor.detach()) > before) == grows


@pytest.mark.parametrize(("log_density", "grows"), [(2.0, True), (0.5, False)])
def test_the_temperature_holds_the_entropy_at_minus_the_action_dims(known, monkeypatch, log_density, grows):
    # One action dim: the entropy is to be −1. At log π = 2 it is −2, too little; at 0.5 it is −0.5, too much.
    algorithm = known()
    monkeypatch.setattr(FixedSampling, "here", ((0.1, log_density), (0.2, -0.7)))
    algorithm.update(iter([BATCH]))
    assert (float(algorithm.log_alpha.detach()) > 0) == grows


@pytest.mark.parametrize(("target", "grows"), [("auto", False), (2.0, True)])
def test_the_temperature_holds_the_entropy_that_is_asked_for(known, target, grows):
    # FixedSampling's log π is −0.3, an entropy of 0.3: above −1, the action dims, and below 2.
    algorithm = known(target_entropy=target)
    algorithm.update(iter([BATCH]))
    assert (float(algorithm.log_alpha.detach()) > 0) == grows


def test_a_fixed_temperature_stays_also_with_weight_decay(known):
    algorithm = known(alpha=0.2, weight_decay=0.1, policy_learning_rate=0.1)
    for _ in range(3):
        metrics = algorithm.update(iter([BATCH]))
    assert float(metrics["alpha"]) == pytest.approx(0.2)
    assert float(algorithm.log_alpha.detach().exp()) == pytest.approx(0.2)


def test_a_resumed_run_may_have_another_fixed_temperature_and_goes_on_with_a_learned_one(known):
    for before, after, value in ((0.2, 0.5, 0.5), ("auto", "auto", math.exp(0.7))):
        algorithm = known(alpha=before)
        if before == "auto":
            algorithm.log_alpha.data.fill_(0.7)
        resumed = known(alpha=after)
        resumed.load_state_dict(algorithm.state_dict())
        assert float(resumed.log_alpha.detach().exp()) == pytest.approx(value)


@pytest.mark.parametrize(("before", "after"), [("auto", 0.5), (0.5, "auto")])
def test_a_resumed_run_may_fix_a_learned_temperature_or_learn_a_fixed_one(known, before, after):
    algorithm = known(alpha=before)
    algorithm.update(iter([BATCH]))
    alpha = float(algorithm.log_alpha.detach().exp())
    resumed = known(alpha=after)
    resumed.load_state_dict(algorithm.state_dict())
    assert float(resumed.log_alpha.detach().exp()) == pytest.approx(alpha if after == "auto" else 0.5)
    # Adam's memory of the network is that of the run; where α begins to be learned, there is none of α.
    saved, own = algorithm.actor_optimizer.state_dict(), resumed.actor_optimizer.state_dict()
    shared = min(len(saved["state"]), len(own["state"]))
    for index, values in own["state"].items():
        assert values["step"] == 1
        for name in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(values[name], saved["state"][index][name]) if index < shared else not values[name].any()
    start = float(resumed.log_alpha.detach())
    resumed.update(iter([BATCH]))
    assert (float(resumed.log_alpha.detach()) != start) == (after == "auto")


def test_the_policy_does_not_train_the_critics():
    """Its loss is through the critics, to its own parameters alone."""
    algorithm = CQL(small_actor(3, 2, "tanh_gaussian"), CQLSettings(cql_alpha=0.0, gamma=0.0))
    batch = random_batch()
    both = torch.cat([batch[schema.OBSERVATION], batch[schema.ACTION]], -1)
    critics = copy.deepcopy(algorithm.critics)
    loss = (plain_values(critics.online, both) - batch[schema.NEXT_REWARD]).square().mean(-1).sum()
    expected = list(torch.autograd.grad(loss, list(critics.online.parameters())))
    before = [parameter.detach().clone() for parameter in algorithm.policy.actor.parameters()]
    algorithm.update(iter([batch]))
    assert_gradients(algorithm, expected)
    after = algorithm.policy.actor.parameters()
    assert any(not torch.equal(old, new) for old, new in zip(before, after, strict=True))


def test_an_action_that_is_not_in_the_data_is_worth_less_than_without_the_penalty():
    values = {}
    for cql_alpha in (0.0, 5.0):
        torch.manual_seed(0)
        policy = small_actor(2, 1, "tanh_gaussian")
        algorithm = CQL(policy, CQLSettings(**FAST, cql_alpha=cql_alpha))
        learned_actions(algorithm, updates=150)
        with torch.no_grad():
            features = policy.encode(torch.zeros(1, 2)).features
            values[cql_alpha] = algorithm.critics(features, torch.full((1, 1, 1), 0.0))[0, :, 0]
    assert (values[5.0] < values[0.0] - 0.5).all()


def test_learns_where_cloning_fails():
    # Rewards are 0 and 1, so the penalty's weight is small beside 5; behaviour cloning would find −0.24.
    settings = CQLSettings(**FAST, cql_alpha=0.5, alpha=0.1)
    assert min(learned_actions(CQL(small_actor(2, 1, "tanh_gaussian", members=3), settings))) > 0.4


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_the_policys_rate_falls_along_a_cosine_where_asked(schedule):
    policy = small_actor(distribution="tanh_gaussian")
    algorithm = CQL(policy, CQLSettings(policy_learning_rate=2e-4, learning_rate_schedule=schedule, policy_warmup=1))
    rates = []
    for algorithm.progress in (0.0, 1 / 3, 1.0):
        algorithm.schedule()
        rates.append(float(algorithm.actor_optimizer.param_groups[0]["lr"]))
    # 2e-4 · (1 + cos π t) / 2 at t = 0, 1/3, 1; the critics' stays, and the warm-up is as it was.
    assert rates == pytest.approx([2e-4, 1.5e-4, 0.0] if schedule == "cosine" else [2e-4] * 3, abs=1e-9)
    assert float(algorithm.critic_optimizer.param_groups[0]["lr"]) == pytest.approx(3e-4)
    assert bool(algorithm._is_cloning)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without bf16 units: slower, and as close
def test_bf16_is_close_to_float32():
    results = {}
    for precision in ("float32", "bf16"):
        torch.manual_seed(0)
        settings = CQLSettings(precision=precision, cql_samples=3)
        algorithm = CQL(
            CQL.make_policy(box(3), box(2, -1.0, 1.0), DatasetPolicyConfig(hidden_dim=16), settings), settings
        )
        torch.manual_seed(1)
        metrics = [algorithm.update(iter([random_batch(64)])) for _ in range(6)][-1]
        results[precision] = {name: float(value) for name, value in metrics.items()}
    assert results["bf16"] == pytest.approx(results["float32"], rel=0.05, abs=0.02)
    assert results["bf16"] != results["float32"]


def test_the_policy_clones_the_data_while_it_warms_up():
    # While warming up the actor's gradient is that of α log π(a') − log π(a): it does not depend on the critics.
    gradients = []
    for shift in (0.0, 5.0):
        torch.manual_seed(0)
        algorithm = CQL(small_actor(3, 2, "tanh_gaussian"), CQLSettings(policy_warmup=10))
        with torch.no_grad():
            for weight in algorithm.critics.online.weights:
                weight += shift
        algorithm.schedule()
        torch.manual_seed(1)
        algorithm.step(random_batch())
        gradients.append(gradients_of(algorithm.actor_optimizer)[0].clone())
    assert torch.equal(*gradients)
    algorithm.version = 10
    algorithm.schedule()
    assert not bool(algorithm._is_cloning)
