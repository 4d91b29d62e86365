"""The part that environments of suites have in common, with a simulator of one number."""

import numpy as np
import pytest
from gymnasium import spaces

from deft.envs.suites import Suite
from deft.envs.suites.simulated import Streams, SuiteEnv
from deft.errors import InputError

SUITE = Suite("counter", "", "", {"five": "Count to five"})


class Counter(SuiteEnv):
    """Actions are added to a number, which starts at the seed's last digit / 10. 5 is success, -5 failure."""

    def __init__(self, observation="images", reward="success"):
        super().__init__(SUITE, "five", observation, reward, "rgb_array")
        self._set_spaces(Streams(1, 2, {"head_rgb": "eye"}, 3, 4), spaces.Box(-9, 9, (1,), np.float32))

    def _begin(self, seed):
        self.number = seed % 10 / 10

    def _advance(self, action):
        self.number += float(action[0])
        return self.number / 10, self.number >= 5, self.number <= -5

    def _proprioception(self):
        return np.array([self.number])

    def _scene(self):
        return np.array([self.number, 5.0])

    def _image(self, camera, height, width):
        return np.full((height, width, 3), {"eye": 7, "": 9}[camera], np.uint8)


@pytest.mark.parametrize(
    ("observation", "sizes"),
    [
        ("images", {"state": (1,), "head_rgb": (3, 4, 3)}),
        ("privileged", {"state": (1,), "head_rgb": (3, 4, 3), "scene_state": (2,)}),
        ("state", {"state": (2,)}),
    ],
)
def test_streams(observation, sizes):
    env = Counter(observation)
    found, info = env.reset(seed=3)
    assert found.pop("instruction") == info["instruction"] == "Count to five"
    assert {name: value.shape for name, value in found.items()} == sizes
    assert env.observation_space.contains({**found, "instruction": env.instruction})
    env.set_observes(False)
    assert not env.step(np.zeros(1))[0].get("head_rgb", np.zeros(1)).any()
    assert env.render().shape == (480, 640, 3)


def test_success_and_failure_end_an_episode():
    """2 + 2 + 2 reaches 5 at the third step; the dense reward there is 6 / 10."""
    for reward, expected in (("success", [0.0, 0.0, 1.0]), ("dense", [0.2, 0.4, 0.6])):
        env = Counter(reward=reward)
        env.reset(seed=0)
        steps = [env.step(np.full(1, 2.0)) for _ in range(3)]
        assert [step[1] for step in steps] == pytest.approx(expected)
        assert [step[2] for step in steps] == [False, False, True]
        assert steps[-1][4] == {"success": True, "task": "five", "instruction": "Count to five"}
    env.reset(seed=0)
    _, _, terminated, _, info = env.step(np.full(1, -6.0))
    assert (terminated, info["success"]) == (True, False)


def test_a_saved_state_continues_exactly():
    env, other = Counter(), Counter()
    with pytest.raises(InputError, match=r"step\(\) was called before reset"):
        env.step(np.zeros(1))
    env.reset(seed=7)
    for value in (0.3, 1.1, -0.4):
        env.step(np.full(1, value))
    other.set_state(env.get_state())
    assert other.number == env.number
    other.step(np.zeros(1))


def test_episodes_without_a_seed_follow_from_the_last_seed():
    def starts(env):
        env.reset(seed=1)
        return [env.reset()[0]["state"][0] for _ in range(5)]

    assert starts(Counter()) == starts(Counter())
    assert len(set(starts(Counter()))) > 1


def test_wrong_arguments_are_one_line():
    with pytest.raises(InputError, match="observation is 'rgb'; choose 'images', 'privileged' or 'state'"):
        Counter("rgb")
    with pytest.raises(InputError, match="reward is 'sparse'; choose 'success' or 'dense'"):
        Counter(reward="sparse")
