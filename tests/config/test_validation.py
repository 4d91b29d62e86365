"""The decorator of settings classes: validated values, other number types, defaults that a derived class changes."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
from pydantic import Field

from deft.config.algorithm_settings import PPOSettings, SFTSettings
from deft.config.fields import default_of, description_of, setting_names
from deft.config.groups import MicroBatchSettings
from deft.config.settings import RunConfig, TrainerConfig
from deft.config.validation import Count, Fraction, settings
from deft.errors import InputError


@settings
class Base:
    """A group of settings."""

    gamma: Fraction = 0.99
    """Discount factor."""
    batch_size: Count = 64
    """Transitions per minibatch."""


@settings
class Derived(Base):
    """A class that uses both settings with another default, and one with another help text."""

    path: str
    """A required setting."""
    gamma = 0.5
    batch_size = Field(8, description="Windows per batch.")


def test_a_class_may_change_the_default_of_an_inherited_setting() -> None:
    assert (Derived("a").gamma, Derived("a").batch_size, Base().gamma) == (0.5, 8, 0.99)
    assert description_of(Derived, "gamma") == "Discount factor."
    assert description_of(Derived, "batch_size") == "Windows per batch."
    assert setting_names(Derived) == ["path", "gamma", "batch_size"]  # the required one first, for positional arguments
    with pytest.raises(InputError, match=r"^gamma: 1.5 is out of range; must be at most 1$"):  # the check of the base
        Derived("a", gamma=1.5)


def test_a_changed_default_is_not_lost_where_two_bases_share_a_group() -> None:
    """`SFTSettings` extends `OfflineSettings`, which sets batch_size 256, and a group with the default 64."""
    assert default_of(MicroBatchSettings, "batch_size") == 64
    assert default_of(SFTSettings, "batch_size") == 256


def test_assignments_are_checked_too() -> None:
    config = TrainerConfig()
    with pytest.raises(InputError, match=r"^rollout_steps: 0 is out of range; must be at least 1$"):
        config.rollout_steps = 0
    config.rollout_steps = 8
    assert config.rollout_steps == 8


def test_whole_numbers_of_other_types_become_int() -> None:
    config = TrainerConfig(total_timesteps=1e6, rollout_steps=np.int64(64))  # type: ignore[arg-type]
    assert (config.total_timesteps, config.rollout_steps) == (1_000_000, 64)
    assert type(config.total_timesteps) is int
    assert type(config.rollout_steps) is int


def test_real_numbers_of_other_types_become_float() -> None:
    config = PPOSettings(gamma=1, learning_rate=np.float32(0.5))  # type: ignore[arg-type]
    assert (type(config.gamma), type(config.learning_rate), config.learning_rate) == (float, float, 0.5)


def test_settings_can_be_copied_and_sent_to_a_worker() -> None:
    config = RunConfig(seed=3)
    assert copy.deepcopy(config) == pickle.loads(pickle.dumps(config)) == config
