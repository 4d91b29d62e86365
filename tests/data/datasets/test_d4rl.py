"""D4RL's layout: where episodes end, which next observations are known, and what a damaged file says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
from shared_data import shared_data

from deft import schema
from deft.data.datasets import load_dataset
from deft.data.datasets.d4rl import from_d4rl_arrays
from deft.data.replay import ReplayBuffer
from deft.errors import InputError


def columns(
    num_rows: int = 8, terminals: tuple[int, ...] = (), timeouts: tuple[int, ...] = ()
) -> dict[str, np.ndarray]:
    """Row t sees (t, 10 t), does 0.1 t and gets reward t, so that every value identifies its row."""
    rows = np.arange(num_rows, dtype=np.float32)
    flags = {"terminals": np.zeros(num_rows, bool), "timeouts": np.zeros(num_rows, bool)}
    flags["terminals"][list(terminals)] = True
    flags["timeouts"][list(timeouts)] = True
    return {"observations": np.stack([rows, 10 * rows], 1), "actions": 0.1 * rows[:, None], "rewards": rows, **flags}


def write(path: Path, arrays: dict[str, np.ndarray]) -> Path:
    with h5py.File(path, "w") as file:
        for key, values in arrays.items():
            file[key] = values
    return path


def test_without_next_observations_a_timeout_loses_its_last_transition_and_a_terminal_keeps_it() -> None:
    """Rows 0–3 end by a time limit, rows 4–6 by a terminal, row 7 by the end of the recording."""
    dataset = from_d4rl_arrays(columns(8, terminals=(6,), timeouts=(3,)))
    # Row 3's next observation is unknown: three transitions remain and row 3 is their final observation. Row 7 alone
    # has no whole transition.
    assert dataset.lengths.tolist() == [3, 3]
    first, second = dataset.episode(0), dataset.episode(1)
    assert first.observation[:, 0].tolist() == [0, 1, 2, 3]
    assert first.reward.tolist() == [0, 1, 2]
    assert not first.terminated.any()
    assert first.truncated.tolist() == [False, False, True]
    # A terminal's next observation enters no target; the last observation stands there.
    assert second.observation[:, 0].tolist() == [4, 5, 6, 6]
    assert second.terminated.tolist() == [False, False, True]
    assert not second.truncated.any()
    assert np.allclose(second.action[:, 0], [0.4, 0.5, 0.6])


def test_with_next_observations_nothing_is_lost_and_the_final_one_is_used() -> None:
    arrays = columns(6, terminals=(5,), timeouts=(2,))
    arrays["next_observations"] = np.roll(arrays["observations"], -1, 0)
    arrays["next_observations"][[2, 5]] = [[2.5, 25], [5.5, 55]]
    dataset = from_d4rl_arrays(arrays)
    assert dataset.lengths.tolist() == [3, 3]
    assert dataset.episode(0).observation[:, 0].tolist() == [0, 1, 2, 2.5]
    assert dataset.episode(1).observation[:, 0].tolist() == [3, 4, 5, 5.5]


def test_no_transition_crosses_an_episode_end() -> None:
    """Every sampled next observation is one step after its observation, or the same one at a terminal."""
    dataset = from_d4rl_arrays(columns(40, terminals=(6, 30), timeouts=(13, 21)))
    batch = ReplayBuffer(dataset.table, seed=0).sample(500)
    step = batch[schema.NEXT_OBSERVATION][:, 0] - batch[schema.OBSERVATION][:, 0]
    assert (step == 1 - batch[schema.NEXT_TERMINATED]).all()
    assert set(batch[schema.NEXT_TERMINATED].tolist()) == {0.0, 1.0}


def test_rows_that_do_not_continue_each_other_are_split_without_timeouts() -> None:
    """As in `qlearning_dataset`, whose dict has next observations but no timeouts."""
    arrays = columns(6)
    del arrays["timeouts"]
    arrays["next_observations"] = arrays["observations"] + np.float32([1, 10])
    arrays["next_observations"][2] = [99, 990]
    arrays["dones"] = arrays.pop("terminals")
    dataset = from_d4rl_arrays(arrays)
    assert dataset.lengths.tolist() == [3, 3]
    assert dataset.episode(0).observation[:, 0].tolist() == [0, 1, 2, 99]
    assert dataset.episode(0).truncated[-1]


def test_the_time_limit_splits_what_has_neither_timeouts_nor_next_observations() -> None:
    arrays = columns(10, terminals=(1,))
    del arrays["timeouts"]
    with pytest.raises(InputError, match=r"neither timeouts nor next_observations.*give max_episode_steps"):
        from_d4rl_arrays(arrays)
    # Rows 0–1 terminal; then 2–5 and 6–9 by the limit of 4, each without its last transition.
    dataset = from_d4rl_arrays(arrays, max_episode_steps=4)
    assert dataset.lengths.tolist() == [2, 3, 3]
    assert dataset.episode(2).observation[:, 0].tolist() == [6, 7, 8, 9]


def test_known_names_know_their_time_limit() -> None:
    arrays = columns(1500)
    del arrays["timeouts"]
    assert from_d4rl_arrays(arrays, "hopper-medium-v0").lengths.tolist() == [999, 499]


def test_blocks_do_not_change_what_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    arrays = columns(50, terminals=(6, 30), timeouts=(13, 21, 22))
    whole = load_dataset(write(tmp_path / "a.hdf5", arrays))
    monkeypatch.setattr("deft.data.datasets.hdf5.BLOCK_ROWS", 3)
    in_blocks = load_dataset(tmp_path / "a.hdf5")
    assert whole.table is not None
    assert in_blocks.table is not None
    assert (whole.table.rows == in_blocks.table.rows).all()
    assert whole.lengths.tolist() == in_blocks.lengths.tolist() == [7, 6, 7, 8, 18]
    # Row 22 is an episode of one row, cut by a time limit: it has no whole transition.


@pytest.mark.parametrize(
    ("name", "lengths", "returns"),
    [
        # The flags of these files, read by hand: terminals at 469 and 910; timeouts at 999 and 1999; at 299 and 599
        # (and no next_observations, so one transition less each).
        ("hopper_medium-v2", [470, 441], [1465.18, 1412.73]),
        ("halfcheetah_medium-v2", [1000, 1000], [4669.48, 4880.02]),
        ("walker2d_medium-v2", [1000, 1000], [3499.50, 3663.08]),
        ("hopper_medium_replay-v1", [40, 9], [42.04, 6.20]),  # float64, rewards of shape [N, 1], flags as numbers
        ("hopper_random-v1", [31, 19], [39.16, 9.31]),
        ("door-human-v1", [299, 299], [510.45, 220.17]),
    ],
)
def test_real_files(name: str, lengths: list[int], returns: list[float]) -> None:
    path = shared_data(f"d4rl/{name}.hdf5")
    dataset = load_dataset(path)
    assert dataset.lengths.tolist() == lengths
    assert dataset.table is not None
    assert np.allclose(dataset.episode_returns(), returns, atol=0.01)
    start = 0
    with h5py.File(path) as file:
        for index, length in enumerate(lengths):
            episode, rows = dataset.episode(index), slice(start, start + length)
            assert np.array_equal(episode.observation[:-1], file["observations"][rows].astype(np.float32))
            assert np.array_equal(episode.action, file["actions"][rows].astype(np.float32))
            assert np.array_equal(episode.reward, file["rewards"][rows].reshape(-1).astype(np.float32))
            if "next_observations" in file:
                after = file["next_observations"][rows].astype(np.float32)
                assert np.array_equal(episode.observation[1:], after)
                start += length
            else:
                assert np.array_equal(episode.observation[-1], file["observations"][start + length])
                start += length + 1
            assert bool(episode.terminated[-1]) == bool(file["terminals"][start - 1] > 0)
            assert not episode.terminated[:-1].any()


def test_real_files_know_their_environment_and_score() -> None:
    dataset = load_dataset(shared_data("d4rl/hopper_medium-v2.hdf5"))
    assert dataset.env_id == "Hopper-v5"
    # 100 · (1465.18 + 20.272305) / (3234.3 + 20.272305) = 45.642
    assert dataset.score(1465.18) == pytest.approx(45.642, abs=1e-3)
    assert (dataset.action_space.low == -1).all()
    assert (dataset.action_space.high == 1).all()


def test_actions_beyond_one_widen_the_space() -> None:
    arrays = columns(8, terminals=(7,))
    arrays["actions"] = np.linspace(-3, 0.5, 8, dtype=np.float32)[:, None]
    space = from_d4rl_arrays(arrays).action_space
    assert space.low.tolist() == [-3.0]
    assert space.high.tolist() == [1.0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rewards": None}, r"field rewards: is missing"),
        ({"terminals": None}, r"field terminals: is missing"),
        ({"actions": np.zeros((7, 1))}, r"field actions: has shape \(7, 1\), not \(8, …\)"),
        ({"rewards": np.zeros((8, 2))}, r"field rewards: has shape \(8, 2\), not \(8,\)"),
        ({"next_observations": np.zeros((8, 3))}, r"next_observations: has shape \(8, 3\), not \(8, 2\)"),
        ({"observations": np.zeros((0, 2))}, r"is empty"),
        ({"observations": np.where(np.arange(8)[:, None] == 5, np.nan, 1.0) * np.ones((8, 2))}, r"row 5 \(episode 1\)"),
        ({"rewards": np.where(np.arange(8) == 2, np.inf, 0.0)}, r"row 2 \(episode 0\), field rewards: is not a finite"),
        ({"terminals": np.where(np.arange(8) == 6, np.nan, 0.0)}, r"row 6, field terminals"),
    ],
)
def test_damaged_files_say_where(tmp_path: Path, change: dict, message: str) -> None:
    arrays = columns(8, terminals=(7,), timeouts=(3,)) | change
    path = write(tmp_path / "bad.hdf5", {key: values for key, values in arrays.items() if values is not None})
    with pytest.raises(InputError, match=message) as caught:
        load_dataset(path)
    assert "bad.hdf5" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_cut_short_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "cut.hdf5", columns(8000, terminals=(7999,)))
    path.write_bytes(path.read_bytes()[:20_000])
    with pytest.raises(InputError, match=r"cut\.hdf5: cannot be read as HDF5, it may be cut short") as caught:
        load_dataset(path)
    assert "\n" not in str(caught.value)


def test_a_chunk_that_cannot_be_decoded_is_named(tmp_path: Path) -> None:
    arrays = columns(8000, terminals=(7999,))
    with h5py.File(tmp_path / "bad.hdf5", "w") as file:
        for key, values in arrays.items():
            file.create_dataset(key, data=values, compression="gzip" if key == "observations" else None)
        chunk = file["observations"].id.get_chunk_info(0)
    data = bytearray((tmp_path / "bad.hdf5").read_bytes())
    data[chunk.byte_offset : chunk.byte_offset + chunk.size] = bytes(chunk.size)
    (tmp_path / "bad.hdf5").write_bytes(data)
    with pytest.raises(InputError, match=r"bad\.hdf5: damaged at rows 0 to .*field observations: cannot be decoded"):
        load_dataset(tmp_path / "bad.hdf5")


def test_arrays_that_lack_a_column_raise_an_error() -> None:
    with pytest.raises(InputError, match="lacks rewards, terminals; it has: observations, actions"):
        from_d4rl_arrays({"observations": np.zeros((3, 2)), "actions": np.zeros((3, 1))})


MEASURE = """
import sys
from pathlib import Path
import torch, h5py
from deft.data.datasets.d4rl import load

def kilobytes(field):
    status = Path("/proc/self/status").read_text().split()
    return int(status[status.index(field) + 1])

load(Path(sys.argv[1]), "small")
before = kilobytes("VmRSS:")
table = load(Path(sys.argv[2]), "large").table
print(1024 * (kilobytes("VmHWM:") - before) / table.rows.nbytes)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_loading_takes_less_than_one_and_a_half_tables(tmp_path: Path) -> None:
    """The peak of a fresh process's memory above what it had before, as a multiple of the table."""
    paths = []
    for name, num_rows in (("small", 1000), ("large", 500_000)):
        rows = np.random.default_rng(0).standard_normal((num_rows + 1, 11)).astype(np.float32)
        arrays = columns(
            num_rows, terminals=tuple(range(499, num_rows, 1000)), timeouts=tuple(range(999, num_rows, 1000))
        )
        arrays |= {"observations": rows[:-1], "next_observations": rows[1:], "actions": rows[:-1, :3]}
        paths.append(write(tmp_path / f"{name}.hdf5", arrays))
    command = [sys.executable, "-c", MEASURE, *map(str, paths)]
    ratio = float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert 1.0 < ratio < 1.5


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        ("rewards", np.full(4, 1e300), "row 0 .*field rewards: is not a finite 32-bit number"),
        ("rewards", np.array([b"a", b"b", b"c", b"d"]), "field rewards: has the type .*; it needs numbers"),
    ],
)
def test_values_beyond_32_bits_raise_an_error(column, values, message):
    columns = {
        "observations": np.zeros((4, 2)),
        "actions": np.zeros((4, 1)),
        "rewards": np.zeros(4),
        "terminals": np.array([0, 0, 0, 1], bool),
        "timeouts": np.zeros(4, bool),
    }
    with pytest.raises(InputError, match=message):
        from_d4rl_arrays({**columns, column: values})
