"""The flat `OfflineRLConfig`: the document's names and defaults, and its map to the run of each algorithm."""

from __future__ import annotations

from typing import Any

import pytest

from deft.config.algorithm_settings import (
    ALGORITHM_SETTINGS,
    CQLSettings,
    DTSettings,
    IQLSettings,
    TD3BCSettings,
)
from deft.config.fields import setting_names
from deft.config.flags import run_flags
from deft.config.loading import replace, resolve, setting_paths, to_dict, value_at
from deft.config.views import OfflineRLConfig
from deft.errors import InputError

OFFLINE = [name for name, cls in ALGORITHM_SETTINGS.items() if cls.LEARNS_FROM == "dataset"]

# The reference of the document, field by field.
REFERENCE = {
    "num_epochs": 100,
    "batch_size": 256,
    "learning_rate": 3e-4,
    "weight_decay": 1e-6,
    "hidden_dim": 256,
    "discount_gamma": 0.99,
    "tau": 0.005,
    "save_freq": 10,
    "eval_episodes": 10,
    "output_dir": "./output/offline_rl",
}

# The document's tables of each algorithm.
OWN = [
    (IQLSettings, {"expectile": 0.7, "temperature": 3.0, "learning_rate": 3e-4}),
    (CQLSettings, {"cql_alpha": 5.0, "cql_samples": 10, "min_q_weight": 1.0}),
    (TD3BCSettings, {"alpha": 2.5, "noise_clip": 0.5, "policy_delay": 2}),
    (DTSettings, {"context_length": 20, "n_layer": 3, "n_head": 1, "embed_dim": 128}),
]


def test_the_reference_is_the_default() -> None:
    config = OfflineRLConfig()
    assert {name: getattr(config, name) for name in REFERENCE} == REFERENCE
    assert OfflineRLConfig(**REFERENCE) == config  # type: ignore[arg-type]


@pytest.mark.parametrize(("cls", "defaults"), OWN)
def test_the_hyperparameters_of_the_document_are_the_defaults(cls: type, defaults: dict[str, Any]) -> None:
    assert {name: getattr(cls(), name) for name in defaults} == defaults


@pytest.mark.parametrize("algorithm", ["iql", "cql", "td3-bc"])
def test_the_defaults_are_those_of_a_run(algorithm: str) -> None:
    expected = resolve({"algorithm": algorithm, "output_dir": "./output/offline_rl"})
    assert OfflineRLConfig().to_run_config(algorithm) == expected


def test_a_transformer_keeps_its_own_defaults_and_gets_what_is_given() -> None:
    expected = resolve({"algorithm": "dt", "output_dir": "./output/offline_rl"})
    assert OfflineRLConfig().to_run_config("dt") == expected
    given = OfflineRLConfig(learning_rate=5e-4).to_run_config("dt").algorithm.cfg
    assert (given.learning_rate, given.batch_size) == (5e-4, 64)
    assert OfflineRLConfig(batch_size=256).to_run_config("dt").algorithm.cfg.batch_size == 256  # a default, but given
    with pytest.raises(InputError, match="num_critics: 7 is given, but dt has no such setting"):
        OfflineRLConfig(num_critics=7).to_run_config("dt")


OTHER_VALUES: dict[type, Any] = {
    bool: lambda value: not value,
    int: lambda value: value + 1,
    float: lambda value: value / 2 + 0.001,
    str: lambda value: {"fp32": "bf16", "auto": "off", "INFO": "ERROR", "DEBUG": "ERROR"}.get(value, "elsewhere"),
    tuple: lambda value: ("goal",),
}
OWN_VALUES: dict[str, Any] = {
    "model_path": "a.pt",
    "resume": "a",
    "suite_path": "files",
    "keyframe_stream": "state",
    "keyframe_dims": (1,),
}


@pytest.mark.parametrize("name", setting_names(OfflineRLConfig))
def test_every_field_changes_one_setting_of_the_run(name: str) -> None:
    default = getattr(OfflineRLConfig(), name)
    value = OWN_VALUES.get(name) or (2 if default is None else OTHER_VALUES[type(default)](default))
    before = to_dict(OfflineRLConfig().to_run_config("iql"))
    after = to_dict(OfflineRLConfig(**{name: value}).to_run_config("iql"))
    paths = [path for path in setting_paths(IQLSettings) if value_at(before, path) != value_at(after, path)]
    assert len(paths) == 1
    assert value_at(after, paths[0]) == (list(value) if isinstance(value, tuple) else value)


@pytest.mark.parametrize("algorithm", OFFLINE)
def test_values_that_are_allowed_are_those_of_the_settings(algorithm: str) -> None:
    """Only what the trainer takes elsewhere is missing: dataset, environment, VLA model, the algorithm's own."""
    flags = {f.name: f for group in run_flags(algorithm) for f in group.flags}
    aliases = {alias: flag for flag in flags.values() for alias in flag.aliases}
    fields = OfflineRLConfig.__pydantic_fields__  # type: ignore[attr-defined]
    for name, field in fields.items():
        flag = flags.get(name) or aliases.get(name)
        if flag is None:
            assert algorithm in ("dt", "sft", "reward-model", "recap-offline", "vision"), name  # which have no critics
            assert name in ("tau", "num_critics", "critic_layer_norm")
        else:
            assert field.annotation == flag.annotation, name


def test_settings_of_the_algorithm_are_given_beside_it() -> None:
    config = OfflineRLConfig(num_epochs=7).to_run_config("iql", expectile=0.9, temperature=10.0)
    expected = {"trainer.num_epochs": 7, "algorithm.cfg.expectile": 0.9, "algorithm.cfg.temperature": 10.0}
    assert config == replace(OfflineRLConfig().to_run_config("iql"), **expected)


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"num_epoch": 5}, "num_epoch: unknown setting; did you mean 'num_epochs'?"),
        ({"num_epochs": 0}, "num_epochs: 0 is out of range; must be at least 1"),
        ({"learning_rate": "fast"}, "learning_rate: 'fast' is not a number"),
        ({"discount_gamma": 1.5}, "discount_gamma: 1.5 is out of range; must be at most 1"),
        ({"capture": "yes"}, "capture: 'yes' is not allowed; one of 'auto', 'on', 'off'"),
    ],
)
def test_wrong_values_raise_an_error_in_one_line(values: dict[str, Any], line: str) -> None:
    with pytest.raises(InputError) as error:
        OfflineRLConfig(**values)
    assert str(error.value) == line


@pytest.mark.parametrize(
    ("own", "line"),
    [
        ({"expectil": 0.7}, "expectil: iql has no such setting; did you mean 'expectile'?"),
        ({"seed": 3}, "seed: is a setting of OfflineRLConfig; give it there"),
        ({"expectile": 1.5}, "expectile: 1.5 is out of range; must be less than 1"),
        ({"temperature": -1.0}, "temperature: -1.0 is out of range; must be at least 0"),
    ],
)
def test_wrong_settings_of_the_algorithm_raise_an_error_in_one_line(own: dict[str, Any], line: str) -> None:
    with pytest.raises(InputError) as error:
        OfflineRLConfig().to_run_config("iql", **own)
    assert line in str(error.value)
    assert "\n" not in str(error.value)
