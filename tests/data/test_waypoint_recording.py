"""The file of recorded driving."""

import numpy as np
import pytest

from deft.data.waypoint_recording import WaypointRecording
from deft.errors import InputError, RunError


def recording(count: int = 3) -> WaypointRecording:
    generator = np.random.default_rng(0)
    return WaypointRecording(
        camera=generator.integers(0, 256, (count, 3, 4, 4), np.uint8),
        motion=generator.random((count, 2)).astype(np.float32),
        waypoints=generator.random((count, 5, 2)).astype(np.float32),
        episode=np.arange(count),
        about={"env": "toy", "seed": 3},
    )


def test_a_recording_comes_back_from_its_file(tmp_path):
    made, path = recording(), tmp_path / "new" / "drive.npz"
    made.save(path)
    found = WaypointRecording.load(path)
    assert len(found) == 3
    assert found.about == made.about
    for name in ("camera", "motion", "waypoints", "episode"):
        assert np.array_equal(getattr(found, name), getattr(made, name))
    assert [entry.name for entry in path.parent.iterdir()] == ["drive.npz"]


def test_a_recording_that_cannot_be_written_leaves_no_file(tmp_path):
    (tmp_path / "taken").write_text("a file, not a folder")
    with pytest.raises(RunError, match=r"drive\.npz: cannot be written"):
        recording().save(tmp_path / "taken" / "drive.npz")
    assert [entry.name for entry in tmp_path.iterdir()] == ["taken"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: path.unlink(), "does not exist; `deft collect waypoints"),
        (lambda path: path.write_bytes(path.read_bytes()[:200]), "is damaged, or not a waypoint recording"),
        (lambda path: np.savez(path, camera=np.zeros(1)), "not a waypoint recording: it has no motion"),
        (lambda path: np.savez(path, camera=np.array([{}], object)), "is damaged, or not"),  # a pickle is not loaded
    ],
)
def test_other_files_are_rejected(change, message, tmp_path):
    path = tmp_path / "drive.npz"
    recording().save(path)
    change(path)
    with pytest.raises(InputError, match=message):
        WaypointRecording.load(path)


def test_arrays_of_different_lengths_are_rejected(tmp_path):
    made = recording()
    made.motion = made.motion[:2]
    made.save(tmp_path / "drive.npz")
    with pytest.raises(InputError, match=r"motion has shape \(2, 2\), for 3 decisions"):
        WaypointRecording.load(tmp_path / "drive.npz")


def test_a_directory_is_not_a_recording(tmp_path):
    with pytest.raises(InputError, match=r"is a directory, not a waypoint recording; give the \.npz file"):
        WaypointRecording.load(tmp_path)
