"""Flags from the settings classes: one for every setting, flat and unique, with help."""

from __future__ import annotations

from collections import Counter

import pytest

from deft.config.algorithm_settings import ALGORITHM_SETTINGS, AlgorithmSettings
from deft.config.command_settings import EvaluateConfig
from deft.config.flags import class_flags, run_flags
from deft.config.loading import setting_paths
from deft.config.validation import Count, settings
from deft.config.waypoint_settings import PPOConfig, WaypointSFTConfig


@pytest.mark.parametrize("algorithm", ALGORITHM_SETTINGS)
def test_every_setting_has_one_flag_with_help(algorithm: str) -> None:
    flags = [flag for group in run_flags(algorithm) for flag in group.flags]
    paths = set(setting_paths(ALGORITHM_SETTINGS[algorithm])) - {"algorithm.name"}
    if algorithm not in ("ppo", "grpo"):
        paths.remove("policy.normalize_reward")  # these algorithms never normalize rewards
    paths = {path for path in paths if not path.startswith("policy.actor")}  # comes with --model-path
    paths -= {f"algorithm.cfg.{name}" for name in ALGORITHM_SETTINGS[algorithm].NOT_OFFERED}
    assert {flag.path for flag in flags} == paths
    assert len(flags) == len(paths)
    names = Counter(name for flag in flags for name in (flag.name, *flag.aliases))
    assert {name for name, count in names.items() if count > 1} == set()
    assert [flag.path for flag in flags if not flag.help] == []


def test_names_and_aliases_are_those_of_the_documents() -> None:
    flags = {flag.name: flag for group in run_flags("ppo") for flag in group.flags}
    assert flags["env"].path == "env.id"
    assert flags["n_epochs"].aliases == ("ppo_epochs",)
    assert flags["clip_range"].aliases == ("ppo_clip_range", "clip_epsilon")
    assert (flags["rollout_steps"].path, flags["rollout_steps"].aliases) == ("trainer.rollout_steps", ("buffer_size",))
    assert flags["batch_size"].aliases == ()


def test_an_algorithms_own_setting_gets_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    @settings
    class ReplaySettings(AlgorithmSettings):
        """With a replay buffer."""

        buffer_size: Count = 1_000_000
        """Transitions kept."""

    monkeypatch.setitem(ALGORITHM_SETTINGS, "sac", ReplaySettings)
    paths = {flag.name: flag.path for group in run_flags("sac") for flag in group.flags}
    assert paths["buffer_size"] == "algorithm.cfg.buffer_size"
    assert paths["rollout_steps"] == "trainer.rollout_steps"


def test_switches_and_lists_differ_from_plain_values() -> None:
    flags = {flag.name: flag for group in run_flags("ppo") for flag in group.flags}
    assert [flags[name].is_switch for name in ("compile", "use_wandb", "seed")] == [True, True, False]
    assert [flags[name].takes_several for name in ("hidden_sizes", "env_kwargs", "seed")] == [True, True, False]
    assert [flag.name for flag in class_flags(EvaluateConfig)] == [
        "path", "suite", "policy", "video", "videos", "split", "shuffle_instructions", "random_policy", "vector",
        "env", "task", "rename_streams", "suite_path", "deterministic", "episodes", "seed", "device", "env_kwargs",
        "inference_delay", "chunking", "execution_horizon", "max_guidance",
    ]  # fmt: skip


def test_waypoint_commands_accept_the_names_of_other_commands() -> None:
    flags = {flag.name: flag for cls in (WaypointSFTConfig, PPOConfig) for flag in class_flags(cls)}
    assert flags["holdout"].aliases == ("val_fraction",)
    assert flags["curriculum_success"].aliases == ("curriculum_success_rate",)
