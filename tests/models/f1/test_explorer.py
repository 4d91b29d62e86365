"""The explorer: exact log-probs of its chains, padding, memory, value, and the frozen world model inside."""

import math

import pytest
import torch
from explorers import REAL, acting_input, explorer_policy, observation, teacher_policy
from f1_worlds import micro_policy
from tensordict import TensorDict

from deft import schema
from deft.config.f1_settings import ExplorerSettings
from deft.errors import InputError
from deft.models.f1.explorer import (
    EXPLORER_FILE,
    copy_world_model,
    explorer_extras,
    load_explorer,
    new_explorer,
    world_model_weights,
)

SIGMA = 0.5


@pytest.fixture(scope="module")
def teacher():
    return teacher_policy()


@pytest.fixture(scope="module")
def explorer(teacher):
    return explorer_policy(teacher, action_noise=SIGMA, denoising_steps=3)


def acted_sequence(explorer, steps=6, rows=3, done=()):
    """Act step after step and stack what a rollout would hold; `done`: (step, row) at which an episode ends."""
    memory, parts = explorer.initial_memory(rows), []
    for step in range(steps):
        td = explorer.act(acting_input(explorer, rows, seed=step, memory=memory))
        memory = td[schema.NEXT_MEMORY].clone()
        ended = torch.tensor([(step, row) in done for row in range(rows)])
        memory[ended] = 0.0
        td[schema.NEXT, schema.TERMINATED] = ended
        td[schema.NEXT, schema.TRUNCATED] = torch.zeros(rows, dtype=torch.bool)
        parts.append(td)
    return torch.stack(parts)


def test_scoring_gives_the_log_probs_and_values_of_acting(explorer):
    td = acted_sequence(explorer)
    scored = explorer.evaluate_actions(td)
    # float32 in another batch shape: 1e-4 of the ratio is the bar
    assert (scored["log_prob"] - td[schema.LOG_PROB]).exp().sub(1).abs().max() < 1e-4
    assert torch.allclose(scored["value"], td[schema.VALUE], atol=1e-5)
    assert torch.allclose(scored["remembered"], td[schema.NEXT_MEMORY][:, :, -1], atol=1e-6)
    assert td[schema.LOG_PROB].std() > 0.1  # there is something to get wrong


def test_scoring_another_chain_gives_another_log_prob(explorer):
    """What a redrawn noise would do: the stored chain is what counts."""
    td = acted_sequence(explorer)
    chain = td[schema.SAMPLE][schema.CHAIN].clone()
    chain[:, :, 0] += torch.randn_like(chain[:, :, 0]) * REAL
    other = td.clone()
    other[schema.SAMPLE, schema.CHAIN] = chain
    difference = explorer.evaluate_actions(other)["log_prob"] - td[schema.LOG_PROB]
    assert difference.abs().min() > 1e-2


def test_the_log_prob_is_that_of_the_steps(explorer):
    """Σ_k Σ_d log N(x_{k+1}; x_k − v / S, σ), with v from the model's own velocity, one step at a time."""
    td = explorer.act(acting_input(explorer, 2))
    chain, state = td[schema.SAMPLE][schema.CHAIN], td[schema.OBSERVATION][schema.STATE]
    context = explorer.f1.encode_observation(dict(td[schema.OBSERVATION].items()))
    expected = torch.zeros(2)
    with torch.no_grad():
        for step in range(3):
            time = torch.full((2,), 1 - step / 3)
            memory = td[schema.MEMORY][:, -1]
            velocity, _ = explorer.f1.model.velocity_and_features(context, state, chain[:, step], time, memory)
            mean = chain[:, step] - velocity / 3
            normal = torch.distributions.Normal(mean, SIGMA)
            expected += normal.log_prob(chain[:, step + 1])[:, 0, :2].sum(-1)
    assert torch.allclose(td[schema.LOG_PROB], expected, atol=1e-4)
    assert torch.equal(td[schema.ACTION], chain[:, -1, 0])


def test_padded_dims_are_zero_and_count_for_nothing(explorer):
    td = acted_sequence(explorer)
    chain = td[schema.SAMPLE][schema.CHAIN]
    assert not chain[..., ~REAL].any()
    assert not td[schema.ACTION][..., ~REAL].any()
    entropy = explorer.evaluate_actions(td)["entropy"]
    # three steps of two real dims: 6 (½ log 2πe + log σ), and not 96 of them
    expected = 6 * (0.5 * math.log(2 * math.pi * math.e) + math.log(SIGMA))
    assert torch.allclose(entropy, torch.full_like(entropy, expected), atol=1e-5)


def test_an_action_beyond_its_bounds_is_scored_as_it_was_drawn(explorer):
    """The log-prob is of the chain; clipping is the world's, and what the memory gets."""
    td = acted_sequence(explorer)
    assert (td[schema.ACTION].abs() > 1).any()
    assert torch.equal(td[schema.ACTION], td[schema.SAMPLE][schema.CHAIN][..., -1, 0, :])
    assert explorer.executed(torch.tensor([[3.0, -0.5] + [1.0] * 30])).tolist() == [[1.0, -0.5] + [0.0] * 30]


def test_deterministic_actions_have_no_noise_but_their_start(explorer):
    td = acting_input(explorer, 2).set(schema.SAMPLE, {schema.NOISE: explorer.draw_noise(2)})
    first, second = (explorer.act(td.clone(), deterministic=True)[schema.ACTION] for _ in range(2))
    assert torch.equal(first, second)
    assert explorer.action_selection(deterministic=True) == "sampled noise"
    drawn = [explorer.act(acting_input(explorer, 2))[schema.ACTION] for _ in range(2)]
    assert not torch.equal(*drawn)


def test_the_noise_of_an_episode_is_correlated_and_enters_no_ratio(teacher):
    explorer = explorer_policy(teacher, initial_noise=2.0, noise_correlation=0.8)
    first = explorer.draw_noise(4000)
    assert first.std().item() == pytest.approx(2.0, rel=0.02)
    begins = torch.arange(4000) < 2000
    second = explorer.draw_noise(4000, first, begins)
    assert second.std().item() == pytest.approx(2.0, rel=0.02)  # 0.8² + 0.6² = 1: the deviation stays
    pairs = torch.stack([first, second]).flatten(2)
    kept = torch.corrcoef(pairs[:, 2000:].flatten(1))[0, 1]
    new = torch.corrcoef(pairs[:, :2000].flatten(1))[0, 1]
    assert kept.item() == pytest.approx(0.8, abs=0.02)
    assert new.item() == pytest.approx(0.0, abs=0.02)
    td = acting_input(explorer, 2)
    td[schema.SAMPLE] = TensorDict({schema.NOISE: first[:2]}, batch_size=[2])
    acted = explorer.act(td)
    assert torch.equal(acted[schema.SAMPLE][schema.CHAIN][:, 0], first[:2] * REAL)


def test_the_memory_restarts_where_an_episode_ended(explorer):
    td = acted_sequence(explorer, done=((2, 1),))
    scored = explorer.evaluate_actions(td)
    assert (scored["log_prob"] - td[schema.LOG_PROB]).abs().max() < 1e-4
    assert not td[schema.MEMORY][3, 1].any()
    assert td[schema.MEMORY][3, 0].any()
    td[schema.NEXT_TERMINATED] = torch.zeros_like(td[schema.NEXT_TERMINATED])  # without the end it would be carried
    assert (explorer.evaluate_actions(td)["log_prob"] - td[schema.LOG_PROB])[3:, 1].abs().max() > 1e-3


def test_the_value_sees_what_the_policy_sees(explorer):
    """Picture, state and memory each change it; another action's noise does not."""
    td = acting_input(explorer, 2, memory=torch.randn(2, 2, 6))
    value = explorer.get_value(td)
    assert torch.allclose(value, explorer.act(td.clone())[schema.VALUE], atol=1e-6)
    other = observation(2, seed=9)
    for name in (schema.IMAGE0, schema.STATE):
        changed = td.clone()
        changed[schema.OBSERVATION, name] = other[name]
        assert (explorer.get_value(changed) - value).abs().min() > 1e-4, name
    changed = td.clone()
    changed[schema.MEMORY] = torch.randn(2, 2, 6)
    assert (explorer.get_value(changed) - value).abs().min() > 1e-5


def test_gradients_reach_all_that_acts_and_nothing_of_the_world_model(explorer):
    td = acted_sequence(explorer)
    scored = explorer.evaluate_actions(td)
    explorer.zero_grad()
    (scored["log_prob"].sum() + scored["value"].sum()).backward()
    touched = {name for name, one in explorer.named_parameters() if one.grad is not None and one.grad.any()}
    for part in ("vision.", "experts.understanding.", "experts.action.", "flow.", "memory.gru.", "memory.to_action."):
        assert any(name.startswith(f"f1.model.{part}") for name in touched), part
    assert any(name.startswith("value_head.") for name in touched)
    assert not any(name.removeprefix("f1.").startswith(tuple(world_model_weights(explorer.f1))) for name in touched)
    acting, others = explorer.parameter_groups()
    learning = {id(one) for one in explorer.parameters() if one.requires_grad}
    assert {id(one) for one in (*acting, *others)} == learning
    assert len(acting) + len(others) == len(learning)


@pytest.mark.parametrize("camera", ["head_rgb", "image1"])
def test_a_head_camera_raises_an_error(explorer, camera):
    td = acting_input(explorer, 2)
    td[schema.OBSERVATION, camera] = td[schema.OBSERVATION, schema.IMAGE0]
    with pytest.raises(InputError, match=f"reads only the wrist camera; remove from its observation: {camera}"):
        explorer.act(td)


def test_a_missing_memory_raises_an_error(explorer):
    td = TensorDict({schema.OBSERVATION: observation(2)}, batch_size=[2])
    with pytest.raises(InputError, match="memory cannot be None"):
        explorer.act(td)
    with pytest.raises(InputError, match="needs a model with a memory"):
        new_explorer(micro_policy(memory_enabled=False), REAL, ExplorerSettings())


# -- the world model inside ------------------------------------------------------------------------------------------


def test_the_world_model_is_the_teachers_bit_for_bit_and_the_rest_is_new(teacher, explorer):
    theirs, own = teacher.state_dict(), explorer.f1.state_dict()
    copied = world_model_weights(explorer.f1)
    assert {name.split(".")[1] for name in copied if name.startswith("model.")} >= {"experts", "world_model", "memory"}
    assert all(torch.equal(theirs[name], own[name]) for name in copied)
    rest = [name for name in own if name not in copied and own[name].numel() > 64]
    assert rest
    assert not any(torch.equal(theirs[name], own[name]) for name in rest)
    assert not any(one.requires_grad for name, one in explorer.f1.named_parameters() if name in copied)


def test_an_explorer_of_a_bfloat16_teacher_acts_in_float32():
    teacher = teacher_policy(dtype="bfloat16", language_heads=True)
    explorer = explorer_policy(teacher)
    assert {value.dtype for value in explorer.parameters()} == {torch.float32}
    theirs = world_model_weights(teacher)
    assert theirs["model.experts.generation.layers.0.mlp.up_proj.weight"].dtype == torch.bfloat16
    assert all(torch.equal(theirs[name].float(), own.float()) for name, own in world_model_weights(explorer.f1).items())
    td = acted_sequence(explorer)
    assert (explorer.evaluate_actions(td)["log_prob"] - td[schema.LOG_PROB]).abs().max() < 1e-4
    assert not any("language_heads" in name for name in explorer.state_dict())


def test_a_world_model_that_does_not_fit_is_refused_by_name(teacher):
    other = micro_policy(motion_prior=True)  # has what the teacher lacks
    with pytest.raises(InputError, match=r"the teacher does not fit .* missing \(model\.motion\."):
        copy_world_model(teacher, other)
    with pytest.raises(InputError, match=r"unexpected \(model\.motion\."):
        copy_world_model(other, teacher)


def test_an_explorer_is_read_back_as_it_was(tmp_path, explorer):
    import json

    from deft.config.loading import to_dict

    torch.save(explorer.f1.state_dict(), tmp_path / "model.pt")
    torch.save(explorer_extras(explorer), tmp_path / EXPLORER_FILE)
    (tmp_path / "f1.json").write_text(json.dumps(to_dict(explorer.config)))
    loaded = load_explorer(tmp_path, tmp_path / "f1.json")
    own = explorer.state_dict()
    assert loaded.state_dict().keys() == own.keys()
    assert all(torch.equal(value, own[name]) for name, value in loaded.state_dict().items())
    torch.save({"deviation": own["deviation"], "action_mask": own["action_mask"]}, tmp_path / EXPLORER_FILE)
    with pytest.raises(InputError, match=r"missing \(.*value_head"):
        load_explorer(tmp_path, tmp_path / "f1.json")
    (tmp_path / EXPLORER_FILE).unlink()
    with pytest.raises(InputError, match="is not a checkpoint of an explorer"):
        load_explorer(tmp_path, tmp_path / "f1.json")
