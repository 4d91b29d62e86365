"""From settings to a policy: the only place that decides which class a `PolicyConfig` builds.

Called for runs in an environment (`deft.training.run`), runs on a dataset (`deft.algorithms.off_policy`) and
evaluations, all of which build the same policy from the same section.
"""

from __future__ import annotations

import dataclasses
import logging

import gymnasium
import torch

from deft.config.settings import PolicyConfig
from deft.errors import InputError
from deft.models.action_scale import chunk_space, with_bounds
from deft.models.actor_critic import ActorCritic
from deft.models.advantage import AdvantagePolicy, conditioned_space
from deft.models.policy import Policy
from deft.models.privileged import public_space
from deft.models.residual import ResidualPolicy
from deft.models.vla.loading import load_vla_model_for
from deft.models.vla.policy import VLAPolicy

log = logging.getLogger(__name__)


def make_policy(
    config: PolicyConfig,
    observation_space: gymnasium.Space,
    action_space: gymnasium.Space,
    where: str = "the environment",
    num_members: int = 1,
    dtype: torch.dtype = torch.float32,
    weights_follow: bool = False,
) -> Policy:
    """Build the policy of a config for the spaces of `where` (an environment or a dataset).

    `action_space` is that of single steps, or of the config's chunks. `weights_follow`: weights of a checkpoint are
    loaded next, so a pretrained file that the config names is not read, and they bring an action scale.
    """
    if config.residual is not None:
        return _residual(config, observation_space, action_space, where, num_members, weights_follow)
    if config.advantage is not None:
        return _conditioned(config, observation_space, action_space, where, num_members, weights_follow)
    if weights_follow and config.name != "actor_critic":
        action_space = with_bounds(action_space)
    space, length = chunk_space(action_space, config.chunk_length), config.chunk_length
    if config.vla_config is None:
        return ActorCritic(observation_space, space, config, num_members, dtype)
    if num_members > 1:
        raise InputError("num_seeds: a VLA model is trained one seed at a time; start a run for each")
    if dtype != torch.float32:
        log.warning("precision: not for the VLA model, which computes in the type of its weights")
    public = public_space(observation_space, config.critic_observation)
    model = load_vla_model_for(config.vla_config, public, space, where, length, weights_follow)
    return VLAPolicy(model, observation_space=observation_space, action_space=space, config=config, dtype=dtype)


def _residual(
    config: PolicyConfig,
    observation_space: gymnasium.Space,
    action_space: gymnasium.Space,
    where: str,
    num_members: int,
    weights_follow: bool,
) -> Policy:
    """Build the policy of a config as the frozen policy of a residual; V and critics are the residual's."""
    if num_members > 1:
        raise InputError("residual_scale: a residual is trained one seed at a time; use num_seeds 1")
    if not weights_follow and (config.vla_config is None or config.vla_config.model_path is None):
        raise InputError("residual_scale: corrects a trained policy; give one with --model_path")
    frozen = dataclasses.replace(
        config, residual=None, separate_value=False, normalize_reward=False, critic_observation=()
    )
    public = public_space(observation_space, config.critic_observation)
    base = make_policy(frozen, public, action_space, where, weights_follow=weights_follow)
    return ResidualPolicy(base, observation_space, action_space, config)


def _conditioned(
    config: PolicyConfig,
    observation_space: gymnasium.Space,
    action_space: gymnasium.Space,
    where: str,
    num_members: int,
    weights_follow: bool,
) -> Policy:
    """Build the policy of a config for observations with an advantage indicator."""
    if num_members > 1:
        raise InputError("num_seeds: a policy with an advantage indicator is trained one seed at a time; use 1")
    if config.critic_observation:
        raise InputError("critic_observation: not for a policy with an advantage indicator; leave it out")
    plain = dataclasses.replace(config, advantage=None, normalize_reward=False)
    space = conditioned_space(observation_space, config.vla_config is not None)
    base = make_policy(plain, space, action_space, where, weights_follow=weights_follow)
    return AdvantagePolicy(base, observation_space, config)
