"""A frozen flow policy whose noise is selected: actions, log-probs, weights, and what is trained."""

import math

import numpy as np
import pytest
import torch
from flows import linear_flow
from gymnasium import spaces
from offline_worlds import schema_row, small_actor
from policies import vla_policy
from tensordict import TensorDict

from deft import schema
from deft.errors import InputError
from deft.models.noise_policy import NoisePolicy
from deft.models.vla.tiny import TinyVLAModel
from deft.runs.checkpoint import load_weights


def test_the_action_is_the_flow_of_the_noise():
    # v = 0.5 x in 5 steps of 1/5: f(w) = w · 0.9⁵ = 0.59049 w
    policy = NoisePolicy(linear_flow(0.5), noise_bound=2.0)
    td = policy.act(schema_row(torch.tensor([[0.3], [1.0]])))
    noise = td[schema.SAMPLE, schema.NOISE]
    torch.testing.assert_close(td[schema.ACTION], 0.9**5 * noise)
    assert bool((noise.abs() <= 2.0).all())
    # The same noise leads to the same action: nothing else is random.
    state = policy.encode(td[schema.OBSERVATION])
    torch.testing.assert_close(policy.denoise_unit(state, noise / 2.0), td[schema.ACTION])


def test_log_probs_are_those_of_the_noise():
    """w = 2 tanh(x) with x ~ N(0, 1) at the start: log p(w) = log N(x) − log(1 − tanh² x) − log 2."""
    policy = NoisePolicy(linear_flow(0.5), noise_bound=2.0)
    td = policy.act(schema_row(torch.zeros(4, 1)))
    x = (td[schema.SAMPLE, schema.NOISE] / 2.0).atanh()[:, 0]
    expected = -0.5 * x**2 - 0.5 * math.log(2 * math.pi) - (1 - x.tanh() ** 2).log() - math.log(2.0)
    torch.testing.assert_close(td[schema.LOG_PROB], expected, rtol=1e-4, atol=1e-4)
    scored = policy.evaluate_actions(td)
    torch.testing.assert_close(scored["log_prob"], td[schema.LOG_PROB])


def test_without_sampling_it_plays_the_noise_in_the_middle():
    policy = NoisePolicy(linear_flow(0.5))
    td = policy.act(schema_row(torch.zeros(3, 1)), deterministic=True)
    assert bool((td[schema.ACTION] == 0).all())
    assert policy.action_selection(deterministic=True) == "mode"
    torch.testing.assert_close(policy.mean(policy.encode(td[schema.OBSERVATION]))[0], td[schema.ACTION])


def test_the_frozen_policy_has_no_gradient():
    policy = NoisePolicy(small_actor(2, 1, "flow"))
    noise, log_prob = policy.sample_noise(policy.encode(torch.randn(5, 2)))
    (noise.sum() + log_prob.sum()).backward()
    assert all(parameter.grad is None for parameter in policy.base.parameters())
    assert all(parameter.grad is not None for parameter in policy.actor_parameters())
    assert not list(policy.encoder_parameters())


def test_weights_of_the_policy_to_freeze_and_of_itself_load():
    torch.manual_seed(0)
    base = small_actor(2, 1, "flow")
    policy = NoisePolicy(small_actor(2, 1, "flow"))
    before = policy.actor.weights[0].clone()
    load_weights(policy, base.state_dict(), "sft")
    assert torch.equal(policy.base.head.chunks.out.weight, base.head.chunks.out.weight)
    assert torch.equal(policy.actor.weights[0], before)
    other = NoisePolicy(small_actor(2, 1, "flow"))
    load_weights(other, policy.state_dict(), "dsrl")
    observation = schema_row(torch.randn(3, 2))
    first, second = (one.act(observation.clone(), deterministic=True)[schema.ACTION] for one in (policy, other))
    assert torch.equal(first, second)


def tiny(**settings):
    return TinyVLAModel(
        head="flow", action_dim=3, chunk_length=2, image_keys=["rgb"], image_size=16, proprio_key=None,
        instruction_key=None, width=16, **settings,
    )  # fmt: skip


SPACES = (
    spaces.Dict({"rgb": spaces.Box(0, 255, (3, 16, 16), np.uint8)}),
    spaces.Box(-1.0, 1.0, (2, 3), np.float32),
)


@pytest.mark.parametrize("settings", [{}, {"switch_dims": [-1]}])
@pytest.mark.parametrize("shared", [False, True])
def test_chunks_of_a_vla_model(settings, shared):
    policy = NoisePolicy(vla_policy(tiny(**settings), *SPACES), shared_noise=shared)
    size = 2 if settings else 3  # a switch does not start from noise
    assert policy.noise_dim == (1 if shared else 2) * size
    td = TensorDict({"observation": {"rgb": torch.randint(0, 255, (4, 3, 16, 16), dtype=torch.uint8)}}, [4])
    mask = torch.tensor([True, False, True]).expand(4, 3)
    acted = policy.act(td.set(schema.ACTION_MASK, mask))
    assert acted[schema.ACTION].shape == (4, 2, 3)
    assert bool((acted[schema.ACTION][..., 1] == 0).all())  # a padded dim
    noise = acted[schema.SAMPLE, schema.NOISE].unflatten(1, (-1, size)).expand(4, 2, size)
    model = policy.base.model
    torch.testing.assert_close(acted[schema.ACTION], model.denoise(td[schema.OBSERVATION], noise, mask))


def test_a_policy_without_noise_is_named():
    with pytest.raises(InputError, match=r"ActorCritic does not here; give --model_path a run of sft"):
        NoisePolicy(small_actor())
