"""What every dataset offers: the score, known tasks, episodes as views of the table, and checks on what is written."""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from gymnasium import spaces

from deft.data.datasets.dataset import (
    VectorDataset,
    box,
    check_array,
    known_env,
    known_task,
    read_json,
    task_of,
)
from deft.data.replay import TransitionTable
from deft.errors import InputError


def episode_of(length: int, ends: bool) -> dict[str, np.ndarray]:
    """Observation t is (t, t), action and reward t + 1."""
    rows = np.arange(length + 1)
    terminated = np.zeros(length, bool)
    terminated[-1] = ends
    steps = rows[1:].astype(np.float64)
    return {
        "observation": np.stack([rows, rows], 1),
        "action": steps[:, None],
        "reward": steps,
        "terminated": terminated,
    }


def table_of(*lengths: int) -> TransitionTable:
    """Episodes of these lengths; every second one is terminated."""
    table = TransitionTable(lengths, 2, 1)
    for index, length in enumerate(lengths):
        fields = episode_of(length, ends=index % 2 == 1)
        rows = table.episode_rows(index)
        table.observation[rows] = torch.from_numpy(fields["observation"]).float()
        steps = slice(rows.start, rows.stop - 1)
        table.action[steps] = torch.from_numpy(fields["action"]).float()
        table.reward[steps] = torch.from_numpy(fields["reward"]).float()
        table.terminated[steps] = torch.from_numpy(fields["terminated"]).float()
    return table


def test_episodes_are_views_of_the_table() -> None:
    dataset = VectorDataset(table_of(3, 2), "two")
    first, second = dataset.episode(0), dataset.episode(1)
    assert first.observation.tolist() == [[0, 0], [1, 1], [2, 2], [3, 3]]
    assert first.action.tolist() == [[1], [2], [3]]
    assert first.reward.tolist() == [1, 2, 3]
    assert first.truncated.tolist() == [False, False, True]
    assert not first.terminated.any()
    assert second.terminated.tolist() == [False, True]
    assert not second.truncated.any()
    dataset.table.rows[0, 0] = 7
    assert first.observation[0, 0] == 7
    assert (len(dataset), dataset.num_episodes, len(first)) == (5, 2, 3)
    assert dataset.episode_returns().tolist() == [1 + 2 + 3, 1 + 2]
    # float32: 4 · 2 observations, 3 actions, 3 rewards; and two flags of 3 bytes.
    assert first.nbytes == 4 * (8 + 3 + 3) + 6


def test_every_value_of_a_table_is_in_the_fingerprint() -> None:
    dataset = VectorDataset(table_of(*[50] * 40), "large")
    found = dataset.fingerprint()
    assert VectorDataset(table_of(*[50] * 40), "large").fingerprint() == found
    for place in ((1000, 0), (1003, 1), (777, 2), (1200, 3), (1501, 4)):  # rows of episodes 14 to 29 of 40
        value = dataset.table.rows[place].item()
        dataset.table.rows[place] = value + 1.0
        assert dataset.fingerprint() != found
        dataset.table.rows[place] = value
    assert dataset.fingerprint() == found


def test_fingerprints_begin_with_a_checksum_of_lengths_and_outer_episodes() -> None:
    """Checkpoints contain fingerprints: the format must not change."""
    dataset = VectorDataset(table_of(3, 2, 4), "three")
    number = zlib.crc32(np.array([3, 2, 4], np.int64).tobytes())
    for index in (0, 2):
        episode = dataset.episode(index)
        for array in (episode.observation, episode.action, episode.reward):
            number = zlib.crc32(np.ascontiguousarray(array).tobytes(), number)
    assert dataset.fingerprint().startswith(f"{number:08x}-")


def test_all_files_are_in_the_fingerprint(tmp_path) -> None:
    """One episode among many that was recorded anew, and one large file that was changed at some offsets."""
    files = [tmp_path / f"{number}.bin" for number in range(20)]
    for number, file in enumerate(files):
        file.write_bytes(bytes([number]) * 1000)

    class Recorded(VectorDataset):
        def source_files(self):
            return files

    dataset = Recorded(table_of(3), "files")
    before = dataset.fingerprint()
    files[9].write_bytes(bytes([9]) * 999 + b"!")
    assert dataset.fingerprint() != before  # small files are read whole
    files[9].write_bytes(bytes(2**27))
    before = dataset.fingerprint()
    with open(files[9], "r+b") as file:
        file.seek(2**26)
        file.write(bytes([1]) * 2**20)  # a part of 1 MiB that is other: the blocks are 0.6 MiB apart
    assert dataset.fingerprint() != before
    files[9].unlink()
    with pytest.raises(InputError, match=r"9\.bin: cannot be read"):
        dataset.fingerprint()


def test_discrete_actions_come_back_as_numbers() -> None:
    dataset = VectorDataset(table_of(3), "discrete", action_space=spaces.Discrete(5))
    action = dataset.episode(0).action
    assert action.dtype == np.int64
    assert action.tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("name", "env_id", "random", "expert"),
    [
        ("hopper-medium-v2", "Hopper-v5", -20.272305, 3234.3),
        ("hopper_medium_replay-v1", "Hopper-v5", -20.272305, 3234.3),
        ("mujoco/halfcheetah/expert-v0", "HalfCheetah-v5", -280.178953, 12135.0),
        ("walker2d-full-replay-v2", "Walker2d-v5", 1.629008, 4592.3),
        ("D4RL/door/human-v2", "AdroitHandDoor-v1", -56.512833, 2880.569309),
        ("maze2d-umaze-dense-v1", None, 68.537689, 193.662856),
        ("maze2d-umaze-v1", None, 23.85, 161.86),
        ("antmaze-large-play-v2", None, 0.0, 1.0),
        ("kitchen-mixed-v0", None, 0.0, 4.0),
    ],
)
def test_known_tasks(name: str, env_id: str | None, random: float, expert: float) -> None:
    task = known_task(name)
    assert task is not None
    assert (task.env_id, task.random_return, task.expert_return) == (env_id, random, expert)


@pytest.mark.parametrize("name", ["hammer", "door-open", "antelope-medium-v2", "grasshopper-medium-v2", "hopper", ""])
def test_other_names_are_not_taken_for_known_ones(name: str) -> None:
    assert known_task(name) is None
    assert task_of(name, 11, 3) == (None, None)


def test_the_environment_is_named_only_where_its_sizes_are_the_datasets() -> None:
    assert task_of("ant-medium-v2", 105, 8) == ("Ant-v5", (-325.6, 3879.7))
    # D4RL's own ant has 111 observations, which no Gymnasium environment gives: it can be scored and not evaluated.
    assert task_of("ant-medium-v2", 111, 8) == (None, (-325.6, 3879.7))


def test_known_environments_whatever_their_version() -> None:
    assert known_env("Hopper-v4") == known_env("Hopper-v5") == known_task("hopper-medium-v2")
    assert known_env("CartPole-v1") is None
    assert known_env("Hop-v1") is None
    assert known_env("") is None


def test_known_environments_have_the_sizes_they_are_said_to_have() -> None:
    gymnasium = pytest.importorskip("gymnasium")
    for name in ("hopper-medium-v2", "halfcheetah-medium-v2", "walker2d-medium-v2", "ant-medium-v2"):
        task = known_task(name)
        env = gymnasium.make(task.env_id)
        assert env.observation_space.shape == (task.observation_dim,)
        assert env.action_space.shape == (task.action_dim,)
        assert env.spec.max_episode_steps == task.max_episode_steps
        env.close()


def test_score_is_d4rls() -> None:
    dataset = VectorDataset(table_of(1), "x", reference_returns=(-20.272305, 3234.3))
    assert dataset.score(-20.272305) == 0
    assert dataset.score(3234.3) == pytest.approx(100)
    # (1607.013847 is the middle of the two)
    assert dataset.score(1607.0138475) == pytest.approx(50)
    assert VectorDataset(table_of(1), "x").score(1.0) is None
    assert VectorDataset(table_of(1), "x").observation_space == box(2)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (np.zeros((3, 2)), r"^file: damaged at demo 3, field reward: has shape \(3, 2\), not \(3,\)$"),
        (np.zeros(2), r"field reward: has shape \(2,\), not \(3,\)$"),
        (np.array([0, np.nan, 0]), "field reward: row 1 is not a finite number"),
        (np.array([[0.0], [0.0], [np.inf]]), "field reward: row 2 is not a finite number"),
    ],
)
def test_arrays_of_another_shape_or_not_finite_are_rejected(values: np.ndarray, message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_array(values, (3,), "file", "demo 3", "reward")


def test_scalars_may_have_a_trailing_dimension() -> None:
    assert check_array(np.ones((3, 1)), (3,), "file", "demo 3", "reward").shape == (3,)


class OnDisk(VectorDataset):
    """Stands for a dataset that is read on demand."""

    closed = False

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("action_space", [box(1, -1, 1), spaces.Discrete(9)])
def test_a_dataset_of_vectors_is_read_into_memory(action_space: spaces.Space) -> None:
    source = OnDisk(table_of(3, 2), "two", None, action_space, "Some-v0", (1.0, 2.0))
    source.env_kwargs, source.env_args = {"speed": 2}, {"env_name": "Lift"}
    assert source.is_vector
    dataset = VectorDataset.from_dataset(source)
    assert source.closed
    assert torch.equal(dataset.table.rows, source.table.rows)
    assert dataset.table.rows is not source.table.rows
    kept = ("name", "env_id", "reference_returns", "env_kwargs", "env_args", "observation_space", "action_space")
    assert all(getattr(dataset, name) == getattr(source, name) for name in kept)


@pytest.mark.parametrize("text", ["{", "[1]", "[" * 100 + "]" * 100])
def test_json_that_is_no_object_is_reported_with_its_file(text: str, tmp_path: Path) -> None:
    (tmp_path / "info.json").write_text(text)
    with pytest.raises(InputError, match=r"info\.json: damaged at the top, field JSON: is not "):
        read_json(tmp_path / "info.json")
    with pytest.raises(InputError, match=r"none\.json: damaged at episode 1, field length: the file is missing"):
        read_json(tmp_path / "none.json", "episode 1", "length")
