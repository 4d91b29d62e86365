"""A Ray of the run's own is for this machine and this user alone, and leaves nothing behind."""

import json
import os
import subprocess
import sys
import tempfile

import pytest

from deft import trust
from deft.cli import main
from deft.errors import InputError
from deft.training.cluster import connection

pytest.importorskip("ray", reason="needs the extra scale")

# Starts a Ray as `deft train --collectors ray` does, and says what can be seen of it from outside.
SCRIPT = """
import json, os, stat, subprocess, sys
from deft import trust
from deft.training.cluster import connection

with trust.command_line(False):
    assert connection.connect("local", 1)
    import psutil, ray  # psutil comes with Ray

    @ray.remote
    def import_yaml():
        import yaml
        return yaml.__file__

    found = {"yaml": ray.get(import_yaml.remote()), "mode": os.environ.get("RAY_AUTH_MODE")}
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    sockets = [socket for process in processes for socket in process.net_connections("tcp")]
    found["listening"] = [socket.laddr.ip for socket in sockets if socket.status == "LISTEN"]
    folders = os.listdir(sys.argv[1])
    found["others"] = [stat.S_IMODE(os.stat(os.path.join(sys.argv[1], name)).st_mode) & 0o77 for name in folders]
    wrong = {**os.environ, "RAY_AUTH_TOKEN": "0" * 64}
    address = ray.get_runtime_context().gcs_address
    code = "import sys; from ray._raylet import GcsClient; GcsClient(address=sys.argv[1]).internal_kv_keys(b'', None)"
    for name, environment in {"wrong": wrong, "right": os.environ}.items():
        done = subprocess.run([sys.executable, "-c", code, address], env=environment, capture_output=True, text=True)
        found[name] = done.stderr[-2000:] if done.returncode else "joined"
    connection.disconnect()
    found["left"] = os.listdir(sys.argv[1])
    found["after"] = [name for name in os.environ if name.startswith("RAY_AUTH")]
print(json.dumps(found))
"""


def test_a_ray_of_ones_own(tmp_path):
    here = tmp_path / "here"
    here.mkdir()
    (here / "yaml.py").write_text("")  # beside a dataset, say
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as temporary:  # a short path, for sockets
        environment |= {"TMPDIR": temporary, "HOME": str(here)}
        command = [sys.executable, "-P", "-c", SCRIPT, temporary]
        done = subprocess.run(command, cwd=here, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["listening"]
    assert {address.removeprefix("::ffff:") for address in found["listening"]} == {"127.0.0.1"}
    assert found["mode"] == "token"
    assert found["right"] == "joined"
    assert "InvalidAuthToken" in found["wrong"]
    assert set(found["others"]) == {0}  # no rights of other users
    assert str(here) not in found["yaml"]
    assert found["left"] == found["after"] == []
    assert not (here / ".ray").exists()  # Ray's default is a token in the home directory that others can read


def test_a_file_does_not_choose_the_cluster(tmp_path, capsys):
    """What workers send is unpickled, so an address is as good as code."""
    config = "env: CartPole-v1\ncluster: {collectors: ray, ray_address: 'ray.example.org:6379'}\n"
    (tmp_path / "config.yaml").write_text(config)
    assert main(["train", "--config", str(tmp_path / "config.yaml"), "--output-dir", str(tmp_path / "run")]) == 2
    line = capsys.readouterr().err
    for part in (str(tmp_path / "config.yaml"), "--ray-address ray.example.org:6379", "--trust-remote-code"):
        assert part in line


def test_an_address_on_the_command_line_is_tried(monkeypatch):
    """Nothing listens there."""
    with trust.command_line(False):
        trust.name("127.0.0.1:1")
        with pytest.raises(InputError, match="no cluster answers"):
            connection.connect("127.0.0.1:1")
