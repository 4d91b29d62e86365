"""Videos whose frames carry their own number: every frame that is read must be the one asked for."""

import multiprocessing
import pickle
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from deft.data.datasets.video import FrameCache, VideoFile, VideoReader
from deft.errors import InputError

av = pytest.importorskip("av")

FPS, SIDE, NUM_FRAMES = 20, 64, 120
CODINGS = {
    # B-frames that refer to each other, and a key frame every 50 frames
    "long": ("libx264", {"g": "50", "bf": "3", "x264-params": "keyint=50:min-keyint=50:scenecut=0:b-pyramid=normal"}),
    # the frames shown before a key frame refer to it: decoding them needs the group before
    "open": ("libx264", {"x264-params": "keyint=25:min-keyint=25:scenecut=0:open-gop=1:bframes=3:b-adapt=0"}),
    "short": ("libx264", {"g": "2", "bf": "0"}),
    "whole": ("libx264", {"x264-params": "keyint=infinite:scenecut=0:bframes=8:b-adapt=0"}),
}


def numbered(number: int) -> np.ndarray:
    """A picture of 8 stripes that spell a number in binary, white for 1; lossy coding leaves it readable."""
    bits = (number >> np.arange(8)) & 1
    return np.repeat(np.repeat((bits * 255).astype(np.uint8)[None, :, None], SIDE // 8, 1), SIDE, 0).repeat(3, 2)


def number_of(frame: np.ndarray) -> int:
    """The number that a picture [3, h, w] spells."""
    stripes = frame.mean((0, 1)).reshape(8, -1).mean(1) > 127
    return int((stripes << np.arange(8)).sum())


def write_numbered(path, coding="long", num_frames=NUM_FRAMES, first=0):
    name, options = CODINGS[coding]
    with av.open(str(path), "w") as container:
        stream = container.add_stream(name, rate=FPS, options=options)
        stream.width = stream.height = SIDE
        stream.pix_fmt = "yuv420p"
        for number in range(first, first + num_frames):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(numbered(number), format="rgb24")))
        container.mux(stream.encode())
    return path


@pytest.fixture(scope="module", params=list(CODINGS))
def video(request, tmp_path_factory):
    return write_numbered(tmp_path_factory.mktemp("videos") / f"{request.param}.mp4", request.param)


def test_the_test_video_has_b_frames_and_long_groups(tmp_path):
    file = VideoFile(write_numbered(tmp_path / "long.mp4", "long"))
    assert file.group(0) == range(50)
    assert file.group(49) == range(50)
    assert file.group(50) == range(50, 100)
    assert file.group(119) == range(100, 120)
    with av.open(str(tmp_path / "long.mp4")) as container:
        kinds = {str(frame.pict_type).rpartition(".")[2] for frame in container.decode(video=0)}
    assert len(kinds) == 3  # I, P and B


@pytest.mark.parametrize(("cache_bytes", "keep_groups"), [(0, False), (2**20, False), (2**26, True)])
def test_random_frames_are_the_ones_asked_for(video, cache_bytes, keep_groups):
    reader = VideoReader(cache_bytes, keep_groups=keep_groups)
    rng = np.random.default_rng(0)
    for _ in range(40):
        numbers = rng.integers(0, NUM_FRAMES, 4)
        assert [number_of(frame) for frame in reader.frames(video, numbers)] == numbers.tolist()
    assert reader.cache.num_bytes <= cache_bytes


def test_windows_that_move_on_and_back_are_exact(video):
    reader = VideoReader(0)
    for start in [0, 3, 4, 40, 44, 60, 48, 116, 112, 0]:
        numbers = list(range(start, start + 4))
        assert [number_of(frame) for frame in reader.frames(video, numbers)] == numbers


def test_pixels_are_those_of_decoding_from_the_beginning(video):
    with av.open(str(video)) as container:
        frames = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]).transpose(
            0, 3, 1, 2
        )
    reader = VideoReader(0)
    for numbers in ([37, 38, 39, 40], [99, 101], [3, 3, 2], range(NUM_FRAMES)):
        assert np.array_equal(reader.frames(video, list(numbers)), frames[list(numbers)])


def test_a_frame_just_ahead_needs_no_seek(video):
    file = VideoFile(video)
    if len(file.group(0)) == 2:
        pytest.skip("key frames so close that decoding starts anew")
    list(file.decode([10, 11]))
    file._seek = None  # a call would fail
    assert [number for number, _ in file.decode([12, 14])] == [12, 14]


def test_decoding_starts_at_the_nearest_key_frame(video):
    file = VideoFile(video)
    for number in (0, 7, 26, 49, 50, 51, 74, 99, 119):
        file._seek(number)
        assert file._index.numbers[next(file._packets).pts] == file.group(number).start


def test_times_are_those_of_the_frame_rate(video):
    np.testing.assert_allclose(VideoFile(video).times, np.arange(NUM_FRAMES) / FPS, atol=1e-6)


def test_the_cache_stays_within_its_budget_and_forgets_the_oldest():
    cache = FrameCache(250)
    for number in range(3):
        cache.put(number, np.full(100, number, np.uint8))
    # 3 × 100 bytes do not fit into 250: the first one went.
    assert cache.get(0) is None
    assert cache.num_bytes == 200
    assert cache.get(1)[0] == 1  # now the latest used
    cache.put(3, np.zeros(100, np.uint8))
    assert cache.get(2) is None
    assert cache.get(1) is not None
    cache.put("large", np.zeros(300, np.uint8))
    assert cache.get("large") is None
    assert cache.num_bytes == 200


def test_a_budget_too_small_for_a_group_still_gives_exact_frames(video):
    frame_bytes = 3 * SIDE * SIDE
    reader = VideoReader(3 * frame_bytes, keep_groups=True)
    assert [number_of(frame) for frame in reader.frames(video, [7, 8, 90])] == [7, 8, 90]
    assert reader.cache.num_bytes == 3 * frame_bytes


def test_keep_off_leaves_the_cache_empty(video):
    reader = VideoReader(2**26, keep_groups=True)
    reader.frames(video, range(30), keep=False)
    assert reader.cache.num_bytes == 0


def test_threads_share_a_reader(tmp_path):
    paths = [write_numbered(tmp_path / f"{name}.mp4", name) for name in ("long", "open")]
    reader = VideoReader(2**20)
    rng = np.random.default_rng(1)
    wanted = [(paths[rng.integers(2)], rng.integers(0, NUM_FRAMES, 4)) for _ in range(60)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda pair: reader.frames(*pair), wanted))
    for (_, numbers), frames in zip(wanted, found, strict=True):
        assert [number_of(frame) for frame in frames] == numbers.tolist()


def test_more_files_than_may_be_open(tmp_path, monkeypatch):
    monkeypatch.setattr("deft.data.datasets.video.MAX_OPEN_FILES", 2)
    paths = [write_numbered(tmp_path / f"{first}.mp4", "short", 4, first) for first in (0, 10, 20)]
    reader = VideoReader(0)
    for _ in range(2):
        assert [number_of(reader.frames(path, [2])[0]) for path in paths] == [2, 12, 22]
    assert len(reader._files) == 2


def test_another_process_opens_files_for_itself(tmp_path):
    path = write_numbered(tmp_path / "long.mp4", "long")
    reader = VideoReader(2**20)
    reader.frames(path, [5])
    copy = pickle.loads(pickle.dumps(reader))
    assert copy.cache.num_bytes == 0
    assert number_of(copy.frames(path, [77])[0]) == 77
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(False)
    child = context.Process(target=lambda: sender.send([number_of(f) for f in reader.frames(path, [60, 61])]))
    child.start()
    assert number_of(reader.frames(path, [99])[0]) == 99
    assert receiver.poll(30)
    assert receiver.recv() == [60, 61]
    child.join()


def test_shrinking_averages_areas(tmp_path):
    # 64 → 16: each stripe of 8 columns becomes 2, and no pixel mixes two stripes.
    path = write_numbered(tmp_path / "short.mp4", "short")
    small = VideoReader(0, (16, 16)).frames(path, [0b1010101])[0]
    assert small.shape == (3, 16, 16)
    whole = VideoReader(0).frames(path, [0b1010101])[0].astype(float)
    means = whole.reshape(3, 16, 4, 16, 4).mean((2, 4))
    np.testing.assert_allclose(small, means, atol=4)
    assert number_of(small) == 0b1010101


@pytest.mark.parametrize("name", ["list.m3u8", "list.mp4"])
def test_a_playlist_leads_to_no_other_file(tmp_path, name):
    """FFmpeg would open the file that a playlist names, wherever it is."""
    secret = write_numbered(tmp_path / "secret.mp4")
    (tmp_path / "data").mkdir()
    lines = ["#EXTM3U", "#EXT-X-TARGETDURATION:10", "#EXTINF:1.0,", str(secret), "#EXT-X-ENDLIST"]
    (tmp_path / "data" / name).write_text("\n".join(lines))
    with pytest.raises(InputError, match="is not an MP4, MOV, Matroska, WebM or AVI file"):
        VideoFile(tmp_path / "data" / name)


def test_faults_name_the_file(tmp_path):
    path = write_numbered(tmp_path / "short.mp4", "short", 10)
    with pytest.raises(InputError, match=r"short\.mp4: frame 12 was requested; the video has 10 frames"):
        VideoReader().frames(path, [9, 12])
    missing = tmp_path / "none.mp4"
    with pytest.raises(InputError, match=r"none\.mp4: cannot be opened"):
        VideoReader().frames(missing, [0])
    cut = tmp_path / "cut.mp4"
    cut.write_bytes(path.read_bytes()[:200])
    with pytest.raises(InputError, match=r"cut\.mp4"):
        VideoReader().frames(cut, [0])


def test_a_file_damaged_in_the_middle_is_not_passed_off_as_whole(tmp_path):
    path = write_numbered(tmp_path / "long.mp4", "long")
    content = bytearray(path.read_bytes())
    start, end = content.index(b"mdat") + 4, content.index(b"moov")
    begin = start + 3 * (end - start) // 10
    content[begin : begin + (end - start) // 5] = b"\xff" * ((end - start) // 5)
    path.write_bytes(content)
    reader = VideoReader(0)
    with pytest.raises(InputError, match=r"long\.mp4: frame \d+ cannot be decoded"):
        reader.frames(path, range(NUM_FRAMES))
    # The last group lies behind the damage and does not refer to what was before.
    assert [number_of(frame) for frame in reader.frames(path, [110, 119])] == [110, 119]


def test_two_threads_decode_one_file_side_by_side(video):
    reader = VideoReader(0)
    decoders = reader._open(video)
    with decoders.borrow() as first, decoders.borrow() as second:
        assert first is not second
        pairs = zip(first.decode(range(30, 40)), second.decode(range(80, 90)), strict=True)
        assert [(a, b) for (a, _), (b, _) in pairs] == list(zip(range(30, 40), range(80, 90), strict=True))
        reader.close()
        assert [number for number, _ in first.decode([3])] == [3]  # closed when it is given back, not before
    with pytest.raises(AssertionError, match="not open"):
        list(first.decode([3]))


@pytest.mark.parametrize("width", [24, 40, 64, 84])
def test_every_column_is_converted(width, tmp_path):
    """FFmpeg's planar conversion leaves columns past a multiple of 16 unwritten; the packed one is right for all."""
    images = np.random.default_rng(0).integers(0, 256, (2, 4, width // 4, 3), np.uint8).repeat(4, 1).repeat(4, 2)
    with av.open(str(tmp_path / "video.mp4"), "w") as container:
        stream = container.add_stream("libx264", rate=FPS, width=width, height=16, pix_fmt="yuv420p")
        for image in images:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(image, "rgb24")))
        container.mux(stream.encode())
    with av.open(str(tmp_path / "video.mp4")) as container:
        expected = [frame.to_ndarray(format="rgb24").transpose(2, 0, 1) for frame in container.decode(video=0)]
    np.testing.assert_array_equal(VideoReader().frames(tmp_path / "video.mp4", [0, 1]), expected)
