"""The driving environment, alone and many at once: the same in both, and as Gymnasium and Deft want them."""

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.utils.env_checker import check_env

from deft.config.settings import EnvConfig
from deft.envs import SerialVectorEnv, make_env, make_vector_env
from deft.envs.driving.env import DrivingEnv, DrivingVectorEnv
from deft.envs.driving.simulator import REWARD_TERMS
from deft.envs.make import make_another
from deft.envs.process import ProcessVectorEnv
from deft.errors import InputError


def config(num_envs: int = 4, **kwargs: object) -> EnvConfig:
    return EnvConfig(id="driving", num_envs=num_envs, kwargs=kwargs)


@pytest.mark.parametrize("observation", ["vector", "image", "both"])
def test_gymnasium_accepts_it(observation: str) -> None:
    check_env(DrivingEnv(observation=observation, render_mode="rgb_array"), skip_render_check=True)  # type: ignore[arg-type]


def test_settings_that_do_not_exist_are_rejected() -> None:
    for kwargs, message in (
        ({"difficulty": "extreme"}, "difficulty is 'extreme'; choose 'easy', 'medium' or 'hard'"),
        ({"observation": "lidar"}, "observation is 'lidar'; choose 'vector', 'image' or 'both'"),
        ({"image_size": 8}, "image_size is 8; choose a whole number, from 16 to 512"),
        ({"render_mode": "human"}, "render_mode is 'human'"),
    ):
        with pytest.raises(InputError, match=message):
            DrivingEnv(**kwargs)  # type: ignore[arg-type]
        with pytest.raises(InputError, match=message):
            make_vector_env(config(**kwargs))
    with pytest.raises(InputError, match=r"env\.kwargs {'dificulty': 'easy'} do not fit deft/Driving-v0"):
        make_vector_env(config(dificulty="easy"))


def test_sync_steps_all_copies_at_once_and_the_other_kinds_one_by_one() -> None:
    native = make_vector_env(config())
    assert isinstance(native, DrivingVectorEnv)
    assert native.num_envs == 4
    assert native.reward_terms == REWARD_TERMS
    chunked = make_vector_env(config(), chunk_length=2)
    assert isinstance(chunked, SerialVectorEnv)
    workers = make_vector_env(EnvConfig(id="driving", num_envs=2, vector="process", num_workers=1))
    assert isinstance(workers, ProcessVectorEnv)
    workers.close()
    # Gymnasium's own vector entry points are of another kind.
    assert isinstance(make_vector_env(EnvConfig(id="CartPole-v1", num_envs=2)), SerialVectorEnv)


@pytest.mark.parametrize(("observation", "num_envs"), [("vector", 1), ("vector", 5), ("both", 2), ("image", 1)])
def test_many_at_once_equal_one_by_one(observation: str, num_envs: int) -> None:
    settings = config(num_envs, difficulty="hard", observation=observation, image_size=32)
    native, serial = make_vector_env(settings), SerialVectorEnv([lambda: make_env(settings)] * num_envs)
    assert isinstance(native, DrivingVectorEnv)
    assert native.observation_space == serial.observation_space
    assert native.action_space == serial.action_space
    assert_same(native.reset(5), serial.reset(5))
    generator = np.random.default_rng(0)
    num_ended = 0
    for step in range(110):
        expert = np.stack(native.call("expert_action"))
        np.testing.assert_array_equal(expert, np.stack(serial.call("expert_action")))
        actions = expert + (1.5 if step % 50 > 40 else 0.05) * generator.standard_normal((num_envs, 2))  # some crash
        first, second = native.step(actions), serial.step(actions)
        for name in ("reward", "terminated", "truncated", "num_steps", "done_index", "lost_index", "reward_terms"):
            np.testing.assert_array_equal(getattr(first, name), getattr(second, name), err_msg=name)
        assert_same(first.observation, second.observation)
        assert_same(first.final_observation, second.final_observation)
        assert first.episodes == second.episodes
        num_ended += len(first.episodes)
    assert num_ended > 0


def assert_same(first: object, second: object) -> None:
    if isinstance(first, dict) and isinstance(second, dict):
        assert first.keys() == second.keys()
        for name in first:
            np.testing.assert_array_equal(first[name], second[name])
    else:
        np.testing.assert_array_equal(first, second)  # type: ignore[arg-type]


def test_each_copy_takes_its_own_seed() -> None:
    env = make_vector_env(config(3))
    several = env.reset([7, 3, 7]).copy()
    np.testing.assert_array_equal(several[0], several[2])
    assert (several[0] != several[1]).any()
    np.testing.assert_array_equal(env.reset(7)[0], several[0])
    with pytest.raises(InputError, match="2 seeds for 3"):
        env.reset([1, 2])


@pytest.mark.parametrize("kind", ["sync", "one by one"])
def test_a_saved_state_goes_on_exactly(kind: str) -> None:
    settings = config(3, difficulty="hard", observation="both", image_size=16)

    def make() -> DrivingVectorEnv | SerialVectorEnv:
        env = make_vector_env(settings) if kind == "sync" else SerialVectorEnv([lambda: make_env(settings)] * 3)
        assert isinstance(env, DrivingVectorEnv | SerialVectorEnv)
        return env

    env, other = make(), make()
    assert env.state_obstacle() is None
    env.reset(1)
    for _ in range(20):
        env.step(np.stack(env.call("expert_action")))
    other.set_state(env.get_state() or [])
    assert_same(env.observation, other.observation)
    for _ in range(60):
        actions = np.stack(env.call("expert_action"))
        first, second = env.step(actions), other.step(actions)
        assert_same(first.observation, second.observation)
        np.testing.assert_array_equal(first.reward, second.reward)
        assert first.episodes == second.episodes


def test_difficulty_changes_with_the_next_episode() -> None:
    for env in (
        make_vector_env(config(2, difficulty="easy")),
        SerialVectorEnv([DrivingEnv("easy"), DrivingEnv("easy")]),
    ):
        env.reset(0)
        assert env.call("set_difficulty", "hard") == [None, None]
        simulators = [env.simulator] if isinstance(env, DrivingVectorEnv) else [one.simulator for one in env.envs]  # type: ignore[attr-defined]
        assert all((simulator.level == 0).all() for simulator in simulators)
        env.reset(0)
        assert all((simulator.level == 2).all() for simulator in simulators)
        with pytest.raises(InputError, match="has no method 'fly'"):
            env.call("fly")


def test_time_limit_and_success() -> None:
    env = make_vector_env(EnvConfig(id="driving", num_envs=2, max_episode_steps=6))
    env.reset(0)
    for _ in range(5):
        assert not env.step(np.zeros((2, 2))).truncated.any()
    step = env.step(np.zeros((2, 2)))
    assert step.truncated.all()
    assert not step.terminated.any()
    assert [(episode.length, episode.success) for episode in step.episodes] == [(6, False), (6, False)]
    env = make_vector_env(config(8))
    env.reset(0)
    episodes = []
    for _ in range(150):
        episodes += env.step(np.stack(env.call("expert_action"))).episodes
    assert sum(bool(episode.success) for episode in episodes) >= 7
    for episode in episodes:
        assert episode.episode_return == pytest.approx(sum(episode.terms.values()))
        assert not episode.success or episode.terms["progress"] == pytest.approx(200, abs=3)


def test_weights_of_the_reward() -> None:
    env = make_vector_env(EnvConfig(id="driving", num_envs=2, reward_weights={"comfort": 10.0, "progress": 0.0}))
    assert isinstance(env, DrivingVectorEnv)
    assert env.reward_weights is not None
    env.reset(0)
    step = env.step(np.ones((2, 2)))
    assert step.reward_terms is not None
    weights = [10.0 if name == "comfort" else float(name != "progress") for name in REWARD_TERMS]
    np.testing.assert_allclose(step.reward, step.reward_terms @ weights, rtol=1e-6)


def test_what_the_observation_says() -> None:
    env = DrivingEnv("easy")
    observation, _ = env.reset(seed=4)
    assert isinstance(env.observation_space, spaces.Box)
    assert env.observation_space.shape == (45,)
    simulator = env.simulator
    assert observation[0] == pytest.approx(simulator.speed[0] / 15)
    assert observation[3] == pytest.approx(simulator.lateral_offset[0] / 1.75)
    assert observation[5:8].tolist() == np.eye(3)[simulator.target_lane[0]].tolist()
    assert observation[8] == 1.0
    neighbours = observation[15:].reshape(6, 5)
    seen = simulator.other_active[0] & (np.abs(simulator.ahead()[0]) < 60)
    assert neighbours[:, 0].sum() == seen.sum() > 0
    ahead = np.sort(np.abs(simulator.ahead()[0][seen]))
    np.testing.assert_allclose(np.abs(neighbours[: seen.sum(), 1]) * 50, ahead, rtol=1e-5)
    assert not neighbours[seen.sum() :].any()


def test_another_one_is_made_for_evaluation() -> None:
    env = make_another(DrivingVectorEnv(4, difficulty="hard", observation="image", image_size=32, max_episode_steps=9))
    assert isinstance(env.unwrapped, DrivingEnv)
    assert env.unwrapped.simulator.difficulty == "hard"
    assert env.observation_space.shape == (3, 32, 32)
    assert env.spec is not None
    assert env.spec.max_episode_steps == 9


def test_gymnasium_makes_a_vector_of_its_own_kind() -> None:
    assert gymnasium.make_vec("deft/Driving-v0", num_envs=2).num_envs == 2
    assert gymnasium.make_vec("deft/Driving-v0", num_envs=2, vectorization_mode="sync").num_envs == 2


def test_render() -> None:
    assert make_vector_env(config(2)).render() is None
    env = gymnasium.make("deft/Driving-v0", render_mode="rgb_array")
    env.reset(seed=0)
    picture = env.render()
    assert isinstance(picture, np.ndarray)
    assert picture.shape == (480, 480, 3)
    vector = DrivingVectorEnv(2, render_mode="rgb_array")
    vector.reset(0)
    np.testing.assert_array_equal(vector.render(0), picture)
