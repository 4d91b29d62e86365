"""Kinematics against the arm's published measures, the three modes, and the padded layout."""

import math

import numpy as np
import pytest

from deft.envs.tabletop import control, panda
from deft.envs.tabletop.control import ArmController, kinematics
from deft.errors import InputError, RunError


def test_forward_kinematics_of_known_postures() -> None:
    # All joints 0: the arm stands up to 0.333 + 0.316 + 0.384 and hangs down by the flange's 0.107 and the hand's
    # 0.1034, 0.088 in front of its axis (the elbow's two offsets of 0.0825 cancel).
    place, turn = kinematics().pose(np.zeros(7))
    np.testing.assert_allclose(place, [0.088, 0, 0.333 + 0.316 + 0.384 - 0.107 - 0.1034], atol=1e-9)
    np.testing.assert_allclose(turn[:, 2], [0, 0, -1], atol=1e-9)
    # A quarter turn of the first joint turns everything about the vertical.
    turned, _ = kinematics().pose(np.array([math.pi / 2, 0, 0, 0, 0, 0, 0]))
    np.testing.assert_allclose(turned, [0, 0.088, place[2]], atol=1e-9)
    # Upper arm forward, elbow straight: everything above the shoulder lies along x, and what was in front hangs below.
    place, _ = kinematics().pose(np.array([0, math.pi / 2, 0, 0, 0, 0, 0]))
    np.testing.assert_allclose(place, [0.316 + 0.384 - 0.107 - 0.1034, 0, 0.333 - 0.088], atol=1e-9)


def test_home_points_down_over_the_table() -> None:
    place, turn = kinematics().pose(panda.HOME)
    np.testing.assert_allclose(turn, control.hand_down(0.0), atol=1e-6)
    assert 0.3 < place[0] < 0.6
    assert 0.2 < place[2] < 0.4


def test_inverse_kinematics_finds_poses() -> None:
    random = np.random.default_rng(0)
    joints = panda.HOME
    for _ in range(20):
        position = random.uniform([0.35, -0.25, 0.05], [0.6, 0.25, 0.3])
        rotation = control.hand_down(random.uniform(-0.7, 0.7))
        for _ in range(6):
            joints = kinematics().solve(joints, position, rotation)
        place, turn = kinematics().pose(joints)
        np.testing.assert_allclose(place, position, atol=2e-3)
        assert np.linalg.norm(control.rotation_vector(rotation @ turn.T)) < 0.02
        assert (joints > panda.JOINT_LOWER).all()
        assert (joints < panda.JOINT_UPPER).all()


@pytest.mark.parametrize("vector", [(0, 0, 0), (0.1, -0.2, 0.3), (0, 0, 3.0), (1.5, 0, 0), (0, math.pi, 0)])
def test_rotation_vector_and_back(vector: tuple[float, ...]) -> None:
    rotation = control.rotation_matrix(np.array(vector, float))
    np.testing.assert_allclose(rotation @ rotation.T, np.eye(3), atol=1e-12)
    np.testing.assert_allclose(control.rotation_vector(rotation), vector, atol=1e-6)


def test_joint_deltas_add_up_and_are_clipped() -> None:
    controller = ArmController("delta_qpos", action_scale=0.5)
    controller.reset(panda.HOME, 0.04)
    action = np.array([1, -1, 0.5, 0, 0, 0, 7, 1])
    controller.command(action, panda.HOME)
    # 0.1 rad × 0.5 × a; the last joint's 7 counts as 1
    np.testing.assert_allclose(controller.target - panda.HOME, [0.05, -0.05, 0.025, 0, 0, 0, 0.05])
    controller.command(action, panda.HOME)
    np.testing.assert_allclose(controller.target - panda.HOME, [0.1, -0.1, 0.05, 0, 0, 0, 0.1])


def test_targets_keep_to_the_limits_and_to_the_arm() -> None:
    controller = ArmController("delta_qpos", 1.0)
    controller.reset(panda.HOME, 0.04)
    for _ in range(10):  # the arm is held where it is
        controller.command(np.ones(8), panda.HOME)
    np.testing.assert_allclose(controller.target - panda.HOME, control.MAX_LAG)
    joints = panda.JOINT_UPPER.copy()
    controller.reset(joints, 0.04)
    controller.command(np.ones(8), joints)
    np.testing.assert_allclose(controller.target, panda.JOINT_UPPER - control.LIMIT_MARGIN)


def test_hand_deltas_move_the_hand() -> None:
    start, _ = kinematics().pose(panda.HOME)
    controller = ArmController("delta_ee_pos", 1.0)
    controller.command(np.array([1, -1, 0.5, 1]), panda.HOME)
    place, turn = kinematics().pose(controller.target)
    np.testing.assert_allclose(place - start, [0.03, -0.03, 0.015], atol=1e-3)
    np.testing.assert_allclose(turn, control.hand_down(0), atol=1e-2)
    controller = ArmController("delta_ee", 1.0)
    controller.command(np.array([0, 0, 1, 0, 0, 1, 1]), panda.HOME)
    place, turn = kinematics().pose(controller.target)
    np.testing.assert_allclose(place - start, [0, 0, 0.03], atol=1e-3)
    np.testing.assert_allclose(turn, control.hand_down(0.1), atol=1e-2)


def test_gripper_moves_at_its_speed() -> None:
    controller = ArmController("delta_qpos", 1.0)
    controller.reset(panda.HOME, 0.04)
    closing = np.array([0] * 7 + [-1.0])
    controller.command(closing, panda.HOME)
    assert controller.finger_target == pytest.approx(0.04 - 0.008)  # 0.2 m/s for 0.04 s
    for _ in range(9):
        controller.command(closing, panda.HOME)
    assert controller.finger_target == pytest.approx(-0.01)  # past the middle: it presses


@pytest.mark.parametrize("mode", control.CONTROL_MODES)
def test_action_towards_arrives(mode: str) -> None:
    controller = ArmController(mode, 1.0)
    goal = np.array([0.5, 0.15, 0.1])
    for _ in range(40):
        action = controller.action_towards(goal, control.hand_down(0.0), 1.0)
        assert np.abs(action).max() <= 1
        controller.command(action, controller.target)
    place, _ = kinematics().pose(controller.target)
    np.testing.assert_allclose(place, goal, atol=2e-3)


def test_padded_layout() -> None:
    # left arm 0-7 (the Panda uses 0-6), left gripper 8, right arm 9-16, right gripper 17, padding 18-31
    assert np.flatnonzero(control.action_mask("delta_qpos")).tolist() == [0, 1, 2, 3, 4, 5, 6, 8]
    assert np.flatnonzero(control.action_mask("delta_ee")).tolist() == [0, 1, 2, 3, 4, 5, 8]
    assert np.flatnonzero(control.action_mask("delta_ee_pos")).tolist() == [0, 1, 2, 8]
    for mode in control.CONTROL_MODES:
        action = np.random.default_rng(0).uniform(-1, 1, (5, control.action_size(mode))).astype(np.float32)
        padded = control.pad_action(action, mode)
        assert padded.shape == (5, 32)
        assert (padded[:, ~control.action_mask(mode)] == 0).all()
        np.testing.assert_array_equal(control.unpad_action(padded, mode), action)


def test_wrong_input_is_named() -> None:
    with pytest.raises(InputError, match=r"control_mode is 'pd_ee'; choose 'delta_qpos'"):
        ArmController("pd_ee", 1.0)
    with pytest.raises(InputError, match="action_scale is 0"):
        ArmController("delta_qpos", 0)
    controller = ArmController("delta_qpos", 1.0)
    with pytest.raises(RunError, match="delta_qpos takes 8 numbers"):
        controller.command(np.full(8, np.nan), panda.HOME)
    with pytest.raises(RunError, match="delta_qpos takes 8 numbers"):
        controller.command(np.zeros(7), panda.HOME)
