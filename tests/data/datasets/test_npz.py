"""Folders of npz episodes: row t holds the action and reward that led to observation t, row 0 is the reset."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from shared_data import shared_data

from deft.data.datasets import load_dataset
from deft.errors import InputError


def arrays(num_rows: int = 5, last_discount: float = 1.0, **change: Any) -> dict[str, np.ndarray]:
    """Pixel values, actions and rewards of row t are t."""
    rows = np.arange(num_rows)
    values: dict[str, np.ndarray | None] = {
        "observation": np.tile(rows[:, None, None, None], (1, 9, 8, 6)).astype(np.uint8),
        "action": np.tile(rows[:, None], (1, 2)).astype(np.float32),
        "reward": rows[:, None].astype(np.float32),
        "discount": np.ones((num_rows, 1), np.float32),
    }
    values["discount"][-1] = last_discount
    return {key: value for key, value in {**values, **change}.items() if value is not None}


@pytest.mark.parametrize("task", ["hammer", "plate-slide"])
def test_real_files(task: str) -> None:
    folder = shared_data(f"metaworld_pixels/{task}")
    dataset = load_dataset(folder)
    assert dataset.table is None
    assert dataset.lengths.tolist() == [100] * 5
    assert dataset.observation_space.shape == (9, 64, 64)
    assert dataset.observation_space.dtype == np.uint8
    for index, file in enumerate(sorted(folder.glob("*.npz"))):
        stored, episode = np.load(file), dataset.episode(index)
        # The reset's row is a dummy in every file: that is how the convention shows.
        assert not stored["action"][0].any()
        assert stored["reward"][0] == 0
        assert np.array_equal(episode.observation, stored["observation"])
        assert np.array_equal(episode.action, stored["action"][1:])
        assert np.array_equal(episode.reward, stored["reward"][1:, 0])
        # The discount is 1 to the end: the time limit cut these episodes.
        assert not episode.terminated.any()
        assert episode.truncated.tolist() == [False] * 99 + [True]
        assert (episode.action >= dataset.action_space.low).all()
        assert (episode.action <= dataset.action_space.high).all()
    # Three frames are stacked: the older two of a row are the newer two of the row before.
    pixels = dataset.episode(0).observation
    assert np.array_equal(pixels[1:, :6], pixels[:-1, 3:])


def test_transition_t_takes_action_and_reward_of_row_t_plus_one(tmp_path: Path) -> None:
    np.savez(tmp_path / "b.npz", **arrays(4, last_discount=0.0))
    np.savez_compressed(tmp_path / "a.npz", **arrays(5))
    dataset = load_dataset(tmp_path)
    assert dataset.lengths.tolist() == [4, 3]
    first, second = dataset.episode(0), dataset.episode(1)
    assert first.observation[:, 0, 0, 0].tolist() == [0, 1, 2, 3, 4]
    assert first.action[:, 0].tolist() == first.reward.tolist() == [1, 2, 3, 4]
    assert first.truncated[-1]
    assert not first.terminated.any()
    assert second.terminated.tolist() == [False, False, True]
    assert not second.truncated.any()
    # Actions up to 4 widen the space above the usual 1.
    assert dataset.action_space.high.tolist() == [4, 4]
    assert dataset.action_space.low.tolist() == [-1, -1]


def test_dreamers_names_and_channel_order(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 255, (3, 8, 6, 3)).astype(np.uint8)
    flags = np.array([False, False, True])
    np.savez(tmp_path / "a.npz", **arrays(3, observation=None, image=pixels, is_terminal=flags))
    dataset = load_dataset(tmp_path / "a.npz")
    assert dataset.observation_space.shape == (3, 8, 6)
    episode = dataset.episode(0)
    assert np.array_equal(episode.observation.transpose(0, 2, 3, 1), pixels)
    assert episode.terminated.tolist() == [False, True]  # is_terminal counts, whatever the discount says


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"discount": None}, "field discount: is missing; the file has: observation, action, reward"),
        ({"reward": np.zeros((4, 1))}, r"field reward: has shape \(4, 1\), not \(5,\)"),
        ({"reward": np.array([0, 1, np.nan, 1, 1])}, "field reward: row 2 is not a finite number"),
        (
            {"observation": np.zeros((5, 9, 8, 7), np.uint8)},
            r"observation: has shape \(5, 9, 8, 7\), not \(5, 9, 8, 6\)",
        ),
        ({"observation": np.zeros((5, 9, 8, 6), np.float32)}, "observation: is float32; in a.npz it is uint8"),
    ],
)
def test_damaged_episodes_are_named_when_read(tmp_path: Path, change: dict, message: str) -> None:
    np.savez(tmp_path / "a.npz", **arrays())
    np.savez(tmp_path / "bad.npz", **arrays(**change))
    dataset = load_dataset(tmp_path)
    assert len(dataset.episode(0)) == 4
    with pytest.raises(InputError, match=message) as caught:
        dataset.episode(1)
    assert "bad.npz" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"action": np.ones((5, 2))}, "row 0, field action: is not zero: each row must hold the action that led to"),
        ({"action": np.zeros((5, 3))}, r"field action: has shape \(4, 3\)"),
        ({"action": np.zeros((1, 2))}, r"field action: has shape \(1, 2\); it needs two rows or more"),
        ({"action": None}, "field action: is missing"),
    ],
)
def test_damaged_actions_are_named_at_once(tmp_path: Path, change: dict, message: str) -> None:
    np.savez(tmp_path / "a.npz", **arrays())
    np.savez(tmp_path / "bad.npz", **arrays(**change))
    with pytest.raises(InputError, match=message):
        load_dataset(tmp_path)


def test_files_cut_short_are_named(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", **arrays())
    data = (tmp_path / "a.npz").read_bytes()
    (tmp_path / "a.npz").write_bytes(data[: len(data) // 2])
    with pytest.raises(InputError, match=r"a\.npz: cannot be read as npz, it may be cut short") as caught:
        load_dataset(tmp_path)
    assert "\n" not in str(caught.value)
