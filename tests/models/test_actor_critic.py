import copy

import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict

from deft import schema
from deft.config.settings import PolicyConfig
from deft.errors import InputError
from deft.models.actor_critic import ActorCritic, TwinMLP
from deft.models.encoders import ImageEncoder, ObservationEncoder, TextEncoder

VECTOR = spaces.Box(-np.inf, np.inf, (5,), np.float32)
IMAGE = spaces.Box(0, 255, (3, 32, 32), np.uint8)
NAMED = spaces.Dict(
    {
        "state": VECTOR,
        "wrist_rgb": spaces.Box(0, 255, (2, 3, 16, 16), np.uint8),
        "gripper": spaces.Discrete(2),
        "instruction": spaces.Box(0, 255, (24,), np.uint8),
    }
)


def observe(space: spaces.Space, batch: int):
    if isinstance(space, spaces.Dict):
        return {name: observe(part, batch) for name, part in space.spaces.items()}
    rows = np.stack([space.sample() for _ in range(batch)])
    return torch.as_tensor(rows)


def inputs(space: spaces.Space, batch: int) -> TensorDict:
    space.seed(0)
    return TensorDict({schema.OBSERVATION: observe(space, batch)}, batch_size=[batch])


@pytest.mark.parametrize("observations", [VECTOR, IMAGE, NAMED, spaces.Discrete(5), spaces.MultiDiscrete([2, 3])])
@pytest.mark.parametrize("actions", [spaces.Box(-2, 2, (3,)), spaces.Discrete(4), spaces.MultiDiscrete([2, 3])])
def test_act_then_evaluate_agree_for_all_spaces(observations, actions):
    policy = ActorCritic(observations, actions, PolicyConfig())
    td = policy.act(inputs(observations, 6))
    assert td[schema.ACTION].shape == (6, *actions.shape)
    assert td[schema.LOG_PROB].shape == td[schema.VALUE].shape == (6,)
    scored = policy.evaluate_actions(td)
    torch.testing.assert_close(scored["log_prob"], td[schema.LOG_PROB], atol=1e-5, rtol=0)
    torch.testing.assert_close(scored["value"], td[schema.VALUE])
    torch.testing.assert_close(policy.get_value(td), td[schema.VALUE])
    assert scored["entropy"].shape == (6,)
    again = policy.act(inputs(observations, 6), deterministic=True)[schema.ACTION]
    assert torch.equal(again, policy.act(inputs(observations, 6), deterministic=True)[schema.ACTION])


@pytest.mark.parametrize("actions", [spaces.Box(-1, 1, (2,)), spaces.Box(0, 10, (2,)), spaces.Discrete(3)])
def test_log_prob_and_entropy_match_torch_distributions(actions):
    policy = ActorCritic(VECTOR, actions, PolicyConfig(log_std_init=-0.5))
    td = policy.act(inputs(VECTOR, 8))
    output, _ = policy.towers(policy.encoder(td[schema.OBSERVATION]))
    if isinstance(actions, spaces.Discrete):
        reference = torch.distributions.Categorical(logits=output)
        log_prob, entropy = reference.log_prob(td[schema.ACTION]), reference.entropy()
    else:
        # The policy works in units of the half width w around the centre c: a = c + w·u, log p(a) = log p(u) − log w.
        width, center = (actions.high[0] - actions.low[0]) / 2, (actions.high[0] + actions.low[0]) / 2
        normal = torch.distributions.Normal(center + width * output, width * np.exp(-0.5))
        log_prob, entropy = normal.log_prob(td[schema.ACTION]).sum(-1), normal.entropy().sum(-1)
    scored = policy.evaluate_actions(td)
    torch.testing.assert_close(scored["log_prob"], log_prob, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(scored["entropy"], entropy, atol=1e-4, rtol=1e-5)


def test_categorical_frequencies():
    # 40,000 draws of p = (0.5, 0.3, 0.2): the standard error of a frequency is at most √(0.25/40000) = 0.0025.
    policy = ActorCritic(VECTOR, spaces.Discrete(3), PolicyConfig())
    torch.manual_seed(3)
    logits = torch.log(torch.tensor([0.5, 0.3, 0.2])).expand(40_000, 3)
    choices, _ = policy.head.sample(logits, None, deterministic=False)
    frequencies = torch.bincount(choices, minlength=3) / 40_000
    torch.testing.assert_close(frequencies, torch.tensor([0.5, 0.3, 0.2]), atol=0.0125, rtol=0)


def test_padded_dims_never_enter_log_prob_or_entropy():
    policy = ActorCritic(VECTOR, spaces.Box(-1, 1, (4,)), PolicyConfig())
    td = inputs(VECTOR, 3)
    td[schema.ACTION_MASK] = torch.tensor([True, True, False, False]).expand(3, 4)
    policy.act(td)
    assert (td[schema.ACTION][:, 2:] == 0).all()
    before = policy.evaluate_actions(td)
    torch.testing.assert_close(before["log_prob"], td[schema.LOG_PROB], atol=1e-5, rtol=0)
    td[schema.ACTION][:, 2:] = 17.0
    with torch.no_grad():
        policy.head.log_std[2:] = 3.0
    after = policy.evaluate_actions(td)
    assert torch.equal(before["log_prob"], after["log_prob"])
    assert torch.equal(before["entropy"], after["entropy"])
    # two real dims at log σ = 0: entropy 2·(½ + ½ log 2π)
    torch.testing.assert_close(after["entropy"], torch.full((3,), 1 + np.log(2 * np.pi)).float())


def test_chunk_of_masked_actions():
    policy = ActorCritic(VECTOR, spaces.Box(-1, 1, (5, 4)), PolicyConfig(chunk_length=5))
    td = inputs(VECTOR, 2)
    td[schema.ACTION_MASK] = torch.tensor([True, False, True, False]).expand(2, 4)
    policy.act(td)
    assert td[schema.ACTION].shape == (2, 5, 4)
    assert (td[schema.ACTION][..., [1, 3]] == 0).all()
    assert (td[schema.ACTION][..., [0, 2]] != 0).all()
    scored = policy.evaluate_actions(td)
    torch.testing.assert_close(scored["log_prob"], td[schema.LOG_PROB], atol=1e-5, rtol=0)


def test_twin_towers_are_two_separate_networks():
    towers = TwinMLP(5, (8, 8), (2, 1), "tanh")
    x = torch.rand(4, 5)
    for tower, output in enumerate(towers(x)):
        hidden = x
        for weight, bias in ((towers.weight_0, towers.bias_0), (towers.weight_1, towers.bias_1)):
            hidden = torch.tanh(hidden @ weight[tower] + bias[tower])
        weight, bias = getattr(towers, f"head_weight_{tower}"), getattr(towers, f"head_bias_{tower}")
        torch.testing.assert_close(output, hidden @ weight + bias)
    towers(x)[0].sum().backward()
    assert towers.weight_0.grad[0].abs().sum() > 0
    assert towers.weight_0.grad[1].abs().sum() == 0  # the actor's loss does not reach the critic


def test_two_chunks_with_carried_memory_equal_one():
    policy = ActorCritic(VECTOR, spaces.Discrete(3), PolicyConfig(memory_hidden=6, memory_num_layers=2))
    observation = torch.rand(8, 2, 5)
    done = torch.zeros(8, 2, dtype=torch.bool)
    done[4, 1] = True  # an episode of the second environment ends in the middle
    memory = policy.initial_memory(2)
    stored, values = [], []
    for t in range(8):
        td = TensorDict({schema.OBSERVATION: observation[t], schema.MEMORY: memory}, batch_size=[2])
        policy.act(td)
        stored.append(memory)
        values.append(td[schema.VALUE])
        memory = td[schema.NEXT_MEMORY] * (~done[t])[:, None, None]
    whole = TensorDict(
        {
            schema.OBSERVATION: observation,
            schema.MEMORY: torch.stack(stored),
            schema.ACTION: torch.zeros(8, 2, dtype=torch.long),
            schema.NEXT: {schema.TERMINATED: done, schema.TRUNCATED: torch.zeros_like(done)},
        },
        batch_size=[8, 2],
    )
    expected = torch.stack(values)
    torch.testing.assert_close(policy.evaluate_actions(whole)["value"], expected)
    halves = torch.cat([policy.evaluate_actions(whole[:4])["value"], policy.evaluate_actions(whole[4:])["value"]])
    torch.testing.assert_close(halves, expected)


def test_memory_of_none_raises_an_error():
    policy = ActorCritic(VECTOR, spaces.Discrete(3), PolicyConfig(memory_hidden=6))
    with pytest.raises((KeyError, ValueError), match="memory"):
        policy.act(inputs(VECTOR, 2))
    with pytest.raises(ValueError, match="memory cannot be None"):
        policy._remember(torch.zeros(2, 5), None)


def test_images_are_scaled_in_one_place_and_either_layout_is_read():
    first = ImageEncoder(spaces.Box(0, 255, (3, 32, 32), np.uint8), 16)
    last = ImageEncoder(spaces.Box(0, 255, (32, 32, 3), np.uint8), 16)
    last.load_state_dict(first.state_dict())
    image = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    torch.testing.assert_close(first(image), last(image.permute(0, 2, 3, 1)))
    assert first(image[:, None].expand(2, 4, 3, 32, 32)).shape == (2, 4, 16)  # any leading dims


def test_padding_of_an_instruction_does_not_count():
    encoder = TextEncoder(8)
    short = torch.tensor([[104, 105, 0, 0]], dtype=torch.uint8)
    torch.testing.assert_close(encoder(short), encoder(torch.nn.functional.pad(short, (0, 20))))


def test_unsupported_spaces_are_named():
    with pytest.raises(InputError, match="Tuple"):
        ObservationEncoder(spaces.Tuple((VECTOR,)))
    with pytest.raises(InputError, match="MultiBinary"):
        ActorCritic(VECTOR, spaces.MultiBinary(3))
    with pytest.raises(InputError, match="too small"):
        ImageEncoder(spaces.Box(0, 255, (3, 4, 4), np.uint8), 8)


SMALL = [
    (spaces.Box(-1, 1, (3,)), {}),
    (spaces.Box(-2, 5, (3,)), {"normalize_observation": False, "activation": "relu"}),
    (spaces.Box(-1, 1, (4, 3)), {"chunk_length": 4}),
    (spaces.Discrete(5), {"hidden_sizes": (16,)}),
]


@pytest.mark.parametrize(("actions", "settings"), SMALL)
def test_acting_in_numpy_is_acting_in_torch(actions, settings):
    """What the numpy path drew is scored by torch: log-prob and value must agree, also after the weights changed."""
    policy = ActorCritic(VECTOR, actions, PolicyConfig(**settings))
    policy.observe(TensorDict({schema.OBSERVATION: torch.randn(50, 5) * 3 + 1}, [50]))
    for _ in range(2):
        observation = np.random.default_rng(0).normal(size=(6, 5)).astype(np.float32)
        acted = policy.act_arrays(observation)
        assert acted is not None
        td = TensorDict({name: torch.as_tensor(value) for name, value in acted.items()}, [6])
        td[schema.OBSERVATION] = torch.as_tensor(observation)
        assert td[schema.ACTION].shape == (6, *actions.shape)
        scored = policy.evaluate_actions(td)
        torch.testing.assert_close(td[schema.LOG_PROB], scored["log_prob"], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(td[schema.VALUE], scored["value"], atol=1e-5, rtol=1e-5)
        assert {value.dtype for value in acted.values()} <= {np.dtype(np.float32), np.dtype(np.int64)}
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter += 0.1 * torch.randn_like(parameter)
        policy.observe(TensorDict({schema.OBSERVATION: torch.randn(50, 5) - 2}, [50]))


def test_numpy_draws_follow_the_policy():
    # Gaussian: mean and deviation over 20,000 draws, standard error of the mean σ/√n = 0.6/141 = 0.004
    policy = ActorCritic(VECTOR, spaces.Box(-1, 1, (1,)), PolicyConfig(log_std_init=-0.5))
    np.random.seed(0)
    observation = np.zeros((10, 5), np.float32)
    draws = np.concatenate([policy.act_arrays(observation)[schema.ACTION] for _ in range(2000)])
    expected = policy.act(TensorDict({schema.OBSERVATION: torch.zeros(1, 5)}, [1]), deterministic=True)[schema.ACTION]
    assert draws.mean() == pytest.approx(expected.item(), abs=0.02)
    assert draws.std() == pytest.approx(np.exp(-0.5), abs=0.02)
    # Categorical: frequencies against the softmax
    policy = ActorCritic(VECTOR, spaces.Discrete(3), PolicyConfig())
    with torch.no_grad():
        policy.towers.head_bias_0.copy_(torch.log(torch.tensor([0.5, 0.3, 0.2])))
    draws = np.concatenate([policy.act_arrays(observation)[schema.ACTION] for _ in range(2000)])
    np.testing.assert_allclose(np.bincount(draws) / 20_000, [0.5, 0.3, 0.2], atol=0.015)


def test_a_copy_acts_with_its_own_weights():
    policy = ActorCritic(VECTOR, spaces.Discrete(3), PolicyConfig())
    observation = np.ones((1, 5), np.float32)
    policy.act_arrays(observation)
    other = copy.deepcopy(policy)
    with torch.no_grad():
        other.towers.head_bias_1 += 7.0
    difference = other.act_arrays(observation)[schema.VALUE] - policy.act_arrays(observation)[schema.VALUE]
    assert difference.item() == pytest.approx(7.0, abs=1e-5)


def test_torch_acts_where_numpy_cannot():
    rows = np.zeros((4, 5), np.float32)
    assert ActorCritic(VECTOR, spaces.Discrete(3), PolicyConfig(memory_hidden=4)).act_arrays(rows) is None
    assert ActorCritic(VECTOR, spaces.MultiDiscrete([2, 2]), PolicyConfig()).act_arrays(rows) is None
    assert ActorCritic(VECTOR, spaces.Discrete(3), PolicyConfig(activation="gelu")).act_arrays(rows) is None
    assert ActorCritic(VECTOR, spaces.Discrete(3), PolicyConfig()).act_arrays(np.zeros((64, 5), np.float32)) is None
