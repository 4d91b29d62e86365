"""D4RL's layout: flat columns of transitions (`observations`, `actions`, `rewards`, `terminals`, `timeouts`, …).

They are read in blocks into the table, from an HDF5 file (`load`) or from arrays in memory (`from_d4rl_arrays`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from deft.data.datasets.dataset import VectorDataset, action_space_of, damaged, known_task, task_of
from deft.data.datasets.hdf5 import blocks, column, keys_of, open_hdf5, read
from deft.data.replay import TransitionTable
from deft.errors import InputError


def matches(path: Path) -> bool:
    """Return whether this is an HDF5 file with D4RL's columns."""
    keys = keys_of(path)
    return "observations" in keys or {"actions", "rewards"} <= set(keys)


def load(path: Path, name: str, max_episode_steps: int | None = None) -> VectorDataset:
    """Load a D4RL file.

    `max_episode_steps` is the length of episodes in a file that has neither `timeouts` nor `next_observations`; it is
    known for D4RL's own names.
    """
    with open_hdf5(path) as file:
        return _build(_columns(file, path), path, name, max_episode_steps)


def check_layout(path: Path) -> None:
    """Raise InputError if D4RL's columns are missing or differ in length; their values are not read."""
    with open_hdf5(path) as file:
        _check_shapes(_columns(file, path), path)


def _columns(file: Any, path: Path) -> dict[str, Any]:
    columns = {key: column(file, key, path) for key in ("observations", "actions", "rewards")}
    columns["terminals"] = column(file, "dones" if "dones" in file and "terminals" not in file else "terminals", path)
    return columns | {key: column(file, key, path) for key in ("timeouts", "next_observations") if key in file}


def from_d4rl_arrays(
    arrays: Mapping[str, Any], name: str = "arrays", max_episode_steps: int | None = None
) -> VectorDataset:
    """Return the dataset of arrays in memory, as `env.get_dataset()` and `d4rl.qlearning_dataset(env)` return them.

    `observations`, `actions`, `rewards` and `terminals` (or `dones`) are required; `timeouts` and `next_observations`
    are optional.
    """
    columns = {key: np.asarray(value) for key, value in arrays.items()}
    if "terminals" not in columns and "dones" in columns:
        columns["terminals"] = columns["dones"]
    if missing := [key for key in ("observations", "actions", "rewards", "terminals") if key not in columns]:
        raise InputError(f"dataset {name} lacks {', '.join(missing)}; it has: {', '.join(arrays) or 'nothing'}")
    return _build(columns, name, name, max_episode_steps)


def _build(columns: Mapping[str, Any], path: Path | str, name: str, max_episode_steps: int | None) -> VectorDataset:
    """Find the episodes, then fill a table of their size."""
    _check_shapes(columns, path)
    num_rows = len(columns["observations"])
    terminal = _flags(columns, "terminals", path)
    columns = {**columns, "terminals": terminal}
    last_rows = _last_rows(columns, terminal, path, name, max_episode_steps)
    first_rows = np.concatenate([[0], last_rows[:-1] + 1])
    lengths = last_rows - first_rows + 1

    has_next = "next_observations" in columns
    if not has_next:
        # The observation after a time limit is not in the file, so the last transition is left out and the last row
        # is the final observation. A terminal transition is kept: no target uses its next observation, which is a
        # copy of the last observation.
        lengths = lengths - ~terminal[last_rows]
    first_rows, last_rows, lengths = (values[lengths > 0] for values in (first_rows, last_rows, lengths))
    if len(lengths) == 0:
        raise InputError(f"{path} is empty: it has {num_rows} rows and no whole transition")

    observation_dim, action_dim = columns["observations"].shape[1], columns["actions"].shape[1]
    table = TransitionTable(lengths, observation_dim, action_dim)
    rows = table.rows.numpy()
    targets = {
        "observations": rows[:, :observation_dim],
        "actions": rows[:, observation_dim:-2],
        "rewards": rows[:, -2:-1],
        "terminals": rows[:, -1:],
    }
    kept = np.zeros(num_rows, bool)
    for first, length in zip(first_rows.tolist(), lengths.tolist(), strict=True):
        kept[first : first + length] = True
    lengths_so_far = np.cumsum(lengths)
    for key, target in targets.items():
        done = 0
        for block, values in _finite_blocks(columns, key, path, first_rows):
            values = values[kept[block]]
            # Above the n-th transition are n transitions and the final observations of the earlier episodes.
            numbers = np.arange(done, done + len(values))
            target[numbers + np.searchsorted(lengths_so_far, numbers, "right")] = values
            done += len(values)
    final_rows = table.starts + table.lengths
    source = "next_observations" if has_next else "observations"
    for block, values in _finite_blocks(columns, source, path, first_rows):
        here = (last_rows >= block.start) & (last_rows < block.stop)
        targets["observations"][final_rows[here]] = values[last_rows[here] - block.start]

    env_id, reference_returns = task_of(name, observation_dim, action_dim)
    # The last row of an episode has action 0, which is within the bounds of every action space.
    action_space = action_space_of(targets["actions"].min(0), targets["actions"].max(0))
    return VectorDataset(table, name, action_space=action_space, env_id=env_id, reference_returns=reference_returns)


def _check_shapes(columns: Mapping[str, Any], path: Path | str) -> None:
    """Raise InputError for columns that are not vectors or differ in length."""
    num_rows = columns["observations"].shape[0] if columns["observations"].ndim else 0
    if num_rows == 0:
        raise InputError(f"{path} is empty: its observations have shape {columns['observations'].shape}")
    wanted = {"observations": 2, "next_observations": 2, "actions": 2, "rewards": 1, "terminals": 1, "timeouts": 1}
    for key, ndim in wanted.items():
        if key not in columns:
            continue
        shape = columns[key].shape
        is_scalar_column = ndim == 1 and len(shape) == 2 and shape[1] == 1  # some of D4RL's files have [N, 1]
        if shape[:1] != (num_rows,) or not (len(shape) == ndim or is_scalar_column):
            expected = f"({num_rows}, …)" if ndim == 2 else f"({num_rows},)"
            raise damaged(path, "all rows", key, f"has shape {shape}, not {expected}")
    if "next_observations" in columns and columns["next_observations"].shape != columns["observations"].shape:
        shapes = f"has shape {columns['next_observations'].shape}, not {columns['observations'].shape}"
        raise damaged(path, "all rows", "next_observations", shapes)


def _last_rows(
    columns: Mapping[str, Any], terminal: np.ndarray, path: Path | str, name: str, max_episode_steps: int | None
) -> np.ndarray:
    """Return the last row of each episode: by flags, by discontinuous observations, or by the time limit."""
    ends = terminal.copy()
    if "timeouts" in columns:
        ends |= _flags(columns, "timeouts", path)
    if "next_observations" in columns:
        # Rows t and t + 1 are of one episode only if the next observation of t is the observation of t + 1.
        for block in blocks(columns["observations"]):
            ahead = slice(block.start + 1, min(block.stop + 1, len(ends)))
            after = read(
                columns["next_observations"], path, "", "next_observations", slice(block.start, ahead.stop - 1)
            )
            seen = read(columns["observations"], path, "", "observations", ahead)
            ends[block.start : ahead.stop - 1] |= (after.astype(np.float32) != seen.astype(np.float32)).any(1)
    elif "timeouts" not in columns:
        task = known_task(name)
        limit = max_episode_steps or (task.max_episode_steps if task else None)
        if limit is None:
            raise InputError(
                f"{path} has neither timeouts nor next_observations, and the time limit of {name} is not known, so the "
                "ends of its episodes are unknown: give max_episode_steps"
            )
        first = 0
        for last in [*np.flatnonzero(ends).tolist(), len(ends) - 1]:
            ends[first + limit - 1 : last : limit] = True
            first = last + 1
    ends[-1] = True  # the end of the recording
    return np.flatnonzero(ends)


def _flags(columns: Mapping[str, Any], key: str, path: Path | str) -> np.ndarray:
    """Return a column of flags, stored as booleans or numbers, as bool [N]."""
    values = read(columns[key], path, "all rows", key).reshape(-1)
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        raise damaged(path, f"row {int(np.argmin(np.isfinite(values)))}", key, "is not a finite number")
    return values > 0


def _finite_blocks(
    columns: Mapping[str, Any], key: str, path: Path | str, first_rows: np.ndarray
) -> Iterator[tuple[slice, np.ndarray]]:
    """Yield a column in blocks [rows, width]; raise InputError for NaN and infinities."""
    for block in blocks(columns[key]):
        values = read(columns[key], path, f"rows {block.start} to {block.stop - 1}", key, block)
        if values.dtype.kind not in "fiub":
            raise damaged(
                path, f"rows {block.start} to {block.stop - 1}", key, f"has the type {values.dtype}; it needs numbers"
            )
        with np.errstate(over="ignore"):  # values beyond float32 become infinite
            values = values.reshape(len(values), -1).astype(np.float32, copy=False)
        finite = np.isfinite(values).all(1)
        if not finite.all():
            row = block.start + int(np.argmin(finite))
            episode = max(int(np.searchsorted(first_rows, row, "right")) - 1, 0)
            raise damaged(path, f"row {row} (episode {episode})", key, "is not a finite 32-bit number")
        yield block, values
