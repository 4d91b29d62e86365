import os

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from deft import schema
from deft.data.rollout import RolloutBuffer, VLABuffer
from deft.errors import InputError


def transition(number: int, num_envs: int = 2) -> TensorDict:
    """One step whose observation is [number, env]."""
    observation = torch.stack([torch.tensor([number, env], dtype=torch.float32) for env in range(num_envs)])
    scalar = torch.zeros(num_envs)
    return TensorDict(
        {
            schema.OBSERVATION: observation,
            schema.LOG_PROB: scalar,
            schema.NEXT: {schema.REWARD: scalar + number, schema.TERMINATED: scalar.bool()},
        },
        batch_size=[num_envs],
    )


def steps(td: TensorDict) -> list[float]:
    return td[schema.OBSERVATION][:, 0, 0].tolist()


def test_rollout_is_handed_out_once_and_cleared():
    buffer = RolloutBuffer(3)
    for number in range(3):
        assert not buffer.is_full()
        buffer.add(transition(number))
    assert buffer.is_full()
    rollout = buffer.get()
    assert rollout.batch_size == (3, 2)
    assert steps(rollout) == [0, 1, 2]
    assert not buffer.is_full()
    with pytest.raises(InputError, match="returned once"):
        buffer.get()


def test_rollout_flattened_and_added_whole():
    buffer = RolloutBuffer(3)
    buffer.add(torch.stack([transition(number) for number in range(3)]))
    flat = buffer.get(flatten=True)
    assert flat.batch_size == (6,)
    # time-major: both environments of step 0, then of step 1, …
    assert flat[schema.OBSERVATION].tolist() == [[0, 0], [0, 1], [1, 0], [1, 1], [2, 0], [2, 1]]


def test_full_rollout_refuses_more():
    buffer = RolloutBuffer(1)
    buffer.add(transition(0))
    with pytest.raises(InputError, match="full"):
        buffer.add(transition(1))


@pytest.mark.parametrize("buffer", [RolloutBuffer(2), VLABuffer(2)])
def test_scalars_with_a_trailing_dimension_raise_an_error(buffer):
    bad = transition(0)
    bad[schema.LOG_PROB] = torch.zeros(2, 1)
    with pytest.raises(InputError, match="per-step scalar"):
        buffer.add(bad)


def test_changed_keys_and_shapes_raise_an_error():
    buffer = RolloutBuffer(3)
    buffer.add(transition(0))
    with pytest.raises(InputError, match=r"missing \['sample_log_prob'\]"):
        buffer.add(transition(1).exclude(schema.LOG_PROB))
    changed = transition(1)
    changed[schema.OBSERVATION] = torch.zeros(2, 5)
    with pytest.raises(InputError, match="shape"):
        buffer.add(changed)


def test_ring_overwrites_as_in_the_document():
    # capacity 4: [T0,T1,T2,T3] (full) → [T4,T1,T2,T3] → [T4,T5,T2,T3]
    ring = VLABuffer(4)
    for number in range(4):
        ring.add(transition(number))
    assert ring.is_full()
    slots = ring.columns.tensors[schema.OBSERVATION][:, 0, 0]
    ring.add(transition(4))
    assert slots.tolist() == [4, 1, 2, 3]
    ring.add(transition(5))
    assert slots.tolist() == [4, 5, 2, 3]
    assert ring.statistics() | {"bytes": 0} == {
        "capacity": 4, "new": 4, "written": 6, "handed_out": 0, "overwritten": 2, "bytes": 0,
    }  # fmt: skip
    assert steps(ring.get()) == [2, 3, 4, 5]  # oldest to newest, across the seam


def test_ring_hands_each_transition_out_once():
    ring = VLABuffer(4)
    for number in range(4):
        ring.add(transition(number))
    assert steps(ring.get(num_steps=3)) == [0, 1, 2]
    assert not ring.is_full()
    ring.add(transition(4))
    assert steps(ring.get()) == [3, 4]
    with pytest.raises(InputError, match="returned once"):
        ring.get()


def test_what_the_ring_handed_out_is_not_overwritten():
    ring = VLABuffer(2)
    ring.add(transition(0))
    ring.add(transition(1))
    taken = ring.get()
    ring.add(transition(2))
    assert steps(taken) == [0, 1]


def test_rows_belong_to_environments():
    # One row an environment: along a row the environment index never changes (the transitions are not interleaved).
    ring = VLABuffer(3)
    for number in range(5):
        ring.add(transition(number))
    rows = ring.get()[schema.OBSERVATION][..., 1]
    assert rows[:, 0].tolist() == [0, 0, 0]
    assert rows[:, 1].tolist() == [1, 1, 1]


@pytest.mark.parametrize("make", [RolloutBuffer, VLABuffer])
def test_state_dict_keeps_what_was_not_handed_out(make, tmp_path):
    buffer = make(4)
    for number in range(3):
        buffer.add(transition(number))
    torch.save(buffer.state_dict(), tmp_path / "state.pt")
    fresh = make(4)
    fresh.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert len(fresh) == 3
    assert steps(fresh.get()) == [0, 1, 2]


def test_single_transition_without_batch():
    ring = VLABuffer(2)
    ring.add(transition(7, num_envs=1)[0])
    assert ring.get(flatten=True)[schema.OBSERVATION].tolist() == [[7, 0]]


def test_bfloat16_is_kept():
    buffer = RolloutBuffer(1)
    value = torch.tensor([1.5, 2.5], dtype=torch.bfloat16)
    buffer.write({"x": value})
    assert torch.equal(buffer.get()["x"][0], value)


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="resident memory is read from /proc")
def test_vla_ring_memory_is_its_tensors():
    """Two 224×224 cameras × 8 environments: the resident memory grows by the tensors, within 10 %."""
    num_steps, num_envs = 64, 8
    frame = np.ones((num_envs, 3, 224, 224), np.uint8)
    row = {("observation", "head_rgb"): frame, ("observation", "wrist_rgb"): frame, "reward": np.ones(8, np.float32)}
    before = resident_bytes()
    ring = VLABuffer(num_steps)
    for _ in range(2 * num_steps):  # twice round: overwriting must not allocate
        ring.write(row)
    grown = resident_bytes() - before
    expected = num_steps * num_envs * (2 * 3 * 224 * 224 + 4)
    assert ring.statistics()["bytes"] == expected
    assert 0.9 * expected <= grown <= 1.1 * expected
