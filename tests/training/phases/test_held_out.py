"""Episodes of another explorer: half scripted, half random, in scenes never trained on; and a world's tally."""

import numpy as np
import pytest
from f1_worlds import micro_policy
from panning_camera import WORLD

from deft.config.rl_yaml import phase_config
from deft.training.phases.exploration import SCENES, ScriptedExploration, held_out_episodes


@pytest.fixture(scope="module")
def found():
    config = phase_config({"training": {"steps_per_episode": 24}, "environment": {"image_size": 16}})
    return held_out_episodes(config, micro_policy(), 6, seed=3)


def test_half_random_and_half_scripted(found):
    random, scripted = found[:3], found[3:]
    assert len(found) == 6
    assert all(len(episode) == 24 for episode in random)
    # Random actions are as often up as down: over 24 steps their mean is near 0 (deviation 0.58 / √24 = 0.12). A script
    # goes somewhere: in its first steps the joints keep their direction.
    drift = [np.abs(episode.action[:12, :7].mean(0)).max() for episode in found]
    assert max(drift[:3]) < min(drift[3:])
    assert all(np.abs(episode.action).max() <= 1.0 for episode in scripted)
    assert all(not episode.action[:, 18:].any() for episode in scripted)  # the padding does nothing


def test_the_same_again_and_others_for_another_seed(found):
    config = phase_config({"training": {"steps_per_episode": 24}, "environment": {"image_size": 16}})
    again, other = (held_out_episodes(config, micro_policy(), 2, seed=seed) for seed in (3, 4))
    assert np.array_equal(again[0].wrist, found[0].wrist)
    assert np.array_equal(again[1].action, found[3].action)
    assert not np.array_equal(other[0].wrist, found[0].wrist)


def test_scenes_are_none_of_trainings():
    exploration = ScriptedExploration({}, seed=5, held_out=True)
    assert exploration.scene_seed(0) >= SCENES


def test_a_world_without_scripts_says_so(caplog):
    config = phase_config({"training": {"steps_per_episode": 3}, "environment": {"world": WORLD}})
    found = held_out_episodes(config, micro_policy(), 2)
    assert len(found) == 2
    assert "no scripted pushes" in caplog.text
