"""The OpenGL backend that MuJoCo renders with (`MUJOCO_GL`), and one line of error where there is none.

MuJoCo reads the variable and loads the backend's library when it is first imported; a missing library fails that import
with an AttributeError of PyOpenGL. Environments on MuJoCo, also those of suites, call these functions before.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys

from deft.errors import InputError, one_line

VARIABLE = "MUJOCO_GL"
OFF = "off"  # a value for MuJoCo: simulate, and render nothing
LIBRARIES = {"egl": "libEGL.so", "osmesa": "libOSMesa.so"}  # that a backend loads on Linux
PACKAGES = {"egl": "libegl1 and libgl1", "osmesa": "libosmesa6"}  # of Debian and Ubuntu


def choose_backend() -> str:
    """Return MuJoCo's rendering backend: MUJOCO_GL if it is set, EGL on Linux without a display, off without EGL."""
    chosen = os.environ.get(VARIABLE, "").lower().strip()
    if not chosen and sys.platform == "linux" and not os.environ.get("DISPLAY"):
        chosen = os.environ[VARIABLE] = "egl" if _has_library("egl") else OFF
    return chosen


def check_backend() -> None:
    """Choose the backend. Raise InputError if MUJOCO_GL names one whose library is not installed."""
    backend = choose_backend()
    if sys.platform == "linux" and backend in LIBRARIES and not _has_library(backend):
        raise InputError(
            f"{VARIABLE}={backend}: MuJoCo cannot be imported, as {LIBRARIES[backend]} is not installed; install "
            f"{PACKAGES[backend]} (apt), or set {VARIABLE}={OFF} for environments without cameras (observation=state)"
        )


def cannot_render(subject: str, error: Exception) -> InputError:
    """Return the error for a camera whose OpenGL context cannot be made."""
    backend = choose_backend()
    is_missing = backend == OFF and not _has_library("egl")
    reason = f"{LIBRARIES['egl']} is not installed" if is_missing else one_line(error)
    return InputError(
        f"{subject} cannot render with {VARIABLE}={backend or 'unset'} ({reason}); install {PACKAGES['egl']} (apt) and "
        f"set {VARIABLE}=egl, or use --env-kwargs observation=state; see deft doctor"
    )


def _has_library(backend: str) -> bool:
    name = LIBRARIES[backend]
    for file in (name, *(f"{name}.{version}" for version in range(9, -1, -1))):  # as PyOpenGL looks for it
        with contextlib.suppress(OSError):
            ctypes.CDLL(file)
            return True
    return False
