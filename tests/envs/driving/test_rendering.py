"""Pictures of the driving simulator: what is where is where it is drawn."""

import numpy as np
import pytest

from deft.envs.driving import rendering
from deft.envs.driving.expert import expert_action
from deft.envs.driving.rendering import (
    EGO,
    GRASS,
    PAINT,
    ROAD,
    ROUTE,
    STRIPE,
    TRAFFIC,
    VIEW_FORWARD,
    VIEW_LEFT,
    VIEW_SIZE,
)
from deft.envs.driving.simulator import (
    HALF_ROAD,
    MAX_ACCELERATION,
    MAX_SPEED,
    MAX_STEERING,
    ROUTE_LENGTH,
    DrivingSimulator,
)


@pytest.fixture
def simulator() -> DrivingSimulator:
    simulator = DrivingSimulator(6, "hard")
    simulator.reset(seeds=range(6))
    for _ in range(25):
        action = expert_action(simulator)
        simulator.step(action[:, 0] * MAX_ACCELERATION, action[:, 1] * MAX_STEERING)
    return simulator


def pixel(forward: float, left: float, size: int) -> tuple[int, int]:
    return int((VIEW_FORWARD - forward) * size / VIEW_SIZE), int((VIEW_LEFT - left) * size / VIEW_SIZE)


def is_near(colours: np.ndarray, colour: tuple[int, int, int], distance: float = 40.0) -> np.ndarray:
    return np.abs(colours.astype(float) - np.array(colour)).max(axis=-1) < distance


@pytest.mark.parametrize("size", [64, 120])
def test_grass_is_off_the_road_and_the_road_is_not_green(simulator: DrivingSimulator, size: int) -> None:
    images = rendering.images(simulator, size).transpose(0, 2, 3, 1)
    assert images.shape == (6, size, size, 3)
    assert images.dtype == np.uint8
    # The same by brute force: the distance of every pixel from the nearest point of the centre line
    centres = (np.arange(size) + 0.5) * VIEW_SIZE / size
    grid = np.stack(np.meshgrid(VIEW_FORWARD - centres, VIEW_LEFT - centres, indexing="ij"), axis=-1).reshape(-1, 2)
    for row in (0, 1, 5):
        points = simulator.to_map(np.broadcast_to(grid, (6, *grid.shape)))[row].astype(np.float32)
        line = simulator.roads.points[row, :, :2].astype(np.float32)
        gap = points[:, None] - line
        distance = np.sqrt((gap * gap).sum(axis=-1).min(axis=1)).reshape(size, size)
        green = is_near(images[row], GRASS, 4) | is_near(images[row], STRIPE, 4)
        margin = 2 * VIEW_SIZE / size
        green[:, : size // 48 + 1], distance[:, : size // 48 + 1] = True, 100.0  # the gauge
        assert green[distance > HALF_ROAD + 0.6 + margin].all()
        assert not green[distance < HALF_ROAD - margin].any()


def test_vehicles_are_drawn_where_they_are(simulator: DrivingSimulator) -> None:
    images = rendering.images(simulator, 64).transpose(0, 2, 3, 1)
    assert is_near(images[:, pixel(-1.0, 0.0, 64)[0], pixel(-1.0, 0.0, 64)[1]], EGO).all()
    in_ego_frame = simulator.to_ego(simulator.other_position)
    seen = 0
    for row, number in np.argwhere(simulator.other_active):
        forward, left = in_ego_frame[row, number]
        if -10 < forward < 34 and abs(left) < 20:
            seen += 1
            # A metre behind its centre is bodywork, at its centre nearly
            at = pixel(forward - 0.8, left, 64)
            assert is_near(images[row, at[0], at[1]], TRAFFIC, 110)
            assert images[row, at[0], at[1], 0] > 120
    assert seen > 5


def test_route_lane_marks_and_finish(simulator: DrivingSimulator) -> None:
    simulator.other_active[:] = False
    size = 192
    image = rendering.images(simulator, size).transpose(0, 2, 3, 1)
    for row in range(6):
        for forward, left in simulator.lane_points(np.array([5.0, 12.0, 25.0]))[row]:
            if abs(left) < 22:
                assert is_near(image[row][pixel(forward, left, size)], ROUTE, 60)
    assert is_near(image, PAINT, 12).any()
    assert is_near(image, ROAD, 4).mean() > 0.05
    simulator.progress[:] = ROUTE_LENGTH - 15.0
    finish = rendering.images(simulator, size).transpose(0, 2, 3, 1)
    behind = simulator.lane_points(np.array([20.0]))[0, 0]
    assert is_near(finish[0][pixel(*behind, size)], ROAD, 30)  # the route ends at the finish line
    is_black = [(picture[0].max(axis=-1) < 40)[:, 10:] for picture in (finish, image)]
    assert is_black[0].sum() > is_black[1].sum() + 50  # its squares


def test_the_gauge_shows_the_speed(simulator: DrivingSimulator) -> None:
    column = rendering.images(simulator, 64)[:, 0, :, 0]
    np.testing.assert_array_equal((column > 128).sum(axis=1), np.floor(simulator.speed / MAX_SPEED * 64))


def test_some_of_the_copies_and_one_for_videos(simulator: DrivingSimulator) -> None:
    some, every = rendering.images(simulator, 64, np.array([4, 1])), rendering.images(simulator, 64)
    np.testing.assert_array_equal(some, every[[4, 1]])
    picture = rendering.render(simulator, 3)
    assert picture.shape == (480, 480, 3)
    assert picture.dtype == np.uint8
    assert picture.flags.c_contiguous
