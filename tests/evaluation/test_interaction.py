"""A world model on interaction, by hand: which tokens and pixels count, and what is counted of them."""

import math

import numpy as np
import pytest
import torch
from f1_worlds import micro_policy, wake

from deft.data.robot_episode import RobotEpisode
from deft.envs.interaction import HORIZONS
from deft.errors import InputError
from deft.evaluation.interaction import (
    InteractionEpisode,
    free_episodes,
    interaction_lines,
    interaction_sums,
    measure_interaction,
    token_shares,
)
from deft.evaluation.report.phases import interaction_charts
from deft.evaluation.world_model import coded_batches, episode_losses
from deft.models.f1.frames import to_images
from deft.models.f1.policy import roll_out


@pytest.fixture(scope="module")
def policy():
    found = wake(micro_policy(condition_init=0.3))
    torch.nn.init.normal_(found.model.world_model.output.weight)
    return found


def episode(steps, seed=0, moved=()):
    """Noise; `moved` are (step, horizon, rows of pixels)."""
    generator = np.random.default_rng(seed)
    frames = generator.integers(0, 256, (2, steps + 1, 3, 16, 16), np.uint8)
    found = RobotEpisode(
        frames[0],
        generator.normal(size=(steps + 1, 32)).astype(np.float32),
        generator.uniform(-1, 1, (steps, 32)).astype(np.float32),
        head=frames[1],
    )
    mask = np.zeros((steps, len(HORIZONS), 16, 16), bool)
    for step, horizon, rows in moved:
        mask[step, HORIZONS.index(horizon), rows] = True
    touched = mask[:, 0].any((1, 2))
    return InteractionEpisode(found, mask, touched, touched)


def test_a_token_counts_by_the_pixels_of_its_cell_that_moved():
    """The upper quarter of 8 × 8 pixels moved: a quarter of the whole; half of each upper cell of 2 × 2; all of the
    first row of cells of 4 × 4."""
    moved = torch.zeros(1, 8, 8, dtype=torch.bool)
    moved[:, :2] = True
    shares = token_shares(moved, (1, 2, 4))[0]
    assert shares.tolist() == [0.25, 0.5, 0.5, 0.0, 0.0, *[1.0] * 4, *[0.0] * 12]


def test_both_parts_add_up_to_the_whole(policy):
    """Moved and rest together are every token and pixel, whatever the mask, also of episodes of different lengths."""
    episodes = [episode(12, 1, [(3, 1, slice(0, 8))]), episode(7, 2, [(0, 1, slice(4, 5)), (6, 1, slice(0, 16))])]
    sums = interaction_sums(policy, episodes)
    expected, lengths = episode_losses(policy, coded_batches(policy, [one.episode for one in episodes]))
    whole = (sums["moved_loss"] + sums["rest_loss"]) / policy.config.num_tokens
    assert whole.tolist() == pytest.approx(expected.tolist(), rel=1e-5)
    assert (sums["moved_tokens"] + sums["rest_tokens"]).tolist() == pytest.approx((21 * lengths).tolist())
    # of the first: half of a frame; of the second: one row of sixteen and a whole frame
    assert sums["moved_pixels"].tolist() == [128, 16 + 256]
    assert (sums["moved_pixels"] + sums["rest_pixels"]).tolist() == [256 * 12, 256 * 7]
    results = measure_interaction(policy, episodes)
    assert results["cross_entropy"] == pytest.approx(float(expected.sum() / lengths.sum()), rel=1e-5)
    assert (results["steps"], results["steps_in_contact"], results["frames_moved"]) == (19, 3, 3)
    assert results["contacts_per_1000"] == pytest.approx(3000 / 19)


def test_psnr_of_moved_pixels_by_hand(policy):
    """Only the upper half of the frame after step 3 moved: its error, over 8 · 16 · 3 values."""
    one = episode(12, 3, [(3, 1, slice(0, 8))])
    batch = coded_batches(policy, [one.episode])[0]
    with torch.no_grad():
        steps, _ = batch.chunk(0, 4)
        predicted = policy.predict_images_only(steps, policy.initial_memory(1))["images"][3, 0].float()
    truth, last = (torch.as_tensor(one.episode.wrist[place]).float() for place in (4, 3))
    results = measure_interaction(policy, [one])["moved"]

    def decibels(image):
        return 10 * math.log10(255**2 / float((image - truth)[:, :8].square().mean()))

    assert results["psnr"] == pytest.approx(decibels(predicted), abs=1e-3)
    assert results["copy_psnr"] == pytest.approx(decibels(last), abs=1e-3)
    decoded = to_images(policy.tokenizer.decode(batch.streams["codes"][0, 4].long()[None]))[0].float()
    assert results["tokenizer_psnr"] == pytest.approx(decibels(decoded), abs=1e-3)


def test_open_loop_counts_what_moved_since_the_prediction_began(policy):
    """27 steps: predictions of 20 steps start at steps 0 and 7. The second one's frame 10 steps ahead is that after
    step 16, of which only the pixels that moved within 10 steps count as moved."""
    one = episode(27, 4, [(16, 10, slice(2, 6)), (16, 1, slice(0, 16)), (15, 10, slice(0, 16))])
    batch = coded_batches(policy, [one.episode])[0]
    sums = interaction_sums(policy, [one])
    assert float(sums["moved_10_pixels"]) == 4 * 16
    assert float(sums["rest_10_pixels"]) == 2 * 256 - 4 * 16
    assert float(sums["moved_5_pixels"]) == 0
    with torch.no_grad():
        memory = policy.forward_memory_only(batch.chunk(0, 7)[0], policy.initial_memory(1))
        first = batch.steps(torch.tensor([0]), torch.tensor([7]))
        history = first["action_history"]
        first["action_history"] = torch.cat([torch.zeros_like(history[:, :1]), history[:, :-1]], 1)
        found = roll_out(policy, first, batch.streams["action"][:, 7:27], memory)["images"][0, 9].float()
    truth, last = (batch.streams["wrist"][0, place].float() for place in (17, 7))
    assert float(sums["moved_10_error"]) == pytest.approx(float((found - truth)[:, 2:6].square().sum()), rel=1e-6)
    assert float(sums["moved_10_copy_error"]) == pytest.approx(float((last - truth)[:, 2:6].square().sum()), rel=1e-6)


def test_without_a_recording_nothing_moved(policy, capsys):
    results = measure_interaction(policy, free_episodes([episode(21).episode]))
    assert results["moved"]["cross_entropy"] is results["moved"]["psnr"] is None
    assert "contacts_per_1000" not in results  # not recorded, which is not 0
    assert results["rest"]["cross_entropy"] == pytest.approx(results["cross_entropy"])
    moved = measure_interaction(policy, [episode(21, 0, [(0, 1, slice(0, 8)), (4, 5, slice(0, 8))])])
    lines = interaction_lines({"interaction": moved, "free_motion": results})
    assert [line.split(":")[0].strip() for line in lines] == [
        "interaction", "moved objects", "open loop, PSNR by steps ahead (last frame)",
        "all else", "open loop, PSNR by steps ahead (last frame)",
        "free motion", "all else", "open loop, PSNR by steps ahead (last frame)",
    ]  # fmt: skip
    assert len(interaction_charts(moved)) == 2
    assert len(interaction_charts(results)) == 1
    short = measure_interaction(policy, free_episodes([episode(21).episode]), open_loop=False)
    assert short == {**results, "open_loop": {}}
    assert interaction_charts({}) == []
    with pytest.raises(InputError, match="one episode or more"):
        interaction_sums(policy, [])
