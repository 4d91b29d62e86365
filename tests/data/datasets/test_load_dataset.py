"""`load_dataset`: where datasets are found by name, how formats are recognised, and the errors if they are not."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest

import deft.data.datasets as front
from deft.data.datasets import dataset_folders, find_dataset, load_dataset
from deft.errors import InputError


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home and a current folder of the test's own."""
    for name in ("DEFT_DATASETS", "MINARI_DATASETS_PATH", "HF_LEROBOT_HOME"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "here").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path


def write(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        file["observations"], file["actions"] = np.zeros((4, 11), np.float32), np.zeros((4, 3), np.float32)
        file["rewards"], file["terminals"] = np.ones(4, np.float32), np.array([False, False, False, True])
        file["timeouts"] = np.zeros(4, bool)
    return path


@pytest.mark.parametrize(
    "place",
    [
        "here/datasets/hopper-medium-v2.hdf5",
        "home/.deft/datasets/hopper-medium-v2.hdf5",
        "home/.d4rl/datasets/hopper_medium-v2.hdf5",
        "mine/hopper-medium-v2.hdf5",
    ],
)
def test_names_are_found_in_the_known_folders(own_folders: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    monkeypatch.setenv("DEFT_DATASETS", f"{own_folders / 'nowhere'}:{own_folders / 'mine'}")
    write(own_folders / place)
    dataset = load_dataset("hopper-medium-v2")
    assert dataset.name == "hopper-medium-v2"
    assert dataset.env_id == "Hopper-v5"
    assert dataset.reference_returns == (-20.272305, 3234.3)
    assert len(dataset) == 4


def test_own_folders_come_first(own_folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEFT_DATASETS", str(own_folders / "mine"))
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(own_folders / "minari"))
    monkeypatch.setenv("HF_LEROBOT_HOME", str(own_folders / "lerobot"))
    home = own_folders / "home"
    assert dataset_folders() == [
        own_folders / "mine",
        Path("datasets"),
        home / ".deft/datasets",
        home / ".d4rl/datasets",
        own_folders / "minari",
        own_folders / "lerobot",
    ]
    write(own_folders / "here/datasets/a.hdf5")
    mine = write(own_folders / "mine/a.hdf5")
    assert find_dataset("a") == (mine, "a")


def test_paths_are_taken_as_they_are_and_names_do_not_decide_the_format(own_folders: Path) -> None:
    path = write(own_folders / "here" / "something.data")
    assert load_dataset(path).name == "something"
    assert load_dataset("something.data").num_episodes == 1


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("hopper-medium-v2", r"`deft datasets fetch hopper-medium-v2` downloads it from http.*hopper_medium-v2\.hdf5"),
        (
            "driving-expert-v1",
            r"`deft collect --env driving --policy expert --episodes 200 --out datasets/driving-expert-v1`",
        ),
        ("nowhere-medium-v2", r"`deft datasets fetch` downloads D4RL's datasets, such as hopper-medium-v2"),
        ("lerobot/pusht", "hf download NAME --repo-type dataset"),
        ("some/where.hdf5", "was not found: there is no such path"),
    ],
)
def test_a_name_that_is_nowhere_lists_the_places_and_the_way_to_get_it(name: str, advice: str) -> None:
    with pytest.raises(InputError, match=advice) as caught:
        load_dataset(name)
    message = str(caught.value)
    assert message.startswith(f"dataset {name} was not found")
    assert "\n" not in message
    assert all(str(folder) in message for folder in dataset_folders())
    assert "DEFT_DATASETS" in message
    assert "deft collect" in message


def test_minari_ids_are_fetched_where_that_is_asked_for(own_folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from deft.data.datasets import minari

    def offline(dataset_id: str) -> Path:
        raise InputError(f"{dataset_id} cannot be downloaded: no network")

    monkeypatch.setattr(minari, "download", offline)
    with pytest.raises(
        InputError, match=r"not found.*DEFT_DATASETS adds folders\); download=True .*`minari download mujoco"
    ):
        load_dataset("mujoco/hopper/medium-v0")
    with pytest.raises(InputError, match=r"no network; .*`minari download mujoco/hopper/medium-v0`") as caught:
        load_dataset("mujoco/hopper/medium-v0", download=True)
    assert "\n" not in str(caught.value)
    assert ".minari/datasets" in str(caught.value)
    monkeypatch.setattr(minari, "download", lambda dataset_id: write(own_folders / "got.hdf5"))
    assert load_dataset("mujoco/hopper/medium-v0", download=True).name == "mujoco/hopper/medium-v0"


def test_a_folder_of_datasets_names_them(own_folders: Path) -> None:
    (own_folders / "several").mkdir()
    (own_folders / "several" / "notes.txt").write_text("no data")
    for name in ("b", "a"):
        write(own_folders / "several" / f"{name}.hdf5")
    with pytest.raises(InputError, match=r"a folder of datasets: give one of them \(a\.hdf5, b\.hdf5\)"):
        load_dataset(own_folders / "several")


def test_paths_that_are_no_dataset_raise_an_error(own_folders: Path) -> None:
    (own_folders / "folder").mkdir()
    (own_folders / "text.txt").write_text("no data")
    np.savez(own_folders / "weights.npz", layer=np.zeros(3))
    with h5py.File(own_folders / "other.hdf5", "w") as file:
        file["unrelated"] = 1
    for name in ("folder", "text.txt", "weights.npz", "other.hdf5"):
        with pytest.raises(
            InputError, match="has none of the formats that Deft reads: Minari folder, LeRobot"
        ) as caught:
            load_dataset(own_folders / name)
        assert "\n" not in str(caught.value)
    (own_folders / "empty.hdf5").write_bytes(b"")
    with pytest.raises(InputError, match=r"empty\.hdf5: cannot be read as HDF5"):
        load_dataset(own_folders / "empty.hdf5")
    with pytest.raises(InputError, match="needs a name or a path"):
        load_dataset(" ")


def test_unknown_options_are_refused_with_those_that_there_are(own_folders: Path) -> None:
    path = write(own_folders / "a.hdf5")
    with pytest.raises(InputError, match=r"no loading option split; its format has: max_episode_steps$"):
        load_dataset(path, split="train")


def test_a_switch_is_true_or_false(own_folders: Path) -> None:
    folder = own_folders / "arm"
    (folder / "meta").mkdir(parents=True)
    (folder / "meta" / "info.json").write_text("{}")  # LeRobot's, of which nothing else is read first
    with pytest.raises(InputError, match=r"^skip_missing: 'maybe' is not true or false$"):
        load_dataset(folder, skip_missing="maybe")


def test_formats_are_modules_with_the_two_functions() -> None:
    for name in front.FORMATS:
        module = front._format(name)
        assert callable(module.matches)
        assert callable(module.load)
        assert not module.matches(Path("/nonexistent"))
