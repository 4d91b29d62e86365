"""The embedded world: its rules, its reward by hand, its pictures, and that the instruction decides what counts."""

import copy
import math
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.utils.env_checker import check_env

from deft.envs import reach
from deft.envs.reach import ReachEnv
from deft.errors import InputError, RunError

STILL = np.zeros(2, np.float32)


def put(env: ReachEnv, shoulder: float, elbow: float, targets: list[list[float]], target_index: int = 0) -> ReachEnv:
    """A scene by hand: posture, targets, and which one counts."""
    env.reset(seed=0)
    env.shoulder, env.elbow = shoulder, elbow
    env.tip_x, env.tip_y = reach.fingertip(shoulder, elbow)
    env.target_positions = np.array(targets)
    env.target_index = target_index
    return env


def play_expert(env: ReachEnv, num_steps: int = 50) -> tuple[bool, int]:
    """Whether the scripted policy succeeds in the present episode, and after how many steps."""
    for step in range(num_steps):
        _, _, terminated, _, info = env.step(env.expert_action())
        if terminated:
            return info["success"], step + 1
    return False, num_steps


def colour_near(picture: np.ndarray, place: np.ndarray, colour: tuple[int, ...], pixels: int) -> bool:
    """Whether a [h, w, 3] picture shows a colour within some pixels of a place on the table."""
    scale = picture.shape[0] / 1.8  # the camera sees 1.8 m; its left edge is at x = -0.9, its upper one at y = 1.08
    row, column = int((1.08 - place[1]) * scale), int((place[0] + 0.9) * scale)
    region = picture[row - pixels : row + pixels + 1, column - pixels : column + pixels + 1].astype(int)
    return bool((np.abs(region - np.array(colour)).max(axis=-1) <= 2).any())


@pytest.mark.filterwarnings("ignore:.*not having a spec.*:UserWarning")  # made without gymnasium.make
@pytest.mark.parametrize("kwargs", [{}, {"observation": "vla"}, {"num_targets": 3, "reward": "sparse"}])
def test_gymnasium_contract(kwargs: dict[str, Any]) -> None:
    check_env(ReachEnv(render_mode="rgb_array", **kwargs))


def test_spaces() -> None:
    env = ReachEnv("vla", image_size=48)
    assert isinstance(env.observation_space, spaces.Dict)
    assert isinstance(env.observation_space["instruction"], spaces.Text)
    observation, _ = env.reset(seed=3)
    assert env.observation_space.contains(observation)
    assert observation["rgb"].shape == (3, 48, 48)
    names = [reach.COLOUR_NAMES[index] for index in env.target_colours]
    assert observation["instruction"] == f"reach the {names[env.target_index]} target"
    assert ReachEnv().observation_space.shape == (12,)  # 4 angles, 2 velocities, 2 fingertip, 2 for each of 2 targets


def test_state_observation_puts_the_instructed_target_first() -> None:
    # shoulder 0 and elbow 90 degrees: the elbow is at (0.48, 0), the fingertip 0.42 above it
    env = put(ReachEnv(), 0.0, math.pi / 2, [[0.0, 0.5], [0.6, 0.1]], target_index=1)
    observation = env.step(STILL)[0]
    expected = [1, 0, 0, 1, 0, 0, 0.48, 0.42, 0.12, -0.32, -0.48, 0.08]
    np.testing.assert_allclose(observation, expected, atol=1e-6)


def test_same_seed_same_trajectory() -> None:
    actions = np.random.default_rng(0).uniform(-1, 1, (40, 2))

    def record(seed: int) -> list[np.ndarray]:
        env = ReachEnv("vla")
        observation, _ = env.reset(seed=seed)
        rows = [observation["rgb"].ravel(), observation["proprio"]]
        for action in actions:
            observation, reward, terminated, _, _ = env.step(action)
            if terminated:
                observation, _ = env.reset()
            rows += [observation["rgb"].ravel(), observation["proprio"], np.array(reward)]
        return rows

    first, second, other = record(5), record(5), record(6)
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))
    assert not np.array_equal(first[1], other[1])


def test_a_copy_of_the_attributes_goes_on_alike() -> None:
    env, copied = ReachEnv(), ReachEnv()
    env.reset(seed=1)
    env.step(np.array([0.4, -0.9]))
    vars(copied).update(copy.deepcopy(vars(env)))
    for _ in range(3):
        for _ in range(10):
            action = env.expert_action()
            np.testing.assert_array_equal(env.step(action)[0], copied.step(action)[0])
        np.testing.assert_array_equal(env.reset()[0], copied.reset()[0])


def test_dense_reward_by_hand() -> None:
    env = put(ReachEnv(), 0.0, math.pi / 2, [[0.0, 0.42], [-0.5, 0.5]])
    _, reward, terminated, truncated, info = env.step(np.array([0.0, 1.0]))
    # The fingertip starts at (0.48, 0.42), 0.48 from the target. The elbow turns by 0.1 rad:
    # (0.48 - 0.42 sin 0.1, 0.42 cos 0.1) = (0.4380700, 0.4179018), so sqrt(0.4380700² + 0.0020982²) = 0.4380750 away.
    # distance: 2 (0.48 - 0.4380750) = 0.0838500; control: -0.005 · 1²
    assert info["reward_terms"] == pytest.approx(
        {"distance": 0.08385, "control": -0.005, "success": 0.0, "wrong_target": 0.0}, abs=1e-6
    )
    assert reward == pytest.approx(0.07885, abs=1e-6)
    assert (terminated, truncated, info["success"]) == (False, False, False)


@pytest.mark.parametrize(("kind", "right", "wrong"), [("dense", 1.0, -1.0), ("sparse", 1.0, 0.0)])
def test_the_instruction_decides_which_target_counts(kind: Any, right: float, wrong: float) -> None:
    positions = [[0.48, 0.37], [-0.5, 0.5]]  # the fingertip, at (0.48, 0.42), is 0.05 from the first: over its disc
    env = ReachEnv(reward=kind)
    _, reward, terminated, _, info = put(env, 0.0, math.pi / 2, positions, target_index=0).step(STILL)
    assert (reward, terminated, info["success"]) == (right, True, True)
    _, reward, terminated, _, info = put(env, 0.0, math.pi / 2, positions, target_index=1).step(STILL)
    assert (reward, terminated, info["success"]) == (wrong, True, False)


def test_only_the_words_tell_the_targets_apart() -> None:
    env = ReachEnv("vla")
    env.reset(seed=2)
    observations, ends = [], []
    for index in (0, 1):
        episode = copy.deepcopy(env)
        episode.target_index = index
        observations.append(episode.step(STILL)[0])
        assert play_expert(episode)[0]
        ends.append([episode.tip_x, episode.tip_y])
    np.testing.assert_array_equal(observations[0]["rgb"], observations[1]["rgb"])
    np.testing.assert_array_equal(observations[0]["proprio"], observations[1]["proprio"])
    assert observations[0]["instruction"] != observations[1]["instruction"]
    distances = np.linalg.norm(np.array(ends)[:, None] - env.target_positions[None], axis=-1)
    assert (distances.argmin(axis=1) == [0, 1]).all()


def test_joints_stop_at_their_limits_and_actions_are_clipped() -> None:
    far = [[0.0, 0.8], [-0.5, 0.5]]
    env = put(ReachEnv(), reach.SHOULDER_LIMITS[0] + 0.03, 0.0, far)
    observation = env.step(np.array([-1.0, 7.0]))[0]
    assert (env.shoulder, env.elbow) == (reach.SHOULDER_LIMITS[0], pytest.approx(0.1))
    np.testing.assert_allclose(observation[4:6], [-0.3, 1.0], atol=1e-6)  # 0.03 of 0.1 rad were left to turn


@pytest.mark.parametrize("num_targets", [2, 3])
def test_scenes_are_fair(num_targets: int) -> None:
    env = ReachEnv(num_targets=num_targets)
    env.reset(seed=0)
    elbow_sides, indices = set(), set()
    for _ in range(200):
        env.reset()
        elbow_sides.add(env.elbow > 0)
        indices.add(env.target_index)
        positions = env.target_positions
        assert len(set(env.target_colours.tolist())) == num_targets
        assert (np.linalg.norm(positions - [env.tip_x, env.tip_y], axis=1) > 2 * reach.TARGET_RADIUS).all()
        gaps = np.linalg.norm(positions[:, None] - positions[None], axis=-1)[np.triu_indices(num_targets, 1)]
        assert (gaps > 3 * reach.TARGET_RADIUS).all()
        for distance, angle in zip(np.linalg.norm(positions, axis=1), np.arctan2(*positions.T[::-1]), strict=True):
            # Law of cosines in the triangle shoulder, elbow, target with sides 0.48, 0.42 and the distance.
            bend = math.pi - math.acos((0.48**2 + 0.42**2 - distance**2) / (2 * 0.48 * 0.42))
            beside = math.acos((0.48**2 + distance**2 - 0.42**2) / (2 * 0.48 * distance))
            assert bend <= reach.ELBOW_LIMITS[1]
            assert reach.SHOULDER_LIMITS[0] <= angle - beside
            assert angle + beside <= reach.SHOULDER_LIMITS[1]
    assert elbow_sides == {True, False}
    assert indices == set(range(num_targets))


@pytest.mark.parametrize("num_targets", [1, 2, 3])
def test_expert_solves_it(num_targets: int) -> None:
    env = ReachEnv(num_targets=num_targets)
    successes = 0
    for seed in range(200):
        env.reset(seed=seed)
        successes += play_expert(env)[0]
    assert successes >= 190  # 95 %


def test_image_shows_targets_where_they_are() -> None:
    env = ReachEnv("vla")
    for seed in range(30):
        rgb = env.reset(seed=seed)[0]["rgb"]
        assert rgb.dtype == np.uint8
        picture = rgb.transpose(1, 2, 0)
        assert picture.std(axis=(0, 1)).min() > 10
        for index, name in enumerate(reach.COLOUR_NAMES):
            present = np.flatnonzero(env.target_colours == index)
            colour = reach.TARGET_COLOURS[name]
            if present.size:
                # A disc's radius is 3.5 pixels, more than the 1.8 of a link that may lie over its middle.
                assert colour_near(picture, env.target_positions[present[0]], colour, 3)
            else:
                assert not (np.abs(picture.astype(int) - colour).max(axis=-1) <= 2).any()


def test_image_follows_the_arm() -> None:
    env = put(ReachEnv("vla"), 0.0, math.pi / 2, [[-0.5, 0.5], [0.0, 0.8]])
    picture = env.step(STILL)[0]["rgb"].transpose(1, 2, 0)
    assert colour_near(picture, np.array([0.3, 0.0]), (232, 234, 237), 1)  # the upper arm lies along x
    assert colour_near(picture, np.array([0.48, 0.2]), (232, 234, 237), 1)  # the forearm rises from (0.48, 0)
    assert colour_near(picture, np.array([0.48, 0.39]), (33, 37, 43), 1)  # the gripper ends at (0.48, 0.42)


def test_render_rings_the_instructed_target() -> None:
    assert ReachEnv().render() is None
    env = put(ReachEnv(render_mode="rgb_array"), 0.0, math.pi / 2, [[-0.5, 0.5], [0.0, 0.8]], target_index=0)
    first = env.render()
    env.target_index = 1
    second = env.render()
    assert first is not None
    assert second is not None
    assert first.shape == (256, 256, 3)
    assert first.dtype == np.uint8
    rows, columns = np.nonzero((first != second).any(axis=-1))
    positions = np.stack([columns + 0.5, 256 * 1.08 / 1.8 - rows - 0.5], axis=1) * 1.8 / 256 - [0.9, 0.0]
    distances = np.linalg.norm(positions[:, None] - env.target_positions[None], axis=-1).min(axis=1)
    # Only the ring moved: its radius is 0.135, its line 0.014 wide, and a pixel is 0.007.
    assert np.abs(distances - 0.135).max() < 0.007 + 0.01
    for index, picture in enumerate((first, second)):
        assert colour_near(picture, env.target_positions[index] + [0.135, 0.0], (255, 255, 255), 2)


@pytest.mark.parametrize(
    "kwargs",
    [
        {"observation": "pixels"},
        {"reward": "shaped"},
        {"num_targets": 0},
        {"num_targets": 4},
        {"image_size": 8},
        {"render_mode": "human"},
    ],
)
def test_wrong_settings_are_named(kwargs: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=f"^{next(iter(kwargs))} is .*choose"):
        ReachEnv(**kwargs)


def test_an_action_that_is_no_number_stops_the_run() -> None:
    env = ReachEnv()
    env.reset(seed=0)
    with pytest.raises(RunError, match="action is"):
        env.step(np.array([0.0, np.nan]))
