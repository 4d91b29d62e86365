"""Batches from transitions: frames and actions in step, cameras under their names, the memory between steps."""

import numpy as np
import pytest
import torch
from f1_worlds import micro_policy
from tensordict import TensorDict

from deft import schema
from deft.envs.history import prediction_pair
from deft.errors import InputError
from deft.models.f1.batch import BatchBuilder, MemoryStateManager


def observation(rng, cameras=(schema.HEAD_RGB, schema.WRIST_RGB)):
    return {
        schema.STATE: rng.standard_normal(32).astype(np.float32),
        schema.ACTION_HISTORY: rng.standard_normal((4, 32)).astype(np.float32),
        **{name: rng.integers(0, 256, (4, 3, 16, 16), np.uint8) for name in cameras},
    }


def transition(rng, **arguments):
    return {
        schema.OBSERVATION: observation(rng, **arguments),
        schema.ACTION: rng.standard_normal(32).astype(np.float32),
        schema.NEXT: {schema.OBSERVATION: observation(rng, **arguments)},
        schema.MEMORY: rng.standard_normal((2, 6)).astype(np.float32),
    }


@pytest.fixture
def rows():
    rng = np.random.default_rng(0)
    return [transition(rng) for _ in range(3)]


def test_what_predicts_the_next_frame(rows):
    """[img_{t-3} … img_t], img_{t+1} and [a_{t-3} … a_t], as the environments' histories have it."""
    batch = BatchBuilder().build_batch(rows)
    for index, row in enumerate(rows):
        inputs, target = prediction_pair(
            row[schema.OBSERVATION], row[schema.ACTION], row[schema.NEXT][schema.OBSERVATION]
        )
        np.testing.assert_array_equal(batch[schema.ACTION_HISTORY][index], inputs[schema.ACTION_HISTORY])
        np.testing.assert_array_equal(batch[schema.IMAGE0_HISTORY][index, :4], inputs[schema.WRIST_RGB])
        np.testing.assert_array_equal(batch[schema.IMAGE0_HISTORY][index, 4], target)
        np.testing.assert_array_equal(batch[schema.IMAGE0][index], inputs[schema.HEAD_RGB][-1])
        np.testing.assert_array_equal(batch[schema.IMAGE1][index], inputs[schema.WRIST_RGB][-1])
        np.testing.assert_array_equal(batch[schema.MEMORY_STATE][:, index], row[schema.MEMORY])
    assert schema.ACTION not in batch  # the executed action is an input, no chunk to learn


def test_the_student_sees_the_wrist_alone():
    rng = np.random.default_rng(0)
    batch = BatchBuilder().build_batch([transition(rng, cameras=(schema.WRIST_RGB,)) for _ in range(2)])
    assert schema.IMAGE1 not in batch
    assert torch.equal(batch[schema.IMAGE0], batch[schema.IMAGE0_HISTORY][:, 3])


def test_a_sequence_of_transitions(rows):
    steps = TensorDict(
        {
            schema.OBSERVATION: {name: torch.randn(5, 2, 4, 32) for name in (schema.ACTION_HISTORY,)}
            | {schema.STATE: torch.randn(5, 2, 32), schema.INSTRUCTION: torch.zeros(5, 2, 9, dtype=torch.uint8)}
            | {schema.WRIST_RGB: torch.zeros(5, 2, 4, 3, 16, 16, dtype=torch.uint8)},
            schema.ACTION: torch.randn(5, 2, 32),
            schema.NEXT: {schema.OBSERVATION: {schema.WRIST_RGB: torch.ones(5, 2, 4, 3, 16, 16, dtype=torch.uint8)}},
            schema.MEMORY: torch.randn(5, 2, 2, 6),
        },
        batch_size=[5, 2],
    )
    batch = BatchBuilder().build_batch(steps)
    assert batch[schema.IMAGE0_HISTORY].shape == (5, 2, 5, 3, 16, 16)
    assert torch.equal(batch[schema.MEMORY_STATE], steps[schema.MEMORY][0].transpose(0, 1))
    results = micro_policy().forward_with_world_model(batch)
    assert results["memory_state"].shape == (2, 2, 6)


def test_a_batch_for_acting(rows):
    """Without an action the history stays the observation's, and there is no frame to predict."""
    seen = [{schema.OBSERVATION: row[schema.OBSERVATION], schema.MEMORY: row[schema.MEMORY]} for row in rows]
    batch = BatchBuilder().build_batch(seen)
    assert batch[schema.IMAGE0_HISTORY].shape == (3, 4, 3, 16, 16)
    history = np.stack([row[schema.OBSERVATION][schema.ACTION_HISTORY] for row in rows])
    np.testing.assert_array_equal(batch[schema.ACTION_HISTORY], history)
    assert micro_policy().sample_actions_with_world_model(batch).shape == (3, 3, 32)


def test_memories_are_asked_for(rows):
    for row in rows:
        del row[schema.MEMORY]
    with pytest.raises(InputError, match="the transitions have no 'memory'"):
        BatchBuilder().build_batch(rows)
    assert schema.MEMORY_STATE not in BatchBuilder().build_batch(rows, include_memory_states=False)


def test_transitions_that_do_not_fit(rows):
    with pytest.raises(InputError, match="a batch of no transitions"):
        BatchBuilder().build_batch([])
    rows[1][schema.OBSERVATION].pop(schema.HEAD_RGB)
    with pytest.raises(InputError, match="transitions differ"):
        BatchBuilder().build_batch(rows)
    rows = rows[:1]
    rows[0][schema.OBSERVATION][schema.WRIST_RGB] = rows[0][schema.OBSERVATION][schema.WRIST_RGB][:3]
    with pytest.raises(InputError, match="3 frames and 4 actions: the histories are out of step"):
        BatchBuilder().build_batch(rows)


def test_the_memory_from_step_to_step():
    manager = MemoryStateManager()
    assert manager.get_current() is None
    with pytest.raises(InputError, match="memory_state cannot be None"):
        manager.update(None)
    with pytest.raises(InputError, match=r"it is \(layers, batch, hidden\)"):
        manager.update(torch.ones(3, 4))
    manager.update(torch.ones(2, 3, 4, requires_grad=True) * 2)
    assert not manager.get_current().requires_grad
    manager.reset(torch.tensor([False, True, False]))
    assert manager.get_current()[:, :, 0].tolist() == [[2, 0, 2], [2, 0, 2]]
    manager.reset()
    assert manager.get_current() is None
