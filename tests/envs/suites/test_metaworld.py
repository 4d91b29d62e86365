"""MetaWorld itself, in its interpreter; the tests are skipped where the suite is not installed."""

import os

import numpy as np
import pytest

from deft.cli import main
from deft.config.settings import EnvConfig
from deft.envs import make_env, make_vector_env
from deft.envs.suites import find_suite
from deft.envs.suites.install import INSTALLED, state_of
from deft.envs.suites.metaworld import TASKS, turns
from deft.errors import InputError

SUITE = find_suite("metaworld")


@pytest.fixture(autouse=True)
def _installed():
    if state_of(SUITE) != INSTALLED:
        pytest.skip(f"the suite metaworld is {state_of(SUITE)}: deft suite install metaworld")


def blind(task, **kwargs):
    return make_env(EnvConfig(id=f"metaworld/{task}", kwargs={"observation": "state", **kwargs}))


def test_an_episode_depends_on_its_seed_alone():
    """A simulator that has played other episodes gives the same one again."""
    env = blind("MT10")
    try:

        def play(seed):
            states = [env.reset(seed=seed)[0]["state"]]
            for _ in range(15):
                states.append(env.step(env.get_wrapper_attr("expert_action")())[0]["state"])
            return np.stack(states)

        first = play(3)  # door-open
        play(13)
        play(4)
        assert np.array_equal(play(3), first)
    finally:
        env.close()


def test_the_expert_solves_reach_and_the_labels_name_it():
    env = blind("reach-v3")
    try:
        env.reset(seed=0)
        terminated = False
        while not terminated:
            _, reward, terminated, truncated, info = env.step(env.get_wrapper_attr("expert_action")())
            assert not truncated
        assert (reward, info["success"]) == (1.0, True)
        assert (info["task"], info["instruction"]) == ("reach-v3", TASKS["reach-v3"])
    finally:
        env.close()


def test_the_scene_of_a_group_has_the_task_and_labels_are_positions():
    """Seed 13 of MT10 plays task 3, door-open: one object, the handle, whose position the expert reads too."""
    found = {}
    adds = {"privileged": {"scene_state"}, "labelled": {"places"}, "all": {"scene_state", "places"}}
    for observation, streams in adds.items():
        env = make_env(EnvConfig(id="metaworld/MT10", kwargs={"observation": observation, "image_size": 16}))
        first, _ = env.reset(seed=13)
        assert env.observation_space.contains(first)
        assert first.keys() == {"state", "head_rgb", "instruction", *streams}
        assert all(np.array_equal(first[name], found.setdefault(name, first[name])) for name in streams)
        env.close()
    scene, places = found["scene_state"], found["places"]
    assert scene[39:].tolist() == [0, 0, 0, 1, 0, 0, 0, 0, 0, 0]
    assert np.array_equal(places, scene[[4, 5, 6, 11, 12, 13, 36, 37, 38]])
    assert (places != 0).tolist() == [True] * 3 + [False] * 3 + [True] * 3
    single = blind("door-open-v3")
    assert single.observation_space["state"].shape == (39,)
    single.close()


def test_dense_rewards_last_to_the_time_limit():
    env = make_env(
        EnvConfig(id="metaworld/reach-v3", kwargs={"observation": "state", "reward": "dense"}, max_episode_steps=60)
    )
    try:
        env.reset(seed=0)
        ends = [env.step(env.get_wrapper_attr("expert_action")())[2:4] for _ in range(60)]
        assert ends[-1] == (False, True)
        assert not any(any(end) for end in ends[:-1])
    finally:
        env.close()


def test_rewards_of_progress_add_up_to_the_last_dense_one():
    """Σ (d_t − d_{t−1}) / 10 over the steps after the first = (d_T − d_1) / 10, and 1 for the success at T."""
    totals, dense = {}, []
    for reward in ("dense", "progress"):
        env = blind("reach-v3", reward=reward)
        env.reset(seed=0)
        rewards, terminated, info = [], False, {}
        while not (terminated or info.get("success")):
            _, value, terminated, _, info = env.step(env.get_wrapper_attr("expert_action")())
            rewards.append(value)
        env.close()
        totals[reward] = sum(rewards)
        dense = dense or rewards
    assert totals["progress"] == pytest.approx((dense[-1] - dense[0]) / 10 + 1)
    assert dense[-1] > 9 > dense[0]


def test_weights_decide_how_often_a_task_is_played_and_not_its_place_in_the_scene():
    """MT10 starts with reach, push, pick-place. With reach twice and without push, turn 2 is pick-place, task 2."""
    weights = {"reach-v3": 2, "push-v3": 0}
    env = blind("MT10", task_weights=weights)
    try:
        played = [env.reset(seed=seed)[1]["task"] for seed in range(3)]
        assert played == ["reach-v3", "reach-v3", "pick-place-v3"]
        assert env.reset(seed=2)[0]["state"][39:].argmax() == 2
        assert env.reset(seed=10)[1]["task"] == played[0]  # 2 + 0 + 8 turns
    finally:
        env.close()


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"raech-v3": 2}, "task_weights: the task is 'raech-v3'; choose 'reach-v3'"),
        (7, "task_weights is 7; give a weight for each of some tasks, as in"),
        ({"reach-v3": 0.5}, "task_weights: reach-v3 is 0.5; choose a whole number, at least 0"),
        ({"reach-v3": 0, "push-v3": 0}, "task_weights: all are 0"),
    ],
)
def test_wrong_weights_are_named(weights, message):
    with pytest.raises(InputError, match=message):
        turns(("reach-v3", "push-v3"), weights)


def test_weights_are_for_groups_and_for_training(capsys):
    with pytest.raises(InputError, match="task_weights: are for groups of tasks, and reach-v3 is one task"):
        blind("reach-v3", task_weights={"reach-v3": 2})
    weights = ["--env-kwargs", 'task_weights={"reach-v3": 2}']
    assert main(["evaluate", "--suite", "metaworld/MT10", "--policy", "random", "--episodes", "1", *weights]) == 2
    assert "--env-kwargs task_weights: is for training" in capsys.readouterr().err


def test_a_saved_state_continues_exactly():
    env = make_vector_env(EnvConfig(id="metaworld/MT10", kwargs={"observation": "state"}, num_envs=2, num_workers=1))
    try:
        actions = np.random.default_rng(0).uniform(-1, 1, (12, 2, 4)).astype(np.float32)
        env.reset(0)
        for action in actions[:6]:
            env.step(action)
        state = env.get_state()
        expected = [env.step(action).observation["state"].copy() for action in actions[6:]]
        env.set_state(state)
        for action, observation in zip(actions[6:], expected, strict=True):
            assert np.array_equal(env.step(action).observation["state"], observation)
    finally:
        env.close()


@pytest.mark.skipif(os.environ.get("MUJOCO_GL") == "disable", reason="nothing can be rendered")
@pytest.mark.parametrize("rendering", ["light", "fast"])
def test_images_are_upright(rendering):
    """The floor and the sky behind the table are at the top of an upright image: grey, with little colour."""
    env = make_env(EnvConfig(id="metaworld/reach-v3", kwargs={"rendering": rendering, "image_size": 32}))
    try:
        observation, _ = env.reset(seed=0)
        image = observation["head_rgb"].astype(int)
        assert image.shape == (32, 32, 3)
        colour = np.ptp(image, axis=2).mean(axis=1)
        assert colour[:2].mean() < 10 < colour[-8:].mean()
        assert observation["instruction"] == TASKS["reach-v3"]
    finally:
        env.close()


@pytest.mark.skipif(os.environ.get("MUJOCO_GL") == "disable", reason="nothing can be rendered")
@pytest.mark.parametrize("task", ["reach-v3", "push-v3", "peg-insert-side-v3", "window-open-v3", "drawer-open-v3"])
def test_everything_is_drawn_where_it_is_from_the_first_image(task):
    """One step without motion leaves everything in its place: two images are alike."""
    env = make_env(EnvConfig(id=f"metaworld/{task}", kwargs={"rendering": "light"}))
    try:
        env.reset(seed=10)  # another scene, which the next one does not show
        first = env.reset(seed=3)[0]["head_rgb"].astype(int)
        second = env.step(np.zeros(4, np.float32))[0]["head_rgb"].astype(int)
        # The marker has about 10 pixels of 64 x 64, of a colour 100 to 200 levels from what is behind it.
        assert (np.abs(first - second).max(axis=2) > 60).sum() <= 2
    finally:
        env.close()
