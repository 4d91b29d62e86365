"""The Minari reader, on datasets that Minari's own storage wrote."""

import io
import json
import shutil
import subprocess
import sys
import zlib

import h5py
import minari
import numpy as np
import pytest
from gymnasium import spaces
from minari.data_collector import EpisodeBuffer
from minari.dataset.minari_storage import MinariStorage
from PIL import Image

from deft.data.datasets import Episode, load_dataset
from deft.data.datasets.minari import MinariFiles, matches
from deft.data.recording import Recording
from deft.errors import InputError
from deft.schema import decode_text

STORAGES = ["hdf5", "arrow", "parquet"]
BOX = spaces.Box(-10, 10, (3,), np.float64)
ACTION = spaces.Box(-1, 1, (2,), np.float32)
SPEC = {"id": "Hopper-v5", "entry_point": "x:y", "kwargs": {"xml_file": "hopper.xml"}}


def write(path, observation_space, action_space, episodes, storage="hdf5", **metadata):
    """A dataset by Minari's own hand; jpeg_encoding as Minari has it by default."""
    data = path / "data"
    data.mkdir(parents=True)
    made = MinariStorage.new(data, observation_space, action_space, data_format=storage)
    for observations, actions, terminated in episodes:
        length = len(actions)
        ends = [False] * (length - 1) + [True]
        made.update_episodes(
            [
                EpisodeBuffer(
                    observations=observations,
                    actions=actions,
                    rewards=[0.5 * step for step in range(length)],
                    terminations=ends if terminated else [False] * length,
                    truncations=[False] * length if terminated else ends,
                )
            ]
        )
    made.update_metadata({"dataset_id": "toy/data-v0", "minari_version": "0.5.4", **metadata})
    return path


def vectors(length, first=0.0):
    return first + np.arange(3.0 * (length + 1)).reshape(-1, 3) / 10, np.full((length, 2), first / 10, np.float32)


@pytest.fixture
def vector_dataset(tmp_path):
    episodes = [(*vectors(4), True), (*vectors(2, first=3.0), False)]
    return write(tmp_path / "data-v0", BOX, ACTION, episodes, env_spec=json.dumps(SPEC))


def test_the_fingerprint_of_images_is_that_of_the_file(tmp_path):
    """Images are hashed in the layout of the file, as in the fingerprints of existing checkpoints."""
    camera = np.random.default_rng(0).integers(0, 256, (3, 16, 24, 3), np.uint8)
    space = spaces.Dict({"camera": spaces.Box(0, 255, (16, 24, 3), np.uint8)})
    actions = np.zeros((2, 2), np.float32)
    path = write(tmp_path / "data-v0", space, ACTION, [({"camera": camera}, actions, True)])
    stored = np.ascontiguousarray(minari.MinariDataset(path / "data")[0].observations["camera"])
    number = zlib.crc32(np.array([2]).tobytes())
    for _ in range(2):  # the first episode is the last
        for array in (stored, actions, np.array([0.0, 0.5], np.float32)):
            number = zlib.crc32(array.tobytes(), number)
    assert load_dataset(path).fingerprint().startswith(f"{number:08x}-")


@pytest.mark.parametrize("storage", STORAGES)
def test_vectors_go_into_a_table(storage, tmp_path):
    episodes = [(*vectors(4), True), (*vectors(2, first=3.0), False)]
    path = write(tmp_path / "data-v0", BOX, ACTION, episodes, storage, ref_min_score=1.0, ref_max_score=5.0)
    dataset = load_dataset(path)
    assert dataset.name == "toy/data-v0"
    assert dataset.lengths.tolist() == [4, 2]
    assert dataset.table.rows.shape == (8, 3 + 2 + 2)  # an episode has one row more than transitions
    assert dataset.observation_space == spaces.Box(-10, 10, (3,), np.float32)
    assert dataset.reference_returns == (1.0, 5.0)
    assert dataset.score(3.0) == 50.0
    assert dataset.env_id is None
    theirs = minari.MinariDataset(path / "data")
    for index in range(2):
        ours, their = dataset.episode(index), theirs[index]
        np.testing.assert_array_equal(ours.observation, their.observations.astype(np.float32))
        np.testing.assert_array_equal(ours.action, their.actions)
        np.testing.assert_array_equal(ours.reward, their.rewards.astype(np.float32))
        np.testing.assert_array_equal(ours.terminated, their.terminations)
        np.testing.assert_array_equal(ours.truncated, their.truncations)


@pytest.mark.parametrize("storage", STORAGES)
def test_named_streams_and_pictures_stream(storage, tmp_path):
    """Minari keeps the large picture as JPEG, the small one as it is; a Tuple's parts are named by their place."""
    observation_space = spaces.Dict(
        {
            "camera": spaces.Box(0, 255, (48, 32, 3), np.uint8),
            "grid": spaces.Box(0, 255, (4, 5), np.uint8),
            "pair": spaces.Tuple([spaces.Discrete(3, start=1), spaces.Box(-1, 1, (2,), np.float32)]),
            "instruction": spaces.Text(20, charset="abcdefghijklmnopqrstuvwxyz "),
        }
    )
    length = 3
    camera = np.random.default_rng(0).integers(0, 256, (length + 1, 48, 32, 3), np.uint8)
    grid = np.arange((length + 1) * 20, dtype=np.uint8).reshape(-1, 4, 5)
    pair = (np.array([1, 2, 3, 1]), np.linspace(-1, 1, 8, dtype=np.float32).reshape(4, 2))
    words = ["open the drawer", "close it", "", "done"]
    observations = {"camera": camera, "grid": grid, "pair": pair, "instruction": words}
    path = write(
        tmp_path / "data-v0", observation_space, spaces.Discrete(4), [(observations, np.arange(3), True)], storage
    )
    with_minari = minari.MinariDataset(path / "data")[0]
    dataset = load_dataset(path)
    assert dataset.table is None
    assert list(dataset.observation_space) == ["camera", "grid", "instruction", "pair/0", "pair/1"]
    episode = dataset.episode(0)
    # Deft has channels first, the file has them last.
    assert dataset.observation_space["camera"].shape == (3, 48, 32)
    images = episode.observation["camera"].transpose(0, 2, 3, 1)
    np.testing.assert_array_equal(images, with_minari.observations["camera"])
    assert abs(images.astype(int) - camera).max() > 0  # JPEG loses something
    np.testing.assert_array_equal(episode.observation["grid"], grid)
    assert episode.observation["pair/0"].tolist() == [0, 1, 2, 0]
    np.testing.assert_array_equal(episode.observation["pair/1"], pair[1])
    assert [decode_text(row) for row in episode.observation["instruction"]] == words
    assert episode.action.tolist() == [0, 1, 2]
    assert episode.action.dtype == np.int64
    for name, space in dataset.observation_space.items():
        assert episode.observation[name].dtype == space.dtype
        assert episode.observation[name].shape == (4, *space.shape)
    dataset.close()


def test_discrete_actions_of_vectors_go_into_the_table(tmp_path):
    observations, _ = vectors(3)
    dataset = load_dataset(
        write(tmp_path / "data-v0", BOX, spaces.Discrete(3, start=7), [(observations, np.array([9, 7, 8]), True)])
    )
    assert dataset.table.action[:3, 0].tolist() == [2, 0, 1]
    assert dataset.episode(0).action.tolist() == [2, 0, 1]


def test_the_environment_is_the_one_to_evaluate_in(vector_dataset):
    dataset = load_dataset(vector_dataset)
    assert (dataset.env_id, dataset.env_kwargs) == ("Hopper-v5", {"xml_file": "hopper.xml"})
    change_metadata(vector_dataset, eval_env_spec=json.dumps({**SPEC, "id": "Walker2d-v5"}))
    assert load_dataset(vector_dataset).env_id == "Walker2d-v5"


def test_the_folder_within_and_the_file_are_the_dataset_too(vector_dataset):
    for path in (vector_dataset, vector_dataset / "data", vector_dataset / "data" / "main_data.hdf5"):
        assert load_dataset(path).lengths.tolist() == [4, 2]
    assert not matches(vector_dataset.parent)


def test_metadata_in_the_file_as_before_minari_0_5(vector_dataset):
    metadata = vector_dataset / "data" / "metadata.json"
    with h5py.File(vector_dataset / "data" / "main_data.hdf5", "a") as file:
        file.attrs.update(json.loads(metadata.read_text()))
    metadata.unlink()
    assert load_dataset(vector_dataset).lengths.tolist() == [4, 2]


def test_spaces_that_are_not_written_are_the_environments(tmp_path):
    observations = np.zeros((3, 4), np.float32)
    space = spaces.Box(-1, 1, (4,), np.float32)
    path = write(tmp_path / "data-v0", space, spaces.Discrete(2), [(observations, np.array([0, 1]), True)])
    change_metadata(path, observation_space=None, env_spec=json.dumps({"id": "CartPole-v1"}))
    assert load_dataset(path).observation_space.high[0] == pytest.approx(4.8)  # CartPole's own bound


def test_an_id_is_found_in_minaris_folder(vector_dataset, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(vector_dataset.parent.parent))
    assert load_dataset(f"{vector_dataset.parent.name}/data-v0").lengths.tolist() == [4, 2]
    with pytest.raises(InputError, match="minari download no/such-v0"):
        load_dataset("no/such-v0")


def test_a_dataset_that_is_not_here_is_downloaded_where_asked(vector_dataset, tmp_path, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "store"))

    def fetch(dataset_id):
        if dataset_id != "toy/data-v0":
            raise ValueError("Couldn't find any version\nof it")
        shutil.copytree(vector_dataset, tmp_path / "store" / dataset_id)

    monkeypatch.setattr(minari, "download_dataset", fetch)
    with pytest.raises(InputError, match="download=True"):
        load_dataset("toy/data-v0")
    assert load_dataset("toy/data-v0", download=True).lengths.tolist() == [4, 2]
    with pytest.raises(InputError, match="cannot be downloaded: ValueError: Couldn't find any version of it"):
        load_dataset("toy/other-v0", download=True)


# -------------------------------------------------------------------------------------------------------------- damage


def change_metadata(path, **changes):
    file = path / "data" / "metadata.json"
    metadata = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({name: value for name, value in metadata.items() if value is not None}))


def change_file(path, key, values):
    with h5py.File(path / "data" / "main_data.hdf5", "a") as file:
        del file[key]
        if values is not None:
            file[key] = values


@pytest.mark.parametrize(
    ("key", "values", "complaint"),
    [
        ("episode_1", None, "episode_1, field rewards: is missing"),
        ("episode_1/actions", None, "episode_1, field actions: is missing"),
        (
            "episode_0/observations",
            np.zeros((4, 3)),
            r"episode_0, field observations: has shape \(4, 3\), not \(5, 3\)",
        ),
        ("episode_0/actions", np.zeros((4, 1)), r"episode_0, field actions: has shape \(4, 1\), not \(4, 2\)"),
        ("episode_0/truncations", np.zeros(3, bool), r"episode_0, field truncations: has shape \(3,\), not \(4,\)"),
        ("episode_0/rewards", np.array([0, 1, np.nan, 1]), "episode_0, field rewards: row 2 is not a finite number"),
        ("episode_1/observations", np.full((3, 3), np.inf), "episode_1, field observations: row 0 is not a finite"),
    ],
)
def test_damage_is_named_by_file_episode_and_field(key, values, complaint, vector_dataset):
    change_file(vector_dataset, key, values)
    with pytest.raises(InputError, match=rf"main_data\.hdf5: damaged at {complaint}"):
        load_dataset(vector_dataset)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"total_episodes": None}, "field total_episodes: is missing"),
        ({"observation_space": '{"type": "Box"}'}, "field observation_space: is not a space"),
        ({"observation_space": {"type": "Box"}}, "is not a space: {'type': 'Box'} is not text"),
        ({"observation_space": "[1]"}, r"is not a space: \[1\] is not an object with a type"),
        ({"observation_space": '{"type": "Dict", "subspaces": []}'}, r"subspaces of a Dict are \[\]"),
        ({"observation_space": '{"type": "Dict", "subspaces": {"a": 1.5}}'}, "1.5 is not an object with a type"),
        ({"action_space": '{"type": "Discrete", "n": "3"}'}, "{'n': '3'} is not a valid Discrete"),
        ({"action_space": '{"type": "Discrete", "n": 1e18}'}, "a space of .* numbers is not supported"),
        (
            {"action_space": '{"type": "Box", "shape": [[2]], "dtype": "f4", "low": 0, "high": 1}'},
            "is not a valid Box",
        ),
        ({"action_space": '{"type": "Box", "shape": [2], "dtype": "O", "low": 0, "high": 1}'}, "is not a valid Box"),
        ({"dataset_id": ["a"]}, r"field dataset_id: \['a'\] is not text"),
        ({"total_episodes": -1}, "field total_episodes: is missing or not a whole number"),
        ({"total_episodes": 10**400}, "field total_episodes: is missing or not a whole number"),
        ({"env_spec": "[]"}, r"field env_spec: is not an object"),
        (
            {"env_spec": '{"id": "CartPole-v1", "kwargs": 3}'},
            "field env_spec: .* is not an object with an id and kwargs",
        ),
        ({"ref_min_score": "low", "ref_max_score": 3}, r"\['low', 3\] are not two reference scores"),
        ({"observation_space": '{"type": "Graph"}'}, "observation_space: a Graph space is not supported"),
        ({"action_space": '{"type": "Tuple", "subspaces": []}'}, "actions of a Tuple space are not supported"),
        ({"observation_space": None, "env_spec": None}, "is missing, and no environment is named"),
        ({"observation_space": None, "env_spec": '{"id": "Nowhere-v0"}'}, "Nowhere-v0, .*cannot be created"),
        ({"env_spec": "{"}, "field env_spec: is not valid JSON"),
        ({"data_format": "zarr"}, "has the storage format 'zarr'"),
        ({"total_episodes": 3}, "damaged at episode_2, field rewards: is missing"),
        ({"total_episodes": 0}, "dataset toy/data-v0 is empty"),
    ],
)
def test_metadata_that_cannot_be_used(changes, complaint, vector_dataset):
    change_metadata(vector_dataset, **changes)
    with pytest.raises(InputError, match=complaint) as error:
        load_dataset(vector_dataset)
    assert "\n" not in str(error.value)
    assert "Error" not in str(error.value)


def test_files_cut_short(vector_dataset):
    file = vector_dataset / "data" / "main_data.hdf5"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(InputError, match=r"main_data\.hdf5: cannot be read as HDF5"):
        load_dataset(vector_dataset)
    metadata = vector_dataset / "data" / "metadata.json"
    metadata.write_bytes(metadata.read_bytes()[:-20])
    with pytest.raises(InputError, match=r"metadata\.json: damaged"):
        load_dataset(vector_dataset)


@pytest.mark.parametrize("storage", ["arrow", "parquet"])
def test_damaged_tables(storage, tmp_path):
    path = write(tmp_path / "data-v0", BOX, ACTION, [(*vectors(4), True), (*vectors(2), True)], storage)
    (part,) = (path / "data" / "1").glob(f"part-*.{storage}")
    part.write_bytes(part.read_bytes()[:100])
    with pytest.raises(InputError, match="damaged at episode_1, field observations: cannot be read"):
        load_dataset(path)
    (path / "data" / "0" / "metadata.json").unlink()
    with pytest.raises(InputError, match="damaged at episode_0, field total_steps: the file is missing"):
        load_dataset(path)


def test_a_damaged_picture(tmp_path):
    space = spaces.Box(0, 255, (32, 32, 3), np.uint8)
    path = write(tmp_path / "data-v0", space, ACTION, [(np.zeros((3, 32, 32, 3), np.uint8), np.zeros((2, 2)), True)])
    encoded = io.BytesIO()
    Image.fromarray(np.zeros((32, 32, 3), np.uint8)).save(encoded, "JPEG")
    whole = np.frombuffer(encoded.getvalue(), np.uint8)
    change_file(path, "episode_0/observations", np.stack([whole, np.zeros_like(whole), whole]))
    dataset = load_dataset(path)
    with pytest.raises(InputError, match="episode_0, field observations: row 1 is not an image"):
        dataset.episode(0)


# -------------------------------------------------------------------------------------------------------------- memory

PEAK = """
import sys
from pathlib import Path
from deft.data.datasets import load_dataset
import deft.data.datasets.minari, h5py

def status(name):
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return 1024 * int(line.split()[1])

load_dataset(sys.argv[1])  # what the libraries take for themselves
Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
before = status("VmRSS")
dataset = load_dataset(sys.argv[2])
print((status("VmHWM") - before) / dataset.table.rows.nbytes)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the peak from /proc")
def test_loading_peaks_below_one_and_a_half_times_the_table(tmp_path):
    space = spaces.Box(-1, 1, (120,), np.float32)
    ends = np.zeros(1000, bool)
    episode = Episode(np.ones((1001, 120), np.float32), np.zeros((1000, 2), np.float32), np.zeros(1000), ends, ends)
    small, large = tmp_path / "small-v0", tmp_path / "large-v0"
    for path, count in ((small, 1), (large, 80)):  # 80 · 1001 · 124 · 4 bytes = 40 MB
        with Recording(path, MinariFiles(path)) as recording:
            recording.set_spaces(space, ACTION)
            for _ in range(count):
                recording.add(episode)
    command = [sys.executable, "-c", PEAK, str(small), str(large)]
    peak = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert 0.9 < peak < 1.5
