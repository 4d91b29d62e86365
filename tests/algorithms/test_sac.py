import copy
import math

import pytest
import torch
from offline_worlds import batch_of, make_linear, random_batch, schema_row, small_actor

from deft import schema
from deft.algorithms.cql import CQL
from deft.algorithms.sac import SAC
from deft.config.algorithm_settings import CQLSettings, SACSettings
from deft.data.augmentation import random_shift
from deft.data.datasets.dataset import box
from deft.errors import InputError
from deft.models.policy import Policy

# The second transition terminates: its target is its reward alone.
BATCH = batch_of([1.0, -1.0], [0.5, -0.5], [1.0, 2.0], [2.0, 3.0], [0.0, 1.0])


def sac(observation_dim: int = 1, action_dim: int = 1, **settings) -> SAC:
    actor = small_actor(observation_dim, action_dim, "tanh_gaussian", normalize_observation=False)
    return SAC(actor, SACSettings(**settings))


def fixed_sampling(*pairs):
    """In place of `policy.sample`: these (action, log-density), one a call."""
    calls = iter(pairs)

    def sample(state, count=1):
        action, log_density = next(calls)
        rows = state.features.shape[1]
        return torch.full((1, 1, rows, 1), action), torch.full((1, 1, rows), log_density)

    return sample


def known(monkeypatch, **settings) -> SAC:
    """Q = (s + 2a, 4a), Q̄ = (s + a, 3); at s' the policy takes 0.4 (log-density −1.1), at s 0.1 (−0.3)."""
    algorithm = sac(gamma=0.9, **settings)
    make_linear(algorithm.critics.online, 0, [[1.0], [2.0]], [0.0])
    make_linear(algorithm.critics.online, 1, [[0.0], [4.0]], [0.0])
    make_linear(algorithm.critics.target, 0, [[1.0], [1.0]], [0.0])
    make_linear(algorithm.critics.target, 1, [[0.0], [0.0]], [3.0])
    monkeypatch.setattr(algorithm.policy, "sample", fixed_sampling((0.4, -1.1), (0.1, -0.3)))
    return algorithm


def test_losses_of_one_update_by_hand(monkeypatch):
    algorithm = known(monkeypatch, alpha=0.5)
    state, action, next_state, reward, discount = algorithm._read(BATCH)
    q_loss, mean_q = algorithm._critic_loss(state.features, action, next_state, reward, discount)
    # Targets: 1 + 0.9 (min(2 + 0.4, 3) + 0.5 · 1.1) = 1 + 0.9 · 2.95 = 3.655, and 2 (terminal).
    # Q of the data's actions: (1 + 1, 2) and (−1 − 1, −2).
    errors = [(2 - 3.655) ** 2, (-2 - 2) ** 2]
    assert float(q_loss.detach()) == pytest.approx(2 * sum(errors) / 2, rel=1e-5)  # both critics err alike here
    assert float(mean_q) == pytest.approx(0.0, abs=1e-6)
    policy_loss, alpha_loss, *_ = algorithm._policy_losses(state)
    # min(s + 0.2, 0.4) is 0.4 at s = 1 and −0.8 at s = −1; 0.5 · (−0.3) − Q
    assert float(policy_loss.detach()) == pytest.approx((-0.15 - 0.4 + -0.15 + 0.8) / 2, rel=1e-4)
    assert float(alpha_loss.detach()) == 0.0  # fixed


def test_critics_judge_the_actions_that_the_environment_executed():
    # A Gaussian policy stores its samples before clipping; the environment executes them within [-1, 1].
    algorithm = SAC(small_actor(1, 1, "gaussian", normalize_observation=False), SACSettings())
    batch = batch_of([1.0, -1.0, 0.0], [1.6, -0.5, -3.0], [1.0, 2.0, 0.0], [2.0, 3.0, 0.0], [0.0, 1.0, 0.0])
    state, action, *_ = algorithm._read(batch)
    assert action.flatten().tolist() == [1.0, -0.5, -1.0]
    # So must the policy's own actions be, of which those with a deviation of 1 leave the range often.
    samples, _ = algorithm._sample(state._replace(features=state.features.repeat(1, 100, 1)))
    assert float(samples.detach().abs().max()) == 1.0


def test_temperature_moves_towards_the_target_entropy(monkeypatch):
    # Entropy 0.3 against a target of −1 (one action dim): too much, so α falls; against 2 it rises.
    for target, sign in (("auto", -1), (2.0, 1)):
        algorithm = known(monkeypatch, target_entropy=target, learning_rate=1e-2)
        algorithm.step(BATCH)
        assert math.copysign(1, float(algorithm.log_alpha.detach())) == sign
    fixed = known(monkeypatch, alpha=0.3)
    fixed.step(BATCH)
    assert float(fixed.log_alpha.detach().exp()) == pytest.approx(0.3)


def test_the_policys_loss_leaves_the_critics_alone():
    algorithm = sac(3, 2)
    state = algorithm.policy.encode(random_batch()[schema.OBSERVATION])
    policy_loss, *_ = algorithm._policy_losses(state)
    critics = list(algorithm.critics.online.parameters())
    gradients = torch.autograd.grad(policy_loss.sum(), critics, allow_unused=True)
    assert all(gradient is None for gradient in gradients)


def test_a_stored_discount_counts_in_place_of_gamma(monkeypatch):
    algorithm = known(monkeypatch, alpha=0.5)
    batch = {**BATCH, schema.DISCOUNT: torch.tensor([0.5, 0.25])}
    *_, discount = algorithm._read(batch)
    assert discount.tolist() == [[0.5, 0.25]]


def test_policy_delay_and_critic_warmup():
    algorithm = sac(3, 2, policy_delay=2, critic_warmup=2)
    moved = []
    for _ in range(6):
        before = [parameter.detach().clone() for parameter in algorithm.policy.actor_parameters()]
        algorithm.step(random_batch())
        after = list(algorithm.policy.actor_parameters())
        moved.append(any(not torch.equal(old, new) for old, new in zip(before, after, strict=True)))
    # Versions 0 and 1 warm the critics up; after them every second one (2, 4) trains the policy too.
    assert moved == [False, False, True, False, True, False]


def test_target_of_some_critics_only():
    torch.manual_seed(0)
    algorithm = sac(3, 2, num_critics=5, target_critics=2)
    metrics = algorithm.step(random_batch())
    assert torch.isfinite(metrics["q_loss"])
    with pytest.raises(Exception, match="target_critics 3 is more than num_critics 2"):
        SACSettings(target_critics=3)


def test_state_resumes_bit_for_bit():
    torch.manual_seed(0)
    algorithm = sac(3, 2)
    batches = [random_batch() for _ in range(6)]
    for batch in batches[:3]:
        algorithm.step(batch)
    other = sac(3, 2)
    other.policy.load_state_dict(algorithm.policy.state_dict())
    other.load_state_dict(copy.deepcopy(algorithm.state_dict()))
    for one in (algorithm, other):
        torch.manual_seed(1)
        for batch in batches[3:]:
            metrics = one.step(batch)
    for own, theirs in zip(algorithm.policy.parameters(), other.policy.parameters(), strict=True):
        assert torch.equal(own, theirs)
    assert torch.equal(algorithm.log_alpha, other.log_alpha)
    assert metrics.keys() == {"q_loss", "mean_q", "policy_loss", "entropy", "alpha"}


@pytest.mark.filterwarnings("ignore")
def test_compiled_updates_are_the_eager_ones():
    torch.manual_seed(0)
    eager = sac(3, 2, learning_rate=1e-3)
    compiled = sac(3, 2, learning_rate=1e-3, compile=True)
    compiled.policy.load_state_dict(eager.policy.state_dict())
    compiled.load_state_dict(eager.state_dict())
    batches = [random_batch() for _ in range(3)]
    for algorithm in (eager, compiled):
        torch.manual_seed(2)
        for batch in batches:
            algorithm.step(batch)
    for own, theirs in zip(eager.policy.parameters(), compiled.policy.parameters(), strict=True):
        torch.testing.assert_close(own, theirs, rtol=1e-4, atol=1e-6)


def test_rewards_are_scaled_for_critics_that_learned_from_scaled_ones_alone():
    for adopts, scale in ((True, 20.0), (False, 1.0)):
        algorithm = sac(3, 2)
        algorithm.policy.reward_scale.fill_(20.0)
        algorithm = SAC(algorithm.policy, algorithm.settings)
        algorithm.start_from_a_policy()
        if adopts:
            algorithm.load_critics(sac(3, 2).state_dict())
        assert float(algorithm.policy.reward_scale) == scale


def test_critics_and_temperature_are_adopted():
    torch.manual_seed(0)
    offline = CQL(small_actor(3, 2, "tanh_gaussian"), CQLSettings(cql_samples=2))
    offline.log_alpha.data.fill_(-1.5)
    algorithm = sac(3, 2)
    algorithm.load_critics(offline.state_dict())
    for own, theirs in zip(algorithm.critics.parameters(), offline.critics.parameters(), strict=True):
        assert torch.equal(own, theirs)
    assert float(algorithm.log_alpha.detach()) == -1.5
    with pytest.raises(InputError, match="critics of the checkpoint does not fit"):
        sac(3, 2, num_critics=3).load_critics(offline.state_dict())


def test_actions_fill_the_environments_bounds():
    # Trap: SAC's actions were never rescaled to the env's bounds.
    space = box(2, -3.0, 5.0)
    actor = small_actor(3, 2, "tanh_gaussian", action_space=space)
    torch.manual_seed(0)
    td = actor.act(schema_row(torch.randn(2000, 3) * 10))
    action = td[schema.ACTION].detach()
    assert float(action.min()) < -2.5
    assert float(action.max()) > 4.5
    assert torch.allclose(actor.to_unit(torch.tensor([[-3.0, 5.0]])), torch.tensor([[-1.0, 1.0]]))


def test_random_shift_moves_whole_images_and_repeats_their_border():
    torch.manual_seed(0)
    image = torch.arange(36, dtype=torch.uint8).reshape(1, 1, 6, 6).repeat(50, 3, 1, 1)
    shifted = random_shift(image, 2)
    seen = set()
    for moved in shifted:
        assert torch.equal(moved[0], moved[2])  # all channels alike
        # The centre pixel (3, 3) is 21; under a shift (dy, dx) it shows 6 (3 + dy) + 3 + dx.
        dy, dx = divmod(int(moved[0, 3, 3]) - 21 + 2, 6)
        dx -= 2
        rows, columns = (torch.arange(6) + dy).clamp(0, 5), (torch.arange(6) + dx).clamp(0, 5)
        assert torch.equal(moved[0], image[0, 0][rows][:, columns])
        seen.add((dy, dx))
    assert len(seen) > 10
    last = image.movedim(1, -1)
    assert random_shift(last, 2).shape == last.shape


def moved(algorithm: SAC, by: float) -> None:
    """The policy's mean and deviation a step away from its anchor."""
    for parameter in algorithm.policy.actor_parameters():
        parameter.data += by


@pytest.mark.parametrize("distribution", ["gaussian", "tanh_gaussian"])
def test_divergence_is_that_of_torch(distribution):
    torch.manual_seed(0)
    one, other = (small_actor(3, 2, distribution, normalize_observation=False) for _ in range(2))
    observation = torch.randn(5, 3)
    states = [actor.encode(observation) for actor in (one, other)]
    gaussians = []
    for actor, state in zip((one, other), states, strict=True):
        output = actor.actor(state.features)
        mean, log_std = (output.tanh(), actor.head.log_std) if distribution == "gaussian" else output.chunk(2, -1)
        gaussians.append(torch.distributions.Normal(mean, log_std.exp()))
    expected = torch.distributions.kl_divergence(*gaussians).sum(-1)
    exact = one.divergence(states[0], other, states[1])
    torch.testing.assert_close(exact, expected)
    assert exact.shape == (1, 5)
    if distribution == "gaussian":  # its samples are clipped, and what was clipped has another density
        return
    # What any other policy does: log π(a) − log π'(a) of drawn actions, the same in the mean.
    rows = observation[:1].expand(40_000, 3)
    drawn = Policy.divergence(one, one.encode(rows), other, other.encode(rows))
    assert float(drawn.mean().detach()) == pytest.approx(float(expected[0, 0].detach()), rel=0.05)


def anchor_weights(updates: int, **settings) -> list[float]:
    """The anchor's weight at each of so many updates, from 0.5 on."""
    algorithm = sac(3, 2, anchor_coef=0.5, **settings)
    weights = []
    for _ in range(updates):
        algorithm.update(iter([random_batch()]))
        weights.append(float(algorithm.anchor_weight))
    return weights


def test_the_anchors_weight_halves_after_the_warm_up():
    weights = anchor_weights(7, anchor_half_life=2, critic_warmup=2)
    # Updates 0 to 2 with the full weight, then half of it at update 4 and a quarter at update 6.
    assert weights == pytest.approx([0.5, 0.5, 0.5, 0.5 / 2**0.5, 0.25, 0.25 / 2**0.5, 0.125])
    assert anchor_weights(3) == [0.5, 0.5, 0.5]


def test_the_anchors_weight_ends_at_its_floor():
    # 0.5, then half of it at each update, until the next half would be below 0.1.
    weights = anchor_weights(5, anchor_half_life=1, anchor_floor=0.1)
    assert weights == pytest.approx([0.5, 0.25, 0.125, 0.1, 0.1])


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"anchor_half_life": 100}, "there is no anchor; give anchor_coef"),
        ({"anchor_floor": 0.1}, "there is no anchor; give anchor_coef"),
        ({"anchor_coef": 0.01, "anchor_floor": 0.5}, "anchor_floor 0.5 is above anchor_coef 0.01"),
    ],
)
def test_an_anchor_that_cannot_be_is_rejected(given, line):
    with pytest.raises(ValueError, match=line):
        SACSettings(**given)


def test_the_policys_rate_falls_along_a_cosine_where_asked():
    rates = {}
    for schedule in ("constant", "cosine"):
        algorithm = sac(3, 2, learning_rate=1e-3, policy_learning_rate=2e-3, learning_rate_schedule=schedule)
        rates[schedule] = []
        for progress in (0.0, 1 / 3, 0.5, 1.0):
            algorithm.progress = progress
            algorithm.update(iter([random_batch()]))
            rates[schedule].append(float(algorithm.actor_optimizer.param_groups[0]["lr"]))
        assert float(algorithm.critic_optimizer.param_groups[0]["lr"]) == pytest.approx(1e-3)
    # 2e-3 · (1 + cos π t) / 2 at t = 0, 1/3, 1/2, 1
    assert rates["cosine"] == pytest.approx([2e-3, 1.5e-3, 1e-3, 0.0], abs=1e-9)
    assert rates["constant"] == pytest.approx([2e-3] * 4)


def test_the_anchored_loss_is_the_formula(monkeypatch):
    algorithm = known(monkeypatch, alpha=0.5, anchor_coef=0.2)
    moved(algorithm, 0.1)
    state, *_ = algorithm._read(BATCH)
    algorithm.policy.sample(state)  # the pair for the next state
    loss, _, _, divergence = algorithm._policy_losses(state, algorithm._anchored(BATCH))
    # As by hand above: values 0.4 and −0.8, mean size 0.6; α log π = −0.15.
    values = ((-0.15 - 0.4) + (-0.15 + 0.8)) / 2 / 0.6
    assert float(divergence.detach().mean()) > 1e-3
    assert float(loss.detach()) == pytest.approx(values + 0.2 * float(divergence.detach().mean()), rel=1e-4)
    # The drawn actions are constants here, so all of the gradient is the divergence's.
    parameters = list(algorithm.policy.actor_parameters())
    own = torch.autograd.grad(loss.sum(), parameters, retain_graph=True)
    expected = torch.autograd.grad(0.2 * divergence.mean(-1).sum(), parameters)
    for gradient, wanted in zip(own, expected, strict=True):
        torch.testing.assert_close(gradient, wanted)


def test_a_strong_anchor_holds_the_policy():
    strayed = []
    for coefficient in (1e-6, 100.0):
        torch.manual_seed(0)
        algorithm = sac(3, 2, anchor_coef=coefficient, learning_rate=1e-3)
        batches = [random_batch() for _ in range(4)]
        for step in range(40):
            metrics = algorithm.step(batches[step % 4])
        strayed.append(float(metrics["anchor_kl"]))
    assert strayed[1] < strayed[0] / 5


def test_an_anchored_run_resumes_bit_for_bit():
    torch.manual_seed(0)
    settings = {"anchor_coef": 0.3, "anchor_half_life": 3}
    algorithm = sac(3, 2, **settings)
    batches = [random_batch() for _ in range(6)]
    algorithm.update(iter(batches[:3]))
    other = sac(3, 2, **settings)
    other.policy.load_state_dict(algorithm.policy.state_dict())
    other.load_state_dict(copy.deepcopy(algorithm.state_dict()))
    for one in (algorithm, other):
        torch.manual_seed(1)
        metrics = one.update(iter(batches[3:]))
    for own, theirs in zip(algorithm.policy.parameters(), other.policy.parameters(), strict=True):
        assert torch.equal(own, theirs)
    for own, theirs in zip(algorithm.anchor.parameters(), other.anchor.parameters(), strict=True):
        assert torch.equal(own, theirs)
    assert "anchor_kl" in metrics


def test_a_policy_learning_rate_of_its_own():
    algorithm = sac(3, 2, learning_rate=1e-3, policy_learning_rate=1e-5)
    assert float(algorithm.actor_optimizer.param_groups[0]["lr"]) == pytest.approx(1e-5)
    assert float(algorithm.critic_optimizer.param_groups[0]["lr"]) == pytest.approx(1e-3)
