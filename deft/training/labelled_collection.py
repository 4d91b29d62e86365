"""Collection in rounds: for DAgger a policy and an expert, which labels each step, act in turns; for RECAP the policy.

In rounds: `rollout_steps` of every environment, then `updates_per_round` batches of all labels so far.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from deft import schema
from deft.algorithms.algorithm import Algorithm, Metrics
from deft.algorithms.experience import Labels
from deft.data.datasets import load_dataset
from deft.data.datasets.dataset import Episode
from deft.data.datasets.minari import MinariFiles, recorded_episodes
from deft.data.labelled import EpisodeList, LabelledSteps, marked_parts
from deft.data.recording import Recording, import_pyarrow
from deft.data.tensors import Batch, Key
from deft.envs.vector import VectorEnv, VectorStep
from deft.errors import InputError
from deft.evaluation.rollouts import PolicyActor, expert_actions
from deft.models.normalization import has_seen_data
from deft.models.policy import Policy
from deft.training.collection import Collection, Collector
from deft.training.evaluator import check_spaces
from deft.training.takeover import Takeover

log = logging.getLogger(__name__)
WHOLE_CACHE = 2**62  # bytes: labels are in memory already
DATASETS = {True: "labels-v{}", False: "episodes-v{}"}  # in the run directory, with an expert and without


class ExpertCollector(Collector):
    """Steps environments with a policy or their scripted expert; both decide for as many steps as the policy does.

    Rows have what was executed as `schema.ACTION`, what the expert would do as `schema.EXPERT_ACTION`, and whether it
    did as `schema.INTERVENTION`.
    """

    def __init__(
        self, env: VectorEnv, policy: Policy, seed: int = 0, has_expert: bool = True, expert_finishes: bool = False
    ) -> None:
        super().__init__(env, policy, seed, next_observation=True)
        self._expert_finishes = expert_finishes
        self.beta = 1.0 if has_expert else 0.0
        """Probability that the expert acts."""
        self._expert = expert_actions(env, env.env_action_space) if has_expert else None
        self._actor = PolicyActor(policy, env.num_envs, env.action_mask, deterministic=False)
        self._random = np.random.default_rng(seed)
        self._takes_over = np.zeros(env.num_envs, bool)

    def _act(self) -> tuple[dict[Key, Any], Tensor | None]:
        """The actions of the expert and of what acts."""
        try:
            labels = None if self._expert is None else self._expert()
        except InputError as error:
            raise InputError(
                f"{error}: DAgger needs a scripted expert (reach, tabletop, driving, Meta-World and PushT have one); "
                "give the environment a method expert_action(), let a person act with --takeover --view, or imitate "
                "recorded demonstrations with sft"
            ) from error
        assert self._observation is not None
        due = self._actor.is_due
        starts = self._random.random(int(due.sum())) < self.beta
        self._takes_over[due] = starts | (self._takes_over[due] & self._expert_finishes)
        action = self._actor.act(self._observation)
        if labels is not None:
            takes_over = self._takes_over.reshape(-1, *[1] * (action.ndim - 1))
            action = np.where(takes_over, labels, action)
        space = self.env.action_space
        if isinstance(space, spaces.Box):
            action = np.clip(action, space.low, space.high)
        streams = self._observation
        row: dict[Key, Any] = (
            {(schema.OBSERVATION, name): stream for name, stream in streams.items()}
            if isinstance(streams, dict)
            else {schema.OBSERVATION: streams}
        )
        row |= {schema.ACTION: action, schema.INTERVENTION: self._takes_over.copy()}
        if labels is not None:
            row[schema.EXPERT_ACTION] = labels
        return row, None

    def _let_intervene(self, takeover: Takeover) -> np.ndarray | None:
        marks = super()._let_intervene(takeover)
        if marks is not None:
            self._actor.interrupt(np.flatnonzero(marks))  # its chunk began elsewhere
        return marks

    def _complete(self, step: VectorStep) -> None:
        super()._complete(step)
        self._actor.ended(step.done_index)
        self._takes_over[step.done_index] = False

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the environments, and of what acts in them."""
        own = {
            "takes_over": self._takes_over.tolist(),
            "random": self._random.bit_generator.state,
            "actor": self._actor.state_dict(),
        }
        return {**super().state_dict(), "expert": own}

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Restore the state; return False if the environments' state is unknown and they start new episodes."""
        known = super().load_state_dict(state)
        own = state.get("expert")
        if own is not None:
            self._random.bit_generator.state = own["random"]
        if known and own is not None:
            self._takes_over = np.array(own["takes_over"])
            self._actor.load_state_dict(own["actor"])
        return known


class LabelledCollection(Collection):
    """Writes steps, and yields batches of all of them so far after every round.

    With an expert, a round ends the episodes under way in the data: their steps are learned from at once, and continue
    as an episode of their own. Without one, returns are learned from, and episodes are added when they end.
    """

    buffer: LabelledSteps
    collector: ExpertCollector

    def __init__(self, collector: ExpertCollector, algorithm: Any, experience: Labels, seed: int) -> None:
        super().__init__(collector, LabelledSteps())
        self.algorithm, self.experience, self._seed = algorithm, experience, seed
        self._round, self._due = 0, 0
        self._sampler: Any = None
        self._metrics: dict[str, float] = {}
        if experience.record:
            import_pyarrow()
        self._prior = [] if experience.prior_data is None else _read_prior(experience.prior_data, collector.env)
        self._set_beta()

    def num_updates(self, rounds: int, num_env_steps: int) -> int:
        """`updates_per_round` for each round."""
        return rounds * self.experience.updates_per_round

    def gather(self, num_vector_steps: int, stop: Callable[[], bool]) -> bool:
        """Collect `num_vector_steps` since the last update; return False if `stop` became true first."""
        wanted = num_vector_steps - self.pending
        return self.collector.collect(self.buffer, wanted, stop) == wanted

    def update(self, algorithm: Algorithm, num_vector_steps: int, stop: Callable[[], bool]) -> Metrics | None:
        """Make the updates of the round; return None if `stop` became true first."""
        if not self.in_update:
            self._end_round()
        algorithm.should_stop = stop
        metrics = algorithm.update(self.batches(num_vector_steps))
        self.in_update = num_vector_steps if self._due else 0
        if self.in_update:
            return None
        return {**metrics, **{name: torch.tensor(value) for name, value in self._metrics.items()}}

    def batches(self, num_vector_steps: int) -> Iterator[Batch]:
        """Yield the batches that are due."""
        while self._due and not self.algorithm.should_stop():
            self._due -= 1
            yield self._sampler.sample(self.experience.batch_size)

    def _end_round(self) -> None:
        """Add the labels of the round to the data, and let the expert act less."""
        own = self.experience
        added = self.buffer.cut(whole=not own.has_expert)
        episodes = self._episodes()
        self._metrics = {"num_labels": float(sum(map(len, episodes)))}
        if own.expert == "scripted":
            self._metrics["beta"] = self.collector.beta
        if (own.has_expert or own.takeover) and added:
            self._metrics["intervention_rate"] = float(np.concatenate([episode.marks for episode in added]).mean())
        if episodes:
            self._sampler, labels = self._make_sampler()
            if self.algorithm.version == 0:
                fresh = not has_seen_data(self.algorithm.policy)
                self.algorithm.prepare(labels, self._sampler, fresh)
        self._round += 1
        self._due = self.experience.updates_per_round if episodes else 0
        self._set_beta()

    def _set_beta(self) -> None:
        own = self.experience
        self.collector.beta = own.initial_beta * own.beta**self._round if own.expert == "scripted" else 0.0

    def _episodes(self) -> list[Episode]:
        """What is learned from: everything, or the steps that a person, or an expert that finishes, decided."""
        recorded = self.buffer.episodes
        if self.experience.expert == "person" or self.experience.expert_finishes:
            recorded = [part for episode in recorded for part in marked_parts(episode)]
        return [*self._prior, *recorded]

    def _make_sampler(self) -> tuple[Any, EpisodeList]:
        """A sampler of all data, with a random generator of this round, and the data."""
        env = self.collector.env
        labels = EpisodeList(self._episodes(), env.observation_space, env.action_space)
        sampler = self.algorithm.make_sampler(labels, self._seed + self._round, self.collector.device, WHOLE_CACHE)
        return sampler, labels

    def drop(self) -> int:
        """Keep the steps: they are labels of the next round."""
        self.collector.step_counts.clear()
        return 0

    def state_dict(self) -> dict[str, Any]:
        """The collector's state, the round and its sampler."""
        return {**self.collector.state_dict(), "labels": self._own_state()}

    def unknown_state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """States to save if the environments' state is unknown; the labels are kept."""
        unknown, _ = super().unknown_state()
        return {**unknown, "labels": self._own_state()}, self.buffer.state_dict()

    def _own_state(self) -> dict[str, Any]:
        sampler = self._sampler.state_dict() if self._sampler is not None and self._due else None
        return {"round": self._round, "due": self._due, "sampler": sampler, "metrics": self._metrics}

    def load_state_dict(self, state: dict[str, Any], buffer: dict[str, Any], same_rollout: bool) -> bool:
        """Restore the state; return False if the environments start new episodes."""
        if buffer:
            self.buffer.load_state_dict(buffer)
        own = state.get("labels")
        if own is not None:
            self._metrics, self._due = dict(own["metrics"]), own["due"]
            self._round = own["round"]
            self._set_beta()
            if own["sampler"] is not None:
                self._sampler, _ = self._make_sampler()
                self._sampler.load_state_dict(own["sampler"])
        return self.collector.load_state_dict(state)

    def export(self, run_dir: Path) -> None:
        """Write the labelled episodes as a dataset: executed actions, the expert's, and who acted."""
        env, episodes = self.collector.env, self.buffer.episodes
        if not self.experience.record or not episodes:
            return
        # A resumed run appends; one that was resumed from before the end of the recorded data starts another version.
        name = DATASETS[self.experience.has_expert]
        versions = (run_dir / name.format(number) for number in itertools.count())
        path = next(path for path in versions if recorded_episodes(path) <= len(episodes))
        files = MinariFiles(path, {"algorithm_name": self.algorithm.name})
        with Recording(path, files, append=True) as recording:
            recording.set_spaces(env.observation_space, env.action_space)
            for episode in episodes[recording.num_episodes :]:
                recording.add(episode)
        log.info("%d episodes (or parts of them) are in %s", recording.num_episodes, path)


def _read_prior(path: str, env: VectorEnv) -> list[Episode]:
    """Load the demonstrations that are imitated from the start."""
    dataset = load_dataset(path)
    advice = "give demonstrations of the environment that is trained in"
    check_spaces(env, dataset.observation_space, dataset.action_space, f"prior_data {path}", advice)
    episodes = [dataset.episode(index) for index in range(dataset.num_episodes)]
    dataset.close()
    return episodes
