"""Questions about an environment and its wrappers."""

import logging

import gymnasium
import numpy as np
import pytest
from worlds import Counting

from deft.envs.state import layers
from deft.envs.wrappers import (
    CAPTION_HEIGHT,
    Captions,
    close_env,
    describe_env,
    env_reward_terms,
    reward_term_names,
    wrapper_attribute,
)


class Named(gymnasium.Env):
    observation_space = action_space = gymnasium.spaces.Discrete(2)
    reward_terms = ("a", "b")

    def close(self) -> None:
        raise SystemExit("no power")


def test_layers_go_from_the_outermost_wrapper_inwards() -> None:
    core = Named()
    inner = gymnasium.wrappers.OrderEnforcing(core)
    outer = gymnasium.wrappers.TimeLimit(inner, 3)
    assert list(layers(outer)) == [outer, inner, core]
    assert list(layers(core)) == [core]


def test_attributes_and_names_are_found_through_wrappers() -> None:
    env = gymnasium.wrappers.OrderEnforcing(Named())
    assert wrapper_attribute(env, "reward_terms") == ("a", "b")
    assert wrapper_attribute(env, "chunk_length", 1) == 1
    assert env_reward_terms(env) == ("a", "b")
    assert describe_env(env, 2) == "environment 2 (Named)"


@pytest.mark.parametrize("declared", [3, {"a": 1.0}, ("a", 2), None])
def test_something_else_of_the_name_declares_no_terms(declared: object) -> None:
    assert reward_term_names(declared) == ()


def test_close_that_fails_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        close_env(Named())
    assert "environment 0 (Named), close() raised SystemExit: no power; the results so far are kept" in caplog.text


def test_captions_are_for_environments_with_words():
    class Pictured(Counting):
        render_mode = "rgb_array"
        instruction = ""

        def render(self):
            return np.zeros((32, 48, 3), np.uint8)

    env = Captions(Pictured())
    assert env.render().shape == (32, 48, 3)
    env.unwrapped.instruction = "pick up the red cube and put it on the blue one"  # shrinks to fit 48 pixels
    assert env.render().shape == (32 + CAPTION_HEIGHT, 48, 3)
    env.unwrapped.instruction = None
    assert env.render().shape == (32, 48, 3)
