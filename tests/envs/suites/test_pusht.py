"""The suite pusht, in its interpreter; a test is skipped where it is not installed."""

import numpy as np
import pytest

from deft.config.settings import EnvConfig
from deft.envs import make_env, make_vector_env
from deft.envs.suites.install import INSTALLED, state_of
from deft.envs.suites.pusht import SUITE


@pytest.fixture
def made():
    if state_of(SUITE) != INSTALLED:
        pytest.skip(f"the suite pusht is {state_of(SUITE)}: deft suite install pusht")
    envs = []

    def make(**kwargs):
        envs.append(make_env(EnvConfig(id="pusht", kwargs=kwargs)))
        return envs[-1]

    yield make
    for env in envs:
        env.close()


@pytest.mark.parametrize(
    ("observation", "shapes"),
    [
        ("images", {"state": (2,), "head_rgb": (32, 32, 3), "instruction": None}),
        ("privileged", {"state": (2,), "head_rgb": (32, 32, 3), "scene_state": (5,), "instruction": None}),
        ("state", {"state": (5,), "instruction": None}),
        ("keypoints", {"state": (2,), "environment_state": (16,)}),
    ],
)
def test_streams(made, observation, shapes):
    env = made(observation=observation, image_size=32)
    found, _ = env.reset(seed=0)
    assert {name: None if isinstance(value, str) else value.shape for name, value in found.items()} == shapes
    assert env.observation_space.contains(found)


def test_keypoints_are_the_corners_of_the_block(made):
    """The bar of the block is 120 long and 30 wide, the stem 30 wide and 90 long."""
    env = made(observation="keypoints")
    points = env.reset(seed=0)[0]["environment_state"].reshape(8, 2)
    sides = np.linalg.norm(points - points[[1, 2, 3, 0, 5, 6, 7, 4]], axis=1)
    assert sorted(sides[:4].round(3)) == [30, 30, 120, 120]
    assert sorted(sides[4:].round(3)) == [30, 30, 90, 90]


def test_rewards_and_measures(made):
    """The expert succeeds; the same actions with each reward."""
    env = made(observation="keypoints", reward="coverage")
    actions, rewards, covered = [], [], []
    points = [env.reset(seed=2)[0]["environment_state"]]
    info = {"success": False}
    while not info["success"]:
        actions.append(env.get_wrapper_attr("expert_action")())
        found, reward, _, truncated, info = env.step(actions[-1])
        assert not truncated
        points.append(found["environment_state"])
        rewards.append(reward)
        covered.append(info["coverage"])
    assert info["measures"] == {"max_coverage": max(covered), "max_reward": 1.0}
    assert max(covered) > 0.95
    assert rewards == pytest.approx(np.minimum(np.array(covered) / 0.95, 1))

    env = made(observation="state", reward="success")
    env.reset(seed=2)
    assert [env.step(action)[1] for action in actions] == [0.0] * (len(actions) - 1) + [1.0]

    # The change in coverage and in the mean distance of the corners from the target's, / 100. In the target's frame
    # the bar goes from (-60, 0) to (60, 30), the stem from (-15, 30) to (15, 120); the target is turned by 45°.
    env = made(observation="state", reward="progress")
    env.reset(seed=2)
    progress = [env.step(action)[1] for action in actions]
    corners = np.array([(-60, 0), (60, 0), (60, 30), (15, 30), (15, 120), (-15, 120), (-15, 30), (-60, 30)])
    target = 256 + corners @ (np.array([[1, 1], [-1, 1]]) / np.sqrt(2))
    distances = [
        np.mean([np.linalg.norm(one.reshape(8, 2) - corner, axis=1).min() for corner in target]) for one in points[-2:]
    ]
    expected = 1 + covered[-1] - covered[-2] + (distances[0] - distances[1]) / 100
    assert progress[-1] == pytest.approx(expected, abs=1e-4)


def test_an_episode_continues_from_a_saved_state(made):
    """Contacts included, and the episode that follows at the time limit."""
    made().close()
    kwargs = {"observation": "keypoints", "max_episode_steps": 30}
    env = make_vector_env(EnvConfig(id="pusht", kwargs=kwargs, num_envs=1, num_workers=1))
    try:
        env.reset(3)
        for _ in range(12):
            env.step(np.array([[256.0, 256.0]], np.float32))  # through the block
        state = env.get_state()
        assert state is not None
        actions = np.random.default_rng(0).uniform(150, 350, (30, 1, 2)).astype(np.float32)
        expected = [env.step(action).observation["environment_state"].copy() for action in actions]
        env.set_state(state)
        for action, points in zip(actions, expected, strict=True):
            assert np.array_equal(env.step(action).observation["environment_state"], points)
    finally:
        env.close()
