"""The algorithms by name, and what they declare about the policies that they train."""

import dataclasses

import pytest

from deft.algorithms.registry import ALGORITHMS
from deft.config.algorithm_settings import ALGORITHM_SETTINGS
from deft.config.settings import PolicyConfig


def test_every_algorithm_with_settings_is_registered_by_its_name():
    assert set(ALGORITHMS) == set(ALGORITHM_SETTINGS)
    assert {name: kind.name for name, kind in ALGORITHMS.items()} == {name: name for name in ALGORITHMS}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_declarations_name_fields_that_exist(name):
    kind = ALGORITHMS[name]
    assert set(kind.vla_settings) <= {field.name for field in dataclasses.fields(PolicyConfig)}
    assert set(kind.fixed_settings) <= {field.name for field in dataclasses.fields(ALGORITHM_SETTINGS[name])}


def test_what_the_algorithms_declare():
    # Algorithms with critics or cloning need actions in [-1, 1], a value network and unscaled rewards; these need none.
    assert {name for name, kind in ALGORITHMS.items() if not kind.vla_settings} == {"ppo", "grpo", "dt", "reward-model"}
    assert [name for name, kind in ALGORITHMS.items() if not kind.exchanges_policies] == ["dt", "reward-model"]
    assert ALGORITHMS["dt"].fixed_settings == ("n_head",)
    assert ALGORITHMS["ppo"].distribution is None
    assert (ALGORITHMS["sac"].distribution, ALGORITHMS["iql"].distribution) == ("tanh_gaussian", "gaussian")
