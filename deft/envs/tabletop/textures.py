"""Procedural textures for table, walls and floor: computed once per process, always equal.

`model.py` gives each a material; a randomized scene chooses and tints them, which is faster than uploading new textures
for every scene.
"""

from __future__ import annotations

from functools import cache

import numpy as np

SIZE = 128  # pixels a side; they repeat without a seam
WOOD = 0  # the table of a clean scene
PLASTER = 1  # its walls
CONCRETE = 2  # its floor


def _noise(random: np.random.Generator, cells_x: int, cells_y: int, octaves: int = 4) -> np.ndarray:
    """Return periodic smooth noise in [0, 1]: interpolated random values on finer and finer grids, summed."""
    total = np.zeros((SIZE, SIZE))
    weight_sum = 0.0
    for octave in range(octaves):
        rows, columns = cells_y * 2**octave, cells_x * 2**octave
        if max(rows, columns) > SIZE:
            break
        grid = random.random((rows, columns))
        weight = 0.5**octave
        total += weight * _stretch(_stretch(grid, 0), 1)
        weight_sum += weight
    total /= weight_sum
    return (total - total.min()) / (total.max() - total.min())


def _stretch(grid: np.ndarray, axis: int) -> np.ndarray:
    """Interpolate along one axis to SIZE values, periodically."""
    count = grid.shape[axis]
    position = np.arange(SIZE) * count / SIZE
    first = position.astype(int)
    part = position - first
    part = part * part * (3 - 2 * part)
    shape = [1, 1]
    shape[axis] = SIZE
    part = part.reshape(shape)
    return np.take(grid, first % count, axis) * (1 - part) + np.take(grid, (first + 1) % count, axis) * part


def _between(values: np.ndarray, dark: tuple[float, ...], light: tuple[float, ...]) -> np.ndarray:
    """Map values in [0, 1] to colours from dark to light, float [SIZE, SIZE, 3]."""
    return values[..., None] * np.array(light) + (1 - values[..., None]) * np.array(dark)


def _wood(random: np.random.Generator, dark: tuple[float, ...], light: tuple[float, ...], planks: int) -> np.ndarray:
    grain = _noise(random, 2, 16, 4)
    grain = 0.6 * grain + 0.4 * (0.5 + 0.5 * np.sin(2 * np.pi * (6 * grain + _noise(random, 2, 4, 2))))
    image = _between(grain, dark, light)
    if planks:
        height = SIZE // planks
        shade = random.uniform(0.88, 1.05, planks).repeat(height)
        image *= shade[:, None, None]
        image[::height] *= 0.6
    return image


def _bricks(random: np.random.Generator, rows: int, columns: int, offset: bool) -> np.ndarray:
    """Return 1 inside a brick, less at its edge; `offset` shifts every second row by half a brick."""
    y, x = np.mgrid[0:SIZE, 0:SIZE] / SIZE
    row = np.floor(y * rows).astype(int)
    along = x * columns + (0.5 * (row % 2) if offset else 0)
    column = np.floor(along).astype(int) % columns
    shade = random.uniform(0.75, 1.0, (rows, columns))[row, column]
    gap = ((y * rows) % 1 < 0.1) | (along % 1 < 0.1 * columns / rows)
    return np.where(gap, 0.35, shade)


def _textures() -> list[np.ndarray]:
    random = np.random.default_rng(20)
    y, x = np.mgrid[0:SIZE, 0:SIZE] / SIZE
    noise = _noise
    veins = 1 - np.abs(2 * noise(random, 3, 3, 4) - 1)
    checks = ((x * 8).astype(int) + (y * 8).astype(int)) % 2
    stripes = ((x * 10).astype(int) % 2).astype(float)
    dots = (np.hypot((x * 8) % 1 - 0.5, (y * 8) % 1 - 0.5) < 0.3).astype(float)
    speckle = (random.random((SIZE, SIZE)) < 0.08) * random.uniform(0.3, 1, (SIZE, SIZE))
    weave = 0.5 + 0.25 * np.sin(2 * np.pi * 32 * x) * np.sign(np.sin(2 * np.pi * 16 * y))
    return [
        _wood(random, (0.58, 0.41, 0.26), (0.80, 0.64, 0.45), 0),
        _between(noise(random, 8, 8, 4), (0.74, 0.75, 0.76), (0.82, 0.82, 0.81)),
        _between(noise(random, 4, 4, 5), (0.45, 0.46, 0.47), (0.58, 0.58, 0.58)),
        _wood(random, (0.30, 0.18, 0.10), (0.50, 0.32, 0.20), 4),
        _wood(random, (0.72, 0.64, 0.52), (0.90, 0.84, 0.74), 4),
        _wood(random, (0.42, 0.36, 0.32), (0.62, 0.56, 0.50), 8),
        _between(veins**6, (0.90, 0.90, 0.88), (0.45, 0.45, 0.50)),
        _between(veins**6, (0.12, 0.13, 0.15), (0.75, 0.75, 0.70)),
        _between(noise(random, 3, 3, 5), (0.25, 0.35, 0.30), (0.65, 0.70, 0.55)),
        _between(noise(random, 2, 2, 3), (0.25, 0.30, 0.55), (0.75, 0.60, 0.45)),
        _between(_bricks(random, 8, 4, True), (0.35, 0.33, 0.32), (0.72, 0.36, 0.27)),
        _between(_bricks(random, 8, 4, True), (0.50, 0.50, 0.50), (0.92, 0.90, 0.86)),
        _between(_bricks(random, 4, 4, False), (0.45, 0.45, 0.45), (0.80, 0.88, 0.92)),
        _between(checks.astype(float), (0.25, 0.25, 0.27), (0.85, 0.85, 0.83)),
        _between(checks.astype(float), (0.55, 0.65, 0.75), (0.90, 0.92, 0.95)),
        _between(stripes, (0.55, 0.60, 0.50), (0.90, 0.88, 0.78)),
        _between(0.5 + 0.5 * np.sin(2 * np.pi * 4 * (x + y)), (0.40, 0.45, 0.60), (0.80, 0.82, 0.88)),
        _between(dots, (0.85, 0.80, 0.72), (0.45, 0.55, 0.60)),
        _between(speckle, (0.82, 0.82, 0.80), (0.20, 0.20, 0.22)),
        _between(weave + 0.3 * noise(random, 16, 16, 2), (0.35, 0.32, 0.30), (0.75, 0.72, 0.66)),
    ]


@cache
def atlas() -> np.ndarray:
    """Return all textures, uint8 [count, SIZE, SIZE, 3]; read-only."""
    textures = (np.clip(np.stack(_textures()), 0, 1) * 255 + 0.5).astype(np.uint8)
    textures.flags.writeable = False
    return textures


COUNT = 20
