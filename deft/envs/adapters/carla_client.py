"""A thin client of a running CARLA server: one ego vehicle, synchronous, behind the waypoint protocol; extra `carla`.

`deft.envs.adapters.carla` drives the same client with throttle and steering.

Its frame has y to the right and degrees; ours has y to the left. Every actor that is spawned here is destroyed at the
next reset, when the world is closed, and when the process ends; the server's settings are put back.
"""

from __future__ import annotations

import atexit
import contextlib
import queue
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from deft import schema
from deft.envs.waypoints.protocol import (
    CAMERA_SIZE,
    MAX_GAP,
    NUM_WAYPOINTS,
    Outcome,
    WaypointWorld,
    check_difficulty,
    displacement_errors,
)
from deft.envs.waypoints.tracking import pursue
from deft.errors import InputError, RunError

STEP_SECONDS = 0.1
CRUISE_SPEED = 8.0
WHEELBASE = 2.9
TRAFFIC = {"easy": 10, "medium": 30, "hard": 60}
CAMERA_HEIGHT = 24.0  # metres above a point ahead of the vehicle; with 90° it sees twice as much across
CAMERA_AHEAD = 12.0
FRONT_CAMERA = (1.6, 1.7)  # metres ahead of the vehicle's centre and above the ground
CAMERAS = ("above", "front")
IN_WAY = 2.2  # vehicles less than this to the side are in the way


class CarlaWorld(WaypointWorld):
    """One ego vehicle in the world of a CARLA server; `town` loads another map first.

    A server that is synchronous already has another client, and is rejected unless `take_server`.
    """

    reward_terms = ("progress", "collision", "off_road", "comfort", "lane")
    view = (CAMERA_AHEAD - CAMERA_HEIGHT, CAMERA_AHEAD + CAMERA_HEIGHT, -CAMERA_HEIGHT, CAMERA_HEIGHT)

    def __init__(
        self,
        num_envs: int = 1,
        difficulty: str = "medium",
        num_waypoints: int = NUM_WAYPOINTS,
        camera_size: int = CAMERA_SIZE,
        steps_per_decision: int = 5,
        waypoint_seconds: float = 0.4,
        measure_ade: bool = False,
        host: str = "127.0.0.1",
        port: int = 2000,
        traffic_manager_port: int = 8000,
        timeout: float = 10.0,
        town: str | None = None,
        route_length: float = 200.0,
        max_seconds: float = 60.0,
        camera: str = "above",
        take_server: bool = False,
    ) -> None:
        if num_envs != 1:
            raise InputError(f"env carla: a server has one ego vehicle; give --num-envs 1, not {num_envs}")
        if camera not in CAMERAS:
            raise InputError(f"camera is {camera!r}; choose {' or '.join(CAMERAS)}")
        self.camera = camera
        self.num_envs, self.num_waypoints, self.camera_size = 1, num_waypoints, camera_size
        self.steps_per_decision, self.waypoint_seconds = steps_per_decision, waypoint_seconds
        self.measure_ade, self.timeout = measure_ade, timeout
        self.route_length, self.max_seconds = route_length, max_seconds
        self.difficulty = check_difficulty(difficulty)
        self._generator = np.random.default_rng()
        self._actors: list[Any] = []
        self._sensors: list[Any] = []
        self._collided = self._crossed_line = False
        self._travelled = self._elapsed = 0.0
        self._command = np.zeros(2)  # accelerator (the brake negative) and steering (to the right) of the last tick
        self._settings: Any = None
        self._carla = _import_carla()
        self._connect(host, port, traffic_manager_port, town, take_server)

    # -- the server ----------------------------------------------------------------------------------------------------

    def _connect(self, host: str, port: int, traffic_manager_port: int, town: str | None, take_server: bool) -> None:
        """Find the server and make it wait for our ticks."""
        carla = self._carla
        try:
            self._client = carla.Client(host, port)
            self._client.set_timeout(self.timeout)
            self._world = self._client.get_world() if town is None else self._client.load_world(town)
            self._map = self._world.get_map()
        except RuntimeError as error:
            raise InputError(
                f"env carla: no server answered at {host}:{port} within {self.timeout:g} s: start one with "
                f"./CarlaUE4.sh -RenderOffScreen -carla-rpc-port={port}, or give host and port in --env-kwargs"
            ) from error
        settings = self._world.get_settings()
        if settings.synchronous_mode and not take_server:
            raise InputError(
                f"env carla: another client drives the server at {host}:{port} (it is synchronous); use another one, "
                "or give --env-kwargs '{\"take_server\": true}' where that client was killed"
            )
        atexit.register(self.close)
        try:
            if settings.synchronous_mode:  # do not leave behind what the killed client did
                settings.synchronous_mode, settings.fixed_delta_seconds = False, None
            self._settings = settings
            changed = self._world.get_settings()
            changed.synchronous_mode, changed.fixed_delta_seconds = True, STEP_SECONDS
            self._world.apply_settings(changed)
            self._traffic_manager = self._client.get_trafficmanager(traffic_manager_port)
            self._traffic_manager.set_synchronous_mode(True)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Destroy what was spawned, and let the server run on its own clock again."""
        atexit.unregister(self.close)
        self._destroy_actors()
        if self._settings is not None:
            settings, self._settings = self._settings, None
            with contextlib.suppress(RuntimeError):  # the server may be gone, and its actors with it
                self._traffic_manager.set_synchronous_mode(False)
            with contextlib.suppress(RuntimeError):
                self._world.apply_settings(settings)

    def _destroy_actors(self) -> None:
        for sensor in self._sensors:
            with contextlib.suppress(RuntimeError):
                sensor.stop()
        doomed, self._actors, self._sensors = [*self._sensors, *self._actors], [], []
        if doomed:
            with contextlib.suppress(RuntimeError):
                self._client.apply_batch_sync([self._carla.command.DestroyActor(actor) for actor in doomed], False)

    def _tick(self) -> None:
        """One step of the simulation, and the camera's picture of it."""
        try:
            frame = self._world.tick(self.timeout)
            image = self._images.get(timeout=self.timeout)
            while image.frame < frame:
                image = self._images.get(timeout=self.timeout)
        except (RuntimeError, queue.Empty) as error:
            self.close()
            raise RunError(f"env carla: the server stopped answering within {self.timeout:g} s") from error
        pixels = np.frombuffer(image.raw_data, np.uint8).reshape(image.height, image.width, 4)  # BGRA
        self._picture = pixels[:, :, 2::-1].transpose(2, 0, 1).copy()

    # -- an episode ----------------------------------------------------------------------------------------------------

    def reset(self, index: np.ndarray, seeds: Sequence[int | None]) -> None:
        """A new ego vehicle with its sensors at one of the map's spawn points, and traffic at others."""
        if seeds[0] is not None:
            self._generator = np.random.default_rng(seeds[0])
        self._destroy_actors()
        self._collided = self._crossed_line = False
        self._travelled = self._elapsed = 0.0
        self._command = np.zeros(2)
        try:
            self._traffic_manager.set_random_device_seed(int(self._generator.integers(2**31)))
            self._spawn()
            self._tick()
        except BaseException:
            self._destroy_actors()
            raise

    def _spawn(self) -> None:
        carla, library = self._carla, self._world.get_blueprint_library()
        points = self._map.get_spawn_points()
        order = self._generator.permutation(len(points))
        car = library.find("vehicle.tesla.model3")
        car.set_attribute("role_name", "hero")
        free = [points[number] for number in order]
        self._ego: Any = None
        while free and self._ego is None:
            self._ego = self._world.try_spawn_actor(car, free.pop())
        if self._ego is None:
            raise RunError(f"env carla: none of the map's {len(points)} spawn points is free; reload the map")
        self._actors.append(self._ego)
        wheels = self._ego.get_physics_control().wheels
        self._max_steering = float(np.deg2rad(max(wheel.max_steer_angle for wheel in wheels)))
        camera = library.find("sensor.camera.rgb")
        for name, value in (("image_size_x", self.camera_size), ("image_size_y", self.camera_size), ("fov", 90)):
            camera.set_attribute(name, str(value))
        place = carla.Transform(carla.Location(x=CAMERA_AHEAD, z=CAMERA_HEIGHT), carla.Rotation(pitch=-90.0))
        if self.camera == "front":
            place = carla.Transform(carla.Location(x=FRONT_CAMERA[0], z=FRONT_CAMERA[1]), carla.Rotation())
        self._images: queue.Queue[Any] = queue.Queue()
        self._attach(camera, place, self._images.put)
        self._attach(library.find("sensor.other.collision"), carla.Transform(), self._on_collision)
        self._attach(library.find("sensor.other.lane_invasion"), carla.Transform(), self._on_lane_invasion)
        self._spawn_traffic(library, free)

    def _attach(self, blueprint: Any, place: Any, callback: Any) -> None:
        sensor = self._world.spawn_actor(blueprint, place, attach_to=self._ego)
        self._sensors.append(sensor)
        sensor.listen(callback)

    def _spawn_traffic(self, library: Any, points: list[Any]) -> None:
        cars = [car for car in library.filter("vehicle.*") if car.get_attribute("number_of_wheels").as_int() == 4]
        for point in points[: TRAFFIC[self.difficulty]]:
            vehicle = self._world.try_spawn_actor(cars[int(self._generator.integers(len(cars)))], point)
            if vehicle is not None:
                self._actors.append(vehicle)
                vehicle.set_autopilot(True, self._traffic_manager.get_port())

    def _on_collision(self, event: Any) -> None:
        self._collided = True

    def _on_lane_invasion(self, event: Any) -> None:
        solid = (self._carla.LaneMarkingType.Solid, self._carla.LaneMarkingType.SolidSolid)
        self._crossed_line |= any(marking.type in solid for marking in event.crossed_lane_markings)

    # -- the protocol --------------------------------------------------------------------------------------------------

    def observe(self, index: np.ndarray | None = None) -> dict[str, np.ndarray]:
        """The camera from above, the vehicle's own motion, and the gap to the vehicle ahead."""
        forward = self._ego.get_transform().get_forward_vector()
        push = self._ego.get_acceleration()
        gap, closing = self._ahead()
        acceleration = push.x * forward.x + push.y * forward.y
        steering = -self._command[1] * self._max_steering
        motion = np.array([[self._speed(), acceleration, steering, gap, closing]], np.float32)
        offset = np.zeros((1, self.num_waypoints, 2), np.float32)
        return {schema.CAMERA: self._picture[None], schema.MOTION: motion, schema.SFT_OFFSET: offset}

    def follow(self, waypoints: np.ndarray) -> Outcome:
        """Track the path for `steps_per_decision` ticks, or until the vehicle has crashed or left the road."""
        ade = fde = None
        if self.measure_ade:
            ade, fde = displacement_errors(waypoints, self.target_waypoints())
        start = self._ego.get_transform()
        path = _to_map(start, np.concatenate([np.zeros((1, 2)), waypoints[0]]))
        outcome = self._run(lambda step: self._command_along(path, step * STEP_SECONDS), self.steps_per_decision)
        outcome.ade, outcome.fde = ade, fde
        return outcome

    def drive(self, acceleration: float, steering: float, num_ticks: int) -> Outcome:
        """Hold the pedals (-1 to 1, the brake negative) and the wheel (-1 to 1, left positive) for some ticks."""
        command = np.array([acceleration, -steering])
        return self._run(lambda step: command, num_ticks)

    def expert_command(self) -> tuple[float, float]:
        """The acceleration and steering of `drive` that follow `target_waypoints`."""
        here = self._ego.get_transform()
        path = _to_map(here, np.concatenate([np.zeros((1, 2)), self.target_waypoints()[0]]))
        push, right = self._command_along(path, 0.0)
        return float(push), -float(right)

    def _run(self, command: Callable[[int], np.ndarray], num_ticks: int) -> Outcome:
        """Give each tick its command, until the vehicle has crashed or left the road."""
        terms = dict.fromkeys(self.reward_terms, 0.0)
        off_road = False
        for step in range(num_ticks):
            before, self._command = self._command, command(step)
            push, right = self._command.tolist()
            self._ego.apply_control(
                self._carla.VehicleControl(throttle=max(push, 0.0), steer=right, brake=max(-push, 0.0))
            )
            self._tick()
            self._elapsed += STEP_SECONDS
            lane = self._lane(terms)
            off_road = lane is None
            terms["comfort"] -= 0.01 * float(np.abs(self._command - before).sum())
            if self._collided or off_road:
                break
        terms["collision"] = -10.0 * self._collided
        terms["off_road"] = -10.0 * off_road
        terms["lane"] -= 0.2 * self._crossed_line
        self._crossed_line = False
        terminated = self._collided or off_road or self._travelled >= self.route_length
        reached = terminated and not (self._collided or off_road)
        late = self._elapsed >= self.max_seconds and not terminated
        flags = (np.array([flag]) for flag in (terminated, late, reached, self._collided, off_road))
        terminates, truncates, succeeds, collides, leaves = flags
        arrays = {name: np.array([value]) for name, value in terms.items()}
        return Outcome(arrays, terminates, truncates, succeeds, collides, leaves)

    def target_waypoints(self) -> np.ndarray:
        """The middle of the lane ahead, at the speed that the vehicle ahead allows."""
        gap, closing = self._ahead()
        own = self._speed()
        wanted = min(CRUISE_SPEED, max(0.0, own - closing + (gap - 4.0 - own) / 2.0)) if gap < MAX_GAP else CRUISE_SPEED
        times = self.waypoint_seconds * np.arange(1, self.num_waypoints + 1)
        distances = np.cumsum(np.maximum(own + np.clip(wanted - own, -4.0 * times, 2.0 * times), 0.0))
        here = self._ego.get_transform()
        lane = self._map.get_waypoint(here.location)
        points, reached = [], 0.0
        for distance in distances * self.waypoint_seconds:
            ahead = lane.next(distance - reached) if distance - reached > 0.05 else []
            if ahead:
                lane, reached = ahead[0], distance
            points.append([lane.transform.location.x, lane.transform.location.y])
        return _to_ego(here, np.array(points))[None].astype(np.float32)

    def set_difficulty(self, level: str) -> None:
        """More traffic, from the next episode on."""
        self.difficulty = check_difficulty(level)

    def _command_along(self, path: np.ndarray, elapsed: float) -> np.ndarray:
        """Acceleration and steering (to the right), -1 to 1 each, that track a path of the map."""
        seen = _to_ego(self._ego.get_transform(), path)[None]
        acceleration, curvature = pursue(seen, np.array([self._speed()]), self.waypoint_seconds, elapsed)
        steering = -float(np.arctan(WHEELBASE * curvature[0])) / self._max_steering  # positive is to the right
        push = float(np.clip(acceleration[0] / (4.0 if acceleration[0] > 0 else 6.0), -1.0, 1.0))
        return np.array([push, np.clip(steering, -1.0, 1.0)])

    @property
    def steering(self) -> float:
        """The wheel's last position, -1 to 1, left positive."""
        return -float(self._command[1])

    @property
    def travelled(self) -> float:
        """Metres along the road in this episode."""
        return self._travelled

    def lane_error(self) -> tuple[float, float]:
        """Metres to the left of the lane's middle, and the sine of the heading error (left positive)."""
        place = self._ego.get_transform()
        middle = self._map.get_waypoint(place.location).transform
        offset = _to_ego(middle, np.array([[place.location.x, place.location.y]]))[0, 1]
        return float(offset), float(np.sin(np.deg2rad(middle.rotation.yaw - place.rotation.yaw)))

    def _lane(self, terms: dict[str, float]) -> Any:
        """The lane that the vehicle is in, None beside the road; adds progress and distance from its middle."""
        place = self._ego.get_transform()
        lane = self._map.get_waypoint(place.location, project_to_road=False)
        if lane is not None:
            ahead = self._map.get_waypoint(place.location).transform.get_forward_vector()
            velocity = self._ego.get_velocity()
            travelled = (velocity.x * ahead.x + velocity.y * ahead.y) * STEP_SECONDS
            self._travelled += travelled
            terms["progress"] += 0.1 * travelled
            terms["lane"] -= 0.05 * abs(self.lane_error()[0])
        return lane

    def _speed(self) -> float:
        velocity = self._ego.get_velocity()
        return float(np.hypot(velocity.x, velocity.y))

    def _ahead(self) -> tuple[float, float]:
        """Metres to the nearest vehicle in the way, bumper to bumper, and the speed at which it comes nearer."""
        here, gap, closing = self._ego.get_transform(), MAX_GAP, 0.0
        for other in self._world.get_actors().filter("vehicle.*"):
            if other.id == self._ego.id:
                continue
            place = other.get_transform().location
            ahead, beside = _to_ego(here, np.array([[place.x, place.y]]))[0]
            length = self._ego.bounding_box.extent.x + other.bounding_box.extent.x
            if abs(beside) < IN_WAY and ahead > 0.0 and ahead - length < gap:
                velocity = other.get_velocity()
                forward = here.get_forward_vector()
                gap = max(0.0, ahead - length)
                closing = self._speed() - (velocity.x * forward.x + velocity.y * forward.y)
        return gap, closing


def _import_carla() -> Any:
    try:
        import carla
    except ImportError as error:
        raise InputError(
            'env carla: the client package is not installed: pip install "deft[carla]" (x86 Linux and Windows; its '
            "version must be the server's)"
        ) from error
    return carla


def _to_ego(place: Any, points: np.ndarray) -> np.ndarray:
    """Points [P, 2] of CARLA's map as a vehicle at `place` sees them, x ahead and y to the left."""
    yaw = np.deg2rad(place.rotation.yaw)
    x, y = points[:, 0] - place.location.x, points[:, 1] - place.location.y
    return np.stack([x * np.cos(yaw) + y * np.sin(yaw), x * np.sin(yaw) - y * np.cos(yaw)], 1)


def _to_map(place: Any, points: np.ndarray) -> np.ndarray:
    """The inverse of `_to_ego`."""
    yaw = np.deg2rad(place.rotation.yaw)
    x = points[:, 0] * np.cos(yaw) + points[:, 1] * np.sin(yaw) + place.location.x
    y = points[:, 0] * np.sin(yaw) - points[:, 1] * np.cos(yaw) + place.location.y
    return np.stack([x, y], 1)
