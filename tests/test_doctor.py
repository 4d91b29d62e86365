"""`deft doctor`: each part is tried, and what does not work comes with what to do."""

import json
import sys

import pytest

from deft import doctor
from deft.cli import main


def found(**changes):
    """What a healthy machine would have, with changes."""
    working = {"works": True, "renderer": "NVIDIA A100", "frames_per_second": 900.0}
    results = {
        "machine": {
            "system": "Linux x86_64", "python": "3.11.7", "deft": "0.1.0", "cores": 8, "memory_gib": 64.0,
            "memory_free_gib": 60.0,
        },
        "gpus": [{"name": "NVIDIA A100", "memory_gib": 80.0}],
        "rendering": {"egl": working, "osmesa": {"works": False, "reason": "no OSMesa"}, "glfw": working},
        "mujoco_gl": "egl",
        "vulkan": {"loader": True, "drivers": ["nvidia_icd"]},
        "tabletop": {"works": True, "steps_per_second": {"both_cameras_64_px": 400.0}},
        "extras": {"maniskill": {"missing": ["sapien"], "install": 'pip install "deft[maniskill]"'}},
    }  # fmt: skip
    results |= changes
    return results | {"advice": doctor._advice(results)}


def test_text_says_what_works_and_how_to_get_the_rest():
    text = doctor.describe(found())
    assert "works: NVIDIA A100, 900 frames/s" in text
    assert "no (no OSMesa): apt install libosmesa6" in text
    assert "both cameras 64 px 400" in text
    assert 'without sapien: pip install "deft[maniskill]"' in text
    assert "NVIDIA A100, 80 GiB" in text


def test_advice_fits_the_finding():
    broken = {"works": False, "reason": "no library"}
    software = {"works": True, "renderer": "llvmpipe (LLVM 15)", "frames_per_second": 100.0}
    working = found()["rendering"]
    assert found()["advice"] == []
    cases = [
        ({"rendering": dict.fromkeys(("egl", "osmesa", "glfw"), broken), "mujoco_gl": None}, "apt install libegl1"),
        ({"mujoco_gl": "osmesa"}, "MUJOCO_GL=osmesa does not work here: export MUJOCO_GL=egl"),
        ({"mujoco_gl": "elg"}, "MUJOCO_GL=elg is not one of egl, osmesa, glfw"),
        ({"rendering": {**working, "egl": software}}, "rendered in software"),
        ({"vulkan": {"loader": True, "drivers": []}}, "no Vulkan"),
    ]
    for change, message in cases:
        (line,) = found(**change)["advice"]
        assert message in line
    assert found(rendering={**working, "egl": software}, gpus=[])["advice"] == []  # no GPU: software is what there is


@pytest.mark.parametrize(
    ("backend", "variables", "library", "reason"),
    [
        ("osmesa", {}, None, "not installed"),
        ("osmesa", {}, "libOSMesa.so.8", "AttributeError: 'NoneType' object has no attribute 'glGetError'"),
        ("egl", {}, None, "not installed"),
        ("glfw", {}, None, "no display"),
        ("glfw", {"DISPLAY": ":0"}, None, "AttributeError: 'NoneType' object has no attribute 'glGetError'"),
    ],
)
def test_what_is_not_there_is_named_in_plain_words(monkeypatch, capsys, backend, variables, library, reason):
    """PyOpenGL without libOSMesa fails with an AttributeError."""

    def fail():
        raise AttributeError("'NoneType' object has no attribute 'glGetError'")

    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"MUJOCO_GL": backend, **variables}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(doctor.ctypes.util, "find_library", lambda name: library)
    monkeypatch.setattr(doctor, "_try_rendering", fail)
    monkeypatch.setattr(doctor.os, "_exit", lambda status: None)
    doctor.run_probe("renderer")
    assert json.loads(capsys.readouterr().out) == {"works": False, "reason": reason}


def test_extras_name_what_is_missing(monkeypatch):
    requirements = [
        'numpy>=2; extra == "data"',
        'no-such-thing<3; extra == "data"',
        'deft[data]; extra == "all"',
        "torch",
    ]
    monkeypatch.setattr(doctor.importlib.metadata, "requires", lambda name: requirements)
    assert doctor.extras() == {"data": {"missing": ["no-such-thing"], "install": 'pip install "deft[data]"'}}


def test_probes_that_crash_or_hang_are_findings(monkeypatch):
    monkeypatch.setattr(doctor, "_PROBE_CODE", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    assert doctor.probe("rendering", "egl") == {"works": False, "reason": "exit status -11"}
    monkeypatch.setattr(doctor, "_PROBE_CODE", "print('chatter'); raise SystemExit('libEGL is missing')")
    assert doctor.probe("rendering", "egl") == {"works": False, "reason": "libEGL is missing"}
    monkeypatch.setattr(doctor, "_PROBE_CODE", "import time; time.sleep(60)")
    monkeypatch.setattr(doctor, "PROBE_TIMEOUT", 0.2)
    assert doctor.probe("rendering", "egl") == {"works": False, "reason": "no answer within 0.2 s"}


def test_a_way_to_render_that_does_not_exist_is_a_finding():
    result = doctor.probe("rendering", "no-such-backend")
    assert not result["works"]
    assert "no-such-backend" in result["reason"]


def test_the_command_measures_this_machine(capfd, monkeypatch):
    monkeypatch.setattr(
        doctor, "_PROBE_CODE", doctor._PROBE_CODE.replace("doctor.run", "doctor.MEASURE_TIME = 0.05; doctor.run")
    )
    assert main(["doctor", "--json"]) == 0
    results = json.loads(capfd.readouterr().out)  # one JSON object and nothing else
    assert results["machine"]["python"].split(".")[:2] == [str(part) for part in sys.version_info[:2]]
    assert results["machine"]["memory_gib"] > 0
    if not results["rendering"]["egl"]["works"]:
        pytest.skip(f"EGL does not work here: {results['rendering']['egl']['reason']}")
    assert results["rendering"]["egl"]["frames_per_second"] > 0
    assert set(results["tabletop"]["steps_per_second"]) == {"both_cameras_64_px", "both_cameras_224_px", "state_only"}


def test_positional_arguments_raise_an_error(capsys):
    assert main(["doctor", "who"]) == 2
    assert "unexpected 'who'" in capsys.readouterr().err
