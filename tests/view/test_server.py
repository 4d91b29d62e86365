"""The server over HTTP: what it serves, and what it does not."""

import http.client
import json
import os
import socket
import subprocess
import sys
import threading
import time

import pytest
from viewed_runs import ENDED, TOKEN, make_run, served, write_live

from deft import cli
from deft.config.settings import LoggingConfig
from deft.errors import InputError
from deft.runs.operator import Command, Operator
from deft.view import process, server
from deft.view.process import check_view, serving
from deft.view.server import listen, token_of


def get(port, path, host="127.0.0.1", **headers):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("GET", path, headers={"Host": host, **headers})
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer, content


@pytest.fixture(scope="module")
def port(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    make_run(folder / "done", **ENDED)
    write_live(make_run(folder / "going"))
    (folder / "going" / "videos").mkdir()
    (folder / "going" / "videos" / "step_1.mp4").write_bytes(b"0123456789")
    (folder / "secret.txt").write_text("secret")
    with served(folder) as number:
        yield number


def test_the_page_and_its_files(port):
    for path, kind in (
        ("", "text/html"), ("palette.css", "text/css"), ("page/view.css", "text/css"),
        ("page/uPlot.min.css", "text/css"),
        ("page/takeover.js", "text/javascript"),
        ("page/view.js", "text/javascript"), ("page/uPlot.iife.min.js", "text/javascript"),
    ):  # fmt: skip
        answer, content = get(port, f"/{TOKEN}/{path}")
        assert (answer.status, answer.headers["content-type"].split(";")[0]) == (200, kind), path
        assert content
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"


def test_data_of_several_runs(port):
    start = json.loads(get(port, f"/{TOKEN}/data")[1])
    assert set(start["runs"]) == {"done", "going"}
    for name, state in (("done", "complete"), ("going", "running")):
        run = json.loads(get(port, f"/{TOKEN}/data?run={name}")[1])
        assert (run["name"], run["state"]) == (name, state)
        again = json.loads(get(port, f"/{TOKEN}/data?run={name}&seen={run['version'].replace(' ', '%20')}")[1])
        assert "panels" not in again
    assert get(port, f"/{TOKEN}/tiles.jpg?run=going")[1].startswith(b"\xff\xd8")
    assert get(port, f"/{TOKEN}/tiles.jpg?run=done")[0].status == 404


def test_videos_are_sent_in_parts(port):
    answer, content = get(port, f"/{TOKEN}/media/videos/step_1.mp4?run=going", Range="bytes=2-4")
    assert (answer.status, content) == (206, b"234")


@pytest.mark.parametrize(
    "path",
    [
        "/", "/data", "/wrong/data", f"/{TOKEN[:-1]}/", f"/{TOKEN}/data?run=..", f"/{TOKEN}/data?run=../..",
        f"/{TOKEN}/data?run=done/../..", f"/{TOKEN}/data?run=/etc", f"/{TOKEN}/tiles.jpg?run=..",
        f"/{TOKEN}/../secret.txt", f"/{TOKEN}/page/../../reading.py", f"/{TOKEN}/page/%2e%2e/reading.py",
        f"/{TOKEN}/page/", f"/{TOKEN}/media/videos/..%2f..%2f..%2fsecret.txt?run=going",
        f"/{TOKEN}/media/live/token?run=going", f"/{TOKEN}/media/../config.yaml?run=going",
        f"/{TOKEN}/media/videos/%00.mp4?run=going",
    ],
)  # fmt: skip
def test_nothing_else_is_served(port, path):
    answer, content = get(port, path)
    assert answer.status == 404
    assert b"secret" not in content


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "evil.example:6070", ""])
def test_other_hosts_are_rejected(port, host):
    assert get(port, f"/{TOKEN}/", host)[0].status == 400


@pytest.mark.parametrize("host", ["localhost:9999", "127.0.0.1:1234", "localhost"])
def test_a_forwarded_port_is_accepted(port, host):
    assert get(port, f"/{TOKEN}/", host)[0].status == 200


def test_several_viewers_at_once(port):
    results = []
    threads = [
        threading.Thread(target=lambda: results.append(get(port, f"/{TOKEN}/data?run=going")[0].status))
        for _ in range(12)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [200] * 12


def test_it_listens_on_this_machine_only(port):
    addresses = {found[4][0] for found in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)}
    for address in addresses - {"127.0.0.1"}:
        if not address.startswith("127."):
            with pytest.raises(OSError, match="refused"), socket.create_connection((address, port), 2):
                pass


def test_a_viewer_is_marked_where_the_run_has_live_files(tmp_path):
    run = make_run(tmp_path / "old")
    with served(run) as number:
        get(number, f"/{TOKEN}/data?run=.")
        assert not (run / "live").exists()
        write_live(run)
        os.utime(run / "live" / "viewer", (0, 0))
        get(number, f"/{TOKEN}/data?run=.")
        assert time.time() - (run / "live" / "viewer").stat().st_mtime < 60


def test_the_address_of_a_run_stays_the_same_and_is_secret(tmp_path):
    run = make_run(tmp_path / "run")
    token = token_of(run)
    assert token == token_of(run)
    assert (run / "live" / "token").stat().st_mode & 0o077 == 0
    (run / "live" / "token").write_text("../x")  # not a token
    assert token_of(run) not in (token, "../x")
    assert token_of(tmp_path) != token_of(tmp_path)  # no run: nothing is written
    assert not (tmp_path / "live").exists()


def test_a_training_serves_its_page_and_ends_it(tmp_path, caplog):
    run = make_run(tmp_path / "run")
    caplog.set_level("INFO", "deft")
    with serving(LoggingConfig(view=True, view_port=0), run):
        address = caplog.messages[0].split()[-1]
        number, path = int(address.split(":")[2].split("/")[0]), "/" + address.split("/", 3)[3]
        assert path == f"/{token_of(run)}/"
        assert get(number, path)[0].status == 200  # connections wait until the server has started
        assert f"ssh -L {number}:127.0.0.1:{number}" in caplog.messages[1]
    with pytest.raises(ConnectionRefusedError):
        get(number, path)
    assert [record.levelname for record in caplog.records] == ["INFO", "INFO"]


def test_the_server_imports_no_torch():
    code = "import sys, deft.view.server; deft.view.server.make_app; print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"


def test_bad_input_is_one_line(tmp_path, capsys, monkeypatch):
    def error(*arguments):
        assert cli.main(["view", *map(str, arguments)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line

    run = make_run(tmp_path / "run")
    assert "missing: no such directory; give a run directory" in error(tmp_path / "missing")
    (empty := tmp_path / "empty").mkdir()
    assert "empty: no run to view; give a run directory" in error(empty)
    make_run(tmp_path / "above" / "demo" / "ppo")
    assert f"there is one deeper: deft view {tmp_path / 'above' / 'demo'}" in error(tmp_path / "above")
    assert "--view-port: 70000 is out of range" in error(run, "--view-port", 70_000)
    with listen(0) as taken:
        number = taken.getsockname()[1]
        assert f"port {number} of this machine cannot be used (Address already in use)" in error(run, "--port", number)
        with pytest.raises(InputError, match="give another --view-port"):
            check_view(LoggingConfig(view=True, view_port=number))
        check_view(LoggingConfig(view=False, view_port=number))
    monkeypatch.setattr(server.importlib.util, "find_spec", lambda name: None)
    assert 'starlette, which is not installed: in Deft\'s folder run `pip install -e ".[view]"`' in error(run)
    assert "missing: no such directory" in error(tmp_path / "missing")  # what is wrong whatever is installed
    with pytest.raises(InputError, match="or leave --view out"):
        process.check_view(LoggingConfig(view=True))


def post(port, body, path=f"/{TOKEN}/operate?run=.", kind="application/json", **headers):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection.request("POST", path, content, {"Host": "127.0.0.1", "Content-Type": kind, **headers})
    answer = connection.getresponse()
    found = answer.read()
    connection.close()
    return answer.status, found


def test_a_person_takes_over(tmp_path):
    run = make_run(tmp_path / "run")
    write_live(run)
    command = {"mode": "act", "env": 1, "action": [0.5, -2]}
    with served(run) as number:
        assert post(number, command)[0] == 409  # the run does not offer it
        assert json.loads(get(number, f"/{TOKEN}/data?run=.")[1])["controls"] is None
        person = Operator(run, ["x", "gripper"], 2, 10.0)
        person.open()
        offered = json.loads(get(number, f"/{TOKEN}/data?run=.")[1])["controls"]
        assert offered == {"names": ["x", "gripper"], "num_envs": 2, "rate": 10.0}
        assert post(number, command) == (200, b"{}")  # no frame yet
        assert person.poll() == Command(1, (0.5, -1.0))
        person.show(None, env=1, acts="person")
        assert json.loads(post(number, {"mode": "watch", "env": 1})[1])["acts"] == "person"
        assert person.poll() == Command(1, None)
        before = (run / "live" / "command.json").read_bytes()
        for status, body, further in [
            (400, {"mode": "act", "env": 1, "action": [1]}, {}),
            (400, {"mode": "act", "env": 9, "action": [1, 1]}, {}),
            (400, b'{"mode": ', {}),
            (400, b"[" * 4000, {}),
            (413, b" " * 5000, {}),
            (403, command, {"Origin": "http://example.com"}),
            (415, command, {"kind": "text/plain"}),
            (404, command, {"path": "/operate?run=."}),
            (404, command, {"path": f"/{TOKEN}/operate?run=.."}),
            (400, command, {"Host": "example.com"}),
        ]:
            assert post(number, body, **further)[0] == status, (body, further)
        assert get(number, f"/{TOKEN}/operate?run=.")[0].status == 405
        assert (run / "live" / "command.json").read_bytes() == before
        assert post(number, command, Origin=f"http://127.0.0.1:{number}")[0] == 200
        person.close()
        assert post(number, command)[0] == 409
