"""Real-time chunking: the guidance by hand, chains that are not guided bit for bit, and chunks that continue."""

import math

import pytest
import torch
from offline_worlds import small_actor
from tensordict import TensorDict

from deft import schema
from deft.models.denoising import DENOISING_CHUNKS, Denoising, FlowChunks
from deft.models.flow_chain import integrate
from deft.models.inpainting import Inpainting, guided_action, guided_noise, guided_velocity, soft_mask
from deft.models.vla.heads import SwitchedChunks

WIDTH, LENGTH = 32, 8


def column(*values):
    """One chunk [1, K, 1]."""
    return torch.tensor(values).view(1, -1, 1)


# -- by hand -----------------------------------------------------------------------------------------------------------


def test_the_weights_decrease_over_the_steps_that_are_left():
    """Row 0: K = 4, L = 3, d = 1. c_1 = (3 − 1) / (3 − 1 + 1) = 2/3, c_2 = 1/3; no target for step 3.

    Row 1: everything is frozen. Row 2: nothing is left.
    """
    found = soft_mask(4, torch.tensor([3, 4, 0]), torch.tensor([1, 4, 0])).squeeze(-1)
    expected = [c * (math.exp(c) - 1) / (math.e - 1) for c in (2 / 3, 1 / 3)]
    torch.testing.assert_close(found[0], torch.tensor([1.0, *expected, 0.0]))
    assert found[1].tolist() == [1.0] * 4
    assert found[2].tolist() == [0.0] * 4


def shift(x, time):
    """The network M x with M = [[0, 1], [0, 0]]: its output in step 0 is x in step 1, and 0 in step 1."""
    return torch.cat([x[:, 1:], torch.zeros_like(x[:, :1])], 1)


@pytest.mark.parametrize(
    ("t", "limit", "expected"),
    [
        # x = (2, 4), v = (4, 0), Â = x − v / 2 = (0, 4); W (Y − Â) = (1, 0) for Y = (1, 9), W = (1, 0);
        # g = (I − M / 2)ᵀ (1, 0) = (1, −1/2). The factor is (1/4 + 1/4) / (1/4) = 2: v' = (4, 0) − 2 (1, −1/2).
        (0.5, 5.0, (2.0, 1.0)),
        (0.5, 0.5, (3.5, 0.25)),
        # t = 1: the factor is infinite, and limited to 5. Â = (−2, 4), W (Y − Â) = (3, 0), g = (3, −3).
        (1.0, 5.0, (-11.0, 15.0)),
    ],
)
def test_the_guidance_of_a_linear_velocity(t, limit, expected):
    inpainting = Inpainting(column(1.0, 9.0), column(1.0, 0.0), limit)
    with torch.no_grad():
        found = guided_velocity(shift, inpainting)(column(2.0, 4.0), torch.tensor([t]))
    torch.testing.assert_close(found, column(*expected))


@pytest.mark.parametrize(("limit", "factor"), [(5.0, 1 / 0.6), (0.5, 0.4 / 0.6)])  # min(α β, 1) / σ
def test_the_guidance_of_a_linear_diffusion(limit, factor):
    """ᾱ = 0.64: α = 0.8, σ = 0.6. x = (2, 4), ε̂ = (4, 0), Â = (x − 0.6 ε̂) / 0.8 = (−0.5, 5).

    W (Y − Â) = (1, 0) for Y = (0.5, 9), and g = (I − 0.6 M)ᵀ (1, 0) / 0.8 = (1.25, −0.75).
    """
    inpainting = Inpainting(column(0.5, 9.0), column(1.0, 0.0), limit)
    with torch.no_grad():
        found = guided_noise(shift, torch.tensor(0.64), inpainting)(column(2.0, 4.0), torch.ones(1))
    torch.testing.assert_close(found, column(4 - 1.25 * factor, 0.75 * factor))


def test_the_guidance_of_a_diffusion_that_predicts_actions():
    """Â = (4, 0), W (Y − Â) = (1, 0) for Y = (5, 9), g = Mᵀ (1, 0) = (0, 1), and the factor is 1 / α = 1.25."""
    inpainting = Inpainting(column(5.0, 9.0), column(1.0, 0.0))
    with torch.no_grad():
        found = guided_action(shift, torch.tensor(0.64), inpainting)(column(2.0, 4.0), torch.ones(1))
    torch.testing.assert_close(found, column(4.0, 1.25))


def test_frozen_steps_reach_the_target_where_the_guidance_is_exact():
    """For a ~ N(0, 1): v = (2t − 1) x / D, D = (1 − t)² + t², so Â = (1 − t) x / D and the factor D / ((1 − t) t) gives
    v' = v − (Y − Â) / t: the chain ends at Y. Without a limit of 5 it does so from any noise.
    """

    def velocity(x, time):
        t = time[:, None, None]
        return (2 * t - 1) * x / ((1 - t).square() + t.square())

    target, noise = torch.randn(6, 3, 2), torch.randn(6, 3, 2)
    inpainting = Inpainting(target, column(1.0, 1.0, 0.0), 1e6)
    with torch.no_grad():
        found = integrate(guided_velocity(velocity, inpainting), noise, 5)
        free = integrate(velocity, noise, 5)
    torch.testing.assert_close(found[:, :2], target[:, :2], rtol=0, atol=1e-4)
    assert torch.equal(found[:, 2], free[:, 2])


# -- heads and policies ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", DENOISING_CHUNKS)
def test_without_guidance_chunks_are_those_of_plain_denoising(kind):
    """Bit for bit: with no frozen steps and nothing left, and with a limit of 0."""
    head = DENOISING_CHUNKS[kind](WIDTH, 4, 3, Denoising())
    features, noise, target = torch.randn(5, WIDTH), torch.randn(5, 4, 3), torch.randn(5, 4, 3)
    nothing, some = (soft_mask(4, torch.full((5,), left), torch.zeros(5)) for left in (0, 3))
    with torch.no_grad():
        plain = head.denoise(features, noise)
        assert torch.equal(head.denoise(features, noise, Inpainting(target, nothing)), plain)
        assert torch.equal(head.denoise(features, noise, Inpainting(target, some, 0.0)), plain)
        assert not torch.equal(head.denoise(features, noise, Inpainting(target, some)), plain)


@pytest.mark.parametrize("distribution", DENOISING_CHUNKS)
def test_padded_dims_are_not_guided(distribution):
    policy = small_actor(2, 3, distribution)
    state, noise, target = policy.encode(torch.randn(4, 2)), torch.randn(4, 1, 3), torch.randn(4, 1, 3)
    other, mask = target.clone(), torch.tensor([True, True, False]).expand(4, 3)
    other[..., 2] += 1.0
    weights = torch.ones(4, 1, 1)
    with torch.no_grad():
        first, second = (policy.denoise(state, noise, mask, Inpainting(one, weights)) for one in (target, other))
        whole = [policy.denoise(state, noise, None, Inpainting(one, weights)) for one in (target, other)]
    assert torch.equal(first, second)
    assert not torch.equal(*whole)
    assert policy.can_inpaint
    assert not small_actor(2, 3).can_inpaint


def test_switches_keep_the_frozen_steps():
    """K = 3, one switch that prefers to stay open: of the sequences that are open, then closed, it takes one."""
    head = SwitchedChunks(FlowChunks(WIDTH, 3, 1, Denoising()), WIDTH, 3, 2, [1])
    features, noise = torch.randn(2, WIDTH), torch.randn(2, 3, 1)
    with torch.no_grad():
        head.out.bias.copy_(torch.arange(6.0))  # prefers the last sequences; ways[3] is open in all steps
        head.out.bias[3] = 9.0
        target = torch.tensor([1.0, -1.0, -1.0]).view(1, 3, 1).expand(2, 3, 2)
        plain = head.denoise(features, noise)
        frozen = [soft_mask(3, torch.full((2,), 3), torch.full((2,), d)) for d in (1, 2)]
        one, two = (head.denoise(features, noise, Inpainting(target, weights)) for weights in frozen)
    assert plain[:, :, 1].tolist() == [[1.0, 1.0, 1.0]] * 2
    assert one[:, :, 1].tolist() == [[1.0, 1.0, 1.0]] * 2  # agrees in the one frozen step
    assert two[:, :, 1].tolist() == [[1.0, -1.0, -1.0]] * 2


def fitted(kind):
    """A head that learned two ways: chunks that fall, and chunks that rise, a_k = ±0.8 · cos(k / 4)."""
    torch.manual_seed(0)
    head = DENOISING_CHUNKS[kind](WIDTH, LENGTH, 1, Denoising(flow_steps=5, ddim_steps=5))
    optimizer = torch.optim.Adam(head.parameters(), 5e-3)
    features = torch.zeros(256, WIDTH)
    for _ in range(200):
        sign = torch.randint(0, 2, (256, 1, 1)) * 2 - 1
        chunks = sign * 0.8 * torch.cos(torch.arange(LENGTH) / 4).view(1, -1, 1) + 0.05 * torch.randn(256, 1, 1)
        optimizer.zero_grad()
        head.imitation_loss(features, chunks, None).mean().backward()
        optimizer.step()
    return head


@pytest.mark.parametrize("kind", DENOISING_CHUNKS)
def test_a_new_chunk_continues_the_running_one(kind):
    """Two ways to act: a plain new chunk often takes the other one, a jump of about 1.6; a guided one does not."""
    head, count, frozen, left = fitted(kind), 200, 2, 5
    features = torch.zeros(count, WIDTH)
    with torch.no_grad():
        running = head.denoise(features, torch.randn(count, LENGTH, 1))
        # The chunk continues from where it began, as if the scene had not changed.
        weights = soft_mask(LENGTH, torch.full((count,), left), torch.full((count,), frozen))
        noise = torch.randn(count, LENGTH, 1)
        plain = head.denoise(features, noise)
        guided = head.denoise(features, noise, Inpainting(running, weights))
    prefix = (guided - running)[:, :frozen].abs()
    assert float(prefix.mean()) < 0.1
    assert float((plain - running)[:, :frozen].abs().mean()) > 0.5
    # The border: the running chunk is executed until step `frozen`.
    jump, guided_jump = ((chunk[:, frozen] - running[:, frozen - 1]).abs() for chunk in (plain, guided))
    assert float((jump > 0.5).float().mean()) > 0.3
    assert float((guided_jump > 0.5).float().mean()) < {"flow": 0.02, "diffusion": 0.25}[kind]
    assert float(guided_jump.mean()) < 0.4 * float(jump.mean())
    if kind == "diffusion":  # whose guided chunks change their way in the middle more often
        return
    # The steps after those that are left follow the same way, though nothing guides them.
    assert float((guided[:, left].sign() == running[:, left].sign()).float().mean()) > 0.9


def test_actions_without_a_running_chunk_are_those_of_act():
    policy = small_actor(2, 1, "flow")
    torch.manual_seed(3)
    td = policy.act(TensorDict({schema.OBSERVATION: torch.randn(3, 2)}, [3]), deterministic=True)
    noise = td[schema.SAMPLE, schema.CHAIN][:, 0]
    with torch.no_grad():
        found = policy.denoise(
            policy.encode_to_act(td[schema.OBSERVATION]), noise, None, Inpainting(noise, torch.zeros(3, 1, 1))
        )
    torch.testing.assert_close(found, td[schema.ACTION])
