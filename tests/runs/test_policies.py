"""Where the weights of a `model_path` are, and which settings belong to them."""

from pathlib import Path

import pytest
from gymnasium import spaces

from deft.config.loading import resolve, write_config
from deft.errors import InputError
from deft.models.actor_critic import ActorCritic
from deft.runs import checkpoint
from deft.runs.policies import checkpoint_folder, config_beside, load_policy_weights


def saved(run: Path, step: int) -> ActorCritic:
    """A policy, saved as a checkpoint of a run."""
    policy = ActorCritic(spaces.Box(-1, 1, (3,)), spaces.Discrete(2))
    checkpoint.save_checkpoint(run, step, dict(policy.state_dict()), {}, {})
    return policy


def test_a_model_path_is_a_run_a_checkpoint_or_a_file_in_one(tmp_path: Path) -> None:
    saved(tmp_path, 10)
    saved(tmp_path, 20)
    first, second = tmp_path / "checkpoint-10", tmp_path / "checkpoint-20"
    assert checkpoint_folder(tmp_path) == second  # the latest, since none is marked as the best
    checkpoint.mark_best(tmp_path, first)
    assert checkpoint_folder(tmp_path) == first
    assert checkpoint_folder(second) == second
    assert checkpoint_folder(second / "model.pt") == second
    assert checkpoint_folder(tmp_path / "weights.pt") is None


def test_weights_are_loaded_from_the_best_checkpoint_of_a_run(tmp_path: Path) -> None:
    best, _ = saved(tmp_path, 10), saved(tmp_path, 20)
    checkpoint.mark_best(tmp_path, tmp_path / "checkpoint-10")
    policy = ActorCritic(spaces.Box(-1, 1, (3,)), spaces.Discrete(2))
    load_policy_weights(policy, tmp_path)
    assert all((value == best.state_dict()[name]).all() for name, value in policy.state_dict().items())
    with pytest.raises(InputError, match=r"model_path: .*absent does not exist"):
        load_policy_weights(policy, tmp_path / "absent")


def test_settings_are_found_beside_a_checkpoint(tmp_path: Path) -> None:
    saved(tmp_path, 10)
    assert config_beside(tmp_path / "checkpoint-10") is None
    write_config(resolve({"algorithm": {"name": "ppo"}, "env": {"id": "CartPole-v1"}}), tmp_path / "config.yaml")
    for path in (tmp_path, tmp_path / "checkpoint-10", tmp_path / "checkpoint-10" / "model.pt"):
        found = config_beside(path)
        assert found is not None
        assert found.env.id == "CartPole-v1"
