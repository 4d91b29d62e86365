"""The flat `RLConfig`: the documents' names and defaults, and its map to `RunConfig`."""

from __future__ import annotations

import pytest

from deft.config.algorithm_settings import (
    ALGORITHM_SETTINGS,
    AlgorithmSettings,
    GRPOSettings,
    PPOSettings,
    SACSettings,
)
from deft.config.fields import setting_names
from deft.config.loading import replace, setting_paths, to_dict, value_at
from deft.config.settings import CurriculumConfig, RunConfig
from deft.config.validation import Count, NonNegativeInt, Positive, settings
from deft.config.views import RLConfig, flat_paths
from deft.errors import InputError

# The reference of the document, field by field.
REFERENCE = {
    "algorithm": "ppo",
    "total_timesteps": 1000000,
    "rollout_steps": 2048,
    "batch_size": 64,
    "learning_rate": 3e-4,
    "discount_gamma": 0.99,
    "ppo_epochs": 4,
    "ppo_clip_range": 0.2,
    "ppo_gae_lambda": 0.95,
    "ppo_value_coef": 0.5,
    "ppo_entropy_coef": 0.01,
    "ppo_clip_range_vf": None,
    "buffer_size": 1000000,
    "learning_starts": 10000,
    "tau": 0.005,
    "log_freq": 1000,
    "eval_freq": 5000,
    "save_freq": 10000,
    "output_dir": "./output/online_rl",
}


def test_the_reference_is_the_default() -> None:
    config = RLConfig()
    assert {name: getattr(config, name) for name in REFERENCE} == REFERENCE
    assert RLConfig(**REFERENCE) == config  # type: ignore[arg-type]


def test_the_defaults_are_those_of_a_run() -> None:
    assert RLConfig().to_run_config() == replace(RunConfig(), output_dir="./output/online_rl")


# Not in a flat config of PPO: SAC's own settings. Every other field must reach the run.
OTHER_VALUES = {
    bool: lambda value: not value,
    int: lambda value: value + 1,
    float: lambda value: value / 2 + 0.001,
    str: lambda value: {
        "constant": "linear",
        "INFO": "ERROR",
        "DEBUG": "ERROR",
        "standard": "vla",
        "sync": "process",
        "tanh": "relu",
        "here": "ray",
        "fp32": "tf32",
        "step": "token",
    }.get(value, "elsewhere"),
    tuple: lambda value: (32,),
    dict: lambda value: {"size": 5},
}
PATHS = {name: flat_paths(RLConfig, name) for name in ("ppo", "sac", "grpo", "td3", "cal-ql", "fql-online")}
REACHABLE = {
    name: {path: {known for known, at in paths.items() if at == path} for path in paths.values()}
    for name, paths in PATHS.items()
}
OTHER_ALGORITHMS = {name for name in setting_names(RLConfig) if name not in PATHS["ppo"]} | {"buffer_size"}
OPTIONAL_VALUES = {"model_path": "a.pt", "resume": "a", "suite_path": "files"}
CHOICES = {
    "device": "cpu",
    "inference": "actor",
    "distribution": "gaussian",
    "critic_observation": ("goal",),
    "capture": "off",
}
BESIDE: dict[str, dict[str, object]] = {  # settings without which another one has no effect
    "hidden_dim": {"critic_observation": ("goal",)},
    "num_layers": {"critic_observation": ("goal",)},
    "memory_num_layers": {"memory_hidden": 8},
    "denoising_discount": {"ratio": "token"},
    "self_imitation_return": {"self_imitation_coef": 1.0},
}


@pytest.mark.parametrize(
    "name",
    [name for name in setting_names(RLConfig) if name not in ("algorithm", "curriculum", *OTHER_ALGORITHMS)],
)
def test_every_field_changes_one_setting_of_the_run(name: str) -> None:
    default = getattr(RLConfig(), name)
    value = OPTIONAL_VALUES.get(name, 2) if default is None else OTHER_VALUES[type(default)](default)  # type: ignore[operator]
    value = CHOICES.get(name, value)
    beside = BESIDE.get(name, {})
    before, after = (to_dict(RLConfig(**given, **beside).to_run_config()) for given in ({}, {name: value}))
    paths = [path for path in setting_paths(PPOSettings) if value_at(before, path) != value_at(after, path)]
    assert len(paths) == 1
    assert value_at(after, paths[0]) == (list(value) if isinstance(value, tuple) else value)


@pytest.mark.parametrize("algorithm", ["ppo", "sac", "grpo", "td3", "cal-ql", "fql-online"])
def test_every_setting_of_an_algorithm_has_a_flat_name(algorithm: str) -> None:
    names = set(setting_names(RLConfig))
    own = {path: known for path, known in REACHABLE[algorithm].items() if path.startswith("algorithm.cfg.")}
    assert [path for path, known in own.items() if not known & names] == []


def test_sac_takes_its_own_settings() -> None:
    given = {"alpha": 0.2, "n_step": 3, "prior_data": "data", "learning_rate_schedule": "cosine", "anchor_coef": 0.1}
    config = RLConfig(algorithm="sac", hidden_dim=32, **given).to_run_config()  # type: ignore[arg-type]
    assert config.algorithm.cfg == SACSettings(**given)
    assert config.policy.hidden_dim == 32
    with pytest.raises(InputError, match="learning_rate_schedule: 'cosine' is not allowed"):
        RLConfig(learning_rate_schedule="cosine").to_run_config()


def test_grpo_takes_the_documents_names() -> None:
    config = RLConfig(algorithm="grpo", group_size=8, kl_coef=0.05, clip_range=0.3).to_run_config()
    assert config.algorithm.cfg == GRPOSettings(group_size=8, kl_coef=0.05, clip_range=0.3)
    assert RLConfig(clip_range=0.3).to_run_config().algorithm.cfg == PPOSettings(clip_range=0.3)
    with pytest.raises(InputError, match=r"^clip_range: the same setting as 'ppo_clip_range'; give one of them$"):
        RLConfig(clip_range=0.3, ppo_clip_range=0.1)


def test_a_curriculum_is_a_section_of_the_environment() -> None:
    levels = CurriculumConfig(levels=("easy", "hard"), success_rate=0.9)
    assert RLConfig(curriculum=levels).to_run_config().env.curriculum == levels
    assert RLConfig().to_run_config().env.curriculum is None


def test_the_names_of_the_documents_map_to_their_settings() -> None:
    config = RLConfig(
        total_timesteps=100000, rollout_steps=128, ppo_epochs=7, discount_gamma=0.9, seed=3, num_envs=8, threads=2
    ).to_run_config("CartPole-v1")
    expected = {
        "env.id": "CartPole-v1",
        "env.num_envs": 8,
        "trainer.total_timesteps": 100000,
        "trainer.rollout_steps": 128,
        "algorithm.cfg.n_epochs": 7,
        "algorithm.cfg.gamma": 0.9,
        "seed": 3,
        "threads": 2,
        "output_dir": "./output/online_rl",
    }
    assert config == replace(RunConfig(), **expected)


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"total_timestep": 5}, "total_timestep: unknown setting; did you mean 'total_timesteps'?"),
        ({"ppo_epochs": 0}, "ppo_epochs: 0 is out of range; must be at least 1"),
        (
            {"algorithm": "dqn"},
            "algorithm: 'dqn' is not allowed; one of 'ppo', 'sac', 'grpo', 'td3', 'cal-ql', 'fql-online'",
        ),
    ],
)
def test_wrong_values_raise_an_error_in_one_line(values: dict[str, object], line: str) -> None:
    with pytest.raises(InputError) as error:
        RLConfig(**values)  # type: ignore[arg-type]
    assert str(error.value) == line


def test_a_setting_of_another_algorithm_raises_an_error() -> None:
    with pytest.raises(InputError, match=r"^tau: 0.1 is given, but ppo has no such setting; leave it out$"):
        RLConfig(tau=0.1).to_run_config()
    with pytest.raises(InputError, match=r"^buffer_size: 64 is given, .*; a rollout's length is rollout_steps$"):
        RLConfig(buffer_size=64).to_run_config()


def test_the_replay_settings_go_to_an_algorithm_that_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    @settings
    class ReplaySettings(AlgorithmSettings):
        learning_rate: Positive = 3e-4
        buffer_size: Count = 1
        learning_starts: NonNegativeInt = 1
        tau: Positive = 1.0

    monkeypatch.setitem(ALGORITHM_SETTINGS, "sac", ReplaySettings)
    config = RLConfig(algorithm="sac", tau=0.1, buffer_size=1_000_000, rollout_steps=32).to_run_config()
    # learning_starts was not given: the algorithm's own default holds, here 1. buffer_size was, though as the default.
    assert config.algorithm.cfg == ReplaySettings(buffer_size=1_000_000, learning_starts=1, tau=0.1)
    assert config.trainer.buffer_size == 32


def test_grpo_keeps_its_own_defaults_where_nothing_is_given() -> None:
    config = RLConfig(algorithm="grpo", group_size=8, ppo_clip_range=0.1).to_run_config()
    assert config.algorithm.cfg == GRPOSettings(group_size=8, clip_range=0.1)  # gamma stays GRPO's 1.0
    written_out = RLConfig(algorithm="grpo", discount_gamma=0.99)  # PPO's default, but asked for
    assert written_out.to_run_config().algorithm.cfg.gamma == 0.99
    written_out.batch_size = 32
    assert written_out.to_run_config().algorithm.cfg == GRPOSettings(gamma=0.99, batch_size=32)
