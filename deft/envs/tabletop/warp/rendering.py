"""The cameras of all environments by ray tracing, with the lighting of MuJoCo's OpenGL renderer.

MuJoCo Warp has a ray tracer of its own, but with other lights, without highlights and without textures on boxes. The
kernels in `tracing.py` draw what `deft.envs.tabletop.rendering` draws.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import warp as wp

from deft.envs.tabletop import textures
from deft.envs.tabletop.warp import tracing


def mipmaps() -> np.ndarray:
    """Return all textures with their coarser levels, each the mean of 2 × 2 pixels: float32 [textures, pixels, 3]."""
    level = textures.atlas().astype(np.float32) / 255
    levels = []
    while True:
        levels.append(level.reshape(len(level), -1, 3))
        side = level.shape[1]
        if side == 1:
            return np.concatenate(levels, axis=1)
        level = level.reshape(-1, side // 2, 2, side // 2, 2, 3).mean(axis=(2, 4))


class Cameras:
    """Renders the cameras of many environments: uint8 [N, 3 cameras, side, side]."""

    def __init__(self, model: Any, cameras: list[int], side: int, num_envs: int, device: Any) -> None:
        """`model` is the MjModel of all environments; `cameras` are numbers of its cameras."""
        self._device = device
        self._side = side
        self._near = float(model.vis.map.znear * model.stat.extent)
        self._tangents = self._array(np.tan(np.radians(model.cam_fovy[cameras]) / 2), float)
        self._cameras = self._array(cameras, int)
        self.looks = tracing.Looks()
        self.looks.geom_type = self._array(model.geom_type, int)
        self.looks.gloss = self._array(np.stack([model.mat_specular, model.mat_shininess], axis=1), wp.vec2)
        self.looks.texture = self._array(model.mat_texid[:, 1], int)
        self.looks.repeat = self._array(model.mat_texrepeat[:, 0], float)
        self.looks.texels = wp.array(mipmaps(), dtype=wp.vec3, device=device)
        shape = (num_envs, len(cameras), model.ngeom)
        self._views = tracing.Views()
        self._views.count = wp.zeros(shape[:2], dtype=int, device=device)
        self._views.geom = wp.zeros(shape, dtype=int, device=device)
        self._views.bounds = wp.zeros(shape, dtype=wp.vec4, device=device)
        self._views.origin = wp.zeros(shape, dtype=wp.vec3, device=device)
        self._views.rotation = wp.zeros(shape, dtype=wp.mat33, device=device)

    def _array(self, values: Any, dtype: Any) -> Any:
        return wp.array(np.ascontiguousarray(values), dtype=dtype, device=self._device)

    def render(self, rows: Any, radius: Any, data: Any, images: Any) -> None:
        """Draw the environments `rows` (int32 [K]) with the positions in MuJoCo Warp's `data` into `images`."""
        poses = [data.geom_xpos, data.geom_xmat, data.cam_xpos, data.cam_xmat]
        views = (len(rows), len(self._cameras))
        common = [rows, self._cameras, self._tangents, self._near]
        wp.launch(
            tracing.find_visible, views, [*common, self.looks, radius, *poses], [self._views], device=self._device
        )
        wp.launch(
            tracing.trace,
            (*views, self._side * self._side),
            [*common, self._side, self.looks, *poses, self._views],
            [images],
            device=self._device,
        )
