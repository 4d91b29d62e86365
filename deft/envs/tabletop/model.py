"""From a scene to a MuJoCo model: room, table, lights, cameras, the Panda and the objects, all from primitives.

`TabletopEnv` compiles a model for each scene (about three milliseconds) and steps it. The order of bodies is fixed, so
that positions are the same slices in every model: seven arm joints, two fingers, then seven numbers per object. Objects
at rest sleep (MuJoCo wakes them at a contact), so that a cluttered table steps almost as fast as an empty one.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import mujoco
import numpy as np

from deft.envs.tabletop import panda, textures
from deft.envs.tabletop.scene import (
    AREA_RADIUS,
    NOISE_SIDE,
    NOISE_TILES,
    TABLE_X,
    TABLE_Y,
    Scene,
    SceneObject,
    Surface,
)

TIMESTEP = 1 / 250
HEAD_CAMERA = "head_camera"
WRIST_CAMERA = "wrist_camera"
HEAD_POSITION = np.array([1.27, 0.0, 0.90])
HEAD_TARGET = np.array([0.36, 0.0, 0.22])
HEAD_FOVY = 52
ROOM = (-0.8, 1.9, -1.6, 1.6)  # walls: x from, x to, y from, y to
FLOOR_HEIGHT = -0.75
WALL_TOP = 1.7

# Collision bits (contype, conaffinity). Two geoms collide if the contype of one shares a bit with the conaffinity of
# the other: table 1, robot 2, objects 4, fence 8. The fence, four planes at the table's edges, collides only with
# objects and keeps them on the table.
ROBOT_BIT, OBJECT_BIT = 2, 4
_OBJECT_BITS = f'contype="{OBJECT_BIT}" conaffinity="15"'

# Rows of `qpos` and `qvel`.
ARM = slice(0, panda.NUM_JOINTS)
FINGERS = slice(panda.NUM_JOINTS, panda.NUM_JOINTS + 2)
NUM_ROBOT = panda.NUM_JOINTS + 2


def object_position(index: int) -> slice:
    """Return the slice of `qpos` with the position of an object."""
    return slice(NUM_ROBOT + 7 * index, NUM_ROBOT + 7 * index + 3)


def compile_scene(scene: Scene) -> Any:
    """Compile the scene's MjModel. Its textures are blank: the renderer's own model has them."""
    return mujoco.MjModel.from_xml_string(scene_xml(scene))


@cache
def texture_model() -> Any:
    """Return a model with all materials and textures, which the renderer uploads once."""
    model = mujoco.MjModel.from_xml_string(scene_xml(Scene(0, []), textures.SIZE))
    model.tex_data[:] = textures.atlas().ravel()
    return model


@cache
def arm_model() -> Any:
    """Return a model of only the robot, for kinematics."""
    return mujoco.MjModel.from_xml_string(
        f'<mujoco><compiler angle="radian" /><asset><material name="shell" /></asset>'
        f"<default>{panda.DEFAULTS}</default><worldbody>{panda.ARM}</worldbody></mujoco>"
    )


def scene_xml(scene: Scene, texture_size: int = 1) -> str:
    """Return the scene as MJCF.

    Bodies are drawn in their order: robot and objects first, the large surfaces behind them last, so that hidden pixels
    of these are not drawn. This saves a quarter of the time of a software renderer.
    """
    top = -scene.table_drop
    return f"""
<mujoco model="tabletop">
  <compiler angle="radian" />
  <option timestep="{TIMESTEP}" integrator="implicitfast" cone="elliptic" impratio="3" iterations="50"
          ls_iterations="30" tolerance="1e-8" sleep_tolerance="0.001">
    <flag sleep="enable" />
  </option>
  <size memory="8M" />
  <visual>
    <headlight ambient="{_text([scene.ambient] * 3)}" diffuse="0.25 0.25 0.25" specular="0.05 0.05 0.05" />
    <quality numslices="14" numstacks="3" numquads="1" offsamples="0" shadowsize="0" />
    <map znear="0.01" zfar="8" />
    <global offwidth="128" offheight="64" />
  </visual>
  <asset>{_assets(texture_size)}</asset>
  <default>
    {panda.DEFAULTS}
    <default class="look"><geom contype="0" conaffinity="0" /></default>
    <default class="object">
      <joint type="free" damping="0.0001" />
      <geom {_OBJECT_BITS} friction="1 0.01 0.001" condim="4" solimp="0.95 0.99 0.001" solref="0.01 1" />
    </default>
  </default>
  <worldbody>
    {_lights(scene)}
    {_head_camera(scene)}
    {panda.ARM}
    {"".join(_object(f"object{index}", item, top) for index, item in enumerate(scene.everything))}
    <body name="furniture">
      {_table(scene, top)}
      <geom class="look" type="box" size="0.11 0.11 {-FLOOR_HEIGHT / 2}" pos="-0.02 0 {FLOOR_HEIGHT / 2}"
            rgba="0.27 0.28 0.31 1" />
    </body>
    <body name="room">{_room(scene)}</body>
  </worldbody>
  {panda.ACTUATORS}
</mujoco>"""


def _text(values: Any) -> str:
    return " ".join(f"{float(value):.6g}" for value in values)


@cache
def _assets(texture_size: int) -> str:
    """Return the textures with two materials each: at normal scale, and three times as fine."""
    lines = ['<material name="shell" specular="0.4" shininess="0.5" />']
    lines += [f'<material name="gloss{level}" specular="{level / 4}" shininess="{level / 4}" />' for level in range(5)]
    for index in range(textures.COUNT):
        lines.append(
            f'<texture name="t{index}" type="2d" builtin="flat" width="{texture_size}" height="{texture_size}" '
            f'rgb1="1 1 1" />'
        )
        for kind, repeat in (("coarse", 1.5), ("fine", 4.5)):  # per metre
            lines.append(
                f'<material name="{kind}{index}" texture="t{index}" texuniform="true" texrepeat="{repeat} {repeat}" '
                f'specular="0.1" shininess="0.2" />'
            )
    return "".join(lines)


def _look(surface: Surface) -> str:
    kind = "fine" if surface.is_fine else "coarse"
    return f'class="look" material="{kind}{surface.texture}" rgba="{_text(surface.tint)} 1"'


def _lights(scene: Scene) -> str:
    lines = []
    for light in scene.lights:
        direction = np.subtract(light.target, light.position)
        lines.append(
            f'<light pos="{_text(light.position)}" dir="{_text(direction)}" diffuse="{_text(light.colour)}" '
            f'specular="0.2 0.2 0.2" castshadow="false" cutoff="90" exponent="0" />'
        )
    return "".join(lines)


def _room(scene: Scene) -> str:
    """Return floor and four walls, as planes that face inwards."""
    left, right, near, far = ROOM
    middle_x, middle_y = (left + right) / 2, (near + far) / 2
    half_x, half_y, half_z = (right - left) / 2, (far - near) / 2, (WALL_TOP - FLOOR_HEIGHT) / 2
    height = (WALL_TOP + FLOOR_HEIGHT) / 2
    centre = f"{middle_x} {middle_y} {FLOOR_HEIGHT}"
    floor = f'<geom {_look(scene.floor)} type="plane" size="{half_x} {half_y} 1" pos="{centre}" />'
    walls = [
        (left, middle_y, "0 1 0 0 0 1", half_y),
        (right, middle_y, "0 -1 0 0 0 1", half_y),
        (middle_x, far, "1 0 0 0 0 1", half_x),
        (middle_x, near, "-1 0 0 0 0 1", half_x),
    ]
    return floor + "".join(
        f'<geom {_look(scene.walls)} type="plane" size="{half} {half_z} 1" pos="{x} {y} {height}" xyaxes="{axes}" />'
        for x, y, axes, half in walls
    )


def _table(scene: Scene, top: float) -> str:
    """Return the visible top, edge and foot, the plane and the fence for contacts, and the marked area."""
    (left, right), (near, far) = TABLE_X, TABLE_Y
    x, y, half_x, half_y = (left + right) / 2, (near + far) / 2, (right - left) / 2, (far - near) / 2
    base_height = (top - 0.06 - FLOOR_HEIGHT) / 2
    dark = f'class="look" rgba="{_text(0.45 * np.array(scene.table.tint))} 1"'
    lines = [
        f'<geom name="table" type="plane" size="1 1 1" pos="0 0 {top}" contype="1" conaffinity="6" rgba="0 0 0 0" '
        'solimp="0.95 0.99 0.001" solref="0.01 1" />',
        f'<geom {_look(scene.table)} type="box" size="{half_x} {half_y} 0.01" pos="{x} {y} {top - 0.01}" />',
        f'<geom {dark} type="box" size="{half_x + 0.012} {half_y + 0.012} 0.025" pos="{x} {y} {top - 0.028}" />',
        f'<geom {dark} type="box" size="{half_x - 0.1} {half_y - 0.1} {base_height}" '
        f'pos="{x} {y} {FLOOR_HEIGHT + base_height}" />',
    ]
    fence = 'type="plane" size="1 1 1" contype="8" conaffinity="0" rgba="0 0 0 0"'
    for x_fence, y_fence, normal in ((left, 0, "1 0 0"), (right, 0, "-1 0 0"), (0, near, "0 1 0"), (0, far, "0 -1 0")):
        lines.append(f'<geom {fence} pos="{x_fence} {y_fence} 0" zaxis="{normal}" />')
    if scene.area is not None:
        centre = _text(scene.area)
        lines += [
            f'<geom class="look" type="cylinder" size="{AREA_RADIUS + 0.008} 0.0006" pos="{centre} {top + 0.0004}" '
            f'rgba="0.1 0.1 0.1 1" />',
            f'<geom class="look" type="cylinder" size="{AREA_RADIUS} 0.001" pos="{centre} {top + 0.0008}" '
            f'rgba="0.97 0.97 0.97 1" />',
        ]
    if scene.noise_patch is not None:
        side = NOISE_SIDE / NOISE_TILES
        shifts = (np.arange(NOISE_TILES) - (NOISE_TILES - 1) / 2) * side
        lines += [
            f'<geom name="noise{index}" class="look" type="box" size="{side / 2} {side / 2} 0.0005" '
            f'pos="{scene.noise_patch[0] + x} {scene.noise_patch[1] + y} {top + 0.0003}" rgba="0.5 0.5 0.5 1" />'
            for index, (x, y) in enumerate((x, y) for x in shifts for y in shifts)
        ]
    return "".join(lines)


def noise_tiles(model: Any) -> slice:
    """Return the slice of a model's geoms with the tiles of the noise patch."""
    first = model.geom("noise0").id
    return slice(first, first + NOISE_TILES**2)


def _head_camera(scene: Scene) -> str:
    position = HEAD_POSITION + scene.head_camera_shift
    forward = HEAD_TARGET - position
    right = np.cross(forward, [0, 0, 1])
    up = np.cross(right, forward)
    return f'<camera name="{HEAD_CAMERA}" pos="{_text(position)}" xyaxes="{_text([*right, *up])}" fovy="{HEAD_FOVY}" />'


def _object(name: str, item: SceneObject, top: float) -> str:
    rolling = ' condim="6"' if item.shape in ("sphere", "capsule") else ""
    return (
        f'<body name="{name}" pos="{_text(item.place)} {top + item.half_height}" quat="{_text(item.quaternion)}" '
        f'childclass="object"><joint /><geom name="{name}" type="{item.shape}" size="{_text(item.size)}" '
        f'rgba="{_text(item.rgba)}" mass="{item.mass}" material="gloss{round(4 * item.gloss)}"{rolling} /></body>'
    )
