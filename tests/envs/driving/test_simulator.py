"""Roads, the bicycle, traffic, collisions and rewards of the driving simulator, against numbers worked out by hand."""

from collections.abc import Callable

import numpy as np
import pytest
from driving_simulators import new_simulator

from deft.envs.driving.road import MAP_RADIUS
from deft.envs.driving.simulator import (
    DIFFICULTIES,
    EDGE,
    LANE_CENTRES,
    MAX_ACCELERATION,
    MAX_EPISODE_STEPS,
    MAX_STEERING,
    NUM_OTHERS,
    REWARD_TERMS,
    ROUTE_LENGTH,
    STEP_SECONDS,
    VEHICLE_LENGTH,
    VEHICLE_WIDTH,
    WHEELBASE,
    DrivingSimulator,
)
from deft.errors import InputError


def keep_lane(simulator: DrivingSimulator) -> np.ndarray:
    """Steering angles that keep to the lane, without a look at the traffic."""
    bend = simulator.curvature(np.array([1.0]))[:, 0]
    direction = simulator.heading_error + np.arctan(0.5 * np.tan(simulator.steering))
    error = -0.6 * simulator.lateral_offset / np.maximum(simulator.speed, 2.0) - direction
    return np.arctan(WHEELBASE * (bend + error * 2.0 / np.maximum(simulator.speed, 2.0)))


# ---------------------------------------------------------------------------------------------------------------- roads


def test_points_of_the_lane_ahead() -> None:
    simulator = new_simulator(6, "hard")
    distances = np.array([0.0, 3.0, 12.0])
    points = simulator.lane_points(distances)
    assert points.shape == (6, 3, 2)
    # Beside the ego the lane's centre lies `lateral_offset` to its right, turned by the heading error.
    offset, error = simulator.lateral_offset, simulator.heading_error
    np.testing.assert_allclose(points[:, 0], np.stack([-offset * np.sin(error), -offset * np.cos(error)], 1), atol=1e-9)
    assert (points[:, 2, 0] > 10).all()
    on_map = simulator.to_map(points)
    np.testing.assert_allclose(simulator.to_ego(on_map), points, atol=1e-9)
    expected, _ = simulator.roads.locate(
        simulator.arc[:, None] + distances, LANE_CENTRES[simulator.target_lane][:, None]
    )
    np.testing.assert_allclose(on_map, expected, atol=1e-9)


# -------------------------------------------------------------------------------------------------------------- the ego


def test_the_bicycle_goes_in_the_circle_that_its_steering_makes() -> None:
    simulator = new_simulator()
    simulator.speed[:] = 3.0
    steering = np.full(1, 0.2)
    for _ in range(3):  # the wheels turn by 0.1 rad a step
        simulator.step(np.zeros(1), steering)
    np.testing.assert_allclose(simulator.steering, 0.2)
    visited = [simulator.position[0]]
    for _ in range(12):
        simulator.step(np.zeros(1), steering)
        visited.append(simulator.position[0])
    # The rear axle turns at wheelbase / tan δ, the middle between the axles half a wheelbase before it.
    radius = np.hypot(WHEELBASE / np.tan(0.2), WHEELBASE / 2)
    a, b, c = visited[0], visited[6], visited[12]
    sides = [np.linalg.norm(a - b), np.linalg.norm(b - c), np.linalg.norm(a - c)]
    area = abs((b - a)[0] * (c - a)[1] - (b - a)[1] * (c - a)[0]) / 2
    assert np.prod(sides) / (4 * area) == pytest.approx(radius, rel=1e-3)  # of the circle through three points
    assert np.linalg.norm(visited[1] - visited[0]) == pytest.approx(3.0 * STEP_SECONDS, rel=1e-3)


def test_speed_and_limits() -> None:
    simulator = new_simulator()
    simulator.speed[:] = 5.0
    start, heading = simulator.position[0].copy(), simulator.heading[0]
    simulator.step(np.full(1, 2.0), np.zeros(1))
    # 5 · 0.2 + 2 · 0.2² / 2 = 1.04 m straight ahead
    np.testing.assert_allclose(simulator.position[0] - start, 1.04 * np.array([np.cos(heading), np.sin(heading)]))
    assert simulator.speed[0] == pytest.approx(5.4)
    simulator.step(np.full(1, -1e9), np.full(1, 1e9))
    assert simulator.speed[0] == pytest.approx(5.4 - MAX_ACCELERATION * STEP_SECONDS)
    np.testing.assert_allclose(simulator.command, [[-1.0, 1.0]])
    for _ in range(20):
        simulator.step(np.full(1, -1e9), np.full(1, 1e9))
    assert simulator.speed[0] == 0.0
    assert simulator.steering[0] == MAX_STEERING


@pytest.mark.parametrize("difficulty", DIFFICULTIES)
def test_arc_and_offset_are_those_of_the_position(difficulty: str) -> None:
    simulator = new_simulator(16, difficulty)
    progress = simulator.progress.copy()
    for _ in range(60):
        before = simulator.arc.copy()
        simulator.step(np.full(16, 1.0), keep_lane(simulator))
        place, heading = simulator.roads.locate(simulator.arc, simulator.road_offset)
        np.testing.assert_allclose(place, simulator.position, atol=1e-3)
        np.testing.assert_allclose(heading, simulator.road_heading, atol=1e-3)
        progress += (
            simulator.arc - before + simulator.roads.length / 2
        ) % simulator.roads.length - simulator.roads.length / 2
        np.testing.assert_allclose(simulator.progress, progress, atol=1e-9)
    assert (np.abs(simulator.lateral_offset) < 0.5).all()
    assert (simulator.progress > 80).all()


# -------------------------------------------------------------------------------------------------------------- traffic


@pytest.mark.parametrize(
    ("along", "across", "turn", "expected"),
    [
        (VEHICLE_LENGTH - 0.05, 0.0, 0.0, True),
        (VEHICLE_LENGTH + 0.05, 0.0, 0.0, False),
        (0.0, VEHICLE_WIDTH - 0.05, 0.0, True),
        (0.0, VEHICLE_WIDTH + 0.05, 0.0, False),
        # Turned by 90° its half width is along: 2.25 + 1 = 3.25
        (3.2, 0.0, np.pi / 2, True),
        (3.3, 0.0, np.pi / 2, False),
        # Turned by 45°: along its forward axis the ego reaches (2.25 + 1) / √2 = 2.30 and it 2.25 itself, so that they
        # are apart from (x + y) / √2 = 4.55 on.
        (3.2, 3.2, np.pi / 4, True),  # 4.53
        (3.25, 3.25, np.pi / 4, False),  # 4.60, though the boxes around both overlap: 3.25 < 1 + 2.30
    ],
)
def test_boxes_collide(along: float, across: float, turn: float, expected: bool) -> None:
    simulator = new_simulator()
    cosine, sine = np.cos(simulator.heading[0]), np.sin(simulator.heading[0])
    simulator.other_active[:] = False
    simulator.other_active[0, 3] = True
    simulator.other_position[0, 3] = simulator.position[0] + [
        along * cosine - across * sine,
        along * sine + across * cosine,
    ]
    simulator.other_heading[0, 3] = simulator.heading[0] + turn
    assert simulator._touches()[0, 3] == expected
    assert not np.delete(simulator._touches()[0], 3).any()


@pytest.mark.parametrize("difficulty", DIFFICULTIES)
def test_traffic_stands_behind_an_ego_that_brakes_and_never_touches(difficulty: str) -> None:
    simulator = new_simulator(32, difficulty)
    for _ in range(MAX_EPISODE_STEPS):
        simulator.step(np.full(32, -MAX_ACCELERATION), keep_lane(simulator))
        assert not simulator.collided.any()
        _check_traffic(simulator)
    # Whoever stands behind it keeps the model's gap (2 m, which is approached slowly).
    gaps = np.where(simulator.other_active & (simulator.ahead() < 0), -simulator.ahead() - VEHICLE_LENGTH, np.inf)
    in_lane = np.abs(simulator.other_offset - simulator.road_offset[:, None]) < 1.0
    nearest = np.where(in_lane, gaps, np.inf).min(axis=1)
    stands = nearest < 5.0
    assert stands.any()
    assert (nearest[stands] > 1.5).all()


def _check_traffic(simulator: DrivingSimulator) -> None:
    """Nobody overlaps another, everybody is on the road and on the map, and nothing is NaN."""
    along = np.abs(simulator.other_arc[:, :, None] - simulator.other_arc[:, None])
    along = np.minimum(along, simulator.roads.length[:, None, None] - along)
    across = np.abs(simulator.other_offset[:, :, None] - simulator.other_offset[:, None])
    pairs = simulator.other_active[:, :, None] & simulator.other_active[:, None] & ~np.eye(NUM_OTHERS, dtype=bool)
    assert not (pairs & (along < VEHICLE_LENGTH) & (across < VEHICLE_WIDTH)).any()
    assert (np.abs(simulator.other_offset) <= LANE_CENTRES[-1] + 1e-9).all()
    _check_map(simulator)


def _check_map(simulator: DrivingSimulator) -> None:
    low, high = -MAP_RADIUS, MAP_RADIUS
    for positions in (simulator.position, simulator.other_position[simulator.other_active]):
        assert (positions > low).all()
        assert (positions < high).all()
    assert np.isfinite(simulator.terms).all()
    assert np.isfinite(simulator.other_speed).all()


def test_only_hard_traffic_changes_lanes() -> None:
    for difficulty in DIFFICULTIES:
        simulator = new_simulator(16, difficulty)
        lanes = simulator.other_lane.copy()
        for _ in range(80):
            simulator.step(np.zeros(16), keep_lane(simulator))
        assert ((lanes != simulator.other_lane) & simulator.other_active).any() == (difficulty == "hard")


def test_difficulty_counts_from_the_next_reset_on() -> None:
    simulator = new_simulator(2, "easy")
    assert simulator.other_active.sum(axis=1).tolist() == [4, 4]
    simulator.set_difficulty("hard")
    assert simulator.other_active.sum(axis=1).tolist() == [4, 4]
    simulator.reset([1])
    assert simulator.other_active.sum(axis=1).tolist() == [4, 12]
    assert simulator.level.tolist() == [0, 2]
    assert simulator.num_vehicles == 2 + 16
    with pytest.raises(InputError, match="difficulty is 'extreme'; choose 'easy', 'medium' or 'hard'"):
        simulator.set_difficulty("extreme")


def random_actions(generator: np.random.Generator, simulator: DrivingSimulator) -> tuple[np.ndarray, np.ndarray]:
    """Random accelerations; steering is random in even copies, random about the lane in odd ones: they get further."""
    noise = generator.uniform(-1, 1, (2, simulator.num_envs))
    is_odd = np.arange(simulator.num_envs) % 2
    steering = np.where(is_odd, keep_lane(simulator) + 0.02 * noise[1], MAX_STEERING * noise[1])
    return MAX_ACCELERATION * noise[0], steering


def play_random_episodes(count: int, check: Callable[[DrivingSimulator], None]) -> dict[str, int]:
    ends = {"collided": 0, "off_road": 0, "reached": 0, "time": 0}
    generator = np.random.default_rng(0)
    for difficulty in DIFFICULTIES:
        simulator = new_simulator(64, difficulty)
        played = 0
        while played < count / 3:
            simulator.step(*random_actions(generator, simulator))
            check(simulator)
            # The ego may be over the edge in its last step, by no more than that step.
            assert (np.abs(simulator.road_offset) < EDGE + 15.0 * STEP_SECONDS).all()
            is_late = simulator.elapsed_steps >= MAX_EPISODE_STEPS
            done = np.flatnonzero(simulator.collided | simulator.off_road | simulator.reached | is_late)
            for name in ("collided", "off_road", "reached"):
                ends[name] += int(getattr(simulator, name).sum())
            ends["time"] += int(is_late.sum())
            played += len(done)
            simulator.reset(done)
    return ends


def test_random_driving_stays_on_the_map() -> None:
    ends = play_random_episodes(150, _check_traffic)
    assert ends["collided"] > 5
    assert ends["off_road"] > 5


@pytest.mark.slow
def test_ten_thousand_random_episodes_stay_on_the_map() -> None:
    ends = play_random_episodes(10_000, _check_map)
    assert sum(ends.values()) >= 10_000
    assert min(ends["collided"], ends["off_road"]) > 100


# ------------------------------------------------------------------------------------------------- rewards and the end


def test_reward_terms_of_a_step() -> None:
    simulator = new_simulator()
    simulator.step(np.full(1, 2.5), np.zeros(1))
    first = dict(zip(REWARD_TERMS, simulator.terms[0], strict=True))
    before, progress = simulator.command.copy(), simulator.progress[0]
    simulator.step(np.full(1, -2.5), np.full(1, 0.125))
    terms = dict(zip(REWARD_TERMS, simulator.terms[0], strict=True))
    assert before.tolist() == [[0.5, 0.0]]
    assert first["comfort"] == pytest.approx(-0.1 * 0.5)
    assert terms["comfort"] == pytest.approx(-0.1 * (1.0 + 0.5))  # 0.5 → -0.5 and 0 → 0.5
    assert terms["progress"] == pytest.approx(simulator.progress[0] - progress)
    assert terms["lane"] == pytest.approx(-0.5 * abs(simulator.lateral_offset[0]))
    assert terms["collision"] == terms["off_road"] == 0.0


def test_collision_and_leaving_the_road_cost_a_hundred() -> None:
    simulator = new_simulator(3)
    simulator.other_arc[0, 0], simulator.other_offset[0, 0] = simulator.arc[0] + 3.0, simulator.road_offset[0]
    simulator.heading[1] += 0.5 * np.pi
    simulator.progress[2] = ROUTE_LENGTH - 0.5
    for _ in range(2):
        simulator.step(np.zeros(3), np.zeros(3))
    assert simulator.collided.tolist() == [True, False, False]
    assert simulator.off_road.tolist() == [False, True, False]
    assert simulator.reached.tolist() == [False, False, True]
    np.testing.assert_array_equal(simulator.terms[:, 1:3], [[-100, 0], [0, -100], [0, 0]])


# ------------------------------------------------------------------------------------------------------- copies, states


def test_a_copy_is_the_same_alone_and_among_others() -> None:
    together = new_simulator(64, "hard", seed=100)
    generator = np.random.default_rng(3)
    commands = generator.uniform(-1, 1, (70, 64)) * MAX_ACCELERATION
    alone = {row: new_simulator(1, "hard", seed=100 + row) for row in (0, 1, 17, 63)}
    for step, acceleration in enumerate(commands):
        if step == 40:  # a new episode from the copy's own generator, at another time for the others
            together.reset([17, 3])
            alone[17].reset()
        together.step(acceleration, keep_lane(together))
        for row, single in alone.items():
            single.step(acceleration[[row]], keep_lane(single))
            _assert_same_state(single.get_state()[0], together.get_state([row])[0])


def test_a_saved_state_goes_on_exactly() -> None:
    simulator, other = new_simulator(4, "hard"), new_simulator(4, "easy", seed=50)
    for _ in range(15):
        simulator.step(np.ones(4), keep_lane(simulator))
    states = simulator.get_state()
    other.set_state([states[2], states[0]], [1, 3])
    untouched = other.get_state([0])[0]
    for _ in range(30):
        simulator.step(np.ones(4), keep_lane(simulator))
        other.step(np.ones(4), keep_lane(other))
    simulator.reset()
    other.reset()
    for row, origin in ((1, 2), (3, 0)):
        _assert_same_state(other.get_state([row])[0], simulator.get_state([origin])[0])
    assert untouched["level"] == 0


def test_a_fork_leaves_the_world_alone() -> None:
    simulator = new_simulator(4, "hard")
    before = simulator.get_state()
    fork = simulator.fork()
    for _ in range(40):
        fork.step(np.ones(4), keep_lane(fork))
    for now, then in zip(simulator.get_state(), before, strict=True):
        _assert_same_state(now, then)
    for _ in range(40):
        simulator.step(np.ones(4), keep_lane(simulator))
    for now, then in zip(simulator.get_state(), fork.get_state(), strict=True):
        _assert_same_state(now, then)


def _assert_same_state(first: dict[str, object], second: dict[str, object]) -> None:
    assert first.keys() == second.keys()
    for name in first:
        np.testing.assert_array_equal(first[name], second[name], err_msg=name)  # type: ignore[arg-type]
