"""Batches from datasets on disk: which transitions, how even, how much memory, and the same ones after a resume."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces
from shared_data import shared_data

from deft import schema
from deft.data.datasets import Dataset, Episode, VectorDataset, load_dataset
from deft.data.replay import TransitionTable
from deft.data.streaming import StreamingBuffer, episode_bytes
from deft.errors import InputError


class Counted(Dataset):
    """Named streams in which every value identifies episode and step; counts the episodes that were read."""

    def __init__(self, lengths: list[int]) -> None:
        streams = {
            "rgb": spaces.Box(0, 255, (3, 2, 2), np.uint8),
            "state": spaces.Box(-np.inf, np.inf, (2,), np.float32),
        }
        super().__init__("counted", spaces.Dict(streams), spaces.Box(-1, 1, (1,), np.float32), np.array(lengths))
        self.reads = 0

    def episode(self, index: int) -> Episode:
        """State t is (index, t); pixels, actions and rewards are t."""
        self.reads += 1
        length = int(self.lengths[index])
        rows = np.arange(length + 1)
        state = np.stack([np.full(length + 1, index), rows], 1).astype(np.float32)
        pixels = np.broadcast_to(rows[:, None, None, None], (length + 1, 3, 2, 2)).astype(np.uint8)
        ended = rows[:-1] == (length - 1)
        steps = rows[:-1].astype(np.float32)
        terminated, truncated = (ended, ~ended & False) if index % 2 else (~ended & False, ended)
        return Episode({"rgb": pixels, "state": state}, steps[:, None], steps, terminated, truncated)


def test_chunks_end_with_their_episode() -> None:
    # Episodes of 5 and 3 steps with rewards 0, 1, 2, …; episode 1 ends by a terminal. Chunks of 3 steps, γ = ½.
    batch = StreamingBuffer(Counted([5, 3]), seed=0, chunk_length=3, chunk_gamma=0.5).sample(300)
    episode, step = batch[schema.OBSERVATION]["state"].long().unbind(1)
    length = torch.tensor([5, 3])[episode]
    steps = step[:, None] + torch.arange(3)
    real = steps < length[:, None]
    assert torch.equal(batch[schema.STEP_MASK], real)
    assert torch.equal(batch[schema.ACTION][..., 0], steps.minimum(length[:, None] - 1).float())
    assert torch.equal(batch[schema.NEXT_OBSERVATION]["state"][:, 1], (step + 3).minimum(length).float())
    expected = (steps * real * torch.tensor([1.0, 0.5, 0.25])).sum(1)
    torch.testing.assert_close(batch[schema.NEXT_REWARD], expected)
    terminal = (episode == 1) & (step + 3 >= 3)
    assert torch.equal(batch[schema.NEXT_TERMINATED], terminal.float())
    torch.testing.assert_close(batch[schema.DISCOUNT], 0.5 ** real.sum(1) * ~terminal)
    assert {0, 1} == set(episode.tolist())


def test_given_transitions_are_gathered_in_their_order_and_draw_nothing() -> None:
    # Episodes of 5, 3 and 4 steps: transition 4 is the last of episode 0, 5 the first of episode 1, 8 of episode 2.
    buffer, other = (StreamingBuffer(Counted([5, 3, 4]), seed=0, chunk_length=2) for _ in range(2))
    batch = buffer.gather(np.array([8, 4, 5]))
    assert batch[schema.OBSERVATION]["state"].tolist() == [[2, 0], [0, 4], [1, 0]]
    assert batch[schema.STEP_MASK].tolist() == [[True, True], [True, False], [True, True]]
    assert buffer.dataset.reads == 3  # each episode once
    drawn, expected = (one.sample(8)[schema.OBSERVATION]["state"] for one in (buffer, other))
    assert torch.equal(drawn, expected)


def test_without_the_next_observation_a_batch_is_otherwise_the_same() -> None:
    with_next, without = (StreamingBuffer(Counted([5, 3]), seed=0, next_observation=wanted) for wanted in (True, False))
    full, small = with_next.sample(20), without.sample(20)
    assert full.keys() - small.keys() == {schema.NEXT_OBSERVATION}
    assert torch.equal(full[schema.ACTION], small[schema.ACTION])


def test_a_batch_holds_transitions_and_what_follows_them() -> None:
    dataset = Counted([5, 3, 7])
    batch = StreamingBuffer(dataset, seed=0).sample(400)
    now, after = batch[schema.OBSERVATION], batch[schema.NEXT_OBSERVATION]
    assert now["rgb"].dtype == torch.uint8
    assert now["rgb"].shape == (400, 3, 2, 2)
    assert (after["state"][:, 0] == now["state"][:, 0]).all()
    assert (after["state"][:, 1] == now["state"][:, 1] + 1).all()
    step = now["state"][:, 1]
    assert (after["rgb"][:, 0, 0, 0] == step + 1).all()
    assert (now["rgb"][:, 2, 1, 1] == step).all()
    assert (batch[schema.ACTION][:, 0] == step).all()
    assert (batch[schema.NEXT_REWARD] == step).all()
    # Odd episodes end by a terminal: of these three, episode 1, at step 2.
    is_end = (now["state"][:, 0] == 1) & (step == 2)
    assert batch[schema.NEXT_TERMINATED].dtype == torch.float32
    assert (batch[schema.NEXT_TERMINATED] == is_end.float()).all()
    assert is_end.any()


def test_uniform_over_transitions_when_all_fits() -> None:
    """Each of 15 transitions is drawn 1/15 of the time, however long its episode is."""
    dataset = Counted([1, 4, 10])
    buffer = StreamingBuffer(dataset, seed=0)
    assert buffer.fits
    assert len(buffer) == 15
    counts = np.zeros((3, 10))
    for _ in range(30):
        state = buffer.sample(1000)[schema.OBSERVATION]["state"].long().numpy()
        np.add.at(counts, (state[:, 0], state[:, 1]), 1)
    drawn = counts[counts > 0]
    # 30,000 draws: mean 2000 each, standard deviation sqrt(30000 · 1/15 · 14/15) = 43.2; 5 of them are 216.
    assert len(drawn) == 15
    assert abs(drawn - 2000).max() < 216
    assert dataset.reads == 3  # once each
    assert buffer.memory_bytes == episode_bytes(dataset).sum()


def test_the_pool_rotates_within_its_memory_and_reaches_everything_alike() -> None:
    lengths = [20, 5, 12, 30, 8, 16, 25, 9, 14, 11]
    dataset = Counted(lengths)
    cache_bytes = int(episode_bytes(dataset).sum()) // 2
    buffer = StreamingBuffer(dataset, cache_bytes, seed=0, reuse=4.0)
    assert not buffer.fits
    counts = np.zeros((10, 30))
    draws = 0
    for _ in range(4000):
        state = buffer.sample(16)[schema.OBSERVATION]["state"].long().numpy()
        np.add.at(counts, (state[:, 0], state[:, 1]), 1)
        draws += 16
        assert buffer.memory_bytes <= cache_bytes
    mean = draws / sum(lengths)
    per_episode = np.array([counts[index, :length].mean() for index, length in enumerate(lengths)]) / mean
    # About 106 passes: each episode has its share but for the chance of when it came and what lay beside it.
    assert abs(per_episode - 1).max() < 0.08
    # One arrival for `reuse` draws of each of its transitions, and the first filling; an episode that is still in the
    # pool when its turn comes again is not read again.
    arrivals = draws / 4.0 / np.mean(lengths) + 10
    assert 0.7 * arrivals < dataset.reads <= arrivals


@pytest.mark.parametrize("share", [1.0, 0.4])
def test_resume_draws_the_same_batches(share: float) -> None:
    dataset = Counted([20, 5, 12, 30, 8, 16])
    cache_bytes = int(episode_bytes(dataset).sum() * share)
    buffer = StreamingBuffer(dataset, cache_bytes, seed=3, reuse=2.0)
    for _ in range(17):
        buffer.sample(8)
    state = buffer.state_dict()
    expected = [buffer.sample(8) for _ in range(40)]
    resumed = StreamingBuffer(Counted([20, 5, 12, 30, 8, 16]), cache_bytes, seed=99, reuse=2.0)
    resumed.load_state_dict(state)
    for batch in expected:
        again = resumed.sample(8)
        assert torch.equal(again[schema.OBSERVATION]["state"], batch[schema.OBSERVATION]["state"])
        assert torch.equal(again[schema.NEXT_OBSERVATION]["rgb"], batch[schema.NEXT_OBSERVATION]["rgb"])
        assert torch.equal(again[schema.ACTION], batch[schema.ACTION])


def test_the_state_survives_a_file_and_fits_only_its_dataset(tmp_path) -> None:
    buffer = StreamingBuffer(Counted([4, 5, 6]), seed=1)
    buffer.sample(3)
    torch.save(buffer.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    fresh = StreamingBuffer(Counted([4, 5, 6]), seed=2)
    fresh.load_state_dict(state)
    assert torch.equal(fresh.sample(9)[schema.ACTION], buffer.sample(9)[schema.ACTION])
    with pytest.raises(InputError, match="names episodes that counted does not have"):
        StreamingBuffer(Counted([4])).load_state_dict(state)


def test_the_seed_decides() -> None:
    batches = [StreamingBuffer(Counted([20, 30]), seed=seed).sample(16)[schema.ACTION] for seed in (0, 0, 1)]
    assert torch.equal(batches[0], batches[1])
    assert not torch.equal(batches[0], batches[2])


def test_a_cache_smaller_than_an_episode_raises_an_error() -> None:
    # 9 rows of 3·2·2 pixels and 2 floats, 8 actions, rewards and pairs of flags: 9 · 20 + 8 · 10 = 260.
    with pytest.raises(
        InputError, match=r"cache_gb: .* is too small: the longest episode of counted alone needs 2\.42e-07"
    ):
        StreamingBuffer(Counted([2, 8]), cache_bytes=200)


def test_statistics_of_vector_streams() -> None:
    statistics = StreamingBuffer(Counted([2, 3])).observation_statistics()
    assert list(statistics) == ["state"]  # pixels have none
    # The five observations that transitions start from: (0,0) (0,1) (1,0) (1,1) (1,2).
    rows = torch.tensor([[0.0, 0], [0, 1], [1, 0], [1, 1], [1, 2]])
    mean, deviation = statistics["state"]
    assert torch.allclose(mean, rows.mean(0))
    assert torch.allclose(deviation, rows.std(0, unbiased=False))


def test_a_table_can_be_drawn_from_too() -> None:
    table = TransitionTable([2], 1, 1)
    table.rows[:, 0] = torch.tensor([1e4, 1e4 + 1, 1e4 + 2])
    buffer = StreamingBuffer(VectorDataset(table, "vector"))
    batch = buffer.sample(4)
    assert (batch[schema.NEXT_OBSERVATION] - batch[schema.OBSERVATION] == 1).all()
    mean, deviation = buffer.observation_statistics()[schema.OBSERVATION]
    assert mean.item() == 1e4 + 0.5
    assert deviation.item() == 0.5


def test_rewards_are_scaled_and_returns_go_to_the_end_of_the_recording() -> None:
    buffer = StreamingBuffer(Counted([3]), seed=0)
    buffer.scale_rewards(2.0)
    buffer.add_returns(0.5)
    batch = buffer.sample(50)
    # Rewards 0, 1, 2: G_2 = 2, G_1 = 1 + 0.5 · 2 = 2, G_0 = 0 + 0.5 · 2 = 1; all times 2.
    expected = torch.tensor([2.0, 4.0, 4.0])[batch[schema.ACTION][:, 0].long()]
    assert torch.equal(batch[schema.VALUE_TARGET], expected)
    assert torch.equal(batch[schema.NEXT_REWARD], 2 * batch[schema.ACTION][:, 0])


@pytest.mark.parametrize("cache_bytes", [2**30, 8_000_000])
def test_real_pixels(cache_bytes: int) -> None:
    """Five episodes of 3.7 MB: all of them, or two at a time."""
    dataset = load_dataset(shared_data("metaworld_pixels/hammer"))
    buffer = StreamingBuffer(dataset, cache_bytes, seed=0)
    for _ in range(5):
        batch = buffer.sample(64)
        # Frames are stacked, so an observation's newer two are the older two of the one that follows.
        assert torch.equal(batch[schema.OBSERVATION][:, 3:], batch[schema.NEXT_OBSERVATION][:, :6])
    assert buffer.memory_bytes <= cache_bytes
    assert buffer.memory_bytes > 7_000_000


def test_real_cameras() -> None:
    dataset = load_dataset(shared_data("robomimic/robomimic_mh__lift_image.hdf5"))
    batch = StreamingBuffer(dataset, seed=0).sample(8)
    assert batch[schema.OBSERVATION]["agentview_image"].shape == (8, 3, 84, 84)
    assert batch[schema.OBSERVATION]["state"].dtype == batch[schema.ACTION].dtype == torch.float32
