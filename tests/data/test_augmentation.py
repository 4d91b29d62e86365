"""Pictures of an episode changed alike: colours, and where things are seen."""

import numpy as np

from deft.data.augmentation import recoloured, shifted
from deft.data.robot_episode import RobotEpisode


def an_episode() -> RobotEpisode:
    pictures = np.arange(3 * 3 * 4 * 4, dtype=np.uint8).reshape(3, 3, 4, 4)
    return RobotEpisode(wrist=pictures, state=np.zeros((3, 2), np.float32), action=np.zeros((2, 2), np.float32))


def test_an_episode_is_shifted_alike_in_all_frames():
    """Each frame is one of the nine moves by −1, 0 or 1, with its edge repeated, and all frames are moved alike."""
    episode, found = an_episode(), set()
    for seed in range(40):
        moved = shifted(episode, np.random.default_rng(seed), 1)
        padded = np.pad(episode.wrist, ((0, 0), (0, 0), (1, 1), (1, 1)), mode="edge")
        fits = [
            (down, right)
            for down in range(3)
            for right in range(3)
            if np.array_equal(moved.wrist, padded[..., down : down + 4, right : right + 4])
        ]
        assert len(fits) == 1
        found.add(fits[0])
    assert len(found) == 9


def test_nothing_changes_unasked():
    episode = an_episode()
    assert shifted(episode, np.random.default_rng(0), 0) is episode
    assert recoloured(episode, np.random.default_rng(0), 0.0) is episode
