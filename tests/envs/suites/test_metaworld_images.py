"""Meshes with fewer triangles for small images; MuJoCo itself is Deft's own here."""

import mujoco
import numpy as np

from deft.envs.suites.metaworld_images import _power_of_two, merge_vertices


def sphere(rings: int = 24) -> mujoco.MjModel:
    """A model with one mesh: a sphere of radius 1 in `rings` times `rings` squares."""
    angles, heights = np.linspace(0, 2 * np.pi, rings, endpoint=False), np.linspace(0.05, np.pi - 0.05, rings)
    points = [(np.sin(h) * np.cos(a), np.sin(h) * np.sin(a), np.cos(h)) for h in heights for a in angles]
    number = np.arange(rings * rings).reshape(rings, rings)
    a, b = number[:-1], np.roll(number, -1, axis=1)[:-1]
    c, d = number[1:], np.roll(number, -1, axis=1)[1:]
    faces = np.concatenate([np.stack([a, c, b], -1).reshape(-1, 3), np.stack([b, c, d], -1).reshape(-1, 3)])
    text = [" ".join(str(value) for value in np.ravel(values)) for values in (points, faces)]
    return mujoco.MjModel.from_xml_string(
        f'<mujoco><asset><mesh name="ball" inertia="shell" vertex="{text[0]}" face="{text[1]}"/></asset>'
        '<worldbody><geom type="mesh" mesh="ball"/></worldbody></mujoco>'
    )


def test_vertices_within_a_cell_are_merged():
    model = sphere()
    before, extent = int(model.mesh_facenum[0]), np.abs(model.mesh_vert).max(axis=0)
    merge_vertices(model, 1e-6)
    assert model.mesh_facenum[0] == before  # no two vertices are that near
    merge_vertices(model, 0.25)
    count = int(model.mesh_facenum[0])
    assert 0 < count < before / 2
    faces = model.mesh_face[:count]
    assert all(len(set(face)) == 3 for face in faces.tolist())
    # A merged vertex is the mean of those of its cell: the shape shrinks by less than the cell.
    merged = np.abs(model.mesh_vert[np.unique(faces)]).max(axis=0)
    assert np.all(merged <= extent)
    assert np.all(merged > extent - 0.25)


def test_the_shadow_map_is_a_power_of_two():
    # 4096 · 84 / 480 = 716.8
    assert [_power_of_two(size) for size in (716.8, 1024, 4096)] == [1024, 1024, 4096]
