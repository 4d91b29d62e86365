"""The student's reward: its formula by hand, its scales, its state."""

import pytest
import torch

from deft.config.f1_settings import StudentRewards
from deft.training.phases.rewards import Measures, StudentReward, memory_convergence, rise


def measures(steps=50, rows=4, seed=0) -> Measures:
    generator = torch.Generator().manual_seed(seed)

    def draw(mean, deviation):
        return mean + deviation * torch.randn(steps, rows, generator=generator)

    starts = torch.zeros(steps, rows, dtype=torch.bool)
    starts[0] = True
    after = draw(4.0, 0.5)
    before = torch.cat([torch.zeros(1, rows), after[:-1]])
    return Measures(before, after, draw(3.5, 0.2), draw(4.0, 0.7), draw(0.5, 0.1).abs(), starts)


def test_memories_that_come_closer_pay():
    # D: 2 → 1.5. −(1.5 − 2) − 0.07 · 1.5 = 0.5 − 0.105
    assert memory_convergence(torch.tensor(2.0), torch.tensor(1.5)).item() == pytest.approx(0.395)
    # 1 → 1: what lasts costs 0.07
    assert memory_convergence(torch.tensor(1.0), torch.tensor(1.0)).item() == pytest.approx(-0.07)


def test_a_rise_is_none_at_an_episodes_first_step():
    values = torch.tensor([[1.0], [4.0], [2.0], [7.0]])
    starts = torch.tensor([[True], [False], [True], [False]])
    assert rise(values, starts).flatten().tolist() == [0.0, 3.0, 0.0, 5.0]


def test_every_term_has_one_scale_and_its_weight():
    weights = StudentRewards(memory_divergence_weight=0.5, wm_uncertainty_weight=0.5)
    found = measures()
    reward, terms = StudentReward(weights)(found)
    # Normalised by what was seen so far, which is this rollout: mean 0, deviation 1, times 0.5 · (1, 1, 0.5, 0.1).
    expected = {"memory": 0.5, "uncertainty": 0.5, "error": 0.5, "error_progress": 0.25, "uncertainty_progress": 0.05}
    for name, weight in expected.items():
        assert terms[name].mean().item() == pytest.approx(0.0, abs=1e-5), name
        assert terms[name].std(correction=0).item() == pytest.approx(weight, rel=1e-3), name
    # the action's size as it is: −0.5 · 0.01 · |a|
    assert torch.allclose(terms["action"], -0.005 * found.action_size)
    assert torch.allclose(reward, sum(terms.values()), atol=1e-6)  # nothing was clipped
    # the sign: more error, more reward
    assert torch.corrcoef(torch.stack([terms["error"].flatten(), found.error.flatten()]))[0, 1] > 0.999


def test_the_world_models_part_is_clipped_and_the_memorys_is_not():
    found = measures()
    reward, terms = StudentReward(StudentRewards(reward_limit=0.1, memory_divergence_weight=2.0))(found)
    assert (reward - terms["memory"]).abs().max().item() == pytest.approx(0.05, rel=1e-4)  # 0.5 · 0.1
    assert terms["memory"].abs().max() > 1


def test_scales_run_on_and_are_saved():
    first, second = measures(seed=0), measures(seed=1)
    second.error *= 10
    one = StudentReward(StudentRewards())
    one(first)
    other = StudentReward(StudentRewards())
    other.load_state_dict(one.state_dict())
    fresh, _ = StudentReward(StudentRewards())(second)
    expected, _ = one(second)
    found, _ = other(second)
    assert torch.equal(found, expected)
    assert not torch.allclose(found, fresh, atol=1e-2)
