"""A client of a running CARLA server: one ego vehicle in synchronous mode, as a waypoint simulator; extra `carla`.

`CarlaEnv` (`carla.py`) drives the same client with throttle and steering. CARLA's frame has y to the right and degrees;
Deft's has y to the left and radians. Every spawned actor is destroyed at the next reset, when the client is closed, and
when the process ends; the server's settings are restored.
"""

from __future__ import annotations

import atexit
import contextlib
import queue
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from deft.config.fields import setting_names
from deft.config.validation import Count, Positive, Switch, checked, settings
from deft.envs.checks import import_optional
from deft.envs.waypoints.protocol import MAX_GAP, Outcome, WaypointSimulator
from deft.envs.waypoints.tracking import pursue, to_ego, to_map
from deft.errors import InputError, RunError

STEP_SECONDS = 0.1
CRUISE_SPEED = 8.0
WHEELBASE = 2.9
TRAFFIC = {"easy": 10, "medium": 30, "hard": 60}
CAMERA_HEIGHT = 24.0  # metres above a point ahead of the vehicle; 90° field of view: 48 m across
CAMERA_AHEAD = 12.0
FRONT_CAMERA = (1.6, 1.7)  # metres ahead of the vehicle's centre and above the ground
IN_WAY = 2.2  # vehicles closer than this sideways block the lane


@settings
class CarlaServer:
    """Where the server runs, and the episodes on it."""

    host: str = "127.0.0.1"
    port: Count = 2000
    traffic_manager_port: Count = 8000
    timeout: Positive = 10.0
    """Seconds until the server counts as lost."""
    town: str | None = None
    """The map to load; None: the present one."""
    route_length: Positive = 200.0
    max_seconds: Positive = 60.0
    camera: Literal["above", "front"] = "above"
    take_server: Switch = False
    """Whether to use a server in synchronous mode, which usually has another client."""


class CarlaClient(WaypointSimulator):
    """One ego vehicle on a CARLA server."""

    view = (CAMERA_AHEAD - CAMERA_HEIGHT, CAMERA_AHEAD + CAMERA_HEIGHT, -CAMERA_HEIGHT, CAMERA_HEIGHT)

    def __init__(
        self, num_envs: int = 1, difficulty: str = "medium", *, steps_per_decision: int = 5, **arguments: Any
    ) -> None:
        """`arguments` are those of `CarlaServer` and the other ones of `WaypointSimulator`."""
        if num_envs != 1:
            raise InputError(f"env carla: a server has one ego vehicle; give --num-envs 1, not {num_envs}")
        names = setting_names(CarlaServer)
        server = checked(CarlaServer, {name: arguments.pop(name) for name in names if name in arguments})
        super().__init__(1, difficulty, steps_per_decision=steps_per_decision, **arguments)
        self.server = server
        self._generator = np.random.default_rng()
        self._actors: list[Any] = []
        self._sensors: list[Any] = []
        self._collided = self._crossed_line = False
        self.travelled = 0.0
        """Metres along the road in this episode."""
        self._elapsed = 0.0
        self._command = np.zeros(2)  # throttle (brake negative) and steering (right positive) of the last tick
        self._settings: Any = None
        remedy = 'pip install "deft[carla]" (x86 Linux and Windows; its version must be that of the server)'
        self._carla = import_optional("carla", "env carla", remedy)
        self._connect()

    # -- the server ----------------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        """Connect to the server and set synchronous mode."""
        carla, server = self._carla, self.server
        address = f"{server.host}:{server.port}"
        try:
            self._client = carla.Client(server.host, server.port)
            self._client.set_timeout(self.server.timeout)
            self._world = self._client.load_world(server.town) if server.town else self._client.get_world()
            self._map = self._world.get_map()
        except RuntimeError as error:
            raise InputError(
                f"env carla: no server answered at {address} within {self.server.timeout:g} s: start one with "
                f"./CarlaUE4.sh -RenderOffScreen -carla-rpc-port={server.port}, or give host and port in --env-kwargs"
            ) from error
        settings = self._world.get_settings()
        if settings.synchronous_mode and not server.take_server:
            raise InputError(
                f"env carla: another client drives the server at {address} (it is synchronous); use another one, "
                "or give --env-kwargs '{\"take_server\": true}' if that client was killed"
            )
        atexit.register(self.close)
        try:
            if settings.synchronous_mode:  # do not restore the mode of the killed client
                settings.synchronous_mode, settings.fixed_delta_seconds = False, None
            self._settings = settings
            changed = self._world.get_settings()
            changed.synchronous_mode, changed.fixed_delta_seconds = True, STEP_SECONDS
            self._world.apply_settings(changed)
            self._traffic_manager = self._client.get_trafficmanager(server.traffic_manager_port)
            self._traffic_manager.set_synchronous_mode(True)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Destroy the spawned actors, and restore the server's settings."""
        atexit.unregister(self.close)
        self._destroy_actors()
        if self._settings is not None:
            settings, self._settings = self._settings, None
            with contextlib.suppress(RuntimeError):  # the server may have ended, and its actors with it
                self._traffic_manager.set_synchronous_mode(False)
            with contextlib.suppress(RuntimeError):
                self._world.apply_settings(settings)

    def _destroy_actors(self) -> None:
        for sensor in self._sensors:
            with contextlib.suppress(RuntimeError):
                sensor.stop()
        actors, self._actors, self._sensors = [*self._sensors, *self._actors], [], []
        if actors:
            with contextlib.suppress(RuntimeError):
                self._client.apply_batch_sync([self._carla.command.DestroyActor(actor) for actor in actors], False)

    def _tick(self) -> None:
        """Simulate one step, and receive its camera image."""
        try:
            frame = self._world.tick(self.server.timeout)
            image = self._frames.get(timeout=self.server.timeout)
            while image.frame < frame:
                image = self._frames.get(timeout=self.server.timeout)
        except (RuntimeError, queue.Empty) as error:
            self.close()
            raise RunError(f"env carla: the server stopped answering within {self.server.timeout:g} s") from error
        pixels = np.frombuffer(image.raw_data, np.uint8).reshape(image.height, image.width, 4)  # BGRA
        self._image = pixels[:, :, 2::-1].transpose(2, 0, 1).copy()

    # -- episodes ------------------------------------------------------------------------------------------------------

    def reset(self, index: np.ndarray, seeds: Sequence[int | None]) -> None:
        """Spawn the ego vehicle with its sensors at one of the map's spawn points, and traffic at others."""
        if seeds[0] is not None:
            self._generator = np.random.default_rng(seeds[0])
        self._destroy_actors()
        self._collided = self._crossed_line = False
        self.travelled = self._elapsed = 0.0
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
        pose = carla.Transform(carla.Location(x=CAMERA_AHEAD, z=CAMERA_HEIGHT), carla.Rotation(pitch=-90.0))
        if self.server.camera == "front":
            pose = carla.Transform(carla.Location(x=FRONT_CAMERA[0], z=FRONT_CAMERA[1]), carla.Rotation())
        self._frames: queue.Queue[Any] = queue.Queue()
        self._attach(camera, pose, self._frames.put)
        self._attach(library.find("sensor.other.collision"), carla.Transform(), self._on_collision)
        self._attach(library.find("sensor.other.lane_invasion"), carla.Transform(), self._on_lane_invasion)
        self._spawn_traffic(library, free)

    def _attach(self, blueprint: Any, pose: Any, callback: Any) -> None:
        sensor = self._world.spawn_actor(blueprint, pose, attach_to=self._ego)
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

    def _images(self, rows: np.ndarray) -> np.ndarray:
        return self._image[None]

    def _motion(self, rows: np.ndarray) -> list[list[float]]:
        forward = self._ego.get_transform().get_forward_vector()
        push = self._ego.get_acceleration()
        acceleration = push.x * forward.x + push.y * forward.y
        return [[self._speed(), acceleration, -self._command[1] * self._max_steering, *self._ahead()]]

    def _track(self, waypoints: np.ndarray) -> Outcome:
        """Track the path for `steps_per_decision` ticks, or until a collision or the road's edge."""
        path = self._path(waypoints)
        return self._run(lambda step: self._command_along(path, step * STEP_SECONDS), self.steps_per_decision)

    def _path(self, waypoints: np.ndarray) -> np.ndarray:
        """Return the path from the vehicle along waypoints [1, K, 2], on the map."""
        return to_map(np.concatenate([np.zeros((1, 2)), waypoints[0]]), *_pose(self._ego.get_transform()))

    def drive(self, acceleration: float, steering: float, num_ticks: int) -> Outcome:
        """Hold the throttle (-1 to 1, brake negative) and the steering (-1 to 1, left positive) for some ticks."""
        command = np.array([acceleration, -steering])
        return self._run(lambda step: command, num_ticks)

    def expert_command(self) -> tuple[float, float]:
        """Return acceleration and steering of `drive` along `target_waypoints`."""
        push, right = self._command_along(self._path(self.target_waypoints()), 0.0)
        return float(push), -float(right)

    def _run(self, command: Callable[[int], np.ndarray], num_ticks: int) -> Outcome:
        """Apply the commands of the ticks, until a collision or the road's edge."""
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
        terminated = self._collided or off_road or self.travelled >= self.server.route_length
        reached = terminated and not (self._collided or off_road)
        late = self._elapsed >= self.server.max_seconds and not terminated
        flags = (np.array([flag]) for flag in (terminated, late, reached, self._collided, off_road))
        terminates, truncates, succeeds, collides, leaves = flags
        arrays = {name: np.array([value]) for name, value in terms.items()}
        return Outcome(arrays, terminates, truncates, succeeds, collides, leaves)

    def target_waypoints(self) -> np.ndarray:
        """Return the middle of the lane ahead, at the speed that the vehicle ahead allows."""
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
        return to_ego(np.array(points), *_pose(here))[None].astype(np.float32)

    def _command_along(self, path: np.ndarray, elapsed: float) -> np.ndarray:
        """Return acceleration and steering (right positive), -1 to 1 each, along a path of the map."""
        seen = to_ego(path, *_pose(self._ego.get_transform()))[None]
        acceleration, curvature = pursue(seen, np.array([self._speed()]), self.waypoint_seconds, elapsed)
        steering = -float(np.arctan(WHEELBASE * curvature[0])) / self._max_steering  # positive is to the right
        push = float(np.clip(acceleration[0] / (4.0 if acceleration[0] > 0 else 6.0), -1.0, 1.0))
        return np.array([push, np.clip(steering, -1.0, 1.0)])

    @property
    def steering(self) -> float:
        """The last steering command, -1 to 1, left positive."""
        return -float(self._command[1])

    def lane_error(self) -> tuple[float, float]:
        """Return metres to the left of the lane's middle, and the sine of the heading error (left positive)."""
        pose = self._ego.get_transform()
        middle = self._map.get_waypoint(pose.location).transform
        offset = to_ego(_pose(pose)[0][None], *_pose(middle))[0, 1]
        return float(offset), float(np.sin(np.deg2rad(middle.rotation.yaw - pose.rotation.yaw)))

    def _lane(self, terms: dict[str, float]) -> Any:
        """Return the vehicle's lane, None off the road; add progress and distance from its middle to `terms`."""
        location = self._ego.get_transform().location
        lane = self._map.get_waypoint(location, project_to_road=False)
        if lane is not None:
            ahead = self._map.get_waypoint(location).transform.get_forward_vector()
            velocity = self._ego.get_velocity()
            travelled = (velocity.x * ahead.x + velocity.y * ahead.y) * STEP_SECONDS
            self.travelled += travelled
            terms["progress"] += 0.1 * travelled
            terms["lane"] -= 0.05 * abs(self.lane_error()[0])
        return lane

    def _speed(self) -> float:
        velocity = self._ego.get_velocity()
        return float(np.hypot(velocity.x, velocity.y))

    def _ahead(self) -> tuple[float, float]:
        """Return metres to the nearest vehicle ahead, bumper to bumper, and the closing speed."""
        here, gap, closing = self._ego.get_transform(), MAX_GAP, 0.0
        for other in self._world.get_actors().filter("vehicle.*"):
            if other.id == self._ego.id:
                continue
            ahead, beside = to_ego(_pose(other.get_transform())[0][None], *_pose(here))[0]
            length = self._ego.bounding_box.extent.x + other.bounding_box.extent.x
            if abs(beside) < IN_WAY and ahead > 0.0 and ahead - length < gap:
                velocity = other.get_velocity()
                forward = here.get_forward_vector()
                gap = max(0.0, ahead - length)
                closing = self._speed() - (velocity.x * forward.x + velocity.y * forward.y)
        return gap, closing


def _pose(transform: Any) -> tuple[np.ndarray, float]:
    """Return the position [2] and the heading (radians) of a CARLA transform."""
    return np.array([transform.location.x, transform.location.y]), float(np.deg2rad(transform.rotation.yaw))
