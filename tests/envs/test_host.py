"""Numpy arrays from tensors: values and types are kept, later steps do not change them."""

from typing import Any

import numpy as np
import torch
from gymnasium import spaces

from deft.envs.host import HostVectorEnv
from deft.envs.vector import Episode, VectorEnv, VectorStep


class TensorCounter(VectorEnv):
    """Two environments whose observation is the number of steps, in one tensor that is reused."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        space = spaces.Dict({"steps": spaces.Box(0, 100, (1,), np.float32)})
        super().__init__(2, observation_space=space, action_space=spaces.Box(-1, 1, (1,), np.float32))
        self.steps = torch.zeros(2, 1)

    @property
    def observation(self) -> Any:
        return {"steps": self.steps}

    def reset(self, seed: Any = None) -> Any:
        self.steps.fill_(0 if seed is None else seed)
        return self.observation

    def step(self, actions: Any) -> VectorStep:
        self.steps += 1
        flags = torch.tensor([True, False])
        rows, none = torch.tensor([0]), torch.zeros(0, dtype=torch.int64)
        episodes = [Episode(0, 1.0, 1, True, {})]
        reward = torch.as_tensor(actions)[:, 0]
        final = {"steps": self.steps[:1]}
        return VectorStep(
            self.observation, reward, flags, ~flags, torch.ones(2).long(), rows, final, episodes, none, None
        )  # type: ignore[arg-type]


def test_steps_are_arrays_that_stay() -> None:
    env = HostVectorEnv(TensorCounter())
    assert env.device is None
    first = env.reset(seed=3)
    step = env.step(np.array([[0.5], [1.0]], np.float32))
    assert isinstance(first, dict)
    np.testing.assert_array_equal(first["steps"], [[3.0], [3.0]])
    np.testing.assert_array_equal(step.observation["steps"], [[4.0], [4.0]])
    np.testing.assert_array_equal(step.reward, np.array([0.5, 1.0], np.float32))
    assert step.terminated.dtype == np.bool_
    assert step.done_index.tolist() == [0]
    assert step.final_observation["steps"].shape == (1, 1)
    assert step.episodes[0].success
    assert step.reward_terms is None
    env.step(np.zeros((2, 1), np.float32))
    np.testing.assert_array_equal(step.observation["steps"], [[4.0], [4.0]])
