"""The backend that MuJoCo renders with: what is chosen, and one line where its library is missing."""

import ctypes
import os
import sys

import pytest

from deft.envs import mujoco_backend
from deft.envs.mujoco_backend import cannot_render, check_backend, choose_backend
from deft.errors import InputError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="backends of Linux")


@pytest.fixture
def machine(monkeypatch):
    """A machine without a display, with these libraries, whose user sets MUJOCO_GL to this."""

    def make(*libraries, chosen=None):
        def load(file):
            if file not in libraries:
                raise OSError(f"{file}: cannot open shared object file")

        monkeypatch.setattr(ctypes, "CDLL", load)
        monkeypatch.delenv("DISPLAY", raising=False)
        monkeypatch.setenv("MUJOCO_GL", chosen or "")

    return make


def test_egl_is_the_default_without_a_display(machine, monkeypatch):
    machine("libEGL.so.1")
    assert choose_backend() == os.environ["MUJOCO_GL"] == "egl"
    machine("libEGL.so.1")
    monkeypatch.setenv("DISPLAY", ":0")
    assert choose_backend() == os.environ["MUJOCO_GL"] == ""


def test_without_libegl_mujoco_simulates_and_only_cameras_fail(machine):
    machine()
    check_backend()
    assert os.environ["MUJOCO_GL"] == "off"
    line = str(cannot_render("metaworld", AttributeError("module 'mujoco' has no attribute 'GLContext'")))
    assert line.startswith("metaworld cannot render with MUJOCO_GL=off (libEGL.so is not installed); install libegl1")


@pytest.mark.parametrize(("backend", "package"), [("egl", "libegl1"), ("osmesa", "libosmesa6")])
def test_a_backend_without_its_library_is_one_line(machine, backend, package):
    machine(chosen=backend)
    with pytest.raises(InputError, match=rf"^MUJOCO_GL={backend}: MuJoCo cannot be imported.*install {package}.*=off"):
        check_backend()
    machine(mujoco_backend.LIBRARIES[backend], chosen=backend)
    check_backend()


def test_another_failure_of_the_context_is_named(machine):
    machine("libEGL.so.1", chosen="egl")
    line = str(cannot_render("the camera", ImportError("Cannot initialize\na EGL device display")))
    assert "MUJOCO_GL=egl (ImportError: Cannot initialize a EGL device display)" in line
