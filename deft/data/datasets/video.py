"""Random access to the exact frames of video files, for the LeRobot reader.

A file is indexed once (the time of every frame, and the key frames at which decoding can start) and stays open.
Decoding starts at the nearest key frame, or continues where it stopped. Decoded frames are cached up to a limit.
"""

from __future__ import annotations

import os
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import chain
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np

from deft.data.datasets.dataset import import_optional
from deft.errors import InputError
from deft.schema import channels_first

if TYPE_CHECKING:
    import av

MAX_OPEN_FILES = 64
DEFAULT_CACHE_BYTES = 2**30
SHORT_GROUP = 8  # number of frames from one key frame to the next


class FrameCache:
    """A thread-safe cache of arrays with a limit in bytes; the least recently used arrays are removed first."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.num_bytes = 0
        self._arrays: OrderedDict[Hashable, np.ndarray] = OrderedDict()
        self._lock = Lock()

    def get(self, key: Hashable) -> np.ndarray | None:
        """Return the array, or None if it is not in the cache."""
        with self._lock:
            array = self._arrays.get(key)
            if array is not None:
                self._arrays.move_to_end(key)
            return array

    def put(self, key: Hashable, array: np.ndarray) -> None:
        """Add an array; one that is larger than the limit is not added."""
        with self._lock:
            if key in self._arrays or array.nbytes > self.budget_bytes:
                return
            self._arrays[key] = array
            self.num_bytes += array.nbytes
            while self.num_bytes > self.budget_bytes:
                self.num_bytes -= self._arrays.popitem(last=False)[1].nbytes

    def clear(self) -> None:
        """Remove all arrays."""
        with self._lock:
            self._arrays.clear()
            self.num_bytes = 0


class VideoFile:
    """One open video, of which any frame can be decoded.

    `times` are those of its frames in presentation order, in seconds, with the resolution `tick`; `size` is the height
    and width in the file's header. It must be used by one thread at a time. `same` is another object for the same
    file, whose index is reused.
    """

    def __init__(self, path: Path, same: VideoFile | None = None) -> None:
        pyav = import_av()
        self.path = path
        try:
            # The format is given: FFmpeg would also open playlists, which can name any file.
            self._container = pyav.open(str(path), format=_container_format(path))
        except (pyav.FFmpegError, OSError) as error:
            raise InputError(f"{path}: cannot be opened as a video: {_reason(error)}") from None
        try:
            self._stream = self._container.streams.video[0]
            # One thread: for small frames several threads are slower, and windows are decoded in parallel.
            self._stream.thread_type = "NONE"
            self._codec = self._stream.codec_context
            self._index: _Index = same._index if same is not None else _Index(self._container, self._stream)
        except (pyav.FFmpegError, OSError, IndexError) as error:
            self._container.close()
            raise InputError(f"{path}: has no readable video frames: {_reason(error)}") from None
        self.times, self.tick, self.num_frames = self._index.times, self._index.tick, len(self._index.shown)
        self.size: tuple[int, int] = self._codec.height, self._codec.width
        self.reformatter = pyav.video.reformatter.VideoReformatter()
        self._packets: Iterator[av.Packet] = iter(())
        self._pending: deque[av.VideoFrame] = deque()
        self._next: int | None = None  # the frame that the decoder returns next, if it is running

    def group(self, number: int) -> range:
        """Return the frames from the key frame at or before this one up to the next key frame."""
        index, key = self._index, self._index.key_before(number)
        first = int(np.searchsorted(index.shown, index.starts[key]))
        after = index.starts[key + 1] if key + 1 < len(index.starts) else index.shown[-1] + 1
        return range(min(first, number), int(np.searchsorted(index.shown, after)))

    def decode(self, numbers: Sequence[int]) -> Iterator[tuple[int, av.VideoFrame]]:
        """Yield the frames of these numbers (ascending, without repeats), each with its number."""
        pyav = import_av()
        if not numbers:
            return
        wanted, last = set(numbers), numbers[-1]
        if numbers[0] < 0 or last >= self.num_frames:
            raise InputError(f"{self.path}: frame {last} was requested; the video has {self.num_frames} frames")
        try:
            key = self.group(numbers[0]).start
            if self._next is None or not key <= self._next <= numbers[0]:
                self._seek(numbers[0])
            for number, frame in self._run(wanted, last):
                wanted.discard(number)
                yield number, frame
                if not wanted:
                    return
        except (pyav.FFmpegError, OSError) as error:
            self._next = None
            raise InputError(f"{self.path}: frame {min(wanted)} cannot be decoded: {_reason(error)}") from None
        raise InputError(f"{self.path}: frame {min(wanted)} is in the file's index but cannot be decoded")

    def _seek(self, number: int) -> None:
        """Move the decoder to the key frame at or before a frame."""
        key = self._index.key_before(number)
        # Seek to the presentation time. If that leads past the key frame, the decoding time, which is earlier, leads
        # to the key frame or before it.
        for start in (int(self._index.starts[key]), self._index.start_dts[key]):
            self._container.seek(start, stream=self._stream, backward=True)
            packets = self._container.demux(self._stream)
            first = next(packets, None)
            if first is not None and first.pts is not None and first.pts <= self._index.starts[key]:
                break
        self._packets = chain([] if first is None else [first], packets)
        self._pending.clear()
        self._next = self.group(number).start

    def _run(self, wanted: set[int], last: int) -> Iterator[tuple[int, av.VideoFrame]]:
        """Continue decoding and yield the wanted frames, until the file ends."""
        # A decoder delays frames to return them in order. If key frames are close, flushing it and restarting at the
        # next call is cheaper than decoding until it returns them.
        unsent, drains, is_drained = set(wanted), len(self.group(last)) <= SHORT_GROUP, False
        while True:
            while self._pending:
                frame = self._pending.popleft()
                number = self._index.numbers.get(frame.pts)
                if number is None:
                    continue
                self._next = None if is_drained else number + 1
                if number in wanted:
                    yield number, frame
            packet = None if is_drained else next(self._packets, None)
            if packet is None:
                self._next = None
                return
            # Frames that no other frame refers to are only decoded if they are wanted. After the last wanted frame all
            # are decoded, so that the next call can continue here.
            number = self._index.numbers.get(packet.pts) if packet.pts is not None else None
            unneeded = number is not None and number < last and number not in wanted
            self._codec.skip_frame = "NONREF" if unneeded else "DEFAULT"
            self._pending.extend(self._codec.decode(packet))
            unsent.discard(-1 if number is None else number)
            if drains and not unsent and packet.pts is not None:
                self._pending.extend(self._codec.decode(None))
                is_drained = True

    def close(self) -> None:
        """Close the file."""
        self._packets, self._next = iter(()), None
        self._pending.clear()
        self._container.close()


class _Index:
    """The index of a file's frames, read from its packets without decoding."""

    def __init__(self, container: Any, stream: Any) -> None:
        packets = [packet for packet in container.demux(stream) if packet.pts is not None]
        # An edit list may cut off frames at the beginning: they are decoded but not presented.
        shown = sorted(packet.pts for packet in packets if not packet.is_discard)
        keys = sorted((packet.pts, packet.dts) for packet in packets if packet.is_keyframe)
        if not shown or not keys:
            raise IndexError("no frame was found")
        self.tick = float(stream.time_base)
        self.times = np.array(shown, np.float64) * self.tick
        self.shown = np.array(shown, np.int64)
        self.numbers = {pts: number for number, pts in enumerate(shown)}
        self.starts = np.array([pts for pts, _ in keys], np.int64)
        self.start_dts = [pts if dts is None else dts for pts, dts in keys]

    def key_before(self, number: int) -> int:
        """Return the key frame at which decoding must start for a frame."""
        return max(int(np.searchsorted(self.starts, self.shown[number], "right")) - 1, 0)


class _Decoders:
    """The decoders of one file: one for each thread that uses the file at the same time."""

    def __init__(self, path: Path) -> None:
        self.first = VideoFile(path)
        self.filling = Lock()  # held while a group is decoded, so that no two threads decode the same group
        self._idle = [self.first]
        self._is_closed = False
        self._lock = Lock()

    @contextmanager
    def borrow(self) -> Iterator[VideoFile]:
        """Yield a decoder that no other thread uses."""
        with self._lock:
            file = self._idle.pop() if self._idle else None
        file = file or VideoFile(self.first.path, self.first)
        try:
            yield file
        finally:
            with self._lock:
                if self._is_closed:
                    file.close()
                else:
                    self._idle.append(file)

    def close(self) -> None:
        """Close the idle decoders now, and the others when they are returned."""
        with self._lock:
            self._is_closed = True
            for file in self._idle:
                file.close()
            self._idle.clear()


class VideoReader:
    """Reads frames of many files as arrays, uint8 [3, height, width], with a limited cache of decoded frames.

    `image_size` (height, width) shrinks frames by area averaging during the color conversion. With `keep_groups`, a
    missing frame is decoded together with all frames up to the next key frame: faster if all frames fit into the cache.
    """

    def __init__(
        self,
        cache_bytes: int = DEFAULT_CACHE_BYTES,
        image_size: tuple[int, int] | None = None,
        keep_groups: bool = False,
    ) -> None:
        self.image_size = image_size
        self.keep_groups = keep_groups
        self.cache = FrameCache(cache_bytes)
        self._inherited: Any = None
        self._start_process()

    def _start_process(self) -> None:
        self._files: OrderedDict[Path, _Decoders] = OrderedDict()
        self._lock = Lock()
        self._process = os.getpid()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the settings only: another process opens and decodes the files itself."""
        return VideoReader, (self.cache.budget_bytes, self.image_size, self.keep_groups)

    def file(self, path: Path) -> VideoFile:
        """Return the file, for its times and groups; other threads may be decoding with it."""
        return self._open(path).first

    def _open(self, path: Path) -> _Decoders:
        """Return the decoders of a file; above the limit, those of the least recently used file are closed."""
        if self._process != os.getpid():
            # After a fork both processes would share file offsets. The parent's objects are kept: freeing them would
            # wait for threads that only the parent has.
            self._inherited = self._files
            self._start_process()
        with self._lock:
            if path not in self._files:
                self._files[path] = _Decoders(path)
                if len(self._files) > MAX_OPEN_FILES:
                    self._files.popitem(last=False)[1].close()
            self._files.move_to_end(path)
            return self._files[path]

    def frames(
        self, path: Path, numbers: Sequence[int] | np.ndarray, keep: bool = True, out: np.ndarray | None = None
    ) -> np.ndarray:
        """Return frames by number, in any order and with repeats: uint8 [len(numbers), 3, height, width].

        Without `keep`, decoded frames are not cached, for reading whole episodes once. The result is written to `out`
        if its shape is that of the frames.
        """
        wanted = [int(number) for number in numbers]
        found = {number: self.cache.get((path, number)) for number in set(wanted)}
        missing = sorted(number for number, frame in found.items() if frame is None)
        if missing:
            decoders, fill = self._open(path), keep and self.keep_groups
            with decoders.filling if fill else nullcontext(), decoders.borrow() as file:
                found.update(self._decode(file, missing, keep, fill))
        first = found[wanted[0]]
        assert first is not None
        shape = (len(wanted), *first.shape)
        result = out if out is not None and out.shape == shape else np.empty(shape, np.uint8)
        for row, number in enumerate(wanted):
            result[row] = found[number]
        return result

    def _decode(self, file: VideoFile, missing: list[int], keep: bool, fill: bool) -> dict[int, np.ndarray]:
        """Decode the missing frames, or with `fill` their whole groups, unless they are in the cache by now."""
        wanted = set(missing)
        if fill and missing[-1] < file.num_frames:
            wanted.update(*(file.group(number) for number in missing))
        # Another thread may have decoded some of them while this one waited.
        cached = {number: self.cache.get((file.path, number)) for number in wanted}
        found = {number: array for number, array in cached.items() if array is not None}
        for number, frame in file.decode(sorted(wanted - found.keys())):
            found[number] = self._convert(frame, file.reformatter)
            if keep:
                self.cache.put((file.path, number), found[number])
        return found

    def _convert(self, frame: av.VideoFrame, reformatter: Any) -> np.ndarray:
        """Return a frame as RGB with channels first, in the requested size."""
        height, width = self.image_size or (frame.height, frame.width)
        if width % 16 and (height, width) == (frame.height, frame.width):
            # FFmpeg's planar conversion without scaling does not write the columns past a multiple of 16.
            packed = reformatter.reformat(frame, width, height, "rgb24", threads=1).to_ndarray()
            return np.ascontiguousarray(channels_first(packed))
        # Planar output needs no transposition; its planes are green, blue, red. More threads would be slower.
        planar = reformatter.reformat(frame, width, height, "gbrp", interpolation="AREA", threads=1)
        array = np.empty((3, height, width), np.uint8)
        for channel, plane in zip((1, 2, 0), planar.planes, strict=True):
            array[channel] = np.frombuffer(plane, np.uint8).reshape(-1, plane.line_size)[:height, :width]
        return array

    def close(self) -> None:
        """Close all files and discard all frames."""
        with self._lock:
            for decoders in self._files.values():
                decoders.close()
            self._files.clear()
        self.cache.clear()


def import_av() -> Any:
    """Import PyAV, when a video is first read."""
    import_optional("av.video.reformatter", "reading a video")
    return import_optional("av", "reading a video")


def _container_format(path: Path) -> str:
    """Return FFmpeg's name of a video's container, from the first bytes of the file."""
    with open(path, "rb") as file:
        head = file.read(12)
    if head[4:8] in (b"ftyp", b"styp", b"moov", b"moof", b"mdat", b"free", b"skip", b"wide"):
        return "mov"  # and MP4
    if head[:4] == b"\x1a\x45\xdf\xa3":
        return "matroska"  # and WebM
    if head[:4] == b"RIFF" and head[8:12] == b"AVI ":
        return "avi"
    raise InputError(f"{path}: cannot be opened as a video: it is not an MP4, MOV, Matroska, WebM or AVI file")


def _reason(error: BaseException) -> str:
    """Return an error's text without the path of the file."""
    return getattr(error, "strerror", None) or str(error)
