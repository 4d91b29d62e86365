"""Chunks of several steps, from a table and in the ring of an online run."""

import numpy as np
import torch

from deft import schema
from deft.data.datasets import Episode
from deft.data.datasets.dataset import VectorDataset, box
from deft.data.replay import ChunkBuffer, TransitionTable
from deft.data.streaming import StreamingBuffer
from deft.data.transition_ring import TransitionRing

KEYS = (
    schema.ACTION, schema.STEP_MASK, schema.NEXT_REWARD, schema.NEXT_TERMINATED, schema.DISCOUNT,
    schema.NEXT_OBSERVATION, schema.VALUE_TARGET, schema.NEXT_ACTION, schema.NEXT_STEP_MASK,
)  # fmt: skip


def table() -> TransitionTable:
    """Two episodes of 3 (terminated) and 2 steps (cut); observations 0 … 3 and 10 … 12, rewards 1, 2, 4 and 8, 16."""
    made = TransitionTable([3, 2], 1, 1)
    made.rows[:, 0] = torch.tensor([0.0, 1, 2, 3, 10, 11, 12])
    made.rows[:, 1] = made.rows[:, 0] / 100
    made.rows[:, 2] = torch.tensor([1.0, 2, 4, 0, 8, 16, 0])
    made.rows[2, 3] = 1.0
    made.rows[[3, 6], 1] = 0.0
    return made


def by_start(batch: dict) -> dict[float, list]:
    """What a batch has for each observation that a chunk starts from."""
    found = {}
    for index, start in enumerate(batch[schema.OBSERVATION][:, 0].tolist()):
        found[start] = [batch[key][index].double().mul(100).round().flatten().tolist() for key in KEYS if key in batch]
    return found


def test_chunks_of_two_by_hand():
    buffer = ChunkBuffer(table(), 2, gamma=0.5)
    batch = buffer.sample(64)
    rows = {
        float(start): (float(reward), float(discount), float(following))
        for start, reward, discount, following in zip(
            batch[schema.OBSERVATION], batch[schema.NEXT_REWARD], batch[schema.DISCOUNT],
            batch[schema.NEXT_OBSERVATION], strict=True,
        )
    }  # fmt: skip
    # r + ½ r', and γ² = ¼. From 1 and 2 the terminal is reached: no value after it; from 2 and 11 one step is left.
    assert rows == {0: (2, 0.25, 2), 1: (4, 0, 3), 2: (4, 0, 3), 10: (16, 0.25, 12), 11: (16, 0.5, 12)}
    masks = {float(s): m.tolist() for s, m in zip(batch[schema.OBSERVATION], batch[schema.STEP_MASK], strict=True)}
    both, one = [True, True], [True, False]
    assert masks == {0: both, 1: both, 2: one, 10: both, 11: one}


def test_batches_are_those_of_streamed_chunks():
    dataset = VectorDataset(table(), "two", box(1), box(1, -1.0, 1.0))
    found = []
    for buffer in (ChunkBuffer(table(), 2, 0.5), StreamingBuffer(dataset, chunk_length=2, chunk_gamma=0.5)):
        buffer.add_returns(0.5)
        buffer.add_next_actions()
        buffer.scale_rewards(10.0)
        batch = buffer.sample(64)
        for action, mask in ((schema.ACTION, schema.STEP_MASK), (schema.NEXT_ACTION, schema.NEXT_STEP_MASK)):
            batch[action] = batch[action] * batch[mask].unsqueeze(-1)  # padding is not compared
        found.append(by_start(batch))
    assert found[0] == found[1]
    assert len(found[0][0.0]) == len(KEYS)


def test_members_have_chunks_of_their_own_and_a_resumed_buffer_the_same_ones():
    buffers = [ChunkBuffer(table(), 2, 0.5, seed=3, num_members=2) for _ in range(2)]
    first = buffers[0].sample(16)
    assert first[schema.ACTION].shape == (2, 16, 2, 1)
    assert not torch.equal(first[schema.ACTION][0], first[schema.ACTION][1])
    buffers[1].load_state_dict(buffers[0].state_dict())
    batches = [buffer.sample(16) for buffer in buffers]
    assert torch.equal(batches[0][schema.ACTION], batches[1][schema.ACTION])


def test_the_ring_stores_chunks_and_which_steps_were_taken():
    ring = TransitionRing(10, gamma=0.5)
    step = {
        schema.OBSERVATION: np.zeros((2, 1), np.float32),
        schema.ACTION: np.ones((2, 3, 1), np.float32),
        schema.NEXT_REWARD: np.array([1.0, 2.0], np.float32),
        schema.NEXT_TERMINATED: np.array([False, True]),
        schema.NEXT_TRUNCATED: np.array([False, False]),
        schema.NEXT_OBSERVATION: np.ones((2, 1), np.float32),
        schema.NEXT_NUM_STEPS: np.array([3, 2]),
    }
    for given in (step, {key: torch.from_numpy(value) for key, value in step.items()}):
        ring.write(given)
    rows = ring._rows(torch.arange(4))
    assert rows[schema.STEP_MASK].tolist() == [[True, True, True], [True, True, False]] * 2
    assert rows[schema.DISCOUNT].tolist() == [0.125, 0.0] * 2


def episode(image: bool = False) -> Episode:
    """Observations 0 … 5, actions 0 … 0.4, rewards 1, 2, 4, 8, 16, cut at the end."""
    numbers = np.arange(6, dtype=np.float32)[:, None]
    observation = {"camera": np.zeros((6, 1, 2, 2), np.uint8), "t": numbers} if image else numbers
    ends = np.zeros(5, bool)
    return Episode(observation, numbers[:5] / 10, 2.0 ** np.arange(5, dtype=np.float32), ends, ends)


def test_a_recorded_episode_becomes_chunks_from_every_step():
    ring = TransitionRing(10, gamma=0.5, returns=True)
    ring.extend(episode(), 3)
    rows = ring._rows(torch.arange(5))
    # 1 + 1 + 1, 2 + 2 + 2, 4 + 4 + 4, 8 + 8, 16; after two steps γ² = 0.25, after one 0.5.
    assert rows[schema.NEXT_REWARD].tolist() == [3, 6, 12, 16, 16]
    assert rows[schema.DISCOUNT].tolist() == [0.125, 0.125, 0.125, 0.25, 0.5]
    assert rows[schema.NEXT_OBSERVATION].flatten().tolist() == [3, 4, 5, 5, 5]
    assert rows[schema.STEP_MASK].sum(1).tolist() == [3, 3, 3, 2, 1]
    assert rows[schema.VALUE_TARGET].tolist() == [5, 8, 12, 16, 16]  # of single steps: each adds its own power of two
    np.testing.assert_allclose(rows[schema.ACTION][3].flatten(), [0.3, 0.4, 0.4], rtol=1e-6)


def test_with_images_chunks_follow_each_other():
    ring = TransitionRing(10, gamma=0.5)
    ring.extend(episode(image=True), 3)
    rows = ring._rows(torch.arange(2))
    assert rows[schema.OBSERVATION]["t"].flatten().tolist() == [0, 3]
    assert rows[schema.NEXT_OBSERVATION]["t"].flatten().tolist() == [3, 5]
    assert ring._num_frames == 3  # before, between and after the two chunks
