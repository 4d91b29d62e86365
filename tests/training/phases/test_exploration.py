"""Random exploration in this process and in others, and held-out episodes: half scripted, half random."""

import numpy as np
import pytest
from f1_worlds import micro_policy
from panning_camera import WORLD

from deft.config.rl_yaml import phase_config
from deft.training.phases.exploration import (
    SCENES,
    Exploration,
    InlineExplorer,
    ProcessExplorer,
    ScriptedExploration,
    held_out_episodes,
)

EXPLORATION = Exploration({"world": WORLD, "max_steps": 4})


def test_an_episode_is_the_same_whoever_collects_it():
    inline = InlineExplorer(EXPLORATION)
    expected = inline.take(4)
    assert [episode.number for episode in expected] == [0, 1, 2, 3]
    assert not np.array_equal(expected[0].action, expected[1].action)
    beside = ProcessExplorer(EXPLORATION, 2)
    try:
        found = sorted(beside.take(4), key=lambda episode: episode.number)
    finally:
        beside.close()
    for one, other in zip(expected, found, strict=True):
        for name, values in one.streams().items():
            assert np.array_equal(values, other.streams()[name])
    later = InlineExplorer(EXPLORATION)
    later.skip(2)
    assert np.array_equal(later.take(1)[0].wrist, expected[2].wrist)
    shared = [InlineExplorer(EXPLORATION, first, 2).take(2) for first in range(2)]
    assert [[episode.number for episode in part] for part in shared] == [[0, 2], [1, 3]]


def test_held_out_scenes_are_never_trained_on():
    seeds = {Exploration({}, seed=seed).scene_seed(index) for seed in (0, 1, 12345) for index in range(1000)}
    held_out = {
        Exploration({}, seed=seed, held_out=True).scene_seed(index) for seed in (0, 1, 12345) for index in range(1000)
    }
    assert not seeds & held_out
    assert max(seeds) < min(held_out)


def test_a_scene_is_kept_for_several_episodes():
    explorer = InlineExplorer(Exploration({"world": WORLD, "max_steps": 3}, scenes_kept=3))
    first = explorer.take(5)
    again = InlineExplorer(Exploration({"world": WORLD, "max_steps": 3}, scenes_kept=3))
    again.skip(4)
    assert np.array_equal(again.take(1)[0].wrist, first[4].wrist)
    assert [episode.number for episode in first] == [0, 1, 2, 3, 4]


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
