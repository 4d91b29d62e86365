"""The table of other names: what a name means depends on the class that is asked."""

from __future__ import annotations

import pytest

from deft.config.algorithm_settings import SACSettings
from deft.config.aliases import aliases_of, field_for, translate
from deft.config.settings import LoopConfig, TrainerConfig
from deft.config.waypoint_settings import PPOConfig
from deft.errors import InputError


def test_buffer_size_is_a_rollouts_length_only_where_there_is_no_replay_buffer() -> None:
    assert field_for(TrainerConfig, "buffer_size") == "rollout_steps"
    assert field_for(SACSettings, "buffer_size") == "buffer_size"
    assert field_for(LoopConfig, "buffer_size") is None
    assert TrainerConfig(buffer_size=8).rollout_steps == 8  # type: ignore[call-arg]
    assert TrainerConfig().buffer_size == 2048  # type: ignore[attr-defined]


def test_a_class_lists_the_names_that_it_accepts() -> None:
    assert aliases_of(PPOConfig, "n_epochs") == ["ppo_epochs", "num_epochs"]
    assert aliases_of(TrainerConfig, "rollout_steps") == ["buffer_size"]


def test_translation_returns_the_values_and_how_they_were_written() -> None:
    values, written = translate(TrainerConfig, {"buffer_size": 8, "save_every": 2, "eval_freq": 0})
    assert values == {"rollout_steps": 8, "save_freq": 2, "eval_freq": 0}
    assert written == {"rollout_steps": "buffer_size", "save_freq": "save_every"}
    with pytest.raises(InputError, match=r"^buffer_size: the same setting as 'rollout_steps'; give one of them$"):
        translate(TrainerConfig, {"rollout_steps": 8, "buffer_size": 8})
