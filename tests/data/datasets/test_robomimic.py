"""robomimic's files: low-dimensional into one table, images as streams, filter keys, and what is damaged."""

from __future__ import annotations

import json
from pathlib import Path

import h5py
import numpy as np
import pytest
from gymnasium import spaces
from shared_data import shared_data

from deft.data.datasets import load_dataset
from deft.errors import InputError

LOW_DIM = "robomimic/robomimic_ph__lift_low_dim.hdf5"
IMAGE = "robomimic/robomimic_mh__lift_image.hdf5"
DEFAULT_KEYS = ("robot0_eef_pos", "robot0_eef_quat", "robot0_gripper_qpos", "object")


def write(path: Path, lengths: dict[str, int], next_obs: bool = True, image: bool = False) -> Path:
    """A file of robomimic's layout; observation `a` of row t is t, `b` is (10 t, 20 t)."""
    with h5py.File(path, "w") as file:
        data = file.create_group("data")
        data.attrs["env_args"] = json.dumps({"env_name": "Lift", "type": 1, "env_kwargs": {"control_freq": 20}})
        for demo, length in lengths.items():
            group = data.create_group(demo)
            group.attrs["num_samples"] = length
            rows = np.arange(length + 1, dtype=np.float64)
            group["actions"] = 0.1 * rows[:-1, None]
            group["rewards"] = rows[:-1]
            group["dones"] = np.zeros(length, np.int64)
            for name, part in (("obs", slice(0, length)), ("next_obs", slice(1, None)))[: 2 if next_obs else 1]:
                group[f"{name}/a"] = rows[part, None]
                group[f"{name}/b"] = np.stack([10 * rows, 20 * rows], 1)[part]
                if image:
                    pictures = np.zeros((length + 1, 4, 6, 3), np.uint8)
                    pictures[..., 1] = np.arange(length + 1)[:, None, None]
                    group[f"{name}/camera_image"] = pictures[part]
        file["mask/train"] = np.array([b"demo_2", b"demo_10", b"demo_99"])
        file["mask/valid"] = np.array([b"demo_77"])
    return path


def test_low_dim_keys_are_concatenated_in_robomimics_default_order() -> None:
    path = shared_data(LOW_DIM)
    dataset = load_dataset(path)
    assert dataset.lengths.tolist() == [59, 58]
    assert dataset.table is not None
    assert dataset.observation_space.shape == (3 + 4 + 2 + 10,)
    with h5py.File(path) as file:
        for index in range(2):
            group, episode = file[f"data/demo_{index}"], dataset.episode(index)
            seen = np.concatenate([group["obs"][key] for key in DEFAULT_KEYS], 1).astype(np.float32)
            after = np.concatenate([group["next_obs"][key] for key in DEFAULT_KEYS], 1).astype(np.float32)
            assert np.array_equal(episode.observation[:-1], seen)
            assert np.array_equal(episode.observation[1:], after)
            assert np.array_equal(episode.action, group["actions"][:].astype(np.float32))
            # The demonstrator continues for some steps after the success: each of them is done, with reward 1.
            assert np.array_equal(episode.terminated, group["dones"][:] > 0)
            assert episode.terminated.sum() == episode.reward.sum() == 5
            assert not episode.truncated.any()
    assert (dataset.action_space.low == -1).all()
    assert (dataset.action_space.high == 1).all()
    assert dataset.env_args is None  # this part of the file has none


def test_observation_keys_choose_and_order() -> None:
    dataset = load_dataset(shared_data(LOW_DIM), observation_keys=["object", "robot0_joint_pos"])
    assert dataset.observation_space.shape == (17,)
    with h5py.File(shared_data(LOW_DIM)) as file:
        assert np.array_equal(
            dataset.episode(0).observation[3, :10], file["data/demo_0/obs/object"][3].astype(np.float32)
        )
    with pytest.raises(InputError, match="has no observation elbow; observation_keys can name: object, robot0_eef_pos"):
        load_dataset(shared_data(LOW_DIM), observation_keys=["elbow"])


def test_images_stream_with_their_channels_first() -> None:
    path = shared_data(IMAGE)
    dataset = load_dataset(path)
    assert dataset.table is None
    assert dataset.lengths.tolist() == [48]
    assert isinstance(dataset.observation_space, spaces.Dict)
    assert {name: space.shape for name, space in dataset.observation_space.items()} == {
        "agentview_image": (3, 84, 84),
        "robot0_eye_in_hand_image": (3, 84, 84),
        "state": (9,),
    }
    episode = dataset.episode(0)
    with h5py.File(path) as file:
        group = file["data/demo_0"]
        for camera in ("agentview_image", "robot0_eye_in_hand_image"):
            pictures = episode.streams[camera]
            assert pictures.dtype == np.uint8
            assert pictures.shape == (49, 3, 84, 84)
            # The file has height, width, channel.
            assert np.array_equal(pictures[:-1].transpose(0, 2, 3, 1), group["obs"][camera][:])
            assert np.array_equal(pictures[-1].transpose(1, 2, 0), group["next_obs"][camera][-1])
        assert np.array_equal(episode.streams["state"][:-1, :3], group["obs/robot0_eef_pos"][:].astype(np.float32))
    assert episode.streams["state"].dtype == np.float32
    assert dataset.observation_space.contains({name: rows[0] for name, rows in episode.streams.items()})
    dataset.close()
    assert len(dataset.episode(0)) == 48  # opened again


def test_vector_keys_alone_make_a_table_of_an_image_file() -> None:
    dataset = load_dataset(shared_data(IMAGE), observation_keys="object")
    assert dataset.table is not None
    assert dataset.observation_space.shape == (10,)


def test_demonstrations_stand_in_the_order_of_their_numbers_and_a_split_chooses(tmp_path: Path) -> None:
    path = write(tmp_path / "a.hdf5", {"demo_10": 4, "demo_2": 3, "demo_1": 2})
    dataset = load_dataset(path, observation_keys=["a"])
    assert dataset.lengths.tolist() == [2, 3, 4]
    assert dataset.env_args == {"env_name": "Lift", "type": 1, "env_kwargs": {"control_freq": 20}}
    assert load_dataset(path, observation_keys=["a"], split="train").lengths.tolist() == [3, 4]
    with pytest.raises(InputError, match="no split 'test'; it has: train, valid"):
        load_dataset(path, observation_keys=["a"], split="test")
    with pytest.raises(InputError, match="split 'valid' names none of the file's 3 demonstrations"):
        load_dataset(path, observation_keys=["a"], split="valid")


def test_without_next_obs_the_last_transition_is_left_out_unless_it_is_done(tmp_path: Path) -> None:
    path = write(tmp_path / "a.hdf5", {"demo_0": 3, "demo_1": 3}, next_obs=False, image=True)
    with h5py.File(path, "a") as file:
        file["data/demo_1/dones"][-1] = 1
    for keys in (["a"], ["a", "camera_image"]):
        dataset = load_dataset(path, observation_keys=keys)
        assert dataset.lengths.tolist() == [2, 3]
        first, second = (dataset.episode(i).streams.get("state", dataset.episode(i).observation) for i in range(2))
        assert first[:, 0].tolist() == [0, 1, 2]
        assert second[:, 0].tolist() == [0, 1, 2, 2]
        assert dataset.episode(0).truncated.tolist() == [False, True]
    assert dataset.episode(0).streams["camera_image"][:, 1, 0, 0].tolist() == [0, 1, 2]


def change(path: Path, field: str, values: np.ndarray | None) -> Path:
    with h5py.File(path, "a") as file:
        del file[field]
        if values is not None:
            file[field] = values
    return path


@pytest.mark.parametrize(
    ("field", "values", "message"),
    [
        ("data/demo_1/rewards", None, "damaged at demo_1, field rewards: is missing"),
        ("data/demo_1/dones", None, "damaged at demo_1, field dones: is missing"),
        ("data/demo_1/obs/b", None, "damaged at demo_1, field obs/b: is missing"),
        ("data/demo_1/next_obs/b", np.zeros((3, 3)), r"demo_1, field next_obs/b: has shape \(3, 3\), not \(3, 2\)"),
        ("data/demo_1/obs/a", np.array([[0.0], [np.nan], [0.0]]), "demo_1, field obs/a: row 1 is not a finite number"),
        ("data/demo_1/actions", np.zeros((2, 1)), "demo_1, field actions: has 2 rows where num_samples is 3"),
        ("data/demo_0/obs", None, "damaged at demo_0, field obs: is missing"),
    ],
)
def test_damaged_files_name_the_demonstration_and_the_field(
    tmp_path: Path, field: str, values: np.ndarray | None, message: str
) -> None:
    path = change(write(tmp_path / "bad.hdf5", {"demo_0": 2, "demo_1": 3}), field, values)
    with pytest.raises(InputError, match=message) as caught:
        load_dataset(path, observation_keys=["a", "b"])
    assert "bad.hdf5" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_streams_are_checked_when_they_are_read(tmp_path: Path) -> None:
    path = write(tmp_path / "bad.hdf5", {"demo_0": 2, "demo_1": 3}, image=True)
    change(path, "data/demo_1/obs/camera_image", np.zeros((3, 4, 5, 3), np.uint8))
    dataset = load_dataset(path, observation_keys=["camera_image"])
    assert len(dataset.episode(0)) == 2
    with pytest.raises(
        InputError, match=r"demo_1, field obs/camera_image: has shape \(3, 4, 5, 3\), not \(3, 4, 6, 3\)"
    ):
        dataset.episode(1)
