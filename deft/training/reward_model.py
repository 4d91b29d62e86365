"""`--reward_model RUN`: a trained success classifier replaces the reward of the training environments.

`deft.training.run` wraps the vector environment; evaluations keep the environment's own reward.
"""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium import Space
from gymnasium.spaces import Dict

from deft import schema
from deft.config.groups import RewardModelConfig
from deft.config.settings import OfflineRunConfig
from deft.data.tensors import policy_inputs, to_numpy
from deft.envs.host import HostVectorEnv
from deft.envs.layout import Observation, take_rows
from deft.envs.vector import VectorEnv, VectorStep
from deft.errors import InputError
from deft.models.reward_model import RewardModel
from deft.runs.policies import build_policy, checkpoint_folder, config_beside, load_policy_weights
from deft.runs.policy_spaces import PolicySpaces, check_streams, describe

log = logging.getLogger(__name__)


class RewardModelEnv(HostVectorEnv):
    """A vector environment whose reward is that of a classifier of the next observation, in one batch per step.

    With `terminates`, a predicted success ends the episode for the learner: nothing is earned after it. The
    environment is not reset and continues with a new episode from that state.
    """

    def __init__(self, env: VectorEnv, model: RewardModel, settings: RewardModelConfig) -> None:
        super().__init__(env)
        self.reward_terms = ()  # those of the environment are not parts of this reward
        self.num_workers, self.notices_hangs = env.num_workers, env.notices_hangs
        self.model, self.settings = model.requires_grad_(False).eval(), settings
        self._device = next(model.parameters()).device

    @torch.no_grad()
    def step(self, actions: np.ndarray) -> VectorStep:
        """Step every environment, and replace its reward."""
        step = super().step(actions)
        following = step.next_observation()
        read = (
            {name: following[name] for name in self.model.encoder.names} if isinstance(following, dict) else following
        )
        probability = to_numpy(self.model.probability(policy_inputs(read, self._device)[schema.OBSERVATION]))
        success = probability > self.settings.threshold
        reward = probability if self.settings.output == "probability" else success.astype(np.float32)
        reward[step.lost_index] = 0.0
        step = dataclasses.replace(step, reward=reward, reward_terms=None)
        return _ended(step, success, following) if self.settings.terminates else step

    @property
    def finished(self) -> VectorStep | None:  # type: ignore[override]
        """After a `step` that raised: the episodes that had ended in it."""
        return self.env.finished


def _ended(step: VectorStep, success: np.ndarray, following: Observation) -> VectorStep:
    """The step with the episodes of successes ended; their final observation is the one that was classified."""
    terminated = step.terminated | success
    done = np.union1d(step.done_index, np.flatnonzero(success)).astype(np.int64)
    if not len(done):
        return step
    return dataclasses.replace(
        step, terminated=terminated, done_index=done, final_observation=take_rows(following, done)
    )


def with_reward_model(env: VectorEnv, settings: RewardModelConfig | None, device: torch.device) -> VectorEnv:
    """Return the environments with the reward of a classifier, if the settings name one."""
    if settings is None:
        return env
    model = load_reward_model(settings.path, env, device)
    log.info("the reward is that of %s; episodes and evaluations report the environment's own", settings.path)
    return RewardModelEnv(env, model, settings)


def load_reward_model(path: str, env: VectorEnv, device: torch.device) -> RewardModel:
    """Load the classifier of a run directory or a checkpoint for the observations of an environment."""
    if not Path(path).exists():
        raise InputError(f"reward_model: {path} does not exist; give a run directory of `deft train reward-model`")
    config = config_beside(Path(path))
    folder = None if config is None else checkpoint_folder(Path(path))
    if folder is None or not isinstance(config, OfflineRunConfig) or config.algorithm.name != "reward-model":
        raise InputError(f"reward_model: {path} is not a run of `deft train reward-model`; give its run directory")
    spaces = PolicySpaces.read(folder)
    assert spaces is not None  # every version with reward models writes it
    model: Any = build_policy(config, spaces.observation, spaces.action, weights_follow=True)
    load_policy_weights(model, folder)
    read, given = spaces.observation, env.observation_space
    try:
        check_streams(model, read, given, "the environment")
    except InputError as error:
        raise InputError(_mismatch(path, read, given)) from error
    if isinstance(read, Dict) and isinstance(given, Dict) and not set(read) <= set(given):  # labels, which it reads too
        raise InputError(_mismatch(path, read, given))
    return model.to(device)


def _mismatch(path: str, read: Space, given: Space) -> str:
    return (
        f"reward_model: {path} reads the observations {describe(read)}, and the environment has {describe(given)}; "
        "train a reward model on recordings of this environment, or name its streams with --rename_streams"
    )
