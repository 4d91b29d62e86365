"""Labelled steps cut into episodes, and weighted sampling, by hand."""

import numpy as np
import pytest
import torch

from deft import schema
from deft.data.datasets.dataset import Episode, VectorDataset, box
from deft.data.labelled import EpisodeList, LabelledSteps
from deft.data.replay import ReplayBuffer, TransitionTable, cumulative_weights, weighted_draws
from deft.data.streaming import StreamingBuffer
from deft.errors import InputError


def row(step, terminated, mask=None):
    """Two environments: observation 10 · env + step, action 0.1, expert −0.1; environment 1 is the expert's."""
    now = np.array([[step], [10 + step]], np.float32)
    found = {
        schema.OBSERVATION: now,
        schema.NEXT_OBSERVATION: now + 0.5,
        schema.ACTION: np.full((2, 1), 0.1, np.float32),
        schema.EXPERT_ACTION: np.full((2, 1), -0.1, np.float32),
        schema.INTERVENTION: np.array([False, True]),
        schema.NEXT_REWARD: np.array([1.0, 2.0]),
        schema.NEXT_TERMINATED: np.array(terminated),
        schema.NEXT_TRUNCATED: np.zeros(2, bool),
    }
    return found if mask is None else {**found, schema.STEP_MASK: np.array(mask)}


def test_episodes_end_where_they_terminate_and_where_they_are_cut():
    steps = LabelledSteps()
    for number, terminated in enumerate([(False, False), (True, False), (False, False)]):
        steps.write(row(number, terminated))
    again = LabelledSteps()
    again.load_state_dict(steps.state_dict())  # also in the middle of a round
    for one in (steps, again):
        first, second, third = one.cut()
        # Environment 0: steps 0 and 1, then 2 alone; environment 1: all three. The last observation is the next one.
        assert first.observation.ravel().tolist() == [0.0, 1.0, 1.5]
        assert (first.terminated.tolist(), first.truncated.tolist()) == ([False, True], [False, False])
        assert second.observation.ravel().tolist() == [2.0, 2.5]
        assert second.truncated.tolist() == [True]
        assert third.observation.ravel().tolist() == [10.0, 11.0, 12.0, 12.5]
        assert third.intervention.tolist() == [True] * 3
        assert one.cut() == []
    restored = LabelledSteps()
    restored.load_state_dict(steps.state_dict())
    for one, two in zip(steps.episodes, restored.episodes, strict=True):
        assert all(np.array_equal(vars(one)[name], vars(two)[name]) for name in vars(one))


def test_lost_steps_are_left_out():
    steps = LabelledSteps()
    for number in range(3):
        steps.write(row(number, (False, False), mask=(number != 1, True)))
    lengths = [len(one) for one in steps.cut()]
    assert lengths == [1, 1, 3]


def test_batches_have_the_experts_actions():
    steps = LabelledSteps()
    steps.write(row(0, (False, False)))
    labels = EpisodeList([*steps.cut()], box(1), box(1, -1.0, 1.0))
    batch = StreamingBuffer(labels, next_observation=False).sample(4)
    assert torch.allclose(batch[schema.ACTION], torch.tensor(-0.1))


def test_weights_are_ratios_of_probabilities():
    # Weights 1, 3, 1: cumulative 1, 4, 5; the marked one is drawn with probability 3/5.
    cumulative = cumulative_weights(torch.tensor([False, True, False]), 3.0)
    assert cumulative.tolist() == [1.0, 4.0, 5.0]
    draws = weighted_draws(cumulative, 20_000, torch.Generator().manual_seed(0))
    assert torch.bincount(draws).div(20_000).tolist() == pytest.approx([0.2, 0.6, 0.2], abs=0.02)


@pytest.mark.parametrize("in_memory", [True, False])
def test_interventions_of_a_dataset_are_sampled_more_often(in_memory):
    """One of four transitions is marked; with weight 3 it is half of every batch."""
    flags = np.zeros(4, bool)
    episode = Episode(
        np.arange(5, dtype=np.float32)[:, None], np.zeros((4, 1), np.float32), np.zeros(4, np.float32), flags, flags,
        np.array([False, False, True, False]),
    )  # fmt: skip
    dataset = EpisodeList([episode], box(1), box(1, -1.0, 1.0))
    if in_memory:
        table = VectorDataset.from_dataset(dataset).table
        assert table.select([0]).interventions.tolist() == [False, False, True, False, False]
        sampler = ReplayBuffer(table)
    else:
        sampler = StreamingBuffer(dataset)
    sampler.weight_interventions(3.0)
    drawn = torch.cat([sampler.sample(256)[schema.OBSERVATION].clone() for _ in range(16)])
    assert float((drawn == 2).float().mean()) == pytest.approx(0.5, abs=0.04)


def test_a_dataset_without_marks_is_rejected():
    with pytest.raises(InputError, match="does not mark interventions"):
        ReplayBuffer(TransitionTable([2], 1, 1)).weight_interventions(2.0)
