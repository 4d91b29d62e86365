"""One MuJoCo model for all scenes, and the numbers in which scenes differ.

MuJoCo Warp simulates many environments with one model. Types and number of geoms are equal in all of them; sizes,
masses and positions may differ. So a movable object has one geom of each shape that it may have. The geoms that a
scene does not use are invisible and a tenth of a millimetre small, at the object's centre, where nothing touches them.
Unused clutter floats without weight far above the table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mujoco
import numpy as np

from deft.envs.tabletop.env import INSTRUCTION_LENGTH, TabletopEnv
from deft.envs.tabletop.model import HEAD_CAMERA, NUM_ROBOT, noise_tiles, scene_xml
from deft.envs.tabletop.scene import CLUTTER_SIZES, MAX_CLUTTER, TASK_SHAPES, Light, Scene, SceneObject
from deft.envs.tabletop.starts import PARTS
from deft.envs.tabletop.tasks import ALL_TASKS, GOAL_TASKS, TASKS
from deft.schema import encode_text

MAX_LIGHTS = 3
UNUSED_SIZE = 1e-4
PARKED_HEIGHT = 50.0
_TASK_SHAPES = tuple(shape for shape, _ in TASK_SHAPES.values())
_CLUTTER_SHAPES = tuple(CLUTTER_SIZES)
_NUM_TABLE_GEOMS = 8  # plane, top, edge, foot, fence
_GEOM_TYPES = {
    "box": mujoco.mjtGeom.mjGEOM_BOX,
    "cylinder": mujoco.mjtGeom.mjGEOM_CYLINDER,
    "sphere": mujoco.mjtGeom.mjGEOM_SPHERE,
    "capsule": mujoco.mjtGeom.mjGEOM_CAPSULE,
}


TASK_NUMBERS = {name: number for number, name in enumerate(TASKS)}

Numbers = dict[str, np.ndarray]


@dataclass
class BatchModel:
    """The model of all environments, and the indices of the parts that vary."""

    model: Any
    num_objects: int
    max_clutter: int
    shapes: list[dict[str, int]]
    """For each movable object: the geom of each shape."""
    fixed: list[int]
    """Geoms of furniture and room that every scene has, in the order of a scene's own model."""
    area: list[int]
    """Geoms of the marked area; [] if no task has one."""
    tiles: list[int]
    """Geoms of the noise patch; [] without one."""

    @property
    def num_robot_geoms(self) -> int:
        """Geoms of the robot, which are the first of every model."""
        return self.shapes[0]["box"]


def batch_model(env: TabletopEnv) -> BatchModel:
    """Compile the model for all scenes that this environment can draw."""
    names = GOAL_TASKS if env.settings.task == ALL_TASKS else (env.settings.task,)
    max_clutter = MAX_CLUTTER if env.randomization.cluttered_table else 0
    template = Scene(
        0,
        [_template_object(0.1)] * env.settings.num_objects,
        [_template_object(0.06)] * max_clutter,
        (0.5, 0.0) if any(TASKS[name].has_area for name in names) else None,
        lights=[Light((0.8, -0.8, 1.8), (0.35, 0.0, 0.1), (0.5, 0.5, 0.5))] * MAX_LIGHTS,
        noise_patch=(0.5, 0.0) if env.randomization.noise_patch_rate else None,
    )
    spec = mujoco.MjSpec.from_string(scene_xml(template))
    spec.option.enableflags &= ~int(mujoco.mjtEnableBit.mjENBL_SLEEP)  # MuJoCo Warp has no sleeping
    kinds = [_TASK_SHAPES] * env.settings.num_objects + [_CLUTTER_SHAPES] * max_clutter
    for index, shapes in enumerate(kinds):
        for shape in shapes[1:]:
            spec.body(f"object{index}").add_geom(
                spec.find_default("object"),
                name=f"object{index}_{shape}",
                type=_GEOM_TYPES[shape],
                size=[UNUSED_SIZE] * 3,
                condim=6 if shape in ("sphere", "capsule") else 4,
                mass=0.0,
            )
    model = spec.compile()
    named = [
        {shape: model.geom(f"object{index}_{shape}" if shape != "box" else f"object{index}").id for shape in shapes}
        for index, shapes in enumerate(kinds)
    ]
    return BatchModel(model, env.settings.num_objects, max_clutter, named, *_furniture(model, template))


def _template_object(mass: float) -> SceneObject:
    return SceneObject("box", (0.02, 0.02, 0.02), (0.5, 0.5, 0.5, 1.0), (0.5, 0.0), (1.0, 0.0, 0.0, 0.0), mass)


def _furniture(model: Any, scene: Scene) -> tuple[list[int], list[int], list[int]]:
    """Return the geoms of furniture and room: those of every scene, the area, the noise patch."""
    static = [model.body(name).id for name in ("furniture", "room")]
    geoms = np.flatnonzero(np.isin(model.geom_bodyid, static)).tolist()
    area = geoms[_NUM_TABLE_GEOMS : _NUM_TABLE_GEOMS + 2] if scene.area is not None else []
    tiles = list(range(model.ngeom))[noise_tiles(model)] if scene.noise_patch is not None else []
    return [geom for geom in geoms if geom not in area and geom not in tiles], area, tiles


def scene_numbers(batch: BatchModel, scene: Scene, model: Any, data: Any) -> Numbers:
    """Return what a scene sets in the model and state of its environment, from the scene's own model and state.

    `geom_…`, `body_…` and `dof_…` are fields of the model; `static_position` holds the positions of furniture and room;
    `qpos` and `qvel` the state (`state_numbers`); the rest is appearance.
    """
    whole = batch.model
    num_geoms = whole.ngeom
    size = np.full((num_geoms, 3), UNUSED_SIZE)
    position = np.zeros((num_geoms, 3))
    rgba = np.zeros((num_geoms, 4))
    material = np.full(num_geoms, -1)
    aabb = np.zeros((num_geoms, 6))
    aabb[:, 3:] = UNUSED_SIZE
    radius = np.full(num_geoms, 2 * UNUSED_SIZE)
    inertia, iquat, weight = whole.body_inertia.copy(), whole.body_iquat.copy(), whole.body_invweight0.copy()
    gravity_compensation = whole.body_gravcomp.copy()
    dof_weight = whole.dof_invweight0.copy()

    own_fixed, own_area, own_tiles = _furniture(model, scene)
    robot = list(range(batch.num_robot_geoms))
    pairs = list(zip(robot + batch.fixed, robot + own_fixed, strict=True))
    pairs += list(zip(batch.area, own_area, strict=False)) + list(zip(batch.tiles, own_tiles, strict=False))
    bodies = []
    for index, item in enumerate(scene.everything):
        slot = _slot(batch, scene, index)
        pairs.append((batch.shapes[slot][item.shape], model.geom(f"object{index}").id))
        bodies.append((slot, index))
    to, of = (list(column) for column in zip(*pairs, strict=True))
    size[to], rgba[to], material[to] = model.geom_size[of], model.geom_rgba[of], model.geom_matid[of]
    radius[to], aabb[to], position[to] = model.geom_rbound[of], model.geom_aabb[of], data.geom_xpos[of]
    dof_weight[:NUM_ROBOT] = model.dof_invweight0[:NUM_ROBOT]
    for slot, index in bodies:
        body, own = whole.body(f"object{slot}").id, model.body(f"object{index}").id
        inertia[body], iquat[body] = model.body_inertia[own], model.body_iquat[own]
        weight[body] = model.body_invweight0[own]
        to_dofs, own_dofs = NUM_ROBOT + 6 * slot, NUM_ROBOT + 6 * index
        dof_weight[to_dofs : to_dofs + 6] = model.dof_invweight0[own_dofs : own_dofs + 6]
    used = {slot for slot, _ in bodies}
    for slot in range(len(batch.shapes)):
        if slot not in used:  # clutter that this scene does not have
            gravity_compensation[whole.body(f"object{slot}").id] = 1.0
    lights = np.zeros((MAX_LIGHTS, 9))  # position, direction, colour
    lights[: model.nlight, :3], lights[: model.nlight, 3:6] = data.light_xpos, data.light_xdir
    lights[: model.nlight, 6:] = model.light_diffuse
    camera = model.camera(HEAD_CAMERA).id
    objects = scene.objects
    numbers = {
        "geom_size": size,
        "geom_rbound": radius,
        "geom_aabb": aabb.reshape(num_geoms, 2, 3),
        "body_inertia": inertia,
        "body_iquat": iquat,
        "body_invweight0": weight,
        "body_gravcomp": gravity_compensation,
        "dof_invweight0": dof_weight,
        "camera_position": model.cam_pos[camera],
        "camera_quaternion": model.cam_quat[camera],
        "static_position": position,
        **state_numbers(batch, scene, data),
        "rgba": rgba,
        "material": material,
        "lights": lights,
        "ambient": model.vis.headlight.ambient[0],
        "flickers": scene.flickers,
        "half_height": [item.half_height for item in objects],
        "half_width": [item.half_width for item in objects],
        "area": (0.0, 0.0) if scene.area is None else scene.area,
        "has_area": scene.area is not None,
        "top": -scene.table_drop,
    }
    whole_numbers = ("material",)
    return {
        name: np.asarray(value, np.int32 if name in whole_numbers else np.float32) for name, value in numbers.items()
    }


def _slot(batch: BatchModel, scene: Scene, index: int) -> int:
    """Return which movable object of the batch an object of a scene is."""
    return index if index < len(scene.objects) else index - len(scene.objects) + batch.num_objects


def state_numbers(batch: BatchModel, scene: Scene, data: Any) -> Numbers:
    """Return `qpos` and `qvel` of an environment from the scene's own state; unused clutter floats above the table."""
    qpos, qvel = np.zeros(batch.model.nq, np.float32), np.zeros(batch.model.nv, np.float32)
    for slot in range(len(batch.shapes)):
        qpos[NUM_ROBOT + 7 * slot :][:7] = (0.5, 0.0, PARKED_HEIGHT + slot, 1.0, 0.0, 0.0, 0.0)
    qpos[:NUM_ROBOT], qvel[:NUM_ROBOT] = data.qpos[:NUM_ROBOT], data.qvel[:NUM_ROBOT]
    for index in range(len(scene.everything)):
        slot = _slot(batch, scene, index)
        qpos[NUM_ROBOT + 7 * slot :][:7] = data.qpos[NUM_ROBOT + 7 * index :][:7]
        qvel[NUM_ROBOT + 6 * slot :][:6] = data.qvel[NUM_ROBOT + 6 * index :][:6]
    return {"qpos": qpos, "qvel": qvel}


def _moving(batch: BatchModel, env: TabletopEnv) -> Numbers:
    """Return the state, and the `targets` of the joints and the `fingers`."""
    targets, fingers = env.targets
    return {
        **state_numbers(batch, env.scene, env.simulation.data),
        "targets": np.asarray(targets, np.float32),
        "fingers": np.array(fingers, np.float32),
    }


def _way(batch: BatchModel, env: TabletopEnv) -> Numbers:
    """Return `start_draw` and, for each part of the expert's way, `way_…`: the numbers of `_moving`."""
    states = []
    for part in range(PARTS):
        if env.start_draw is not None:
            env.begin_on_the_way(part)
        states.append(_moving(batch, env))
    draw = np.array(-1.0 if env.start_draw is None else env.start_draw, np.float32)
    return {"start_draw": draw, **{f"way_{name}": np.stack([one[name] for one in states]) for name in states[0]}}


def draw_block(arguments: dict[str, Any], length: int, starts: Sequence[Any]) -> tuple[Numbers, list[Any]]:
    """Return the next `length` episodes of several environments, [environments, length, …] each, and their generators.

    A start is a seed, or the state of an environment's random numbers after its previous block. The numbers are those
    of `scene_numbers`, `task`, `goal`, `base` (int32), `instruction` (uint8 [64]), and the `targets` of joints and
    `fingers`. With `expert_starts` they include those of the parts of the expert's way, and `start_draw`, which chooses
    one; -1: the episode begins at the beginning.
    """
    env = TabletopEnv(**{**arguments, "observation": "state"})
    batch = batch_model(env)
    blank = env.get_state()
    rows: list[Numbers] = []
    ends = []
    for start in starts:
        env.set_state({**blank, "random": blank["random"] if isinstance(start, int) else start})
        for number in range(length):
            env.reset(seed=start if number == 0 and isinstance(start, int) else None)
            simulation = env.simulation
            rows.append(
                {
                    **scene_numbers(batch, simulation.scene, simulation.model, simulation.data),
                    **_moving(batch, env),
                    "task": np.array(TASK_NUMBERS[env.task_name], np.int32),
                    "goal": np.array(env.goal.index, np.int32),
                    "base": np.array(env.goal.base, np.int32),
                    "instruction": encode_text(env.instruction, INSTRUCTION_LENGTH),
                    **(_way(batch, env) if env.settings.expert_starts else {}),
                }
            )
        ends.append(env.np_random.bit_generator.state)
    numbers = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
    return {name: values.reshape(len(starts), length, *values.shape[1:]) for name, values in numbers.items()}, ends
