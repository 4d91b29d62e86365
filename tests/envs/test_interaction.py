"""Which pixels are due to objects that moved, on the tabletop."""

import numpy as np
import pytest
from panning_camera import WORLD

from deft.envs.interaction import InteractionEnv
from deft.envs.tabletop.simulation import StillObjects
from deft.errors import InputError


@pytest.fixture(scope="module")
def env():
    found = InteractionEnv({"task_name": "pick", "image_size": 32, "max_steps": 60}, horizons=(1, 4))
    yield found
    found.close()


def test_only_the_arm_moves_until_the_hand_closes_on_an_object(env):
    """The arm and its camera move at every step. Until the expert's fingers touch the object, no pixel is due to an
    object; after the grasp some are, and after the lift the object is above its place. Success ends nothing."""
    env.reset(seed=3)
    frames, ends, successes = [], [], []
    for _ in range(30):
        observation, _, terminated, _, info = env.step(env.expert_action())
        frames.append(observation["wrist_rgb"][-1].astype(int))
        ends.append(terminated)
        successes.append(info["success"])
    found = env.recording()
    moved, touched, lifted = found["moved"], found["touched"], found["lifted"]
    assert moved.shape == (30, 2, 32, 32)
    first = int(np.flatnonzero(touched)[0])
    assert 5 < first < 25
    assert np.abs(frames[first - 1] - frames[first - 2]).max() > 8  # the image changes all the same
    assert not moved[:first].any()
    assert moved[first:, 0].any((1, 2)).sum() > 3
    assert lifted[-1]
    assert not lifted[:first].any()
    assert any(successes)
    assert not any(ends)
    # 4 steps before the first motion everything was as now: what moved in the last step moved within the last four
    start = int(np.flatnonzero(moved[:, 0].any((1, 2)))[0])
    assert np.array_equal(moved[start, 0], moved[start, 1])


def test_still_objects_are_drawn_where_they_were_and_nothing_is_changed(env):
    env.reset(seed=3)
    simulation = env.tabletop.simulation
    before, poses = simulation.images(("wrist", "head"), 32), simulation.all_poses
    before = [image.copy() for image in before]
    state = simulation.data.qpos.copy()
    still = StillObjects(simulation)
    assert all(np.array_equal(*pair) for pair in zip(still.images(poses, ("wrist", "head"), 32), before, strict=True))
    poses[:, 2] += 1.0  # out of view
    assert not np.array_equal(still.images(poses, ("head",), 32)[0], before[1])
    assert np.array_equal(simulation.data.qpos, state)
    assert np.array_equal(simulation.images(("wrist", "head"), 32)[1], before[1])


def test_other_worlds_have_no_objects_to_record():
    with pytest.raises(InputError, match="on the tabletop only"):
        InteractionEnv({"world": WORLD})
