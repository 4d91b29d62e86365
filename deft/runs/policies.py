"""The policies that runs save: where their weights are, which config they belong to, and how they are built again.

The builders of runs and `deft evaluate`, `deft.load_policy` and `deft collect` call these functions.
"""

from __future__ import annotations

from pathlib import Path

import gymnasium

from deft import trust
from deft.algorithms.registry import ALGORITHMS
from deft.config.loading import load_config, resolve
from deft.config.settings import OfflineRunConfig, RunConfig
from deft.errors import InputError
from deft.models.action_scale import UnboundedActions
from deft.models.policy import Policy
from deft.runs import checkpoint
from deft.runs.directory import CONFIG_FILE
from deft.runs.policy_spaces import PolicySpaces, policy_space


def space_for_weights(
    config: RunConfig | OfflineRunConfig, resume_from: Path | None, given: gymnasium.Space, where: str
) -> gymnasium.Space:
    """The observation space to build a run's policy for: that of the weights it starts from, else the one given."""
    if resume_from is not None:
        recorded = PolicySpaces.read(resume_from)  # without it, `Trainer.load` compares the spaces
        return given if recorded is None else policy_space(recorded, given, resume_from, where)
    folder = None if config.model_path is None else checkpoint_folder(Path(config.model_path))
    return given if folder is None else policy_space(PolicySpaces.read(folder), given, folder, where)


def build_policy(
    config: RunConfig | OfflineRunConfig,
    observation: gymnasium.Space,
    action: gymnasium.Space,
    weights_follow: bool = False,
) -> Policy:
    """The policy that a config's algorithm trains, for the spaces of an environment or a dataset.

    `weights_follow`: a checkpoint's weights are loaded next, so the pretrained file is not read, nor needed any more.
    """
    kind, settings = ALGORITHMS[config.algorithm.name], config.algorithm.cfg
    if isinstance(config, OfflineRunConfig):
        members, where = config.trainer.num_seeds, "the dataset"
    else:
        members, where = 1, config.env.id
    wanted, actual = config.policy.action_dim, int(action.shape[-1]) if action.shape else 1
    if wanted not in (None, actual):
        raise InputError(f"policy.action_dim: {wanted} was given, but {where} takes actions of {actual} dims")
    how = {"num_members": members, "weights_follow": weights_follow, "where": where}
    try:
        return kind.make_policy(observation, action, config.policy, settings, **how)
    except UnboundedActions as error:
        raise InputError(
            f"{config.algorithm.name}: {error}; use an environment with bounded Box actions, or train with ppo or grpo"
        ) from error


def check_acts(config: RunConfig | OfflineRunConfig, path: str | Path) -> None:
    """Raise an error if what a run trained is no policy, such as a reward model."""
    kind = ALGORITHMS.get(config.algorithm.name)
    if kind is not None and not kind.acts:
        raise InputError(f"{path}: a run of {config.algorithm.name} does not act; {kind.use}")


def load_policy_weights(policy: Policy, path: str | Path) -> None:
    """Load weights from a run directory (its best checkpoint, else its latest), a checkpoint, or a weights file."""
    source = Path(path)
    folder = checkpoint_folder(source)
    if folder is not None:
        source = folder / checkpoint.MODEL
    elif not source.exists():
        raise InputError(f"model_path: {path} does not exist; give a run directory, a checkpoint or a weights file")
    checkpoint.load_weights(policy, checkpoint.load_tensors(source), source)


def checkpoint_folder(path: Path) -> Path | None:
    """Return the checkpoint of a `model_path`: of a run directory its best, else its latest; None for another file."""
    if not path.is_dir() and path.name != checkpoint.BEST:
        return (
            path.parent
            if path.name == checkpoint.MODEL and (path.parent / checkpoint.TRAINING_STATE).is_file()
            else None
        )
    return checkpoint.find_best(path)


def config_beside(path: Path) -> RunConfig | OfflineRunConfig | None:
    """Return the settings of the run that a run directory, a checkpoint or a weights file in one belongs to."""
    for folder in (path, path.parent, path.parent.parent):
        if (folder / CONFIG_FILE).is_file():
            return load_config(folder / CONFIG_FILE)
    return saved_config(path if path.is_dir() else path.parent)


def saved_config(folder: Path) -> RunConfig | OfflineRunConfig | None:
    """The settings inside a checkpoint that was saved alone, by `trainer.save(path)`; None where there are none."""
    state = checkpoint.load_training_state(folder) if (folder / checkpoint.TRAINING_STATE).is_file() else {}
    if not state.get("config"):
        return None
    trust.read_from(folder / checkpoint.TRAINING_STATE, state["config"])
    return resolve(state["config"])
