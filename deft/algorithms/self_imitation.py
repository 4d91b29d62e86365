"""Self-imitation beside PPO: the policy imitates its own episodes that went better than its value function predicted.

Where only success is rewarded and one episode in a hundred succeeds, PPO sees each success once, and learns more from
the tasks that already work. A memory keeps the successes and repeats them until the value function expects them:
self-imitation learning (Oh et al., 2018). It reads nothing but the rewards and observations of the rollouts.
"""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from deft import schema
from deft.algorithms.optimization import are_sharded
from deft.algorithms.returns import discounted_sum
from deft.data.augmentation import augment
from deft.errors import InputError
from deft.models.policy import Policy

CAPACITY = 20_000  # decisions in memory
MEMORY_BYTES = 2**29  # largest size of the memory; with images it can make CAPACITY smaller
LONGEST = 512  # decisions of an episode; of a longer one the last ones are imitated
EPISODES_BYTES = 3 * 2**29  # largest size of the episodes under way; with images it can make LONGEST smaller
SHORTEST = 16  # decisions that are kept whatever their size
UNIT, PRIORITY, RETURN = "unit", "priority", "return"
AUGMENTATION = ("shift",)


class SelfImitation:
    """L = mean over decisions of ℓ(a | s), the policy's imitation loss; sampled in proportion to (R − V(s))₊.

    R is the discounted return of an episode that has ended, from the decision on, and V the current value function. The
    memory keeps the decisions with the largest (R − V(s))₊: rare successes stay until they are expected.
    """

    def __init__(self, policy: Policy, least_return: float | None, seed: int) -> None:
        if policy.recurrent or not policy.is_continuous:
            what = "a policy with memory" if policy.recurrent else "discrete actions"
            raise InputError(f"self_imitation_coef: is not for {what}; use self_imitation_coef 0")
        if are_sharded(policy.parameters()):
            raise InputError("self_imitation_coef: not with fsdp; train without one of the two")
        self.policy: Any = policy
        self.least_return = least_return
        self.device = next(policy.parameters()).device
        self.generator = torch.Generator().manual_seed(seed)
        self.steps: TensorDictBase | None = None  # [W, N]: a ring of the last decisions of every environment
        self.position = 0  # of the ring, at which the next decision is written
        self.lengths = self.totals = torch.zeros(0)  # [N], of the episodes under way: decisions, sum of rewards
        self.memory: Any = None  # a TensorDict [n], or None
        self._before: tuple[Tensor, Tensor] | None = None  # of the last `draw`: its random state, and the priorities

    # -- remembering ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def remember(self, rollout: TensorDictBase, steps: dict[str, Tensor]) -> None:
        """Take the decisions of a rollout [T, N], and into memory those of episodes that end in it.

        `steps`: its `reward`, `next_value`, `discount`, `terminated` and `done`, [T, N] each.
        """
        rows = self._rows(rollout, steps)
        if self.steps is None:
            self.steps = _allocate(rows)
            self.lengths = torch.zeros(rows.shape[1], dtype=torch.int64, device=self.device)
            self.totals = torch.zeros(rows.shape[1], device=self.device)
        if self.memory is not None and self.policy.critic is not None:  # else `draw` does it, for what it draws
            self.memory[PRIORITY] = (self.memory[RETURN] - self._value(self.memory)).clamp(min=0.0)
        raw, done = rollout[schema.NEXT_REWARD].float().to(self.device), steps["done"].to(self.device)
        for row, reward, ended in zip(rows, raw, done, strict=True):
            self.steps[self.position] = row
            self.lengths += 1
            self.totals += reward
            is_kept = ended if self.least_return is None else ended & (self.totals >= self.least_return)
            if bool(is_kept.any()):
                self._keep(is_kept.nonzero().squeeze(1))
            self.lengths *= ~ended
            self.totals *= ~ended
            self.position = (self.position + 1) % len(self.steps)

    def _rows(self, rollout: TensorDictBase, steps: dict[str, Tensor]) -> TensorDict:
        """What is stored of each decision: [T, N]."""
        reward, following, discount = steps["reward"], steps["next_value"], steps["discount"]
        is_truncated = steps["done"] & ~steps["terminated"]
        action = rollout[schema.ACTION].to(self.device)
        unit = self.policy.executed(self.policy.to_unit(action.flatten(0, 1)).flatten(1))
        columns = {  # of a chunk all steps: the policy decided those after the end of the episode too
            schema.OBSERVATION: rollout[schema.OBSERVATION],
            UNIT: unit.unflatten(0, action.shape[:2]),
            schema.VALUE: rollout[schema.VALUE].float(),
            schema.REWARD: reward + discount * following * is_truncated,
            schema.DISCOUNT: discount,
        }
        return TensorDict(columns, rollout.batch_size).to(self.device)

    def _keep(self, envs: Tensor) -> None:
        """Put the episodes that end at the present row of the ring into memory, for these environments."""
        assert self.steps is not None
        size = len(self.steps)
        ages = torch.arange(size - 1, -1, -1, device=self.device)  # decisions before the present one, oldest first
        order = (self.position - ages) % size
        belongs = ages[:, None] < self.lengths[envs]
        small = self.steps.select(schema.VALUE, schema.REWARD, schema.DISCOUNT)[order][:, envs]
        returns = discounted_sum(small[schema.REWARD] * belongs, small[schema.DISCOUNT])
        priority = (returns - small[schema.VALUE]).clamp(min=0.0) * belongs
        age, column = priority.nonzero(as_tuple=True)
        found = self.steps.exclude(schema.VALUE, schema.REWARD, schema.DISCOUNT)[order[age], envs[column]]
        found[RETURN], found[PRIORITY] = returns[age, column], priority[age, column]
        self._insert(found)

    def _insert(self, found: TensorDictBase) -> None:
        """Add decisions; where the memory is full they replace those of lower priority."""
        if not len(found):
            return
        capacity = min(CAPACITY, max(1, MEMORY_BYTES * len(found) // found.bytes()))
        best: Any = found[found[PRIORITY].argsort(descending=True, stable=True)[:capacity]]
        if self.memory is None:
            self.memory = best
            return
        free = capacity - len(self.memory)
        if free:
            self.memory = torch.cat([self.memory, best[:free]])
        rest = best[free:]
        lowest = self.memory[PRIORITY].argsort(stable=True)[: len(rest)]
        is_better = rest[PRIORITY] > self.memory[PRIORITY][lowest]
        self.memory[lowest[is_better]] = rest[is_better]

    # -- imitating -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def draw(self, count: int) -> TensorDict | None:
        """Decisions [count] to imitate, sampled by priority, which is computed anew for them; None: there are none."""
        if self.memory is None or not bool((total := self.memory[PRIORITY].double().cumsum(0))[-1] > 0):
            return None
        self._before = self.generator.get_state(), self.memory[PRIORITY].clone()
        places = torch.rand(count, generator=self.generator, dtype=torch.float64).to(self.device) * total[-1]
        chosen = torch.searchsorted(total, places, right=True).clamp(max=len(total) - 1)
        rows = self.memory[chosen]
        if self.policy.critic is None:
            self.memory[PRIORITY][chosen] = (rows[RETURN] - self._value(rows)).clamp(min=0.0)
        kept = rows.exclude(PRIORITY, RETURN)
        kept[schema.OBSERVATION] = _shifted(rows[schema.OBSERVATION])
        return kept

    def undraw(self) -> None:
        """Undo the last `draw`, which the next one then repeats."""
        if self._before is not None:
            self.generator.set_state(self._before[0])
            self.memory[PRIORITY] = self._before[1]

    def _value(self, rows: TensorDictBase) -> Tensor:
        """Current V, [B]; a critic of privileged streams needs no images."""
        critic = self.policy.critic
        if critic is None:
            return self.policy.get_value(rows.select(schema.OBSERVATION)).float()
        return critic(rows[schema.OBSERVATION].select(*critic.encoder.names)).float()

    def loss(self, rows: TensorDictBase) -> Tensor:
        """The imitation loss of decisions that `draw` returned, as a mean."""
        found = self.policy.imitation(rows[schema.OBSERVATION], rows[UNIT].unsqueeze(0), None, "log_prob")
        return found["bc_loss"].mean()

    def metrics(self) -> dict[str, Tensor]:
        """How many decisions are in memory, and by how much their returns exceed the value."""
        if self.memory is None:
            return {"self_imitation_size": torch.tensor(0.0), "self_imitation_priority": torch.tensor(0.0)}
        return {
            "self_imitation_size": torch.tensor(float(len(self.memory))),
            "self_imitation_priority": self.memory[PRIORITY].mean(),
        }

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything that a resumed run needs to continue bit for bit, with the memory and the episodes under way."""
        return {
            "generator": self.generator.get_state(),
            "position": self.position,
            "lengths": self.lengths.cpu(),
            "totals": self.totals.cpu(),
            "steps": None if self.steps is None else self.steps.cpu().to_dict(),
            "memory": None if self.memory is None else self.memory.cpu().to_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned."""
        self.generator.set_state(state["generator"])
        self.position = state["position"]
        self.lengths, self.totals = state["lengths"].to(self.device), state["totals"].to(self.device)
        self.steps = self.memory = None
        if state["steps"] is not None:
            self.steps = TensorDict(state["steps"], state["steps"][schema.REWARD].shape).to(self.device)
        if state["memory"] is not None:
            self.memory = TensorDict(state["memory"], state["memory"][RETURN].shape).to(self.device)


def _allocate(rows: TensorDictBase) -> TensorDictBase:
    """The ring of decisions, for rows like those of [T, N]."""
    one = rows[:1]
    length = min(LONGEST, max(SHORTEST, EPISODES_BYTES // one.bytes()))
    return one.expand(length, *one.shape[1:]).clone().zero_()


def _shifted(observation: Any) -> Any:
    """An observation [B] with randomly shifted images."""
    if isinstance(observation, Tensor):
        return augment(observation, AUGMENTATION)
    streams = augment(dict(observation.items()), AUGMENTATION)
    return TensorDict(streams, observation.batch_size)
