"""The scripted driver arrives; driving without a look at the traffic does not."""

import numpy as np
import pytest

from deft.envs.driving.expert import _steering, expert_action, expert_waypoints
from deft.envs.driving.simulator import (
    DIFFICULTIES,
    MAX_ACCELERATION,
    MAX_EPISODE_STEPS,
    MAX_STEERING,
    DrivingSimulator,
)


def blind_action(simulator: DrivingSimulator) -> np.ndarray:
    """The expert's lane keeping at 10 m/s."""
    return np.stack(
        [0.3 * (10.0 - simulator.speed), _steering(simulator, simulator.target_lane) / MAX_STEERING], axis=1
    )


def drive(policy, num_envs: int, difficulty: str) -> dict[str, float]:  # type: ignore[no-untyped-def]
    simulator = DrivingSimulator(num_envs, difficulty)
    simulator.reset(seeds=range(num_envs))
    ends = {name: np.zeros(num_envs, bool) for name in ("reached", "collided", "off_road")}
    running = np.ones(num_envs, bool)
    for _ in range(MAX_EPISODE_STEPS):
        action = policy(simulator)
        simulator.step(action[:, 0] * MAX_ACCELERATION, action[:, 1] * MAX_STEERING)
        for name, ended in ends.items():
            ended |= getattr(simulator, name) & running
        running &= ~(simulator.reached | simulator.collided | simulator.off_road)
    return {name: float(ended.mean()) for name, ended in ends.items()}


def test_the_expert_arrives_and_blind_driving_does_not() -> None:
    expert, blind = drive(expert_action, 64, "medium"), drive(blind_action, 64, "medium")
    assert expert["reached"] > 0.9
    assert expert["collided"] + expert["off_road"] < 0.05
    assert blind["collided"] > 0.8
    assert blind["off_road"] == 0


@pytest.mark.slow
@pytest.mark.parametrize(("difficulty", "bar"), list(zip(DIFFICULTIES, (0.95, 0.9, 0.85), strict=True)))
def test_the_expert_arrives_at_every_difficulty(difficulty: str, bar: float) -> None:
    expert = drive(expert_action, 200, difficulty)
    assert expert["reached"] >= bar
    assert expert["collided"] + expert["off_road"] <= 0.02


def test_waypoints_are_where_the_expert_then_drives() -> None:
    simulator = DrivingSimulator(5, "hard")
    simulator.reset(seeds=range(5))
    for _ in range(10):
        action = expert_action(simulator)
        simulator.step(action[:, 0] * MAX_ACCELERATION, action[:, 1] * MAX_STEERING)
    waypoints = expert_waypoints(simulator, 4, 0.5)
    on_map = simulator.to_map(waypoints)
    assert waypoints.shape == (5, 4, 2)
    assert (np.diff(waypoints[..., 0], axis=1) > 0).all()
    path = [simulator.position]
    for _ in range(10):
        action = expert_action(simulator)
        simulator.step(action[:, 0] * MAX_ACCELERATION, action[:, 1] * MAX_STEERING)
        path.append(simulator.position)
    # 1.0 and 2.0 s are after 5 and 10 steps of 0.2 s; 0.5 s is in the middle between steps 2 and 3.
    np.testing.assert_allclose(on_map[:, 1], path[5], atol=1e-9)
    np.testing.assert_allclose(on_map[:, 3], path[10], atol=1e-9)
    np.testing.assert_allclose(on_map[:, 0], (path[2] + path[3]) / 2, atol=1e-9)
