"""The interaction set: every task and perturbation in turn, in scenes that are never trained in."""

import numpy as np
import pytest
from f1_worlds import micro_policy

from deft.config.rl_yaml import phase_config
from deft.training.phases.interaction import LENGTH, interaction_episodes


@pytest.fixture(scope="module")
def found():
    config = phase_config({"environment": {"image_size": 16}})
    return interaction_episodes(config, micro_policy(), 8, seed=2)


def test_tasks_and_perturbations_in_turn(found):
    """0 to 3: reach, push, pick, place by the expert; 4 to 7: the same at half speed."""
    assert [len(one.episode) for one in found] == [LENGTH] * 8
    assert [one.episode.number for one in found] == list(range(8))
    speeds = [np.abs(one.episode.action[:8, :7]).max(1).mean() for one in found]
    fast, slow = np.mean(speeds[:4]), np.mean(speeds[4:])
    assert slow < 0.7 * fast  # half, and noise of 0.2 that is not slower
    assert all(one.lifted.any() for one in (found[2], found[3]))  # pick and place lift something
    assert not found[0].lifted.any()  # reach does not
    assert all(found[index].touched.any() for index in (1, 2, 3))
    scenes = [one.episode.wrist[0] for one in found]
    assert not np.array_equal(scenes[2], scenes[3])


def test_the_same_again_and_others_for_another_seed(found):
    config = phase_config({"environment": {"image_size": 16}})
    again, other = (interaction_episodes(config, micro_policy(), 2, seed=seed) for seed in (2, 3))
    assert np.array_equal(again[1].episode.wrist, found[1].episode.wrist)
    assert np.array_equal(again[1].moved, found[1].moved)
    assert not np.array_equal(other[1].episode.wrist, found[1].episode.wrist)
