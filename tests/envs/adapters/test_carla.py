"""CARLA as a Gymnasium environment, against a stand-in of the client package."""

import importlib.util
import json
import sys
from pathlib import Path

import gymnasium
import numpy as np
import pytest

from deft.cli import main
from deft.config.settings import EnvConfig
from deft.envs import SerialVectorEnv, make_env, make_vector_env
from deft.envs.adapters.carla import CarlaEnv
from deft.errors import InputError, RunError

_path = Path(__file__).parent / "carla_stand_in.py"
_spec = importlib.util.spec_from_file_location("carla_stand_in", _path)
stand_in = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(stand_in)

KWARGS = {"image_size": 16, "timeout": 0.2, "difficulty": "easy"}


@pytest.fixture
def server(monkeypatch):
    running = stand_in.Server()
    monkeypatch.setitem(sys.modules, "carla", stand_in.make_package(running))
    return running


def clear_road(server):
    for other in [actor for actor in server.actors.values() if actor.autopilot]:
        del server.actors[other.id]


def is_untouched(server):
    return not server.actors and not server.settings.synchronous_mode and not server.traffic_is_synchronous


def test_it_has_a_camera_a_state_and_an_instruction(server):
    env = make_env(EnvConfig(id="carla", kwargs=KWARGS))
    observation, _ = env.reset(seed=0)
    assert set(observation) == {"image", "state", "instruction"}
    assert env.observation_space.contains(observation)
    assert observation["image"][:, 0, 0].tolist() == [10, 20, 30]  # the stand-in's red, green, blue
    assert observation["instruction"] == "drive safely"
    camera = next(actor for actor in server.actors.values() if actor.type_id == "sensor.camera.rgb")
    assert camera.transform.rotation.pitch == 0.0  # looks ahead
    env.close()
    assert is_untouched(server)


def test_actions_are_pedals_and_a_wheel_that_is_positive_to_the_left(server):
    env = CarlaEnv(**KWARGS, ticks_per_step=5)
    for side in (1.0, -1.0):
        env.reset(seed=0)
        clear_road(server)
        env.step(np.array([1.0, 0.0]))
        observation = env.step(np.array([1.0, 0.05 * side]))[0]
        speed, _, steering, gap, _, offset, heading, _ = observation["state"]
        # ten ticks of 0.1 s at 4 m/s², over 20; left is positive; nothing ahead
        assert speed == pytest.approx(4.0 / 20.0)
        assert steering == pytest.approx(0.05 * side)
        assert np.sign([offset, heading]).tolist() == [side, side]
        assert gap == 1.0
        slower = env.step(np.array([-1.0, 0.0]))[0]["state"][0]
        assert slower == pytest.approx(1.0 / 20.0)  # five ticks at -6 m/s²
    env.close()


def test_its_expert_reaches_the_end_and_the_reward_is_the_sum_of_its_terms(server):
    env = make_env(EnvConfig(id="carla", kwargs={**KWARGS, "route_length": 60.0}))
    env.reset(seed=1)
    clear_road(server)
    total = dict.fromkeys(CarlaEnv.reward_terms, 0.0)
    terminated = False
    while not terminated:
        _, reward, terminated, truncated, info = env.step(env.unwrapped.expert_action())
        assert not truncated
        assert reward == pytest.approx(sum(info["reward_terms"].values()))
        for name, value in info["reward_terms"].items():
            total[name] += value
    assert info["success"]
    assert 60.0 <= total["progress"] < 62.0  # a metre is worth 1; a step of 0.2 s is at most 1.6 m
    assert total["collision"] == 0.0
    env.close()


def test_a_collision_costs_a_hundred_and_terminates(server):
    env = CarlaEnv(**KWARGS)
    env.reset(seed=0)
    server.collides = True
    _, _, terminated, _, info = env.step(np.zeros(2))
    assert terminated
    assert not info["success"]
    assert info["reward_terms"]["collision"] == -100.0
    env.close()


def test_environments_on_one_server_take_turns(server):
    """A reset elsewhere ends the episode here: truncated, and the next episode is whole again."""
    training, evaluation = CarlaEnv(**KWARGS), CarlaEnv(**KWARGS)
    training.reset(seed=0)
    before = training.step(np.array([1.0, 0.0]))[0]
    evaluation.reset(seed=5)
    evaluation.step(np.zeros(2))
    after, reward, terminated, truncated, info = training.step(np.array([1.0, 0.0]))
    assert (reward, terminated, truncated, info["interrupted"]) == (0.0, False, True, True)
    np.testing.assert_array_equal(after["state"], before["state"])
    egos = [actor for actor in server.actors.values() if actor.blueprint.attributes.get("role_name") == "hero"]
    assert len(egos) == 1
    training.reset()
    assert not training.step(np.zeros(2))[3]
    evaluation.close()
    assert not training.step(np.zeros(2))[3]
    with pytest.raises(InputError, match="an environment with other settings"):
        CarlaEnv(**{**KWARGS, "image_size": 32})
    training.close()
    training.close()
    assert is_untouched(server)


def test_another_client_on_the_server_is_an_error_unless_it_is_taken(server):
    server.settings.synchronous_mode = True
    with pytest.raises(InputError, match=r"another client drives the server at 127.0.0.1:2000"):
        CarlaEnv(**KWARGS)
    env = CarlaEnv(**KWARGS, take_server=True)
    env.reset(seed=0)
    env.close()
    assert is_untouched(server)


def test_two_threads_cannot_play_on_one_server(server):
    import threading

    training, evaluation = CarlaEnv(**KWARGS), CarlaEnv(**KWARGS)
    training.reset(seed=0)
    caught = []

    def play():
        try:
            evaluation.reset(seed=1)
        except RunError as error:
            caught.append(str(error))

    thread = threading.Thread(target=play)
    thread.start()
    thread.join()
    assert "need a server each" in caught[0]
    training.close()
    evaluation.close()


def test_a_vector_of_environments_on_one_server_is_an_error(server):
    env = SerialVectorEnv([CarlaEnv(**KWARGS), CarlaEnv(**KWARGS)])
    env.reset(0)
    actions = np.zeros((2, 2), np.float32)
    env.step(actions)
    env.step(actions)
    with pytest.raises(RunError, match="use a separate port for each"):
        env.step(actions)
    env.close()


def test_its_state_cannot_be_saved_and_one_line_says_so(server):
    env = make_vector_env(EnvConfig(id="carla", kwargs=KWARGS))
    env.reset(0)
    assert env.get_state() is None
    assert "CarlaEnv has a CARLA server, whose state cannot be saved" in env.state_obstacle()
    env.close()
    with pytest.raises(InputError, match=r"give --num_envs 1, not 2"):
        make_vector_env(EnvConfig(id="carla", num_envs=2, kwargs=KWARGS))


def test_the_documents_command_trains(server, tmp_path, capsys):
    """`ppo_trainer.py --env carla`: collection and evaluation take turns on the server, which is left as it was."""
    options = "--total_timesteps 48 --rollout_steps 16 --batch_size 16 --eval_freq 16 --eval_episodes 1 --threads 1"
    kwargs = json.dumps({**KWARGS, "max_seconds": 1.0})
    command = ["train", "ppo", "--env", "carla", *options.split(), "--env-kwargs", kwargs]
    assert main([*command, "--output_dir", str(tmp_path / "run"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["timesteps"] == 48
    assert is_untouched(server)


def test_without_the_package_the_command_is_one_line(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "carla", None)
    assert main(["train", "ppo", "--env", "carla", "--output_dir", str(tmp_path / "run")]) == 2
    assert 'pip install "deft[carla]"' in capsys.readouterr().err
    assert "deft/Carla-v0" in gymnasium.registry
