import logging
import math

import gymnasium
import numpy as np
import pytest

from deft import PPOTrainer, RLConfig
from deft.runs.metric_ranges import OFFLINE_RANGES, ON_POLICY_RANGES, Range, RangeWatch

WATCHED = {"q_loss": Range(0.01, 1.0, "a smaller learning_rate", "no harm")}


def test_speaks_once_and_again_only_after_recovery(caplog):
    caplog.set_level(logging.INFO)
    watch = RangeWatch(WATCHED)
    values = [0.5, 3.0, 4.0, 1.0, 0.01, 0.005, 0.001]
    warned = [bool(watch.check(step, {"q_loss": value})) for step, value in enumerate(values)]
    # 3 leaves the range, 4 is still outside; the limits 1 and 0.01 are inside; 0.005 leaves it again, below.
    assert warned == [False, True, False, False, False, True, False]
    assert caplog.messages == [
        "q_loss is 3 at update 1, outside 0.01 to 1: a smaller learning_rate",
        "q_loss is 0.005 at update 5, outside 0.01 to 1: no harm",
    ]
    assert [record.levelno for record in caplog.records] == [logging.WARNING, logging.INFO]  # below is harmless


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_outside_every_range(value):
    assert len(RangeWatch({"x": Range(-math.inf, math.inf, "stop")}).check(1, {"x": value})) == 1


def test_without_an_advice_of_its_own_what_is_below_has_that_for_what_is_above():
    assert RangeWatch({"x": Range(-1, 1, "stop")}).check(1, {"x": -2.0})[0].endswith(": stop")


def test_metrics_are_watched_apart_and_those_without_a_range_are_left_alone():
    watch = RangeWatch({"a": Range(0, 1, "first"), "b": Range(0, 1, "second")})
    assert [line.partition(" ")[0] for line in watch.check(1, {"a": 2.0, "b": 2.0, "c": 1e9})] == ["a", "b"]
    assert watch.check(2, {"a": 0.5, "b": 2.0}) == []
    assert len(watch.check(3, {"a": 2.0, "b": 2.0})) == 1
    assert watch.check(4, {}) == []


class Paying(gymnasium.Env):
    """Episodes of four steps that pay so much each."""

    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, reward):
        self.reward, self.steps = reward, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.steps += 1
        return np.zeros(2, np.float32), self.reward, self.steps == 4, False, {}


def test_online_runs_are_watched(tmp_path, caplog):
    """A new value says a few units at most; returns of 100 to 400 are more than 50 away. Two updates, one line."""
    config = RLConfig(
        rollout_steps=64, total_timesteps=128, batch_size=64, ppo_epochs=1, log_freq=64, eval_freq=0, threads=1,
        normalize_reward=False, output_dir=str(tmp_path / "run"),
    )  # fmt: skip
    PPOTrainer(Paying(100.0), config=config).train()
    (line,) = (line for line in caplog.messages if line.startswith("value_loss is "))
    assert float(line.split()[2]) > 50**2 / 2  # half the square
    assert "at step 64, outside 0.01 to 1: large returns make large losses: normalize_reward" in line


def test_the_online_ranges_are_those_of_the_document():
    ranges = {name: (expected.low, expected.high) for name, expected in ON_POLICY_RANGES.items()}
    assert ranges == {"policy_loss": (-0.1, 0.1), "value_loss": (0.01, 1.0)}
    # Its advice against instability.
    advice = " ".join(expected.advice for expected in ON_POLICY_RANGES.values())
    assert all(word in advice for word in ("learning_rate", "max_grad_norm", "clip_range", "entropy"))


def test_the_ranges_are_those_of_the_document():
    assert {name: (expected.low, expected.high) for name, expected in OFFLINE_RANGES.items()} == {
        "v_loss": (0.01, 1.0),
        "q_loss": (0.01, 1.0),
        "policy_loss": (-10.0, 10.0),
        "mean_advantage": (-5.0, 5.0),
    }
    # Its advice: against overestimation and against instability.
    advice = " ".join(expected.advice for expected in OFFLINE_RANGES.values())
    assert all(word in advice for word in ("cql_alpha", "expectile", "num_critics", "learning_rate"))
