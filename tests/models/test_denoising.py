"""Heads that denoise: the schedules by hand, exact log-probs, the noise network, and frozen steps."""

import copy
import math

import pytest
import torch
from offline_worlds import schema_row, small_actor
from torch.distributions import Normal

from deft import schema
from deft.errors import InputError
from deft.models.denoising import DENOISING_CHUNKS, Denoising, DiffusionChunks, FlowChunks
from deft.runs.checkpoint import load_weights

WIDTH = 8
VARIANTS = {
    "flow": {"distribution": "flow"},
    "flow with a noise network": {"distribution": "flow", "noise_network": True},
    "flow, last 2 steps": {"distribution": "flow", "trained_steps": 2},
    "diffusion": {"distribution": "diffusion"},
    "diffusion, last 3 steps": {"distribution": "diffusion", "trained_steps": 3},
}


def known_diffusion(**settings) -> DiffusionChunks:
    """A network that always predicts the noise 0.5."""
    head = DiffusionChunks(WIDTH, 1, 1, Denoising(**settings))
    torch.nn.init.zeros_(head.out.weight)
    torch.nn.init.constant_(head.out.bias, 0.5)
    return head


def test_one_step_of_a_diffusion_by_hand():
    """From ᾱ to ᾱ' with ε̂ = 0.5: â = (x − √(1 − ᾱ) 0.5) / √ᾱ, within ±1 here, so ε̂ stays."""
    head = known_diffusion(diffusion_steps=10, ddim_steps=5, noise_min=0.01)
    assert head.times == [9, 7, 5, 3, 1, 0]
    x, features = torch.tensor([[[0.3]]]), torch.zeros(1, WIDTH)
    now, then = head.signal[3].item(), head.signal[1].item()
    action = (0.3 - math.sqrt(1 - now) * 0.5) / math.sqrt(now)
    variance = (1 - then) / (1 - now) * (1 - now / then)
    mean, deviation = head._transition(features)(x, 3)
    assert abs(action) < 1
    assert mean.item() == pytest.approx(math.sqrt(then) * action + math.sqrt(1 - then - variance) * 0.5, rel=1e-4)
    assert deviation.item() == pytest.approx(math.sqrt(variance), rel=1e-4)
    mean, _ = head._transition(features, deterministic=True)(x, 3)  # DDIM: η = 0
    assert mean.item() == pytest.approx(math.sqrt(then) * action + math.sqrt(1 - then) * 0.5, rel=1e-4)
    mean, deviation = head._transition(features)(x, 4)  # the last step ends at â, with the least noise
    now = head.signal[1].item()
    assert mean.item() == pytest.approx((0.3 - math.sqrt(1 - now) * 0.5) / math.sqrt(now), rel=1e-4)
    assert deviation.item() == pytest.approx(0.01)


def test_a_predicted_action_beyond_the_range_is_clipped():
    head = known_diffusion(diffusion_steps=10, ddim_steps=5)
    mean, _ = head._transition(torch.zeros(1, WIDTH))(torch.tensor([[[5.0]]]), 4)
    assert mean.item() == pytest.approx(1.0)


def test_the_loss_of_a_diffusion_is_the_error_of_its_noise(monkeypatch):
    head = known_diffusion()
    noise = torch.tensor([[[0.2]], [[-1.0]]])
    monkeypatch.setattr(torch, "randn_like", lambda like: noise)
    loss = head.imitation_loss(torch.zeros(2, WIDTH), torch.zeros(2, 1, 1), None)
    assert loss.tolist() == pytest.approx([0.3**2, 1.5**2])  # (0.5 − ε)²


def test_a_noise_network_starts_at_the_learned_noise_and_stays_within_its_bounds():
    spec = Denoising(noise_network=True, flow_noise=0.1, noise_min=0.05, noise_max=0.2)
    head, features, x = FlowChunks(WIDTH, 1, 2, spec), torch.randn(3, WIDTH), torch.randn(3, 1, 2)
    _, deviation = head._transition(features)(x, 0)
    torch.testing.assert_close(deviation, torch.full((3, 1, 2), 0.1))
    torch.nn.init.normal_(head.noise_network[-1].weight, std=100.0)
    _, deviation = head._transition(features)(x, 0)
    assert bool(((deviation >= 0.0499) & (deviation <= 0.2001)).all())
    assert deviation.std() > 0.01  # it depends on the state
    # With the offset g = 0 replaced by g: log σ = l + (h − l) sigmoid(logit(½) + g), since 0.1 is the geometric mean.
    torch.nn.init.zeros_(head.noise_network[-1].weight)
    torch.nn.init.constant_(head.noise_network[-1].bias, 1.0)
    _, deviation = head._transition(features)(x, 0)
    expected = 0.05 * 4 ** (1 / (1 + math.exp(-1.0)))
    torch.testing.assert_close(deviation, torch.full((3, 1, 2), expected))


@pytest.mark.parametrize("kind", DENOISING_CHUNKS)
def test_log_probs_of_a_chain_are_those_of_its_gaussians(kind):
    torch.manual_seed(0)
    head, features = DENOISING_CHUNKS[kind](WIDTH, 2, 3, Denoising()), torch.randn(4, WIDTH)
    action, log_prob, sample = head.draw(features, False, None)
    chain, transition = sample[schema.CHAIN], head._transition(features)
    steps = [(transition(chain[:, step], step), chain[:, step + 1]) for step in range(5)]
    normals = [(Normal(mean, deviation.expand_as(mean)), after) for (mean, deviation), after in steps]
    expected = torch.stack([normal.log_prob(after).sum((1, 2)) for normal, after in normals], 1)
    tokens, entropy = head.score(features, action, None, sample)
    torch.testing.assert_close(tokens, expected)
    torch.testing.assert_close(log_prob, expected.sum(1))
    torch.testing.assert_close(entropy, sum(normal.entropy().sum((1, 2)) for normal, _ in normals))
    noise = chain[:, 0]
    torch.testing.assert_close(head.denoise(features, noise), head.denoise(features, noise))


# -- policies ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", VARIANTS)
def test_what_acts_is_what_learns(name):
    """Scored again by the weights that acted, every ratio is 1; after a change of the trained network it is not."""
    torch.manual_seed(0)
    policy = small_actor(2, 3, **VARIANTS[name])
    td = policy.act(schema_row(torch.randn(6, 2)))
    td[schema.ACTION_MASK] = torch.tensor([True, True, False]).expand(6, 3)
    td = policy.act(td)
    assert bool((td[schema.ACTION][:, 2] == 0).all())
    policy.reports_tokens = True
    scored = policy.evaluate_actions(td)
    torch.testing.assert_close(scored["log_prob"], td[schema.LOG_PROB], rtol=0, atol=1e-4)
    count = VARIANTS[name].get("trained_steps", 5)
    assert scored["token_log_prob"].shape == (6, count)
    torch.testing.assert_close(scored["token_log_prob"].sum(1), scored["log_prob"], rtol=0, atol=1e-4)
    with torch.no_grad():
        policy.head.chunks.out.bias.add_(0.1)
    assert bool(((policy.evaluate_actions(td)["log_prob"] - td[schema.LOG_PROB]).abs() > 1e-3).all())
    assert policy.action_selection(deterministic=True) == "sampled noise"


@pytest.mark.parametrize("name", VARIANTS)
def test_without_sampling_only_the_first_noise_is_random(name, monkeypatch):
    policy = small_actor(2, 1, **VARIANTS[name])
    td = policy.act(schema_row(torch.randn(3, 2)), deterministic=True)
    noise, state = td[schema.SAMPLE, schema.CHAIN][:, 0], policy.encode(td[schema.OBSERVATION])
    torch.testing.assert_close(policy.denoise(state, noise), td[schema.ACTION])


@pytest.mark.parametrize("distribution", DENOISING_CHUNKS)
def test_frozen_steps_stay_and_get_no_gradient(distribution):
    torch.manual_seed(0)
    cloned = small_actor(2, 1, distribution)
    policy = small_actor(2, 1, distribution, trained_steps=2)
    load_weights(policy, cloned.state_dict(), "sft")
    chunks = policy.head.chunks
    assert torch.equal(chunks.frozen["out"].weight, cloned.head.chunks.out.weight)
    # At the start both are one network: the same noise leads to the same action.
    state, noise = policy.encode(torch.randn(4, 2)), torch.randn(4, 1, 1)
    torch.testing.assert_close(policy.denoise(state, noise), cloned.denoise(state, noise))
    with torch.no_grad():
        td = policy.act(schema_row(torch.randn(4, 2)))
    policy.evaluate_actions(td)["log_prob"].sum().backward()
    assert all(part.grad is None for part in (*chunks.frozen.parameters(), *policy.actor.parameters()))
    assert bool(chunks.out.weight.grad.abs().sum() > 0)
    with pytest.raises(InputError, match="trained_steps: is for ppo and grpo from a trained policy"):
        policy.imitation_loss(state, torch.zeros(1, 4, 1))


def test_a_noise_network_is_added_to_weights_without_one():
    cloned, policy = small_actor(2, 1, "flow"), small_actor(2, 1, "flow", noise_network=True)
    load_weights(policy, cloned.state_dict(), "sft")
    assert torch.equal(policy.head.chunks.out.weight, cloned.head.chunks.out.weight)
    other = copy.deepcopy(policy)
    load_weights(other, policy.state_dict(), "ppo")


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("flow", {"trained_steps": 6}, "trained_steps 6 must be 1 to 5"),
        ("flow", {"noise_network": True, "noise_min": 0.3}, "noise_min 0.3 must be less than noise_max 0.2"),
        ("diffusion", {"noise_network": True}, "noise_network: is for a flow"),
        ("diffusion", {"ddim_steps": 30}, "ddim_steps 30 is more than diffusion_steps 20"),
    ],
)
def test_settings_that_do_not_fit_are_errors(kind, settings, message):
    with pytest.raises(InputError, match=message):
        DENOISING_CHUNKS[kind](WIDTH, 1, 1, Denoising(**settings))
