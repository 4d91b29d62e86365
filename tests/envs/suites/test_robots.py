"""The suites aloha and gym-hil, in their interpreters; a test is skipped where its suite is not installed."""

import numpy as np
import pytest

from deft.config.settings import EnvConfig
from deft.envs import make_env, make_vector_env
from deft.envs.suites import find_suite
from deft.envs.suites.aloha_expert import OPEN, Waypoint, pose_at, rotation
from deft.envs.suites.install import INSTALLED, state_of


def made(env_id, **kwargs):
    suite = find_suite(env_id.partition("/")[0])
    if state_of(suite) != INSTALLED:
        pytest.skip(f"the suite {suite.name} is {state_of(suite)}: deft suite install {suite.name}")
    return make_env(EnvConfig(id=env_id, kwargs=kwargs))


@pytest.mark.parametrize(
    ("env_id", "shapes"),
    [
        (
            "gym-hil/pick-cube",
            {"state": (18,), "scene_state": (21,), "head_rgb": (32, 32, 3), "wrist_rgb": (32, 32, 3)},
        ),
        ("aloha/transfer-cube", {"state": (14,), "scene_state": (35,), "head_rgb": (32, 42, 3)}),
        ("aloha/insertion", {"state": (14,), "scene_state": (42,), "head_rgb": (32, 42, 3)}),
    ],
)
def test_streams(env_id, shapes):
    env = made(env_id, observation="privileged", image_size=32)
    try:
        found, _ = env.reset(seed=0)
        assert {name: value.shape for name, value in found.items() if name != "instruction"} == shapes
        assert all(np.ptp(value) > 50 for name, value in found.items() if name.endswith("rgb"))  # not blank
        assert env.observation_space.contains(found)
    finally:
        env.close()


@pytest.mark.parametrize("env_id", ["gym-hil/pick-cube-random", "aloha/transfer-cube"])
def test_the_expert_succeeds(env_id):
    env = made(env_id, observation="state")
    try:
        env.reset(seed=1)
        terminated = truncated = False
        while not (terminated or truncated):
            _, reward, terminated, truncated, info = env.step(env.get_wrapper_attr("expert_action")())
        assert (reward, terminated, info["success"]) == (1.0, True, True)
    finally:
        env.close()


@pytest.mark.parametrize("env_id", ["gym-hil/pick-cube-random", "aloha/insertion"])
def test_an_episode_depends_on_its_seed_alone_and_its_state_can_be_saved(env_id):
    made(env_id, observation="state").close()
    env = make_vector_env(EnvConfig(id=env_id, kwargs={"observation": "state"}, num_envs=2, num_workers=1))
    try:
        low, high = env.action_space.low, env.action_space.high
        actions = np.random.default_rng(0).uniform(low, high, (8, 2, *low.shape)).astype(np.float32)
        first = env.reset(5)["state"].copy()
        for action in actions[:4]:
            env.step(action)
        state = env.get_state()
        expected = [env.step(action).observation["state"].copy() for action in actions[4:]]
        env.set_state(state)
        for action, observation in zip(actions[4:], expected, strict=True):
            assert np.array_equal(env.step(action).observation["state"], observation)
        assert np.array_equal(env.reset(5)["state"], first)
        assert not np.array_equal(first[0], first[1])
    finally:
        env.close()


def test_actions_of_aloha_are_joint_positions():
    """The first position of the right elbow, 1.16 rad, is beyond the ±1 of gym-aloha's own action space."""
    env = made("aloha/transfer-cube", observation="state")
    try:
        observation, _ = env.reset(seed=0)
        start = observation["state"][:14]
        assert start[9] == pytest.approx(1.16)
        assert env.action_space.high[9] == pytest.approx(1.6057)
        assert (env.action_space.low[[6, 13]] == 0).all()
        assert (env.action_space.high[[6, 13]] == 1).all()
        for _ in range(20):
            observation = env.step(start)[0]
        assert np.abs(observation["state"][:14] - start).max() < 0.05
    finally:
        env.close()


def test_poses_between_waypoints():
    """Halfway between 0° and 60° about y is 30°: the quaternion (cos 15°, 0, sin 15°, 0)."""
    one, two = (Waypoint(step, np.full(3, step), "y", 6.0 * step, OPEN) for step in (0, 10))
    position, quaternion, gripper = pose_at([one, two], 5)
    assert position.tolist() == [5.0] * 3
    assert quaternion == pytest.approx([np.cos(np.pi / 12), 0, np.sin(np.pi / 12), 0])
    assert gripper == OPEN
    assert pose_at([one, two], 99)[0].tolist() == [10.0] * 3
    assert rotation("x", 180.0) == pytest.approx([0, 1, 0, 0])
