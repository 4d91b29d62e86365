"""The CARLA client against a stand-in of the package: driving, sensors, and nothing left behind on any exit."""

import importlib.util
import sys

import numpy as np
import pytest

from deft import schema
from deft.envs.waypoints.make import make_waypoint_simulator
from deft.envs.waypoints.protocol import WaypointVectorEnv
from deft.errors import InputError, RunError

_spec = importlib.util.spec_from_file_location("carla_stand_in", f"{__file__.rpartition('/')[0]}/carla_stand_in.py")
stand_in = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(stand_in)


@pytest.fixture
def server(monkeypatch):
    running = stand_in.Server()
    monkeypatch.setitem(sys.modules, "carla", stand_in.make_package(running))
    return running


def make(**kwargs):
    return make_waypoint_simulator("carla", 1, "easy", {"camera_size": 16, "timeout": 0.2, **kwargs})


def test_its_own_waypoints_reach_the_end_of_the_route(server):
    client = make(route_length=60.0)
    env = WaypointVectorEnv(client)
    env.reset(0)
    for other in list(server.actors.values()):  # an empty road
        if other.autopilot:
            del server.actors[other.id]
    episodes = []
    for _ in range(40):
        episodes += env.step(client.target_waypoints()).episodes
        if episodes:
            break
    assert episodes[0].success
    assert not episodes[0].collision
    assert 6.0 <= episodes[0].terms["progress"] < 6.5  # a tenth of the metres; a decision is up to 4 m
    env.close()


def test_left_is_left_and_right_is_right(server):
    client = make()
    client.reset(np.arange(1), [0])
    for side in (1.0, -1.0):
        start = client._ego.get_transform().location.y
        path = np.stack([np.arange(1, 9) * 2.0, side * np.arange(1, 9) * 0.4], 1)[None].astype(np.float32)
        for _ in range(3):
            client.follow(path)
        # The package's y points to the right.
        assert np.sign(start - client._ego.get_transform().location.y) == side
        client.reset(np.arange(1), [0])
    client.close()


def test_the_observation_has_the_camera_in_red_green_blue_and_the_motion(server):
    client = make()
    client.reset(np.arange(1), [3])
    observation = client.observe()
    assert client.observation_space.contains({name: stream[0] for name, stream in observation.items()})
    assert observation[schema.CAMERA][0, :, 0, 0].tolist() == [10, 20, 30]
    client._ego.speed = 5.0
    assert client.observe()[schema.MOTION][0, 0] == pytest.approx(5.0)
    client.close()


def test_the_gap_is_to_the_vehicle_in_the_lane(server):
    client = make()
    client.reset(np.arange(1), [0])
    for actor in list(server.actors.values()):
        if actor.autopilot:
            del server.actors[actor.id]
    here = client._ego.get_transform().location
    other = client._world.spawn_actor(
        client._world.get_blueprint_library().find("vehicle.audi.a2"),
        stand_in.Transform(stand_in.Location(here.x + 20.0, here.y)),
    )
    client._ego.speed, other.speed = 8.0, 3.0
    # 20 m between the middles, less two halves of 4.5 m.
    assert client.observe()[schema.MOTION][0, 3:] == pytest.approx([15.5, 5.0])
    client.close()


def test_a_collision_ends_the_episode(server):
    client = make()
    client.reset(np.arange(1), [0])
    server.collides = True
    outcome = client.follow(client.target_waypoints())
    assert outcome.collision[0]
    assert outcome.terminated[0]
    assert not outcome.success[0]
    assert outcome.terms["collision"][0] == pytest.approx(-10.0)
    client.close()


def test_leaving_the_road_ends_the_episode(server):
    client = make()
    client.reset(np.arange(1), [0])
    client._ego.get_transform().rotation.yaw = -45.0  # half to the left, and straight on
    ahead = np.stack([np.arange(1, 9) * 2.0, np.zeros(8)], 1)[None].astype(np.float32)
    outcomes = [client.follow(ahead) for _ in range(12)]
    first = next(outcome for outcome in outcomes if outcome.terminated[0])
    assert first.off_road[0]
    assert not first.collision[0]
    assert first.terms["off_road"][0] == pytest.approx(-10.0)
    client.close()


def test_errors_are_against_the_lane(server):
    client = make(measure_ade=True)
    client.reset(np.arange(1), [0])
    outcome = client.follow(client.target_waypoints() + np.array([0.0, 2.0], np.float32))
    assert outcome.ade == pytest.approx([2.0], abs=1e-4)
    client.close()


def test_while_it_is_used_the_server_waits_and_afterwards_it_is_as_before(server):
    client = make()
    assert server.settings.synchronous_mode
    assert server.settings.fixed_delta_seconds == 0.1
    assert server.traffic_is_synchronous
    client.reset(np.arange(1), [0])
    assert len(server.actors) > 4  # the vehicle, three sensors, and traffic
    client.reset(np.arange(1), [1])
    egos = [actor for actor in server.actors.values() if actor.blueprint.attributes.get("role_name") == "hero"]
    assert len(egos) == 1
    client.close()
    client.close()
    assert not server.actors
    assert not server.settings.synchronous_mode
    assert server.settings.fixed_delta_seconds is None
    assert not server.traffic_is_synchronous


@pytest.mark.parametrize("blueprint", ["sensor.camera.rgb", "sensor.other.collision", "vehicle.tesla.model3"])
def test_nothing_is_left_where_spawning_fails_half_way(server, blueprint):
    client = make()
    server.fails_to_spawn = blueprint
    with pytest.raises(RuntimeError, match="Spawn failed"):
        client.reset(np.arange(1), [0])
    assert not server.actors
    client.close()


def test_a_server_that_goes_away_is_one_line_and_nothing_is_left(server):
    client = make()
    client.reset(np.arange(1), [0])
    server.is_gone = True
    with pytest.raises(RunError, match=r"the server stopped answering within 0\.2 s"):
        client.follow(client.target_waypoints())
    assert not server.actors


def test_no_server_is_one_line_on_how_to_start_one(server):
    server.is_running = False
    with pytest.raises(
        InputError, match=r"no server answered at 10\.0\.0\.7:2000 within 0\.2 s: start one with ./Carla"
    ):
        make(host="10.0.0.7")


def test_no_package_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "carla", None)
    with pytest.raises(InputError, match=r"pip install \"deft\[carla\]\""):
        make()


def test_training_and_evaluating_share_the_servers_one_world(server, tmp_path, monkeypatch):
    from deft.config.settings import LoggingConfig
    from deft.config.waypoint_settings import PPOConfig
    from deft.models.waypoint import WaypointSFT, WaypointShape
    from deft.runs.waypoint_files import save_sft
    from deft.training.waypoints.ppo import train_ppo

    monkeypatch.setattr("deft.training.waypoints.ppo._plots", lambda *given: [])
    save_sft(WaypointSFT(WaypointShape(16, 5, 8, 8, ())), tmp_path / "model.pt", {})
    kwargs = {"camera_size": 16, "timeout": 0.2, "route_length": 20.0, "max_seconds": 3.0}
    settings = {"eval_interval": 1, "eval_episodes": 1, "num_iterations": 2, "rollout_steps": 4, "save_interval": 0}
    quiet = LoggingConfig(console_level="CRITICAL", tensorboard=False, enable_file_logging=False)
    config = PPOConfig(
        sft_checkpoint=str(tmp_path / "model.pt"),
        out_dir=str(tmp_path / "run"),
        env=("carla",),
        env_kwargs=kwargs,
        **settings,
    )
    most = 0
    tick = stand_in.World.tick

    def watch(self, seconds=10.0):
        nonlocal most
        egos = [a for a in server.actors.values() if a.blueprint.attributes.get("role_name") == "hero"]
        most = max(most, len(egos))
        return tick(self, seconds)

    monkeypatch.setattr(stand_in.World, "tick", watch)
    train_ppo(config, quiet)
    assert most == 1
    assert not server.actors
    assert not server.settings.synchronous_mode


def test_one_vehicle_a_server(server):
    with pytest.raises(InputError, match="--num-envs 1, not 4"):
        make_waypoint_simulator("carla", 4)
