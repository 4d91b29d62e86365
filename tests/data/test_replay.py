import numpy as np
import torch

from deft import schema
from deft.data.replay import BLOCK, ReplayBuffer, TransitionTable, discounted_returns


def numbered(lengths: list[int]) -> TransitionTable:
    """A table whose observation is its row, action 10 · row, reward row / 10; the last episode terminates."""
    table = TransitionTable(lengths, 1, 1)
    table.observation[:, 0] = torch.arange(len(table.rows))
    last = torch.from_numpy(table.starts + table.lengths)
    table.action[:, 0] = table.observation[:, 0] * 10
    table.reward[:] = table.observation[:, 0] / 10
    table.action[last] = 0
    table.reward[last] = 0
    table.terminated[int(last[-1]) - 1] = 1.0
    return table


def test_rows_of_episodes():
    # Episodes of 2 and 3 transitions take rows 0–2 and 3–6; transitions start in rows 0, 1, 3, 4 and 5.
    table = numbered([2, 3])
    assert len(table) == 5
    assert table.starts.tolist() == [0, 3]
    assert table.transition_rows().tolist() == [0, 1, 3, 4, 5]
    assert table.episode_rows(1) == slice(3, 7)


def test_a_batch_is_made_of_transitions_that_exist():
    table = numbered([2, 3])
    batch = ReplayBuffer(table, seed=0).sample(1000)
    row = batch[schema.OBSERVATION][:, 0]
    assert sorted(set(row.tolist())) == [0, 1, 3, 4, 5]  # never across an episode's end
    assert torch.equal(batch[schema.NEXT_OBSERVATION][:, 0], row + 1)
    assert torch.equal(batch[schema.ACTION][:, 0], row * 10)
    torch.testing.assert_close(batch[schema.NEXT_REWARD], row / 10)
    assert torch.equal(batch[schema.NEXT_TERMINATED], (row == 5).float())
    # Uniform: each of 5 transitions 200 times, standard deviation √(1000 · 0.2 · 0.8) = 12.6; five of them allowed.
    counts = np.bincount(row.long().numpy(), minlength=6)[[0, 1, 3, 4, 5]]
    assert np.abs(counts - 200).max() < 64


def test_members_get_their_own_transitions():
    batch = ReplayBuffer(numbered([50, 50]), seed=0, num_members=3).sample(8)
    assert batch[schema.OBSERVATION].shape == (3, 8, 1)
    assert batch[schema.NEXT_REWARD].shape == (3, 8)
    assert not torch.equal(batch[schema.OBSERVATION][0], batch[schema.OBSERVATION][1])


def test_a_resumed_buffer_draws_the_same_batches_anywhere_in_a_block():
    table = numbered([50, 50])
    for position in (0, 1, BLOCK - 1, BLOCK, BLOCK + 5):
        first = ReplayBuffer(table, seed=3)
        for _ in range(position):
            first.sample(4)
        state = first.state_dict()
        expected = [first.sample(4)[schema.OBSERVATION].clone() for _ in range(2 * BLOCK)]
        second = ReplayBuffer(table, seed=9)
        second.load_state_dict(state)
        assert all(torch.equal(second.sample(4)[schema.OBSERVATION], row) for row in expected)


def test_returns_to_the_end_of_the_episode():
    # Rewards 0, 0.1 and 0.3, 0.4, 0.5 at γ = 0.5: 0.5·0.1 = 0.05, 0.1; 0.3 + 0.5·(0.4 + 0.5·0.5) = 0.625, 0.65, 0.5.
    returns = discounted_returns(numbered([2, 3]), 0.5)
    torch.testing.assert_close(returns, torch.tensor([0.05, 0.1, 0.0, 0.625, 0.65, 0.5, 0.0]))
    buffer = ReplayBuffer(numbered([2, 3]))
    buffer.add_returns(0.5)
    buffer.scale_rewards(2.0)
    batch = buffer.sample(64)
    rows = batch[schema.OBSERVATION][:, 0].long()
    torch.testing.assert_close(batch[schema.VALUE_TARGET], 2.0 * returns[rows])
    torch.testing.assert_close(batch[schema.NEXT_REWARD], 2.0 * rows / 10)


def test_observations_are_those_that_transitions_start_from():
    blocks = list(ReplayBuffer(numbered([2, 3])).observations(block=2))
    assert torch.cat(blocks)[:, 0].tolist() == [0, 1, 3, 4, 5]
