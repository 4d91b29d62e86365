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
from deft.algorithms import optimization
from deft.algorithms.captured_step import CapturedStep
from deft.algorithms.returns import generalized_advantage
from deft.errors import InputError
from deft.models.policy import Policy

NUM_ROLLOUTS = 16  # the last ones, on which it is trained
LEARNING_RATE = 5e-4
BATCH_SIZE = 4096


class ValueHistory:
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
        self.device = next(policy.parameters()).device
        self.generator = torch.Generator().manual_seed(seed)
        self._captured = CapturedStep(self._step) if captures else None
        self.optimizer = optimization.make_optimizer(self.critic.parameters(), LEARNING_RATE, capturable=captures)
        self.loss = torch.zeros(())
        self.rollouts: list[TensorDictBase] = []
        self.processes: optimization.SharedTraining | None = None

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
        chosen = torch.randint(len(rows), (self.num_updates, min(BATCH_SIZE, len(rows))), generator=self.generator)
        step = self._step if self._captured is None or self.processes is not None else self._captured
        losses = [step(rows[batch])["loss"] for batch in chosen.to(self.device)]
        self.loss = torch.stack(losses).mean()
        advantage, value = self._advantages(joined)
        newest = slice(-rollout.batch_size[0], None)
        where = rollout[schema.NEXT_REWARD].device
        return advantage[newest].to(where), value[newest].to(where)

    @torch.no_grad()
    def _advantages(self, joined: TensorDictBase) -> tuple[Tensor, Tensor]:
        """GAE(λ) and V of all steps in memory, [T, N]."""
        value = self.critic(joined[schema.OBSERVATION])
        steps = {name: joined[name] for name in ("reward", "next_value", "discount", "terminated", "done")}
        following = torch.cat([value[1:], steps["next_value"][-1:]])
        steps["next_value"] = torch.where(steps["done"], steps["next_value"], following)
        return generalized_advantage(value=value, gae_lambda=self.gae_lambda, **steps), value

    def _step(self, batch: TensorDictBase) -> dict[str, Tensor]:
        loss = 0.5 * (self.critic(batch[schema.OBSERVATION]) - batch[schema.VALUE_TARGET]).square().mean()
        optimization.backward(loss, self.optimizer)
        optimization.apply_gradients(self.optimizer, processes=self.processes)
        return {"loss": loss.detach()}

    def state_dict(self) -> dict[str, Any]:
        """Everything that a resumed run needs to continue bit for bit, with the last rollouts."""
        return {
            "optimizer": optimization.optimizer_state(self.optimizer),
            "generator": self.generator.get_state(),
            "rollouts": [rollout.cpu().to_dict() for rollout in self.rollouts],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned."""
        optimization.load_optimizer_state(self.optimizer, state["optimizer"])
        self.generator.set_state(state["generator"])
        self.rollouts = [TensorDict(saved, saved["reward"].shape).to(self.device) for saved in state["rollouts"]]
