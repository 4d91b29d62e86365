"""A written video is read back: its size, its length and its pictures."""

from __future__ import annotations

from pathlib import Path

import imageio_ffmpeg
import numpy as np
import pytest

from deft.errors import InputError, RunError
from deft.evaluation.video import write_video


def moving_frames(count: int, height: int, width: int) -> list[np.ndarray]:
    """A smooth picture whose blue grows by 10 a frame."""
    rows, columns = np.mgrid[:height, :width]
    channels = (255 * columns // width, 255 * rows // height)
    return [np.stack([*channels, np.full_like(rows, 10 * index)], -1).astype(np.uint8) for index in range(count)]


def read_video(path: Path) -> tuple[dict[str, object], np.ndarray]:
    reader = imageio_ffmpeg.read_frames(str(path))
    meta = next(reader)
    width, height = meta["size"]
    return meta, np.stack([np.frombuffer(data, np.uint8).reshape(height, width, 3) for data in reader])


@pytest.mark.parametrize(("height", "width"), [(64, 96), (63, 97), (30, 50)])
def test_video_reads_back_as_written(tmp_path: Path, height: int, width: int) -> None:
    frames = moving_frames(12, height, width)
    path = write_video(frames, tmp_path / "videos" / "episode.mp4", fps=20)
    meta, read = read_video(path)
    assert (meta["codec"], meta["fps"]) == ("h264", 20.0)
    assert str(meta["pix_fmt"]).startswith("yuv420p")  # what browsers play
    assert read.shape == (12, height + height % 2, width + width % 2, 3)
    expected = np.pad(np.stack(frames).astype(int), ((0, 0), (0, height % 2), (0, width % 2), (0, 0)), mode="edge")
    error = np.abs(read - expected)
    assert (
        max(error.mean(), error[:, -1].mean(), error[:, :, -1].mean()) < 4
    )  # of 255: the loss of 4:2:0 and of the codec; one frame off would be 10 / 3 in blue alone
    neighbour = np.abs(read[1:, ..., 2] - expected[:-1, ..., 2]).mean(axis=(1, 2))
    assert neighbour.min() > 5  # and the frames are in order
    assert [item.name for item in path.parent.iterdir()] == ["episode.mp4"]


def test_one_frame_is_a_video(tmp_path: Path) -> None:
    _, read = read_video(write_video(moving_frames(1, 32, 32), tmp_path / "one.mp4"))
    assert len(read) == 1


def test_frames_that_cannot_be_written(tmp_path: Path) -> None:
    path = tmp_path / "x.mp4"
    frame = moving_frames(1, 8, 8)[0]
    with pytest.raises(InputError, match="no frames"):
        write_video([], path)
    with pytest.raises(InputError, match=r"frame 0 .* is float64 \(8, 8, 3\)"):
        write_video([frame / 255], path)
    with pytest.raises(InputError, match=r"frame 1 .* is uint8 \(6, 8, 3\)"):
        write_video([frame, frame[:6]], path)
    with pytest.raises(InputError, match="fps is 0"):
        write_video([frame], path, fps=0)
    assert list(tmp_path.iterdir()) == []


def test_blank_frames_mean_that_rendering_is_broken(tmp_path: Path) -> None:
    blank = [np.full((8, 8, 3), color, np.uint8) for color in ((0, 0, 0), (10, 20, 30))]
    with pytest.raises(RunError, match="blank: rendering does not work"):
        write_video(blank, tmp_path / "x.mp4")
    write_video([*blank, moving_frames(1, 8, 8)[0]], tmp_path / "x.mp4")  # some content is enough


def test_a_failed_write_says_so_and_keeps_the_earlier_video(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    frames = moving_frames(3, 256, 256)  # more than a pipe holds: the failure breaks it
    path = write_video(frames, tmp_path / "x.mp4")
    before = path.read_bytes()
    failing = tmp_path / "ffmpeg"
    failing.write_text(
        "#!/bin/sh\nfor last; do :; done\necho half > $last\necho 'No space left on device' >&2\nexit 1\n"
    )
    failing.chmod(0o755)
    monkeypatch.setattr(imageio_ffmpeg, "get_ffmpeg_exe", lambda: str(failing))
    with pytest.raises(RunError, match=r"cannot write the video .*x\.mp4: ffmpeg: No space left on device"):
        write_video(frames, path)
    assert path.read_bytes() == before
    assert sorted(item.name for item in tmp_path.iterdir()) == ["ffmpeg", "x.mp4"]
    assert capfd.readouterr().err == ""
    with pytest.raises(RunError, match=r"cannot write the video .*: File exists"):
        write_video(frames, failing / "x.mp4")
