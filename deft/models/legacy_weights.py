"""Weights of the previous version under the names of this one: called when a policy's weights are loaded.

`Policy.complete_weights` uses it for checkpoints, and a hook of `load_state_dict` for copies of a policy in the state
of an algorithm (targets, anchors, references).
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn

# The previous version kept the action scale and the deviation of SAC's and the offline algorithms' policy outside its
# head: old name → new name.
RENAMED = {"center": "head.center", "width": "head.width", "log_std": "head.log_std"}


def translate(weights: MutableMapping[str, Any], prefix: str = "") -> None:
    """Rename the weights of a network from scratch in place, and add the buffers that they lack."""
    for old, new in RENAMED.items():
        if prefix + old in weights:
            weights[prefix + new] = weights.pop(prefix + old)
    add_reward_scale(weights, prefix)


def add_reward_scale(weights: MutableMapping[str, Any], prefix: str = "") -> None:
    """Add the factor on rewards, 1, to the weights of a policy that PPO or GRPO trained."""
    if any(name.startswith(prefix) for name in weights):
        weights.setdefault(prefix + "reward_scale", torch.ones(()))


def keep_reward_normalizer(policy: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights with the policy's own reward statistics where they have none, and without them where it has none."""
    own = {name: value for name, value in policy.state_dict().items() if name.startswith("reward_normalizer.")}
    kept = {name: value for name, value in weights.items() if own or not name.startswith("reward_normalizer.")}
    return own | kept
