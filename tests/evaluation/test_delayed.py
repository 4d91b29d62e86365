"""Evaluation with a simulated delay: who acts at which step, by hand, the measures, and the command."""

from types import SimpleNamespace

import numpy as np
import pytest
from gymnasium import spaces

from deft.config.command_settings import EvaluateConfig
from deft.errors import InputError
from deft.evaluation.delayed import DelayedActor

SPACE = spaces.Box(-100.0, 100.0, (1,), np.float32)
FLOW = SimpleNamespace(chunk_length=4, recurrent=False, can_inpaint=True)


class Counting:
    """Its chunk for the observation j is c_j[i] = 10 j + i, K = 4; a continued chunk begins with the frozen actions."""

    action_selection = "mode"

    def __init__(self):
        self.continued = []

    def act_chunk(self, observation):
        return np.float32(10 * observation[:, None, None] + np.arange(4)[:, None])

    def inpaint(self, observation, running, left, frozen, max_guidance):
        self.continued.append((running[0, :, 0].tolist(), left.tolist(), frozen.tolist(), max_guidance))
        is_frozen = (np.arange(4) < frozen[:, None])[..., None]
        return np.where(is_frozen, running, self.act_chunk(observation))


def delayed(policy=FLOW, space=SPACE, actor=None, num_envs=1, **settings):
    env = SimpleNamespace(num_envs=num_envs, action_space=space)
    return DelayedActor(policy, actor or Counting(), env, EvaluateConfig(path="-", **settings))


def played(actor, steps):
    actor.begin(1)
    return [float(actor.act(np.array([step]))[0, 0]) for step in range(steps)]


@pytest.mark.parametrize(
    ("chunking", "delay", "horizon", "expected"),
    [
        # c_2 is started at step 2 and complete at step 3, where it continues with c_2[1] = 21.
        ("async", 1, 2, [0, 1, 2, 21, 22, 41, 42, 61]),
        ("async", 0, 2, [0, 1, 20, 21, 40, 41]),
        # Started at steps 1, 3, 5: each is complete two steps later, when the next one is started.
        ("async", 2, 1, [0, 1, 2, 12, 13, 32, 33]),
        # c_3 is complete at step 5, and c_0 has no action for step 4: the robot stands still.
        ("async", 2, 3, [0, 1, 2, 3, 0, 32]),
        # The robot stands still in step 2, and begins with c_2[0].
        ("wait", 1, 2, [0, 1, 0, 20, 21, 0, 50, 51]),
        ("wait", 0, 2, [0, 1, 20, 21, 40, 41]),
        ("rtc", 1, 2, [0, 1, 2, 21, 22, 41, 42, 61]),
    ],
)
def test_who_acts(chunking, delay, horizon, expected):
    actor = delayed(chunking=chunking, inference_delay=delay, execution_horizon=horizon)
    assert played(actor, len(expected)) == expected


def test_measures():
    """Async as above: jumps of 19 to steps 3, 5 and 7, of 1 to the others, in half ranges of 100.

    Bends: 0 at step 2; 18, -18 at 3, 4; the same at 5, 6; 18 at 7: √(5 · 18² / 6) = 16.43.
    """
    actor = delayed(inference_delay=1, execution_horizon=2)
    played(actor, 8)
    found = actor.measures()
    assert found["border_jump"] == pytest.approx(0.19)
    assert found["step_jump"] == pytest.approx(0.01)
    assert found["action_bend"] == pytest.approx(18 * (5 / 6) ** 0.5 / 100)
    assert found["still_share"] == 0
    waiting = delayed(inference_delay=1, execution_horizon=2, chunking="wait")
    played(waiting, 8)
    assert waiting.measures()["still_share"] == 0.25
    # Jumps where it stops, 1 and 21, and where it begins, 20 and 50
    assert waiting.measures()["border_jump"] == pytest.approx(((1 + 21**2 + 20**2 + 50**2) / 4) ** 0.5 / 100)


def test_a_new_episode_begins_with_a_new_chunk_and_is_not_measured():
    actor = delayed(inference_delay=1, execution_horizon=2, num_envs=2)
    actor.begin(1)  # the second environment is not measured
    for step in range(2):
        actor.act(np.array([step, step]))
    actor.ended(np.array([0]))
    before = actor.measures()
    # c_2[0] in the first one; in the second one c_2 is being computed, and c_0[2] executed.
    assert actor.act(np.array([2, 2]))[:, 0].tolist() == [20.0, 2.0]
    assert actor.measures() == before
    assert before["border_jump"] is None
    assert before["step_jump"] == pytest.approx(0.01)


def test_real_time_chunking_freezes_the_delay():
    policy = Counting()
    actor = delayed(actor=policy, chunking="rtc", inference_delay=2, execution_horizon=3, max_guidance=3.0)
    # At step 3 the chunk has c_0[3] = 3 left: one step is frozen. At step 4 the robot stands still.
    assert played(actor, 6) == [0, 1, 2, 3, 0, 32]
    assert policy.continued[0] == ([3, 3, 3, 3], [1], [1], 3.0)


@pytest.mark.parametrize(
    ("policy", "settings", "words"),
    [
        ({"chunk_length": 1}, {}, "chunk_length > 1"),
        ({"recurrent": True}, {}, "policies without memory"),
        ({}, {"execution_horizon": 5}, "--execution_horizon 5 is larger than the chunk; give 4 or less"),
        ({}, {"inference_delay": 4}, "--inference_delay 4: a chunk of 4 actions is over when it is complete; give 3"),
        ({"can_inpaint": False}, {"chunking": "rtc"}, "no denoising chain that can be guided: use --chunking async"),
        ({}, {"chunking": "rtc", "deterministic": False}, "leave out --stochastic"),
    ],
)
def test_policies_and_settings_that_do_not_fit(policy, settings, words):
    with pytest.raises(InputError, match=words):
        delayed(SimpleNamespace(**{**vars(FLOW), **policy}), **{"inference_delay": 1, **settings})
    with pytest.raises(InputError, match="continuous actions"):
        delayed(space=spaces.Discrete(3), inference_delay=1)


def test_the_command(deft, deft_or_error, no_plots):
    deft("collect", "--env", "reach", "--policy", "expert", "--steps", "100", "--out", "d/reach-v0", "--json")
    few = "--num_epochs 1 --updates_per_epoch 2 --batch_size 8 --eval_episodes 1 --threads 1 --device cpu --json"
    flow = "--distribution flow --chunk_length 4 --output_dir r"
    deft("train", "sft", "--dataset", "d/reach-v0", *flow.split(), *few.split())
    found = {}
    for chunking in ("wait", "async", "rtc"):
        delay = ["--inference_delay", "1", "--chunking", chunking]
        found[chunking] = deft("evaluate", "r", "--episodes", "2", *delay, "--device", "cpu", "--json")
        assert found[chunking]["chunking"] == chunking
        assert found[chunking]["episodes"] == 2
    assert found["wait"]["still_share"] > 0.2
    assert found["rtc"]["still_share"] == found["async"]["still_share"] == 0
    assert found["rtc"]["border_jump"] < found["async"]["border_jump"]
    assert "give inference_delay too" in deft_or_error("evaluate", "r", "--chunking", "rtc")
    assert "without video" in deft_or_error("evaluate", "r", "--inference_delay", "1", "--video", "a.mp4")
