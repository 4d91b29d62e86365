"""The Decision Transformer's network and its acting: windows, cache, padding, units, what is saved."""

import copy

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict

from deft import schema
from deft.config.algorithm_settings import DTSettings
from deft.data.tensors import zero_rows
from deft.envs.make import wrap
from deft.errors import InputError
from deft.evaluation.rollouts import evaluate_policy, play_episodes
from deft.models.decision_transformer import DecisionTransformerPolicy

OBSERVATION, ACTION = spaces.Box(-np.inf, np.inf, (4,), np.float32), spaces.Box(-1, 1, (2,), np.float32)


def make_policy(
    observation: spaces.Space = OBSERVATION, action: spaces.Space = ACTION, **settings: object
) -> DecisionTransformerPolicy:
    """A small one, with weights large enough that every input shows in the output."""
    small = {"context_length": 5, "n_layer": 3, "embed_dim": 16, "n_head": 1, "max_episode_length": 30}
    policy = DecisionTransformerPolicy(observation, action, DTSettings(**(small | settings)))
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    policy.set_data(return_scale=10.0, target_return=25.0, longest_episode=30)
    return policy


def random_windows(batch_size: int = 3, steps: int = 5) -> dict[str, torch.Tensor]:
    return {
        schema.OBSERVATION: torch.randn(batch_size, steps, 4),
        schema.ACTION: torch.rand(batch_size, steps, 2) * 2 - 1,
        schema.RETURN_TO_GO: torch.randn(batch_size, steps) * 10,
        schema.TIMESTEP: torch.arange(steps) + torch.tensor([[0], [3], [20]])[:batch_size],
    }


@pytest.mark.parametrize("heads", [1, 2])
def test_an_action_depends_on_the_past_alone(heads: int) -> None:
    policy = make_policy(n_head=heads)
    batch = random_windows()
    before = policy.predict(batch)
    # All of step 3 but its return and observation comes after the action of step 3 is chosen, as do later steps.
    batch[schema.ACTION][:, 3] *= -1
    for key in (schema.OBSERVATION, schema.ACTION, schema.RETURN_TO_GO):
        batch[key][:, 4] += 1.0
    after = policy.predict(batch)
    assert torch.equal(before[:, :4], after[:, :4])
    assert (before[:, 4] - after[:, 4]).abs().max() > 1e-3


@pytest.mark.parametrize("key", [schema.OBSERVATION, schema.ACTION, schema.RETURN_TO_GO, schema.TIMESTEP])
def test_an_action_depends_on_all_of_the_past(key: str) -> None:
    policy, batch = make_policy(), random_windows()
    before = policy.predict(batch)
    batch[key][:, 0] += 1
    assert (before[:, 4] - policy.predict(batch)[:, 4]).abs().amax(-1).min() > 1e-5


def test_the_content_of_padding_does_not_matter() -> None:
    policy, batch = make_policy(), random_windows()
    short = {key: value[:, :3] for key, value in batch.items()}
    torch.testing.assert_close(policy.predict(batch)[:, :3], policy.predict(short), atol=1e-6, rtol=0)


def test_one_head_is_attention_written_with_fewer_products() -> None:
    block = make_policy().blocks[1]
    x, bias = torch.randn(3, 14, 16), make_policy().causal[:14, :14]
    query, key, value = block.project(block.norm_1(x))
    asked = slice(1, None, 3)
    plain = block.finish(x[:, asked], block.attend(query[:, asked], key, value, bias[asked]))
    torch.testing.assert_close(block(x, bias, asked), plain, atol=1e-5, rtol=1e-5)


def test_attention_is_torchs() -> None:
    """The block against torch's own attention with the same weights, two heads."""
    block = make_policy(n_head=2).blocks[0]
    x = torch.randn(3, 14, 16)
    query, key, value = (
        part.reshape(3, 14, 2, 8).transpose(1, 2) for part in block.project(torch.nn.functional.layer_norm(x, (16,)))
    )
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    expected = expected.transpose(1, 2).reshape(3, 14, 16) @ block.output_weight + block.output_bias
    flat = [part.transpose(1, 2).reshape(3, 14, 16) for part in (query, key, value)]
    attended = block.attend(*flat, make_policy().causal[:14, :14])
    torch.testing.assert_close(attended, expected, atol=1e-5, rtol=1e-5)


def test_the_mlp_has_autograds_gradients() -> None:
    block, x = make_policy().blocks[0], torch.randn(2, 7, 16, requires_grad=True)
    attended, direction = torch.zeros(2, 7, 16), torch.randn(2, 7, 16)
    inputs = [x, block.hidden_weight, block.hidden_bias, block.mlp_weight, block.mlp_bias]
    written = torch.autograd.grad(block.finish(x, attended), inputs, direction)
    hidden = torch.relu(block.norm_2(x) @ block.hidden_weight + block.hidden_bias)
    plain = torch.autograd.grad(x + hidden @ block.mlp_weight + block.mlp_bias, inputs, direction)
    torch.testing.assert_close(written, plain, atol=1e-5, rtol=1e-5)


def test_dropout_takes_as_many_masks_as_it_says() -> None:
    policy, batch = make_policy(n_head=2), random_windows()
    ones = iter([torch.ones(shape) for shape in policy.mask_shapes(3, 5)])
    torch.testing.assert_close(policy.predict(batch, ones), policy.predict(batch))
    assert next(ones, None) is None
    zeros = iter([torch.zeros(shape) for shape in policy.mask_shapes(3, 5)])
    # With everything dropped the last layer sees zeros: one answer for all windows and steps.
    dropped = policy.predict(batch, zeros)
    torch.testing.assert_close(dropped, dropped[:1, :1].expand_as(dropped))


class History:
    """What an acting policy has seen in one environment, to feed to a plain forward pass."""

    def __init__(self, length: int, slide: int) -> None:
        self.length, self.slide = length, slide
        self.start()

    def start(self) -> None:
        self.steps: list[tuple[torch.Tensor, float, int]] = []
        self.actions: list[torch.Tensor] = []
        self.count = 0

    def see(self, observation: torch.Tensor, return_to_go: float) -> None:
        self.count = (self.length - self.slide if self.count == self.length else self.count) + 1
        self.steps.append((observation, return_to_go, len(self.steps)))

    def window(self) -> dict[str, torch.Tensor]:
        """The last steps; the action of the last one is not known yet, and must not matter."""
        steps = self.steps[-self.count :]
        actions = [*self.actions, torch.full((2,), 9.0)][-self.count :]
        return {
            schema.OBSERVATION: torch.stack([step[0] for step in steps])[None],
            schema.RETURN_TO_GO: torch.tensor([[step[1] for step in steps]]),
            schema.TIMESTEP: torch.tensor([[step[2] for step in steps]]),
            schema.ACTION: torch.stack(actions)[None],
        }


@pytest.mark.parametrize(("heads", "slide"), [(1, 1), (2, 1), (1, 2), (2, 3), (1, 5)])
def test_acting_with_the_cache_is_the_plain_forward_pass(heads: int, slide: int) -> None:
    """18 steps of 3 environments with windows of 5, with episodes that end at different times."""
    policy = make_policy(n_head=heads, context_slide=slide)
    ends = {(0, 2), (1, 8), (1, 9), (2, 13)}
    histories = [History(5, slide) for _ in range(3)]
    returns, rewards = [25.0] * 3, torch.zeros(3)
    memory = policy.initial_memory(3)
    for step in range(18):
        observation = torch.randn(3, 4)
        td = TensorDict({schema.OBSERVATION: observation, schema.PREVIOUS_REWARD: rewards, schema.MEMORY: memory}, [3])
        action = policy.act(td)[schema.ACTION]
        for index, history in enumerate(histories):
            history.see(observation[index], returns[index])
            expected = policy.predict(history.window())[0, -1]
            torch.testing.assert_close(action[index], expected, atol=1e-5, rtol=0)
            history.actions.append(action[index])
        rewards = torch.randn(3)
        done = [index for index in range(3) if (index, step) in ends]
        memory = zero_rows(td[schema.NEXT_MEMORY], np.array(done, np.int64))
        for index in range(3):
            returns[index] -= float(rewards[index])
            if index in done:
                histories[index].start()
                returns[index], rewards[index] = 25.0, 0.0


def test_timesteps_beyond_the_longest_episode_share_its_last_embedding() -> None:
    policy, batch = make_policy(), random_windows()
    policy.set_data(return_scale=10.0, target_return=25.0, longest_episode=17)
    batch[schema.TIMESTEP] += 100
    late = policy.predict(batch)
    batch[schema.TIMESTEP].fill_(16)
    assert torch.equal(late, policy.predict(batch))
    batch[schema.TIMESTEP].fill_(15)
    assert not torch.equal(late, policy.predict(batch))


def test_actions_are_in_the_units_of_the_box() -> None:
    box = spaces.Box(np.array([-2.0, 10.0], np.float32), np.array([2.0, 30.0], np.float32))
    policy = make_policy(action=box)
    # The ends and the middle of [-2, 2] × [10, 30].
    unit = policy.to_unit(torch.tensor([[-2.0, 30.0], [0.0, 20.0], [2.0, 10.0]]))
    assert unit.tolist() == [[-1, 1], [0, 0], [1, -1]]
    with torch.no_grad():
        policy.head_weight.zero_()
        policy.head_bias.copy_(torch.tensor([0.0, 100.0]))
    td = TensorDict({schema.OBSERVATION: torch.randn(1, 4), schema.PREVIOUS_REWARD: torch.zeros(1)}, [1])
    td.set(schema.MEMORY, policy.initial_memory(1))
    assert policy.act(td)[schema.ACTION].tolist() == [[0.0, 30.0]]  # tanh 0 is the middle, tanh 100 the upper end


@pytest.mark.parametrize("space", [spaces.Discrete(3), spaces.Box(-np.inf, np.inf, (2,))])
def test_other_actions_raise_an_error(space: spaces.Space) -> None:
    with pytest.raises(InputError, match="bounded Box"):
        make_policy(action=space)


def test_what_the_data_said_is_saved_with_the_weights() -> None:
    policy, batch = make_policy(), random_windows()
    fresh = copy.deepcopy(policy)
    policy.observe({schema.OBSERVATION: torch.randn(100, 4) * 5 + 3})
    policy.set_data(return_scale=3.0, target_return=7.0, longest_episode=12)
    assert not torch.allclose(fresh.predict(batch), policy.predict(batch), atol=1e-3)  # the weights are the same
    fresh.load_state_dict(policy.state_dict())
    assert torch.equal(fresh.predict(batch), policy.predict(batch))
    assert (float(fresh.target_return), int(fresh.last_timestep)) == (7.0, 11)


def test_pixels_and_language_act_too() -> None:
    space = spaces.Dict(
        {
            "rgb": spaces.Box(0, 255, (3, 16, 16), np.uint8),
            "state": spaces.Box(-1, 1, (3,), np.float32),
            "instruction": spaces.Box(0, 255, (12,), np.uint8),
        }
    )
    policy = make_policy(observation=space)
    text = torch.from_numpy(schema.encode_text("push it", 12)).expand(2, 12)
    memory = policy.initial_memory(2)
    windows = []
    for _ in range(2):
        observation = {"rgb": torch.randint(0, 256, (2, 3, 16, 16), dtype=torch.uint8), "state": torch.rand(2, 3)}
        observation["instruction"] = text
        td = TensorDict({schema.OBSERVATION: observation, schema.PREVIOUS_REWARD: torch.zeros(2)}, [2])
        td.set(schema.MEMORY, memory)
        action = policy.act(td)[schema.ACTION]
        memory = td[schema.NEXT_MEMORY]
        windows.append((observation, action))
    streams = {name: torch.stack([window[0][name] for window in windows], 1) for name in space.spaces}
    batch = {
        schema.OBSERVATION: streams,
        schema.ACTION: torch.stack([window[1] for window in windows], 1),
        schema.RETURN_TO_GO: torch.full((2, 2), 25.0),
        schema.TIMESTEP: torch.arange(2).expand(2, 2),
    }
    torch.testing.assert_close(policy.predict(batch), batch[schema.ACTION], atol=1e-5, rtol=0)


class Paying(gymnasium.Env):
    """Pays its step's number; episodes of `length` steps."""

    observation_space = spaces.Box(-1, 1, (4,), np.float32)
    action_space = ACTION

    def __init__(self, length: int) -> None:
        self.length = length

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.step_number = 0
        return np.zeros(4, np.float32), {}

    def step(self, action):
        self.step_number += 1
        return np.zeros(4, np.float32), float(self.step_number), self.step_number == self.length, False, {}


def test_the_return_still_wanted_falls_by_each_reward_and_starts_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, wanted = make_policy(), []
    act = policy.act

    def watched(td: TensorDict, deterministic: bool = False) -> TensorDict:
        result = act(td, deterministic)
        wanted.append(result[schema.NEXT_MEMORY]["return_to_go"].tolist())
        return result

    monkeypatch.setattr(policy, "act", watched)
    play_episodes(policy, wrap([Paying(4), Paying(2)]), 2)
    # 25, less 1, less 2, less 3; the second environment begins again after two steps, and then waits: it is complete.
    assert wanted == [[25.0, 25.0], [24.0, 24.0], [22.0, 25.0], [19.0, 25.0]]


def test_each_target_is_evaluated() -> None:
    policy = make_policy(target_return=(25.0, 3.0))
    results = evaluate_policy(policy, wrap(Paying(2)), 2)
    # Whatever the target, two steps pay 1 + 2.
    assert (results["target_return"], results["mean_reward"], results["target_3/mean_reward"]) == (25.0, 3.0, 3.0)
    assert float(policy.target_return) == 25.0
