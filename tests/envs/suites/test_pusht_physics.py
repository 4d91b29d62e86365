"""The steps and the geometry of PushT, without its simulator; they agree with it in test_pusht.py."""

from types import SimpleNamespace

import numpy as np
import pytest

from deft.envs.suites.pusht_physics import block_pose, move_disc, outline, place


def test_the_disc_is_controlled_as_in_gym_pusht():
    """v ← v + (100 (a − x) − 20 v) · 0.01, then x ← x + 0.01 v; two steps of the simulator per action at 50 Hz.

    From 0 to 10: v = 10, x = 0.1; then v = 10 + (100 · 9.9 − 20 · 10) · 0.01 = 17.9, x = 0.279.
    """
    agent = SimpleNamespace(position=(0.0, 0.0), velocity=(0.0, 0.0))

    def step(dt):
        agent.position = tuple(x + dt * v for x, v in zip(agent.position, agent.velocity, strict=True))

    simulator = SimpleNamespace(agent=agent, space=SimpleNamespace(step=step), dt=0.01, control_hz=50, k_p=100, k_v=20)
    action = np.array([10.0, -20.0])
    move_disc(simulator, action)
    assert agent.velocity == pytest.approx((17.9, -35.8))
    assert agent.position == pytest.approx((0.279, -0.558))
    assert simulator._last_action is action  # the expert compares it with its plan


def test_corners_of_the_block_at_a_pose():
    """A bar of 4 × 1 above a stem of 2 × 3, turned by 90° about its origin: (x, y) becomes (−y, x)."""
    shapes = [[(-2, 0), (2, 0), (2, 1), (-2, 1)], [(-1, 1), (-1, 4), (1, 4), (1, 1)]]
    simulator = SimpleNamespace(
        _block_shapes=[SimpleNamespace(get_vertices=lambda found=found: found) for found in shapes]
    )
    corners = outline(simulator)
    assert corners.tolist() == [[-2, 0], [2, 0], [2, 1], [1, 1], [1, 4], [-1, 4], [-1, 1], [-2, 1]]
    turned = place(corners, np.array([[10.0, 20.0, np.pi / 2], [0.0, 0.0, 0.0]]))
    assert turned[0] == pytest.approx(np.stack([10 - corners[:, 1], 20 + corners[:, 0]], 1))
    assert turned[1] == pytest.approx(corners)


def test_the_pose_of_the_block():
    simulator = SimpleNamespace(block=SimpleNamespace(position=(1.0, 2.0), angle=7.0))
    assert block_pose(simulator).tolist() == [1, 2, 7]  # the angle is not reduced: corners turn by it
