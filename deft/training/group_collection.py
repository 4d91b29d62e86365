"""Plays groups of episodes: every member of a group starts from the same state, all members of all groups step at once.

An iteration is one episode a member. Its starting states follow from the run's seed and the number of the update alone,
and checkpoints are written between two iterations: a resumed run plays the same groups as an uninterrupted one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from deft import schema
from deft.algorithms.experience import Groups
from deft.data.rollout import Columns
from deft.data.tensors import Row, to_numpy
from deft.envs.layout import Observation
from deft.envs.vector import Episode, VectorEnv, VectorStep
from deft.errors import InputError
from deft.models.policy import Policy
from deft.runs.random_state import TRAINING_SEEDS, get_random_state, set_random_state
from deft.runs.rollout import rollout
from deft.training.collection import Collection, Collector

log = logging.getLogger(__name__)


class GroupBuffer:
    """The rounds of one iteration, each [T, N] with its own T; each is read once. Empty between two iterations."""

    def __init__(self, max_steps: int, device: torch.device | None = None) -> None:
        self.columns = Columns(max_steps, device)
        self.rounds: list[TensorDict] = []
        self.size = 0

    def __len__(self) -> int:
        """Steps held (of each environment), over all rounds."""
        return self.size + sum(rollout.batch_size[0] for rollout in self.rounds)

    def write(self, row: Row) -> None:
        """Take one step of all environments."""
        self.columns.write(self.size, row)
        self.size += 1

    @torch.inference_mode(False)
    def end_round(self, lost_groups: np.ndarray) -> TensorDict:
        """Keep the round that was written; groups that lost a member are masked out. Returns it."""
        rollout = self.columns.read(0, self.size).clone()
        if lost_groups.any():
            rollout[schema.STEP_MASK] &= ~torch.as_tensor(lost_groups, device=self.columns.device)
        self.size = 0
        self.rounds.append(rollout)
        return rollout

    def clear(self) -> None:
        """Discard all rounds; the memory stays allocated."""
        self.size = 0
        self.rounds = []

    def state_dict(self) -> dict[str, Any]:
        """Nothing: an iteration is played and learned from as a whole."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`."""
        self.clear()


class GroupCollector(Collector):
    """Plays one episode in every environment, from a seed for each."""

    def __init__(self, env: VectorEnv, policy: Policy, seed: int, group_size: int) -> None:
        super().__init__(env, policy, seed, reward_terms=True)
        self.group_size = group_size
        self.played = 0
        """Env steps of the round that is being played."""
        self._reports_success = False

    @torch.inference_mode()
    def play(self, buffer: GroupBuffer, seeds: list[int], max_steps: int, stop: Callable[[], bool]) -> bool:
        """One round: a seed for each group. Ends when every episode has, or is cut after `max_steps`.

        Steps after a member's end are written outside `schema.STEP_MASK`. Return False if `stop` became true first.
        """
        self._begin(seeds)
        num_envs, self.played = self.env.num_envs, 0
        # On the host; `mask` and `returns` are where the environments' steps are.
        alive, lost, lengths = np.ones(num_envs, bool), np.zeros(num_envs, bool), np.zeros(num_envs, np.int64)
        mask, returns = self._to_env(alive), self._to_env(np.zeros(num_envs))

        def sink(_: Any, __: Any, step: VectorStep) -> bool:
            nonlocal mask, returns
            self._row[schema.STEP_MASK] = mask
            self._complete(step)
            buffer.write(self._row)
            lengths[alive] += _to_host(step.num_steps)[alive] if self.env.chunk_length > 1 else 1
            returns = returns + step.reward * mask
            self.played = int(lengths.sum())
            ended = [episode for episode in step.episodes if alive[episode.env_index]]
            self._reports_success |= any(episode.success is not None for episode in ended)
            self.episodes.extend(ended)
            if len(step.done_index):
                gone = _to_host(step.lost_index)
                lost[gone] |= alive[gone]
                alive[_to_host(step.done_index)] = False
                mask = self._to_env(alive)
            return not alive.any()

        rollout(self.env, self._choose, sink, None, max_steps, stop)
        if alive.any() and buffer.size < max_steps:  # stopped before its end
            return False
        success = False if self._reports_success else None  # of an episode that is cut: it was not reached
        sums = _to_host(returns)
        self.episodes.extend(
            Episode(int(index), float(sums[index]), int(lengths[index]), success, {}) for index in np.flatnonzero(alive)
        )
        self.num_lost_episodes += int(lost.sum())
        self.step_counts.append(int(lengths.sum()))
        self.played = 0
        lost_groups = lost.reshape(-1, self.group_size).any(1).repeat(self.group_size)
        buffer.end_round(lost_groups)
        return True

    def take_step_count(self, num_vector_steps: int) -> int:
        """Env steps of the episodes played since the last call; the steps after an episode's end are none."""
        return super().take_step_count(len(self.step_counts))

    def state_dict(self) -> dict[str, Any]:
        """Return the step counts of an update under way; nothing else is carried from one iteration to the next."""
        return {"env": None, "memory": None, "started": False, "step_counts": list(self.step_counts)}

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Every iteration starts new episodes: no state of the environments is needed."""
        self.step_counts.clear()
        self.step_counts.extend(state["step_counts"])
        self._observation = None
        return True

    def _to_env(self, values: np.ndarray) -> Any:
        """Return an array as the environments return theirs: as it is, or a tensor on their device."""
        return values if self.env.device is None else torch.tensor(values, device=self.env.device)

    def _begin(self, seeds: list[int]) -> None:
        """Start an episode in every environment, the same in all members of a group."""
        observation = self.env.reset([seed for seed in seeds for _ in range(self.group_size)])
        if not _groups_agree(observation, self.group_size):
            observation = self._copy_first_members()
        self._check_finite(observation)
        self._observation = observation
        self._memory = self.policy.initial_memory(self.env.num_envs)

    def _copy_first_members(self) -> Observation:
        """Give every member the state of its group's first: equal seeds did not give equal observations."""
        states = self.env.get_state()
        if states is None:
            raise InputError(
                "the members of a group must start from one state, but equal seeds give different observations here "
                f"and the state cannot be copied: {self.env.state_obstacle()}"
            )
        size = self.group_size
        self.env.set_state([states[index - index % size] for index in range(self.env.num_envs)])
        if not _groups_agree(self.env.observation, size):
            raise InputError(
                "the members of a group must start from one state, but this environment gives different observations "
                "both with equal seeds and after its state was copied: make its reset(seed) repeatable"
            )
        return self.env.observation


class GroupCollection(Collection):
    """Groups on demand: `gather` plays rounds until enough groups have a spread of return, or no round is left."""

    collector: GroupCollector
    buffer: GroupBuffer

    def __init__(
        self,
        env: VectorEnv,
        policy: Policy,
        experience: Groups,
        seed: int,
        max_steps: int,
        collector_class: type[GroupCollector] = GroupCollector,
    ) -> None:
        if env.num_envs % experience.group_size:
            raise InputError(
                f"env.num_envs: {env.num_envs} is no multiple of group_size {experience.group_size}: every member of a "
                "group needs an environment of its own"
            )
        self.groups_at_once = env.num_envs // experience.group_size
        wanted = experience.groups_per_iteration or self.groups_at_once
        if wanted % self.groups_at_once:
            raise InputError(
                f"groups_per_iteration: {wanted} is no multiple of the {self.groups_at_once} groups that num_envs "
                f"{env.num_envs} holds at once"
            )
        super().__init__(collector_class(env, policy, seed, experience.group_size), GroupBuffer(max_steps, env.device))
        self.count_useful = experience.count_useful
        self.groups_per_iteration = wanted
        self.max_rounds = wanted // self.groups_at_once + experience.max_resamples
        self.max_steps = max_steps
        self._has_warned = False

    def counts_in_update(self) -> list[int]:
        """Env steps of each round of an update that was stopped."""
        return list(self.collector.step_counts) if self.in_update else []

    @property
    def pending(self) -> int:
        """Vector steps of the iteration that is being played."""
        return len(self.buffer)

    def steps_under_way(self, most_per_step: int) -> int:
        """Env steps of the episodes so far; an environment whose episode has ended waits for the others."""
        return sum(self.collector.step_counts) + self.collector.played

    def gather(self, num_vector_steps: int, stop: Callable[[], bool]) -> bool:
        """Play the groups of an iteration; return False if `stop` became true first, with nothing changed.

        An iteration consists of whole episodes: `num_vector_steps` is not used.
        """
        before = get_random_state()
        num_episodes = len(self.collector.episodes)
        seeds = np.random.default_rng([self.collector.seed, self.collector.version])
        num_found = 0
        self.buffer.clear()
        for _ in range(self.max_rounds):
            round_seeds = seeds.integers(TRAINING_SEEDS.start, TRAINING_SEEDS.stop, self.groups_at_once).tolist()
            if not self.collector.play(self.buffer, round_seeds, self.max_steps, stop):
                self._undo(before, num_episodes)
                return False
            latest = self.buffer.rounds[-1]
            self._warn_of_cut_episodes(latest)
            num_found += self.groups_at_once if self.count_useful is None else self.count_useful(latest)
            if num_found >= self.groups_per_iteration:
                break
        return True

    def _warn_of_cut_episodes(self, rollout: TensorDict) -> None:
        """Warn once a run of episodes that are longer than a rollout: they are scored by the rewards up to the cut."""
        ended = rollout[schema.NEXT_TERMINATED][-1] | rollout[schema.NEXT_TRUNCATED][-1]
        num_cut = int((rollout[schema.STEP_MASK][-1] & ~ended).sum())
        if num_cut and not self._has_warned:
            self._has_warned = True
            log.warning(
                "%d of %d episodes had not ended after rollout_steps %d: they are cut there and compared by the "
                "rewards up to it; set --rollout-steps to the longest episode's length",
                num_cut,
                rollout.batch_size[1],
                self.max_steps,
            )

    def _undo(self, random_state: dict[str, Any], num_episodes: int) -> None:
        """Restore the state before an incomplete iteration: a resumed run plays it again from the start."""
        set_random_state(random_state)
        self.buffer.clear()
        self.collector.step_counts.clear()
        while len(self.collector.episodes) > num_episodes:
            self.collector.episodes.pop()

    def batches(self, num_vector_steps: int) -> Iterator[TensorDict]:
        """Yield the rounds of the iteration, each once."""
        rounds = self.buffer.rounds
        self.buffer.clear()
        yield from rounds


def _groups_agree(observation: Observation, group_size: int) -> bool:
    """Whether the members of each group see the same."""
    for stream in observation.values() if isinstance(observation, dict) else (observation,):
        groups = stream.reshape(-1, group_size, *stream.shape[1:])
        if not bool((groups == groups[:, :1]).all()):
            return False
    return True


def _to_host(values: Any) -> np.ndarray:
    return values if isinstance(values, np.ndarray) else to_numpy(values)
