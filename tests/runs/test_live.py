import io
import json
import os
import time

import numpy as np
import pytest
import torch
from PIL import Image

from deft import schema
from deft.runs import live
from deft.runs.live import LiveFiles, camera_images, instructions, mosaic


def count_of_writes(folder, monkeypatch):
    written = []
    monkeypatch.setattr(live, "write_json", lambda content, path: written.append(content))
    return written


def test_nothing_is_written_between_intervals_or_without_a_viewer(tmp_path, monkeypatch):
    written = count_of_writes(tmp_path, monkeypatch)
    observed = []
    clock = [100.0]
    monkeypatch.setattr(live.time, "monotonic", lambda: clock[0])
    files = LiveFiles(tmp_path, lambda: observed.append(1), "steps")
    files.start(0, 1000)
    assert len(written) == 1
    for now in (102.0, 104.5, 107.0):
        clock[0] = now
        files.update(int(now), 1000)
    assert (len(written), len(observed)) == (1, 0)  # nobody looks
    (tmp_path / "live" / "viewer").touch()
    for now in (109.5, 110.0, 111.0, 111.6):
        clock[0] = now
        files.update(int(now), 1000)
    assert (len(written), len(observed)) == (3, 2)  # at 109.5 and 111.6
    gone = time.time() - live.ABSENCE - 1
    os.utime(tmp_path / "live" / "viewer", (gone, gone))
    clock[0] = 120.0
    files.update(120, 1000)
    assert len(written) == 3


def test_the_rate_is_over_the_last_minute(tmp_path, monkeypatch):
    written = count_of_writes(tmp_path, monkeypatch)
    clock = [0.0]
    monkeypatch.setattr(live.time, "monotonic", lambda: clock[0])
    files = LiveFiles(tmp_path, lambda: None, "steps")
    files.start(0, 1000)
    (tmp_path / "live" / "viewer").touch()
    for number in range(1, 61):  # 10 steps a second for a minute, then 20
        clock[0] = 2.0 * number
        files.update(20 * number + max(0, 20 * (number - 30)), 5000)
    assert written[-1]["rate"] == pytest.approx(20.0, rel=0.02)


def test_slow_writes_are_rarer(tmp_path, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(live.time, "monotonic", lambda: clock[0])

    def slow():
        clock[0] += 0.5

    files = LiveFiles(tmp_path, slow, "steps")
    files.start(0, 1000)
    (tmp_path / "live" / "viewer").touch()
    clock[0] = 10.0
    files.update(1, 1000)
    assert files._next == 10.0 + 0.5 / live.MOST_TIME  # half a second is one hundredth of 50


def test_a_removed_directory_is_left_alone_and_a_failure_warns_once(tmp_path, caplog):
    files = LiveFiles(tmp_path / "run", lambda: None, "steps")
    files.start(0, 10)
    assert not (tmp_path / "run").exists()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "live").write_text("a file")
    files.start(0, 10)
    files.start(0, 10)
    assert len([record for record in caplog.records if "live view" in record.message]) == 1


def test_a_strange_observation_does_not_end_the_training(tmp_path, caplog):
    observation = {"camera": np.zeros((2, 3, 0, 0), np.uint8)}
    files = LiveFiles(tmp_path, lambda: observation, "steps")
    files.start(0, 10)
    (tmp_path / "live" / "viewer").touch()
    files.update(1, 10)
    assert "the live view is no longer written" in caplog.text
    assert instructions({schema.INSTRUCTION: np.full((1, 3), 255, np.uint8)}) == ["\ufffd" * 3]


def test_images_of_arrays_tensors_and_histories():
    first = np.arange(2 * 3 * 16 * 16, dtype=np.uint8).reshape(2, 3, 16, 16)
    observation = {
        "head_rgb": first,
        "wrist_rgb": torch.from_numpy(np.stack([first, 255 - first], 1)),  # [N, H, 3, h, w]: the newest is the last
        "last": np.moveaxis(first, 1, -1),
        "grey": np.stack([first[:, 0]] * 4, 1),  # a stack of four grey frames
        "state": np.zeros((2, 5), np.float32),
        schema.INSTRUCTION: np.stack([schema.encode_text("push", 8)] * 2),
    }
    found = camera_images(observation)
    assert list(found) == ["head_rgb", "wrist_rgb", "last", "grey"]
    np.testing.assert_array_equal(found["head_rgb"], np.moveaxis(first, 1, -1))
    np.testing.assert_array_equal(found["wrist_rgb"], 255 - np.moveaxis(first, 1, -1))
    np.testing.assert_array_equal(found["last"], np.moveaxis(first, 1, -1))
    np.testing.assert_array_equal(found["grey"], np.repeat(first[:, 0, :, :, None], 3, -1))
    assert instructions(observation) == ["push", "push"]
    assert camera_images(np.zeros((2, 4), np.float32)) == {}
    assert instructions(first) == []


def test_large_images_and_many_environments_are_reduced():
    found = camera_images(np.zeros((100, 3, 480, 640), np.uint8))["camera"]
    # 640 pixels at a stride of 4 are 160; 480 are 120.
    assert found.shape == (live.MOST_ENVS, 120, 160, 3)


def test_only_the_first_environments_leave_the_device():
    class Tensor:
        """Stands for a CUDA tensor: what is copied from it is counted."""

        dtype, ndim = torch.uint8, 4

        def __init__(self, rows):
            self.rows = rows

        def __getitem__(self, key):
            return Tensor(self.rows[key])

        def cpu(self):
            copied.append(len(self.rows))
            return torch.from_numpy(self.rows)

    copied: list[int] = []
    camera_images({"head_rgb": Tensor(np.zeros((4096, 3, 16, 16), np.uint8))})
    assert copied == [live.MOST_ENVS]


def test_mosaic_has_a_row_for_each_camera():
    red = np.zeros((3, 16, 16, 3), np.uint8)
    red[..., 0] = 250
    blue = np.zeros((3, 8, 8, 3), np.uint8)
    blue[..., 2] = 250
    picture, cameras = mosaic({"head": red, "wrist": blue})
    image = np.asarray(Image.open(io.BytesIO(picture)))
    assert image.shape == (24, 48, 3)
    assert cameras[1] == {"name": "wrist", "top": 16, "width": 8, "height": 8, "count": 3}
    assert image[4, 40, 0] > 200 > image[4, 40, 2]
    assert image[20, 20, 2] > 200 > image[20, 20, 0]


def test_progress_is_json_that_names_the_process(tmp_path):
    files = LiveFiles(tmp_path, lambda: None, "episodes")
    files.start(3, 10)
    found = json.loads((tmp_path / "live" / "progress.json").read_text())
    assert (found["process"], found["step"], found["total"], found["unit"]) == (os.getpid(), 3, 10, "episodes")
