"""Control, tasks and observations as kernels: one thread for each environment.

They compute what `control.py`, `tasks.py` and `TabletopEnv` compute for one environment, in float32. `WarpSimulation`
launches them.
"""

from __future__ import annotations

import numpy as np
import warp as wp

from deft.envs.tabletop import control, panda, tasks
from deft.envs.tabletop.env import CONTROL_WEIGHT, MAX_VELOCITY, OBJECT_SIZE, PROPRIOCEPTION_SIZE, SUCCESS_REWARD
from deft.envs.tabletop.model import NUM_ROBOT
from deft.envs.tabletop.scene import AREA_RADIUS

wp.set_module_options({"enable_backward": False, "max_unroll": 4})

EXPLORATION, REACH, PUSH, PICK, PLACE = (wp.constant(number) for number in range(len(tasks.TASKS)))
NUM_TASKS = wp.constant(len(tasks.TASKS))
DENSE_TERMS = wp.constant(5)
ROBOT_SIZE = wp.constant(NUM_ROBOT)
JOINTS = wp.constant(panda.NUM_JOINTS)
FULL_POSE, POSITION = wp.constant(1), wp.constant(2)  # control modes; 0: joint deltas

vec6 = wp.types.vector(6, float)
vec7 = wp.types.vector(7, float)
mat66 = wp.types.matrix((6, 6), float)
mat37 = wp.types.matrix((3, 7), float)
mat67 = wp.types.matrix((6, 7), float)


@wp.struct
class Arm:
    """Constants of the arm: the frame of each link in that of the previous one, and the limits of the targets."""

    position: wp.array(dtype=wp.vec3)  # of the seven links, the hand and the point between the finger tips
    rotation: wp.array(dtype=wp.mat33)
    home: vec7
    lower: vec7
    upper: vec7


@wp.struct
class Episodes:
    """What the task of each environment needs, [N, …] each."""

    task: wp.array(dtype=int)
    goal: wp.array(dtype=int)
    base: wp.array(dtype=int)
    half_height: wp.array2d(dtype=float)
    half_width: wp.array2d(dtype=float)
    area: wp.array(dtype=wp.vec2)
    has_area: wp.array(dtype=float)
    top: wp.array(dtype=float)
    potentials: wp.array(dtype=wp.vec2)


@wp.struct
class State:
    """Arrays of MuJoCo Warp's data."""

    qpos: wp.array2d(dtype=float)
    qvel: wp.array2d(dtype=float)
    tcp: wp.array2d(dtype=wp.vec3)
    tcp_rotation: wp.array2d(dtype=wp.mat33)


# ------------------------------------------------------------------------------------------------------------ control


@wp.func
def hand_pose(arm: Arm, joints: vec7):
    """Return position and rotation of the point between the finger tips, and axis and anchor of each joint."""
    position = wp.vec3(0.0, 0.0, 0.0)
    rotation = wp.identity(n=3, dtype=float)
    axes = mat37()
    anchors = mat37()
    for link in range(9):
        position = position + rotation @ arm.position[link]
        rotation = rotation @ arm.rotation[link]
        if link < JOINTS:
            for row in range(3):
                axes[row, link] = rotation[row, 2]
                anchors[row, link] = position[row]
            c = wp.cos(joints[link])
            s = wp.sin(joints[link])
            rotation = rotation @ wp.mat33(c, -s, 0.0, s, c, 0.0, 0.0, 0.0, 1.0)
    return position, rotation, axes, anchors


@wp.func
def rotation_vector(turn: wp.mat33) -> wp.vec3:
    """Return axis times angle of a rotation matrix."""
    twice = wp.vec3(turn[2, 1] - turn[1, 2], turn[0, 2] - turn[2, 0], turn[1, 0] - turn[0, 1])
    sine = 0.5 * wp.length(twice)
    cosine = 0.5 * (wp.trace(turn) - 1.0)
    if sine > 1.0e-6:
        return twice * (0.5 * wp.atan2(sine, cosine) / sine)
    if cosine > 0.0:
        return 0.5 * twice
    return wp.static(float(np.pi)) * wp.vec3(
        wp.sqrt(wp.max(0.5 * (turn[0, 0] + 1.0), 0.0)),
        wp.sqrt(wp.max(0.5 * (turn[1, 1] + 1.0), 0.0)),
        wp.sqrt(wp.max(0.5 * (turn[2, 2] + 1.0), 0.0)),
    )


@wp.func
def solve_symmetric(a: mat66, b: vec6) -> vec6:
    """Solve a x = b by Cholesky's decomposition a = L Lᵀ."""
    low = mat66()
    x = vec6()
    for i in range(6):
        for j in range(i + 1):
            total = a[i, j]
            for k in range(j):
                total -= low[i, k] * low[j, k]
            if i == j:
                low[i, i] = wp.sqrt(total)
            else:
                low[i, j] = total / low[j, j]
        total = b[i]
        for k in range(i):
            total -= low[i, k] * x[k]
        x[i] = total / low[i, i]
    for step in range(6):
        i = 5 - step
        total = x[i]
        for k in range(i + 1, 6):
            total -= low[k, i] * x[k]
        x[i] = total / low[i, i]
    return x


@wp.func
def solve_pose(arm: Arm, joints: vec7, goal: wp.vec3, goal_rotation: wp.mat33) -> vec7:
    """Return joints for a pose of the hand, by damped least squares; see `Kinematics.solve`."""
    found = vec7(joints)
    for _iteration in range(wp.static(control._ITERATIONS)):
        position, rotation, axes, anchors = hand_pose(arm, found)
        shift = goal - position
        turn = rotation_vector(goal_rotation @ wp.transpose(rotation))
        error = vec6(shift[0], shift[1], shift[2], turn[0], turn[1], turn[2])
        square = mat66()
        for row in range(6):
            square[row, row] = wp.static(control._DAMPING**2)
        jacobian = mat67()
        posture = wp.static(control._POSTURE_GAIN) * (arm.home - found)
        for joint in range(JOINTS):
            axis = wp.vec3(axes[0, joint], axes[1, joint], axes[2, joint])
            lever = position - wp.vec3(anchors[0, joint], anchors[1, joint], anchors[2, joint])
            motion = wp.cross(axis, lever)
            column = vec6(motion[0], motion[1], motion[2], axis[0], axis[1], axis[2])
            for row in range(6):
                jacobian[row, joint] = column[row]
            square += wp.outer(column, column)
            error -= column * posture[joint]
        weights = solve_symmetric(square, error)
        for joint in range(JOINTS):
            change = posture[joint]
            for row in range(6):
                change += jacobian[row, joint] * weights[row]
            found[joint] = wp.clamp(found[joint] + change, arm.lower[joint], arm.upper[joint])
    return found


@wp.kernel
def command(
    mode: int,
    scale: float,
    arm: Arm,
    actions: wp.array2d(dtype=float),
    qpos: wp.array2d(dtype=float),
    targets: wp.array(dtype=vec7),
    fingers: wp.array(dtype=float),
    ctrl: wp.array2d(dtype=float),
):
    """Add an action to the targets of one environment; see `ArmController.command`."""
    env = wp.tid()
    old = targets[env]
    new = vec7(old)
    if mode == 0:
        for joint in range(JOINTS):
            new[joint] += wp.static(control.MAX_JOINT_STEP) * scale * wp.clamp(actions[env, joint], -1.0, 1.0)
    else:
        position, rotation, _axes, _anchors = hand_pose(arm, old)
        for axis in range(3):
            position[axis] += wp.static(control.MAX_POSITION_STEP) * scale * wp.clamp(actions[env, axis], -1.0, 1.0)
        if mode == FULL_POSE:
            turn = wp.vec3(
                wp.clamp(actions[env, 3], -1.0, 1.0),
                wp.clamp(actions[env, 4], -1.0, 1.0),
                wp.clamp(actions[env, 5], -1.0, 1.0),
            )
            turn = wp.static(control.MAX_ROTATION_STEP) * scale * turn
            angle = wp.length(turn)
            if angle > 1.0e-9:
                rotation = wp.quat_to_matrix(wp.quat_from_axis_angle(turn / angle, angle)) @ rotation
        else:
            rotation = wp.mat33(1.0, 0.0, 0.0, 0.0, -1.0, 0.0, 0.0, 0.0, -1.0)
        new = solve_pose(arm, old, position, rotation)
    for joint in range(JOINTS):
        near = wp.clamp(
            new[joint],
            qpos[env, joint] - wp.static(control.MAX_LAG),
            qpos[env, joint] + wp.static(control.MAX_LAG),
        )
        new[joint] = wp.clamp(near, arm.lower[joint], arm.upper[joint])
        ctrl[env, joint] = new[joint]
    targets[env] = new
    grip = wp.clamp(actions[env, actions.shape[1] - 1], -1.0, 1.0)
    wanted = 0.5 * (grip + 1.0) * wp.static(panda.FINGER_TRAVEL + 0.01) - 0.01
    limit = wp.static(control.MAX_FINGER_STEP)
    finger = fingers[env] + wp.clamp(wanted - fingers[env], -limit, limit)
    fingers[env] = finger
    ctrl[env, JOINTS] = finger
    ctrl[env, JOINTS + 1] = finger


# ------------------------------------------------------------------------------------------------------------- tasks


@wp.func
def object_position(qpos: wp.array2d(dtype=float), env: int, index: int) -> wp.vec3:
    """Return the position of an object."""
    start = ROBOT_SIZE + 7 * index
    return wp.vec3(qpos[env, start], qpos[env, start + 1], qpos[env, start + 2])


@wp.func
def is_achieved(episodes: Episodes, state: State, tcp: wp.vec3, env: int, index: int, base: int) -> bool:
    """Return whether the goal holds for this object."""
    task = episodes.task[env]
    place = object_position(state.qpos, env, index)
    rest = episodes.top[env] + episodes.half_height[env, index]
    if task == REACH:
        return wp.length(tcp - place) < wp.static(tasks.REACH_DISTANCE)
    if task == PUSH:
        away = wp.vec2(place[0], place[1]) - episodes.area[env]
        return place[2] < rest + 0.02 and wp.length(away) < wp.static(AREA_RADIUS - 0.02)
    if task == PICK:
        return place[2] > rest + wp.static(tasks.LIFT_HEIGHT) and wp.length(tcp - place) < 0.05
    if task == PLACE and index != base:
        shift = place - object_position(state.qpos, env, base)
        height = shift[2] - episodes.half_height[env, index] - episodes.half_height[env, base]
        opening = 0.5 * (state.qpos[env, JOINTS] + state.qpos[env, JOINTS + 1])
        start = ROBOT_SIZE + 6 * index
        speed = wp.max(
            wp.abs(state.qvel[env, start]),
            wp.max(wp.abs(state.qvel[env, start + 1]), wp.abs(state.qvel[env, start + 2])),
        )
        return (
            wp.length(wp.vec2(shift[0], shift[1])) < wp.static(tasks.STACK_SHIFT)
            and wp.abs(height) < wp.static(tasks.STACK_HEIGHT_ERROR)
            and opening > episodes.half_width[env, index] + 0.003
            and speed < wp.static(tasks.STILL_SPEED)
        )
    return False


@wp.func
def potentials(episodes: Episodes, state: State, tcp: wp.vec3, env: int) -> wp.vec2:
    """Return the potentials of the hand and of the object, whose increase is the dense reward."""
    task = episodes.task[env]
    if task == EXPLORATION:
        return wp.vec2(0.0, 0.0)
    goal = episodes.goal[env]
    place = object_position(state.qpos, env, goal)
    distance = float(0.0)
    if task == PUSH:
        distance = wp.length(wp.vec2(place[0], place[1]) - episodes.area[env])
    elif task == PICK:
        rest = episodes.top[env] + episodes.half_height[env, goal]
        distance = wp.max(0.0, rest + wp.static(tasks.LIFT_HEIGHT) - place[2])
    elif task == PLACE:
        base = episodes.base[env]
        target = object_position(state.qpos, env, base)
        target[2] += episodes.half_height[env, base] + episodes.half_height[env, goal]
        distance = wp.length(place - target)
    return wp.vec2(-wp.static(tasks.APPROACH_WEIGHT) * wp.length(tcp - place), -wp.static(tasks.GOAL_WEIGHT) * distance)


@wp.kernel
def begin(rows: wp.array(dtype=int), site: int, episodes: Episodes, state: State):
    """Set the potentials of the first state of an episode."""
    env = rows[wp.tid()]
    episodes.potentials[env] = potentials(episodes, state, state.tcp[env, site], env)


@wp.kernel
def judge(
    site: int,
    num_objects: int,
    episodes: Episodes,
    state: State,
    actions: wp.array2d(dtype=float),
    terms: wp.array2d(dtype=float),
    success: wp.array(dtype=wp.bool),
    terminated: wp.array(dtype=wp.bool),
):
    """Compute the terms of the reward, success and the end of the task of one environment after a step."""
    env = wp.tid()
    if episodes.task[env] == EXPLORATION:
        success[env] = False
        terminated[env] = False
        return
    tcp = state.tcp[env, site]
    goal = episodes.goal[env]
    base = episodes.base[env]
    done = is_achieved(episodes, state, tcp, env, goal, base)
    wrong = bool(False)
    if not done:
        for index in range(num_objects):
            if episodes.task[env] == PLACE:
                for lower in range(num_objects):
                    if (index != goal or lower != base) and is_achieved(episodes, state, tcp, env, index, lower):
                        wrong = True
            elif index != goal and is_achieved(episodes, state, tcp, env, index, base):
                wrong = True
    success[env] = done
    terminated[env] = done or wrong
    terms[env, 0] = wp.where(done, wp.static(SUCCESS_REWARD), 0.0)
    if terms.shape[1] == DENSE_TERMS:
        before = episodes.potentials[env]
        after = potentials(episodes, state, tcp, env)
        effort = float(0.0)
        for dim in range(actions.shape[1] - 1):
            one = wp.clamp(actions[env, dim], -1.0, 1.0)
            effort += one * one
        terms[env, 1] = after[0] - before[0]
        terms[env, 2] = after[1] - before[1]
        terms[env, 3] = -wp.static(CONTROL_WEIGHT) * effort
        terms[env, 4] = wp.where(wrong, -wp.static(SUCCESS_REWARD), 0.0)
        episodes.potentials[env] = after


# ------------------------------------------------------------------------------------------------------- observations


@wp.func
def put_area(episodes: Episodes, env: int, tcp: wp.vec3, out: wp.array2d(dtype=float), column: int):
    """Write the position of the area relative to the hand; zeros without an area."""
    area = episodes.area[env]
    out[env, column] = episodes.has_area[env] * (area[0] - tcp[0])
    out[env, column + 1] = episodes.has_area[env] * (area[1] - tcp[1])


@wp.func
def by_goal(goal: int, base: int, place: int) -> int:
    """Return the task's object at a place of the observation: the named one first, then its base, then the others."""
    if place == 0:
        return goal
    if place == 1 and base != goal:
        return base
    seen = wp.where(base != goal, int(2), int(1))
    index = int(0)
    found = int(0)
    while seen <= place:
        if index != goal and index != base:
            found = index
            seen += 1
        index += 1
    return found


@wp.kernel
def observe(
    rows: wp.array(dtype=int),
    site: int,
    num_objects: int,
    episodes: Episodes,
    state: State,
    out: wp.array2d(dtype=float),
    labels: wp.array2d(dtype=float),
):
    """Write the state of one environment, with the objects if it has room for them, and the labels."""
    env = rows[wp.tid()]
    tcp = state.tcp[env, site]
    rotation = state.tcp_rotation[env, site]
    for joint in range(JOINTS):
        out[env, joint] = state.qpos[env, joint]
        limit = wp.static(MAX_VELOCITY)
        out[env, JOINTS + joint] = wp.clamp(state.qvel[env, joint], -limit, limit)
    opening = 0.5 * (state.qpos[env, JOINTS] + state.qpos[env, JOINTS + 1])
    out[env, 14] = opening / wp.static(panda.FINGER_TRAVEL)
    for axis in range(3):
        out[env, 15 + axis] = tcp[axis]
        out[env, 18 + axis] = rotation[axis, 0]
        out[env, 21 + axis] = rotation[axis, 1]
    goal = episodes.goal[env]
    base = episodes.base[env]
    if out.shape[1] > wp.static(PROPRIOCEPTION_SIZE):
        for place in range(num_objects):
            index = by_goal(goal, base, place)
            column = wp.static(PROPRIOCEPTION_SIZE) + wp.static(OBJECT_SIZE) * place
            shift = object_position(state.qpos, env, index) - tcp
            for axis in range(3):
                out[env, column + axis] = shift[axis]
            for part in range(4):
                out[env, column + 3 + part] = state.qpos[env, ROBOT_SIZE + 7 * index + 3 + part]
        column = wp.static(PROPRIOCEPTION_SIZE) + wp.static(OBJECT_SIZE) * num_objects
        put_area(episodes, env, tcp, out, column)
        for task in range(NUM_TASKS):
            out[env, column + 2 + task] = wp.where(episodes.task[env] == task, 1.0, 0.0)
    if labels.shape[1] > 0:
        named = wp.where(episodes.task[env] == PLACE, int(2), int(1))
        named = wp.where(episodes.task[env] == EXPLORATION, int(0), named)
        for place in range(num_objects):
            shift = wp.vec3(0.0, 0.0, 0.0)
            if place < named:
                shift = object_position(state.qpos, env, by_goal(goal, base, place)) - tcp
            for axis in range(3):
                labels[env, 3 * place + axis] = shift[axis]
        put_area(episodes, env, tcp, labels, 3 * num_objects)
