"""Arrays that parent and workers share: the same layout in both, and no overlap."""

import mmap
import os

import numpy as np
from gymnasium import spaces

from deft.envs.layout import ActionLayout, ObservationLayout
from deft.envs.shared_memory import SharedArrays, open_memory


def test_two_mappings_of_one_file_are_the_same_arrays() -> None:
    observations = ObservationLayout(spaces.Dict({"a": spaces.Box(-1, 1, (3,)), "b": spaces.Discrete(5)}))
    sizes = (observations, ActionLayout(spaces.Box(-1, 1, (2,))), 2, 4, 3)
    file, size = open_memory(), SharedArrays(*sizes).size
    os.ftruncate(file, size)
    one, other = (SharedArrays(*sizes, mmap.mmap(file, size)) for _ in range(2))
    os.close(file)
    arrays = [one.actions, one.stepping, *one.env.final.values()]
    for step in one.env.steps:
        arrays += [step.reward, step.terminated, step.truncated, step.num_steps, step.reward_terms]
        arrays += step.observation.values()
    for number, array in enumerate(arrays):
        array[...] = number % 2
    assert all((array == number % 2).all() for number, array in enumerate(arrays)), "two arrays overlap"
    np.testing.assert_array_equal(other.actions, one.actions)
    np.testing.assert_array_equal(other.env.steps[1].observation["a"], one.env.steps[1].observation["a"])
    assert one.size == size
    assert one.stepping.shape == (3,)
    assert one.actions.shape == (4, 2)
