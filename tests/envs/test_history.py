"""Frames and actions in step, and a world model's input and target, on numbers that are known in advance."""

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from deft.envs.history import History, executed_action, prediction_inputs, prediction_pair
from deft.errors import InputError


def frame(t: int) -> dict[str, np.ndarray]:
    return {"wrist_rgb": np.full((3, 2, 2), t, np.uint8)}


def after(length: int, stride: int, num_steps: int) -> History:
    """A history at time t = num_steps; img_t shows t, a_t is [t + 0.5]."""
    history = History(length, stride, action_size=1)
    history.start(frame(0))
    for t in range(num_steps):
        history.add(np.array([t + 0.5]), frame(t + 1))
    return history


@pytest.mark.parametrize(
    ("length", "stride", "num_steps", "frames", "actions"),
    [
        (4, 1, 0, [0, 0, 0, 0], [0, 0, 0, 0]),  # the first frame, and nothing done yet
        (4, 1, 2, [0, 0, 1, 2], [0, 0, 0.5, 1.5]),
        (4, 1, 9, [6, 7, 8, 9], [5.5, 6.5, 7.5, 8.5]),  # img_{t-3} … img_t; a_{t-4} … a_{t-1}
        (3, 2, 9, [5, 7, 9], [3.5, 5.5, 7.5]),  # img_{t-4}, img_{t-2}, img_t; a_{t-6}, a_{t-4}, a_{t-2}
        (3, 2, 3, [0, 1, 3], [0, 0, 1.5]),
        (1, 3, 9, [9], [6.5]),
    ],
)
def test_sampled_in_step(length: int, stride: int, num_steps: int, frames: list[int], actions: list[float]) -> None:
    history = after(length, stride, num_steps)
    assert history.frames()["wrist_rgb"][:, 0, 0, 0].tolist() == frames
    assert history.frames()["wrist_rgb"].dtype == np.uint8
    assert history.actions()[:, 0].tolist() == actions


@pytest.mark.parametrize("stride", [1, 3])
def test_with_the_present_action_each_frame_has_its_own(stride: int) -> None:
    t, history = 20, after(4, stride, 20)
    observation = {"action_history": history.actions(), **history.frames()}
    inputs = prediction_inputs(observation, np.array([t + 0.5], np.float32))
    # action i was taken when frame i was seen: t' + 0.5 for the frame t'
    np.testing.assert_array_equal(inputs["action_history"][:, 0], inputs["wrist_rgb"][:, 0, 0, 0] + 0.5)
    assert inputs["wrist_rgb"][-1, 0, 0, 0] == t
    assert history.actions()[-1, 0] == t - stride + 0.5  # the observation's own is left as it was


def test_lengths_are_asserted() -> None:
    history = after(4, 1, 2)
    history._actions.pop()
    with pytest.raises(AssertionError, match="Action history length mismatch"):
        history.actions()
    history._frames["wrist_rgb"].pop()
    with pytest.raises(AssertionError, match="Image history length mismatch"):
        history.frames()
    observation = {"action_history": np.zeros((3, 1)), "wrist_rgb": np.zeros((4, 3, 2, 2), np.uint8)}
    with pytest.raises(AssertionError, match="4 frames for 3 actions"):
        prediction_inputs(observation, np.zeros(1))
    with pytest.raises(InputError, match="at least 1"):
        History(0, 1, 32)


def test_states_are_exact_and_apart() -> None:
    history = after(3, 2, 5)
    state = history.get_state()
    history.add(np.array([9.0]), frame(200))
    other = History(3, 2, action_size=1)
    other.set_state(state)
    other.add(np.array([9.0]), frame(200))
    np.testing.assert_array_equal(other.actions(), history.actions())
    np.testing.assert_array_equal(other.frames()["wrist_rgb"], history.frames()["wrist_rgb"])
    assert state["frames"]["wrist_rgb"].max() == 5


def test_batches_of_arrays_and_tensors() -> None:
    random = np.random.default_rng(0)
    history = random.normal(size=(5, 2, 4, 32)).astype(np.float32)  # [T, N, H, A]
    images = random.integers(0, 255, (5, 2, 4, 3, 8, 8), dtype=np.uint8)
    action = random.normal(size=(5, 2, 32)).astype(np.float32)
    observation = {"state": action, "action_history": history, "wrist_rgb": images, "head_rgb": images + 1}
    inputs, target = prediction_pair(observation, action, {"wrist_rgb": images + 2})
    np.testing.assert_array_equal(inputs["action_history"][..., :3, :], history[..., 1:, :])
    np.testing.assert_array_equal(inputs["action_history"][..., 3, :], action)
    np.testing.assert_array_equal(target, images[:, :, -1] + 2)
    assert set(inputs) == {"state", "action_history", "wrist_rgb", "head_rgb"}
    td = TensorDict({name: torch.as_tensor(value) for name, value in observation.items()}, batch_size=[5, 2])
    tensors, _ = prediction_pair(td, torch.as_tensor(action), td)
    assert set(tensors) == set(inputs)
    assert torch.equal(tensors["action_history"], torch.as_tensor(inputs["action_history"]))
    assert torch.equal(td["action_history"], torch.as_tensor(history))
    with pytest.raises(InputError, match="does not fit the action history"):
        prediction_inputs(observation, action[0])


def test_what_is_executed() -> None:
    mask = np.array([True, True, False])
    executed = executed_action(np.array([3.0, -0.5, -0.7], np.float32), mask)
    assert executed.tolist() == [1.0, -0.5, 0.0]
    assert executed.dtype == np.float32
    assert not np.signbit(executed[2])
    assert executed_action(torch.tensor([3.0, -0.5, -0.7]), torch.tensor(mask)).tolist() == [1.0, -0.5, 0.0]
