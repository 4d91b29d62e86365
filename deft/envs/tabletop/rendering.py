"""Pictures of the tabletop: one off-screen OpenGL context for all environments of a process.

`TabletopEnv` calls `render`. Models differ from scene to scene, but textures and materials are the same in all, so one
uploaded set serves every environment: 64 of them cost no more graphics memory than one. A context belongs to the thread
that made it, hence one for each thread that renders.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from deft.errors import InputError, RunError

_FLAGS_OFF = ("mjRND_SHADOW", "mjRND_REFLECTION", "mjRND_SKYBOX", "mjRND_FOG", "mjRND_HAZE")
_MAX_GEOMS = 160
_HIDDEN_GROUP = 5  # MuJoCo draws groups 0 to 2
# A row of pixels that no scene has: every other one magenta, the rest green.
_UNWRITTEN = np.tile(np.array([[255, 0, 255], [0, 255, 0]], np.uint8), (4096, 1))


def choose_backend() -> str:
    """How MuJoCo renders: MUJOCO_GL where it is set, EGL on a Linux machine without a display."""
    chosen = os.environ.get("MUJOCO_GL", "").lower().strip()
    if not chosen and sys.platform == "linux" and not os.environ.get("DISPLAY"):
        chosen = os.environ["MUJOCO_GL"] = "egl"  # MuJoCo reads it when it is first imported
    return chosen


class Culling:
    """Finds what a camera cannot see, so that it need not be drawn.

    In a camera's frame x is right, y is up and z is back. A point is beyond one of the four planes that bound the view
    by x cos(a) + z sin(a), with a half the angle of view, likewise for -x, y and -y. A geom is out of view where the
    sphere around it is, or, for the walls and the floor, where all four corners are beyond the same plane.
    """

    def __init__(self, model: Any, data: Any) -> None:
        import mujoco

        self._data = data
        self._radius = model.geom_rbound
        self._walls = np.flatnonzero(model.geom_type == mujoco.mjtGeom.mjGEOM_PLANE)
        signs = np.array([[-1, -1, 0], [-1, 1, 0], [1, -1, 0], [1, 1, 0]])
        corners = [
            data.geom_xpos[wall] + (signs * model.geom_size[wall]) @ data.geom_xmat[wall].reshape(3, 3).T
            for wall in self._walls
        ]
        self._corners = np.concatenate(corners)  # [4 a wall, 3]; they never move
        half_angles = np.radians(model.cam_fovy) / 2
        # x and z of a place, times this: how far it is beyond the right, left, upper and lower plane
        cosine, sine, zero = np.cos(half_angles), np.sin(half_angles), np.zeros(len(half_angles))
        planes = [[cosine, zero, sine], [-cosine, zero, sine], [zero, cosine, sine], [zero, -cosine, sine]]
        self._planes = np.array(planes).transpose(2, 1, 0)  # [cameras, 3, 4]

    def in_view(self, camera: int) -> np.ndarray:
        """Which geoms may be seen, bool [geoms]."""
        data = self._data
        planes = data.cam_xmat[camera].reshape(3, 3) @ self._planes[camera]
        eye = data.cam_xpos[camera] @ planes
        beyond = (data.geom_xpos @ planes - eye).max(axis=1)
        visible = beyond <= self._radius
        visible[self._walls] = ((self._corners @ planes - eye).reshape(-1, 4, 4).min(axis=1) <= 0).all(axis=1)
        return visible


class Renderer:
    """Renders any scene's model from several cameras with one upload of textures."""

    def __init__(self) -> None:
        import mujoco

        from deft.envs.tabletop.model import texture_model

        self._process = os.getpid()
        self._gl = _make_gl_context()
        self._gl.make_current()
        model = texture_model()
        self._lost_contexts: list[Any] = []
        self._open_context()
        self._scene = mujoco.MjvScene(model, _MAX_GEOMS)
        for name in _FLAGS_OFF:
            if hasattr(mujoco.mjtRndFlag, name):
                self._scene.flags[getattr(mujoco.mjtRndFlag, name)] = False
        self._option = mujoco.MjvOption()
        self._option.sitegroup[:] = 0
        self._camera = mujoco.MjvCamera()
        self._camera.type = mujoco.mjtCamera.mjCAMERA_FIXED
        self._perturb = mujoco.MjvPerturb()
        self._buffers: dict[tuple[int, int], np.ndarray] = {}

    def _open_context(self) -> None:
        import mujoco

        from deft.envs.tabletop.model import texture_model

        self._context = mujoco.MjrContext(texture_model(), mujoco.mjtFontScale.mjFONTSCALE_50)
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, self._context)
        self._size = (self._context.offWidth, self._context.offHeight)

    def render(self, model: Any, data: Any, culling: Culling, cameras: Sequence[int], size: int) -> list[np.ndarray]:
        """One picture a camera, uint8 [size, size, 3], top row first: views of a buffer that the next call reuses.

        Another renderer in this process, when it is freed, may delete what belongs to this one: OpenGL's names are
        small numbers, and its context is not always the current one then. Such a loss is seen, and mended once.
        """
        pictures = self._try_to_render(model, data, culling, cameras, size)
        if pictures is None:
            self._lost_contexts.append(self._context)  # freeing it would delete the new one's in turn
            self._open_context()
            pictures = self._try_to_render(model, data, culling, cameras, size)
        if pictures is None:
            raise RunError("the tabletop's cameras give no pictures: its off-screen buffer was lost, twice")
        return pictures

    def _try_to_render(
        self, model: Any, data: Any, culling: Culling, cameras: Sequence[int], size: int
    ) -> list[np.ndarray] | None:
        """The pictures; None where nothing was written into the buffer."""
        import mujoco

        self._gl.make_current()
        width = size * len(cameras)
        if width > self._size[0] or size > self._size[1]:
            self._size = (max(width, self._size[0]), max(size, self._size[1]))
            mujoco.mjr_resizeOffscreen(*self._size, self._context)
        pixels = self._buffers.get((size, width))
        if pixels is None:
            pixels = self._buffers[(size, width)] = np.empty((size, width, 3), np.uint8)
        pixels[0] = _UNWRITTEN[:width]
        for place, camera in enumerate(cameras):
            self._camera.fixedcamid = camera
            model.geom_group[:] = np.where(culling.in_view(camera), 0, _HIDDEN_GROUP)
            mujoco.mjv_updateScene(
                model, data, self._option, self._perturb, self._camera, mujoco.mjtCatBit.mjCAT_ALL, self._scene
            )
            mujoco.mjr_render(mujoco.MjrRect(place * size, 0, size, size), self._scene, self._context)
        mujoco.mjr_readPixels(pixels, None, mujoco.MjrRect(0, 0, width, size), self._context)
        if np.array_equal(pixels[0], _UNWRITTEN[:width]):
            return None
        upright = pixels[::-1]
        return [upright[:, place * size : (place + 1) * size] for place in range(len(cameras))]

    def close(self) -> None:
        """Free the context, where this process made it."""
        if self._process == os.getpid():
            with contextlib.suppress(Exception):  # at the end of the process: nothing is left to be done about it
                self._context.free()
                self._gl.free()


_local = threading.local()
_process: int | None = None  # the one that has rendered first


def renderer() -> Renderer:
    """This thread's renderer; made when first needed."""
    global _process
    if _process not in (None, os.getpid()):
        raise InputError(
            "the tabletop cannot render in a forked process whose parent has rendered, as OpenGL does not survive it: "
            "start workers by spawn (Deft's `--vector process` does)"
        )
    found: Renderer | None = getattr(_local, "renderer", None)
    if found is None:
        _process = os.getpid()
        found = _local.renderer = Renderer()
        atexit.register(found.close)  # after EGL's own, hence run before it: EGL complains about what is left
    return found


def _make_gl_context() -> Any:
    """MuJoCo's off-screen context; one line on what to do where there is none."""
    backend = choose_backend()
    try:
        if backend == "egl":  # by name: MuJoCo may have been imported before MUJOCO_GL was chosen
            from mujoco.egl import GLContext
        elif backend == "osmesa":
            from mujoco.osmesa import GLContext
        else:
            from mujoco import GLContext
        return GLContext(64, 64)
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise InputError(
            f"the tabletop's cameras cannot render with MUJOCO_GL={backend or 'unset'} ({reason}); install libegl1 and "
            "libgl1 (apt) and set MUJOCO_GL=egl, or use observation=state"
        ) from error
