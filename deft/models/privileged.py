"""Asymmetric critics: a value function of streams that the policy never reads (`critic_observation`).

`ActorCritic` and `VLAPolicy` build it. Only training needs the streams: a policy that is rebuilt to act has no such
value function, and its observation space does not have them.
"""

from __future__ import annotations

from collections.abc import Sequence

import gymnasium
import numpy as np
from gymnasium import spaces
from tensordict import TensorDictBase
from torch import Tensor, nn

from deft.errors import InputError
from deft.models.encoders import NORMALIZER_EPSILON, ObservationEncoder
from deft.models.mlp import BatchedMLP


class PrivilegedValue(nn.Module):
    """V of the privileged streams and of all other vectors in the observation, normalised by statistics of its own.

    It shares no layer with the policy, so that the gradient of V never reaches the policy.
    """

    def __init__(
        self, space: spaces.Dict, names: Sequence[str], hidden_sizes: Sequence[int], num_members: int = 1
    ) -> None:
        super().__init__()
        read = {name: part for name, part in space.items() if name in names or is_vector(part)}
        self.encoder = ObservationEncoder(spaces.Dict(read), epsilon=NORMALIZER_EPSILON)
        self.network = BatchedMLP(num_members, self.encoder.dim, hidden_sizes, 1)

    def forward(self, observation: TensorDictBase) -> Tensor:
        """V, of the batch shape of the observation."""
        features = self.encoder(observation)
        return self.network(features.reshape(1, -1, self.encoder.dim)).reshape(features.shape[:-1])


def is_vector(space: gymnasium.Space) -> bool:
    """Whether a stream is a vector or discrete: neither an image nor text."""
    if isinstance(space, spaces.Box):
        return space.dtype != np.uint8
    return isinstance(space, spaces.Discrete | spaces.MultiDiscrete)


def public_space(space: gymnasium.Space, names: Sequence[str]) -> gymnasium.Space:
    """Return the observation space without the streams that only critics read."""
    if not names or not isinstance(space, spaces.Dict):
        return space
    return spaces.Dict({name: part for name, part in space.items() if name not in names})


def with_critic_streams(
    space: gymnasium.Space, names: Sequence[str], given: gymnasium.Space, where: str
) -> gymnasium.Space:
    """Return the space of a policy with the streams that its critics read, as `where` offers them in `given`."""
    if not names:
        return space
    if not isinstance(given, spaces.Dict) or not isinstance(space, spaces.Dict):
        raise InputError(
            f"critic_observation {' '.join(names)}: the observation of {where} is one array without named streams; "
            "use an environment with a Dict observation space"
        )
    offered = ", ".join(given)
    if missing := [name for name in names if name not in given.spaces]:
        raise InputError(
            f"critic_observation: {where} has no stream {missing[0]!r}; it has {offered}: name some of these"
        )
    if unsupported := [name for name in names if not is_vector(given[name])]:
        vectors = ", ".join(name for name in given if is_vector(given[name])) or "none"
        raise InputError(
            f"critic_observation: stream {unsupported[0]!r} is an image or a text, and critics read vectors alone; "
            f"the vectors of {where}: {vectors}"
        )
    kept = public_space(space, names)
    assert isinstance(kept, spaces.Dict)
    if not kept.spaces:
        raise InputError(
            f"critic_observation: names all streams of {where} ({offered}), and the policy would read nothing; leave "
            "out those that the policy reads"
        )
    return spaces.Dict({**kept.spaces, **{name: given[name] for name in names}})
