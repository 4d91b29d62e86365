"""DSRL: its losses by hand, and a flow with two modes of which one is rewarded."""

import copy
import math

import pytest
import torch
from flows import linear_flow
from offline_worlds import batch_of, make_linear
from tensordict import TensorDict

from deft import schema
from deft.algorithms.dsrl import DSRL
from deft.algorithms.sac import SAC
from deft.config.algorithm_settings import DSRLSettings
from deft.errors import InputError
from deft.models.noise_policy import NoisePolicy

# The second transition terminates. The noise is stored in the environment's units of noise, ±2.
BATCH = {
    **batch_of([1.0, -1.0], [0.5, -0.5], [1.0, 2.0], [2.0, 3.0], [0.0, 1.0]),
    (schema.SAMPLE, schema.NOISE): torch.tensor([[1.0], [-1.6]]),
}
# The losses of the paper, without an anchor, from the first update on.
PLAIN = {"gamma": 0.9, "alpha": 0.5, "anchor_coef": 0.0, "critic_warmup": 0}


def dsrl(critic: str, **settings) -> DSRL:
    """f(w) = 0.59049 w, with noise in ±2."""
    policy = NoisePolicy(linear_flow(0.5), noise_bound=2.0)
    return DSRL(policy, DSRLSettings(critic=critic, noise_bound=2.0, **{**PLAIN, **settings}))


def known(monkeypatch, critic: str) -> DSRL:
    """Q = (s + 2x, 4x), Q̄ = (s + x, 3) of unit noise or actions x; at s' the noise 0.8 (0.4 in units of the bound)."""
    algorithm = dsrl(critic)
    make_linear(algorithm.critics.online, 0, [[1.0], [2.0]], [0.0])
    make_linear(algorithm.critics.online, 1, [[0.0], [4.0]], [0.0])
    make_linear(algorithm.critics.target, 0, [[1.0], [1.0]], [0.0])
    make_linear(algorithm.critics.target, 1, [[0.0], [0.0]], [3.0])
    draws = iter([(0.4, -1.1), (0.1, -0.3)])

    def sample_noise(state):
        noise, log_density = next(draws)
        rows = state.features.shape[1]
        return torch.full((1, 1, rows, 1), noise), torch.full((1, 1, rows), log_density)

    monkeypatch.setattr(algorithm.policy, "sample_noise", sample_noise)
    return algorithm


def test_critics_of_noise_by_hand(monkeypatch):
    algorithm = known(monkeypatch, "noise")
    state, noise, next_state, reward, discount = algorithm._read(BATCH)
    assert noise.flatten().tolist() == pytest.approx([0.5, -0.8])  # w / 2
    q_loss, _ = algorithm._critic_loss(state.features, noise, next_state, reward, discount)
    # Targets: 1 + 0.9 (min(2 + 0.4, 3) + 0.5 · 1.1) = 3.655, and 2 (terminal).
    # Q of the stored noise: (1 + 1, 2) and (−1 − 1.6, −3.2).
    errors = [(2 - 3.655) ** 2, (2 - 3.655) ** 2, (-2.6 - 2) ** 2, (-3.2 - 2) ** 2]
    assert float(q_loss.detach()) == pytest.approx(sum(errors) / 2, rel=1e-5)
    policy_loss, *_ = algorithm._policy_losses(state)
    # min(s + 0.2, 0.4) is 0.4 at s = 1 and −0.8 at s = −1; 0.5 · (−0.3) − Q
    assert float(policy_loss.detach()) == pytest.approx((-0.15 - 0.4 + -0.15 + 0.8) / 2, rel=1e-4)


def test_critics_of_actions_by_hand(monkeypatch):
    algorithm = known(monkeypatch, "action")
    state, action, next_state, reward, discount = algorithm._read(BATCH)
    q_loss, _ = algorithm._critic_loss(state.features, action, next_state, reward, discount)
    # The noise 0.8 at s' leads to the action 0.8 · 0.59049 = 0.472392; the data's actions are 0.5 and −0.5.
    target = 1 + 0.9 * (2 + 0.472392 + 0.5 * 1.1)
    errors = [(2 - target) ** 2, (2 - target) ** 2, (-2 - 2) ** 2, (-2 - 2) ** 2]
    assert float(q_loss.detach()) == pytest.approx(sum(errors) / 2, rel=1e-5)
    # Both noise critics are 0 · w + 1. Of unit noise 0.25 and −0.25 the actions are ±0.5 · 0.59049 = ±0.295245, and
    # min Q is min(1 + 0.59049, 1.18098) and min(−1 − 0.59049, −1.18098).
    for index in range(2):
        make_linear(algorithm.noise_critics.online, index, [[0.0], [0.0]], [1.0])
    monkeypatch.setattr(torch, "randn", lambda *shape, **how: torch.tensor([[[0.5], [-0.5]]]))
    loss = algorithm._other_loss(state)
    assert float(loss.detach()) == pytest.approx(2 * ((1 - 1.18098) ** 2 + (1 + 1.59049) ** 2) / 2, rel=1e-5)
    # The policy follows the noise critics: α log π − 1
    algorithm.policy.sample_noise(state)  # the draw at s' was used; this one is for s
    monkeypatch.setattr(algorithm.policy, "sample_noise", lambda state: (torch.zeros(1, 1, 2, 1), torch.zeros(1, 1, 2)))
    policy_loss, *_ = algorithm._policy_losses(state)
    assert float(policy_loss.detach()) == pytest.approx(-1.0)


@pytest.mark.parametrize("critic", ["noise", "action"])
def test_a_step_trains_the_noise_alone(critic):
    algorithm = dsrl(critic)
    before = copy.deepcopy(algorithm.policy.state_dict())
    metrics = algorithm.step(BATCH)
    for name, value in algorithm.policy.state_dict().items():
        is_frozen = name.startswith(("base.", "head.", "reward_scale"))
        if is_frozen or name == "actor.biases.2":
            assert torch.equal(value, before[name]) == is_frozen, name
    assert ("distillation_loss" in metrics) == (critic == "action")


def test_it_finds_the_noise_of_the_best_action():
    """Reward −4 (a − 0.4)² of single steps with a = 0.59049 w: the best noise is 0.4 / 0.59049 = 0.677."""
    torch.manual_seed(0)
    policy = NoisePolicy(linear_flow(0.5), noise_bound=2.0)
    algorithm = DSRL(policy, DSRLSettings(noise_bound=2.0, learning_rate=1e-2, **{**PLAIN, "alpha": 0.1}))
    noise = torch.empty(128, 1).uniform_(-2.0, 2.0)
    action, states = 0.9**5 * noise, torch.zeros(128, 1)
    columns = {
        schema.OBSERVATION: states,
        schema.ACTION: action,
        (schema.SAMPLE, schema.NOISE): noise,
        schema.NEXT_REWARD: -4.0 * (action - 0.4).square()[:, 0],
        schema.NEXT_OBSERVATION: states,
        schema.NEXT_TERMINATED: torch.ones(128),
    }
    for _ in range(150):
        algorithm.step(columns)
    found = policy.mean(policy.encode(states[:1]))
    assert float(found) == pytest.approx(0.4, abs=0.1)


def test_an_anchor_on_the_noise_of_training_by_hand():
    algorithm = dsrl("noise", alpha=0.0, anchor_coef=0.5)
    policy = algorithm.policy
    with torch.no_grad():
        policy.actor.biases[-1].copy_(torch.tensor([1.0, math.log(0.5)]))  # μ = 1, σ = ½ in every state
    make_linear(algorithm.critics.online, 0, [[0.0], [0.0]], [-4.0])
    make_linear(algorithm.critics.online, 1, [[0.0], [0.0]], [3.0])
    state = algorithm._read(BATCH)[0]
    loss, _, _, divergence = algorithm._policy_losses(state)
    # KL(N(1, ¼) ‖ N(0, 1)) = log 2 + (¼ + 1) / 2 − ½; tanh does not change it. Q is −4, divided by its mean size 4.
    expected = math.log(2.0) + 0.625 - 0.5
    assert divergence.tolist() == [pytest.approx([expected] * 2, rel=1e-5)]
    assert float(loss.detach()) == pytest.approx(1.0 + 0.5 * expected, rel=1e-5)
    assert algorithm.state_dict()["anchor"] is None  # the frozen policy is not stored a second time


@pytest.mark.parametrize("critic", ["noise", "action"])
def test_few_transitions_do_not_make_it_worse_than_the_frozen_policy(critic):
    """256 single steps, 16 numbers of noise: one succeeds if w₀ > 0 and the sum of the other wᵢ² is below 20.

    Noise at the start is w = 1.5 tanh x, x ~ N(0, 1), with E w² = 1.5² · 0.394 = 0.89: the sum is 13.3 on average, its
    deviation 15^½ · 0.70 = 2.7, so half of the steps succeed. At the bound the sum is 15 · 2.25 = 34, and none does.
    New critics are wrong about the 15 numbers. Without warm-up and anchor, and with the temperature 1e-3, success fell
    to 0.00 and 0.04 here, and ended at 0.43 with critics of noise; with the warm-up alone it ended at 0.44.
    """
    torch.manual_seed(4)
    policy = NoisePolicy(linear_flow(1.0, action_dim=16))  # a = 0.8⁵ w
    settings = DSRLSettings(critic=critic, critic_layer_norm=True, learning_rate=3e-3, critic_warmup=30)
    algorithm = DSRL(policy, settings)

    def play(count):
        steps = TensorDict({schema.OBSERVATION: torch.zeros(count, 1)}, batch_size=[count])
        with torch.no_grad():
            noise = policy.act(steps)[schema.SAMPLE, schema.NOISE]
        return steps, ((noise[:, 0] > 0) & (noise[:, 1:].square().sum(-1) < 20.0)).float()

    assert float(play(4096)[1].mean()) == pytest.approx(0.5, abs=0.03)
    steps, success = play(256)
    columns = {
        schema.OBSERVATION: steps[schema.OBSERVATION],
        schema.ACTION: steps[schema.ACTION],
        (schema.SAMPLE, schema.NOISE): steps[schema.SAMPLE, schema.NOISE],
        schema.NEXT_REWARD: success,
        schema.NEXT_OBSERVATION: steps[schema.OBSERVATION],
        schema.NEXT_TERMINATED: torch.ones(256),
    }
    lowest = 1.0
    for update in range(100):
        algorithm.step(columns)
        if update % 5 == 4:
            lowest = min(lowest, float(play(1024)[1].mean()))
    assert lowest > 0.5 - 3.5 * 0.5 / 32  # the deviation of a mean of 1,024 steps is 0.5 / 32
    assert float(play(1024)[1].mean()) > 0.95


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"random_steps": 100}, "explores by its noise"),
        ({"prior_data": "data"}, "a dataset holds no noise; use critic action"),
    ],
)
def test_settings_that_do_not_fit_are_rejected(settings, message):
    with pytest.raises(ValueError, match=message):
        DSRLSettings(**settings)


def test_it_needs_a_trained_policy_that_denoises():
    with pytest.raises(InputError, match=r"give one with --model_path"):
        dsrl("noise").check_policy(fresh=True)
    with pytest.raises(InputError, match=r"wrap it: deft.models.noise_policy.NoisePolicy\(policy\)"):
        DSRL(linear_flow(0.5))
    assert issubclass(DSRL, SAC)
