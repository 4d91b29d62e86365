"""Images of the tabletop: one off-screen OpenGL context for all environments of a process.

`TabletopEnv` calls `render`. Models differ between scenes, but textures and materials are equal, so one uploaded set
serves all environments: 64 of them need no more graphics memory than one. A context belongs to the thread that made it,
so there is one per rendering thread.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
from collections.abc import Sequence
from typing import Any

import mujoco
import numpy as np

from deft.envs.mujoco_backend import cannot_render, choose_backend
from deft.envs.tabletop.model import texture_model
from deft.errors import InputError, RunError

_FLAGS_OFF = ("mjRND_SHADOW", "mjRND_REFLECTION", "mjRND_SKYBOX", "mjRND_FOG", "mjRND_HAZE")
_MAX_GEOMS = 160
_HIDDEN_GROUP = 5  # MuJoCo draws groups 0 to 2
# A row of pixels that occurs in no scene: alternating magenta and green.
_UNWRITTEN = np.tile(np.array([[255, 0, 255], [0, 255, 0]], np.uint8), (4096, 1))


class Culling:
    """Finds the geoms that a camera cannot see, so that they are not drawn.

    In a camera's frame x is right, y is up and z is back. The distance of a point beyond one of the four planes of the
    view is x cos(a) + z sin(a), with a half the angle of view, likewise for -x, y and -y. A geom is out of view if the
    sphere around it is, or, for walls and floor, if all four corners are beyond the same plane.
    """

    def __init__(self, model: Any, data: Any) -> None:
        self._data = data
        self._radius = model.geom_rbound
        self._walls = np.flatnonzero(model.geom_type == mujoco.mjtGeom.mjGEOM_PLANE)
        signs = np.array([[-1, -1, 0], [-1, 1, 0], [1, -1, 0], [1, 1, 0]])
        corners = [
            data.geom_xpos[wall] + (signs * model.geom_size[wall]) @ data.geom_xmat[wall].reshape(3, 3).T
            for wall in self._walls
        ]
        self._corners = np.concatenate(corners)  # [4 per wall, 3]; they never move
        half_angles = np.radians(model.cam_fovy) / 2
        # A point times this is its distance beyond the right, left, upper and lower plane
        cosine, sine, zero = np.cos(half_angles), np.sin(half_angles), np.zeros(len(half_angles))
        planes = [[cosine, zero, sine], [-cosine, zero, sine], [zero, cosine, sine], [zero, -cosine, sine]]
        self._planes = np.array(planes).transpose(2, 1, 0)  # [cameras, 3, 4]

    def in_view(self, camera: int) -> np.ndarray:
        """Return which geoms may be visible, bool [geoms]."""
        data = self._data
        planes = data.cam_xmat[camera].reshape(3, 3) @ self._planes[camera]
        origin = data.cam_xpos[camera] @ planes
        beyond = (data.geom_xpos @ planes - origin).max(axis=1)
        visible = beyond <= self._radius
        visible[self._walls] = ((self._corners @ planes - origin).reshape(-1, 4, 4).min(axis=1) <= 0).all(axis=1)
        return visible


class Renderer:
    """Renders the models of all scenes from several cameras with one upload of textures."""

    def __init__(self) -> None:
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
        self._context = mujoco.MjrContext(texture_model(), mujoco.mjtFontScale.mjFONTSCALE_50)
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, self._context)
        self._size = (self._context.offWidth, self._context.offHeight)

    def render(self, model: Any, data: Any, culling: Culling, cameras: Sequence[int], size: int) -> list[np.ndarray]:
        """Return one image per camera, uint8 [size, size, 3], top row first; the next call reuses them.

        When another renderer of this process is freed, it may delete objects of this one: OpenGL's names are small
        numbers, and its context is not always current at that time. Such a loss is detected, and repaired once.
        """
        images = self._try_to_render(model, data, culling, cameras, size)
        if images is None:
            self._lost_contexts.append(self._context)  # freeing it would delete the new one's in turn
            self._open_context()
            images = self._try_to_render(model, data, culling, cameras, size)
        if images is None:
            raise RunError("the tabletop's cameras return no images: the off-screen buffer was lost twice")
        return images

    def _try_to_render(
        self, model: Any, data: Any, culling: Culling, cameras: Sequence[int], size: int
    ) -> list[np.ndarray] | None:
        """Return the images; None if nothing was written to the buffer."""
        self._gl.make_current()
        width = size * len(cameras)
        if width > self._size[0] or size > self._size[1]:
            self._size = (max(width, self._size[0]), max(size, self._size[1]))
            mujoco.mjr_resizeOffscreen(*self._size, self._context)
        pixels = self._buffers.get((size, width))
        if pixels is None:
            pixels = self._buffers[(size, width)] = np.empty((size, width, 3), np.uint8)
        pixels[0] = _UNWRITTEN[:width]
        for column, camera in enumerate(cameras):
            self._camera.fixedcamid = camera
            model.geom_group[:] = np.where(culling.in_view(camera), 0, _HIDDEN_GROUP)
            mujoco.mjv_updateScene(
                model, data, self._option, self._perturb, self._camera, mujoco.mjtCatBit.mjCAT_ALL, self._scene
            )
            mujoco.mjr_render(mujoco.MjrRect(column * size, 0, size, size), self._scene, self._context)
        mujoco.mjr_readPixels(pixels, None, mujoco.MjrRect(0, 0, width, size), self._context)
        if np.array_equal(pixels[0], _UNWRITTEN[:width]):
            return None
        upright = pixels[::-1]
        return [upright[:, column * size : (column + 1) * size] for column in range(len(cameras))]

    def close(self) -> None:
        """Free the context if this process made it."""
        if self._process == os.getpid():
            with contextlib.suppress(Exception):  # at the end of the process: there is no remedy
                self._context.free()
                self._gl.free()


_local = threading.local()
_process: int | None = None  # the first process that rendered


def renderer() -> Renderer:
    """Return this thread's renderer; make it on the first call."""
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
        atexit.register(found.close)  # registered after EGL's own exit function, so that it runs before it
    return found


def _make_gl_context() -> Any:
    """Make MuJoCo's off-screen context; raise InputError with a remedy if that fails."""
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
        raise cannot_render("the tabletop's cameras", error) from error
