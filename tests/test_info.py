"""`deft info`: the facts of a bug report, without what identifies the user."""

import getpass
import json
import platform

import pytest

from deft import doctor, info
from deft.cli import main


@pytest.fixture(autouse=True)
def _one_backend(monkeypatch):
    probes = {"egl": {"works": True, "renderer": "llvmpipe"}, "osmesa": {"works": False, "reason": "no library"}}
    monkeypatch.setattr(doctor, "BACKENDS", {name: name for name in probes})
    monkeypatch.setattr(doctor, "probe", lambda what, name: probes[name] if what == "renderer" else {})
    monkeypatch.setenv("MUJOCO_GL", "egl")


def test_the_text(capsys):
    assert main(["info"]) == 0
    rows = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines())
    rows = {name: text.strip() for name, text in rows.items()}
    assert rows["python"] == platform.python_version()
    assert rows["render egl"] == "llvmpipe"
    assert rows["render osmesa"] == "no: no library"
    assert "MUJOCO_GL=egl" in rows["variables"]
    assert "torch " in rows["packages"]
    assert next(iter(rows)) == "deft"
    text = " ".join(rows.values())
    assert platform.node() not in text.split()
    assert getpass.getuser() not in text.split()


def test_the_same_facts_as_json(capsys):
    assert main(["info", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["rendering"]["egl"] == {"works": True, "renderer": "llvmpipe"}
    assert facts["extras"].keys() == doctor.extras().keys()
    assert facts["packages"]["numpy"] == doctor.version("numpy")
    assert facts == json.loads(json.dumps(facts))


def test_gpus_are_listed():
    facts = info.collect() | {"gpus": [{"name": "H200", "memory_gib": 139.8}], "cuda": "12.8"}
    assert "H200, 140 GiB (torch for CUDA 12.8)" in info.describe(facts)


def test_a_renderer_is_tried_without_a_measurement(monkeypatch):
    monkeypatch.setattr(doctor, "_renderer", lambda: (lambda: 1 / 0, "llvmpipe"))
    assert doctor._try_rendering() == {"renderer": "llvmpipe"}
