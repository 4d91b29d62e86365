"""The student's reward: its formula by hand, its scales, its state; what the game of phase 3 pays, and its end."""

import copy

import numpy as np
import pytest
import torch
from f1_worlds import changed, weights
from panning_camera import game_config

from deft import schema
from deft.config.f1_settings import StudentRewards
from deft.errors import RunError
from deft.training.phases.explorer_rollouts import measure
from deft.training.phases.rewards import CollapseGuard, GameReward, Measures, StudentReward, memory_convergence, rise

STEPS = 6  # of an episode of `game_config`


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


# -- the game of phase 3 -----------------------------------------------------------------------------------------------


def settings(**game):
    return game_config("unused", **game).adversarial


def test_raw_error_is_the_world_models_error_on_the_next_frame(collected):
    policy, found = collected
    raw, measures, _ = GameReward(settings(reward="error"), policy).raw(policy, found)
    assert torch.equal(raw, measures.error)
    assert raw.shape == (STEPS, 2)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("error", "action"),
        ("error", "wrist"),
        ("progress", "action"),
        ("progress", "wrist"),
        ("disagreement", "action"),
    ],
)
def test_the_reward_of_a_step_depends_on_its_action_and_on_what_it_led_to(collected, kind, name):
    policy, found = collected
    reward = GameReward(settings(reward=kind), policy)
    if reward.older is not None:  # an older world model that differs
        with torch.no_grad():
            for parameter in reward.older.network.model.world_model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
    plain, *_ = reward.raw(policy, found)
    other = copy.copy(found)
    other.episodes = [copy.copy(episode) for episode in found.episodes]
    changing = other.episodes[0]
    if name == "action":
        changing.action = changing.action.copy()
        changing.action[3, 0] = 0.5 - changing.action[3, 0]
    else:  # img_4, which a_3 led to
        changing.wrist, changing.codes = changing.wrist.copy(), np.array(changing.codes)
        changing.wrist[4], changing.codes[4] = 255 - changing.wrist[4], changing.codes[1][::-1]
    differs = (reward.raw(policy, other)[0] != plain).nonzero().tolist()
    assert [3, 0] in differs
    assert all(step >= 3 and column == 0 for step, column in differs)  # nothing before it, nothing of others


@pytest.mark.parametrize("kind", ["error", "progress", "disagreement"])
def test_paying_changes_no_network(collected, kind):
    policy, found = collected
    before = weights(policy)
    policy.train()
    GameReward(settings(reward=kind), policy).pay(policy, found)
    assert policy.training
    policy.eval()
    assert not changed(before, policy)
    assert all(parameter.grad is None for parameter in policy.parameters())


def test_progress_is_nothing_where_nothing_was_learned(collected):
    policy, found = collected
    reward = GameReward(settings(reward="progress"), policy)
    raw, *_ = reward.raw(policy, found)
    assert not raw.any()
    logged = reward.pay(policy, found)
    assert not found.rollout[schema.NEXT_REWARD].any()
    assert float(logged["reward/progress"]) == 0.0


def test_progress_is_the_smaller_fall_of_error_and_uncertainty(collected):
    policy, found = collected
    reward = GameReward(settings(reward="progress"), policy)
    with torch.no_grad():
        for parameter in reward.older.network.model.world_model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    raw, now, _ = reward.raw(policy, found)
    older = measure(reward.older.network, found)
    assert torch.equal(raw, torch.minimum(older.error - now.error, older.uncertainty - now.uncertainty))
    assert raw.any()


def test_to_learn_that_something_cannot_be_predicted_does_not_pay(collected):
    """An older world model that is as wrong, but surer: its error falls to the present one's, and nothing is paid."""
    policy, found = collected
    reward = GameReward(settings(reward="progress"), policy)
    torch.manual_seed(0)
    with torch.no_grad():
        output = reward.older.network.model.world_model.output
        output.weight.normal_(std=1.0)  # sure of codes that have nothing to do with what comes
    raw, now, others = reward.raw(policy, found)
    assert float((others["older_wm_error"] - now.error).mean()) > 0.5
    assert float((others["older_wm_uncertainty"] - now.uncertainty).mean()) < -0.1
    assert float(raw.mean()) < 0


def test_the_older_world_model_is_so_many_iterations_old(collected):
    policy, _ = collected
    policy = copy.deepcopy(policy)
    reward = GameReward(settings(reward="progress", progress_lag=2), policy)
    parameter = next(policy.model.world_model.parameters())
    seen = []
    for iteration in range(1, 7):
        with torch.no_grad():
            parameter.fill_(float(iteration))
        reward.end_iteration(policy, iteration)
        seen.append(float(next(reward.older.network.model.world_model.parameters()).flatten()[0]))
    # Replaced after 2, 4 and 6 iterations by the weights that waited since 2 iterations before.
    assert seen[2:] == [seen[1], 2.0, 2.0, 4.0]


def test_below_the_floor_nothing_is_paid(collected):
    policy, found = collected
    errors = measure(policy, found).error
    floor = float(errors.median())
    logged = GameReward(settings(reward="error", reward_floor=floor), policy).pay(policy, found)
    reward = found.rollout[schema.NEXT_REWARD]
    assert torch.equal(reward != 0, errors > floor)
    assert float(logged["reward/paid_steps"]) == pytest.approx(float((errors > floor).float().mean()))


def test_rewards_are_brought_to_one_scale(collected):
    policy, found = collected
    reward = GameReward(settings(reward="error", reward_floor=0.0), policy)
    reward.pay(policy, found)
    paid = found.rollout[schema.NEXT_REWARD]
    errors = measure(policy, found).error
    assert torch.allclose(paid, errors / errors.square().mean().sqrt(), atol=1e-5)  # and nothing is subtracted


# -- when it ends ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"held_out_loss": 2.0}, "world model has collapsed"),
        ({"held_out_loss": float("nan")}, "world model has collapsed"),
        ({"spread": 0.001}, "explorer has collapsed: its actions hardly differ"),
        ({"saturated": 1.0}, "explorer has collapsed: 100%"),
        ({"paid": 0.0}, "the game is over"),
    ],
)
def test_a_collapse_ends_the_run_after_so_many_iterations(bad, message):
    good = {"held_out_loss": 1.0, "spread": 0.5, "saturated": 0.1, "paid": 1.0}
    guard = CollapseGuard(3)
    for found in (good, good | bad, good | bad, good, good | bad, good | bad):
        guard.check(**found)  # never three in a row
    again = CollapseGuard(3)
    again.load_state_dict(guard.state_dict())
    with pytest.raises(RunError, match=message):
        again.check(**(good | bad))
