"""A critic of actions beside PPO and GRPO: A(s, a) of the privileged streams, whose gradient trains the policy.

Their own gradient multiplies the noise of an action by its advantage. One number says little about the 16 of a chunk,
and a vision encoder that learns from it needs tens of millions of frames. The critic reads a small vector that
describes the scene (`critic_observation`), so it soon predicts which actions are good there. Its gradient by the action
then says for each frame where a better action lies: interpolated policy gradients (Gu et al., 2017) with an asymmetric
critic. Only training needs it; the policy never reads what it reads.
"""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from deft import schema
from deft.algorithms.optimization import SharedTraining
from deft.algorithms.privileged_training import PrivilegedTraining
from deft.errors import InputError
from deft.models.mlp import BatchedMLP
from deft.models.policy import Policy

NUM_NETWORKS = 4  # their mean is the advantage: errors of single ones cancel
HIDDEN_SIZES = (256, 256, 256)
LEARNING_RATE = 5e-4
NUM_ROLLOUTS = 16  # the last ones, on which it is trained
NUM_UPDATES = 32  # gradient steps for each rollout
COLUMNS = "features", "unit", "advantage"  # of a transition: of the critic [n, S], unit actions [n, A], [n]
LARGEST_ADVANTAGE = 5.0  # in standard deviations; larger ones are clipped


class ActionCritic(PrivilegedTraining):
    """A = mean_i f_i(s, a), trained by the mean of (f_i(s, a) − Â)² over the last rollouts.

    Â = (advantage − mean) / deviation, of the rollout, or the iteration of groups, that a transition belongs to.
    """

    def __init__(self, policy: Policy, batch_size: int, seed: int, captures: bool = False) -> None:
        if policy.critic is None:
            raise InputError(
                "action_critic_coef: a critic of actions reads streams that the policy does not; name them with "
                "critic_observation, or use action_critic_coef 0"
            )
        if policy.recurrent or not policy.is_continuous:
            raise InputError(
                "action_critic_coef: is for continuous actions of a policy without memory; use action_critic_coef 0"
            )
        if not policy.can_reparameterize:
            raise InputError(
                f"action_critic_coef: the actions of {policy.described} have no gradient; use a Gaussian policy "
                "(vla-tiny: head=gaussian), or action_critic_coef 0"
            )
        self.policy: Any = policy
        self.batch_size = batch_size
        self.encoder = policy.critic.encoder
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            inputs = self.encoder.dim + policy.center.numel()
            self.networks = BatchedMLP(NUM_NETWORKS, inputs, HIDDEN_SIZES, 1, layer_norm=True)
        self.networks.to(next(policy.parameters()).device)
        super().__init__(self.networks, LEARNING_RATE, seed, captures)

    def improvement(self, observation: Any, scored: dict[str, Tensor]) -> Tensor:
        """What the policy is to increase, [B], in standard deviations of the advantage; scored by `evaluate_actions`.

        A(s, a) through the actions, with their noise held fixed; and for each dim with a few values Σ_v p(v) A(s, a_v).
        """
        features = self.encoder(observation)
        found = self._outputs(features, scored["reparameterized"], frozen=True).mean(0)
        if "alternatives" not in scored:
            return found
        others, probabilities = scored["alternatives"], scored["alternative_probs"]
        with torch.no_grad():
            repeated = features.repeat_interleave(others.shape[1], 0)
            values = self._outputs(repeated, others.flatten(0, 1), frozen=True).mean(0).view_as(probabilities)
        return found + (probabilities * values).sum(1)

    def columns(self, rollout: TensorDictBase) -> TensorDictBase:
        """What it learns from beside the advantages: actions and the streams that it reads, without images."""
        return rollout.select(*((schema.OBSERVATION, name) for name in self.encoder.names), schema.ACTION)

    def learn(
        self, rollout: TensorDictBase, num_updates: int | None = None, processes: SharedTraining | None = None
    ) -> dict[str, Tensor]:
        """Add a rollout with advantages and train; return how well they were predicted before.

        `num_updates`: gradient steps, by default `NUM_UPDATES`; all `processes` must take as many.
        """
        self.processes = processes
        rows = self.columns(rollout).set(schema.ADVANTAGE, rollout[schema.ADVANTAGE]).reshape(-1).to(self.device)
        with torch.no_grad():
            deviation, mean = torch.std_mean(rows[schema.ADVANTAGE])
            advantage = (rows[schema.ADVANTAGE] - mean) / (deviation + 1e-8)
            advantage = advantage.clamp(-LARGEST_ADVANTAGE, LARGEST_ADVANTAGE)
            features = self.encoder(rows[schema.OBSERVATION])
            unit = self.policy.executed(self.policy.to_unit(rows[schema.ACTION]).flatten(1))
            before = self._outputs(features, unit, frozen=True).mean(0)
            correlation = torch.corrcoef(torch.stack([before, advantage]))[0, 1].nan_to_num()
        self.rollouts = [*self.rollouts, (features, unit, advantage)][-NUM_ROLLOUTS:]
        columns = [torch.cat(parts) for parts in zip(*self.rollouts, strict=True)]
        transitions = TensorDict(dict(zip(COLUMNS, columns, strict=True)), batch_size=[len(columns[0])])
        loss = self._train(transitions, NUM_UPDATES if num_updates is None else num_updates, self.batch_size)
        return {"action_critic_loss": loss, "action_critic_correlation": correlation}

    def _outputs(self, features: Tensor, unit: Tensor, frozen: bool) -> Tensor:
        """f_i, [networks, B]."""
        return self.networks(torch.cat([features, unit], 1).unsqueeze(0), frozen=frozen).squeeze(-1)

    def _loss(self, batch: TensorDictBase) -> Tensor:
        features, unit, advantage = (batch[name] for name in COLUMNS)
        return (self._outputs(features, unit, frozen=False) - advantage).square().mean()

    def state_dict(self) -> dict[str, Any]:
        """Everything that a resumed run needs to continue bit for bit, with the last rollouts."""
        return super().state_dict() | {
            "networks": {name: value.cpu() for name, value in self.networks.state_dict().items()},
            "rollouts": [[column.cpu() for column in columns] for columns in self.rollouts],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned."""
        super().load_state_dict(state)
        self.networks.load_state_dict(state["networks"])
        self.rollouts = [tuple(column.to(self.device) for column in columns) for columns in state["rollouts"]]
