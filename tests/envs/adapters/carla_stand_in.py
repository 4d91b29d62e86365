"""A small stand-in for the `carla` client package, with the names, arguments and signs of its own API (0.9.16).

The road is straight along x, two lanes of 3.5 m whose middles are y = 0 and y = 3.5 (to the right); vehicles are points
that turn and accelerate as commanded. A server keeps what was spawned, so that a test sees what is left behind.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

LANE_WIDTH = 3.5
FREE_POINTS = 5


class Vector3D:
    def __init__(self, x=0.0, y=0.0, z=0.0):
        self.x, self.y, self.z = x, y, z


class Location(Vector3D):
    pass


class Rotation:
    def __init__(self, pitch=0.0, yaw=0.0, roll=0.0):
        self.pitch, self.yaw, self.roll = pitch, yaw, roll


class Transform:
    def __init__(self, location=None, rotation=None):
        self.location, self.rotation = location or Location(), rotation or Rotation()

    def get_forward_vector(self):
        yaw = math.radians(self.rotation.yaw)
        return Vector3D(math.cos(yaw), math.sin(yaw))


class VehicleControl:
    def __init__(
        self, throttle=0.0, steer=0.0, brake=0.0, hand_brake=False, reverse=False, manual_gear_shift=False, gear=0
    ):
        assert 0 <= throttle <= 1
        assert 0 <= brake <= 1
        assert -1 <= steer <= 1
        self.throttle, self.steer, self.brake = throttle, steer, brake


class LaneMarkingType:
    Broken, Solid, SolidSolid = 1, 2, 3


class WorldSettings:
    def __init__(self, synchronous_mode=False, fixed_delta_seconds=None):
        self.synchronous_mode, self.fixed_delta_seconds = synchronous_mode, fixed_delta_seconds


class _Blueprint:
    def __init__(self, id):
        self.id, self.attributes = id, {"number_of_wheels": "4"}

    def set_attribute(self, id, value):
        assert isinstance(value, str)
        self.attributes[id] = value

    def get_attribute(self, id):
        return SimpleNamespace(as_int=lambda: int(self.attributes[id]))


class _Library:
    def find(self, id):
        return _Blueprint(id)

    def filter(self, wildcard_pattern):
        return [_Blueprint("vehicle.audi.a2"), _Blueprint("vehicle.tesla.model3")]


class _Actor:
    def __init__(self, world, blueprint, transform, attach_to):
        self.world, self.blueprint, self.transform, self.parent = world, blueprint, transform, attach_to
        self.id, self.type_id = world.server.new_id(), blueprint.id
        self.speed, self.control, self.callback, self.autopilot = 0.0, VehicleControl(), None, False
        self.bounding_box = SimpleNamespace(extent=Vector3D(2.25, 1.0, 0.7))

    def get_transform(self):
        return self.transform

    def get_velocity(self):
        forward = self.transform.get_forward_vector()
        return Vector3D(forward.x * self.speed, forward.y * self.speed)

    def get_acceleration(self):
        return Vector3D()

    def get_physics_control(self):
        return SimpleNamespace(wheels=[SimpleNamespace(max_steer_angle=70.0), SimpleNamespace(max_steer_angle=0.0)])

    def apply_control(self, control):
        self.control = control

    def set_autopilot(self, enabled=True, port=8000):
        assert isinstance(port, int)
        self.autopilot = enabled

    def listen(self, callback):
        self.callback = callback

    def stop(self):
        self.callback = None

    def move(self, seconds):
        control = self.control
        self.speed = max(0.0, self.speed + (4.0 * control.throttle - 6.0 * control.brake) * seconds)
        turn = self.speed / 2.9 * math.tan(control.steer * math.radians(70.0)) * seconds  # to the right
        self.transform.rotation.yaw += math.degrees(turn)
        forward = self.transform.get_forward_vector()
        self.transform.location.x += forward.x * self.speed * seconds
        self.transform.location.y += forward.y * self.speed * seconds


class _Waypoint:
    def __init__(self, x, lane):
        self.transform, self.lane_width = Transform(Location(x, lane * LANE_WIDTH)), LANE_WIDTH

    def next(self, distance):
        assert distance > 0
        place = self.transform.location
        return [_Waypoint(place.x + distance, round(place.y / LANE_WIDTH))]


class _Map:
    def get_spawn_points(self):
        return [Transform(Location(40.0 * i, LANE_WIDTH * (i % 2))) for i in range(FREE_POINTS)]

    def get_waypoint(self, location, project_to_road=True, lane_type=None):
        lane = location.y / LANE_WIDTH
        if not project_to_road and not -0.5 <= lane <= 1.5:
            return None
        return _Waypoint(location.x, min(1, max(0, round(lane))))


class World:
    def __init__(self, server):
        self.server = server

    def get_map(self):
        return _Map()

    def get_settings(self):
        return WorldSettings(self.server.settings.synchronous_mode, self.server.settings.fixed_delta_seconds)

    def apply_settings(self, world_settings):
        self.server.settings = world_settings
        return 0

    def get_blueprint_library(self):
        return _Library()

    def try_spawn_actor(self, blueprint, transform, attach_to=None):
        taken = [a for a in self.server.actors.values() if a.parent is None]
        if any(abs(a.transform.location.x - transform.location.x) < 5 for a in taken):
            return None
        return self.spawn_actor(blueprint, transform, attach_to)

    def spawn_actor(self, blueprint, transform, attach_to=None):
        if self.server.fails_to_spawn == blueprint.id:
            raise RuntimeError("Spawn failed")
        actor = _Actor(self, blueprint, transform, attach_to)
        self.server.actors[actor.id] = actor
        return actor

    def get_actors(self, actor_ids=None):
        vehicles = [a for a in self.server.actors.values() if a.type_id.startswith("vehicle.")]
        return SimpleNamespace(filter=lambda wildcard_pattern: vehicles)

    def tick(self, seconds=10.0):
        server = self.server
        if server.is_gone:
            raise RuntimeError("time-out")
        assert server.settings.synchronous_mode
        server.frame += 1
        actors = list(server.actors.values())
        for actor in actors:
            if actor.parent is None:
                actor.move(server.settings.fixed_delta_seconds)
        for sensor in actors:
            if sensor.callback is None:
                continue
            if sensor.type_id == "sensor.camera.rgb":
                size = int(sensor.blueprint.attributes["image_size_x"])
                pixels = bytes([30, 20, 10, 255]) * (size * size)  # blue, green, red, alpha
                sensor.callback(SimpleNamespace(frame=server.frame, width=size, height=size, raw_data=pixels))
            elif sensor.type_id == "sensor.other.collision" and server.collides:
                sensor.callback(SimpleNamespace(actor=sensor.parent, other_actor=None))
        return server.frame


class Server:
    def __init__(self):
        self.actors, self.settings, self.frame = {}, WorldSettings(), 0
        self.is_running, self.is_gone, self.collides, self.fails_to_spawn = True, False, False, None
        self.traffic_is_synchronous = False
        self._ids = 0

    def new_id(self):
        self._ids += 1
        return self._ids


class TrafficManager:
    def __init__(self, server, port):
        self.server, self.port = server, port

    def set_synchronous_mode(self, mode_switch=True):
        self.server.traffic_is_synchronous = mode_switch

    def set_random_device_seed(self, value):
        assert isinstance(value, int)

    def get_port(self):
        return self.port


def make_package(server):
    """The module `carla` of a client that reaches this server."""

    class Client:
        def __init__(self, host="127.0.0.1", port=2000, worker_threads=0):
            assert isinstance(port, int)

        def set_timeout(self, second):
            self.timeout = second

        def get_world(self):
            if not server.is_running:
                raise RuntimeError(f"time-out of {self.timeout}s while waiting for the simulator")
            return World(server)

        def load_world(self, map_name):
            return self.get_world()

        def get_trafficmanager(self, client_connection=8000):
            return TrafficManager(server, client_connection)

        def apply_batch_sync(self, commands, do_tick=False):
            for actor in commands:
                server.actors.pop(actor.id, None)
            return []

    names = {name: value for name, value in globals().items() if isinstance(value, type)}
    return SimpleNamespace(**names, Client=Client, command=SimpleNamespace(DestroyActor=lambda actor: actor))
