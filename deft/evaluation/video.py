"""Rendered frames to an MP4 that browsers play (H.264, yuv420p); used by evaluation and by the trainers' samples."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile

import numpy as np

from deft.errors import InputError, RunError
from deft.ownership import record


def write_video(frames: Sequence[np.ndarray], path: Path, fps: int = 30) -> Path:
    """Write RGB frames (uint8 [height, width, 3], all of one size) as `path`, whole or not at all.

    H.264 needs even sizes: an odd one is padded by repeating the last row or column. Frames without any content are
    rejected, since they mean that rendering does not work.
    """
    path = Path(path)
    _check_frames(frames, path)
    if fps < 1:
        raise InputError(f"fps is {fps}; a video needs at least 1")
    temporary = path.with_name(f".{path.stem}.partial.mp4")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _encode(frames, temporary, fps)
        os.replace(temporary, path)
        record(path)
    except OSError as error:
        raise RunError(f"cannot write the video {path}: {error.strerror or error}") from error
    finally:
        with suppress(OSError):
            temporary.unlink()
    return path


def _encode(frames: Sequence[np.ndarray], path: Path, fps: int) -> None:
    """Pipe the frames through ffmpeg; OSError when it fails."""
    from imageio_ffmpeg import get_ffmpeg_exe

    height, width = frames[0].shape[:2]
    padding = ((0, height % 2), (0, width % 2), (0, 0))
    size = f"{width + width % 2}x{height + height % 2}"
    given = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", size, "-r", str(fps), "-i", "-"]
    # faststart puts the index first: a browser plays it before it is wholly loaded.
    wanted = ["-c:v", "libx264", "-crf", "18", "-pix_fmt", "yuv420p", "-movflags", "+faststart", "-f", "mp4"]
    with TemporaryFile() as errors:
        command = [get_ffmpeg_exe(), "-y", "-v", "error", *given, *wanted, str(path)]
        ffmpeg = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=errors, stderr=errors)
        assert ffmpeg.stdin is not None
        try:
            with suppress(BrokenPipeError), ffmpeg.stdin as pipe:  # a broken pipe: ffmpeg failed and reports why
                for frame in frames:
                    pipe.write(np.pad(frame, padding, mode="edge").tobytes())
        finally:
            status = ffmpeg.wait()
        if status != 0:
            errors.seek(0)
            reasons = errors.read().decode(errors="replace").splitlines()
            raise OSError(f"ffmpeg: {reasons[-1] if reasons else f'exit status {status}'}")


def _check_frames(frames: Sequence[np.ndarray], path: Path) -> None:
    if not len(frames):
        raise InputError(f"no frames for the video {path}: render at least one")
    for index, frame in enumerate(frames):
        if frame.dtype != np.uint8 or frame.ndim != 3 or frame.shape[2] != 3 or frame.shape != frames[0].shape:
            raise InputError(
                f"frame {index} of the video {path} is {frame.dtype} {frame.shape};"
                f" every frame must be uint8 (height, width, 3) of one size, the first is {frames[0].shape}"
            )
    if all((frame == frame[0, 0]).all() for frame in frames):
        raise RunError(f"all frames of the video {path} are blank: rendering does not work here (check MUJOCO_GL)")
