"""One episode of a robot."""

import subprocess
import sys

import numpy as np
import pytest

from deft.data.robot_episode import RobotEpisode
from deft.errors import InputError


def arrays(length: int) -> dict[str, np.ndarray]:
    return {
        "wrist": np.zeros((length + 1, 3, 2, 2), np.uint8),
        "state": np.zeros((length + 1, 4), np.float32),
        "action": np.zeros((length, 2), np.float32),
    }


def test_streams_are_the_arrays_that_are_present():
    episode = RobotEpisode(**arrays(3), number=7)
    assert len(episode) == 3
    assert set(episode.streams()) == {"wrist", "state", "action"}
    assert set(RobotEpisode(**arrays(3), codes=np.zeros((4, 5))).streams()) == {"wrist", "state", "action", "codes"}


@pytest.mark.parametrize("name", ["wrist", "head", "state", "codes"])
def test_arrays_need_one_row_more_than_there_are_actions(name):
    with pytest.raises(InputError, match=f"{name} has 3 rows in an episode of 3 actions; it needs 4"):
        RobotEpisode(**(arrays(3) | {name: np.zeros((3, 1))}))


def test_an_episode_needs_an_action():
    with pytest.raises(InputError, match="at least one action"):
        RobotEpisode(**arrays(0))


def test_collecting_processes_do_not_import_torch():
    code = "import sys, deft.data.robot_episode; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
