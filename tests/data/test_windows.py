"""Windows of episodes: returns-to-go, timesteps, borders, padding, how often an episode is drawn, resuming."""

import itertools

import numpy as np
import pytest
import torch
from gymnasium import spaces

from deft import schema
from deft.data.datasets.dataset import Dataset, Episode, VectorDataset
from deft.data.replay import EpisodeWindows, TransitionTable
from deft.data.streaming import StreamingWindows, make_windows

LENGTHS = (3, 1, 6)


def make_table() -> TransitionTable:
    """Episodes of 3, 1 and 6 steps; observation [episode, step], action [10 · episode + step], reward 1, 2, 4, …"""
    table = TransitionTable(LENGTHS, 2, 1)
    for index, length in enumerate(LENGTHS):
        rows = table.episode_rows(index)
        table.observation[rows] = torch.tensor([[index, step] for step in range(length + 1)], dtype=torch.float32)
        table.action[rows][:length, 0] = 10.0 * index + torch.arange(length)
        table.reward[rows][:length] = 2.0 ** torch.arange(length)
    return table


class Pictures(Dataset):
    """The same episodes as images and vectors, read one at a time; counts the readings."""

    def __init__(self) -> None:
        space = {"rgb": spaces.Box(0, 255, (3, 8, 8), np.uint8), "state": spaces.Box(-9, 9, (2,), np.float32)}
        super().__init__("pictures", spaces.Dict(space), spaces.Box(-99, 99, (1,), np.float32), np.array(LENGTHS))
        self.source, self.readings = VectorDataset(make_table(), "vectors"), 0

    def episode(self, index: int) -> Episode:
        self.readings += 1
        episode = self.source.episode(index)
        pictures = np.zeros((len(episode) + 1, 3, 8, 8), np.uint8)
        pictures[:] = (10 * index + np.arange(len(episode) + 1))[:, None, None, None]
        episode.observation = {"rgb": pictures, "state": np.asarray(episode.observation)}
        return episode


def test_windows_by_hand() -> None:
    windows = EpisodeWindows(make_table(), context_length=4)
    batch = windows.windows(torch.tensor([1, 3, 5]))
    # Transition 1 is step 1 of episode 0 (3 steps): two steps are left. Transition 3 is all of episode 1. Transition 5
    # is step 1 of episode 2 (6 steps), with four steps of its five.
    assert batch[schema.STEP_MASK].tolist() == [[1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 1]]
    assert batch[schema.TIMESTEP].tolist() == [[1, 2, 2, 2], [0, 0, 0, 0], [1, 2, 3, 4]]
    # To the end of the episode, not of the window: 2 + 4, 4; 1; 2 + … + 32 = 62, 60, 56, 48.
    returns = batch[schema.RETURN_TO_GO]
    assert returns[0, :2].tolist() == [6, 4]
    assert returns[1, 0] == 1
    assert returns[2].tolist() == [62, 60, 56, 48]
    assert batch[schema.OBSERVATION][0, :2].tolist() == [[0, 1], [0, 2]]
    assert batch[schema.OBSERVATION][2].tolist() == [[2, 1], [2, 2], [2, 3], [2, 4]]
    assert batch[schema.ACTION][2, :, 0].tolist() == [21, 22, 23, 24]


@pytest.mark.parametrize("source", ["table", "stream"])
def test_no_window_crosses_an_episode(source: str) -> None:
    if source == "table":
        windows = EpisodeWindows(make_table(), context_length=4)
        batch = windows.sample(500)
        state = batch[schema.OBSERVATION]
    else:
        windows = StreamingWindows(Pictures(), context_length=4)
        batch = windows.sample(500)
        state = batch[schema.OBSERVATION]["state"]
        # 10 · episode + step, in every pixel
        assert torch.equal(batch[schema.OBSERVATION]["rgb"][..., 0, 0, 0].float(), batch[schema.ACTION][..., 0])
        assert batch[schema.OBSERVATION]["rgb"].dtype == torch.uint8
    mask, step = batch[schema.STEP_MASK], batch[schema.TIMESTEP]
    episode = state[..., 0].long()
    lengths = torch.tensor(LENGTHS)
    assert torch.equal(episode, episode[:, :1].expand_as(episode))
    assert torch.equal(state[..., 1].long(), step)
    assert torch.equal(batch[schema.ACTION][..., 0].long(), 10 * episode + step)
    # 2^s + … + 2^(T − 1) = 2^T − 2^s
    assert torch.equal(batch[schema.RETURN_TO_GO], 2.0 ** lengths[episode] - 2.0**step)
    # As many real steps as the episode has left, at the front, in order.
    real = (lengths[episode[:, 0]] - step[:, 0]).clamp(max=4)
    assert torch.equal(mask.sum(1), real)
    assert torch.equal(mask, torch.arange(4) < real[:, None])
    assert torch.equal(step, torch.minimum(step[:, :1] + torch.arange(4), lengths[episode] - 1))


@pytest.mark.parametrize("source", ["table", "stream"])
def test_every_step_begins_a_window_as_often_as_any_other(source: str) -> None:
    table = make_table()
    windows = EpisodeWindows(table, 2) if source == "table" else StreamingWindows(Pictures(), 2)
    first = windows.sample(20_000)[schema.ACTION][:, 0, 0]
    expected = [10 * index + step for index, length in enumerate(LENGTHS) for step in range(length)]
    counts = [int((first == value).sum()) for value in expected]
    assert sum(counts) == 20_000
    # 2,000 each; binomial deviation √(20,000 · 0.1 · 0.9) = 42
    assert max(abs(count - 2000) for count in counts) < 5 * 42


@pytest.mark.parametrize(
    "make", [lambda: EpisodeWindows(make_table(), 3, 7), lambda: StreamingWindows(Pictures(), 3, 7)]
)
def test_a_resumed_run_draws_the_same_windows(make) -> None:
    first, second = make(), make()
    list(itertools.islice(first.batches(5), 3))
    second.load_state_dict(first.state_dict())
    for _ in range(3):
        one, other = first.sample(5), second.sample(5)
        assert torch.equal(one[schema.ACTION], other[schema.ACTION])
        assert torch.equal(one[schema.TIMESTEP], other[schema.TIMESTEP])


def test_observations_are_those_that_transitions_start_from() -> None:
    table, stream = EpisodeWindows(make_table(), 2), StreamingWindows(Pictures(), 2)
    observed = torch.cat(list(table.observations()))
    expected = torch.tensor([[i, step] for i, length in enumerate(LENGTHS) for step in range(length)]).float()
    assert torch.equal(observed, expected)
    assert torch.equal(torch.cat([block["state"] for block in stream.observations()]), expected)


def test_a_dataset_with_a_table_is_not_streamed() -> None:
    assert isinstance(make_windows(VectorDataset(make_table(), "vectors"), 2), EpisodeWindows)
    pictures = Pictures()
    windows = make_windows(pictures, 2)
    windows.sample(4)
    windows.sample(4)
    assert isinstance(windows, StreamingWindows)
    assert pictures.readings == 3  # each episode once: they fit into memory
