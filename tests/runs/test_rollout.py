"""The one loop that steps environments: what acts, what the sink gets, and when it ends."""

from types import SimpleNamespace

import pytest

from deft.runs.rollout import rollout


class Counting:
    """A vector environment whose observation is the number of steps so far."""

    def __init__(self, answer=lambda count: SimpleNamespace(observation=count)):
        self.count, self.actions, self.answer = 0, [], answer

    def step(self, actions):
        self.count += 1
        self.actions.append(actions)
        return self.answer(self.count)


def test_actions_follow_from_the_latest_observation_and_the_sink_gets_every_step():
    env, taken = Counting(), []
    last = rollout(env, lambda seen: 10 * seen, lambda *step: taken.append(step), 0, num_steps=3)
    assert env.actions == [0, 10, 20]
    assert [(seen, action, answer.observation) for seen, action, answer in taken] == [(0, 0, 1), (1, 10, 2), (2, 20, 3)]
    assert last == 3


def test_the_sink_ends_the_rollout():
    env = Counting()
    assert rollout(env, lambda _: 0, lambda _, __, answer: answer.observation == 5, 0) == 5
    assert env.count == 5


def test_stop_is_asked_before_every_step():
    env, asked = Counting(), []

    def stop():
        asked.append(env.count)
        return env.count == 2

    rollout(env, lambda _: 0, lambda *_: None, 0, num_steps=10, stop=stop)
    assert env.count == 2
    assert asked == [0, 1, 2]


def test_no_step_leaves_the_observation_as_it_is():
    env = Counting()
    assert rollout(env, lambda _: 0, lambda *_: None, "first", num_steps=0) == "first"
    assert env.count == 0


def test_a_single_gymnasium_environment_answers_with_a_tuple():
    env = Counting(lambda count: (count, 0.0, count == 4, False, {}))
    assert rollout(env, lambda seen: seen, lambda _, __, answer: answer[2], 0) == 4
    assert env.actions == [0, 1, 2, 3]


def test_an_error_of_the_environment_is_raised():
    def fail(_):
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        rollout(Counting(fail), lambda _: 0, lambda *_: None, 0, num_steps=1)
