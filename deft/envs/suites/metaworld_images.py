"""Images of MetaWorld's simulators, at the size that is asked for: one OpenGL context for all of a process.

`MetaWorldEnv` calls `Camera.render`. MetaWorld itself renders for 480 pixels: shadows from a map of 4096² pixels, and
meshes of 67,000 triangles in which one pixel of a small image holds dozens. `rendering="suite"` keeps the lights,
shadows and antialiasing and reduces both to the size of the image; `rendering="light"` has no shadows, and
`rendering="fast"` has no antialiasing either and coarser meshes.
"""

from __future__ import annotations

import copy
import threading
from typing import Any

import numpy as np

from deft.envs.mujoco_backend import cannot_render, choose_backend

NATIVE_SIZE = 480  # pixels, for which MetaWorld's shadow map is made
NATIVE_SHADOW = 4096
DISTANCE = 0.75  # metres from the camera to the nearest parts of the robot
DETAIL = {"suite": 0.5, "light": 0.5, "fast": 1.5}  # pixels: vertices of a mesh that are nearer are merged
MAX_GEOMS = 1000
# A position used by papers and datasets in place of the camera's own; MetaWorld names it corner4.
CAMERA, POSITION = "corner2", (0.75, 0.075, 0.7)
_local = threading.local()


class Camera:
    """Renders one simulator from the camera corner2 in images of one size."""

    def __init__(self, model: Any, size: int, rendering: str) -> None:
        import mujoco

        self._model, self._size = model, size
        self._gl = _context()
        self._gl.make_current()
        self._camera = mujoco.MjvCamera()
        self._camera.type = mujoco.mjtCamera.mjCAMERA_FIXED
        self._camera.fixedcamid = model.camera(CAMERA).id
        visual = copy.copy(model)
        angle = np.radians(float(model.cam_fovy[self._camera.fixedcamid]))
        merge_vertices(visual, DETAIL[rendering] * 2 * DISTANCE * np.tan(angle / 2) / size)
        visual.vis.global_.offwidth = visual.vis.global_.offheight = size
        visual.vis.quality.shadowsize = min(NATIVE_SHADOW, _power_of_two(NATIVE_SHADOW * size / NATIVE_SIZE))
        if rendering == "fast":
            visual.vis.quality.offsamples = 0
        self._context = mujoco.MjrContext(visual, mujoco.mjtFontScale.mjFONTSCALE_50)
        self._scene = mujoco.MjvScene(model, MAX_GEOMS)
        self._scene.flags[mujoco.mjtRndFlag.mjRND_REFLECTION] = False
        self._scene.flags[mujoco.mjtRndFlag.mjRND_SHADOW] = rendering == "suite"
        self._option, self._perturb = mujoco.MjvOption(), mujoco.MjvPerturb()
        self._pixels = np.empty((size, size, 3), np.uint8)

    def render(self, data: Any) -> np.ndarray:
        """Return an image, uint8 [size, size, 3]: upright, unlike the suite's, whose camera is upside down."""
        import mujoco

        self._gl.make_current()
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, self._context)
        mujoco.mjv_updateScene(
            self._model, data, self._option, self._perturb, self._camera, mujoco.mjtCatBit.mjCAT_ALL, self._scene
        )
        viewport = mujoco.MjrRect(0, 0, self._size, self._size)
        mujoco.mjr_render(viewport, self._scene, self._context)
        mujoco.mjr_readPixels(self._pixels, None, viewport, self._context)
        # OpenGL's first row is the lowest one, which is the highest one of a camera that is upside down.
        return self._pixels[:, ::-1].copy()

    def close(self) -> None:
        """Free the textures and meshes."""
        self._gl.make_current()
        self._context.free()


def merge_vertices(model: Any, cell: float) -> None:
    """Merge the vertices of each mesh that lie in one cube of side `cell`, and drop the triangles that vanish.

    Normals and texture coordinates stay those of the remaining triangles. Only images may be made from the model.
    """
    for mesh in range(model.nmesh):
        first, count = model.mesh_vertadr[mesh], model.mesh_vertnum[mesh]
        vertices = model.mesh_vert[first : first + count].astype(np.float64)
        _, chosen, cube = np.unique(np.floor(vertices / cell), axis=0, return_index=True, return_inverse=True)
        cube = cube.ravel()
        means = [np.bincount(cube, vertices[:, axis]) / np.bincount(cube) for axis in range(3)]
        model.mesh_vert[first + chosen] = np.stack(means, 1)
        start, total = model.mesh_faceadr[mesh], model.mesh_facenum[mesh]
        rows = slice(start, start + total)
        faces = chosen[cube][model.mesh_face[rows]]
        a, b, c = faces.T
        remaining = np.flatnonzero((a != b) & (b != c) & (a != c))
        _, unique = np.unique(np.sort(faces[remaining], 1), axis=0, return_index=True)
        kept = remaining[np.sort(unique)]
        for array, values in (
            (model.mesh_face, faces),
            (model.mesh_facenormal, model.mesh_facenormal[rows]),
            (model.mesh_facetexcoord, model.mesh_facetexcoord[rows]),
        ):
            array[start : start + len(kept)] = values[kept]
        model.mesh_facenum[mesh] = len(kept)


def _power_of_two(value: float) -> int:
    """Return the smallest power of two that is not less."""
    return 1 << int(np.ceil(np.log2(max(1.0, value))))


def _context() -> Any:
    """Return this thread's off-screen OpenGL context; make it on the first call."""
    found = getattr(_local, "context", None)
    if found is None:
        backend = choose_backend()
        try:
            import mujoco

            if backend == "egl":
                from mujoco.egl import GLContext
            elif backend == "osmesa":
                from mujoco.osmesa import GLContext
            else:
                GLContext = mujoco.GLContext
            found = _local.context = GLContext(64, 64)
        except Exception as error:
            raise cannot_render("metaworld", error) from error
    return found
