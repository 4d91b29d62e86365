"""Blocks of many workers to one rollout: nothing twice, nothing lost, and every segment ends with its value."""

import numpy as np
import torch

from deft import schema
from deft.algorithms.returns import generalized_advantage
from deft.training.cluster.blocks import Block, assemble, segments_of, take_steps


def block(slot, sequence, num_steps, num_envs=2, incarnation=0):
    """Observation: 1000·environment + the step in its life; V(s) is ten times that, after the block too."""
    life = sequence * 10 + np.arange(num_steps)[:, None] + 1000 * (slot * num_envs + np.arange(num_envs))
    next_value = np.zeros((num_steps, num_envs), np.float32)
    next_value[-1] = 10.0 * (life[-1] + 1)
    columns = {
        schema.OBSERVATION: life.astype(np.int64),
        schema.VALUE: (10.0 * life).astype(np.float32),
        schema.NEXT_VALUE: next_value,
        schema.NEXT_REWARD: np.ones((num_steps, num_envs), np.float32),
        schema.NEXT_TERMINATED: np.zeros((num_steps, num_envs), bool),
        schema.NEXT_TRUNCATED: np.zeros((num_steps, num_envs), bool),
    }
    return Block(0, slot, incarnation, columns, num_steps, [], [], 0, [], None, None, 0.0, 0, sequence)


def test_whole_blocks_stay_in_their_columns():
    segments = [segment for slot in (1, 0) for segment in segments_of(block(slot, 0, 10), 2, 0)]
    taken, rest = take_steps(segments, 40)
    assert not rest
    rollout = assemble(taken, 10, 4)
    assert rollout[schema.OBSERVATION].tolist() == [[step + 1000 * env for env in range(4)] for step in range(10)]
    assert not rollout[schema.NEXT_TRUNCATED].any()
    assert rollout[schema.NEXT_VALUE][-1].tolist() == [10.0 * (10 + 1000 * env) for env in range(4)]


def test_blocks_that_follow_each_other_are_one_segment():
    # Two blocks of 10 in a row of 20: the first block's end is no segment's end.
    segments = segments_of(block(0, 0, 10, 1), 1, 0) + segments_of(block(0, 1, 10, 1), 1, 1)
    rollout = assemble(take_steps(segments, 20)[0], 20, 1)
    assert rollout[schema.OBSERVATION][:, 0].tolist() == list(range(20))
    assert not rollout[schema.NEXT_TRUNCATED].any()


def test_what_does_not_follow_ends_the_segment():
    # A worker that died (incarnation 0, block 0) and its successor's first block.
    segments = segments_of(block(0, 0, 4, 1), 1, 0) + segments_of(block(0, 0, 4, 1, incarnation=1), 1, 0)
    rollout = assemble(take_steps(segments, 8)[0], 8, 1)
    assert rollout[schema.NEXT_TRUNCATED][:, 0].tolist() == [False] * 3 + [True] + [False] * 4
    assert rollout[schema.NEXT_VALUE][3, 0] == 40.0  # V of the state after its fourth step


def test_short_blocks_fill_rows_and_each_step_is_used_once():
    rng = np.random.default_rng(0)
    held, seen, sequences = [], [], [0, 0, 0]
    for _ in range(20):
        while sum(len(segment) for segment in held) < 48:
            slot = int(rng.integers(3))
            held += segments_of(block(slot, sequences[slot], int(rng.integers(1, 10))), 2, len(seen))
            sequences[slot] += 1
        taken, held = take_steps(held, 48)
        rollout = assemble(taken, 8, 6)
        life = rollout[schema.OBSERVATION]
        seen.append(life)
        done = rollout[schema.NEXT_TERMINATED] | rollout[schema.NEXT_TRUNCATED]
        follows = np.diff(life, axis=0) == 1
        assert (follows | done[:-1] | (np.diff(life, axis=0) > 0)).all()
        # V(next) is 10·(s + 1) wherever a segment ends, at a row's end or in it.
        ends = done.copy()
        ends[-1] = True
        assert np.array_equal(rollout[schema.NEXT_VALUE][ends], 10.0 * (life[ends] + 1))
    steps = np.concatenate([life.ravel() for life in seen])
    assert len(np.unique(steps)) == len(steps) == 20 * 48


def test_advantages_do_not_cross_a_seam():
    # γ = λ = 1, r = 1: δ = 1 + V(s') − V(s) = 1 + 10 = 11 at every step, and A is 11 times the steps left to the seam.
    segments = segments_of(block(0, 0, 3, 1), 1, 0) + segments_of(block(1, 0, 5, 1), 1, 0)
    rollout = {key: torch.from_numpy(np.ascontiguousarray(value)) for key, value in assemble(segments, 8, 1).items()}
    done = rollout[schema.NEXT_TERMINATED] | rollout[schema.NEXT_TRUNCATED]
    value, bootstrap = rollout[schema.VALUE], rollout[schema.NEXT_VALUE]
    following = torch.where(done, bootstrap, torch.cat([value[1:], bootstrap[-1:]]))
    advantage = generalized_advantage(
        rollout[schema.NEXT_REWARD], value, following, rollout[schema.NEXT_TERMINATED], done, 1.0, 1.0
    )
    assert advantage[:, 0].tolist() == [33.0, 22.0, 11.0, 55.0, 44.0, 33.0, 22.0, 11.0]
