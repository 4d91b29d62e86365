"""Small Minari recordings, for tests of recording."""

import numpy as np
from gymnasium import spaces

from deft.data.datasets import Episode
from deft.data.datasets.minari import MinariFiles, dataset_path
from deft.data.recording import Recording
from deft.errors import InputError

BOX = spaces.Box(-1, 1, (2,), np.float32)
ACTION = spaces.Box(-1, 1, (1,), np.float32)


def counting(length, first=0.0):
    """Observations and actions number themselves; the episode terminates."""
    observation = (first + np.arange(2 * length + 2, dtype=np.float32).reshape(-1, 2)) / 100
    terminated = np.arange(length) == length - 1
    action = np.linspace(-1, 1, length, dtype=np.float32)[:, None]
    return Episode(observation, action, np.ones(length, np.float32), terminated, np.zeros(length, bool))


def started(path, append=False, observation_space=BOX, action_space=ACTION):
    path = dataset_path(path)
    recording = Recording(path, MinariFiles(path), append=append)
    try:
        recording.set_spaces(observation_space, action_space)
    except InputError:
        recording.close()
        raise
    return recording


def record(path, *episodes, **settings):
    with started(path, **settings) as recording:
        for episode in episodes:
            recording.add(episode, seed=np.int64(7), success=None)
    return recording
