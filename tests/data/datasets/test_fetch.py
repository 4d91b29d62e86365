"""Downloads of D4RL files from a server on this machine: whole, resumed, cut short, changed, wrong, and offline."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import h5py
import numpy as np
import pytest

from deft.cli import main
from deft.data.datasets import fetch as module
from deft.data.datasets import load_dataset
from deft.data.datasets.fetch import D4RL_ADDRESS, d4rl_url, fetch_dataset
from deft.errors import InputError, RunError

NAME, ANT = "hopper-medium-v2", "Ant_maze_"


class Files(ThreadingHTTPServer):
    """Serves one file, in parts too; `sends` says how many bytes each of the next connections may send."""

    def __init__(self, content: bytes) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.content, self.version, self.status = content, '"1"', 200
        self.sends: list[int] = []
        self.ranges: list[str | None] = []  # what was asked for

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/hopper.hdf5"


class Handler(BaseHTTPRequestHandler):
    server: Files

    def do_GET(self) -> None:
        files = self.server
        wanted = self.headers.get("Range")
        files.ranges.append(wanted)
        if files.status != 200:
            self.send_error(files.status)
            return
        first = 0
        if wanted is not None and self.headers.get("If-Range") == files.version:
            first = int(wanted.removeprefix("bytes=").removesuffix("-"))
        body = files.content[first:]
        self.send_response(206 if first else 200)
        if first:
            self.send_header("Content-Range", f"bytes {first}-{len(files.content) - 1}/{len(files.content)}")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", files.version)
        self.end_headers()
        self.wfile.write(body[: files.sends.pop(0)] if files.sends else body)
        self.close_connection = True

    def log_message(self, *arguments: object) -> None:
        pass


def hdf5(path: Path, rows: int = 200) -> bytes:
    """A file in D4RL's layout."""
    random = np.random.default_rng(rows)
    with h5py.File(path, "w") as file:
        file["observations"] = random.normal(size=(rows, 11)).astype(np.float32)
        file["actions"] = random.uniform(-1, 1, (rows, 3)).astype(np.float32)
        file["rewards"], file["terminals"] = np.ones(rows, np.float32), np.arange(rows) % 50 == 49
        file["timeouts"] = np.zeros(rows, bool)
    return path.read_bytes()


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Files]:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("DEFT_DATASETS", str(tmp_path / "data"))
    monkeypatch.setattr(module, "BLOCK", 1000)
    files = Files(hdf5(tmp_path / "source.hdf5"))
    thread = threading.Thread(target=files.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield files
    files.shutdown()
    files.server_close()


def test_the_addresses_are_d4rls() -> None:
    """Lines of its `infos.py`."""
    published = {
        "hopper-medium-v2": "gym_mujoco_v2/hopper_medium-v2.hdf5",
        "halfcheetah-medium-expert-v1": "gym_mujoco_v1/halfcheetah_medium_expert-v1.hdf5",
        "walker2d-full-replay-v2": "gym_mujoco_v2/walker2d_full_replay-v2.hdf5",
        "ant-random-v2": "gym_mujoco_v2/ant_random-v2.hdf5",
        "door-human-v1": "hand_dapg_v1/door-human-v1.hdf5",
        "maze2d-umaze-v1": "maze2d/maze2d-umaze-sparse-v1.hdf5",
        "maze2d-large-dense-v1": "maze2d/maze2d-large-dense-v1.hdf5",
        "antmaze-umaze-v0": f"ant_maze_new/{ANT}u-maze_noisy_multistart_False_multigoal_False_sparse.hdf5",
        "antmaze-umaze-diverse-v2": f"ant_maze_v2/{ANT}u-maze_noisy_multistart_True_multigoal_True_sparse_fixed.hdf5",
        "antmaze-medium-play-v2": f"ant_maze_v2/{ANT}big-maze_noisy_multistart_True_multigoal_False_sparse_fixed.hdf5",
        "antmaze-large-diverse-v0": f"ant_maze_new/{ANT}hardest-maze_noisy_multistart_True_multigoal_True_sparse.hdf5",
        "kitchen-complete-v0": "kitchen/mini_kitchen_microwave_kettle_light_slider-v0.hdf5",
        "kitchen-mixed-v0": "kitchen/kitchen_microwave_kettle_bottomburner_light-v0.hdf5",
    }
    assert {name: d4rl_url(name) for name in published} == {
        name: f"{D4RL_ADDRESS}/{place}" for name, place in published.items()
    }
    assert d4rl_url("driving-expert-v1") is None
    assert d4rl_url("hopper-great-v2") is None


def test_a_whole_file_is_found_by_its_name(server: Files, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["datasets", "fetch", NAME, "--url", server.url, "--json"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report == {
        "dataset": str(tmp_path / "data" / f"{NAME}.hdf5"),
        "url": server.url,
        "bytes": len(server.content),
        "sha256": hashlib.sha256(server.content).hexdigest(),
        "verified_by": "size and HDF5 layout alone: D4RL publishes no checksum",
    }
    assert load_dataset(NAME).num_episodes == 4
    assert main(["datasets", "fetch", NAME, "--url", server.url]) == 0
    assert server.ranges == [None]  # it is there: not downloaded again
    assert main(["datasets", "fetch", NAME, "--url", server.url, "--overwrite"]) == 0
    assert server.ranges == [None, None]


def test_a_broken_connection_is_opened_again_for_the_rest(server: Files, tmp_path: Path) -> None:
    server.sends = [5000, 3000]
    seen: list[tuple[int, int | None]] = []
    found = fetch_dataset(NAME, tmp_path / "data", server.url, progress=lambda *given: seen.append(given))
    assert server.ranges == [None, "bytes=5000-", "bytes=8000-"]
    assert Path(found.dataset).read_bytes() == server.content
    assert seen[-1] == (len(server.content), len(server.content))
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == [f".{NAME}.lock", f"{NAME}.hdf5"]


def test_an_interrupted_download_is_resumed_by_the_next_command(server: Files, tmp_path: Path) -> None:
    def interrupt(done: int, total: int | None) -> None:
        if done >= 7000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch_dataset(NAME, tmp_path / "data", server.url, progress=interrupt)
    with pytest.raises(InputError, match="was not found"):
        load_dataset(NAME)  # half a file is no dataset
    found = fetch_dataset(NAME, tmp_path / "data", server.url)
    assert server.ranges == [None, "bytes=7000-"]
    assert Path(found.dataset).read_bytes() == server.content


def test_a_server_that_never_sends_the_rest_is_an_error(server: Files, tmp_path: Path) -> None:
    server.sends = [5000, 0, 0, 0]
    with pytest.raises(
        RunError, match=rf"5,000 of {len(server.content):,} bytes received.*run the command again to resume"
    ):
        fetch_dataset(NAME, tmp_path / "data", server.url)
    assert not (tmp_path / "data" / f"{NAME}.hdf5").exists()
    assert Path(fetch_dataset(NAME, tmp_path / "data", server.url).dataset).read_bytes() == server.content


def test_a_file_that_has_changed_meanwhile_starts_over(server: Files, tmp_path: Path) -> None:
    server.sends = [5000, 0, 0, 0]
    with pytest.raises(RunError, match="bytes received"):
        fetch_dataset(NAME, tmp_path / "data", server.url)
    server.content, server.version = hdf5(tmp_path / "newer.hdf5", rows=100), '"2"'
    assert Path(fetch_dataset(NAME, tmp_path / "data", server.url).dataset).read_bytes() == server.content


def test_checksums(server: Files, tmp_path: Path) -> None:
    right = hashlib.sha256(server.content).hexdigest()
    with pytest.raises(RunError, match=rf"its sha256 is {right}, not {'0' * 64}; deleted"):
        fetch_dataset(NAME, tmp_path / "data", server.url, sha256="0" * 64)
    assert [path.name for path in (tmp_path / "data").glob("*.hdf5*")] == [f"{NAME}.hdf5.part.json"]
    assert fetch_dataset(NAME, tmp_path / "data", server.url, sha256=right.upper()).verified_by == "sha256"
    with pytest.raises(RunError, match=f"not {'0' * 64}$"):  # of a file that is there already, which is kept
        fetch_dataset(NAME, tmp_path / "data", server.url, sha256="0" * 64)
    assert (tmp_path / "data" / f"{NAME}.hdf5").exists()


@pytest.mark.parametrize("content", [b"<html>moved</html>", None])
def test_what_is_no_d4rl_file_is_deleted(server: Files, tmp_path: Path, content: bytes | None) -> None:
    """A page in place of the file, and a file whose end the server has lost: HDF5 knows its own length."""
    server.content = server.content[:-2000] if content is None else content
    with pytest.raises(RunError, match=r"is not a complete D4RL file .*; deleted"):
        fetch_dataset(NAME, tmp_path / "data", server.url)
    assert not list((tmp_path / "data").glob("*.part"))
    assert not list((tmp_path / "data").glob("*.hdf5"))


def test_files_on_this_machine(server: Files, tmp_path: Path) -> None:
    found = fetch_dataset("mine", tmp_path / "data", (tmp_path / "source.hdf5").as_uri())
    assert Path(found.dataset).read_bytes() == server.content
    with pytest.raises(RunError, match="cannot be reached"):
        fetch_dataset("other", tmp_path / "data", (tmp_path / "absent.hdf5").as_uri())


def test_offline_and_what_is_wrong_is_one_line(
    server: Files, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    server.status = 404
    assert main(["datasets", "fetch", NAME, "--url", server.url]) == 1
    assert "the server answered 404" in capsys.readouterr().err
    monkeypatch.setattr(module, "D4RL_ADDRESS", "http://127.0.0.1:9")  # nothing listens there
    assert main(["datasets", "fetch", NAME]) == 1
    message = capsys.readouterr().err
    assert "gym_mujoco_v2/hopper_medium-v2.hdf5 cannot be reached" in message
    assert str(tmp_path / "data" / f"{NAME}.hdf5") in message
    assert main(["datasets", "fetch", "hopper-great-v2"]) == 2
    assert "hopper-great-v2: no address is known" in capsys.readouterr().err
    assert main(["datasets", "fetch", NAME, "--sha256", "abc"]) == 2
    assert main(["datasets", "fetch", "../a", "--url", server.url]) == 2
    assert main(["datasets", "fetch", "a", "--url", "ftp://127.0.0.1/a"]) == 2
    assert main(["datasets", "get"]) == 2
    assert main(["datasets"]) == 0


def test_training_downloads_where_that_is_asked_for(server: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deft.data.datasets.fetch.d4rl_url", lambda name: server.url)
    monkeypatch.setattr("deft.data.datasets.d4rl_url", lambda name: server.url)
    with pytest.raises(InputError, match=r"`deft datasets fetch hopper-medium-v2` downloads it from http"):
        load_dataset(NAME)
    assert load_dataset(NAME, download=True).num_episodes == 4
