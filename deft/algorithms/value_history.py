"""Trains an asymmetric value function on the last rollouts, joined in time, before PPO estimates advantages with it.

Short rollouts make many updates of the policy out of the same env steps, but their returns end in V after a few
actions: where the reward is rare, V learns of it one rollout at a time, and its errors pass for advantages. The streams
of `critic_observation` are small, so that the last rollouts fit into memory: joined, they have the returns of whole
episodes, and V can take as many gradient steps on them as it needs.
"""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from deft import schema
from deft.algorithms.privileged_training import PrivilegedTraining
from deft.algorithms.returns import generalized_advantage, next_values
from deft.errors import InputError
from deft.models.policy import Policy

NUM_ROLLOUTS = 16  # the last ones, on which it is trained
LEARNING_RATE = 5e-4
BATCH_SIZE = 4096


class ValueHistory(PrivilegedTraining):
    """`num_updates` gradient steps on ½(V(s) − R)² for each rollout; R by GAE(λ) over the last ones, with the V of now.

    Truncated steps keep the value of their final observation as it was found when they were collected.
    """

    def __init__(self, policy: Policy, num_updates: int, gae_lambda: float, seed: int, captures: bool = False) -> None:
        if policy.critic is None:
            raise InputError(
                "value_updates: trains a value function of streams that the policy does not read; name them with "
                "critic_observation, or use value_updates 0"
            )
        self.critic = policy.critic
        self.num_updates, self.gae_lambda = num_updates, gae_lambda
        self.loss = torch.zeros(())
        super().__init__(self.critic, LEARNING_RATE, seed, captures)

    def learn(self, rollout: TensorDictBase, steps: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Add a rollout [T, N] and train; its advantages and values by the new V, [T, N].

        `steps`: its `reward`, `next_value`, `discount`, `terminated` and `done`, [T, N] each.
        """
        streams = rollout[schema.OBSERVATION].select(*self.critic.encoder.names)
        added = TensorDict({schema.OBSERVATION: streams, **steps}, rollout.batch_size).to(self.device).clone()
        self.rollouts = [*self.rollouts, added][-NUM_ROLLOUTS:]
        joined: TensorDictBase = torch.cat(self.rollouts)
        advantage, value = self._advantages(joined)
        rows = joined.select(schema.OBSERVATION).set(schema.VALUE_TARGET, advantage + value).flatten(0, 1)
        self.loss = self._train(rows, self.num_updates, BATCH_SIZE)
        advantage, value = self._advantages(joined)
        newest = slice(-rollout.batch_size[0], None)
        where = rollout[schema.NEXT_REWARD].device
        return advantage[newest].to(where), value[newest].to(where)

    @torch.no_grad()
    def _advantages(self, joined: TensorDictBase) -> tuple[Tensor, Tensor]:
        """GAE(λ) and V of all steps in memory, [T, N]."""
        value = self.critic(joined[schema.OBSERVATION])
        steps = {name: joined[name] for name in ("reward", "next_value", "discount", "terminated", "done")}
        steps["next_value"] = next_values(value, steps["next_value"], steps["done"])
        return generalized_advantage(value=value, gae_lambda=self.gae_lambda, **steps), value

    def _loss(self, batch: TensorDictBase) -> Tensor:
        return 0.5 * (self.critic(batch[schema.OBSERVATION]) - batch[schema.VALUE_TARGET]).square().mean()

    def state_dict(self) -> dict[str, Any]:
        """Everything that a resumed run needs to continue bit for bit, with the last rollouts."""
        return super().state_dict() | {"rollouts": [rollout.cpu().to_dict() for rollout in self.rollouts]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned."""
        super().load_state_dict(state)
        self.rollouts = [TensorDict(saved, saved["reward"].shape).to(self.device) for saved in state["rollouts"]]
