"""HDF5 files give what they hold, and nothing of other files, whatever they name."""

import json

import h5py
import numpy as np
import pytest

from deft.data.datasets import load_dataset
from deft.errors import InputError

SECRET = np.arange(40, dtype=np.float32).reshape(20, 2)


@pytest.fixture
def secrets(tmp_path):
    """Files outside of the dataset: one of HDF5 with the layouts of the datasets in it, and one of plain bytes."""
    with h5py.File(tmp_path / "secret.hdf5", "w") as file:
        file["observations"] = SECRET
        write_demo(file.create_group("demo_0"))
        write_episode(file.create_group("episode_0"))
    SECRET.tofile(tmp_path / "secret.bin")
    return tmp_path


def write_columns(file, observations=True):
    if observations:
        file["observations"] = SECRET
    file["actions"] = np.zeros((20, 1), np.float32)
    file["rewards"] = np.zeros(20, np.float32)
    file["terminals"] = np.arange(20) % 10 == 9
    file["timeouts"] = np.zeros(20, bool)


def write_demo(group):
    group["obs/object"] = SECRET
    group["actions"] = np.zeros((20, 1), np.float32)
    group["rewards"] = np.zeros(20, np.float32)
    group["dones"] = np.arange(20) == 19


def write_episode(group):
    group["observations"] = np.zeros((9, 2), np.float32)
    group["actions"] = np.zeros((8, 1), np.float32)
    group["rewards"] = np.zeros(8, np.float32)
    group["terminations"] = group["truncations"] = np.arange(8) == 7


def virtual(file, source):
    layout = h5py.VirtualLayout(SECRET.shape, SECRET.dtype)
    layout[:] = h5py.VirtualSource(source, "observations", SECRET.shape)
    file.create_virtual_dataset("observations", layout)


def external(file, source):
    file.create_dataset("observations", SECRET.shape, SECRET.dtype, external=[(source, 0, SECRET.nbytes)])


def linked(file, source):
    file["observations"] = h5py.ExternalLink(source, "observations")


def linked_behind_a_soft_link(file, source):
    file["elsewhere"] = h5py.ExternalLink(source, "/")
    file["observations"] = h5py.SoftLink("/elsewhere/observations")


@pytest.mark.parametrize(
    ("write", "source"),
    [
        (linked, "secret.hdf5"),
        (linked_behind_a_soft_link, "secret.hdf5"),
        (external, "secret.bin"),
        (virtual, "secret.hdf5"),
    ],
)
def test_values_of_other_files_are_not_read(secrets, write, source):
    (secrets / "data").mkdir()
    path = secrets / "data" / "d4rl.hdf5"
    with h5py.File(path, "w") as file:
        write_columns(file, observations=False)
        write(file, str(secrets / source))
    with pytest.raises(InputError, match="Deft does not") as caught:
        load_dataset(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_demonstrations_of_other_files_are_not_read(secrets):
    path = secrets / "robomimic.hdf5"
    with h5py.File(path, "w") as file:
        write_demo(file.create_group("data/demo_0"))
        file["data/demo_1"] = h5py.ExternalLink(str(secrets / "secret.hdf5"), "demo_0")
    with pytest.raises(InputError, match="data/demo_1 is a link to another file"):
        load_dataset(path, observation_keys=["object"])


def test_episodes_of_other_files_are_not_read(secrets):
    data = secrets / "minari" / "data"
    data.mkdir(parents=True)
    box = {"type": "Box", "dtype": "float32", "shape": [2], "low": [-1, -1], "high": [1, 1]}
    action = {**box, "shape": [1], "low": [-1], "high": [1]}
    spaces = {"observation_space": json.dumps(box), "action_space": json.dumps(action)}
    (data / "metadata.json").write_text(json.dumps({"minari_version": "0.5.4", "total_episodes": 1, **spaces}))
    with h5py.File(data / "main_data.hdf5", "w") as file:
        file["episode_0"] = h5py.ExternalLink(str(secrets / "secret.hdf5"), "episode_0")
    with pytest.raises(InputError, match="episode_0 is a link to another file"):
        load_dataset(secrets / "minari")


def test_links_within_a_file_are_followed(tmp_path):
    with h5py.File(tmp_path / "d4rl.hdf5", "w") as file:
        write_columns(file, observations=False)
        file["kept"] = SECRET
        file["observations"] = h5py.SoftLink("/kept")
    np.testing.assert_array_equal(load_dataset(tmp_path / "d4rl.hdf5").episode(0).observation[:10], SECRET[:10])


def test_a_file_that_changes_is_looked_through_again(secrets):
    path = secrets / "d4rl.hdf5"
    with h5py.File(path, "w") as file:
        write_columns(file)
    assert load_dataset(path).num_episodes == 2
    with h5py.File(path, "a") as file:
        del file["observations"]
        linked(file, str(secrets / "secret.hdf5"))
    with pytest.raises(InputError, match="observations is a link to another file"):
        load_dataset(path)


# 10¹¹ rows of an array that was never written take a few hundred bytes: they would be 373 GiB of zeros.
@pytest.mark.parametrize("layout", ["d4rl", "robomimic", "minari"])
@pytest.mark.parametrize("rows", [10**7, 10**11])
def test_rows_that_a_file_declares_and_does_not_hold_are_an_error(tmp_path, layout, rows):
    def declare(group, lengthened=()):
        for key in [key for key in group if isinstance(group[key], h5py.Dataset)]:
            shape, kind = (rows + (key in lengthened), *group[key].shape[1:]), group[key].dtype
            del group[key]
            group.create_dataset(key, shape, kind, chunks=(1024, *shape[1:]))

    path = tmp_path / ("main_data.hdf5" if layout == "minari" else "data.hdf5")
    with h5py.File(path, "w") as file:
        if layout == "d4rl":
            write_columns(file)
            declare(file)
        elif layout == "robomimic":
            write_demo(file.create_group("data/demo_0"))
            declare(file["data/demo_0"])
        else:
            write_episode(file.create_group("episode_0"))
            declare(file["episode_0"], ["observations"])
    assert path.stat().st_size < 100_000
    if layout == "minari":
        space = {"type": "Box", "dtype": "float32", "low": -1, "high": 1}
        metadata = {"total_episodes": 1, "minari_version": "0.5", "data_format": "hdf5"}
        for field, shape in (("observation_space", [2]), ("action_space", [1])):
            metadata[field] = json.dumps({**space, "shape": shape})
        (tmp_path / "metadata.json").write_text(json.dumps(metadata))
    with pytest.raises(InputError, match=rf"declares the shape \({rows}.*, and the file holds 0 bytes of it"):
        load_dataset(
            tmp_path if layout == "minari" else path,
            **({"observation_keys": ["object"]} if layout == "robomimic" else {}),
        )


def test_what_compresses_well_is_read(tmp_path):
    path = tmp_path / "zeros.hdf5"
    rows = 300_000  # 2.4 MB of zeros in about 2 kB
    with h5py.File(path, "w") as file:
        for key, shape in {"observations": (rows, 2), "actions": (rows, 1), "rewards": (rows,)}.items():
            file.create_dataset(key, data=np.zeros(shape, np.float32), compression=9)
        for key in ("terminals", "timeouts"):
            file.create_dataset(key, data=np.arange(rows) % 1000 == 999, compression=9)
    assert len(load_dataset(path)) == rows
