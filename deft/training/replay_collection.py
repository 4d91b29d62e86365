"""Collection for algorithms that learn from a replay buffer: a few steps and a few updates in turn."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from deft import schema
from deft.algorithms.algorithm import Algorithm, Metrics
from deft.algorithms.experience import Replay
from deft.data.datasets import load_dataset
from deft.data.replay import no_interventions
from deft.data.tensors import Batch
from deft.data.transition_ring import TransitionRing
from deft.errors import InputError
from deft.models.action_scale import chunk_space
from deft.models.normalization import has_seen_data
from deft.runs.compute import set_precision
from deft.training.capture import CapturedUpdate
from deft.training.collection import Collection, Collector
from deft.training.evaluator import check_spaces
from deft.training.interventions import Interventions

log = logging.getLogger(__name__)


class ReplayCollection(Collection):
    """Writes every step into a replay buffer, and yields `updates_per_step` batches for each.

    Updates that are recorded as a CUDA graph are made while the environments take the next step: they are queued when
    its actions are known, and nothing waits for them before the actions after it. What was collected last is learned
    from with the next step, or by the resumed run.

    There is no batch before `learning_starts` env steps. The first `random_steps` of them take uniformly random
    actions. A policy that normalises observations and has seen none takes the statistics from them.
    """

    buffer: TransitionRing
    memory_advice = "a smaller buffer_size"

    def __init__(
        self,
        collector: Collector,
        algorithm: Any,
        experience: Replay,
        seed: int,
        fresh_policy: bool,
        planned_steps: int | None = None,
    ) -> None:
        self._planned_steps = planned_steps
        self.algorithm, self.experience = algorithm, experience
        if experience.n_step > 1 and collector.env.chunk_length > 1:
            raise InputError(
                f"n_step {experience.n_step}: with chunk_length {collector.env.chunk_length} a transition sums as many "
                "rewards as a chunk has steps; use --n_step 1"
            )
        how: dict[str, Any] = {"n_step": experience.n_step, "gamma": experience.gamma, "returns": experience.returns}
        ring = TransitionRing(experience.buffer_size, seed, collector.device, **how)
        ring.kept = experience.kept
        super().__init__(collector, ring)
        self._num_env_steps = 0
        self._due = 0.0
        wanted = experience.random_steps
        self._random_left = (experience.learning_starts if fresh_policy else 0) if wanted is None else wanted
        self._random = np.random.default_rng(seed)
        self._action_space = collector.env.action_space
        collector.explore = self._random_actions
        self._prior: TransitionRing | None = None
        self._interventions: Interventions | None = None
        marks = np.zeros(0, bool)
        if experience.prior_data is not None:
            self._prior, marks = _read_prior(experience, collector, ring.generator)
        elif experience.takeover:
            self._prior = _empty_prior(experience, collector, ring.generator)
        if experience.takeover:
            assert self._prior is not None
            self._interventions = Interventions(ring, self._prior, experience.intervention_weight, marks)
        self.generator = ring.generator
        on_gpu = collector.device.type == "cuda"
        if experience.capture == "on" and not on_gpu:
            raise InputError("capture: 'on' needs a GPU; use auto")
        captures = on_gpu and experience.capture != "off"
        self._captured: CapturedUpdate | None = None
        self._captured_warmup: CapturedUpdate | None = None
        self._layout = self._present_layout()  # of the buffers, when the updates were recorded
        if captures:
            self._reset_recordings()
        self._metrics: Metrics = {}
        self._is_beside = captures and type(collector) is Collector  # which steps the environments in this process
        if self._is_beside:
            collector.before_stepping = self._run_recorded
        set_precision(collector.device, experience.precision)

    def check_length(self, num_env_steps: int, planned: int) -> None:
        """Compare `learning_starts` with the env steps of this call and of the whole run."""
        starts = self.experience.learning_starts
        if planned < starts:
            raise InputError(
                f"learning_starts: {starts} is more than the {planned} env steps of the run, so it would make no "
                f"update; use at most {planned}, or raise total_timesteps"
            )
        if num_env_steps < starts:
            log.warning("the first %d env steps make no update: learning_starts is %d", num_env_steps, starts)

    def num_updates(self, rounds: int, num_env_steps: int) -> int:
        """`updates_per_step` for each env step after `learning_starts`."""
        return int(max(num_env_steps - self.experience.learning_starts, 0) * self.experience.updates_per_step)

    def start(self, rollout_steps: int, total_steps: int | None) -> None:
        """Reserve memory for the transitions of the run, if it is less than the buffer size.

        With chunks the steps that are left are not known; a buffer that has data then grows as it is written to.
        """
        left = None if total_steps is None else max(total_steps, 0) * self.collector.env.num_envs
        self.collector.steps_left = left
        if left is not None:
            self.buffer.reserve(left)
        elif self._planned_steps is not None and not len(self.buffer):
            self.buffer.reserve(self._planned_steps)

    def _reset_recordings(self) -> None:
        """Record the updates again, after the buffer moved in memory."""
        self._layout = self._present_layout()
        self._captured = CapturedUpdate(self.algorithm, self, self.experience.batch_size)
        self._captured_warmup = CapturedUpdate(self.algorithm, self, self.experience.batch_size)

    def _present_layout(self) -> tuple[int, int, bool]:
        """What a recorded update depends on: where buffers are in memory, and whether there is prior data."""
        prior = self._prior
        return self.buffer.num_moves, 0 if prior is None else prior.num_moves, bool(prior is not None and len(prior))

    def gather(self, num_vector_steps: int, stop: Callable[[], bool]) -> bool:
        """Collect `num_vector_steps` since the last update; return False if `stop` became true first."""
        wanted = num_vector_steps - self.pending
        sink = self.buffer if self._interventions is None else self._interventions
        return self.collector.collect(sink, wanted, stop) == wanted

    def batches(self, num_vector_steps: int) -> Iterator[Batch]:
        """Yield the batches that are due."""
        while self._due >= 1.0 and not self.algorithm.should_stop():
            self._due -= 1.0
            yield self.sample(self.experience.batch_size)

    def update(self, algorithm: Algorithm, num_vector_steps: int, stop: Callable[[], bool]) -> Metrics | None:
        """Make the updates that are due, by CUDA graph if there is one; return None if `stop` became true first."""
        if not self.in_update:  # else the steps have been counted
            self._count_due()
        if self._captured is None:
            metrics = super().update(algorithm, num_vector_steps, stop)
            self.in_update = num_vector_steps if self._due >= 1.0 else 0
            return None if self.in_update else metrics
        if not self._is_beside:
            self._run_recorded()
        return self._metrics

    @torch.inference_mode(False)  # in which the collector acts
    def _run_recorded(self) -> None:
        """Queue the updates that are due on the GPU, without waiting for them."""
        assert self._captured is not None
        assert self._captured_warmup is not None
        if self._present_layout() != self._layout:
            self._reset_recordings()
        period, warmup = self.algorithm.period, self.experience.captured_warmup
        while self._due >= period:
            version = self.algorithm.version
            if version >= warmup:
                count, self._metrics = self._captured.run()
            elif version + period <= warmup:  # all of them the critics' alone
                count, self._metrics = self._captured_warmup.run()
            else:
                count, self._metrics = 1, self.algorithm.step(self.sample(self.experience.batch_size))
            self._due -= count

    def _count_due(self) -> None:
        collected = sum(self.collector.step_counts)
        self._num_env_steps += collected
        if self._num_env_steps < self.experience.learning_starts or not len(self.buffer):
            return
        if self.algorithm.version == 0 and not has_seen_data(self.algorithm.policy):
            self.algorithm.observe({schema.OBSERVATION: block} for block in self.buffer.observations())
        if self.algorithm.version == 0:
            self.algorithm.observe_critic(self.buffer.observations())
        self._due += collected * self.experience.updates_per_step

    def sample(self, batch_size: int) -> Batch:
        """One batch, a part of it from the prior data."""
        if self._prior is None or not len(self._prior):
            return self.buffer.sample(batch_size)
        size = round(batch_size * self.experience.prior_fraction)
        return _side_by_side(self.buffer.sample(batch_size - size), self._prior.sample(size))

    def drop(self) -> int:
        """Skip the updates of the last steps; the steps stay in the buffer."""
        self.collector.step_counts.clear()
        return 0

    def state_dict(self) -> dict[str, Any]:
        """The collector's state, and how far the random steps and the updates due are."""
        return {**self.collector.state_dict(), "replay": self._own_state()}

    def unknown_state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """States to save if the environments' state is unknown; the buffer is kept."""
        unknown, _ = super().unknown_state()
        return {**unknown, "replay": self._own_state()}, self.buffer.state_dict()

    def load_state_dict(self, state: dict[str, Any], buffer: dict[str, Any], same_rollout: bool) -> bool:
        """Restore the state; return False if the environments start new episodes."""
        if self._planned_steps is not None:
            self.buffer.reserve(self._planned_steps)
        if buffer:
            self.buffer.load_state_dict(buffer)
        own = state.get("replay")
        if own is not None:
            self._num_env_steps, self._due = own["num_env_steps"], own["due"]
            self._random_left = own["random_left"]
            self._random.bit_generator.state = own["generator"]
            if self._interventions is not None:
                self._interventions.load_state_dict(own.get("interventions"))
        known = self.collector.load_state_dict(state)
        if not known:
            self.buffer.cut()
        return known

    def _own_state(self) -> dict[str, Any]:
        return {
            "num_env_steps": self._num_env_steps,
            "due": self._due,
            "random_left": self._random_left,
            "generator": self._random.bit_generator.state,
            "interventions": None if self._interventions is None else self._interventions.state_dict(),
        }

    def _random_actions(self) -> np.ndarray | None:
        """Uniform actions for all environments while random steps are left, else None."""
        if self._random_left <= 0:
            return None
        count = self.collector.env.num_envs
        self._random_left -= count * self.collector.env.chunk_length
        if isinstance(self._action_space, spaces.Discrete):
            return self._action_space.start + self._random.integers(self._action_space.n, size=count)
        assert isinstance(self._action_space, spaces.Box)
        shape = (count, *self._action_space.shape)
        return self._random.uniform(self._action_space.low, self._action_space.high, shape).astype(np.float32)


def _empty_prior(experience: Replay, collector: Collector, generator: torch.Generator, size: int = 0) -> TransitionRing:
    """Return a buffer for `size` transitions that batches are mixed with, and for those of a person."""
    how: dict[str, Any] = {"n_step": experience.n_step, "gamma": experience.gamma, "returns": experience.returns}
    most = size + (experience.buffer_size if experience.takeover else 0)
    ring = TransitionRing(most, device=collector.device, generator=generator, **how)
    ring.reserve(max(size, 1))
    return ring


def _read_prior(
    experience: Replay, collector: Collector, generator: torch.Generator
) -> tuple[TransitionRing, np.ndarray]:
    """Load the dataset that batches are mixed with into memory; return which transitions an expert decided, too."""
    assert experience.prior_data is not None
    dataset = load_dataset(experience.prior_data)
    where, advice = (
        f"prior_data {experience.prior_data}",
        "give data of the environment that is trained in (--rename_streams names streams alike)",
    )
    length = collector.env.chunk_length
    check_spaces(collector.env, dataset.observation_space, chunk_space(dataset.action_space, length), where, advice)
    size = len(dataset)
    if not size:
        raise InputError(f"prior_data: {experience.prior_data} has no transitions")
    ring = _empty_prior(experience, collector, generator, size)
    marks, is_marked = [], False
    for index in range(dataset.num_episodes):
        before = len(ring)
        ring.extend(episode := dataset.episode(index), length)
        is_sparse = len(ring) - before < len(episode)  # chunks of images start at every K-th step
        marks.append(episode.marks[:: length if is_sparse else 1])
        is_marked = is_marked or episode.intervention is not None
    dataset.close()
    all_marks = np.concatenate(marks)
    if experience.intervention_weight != 1.0 and (is_marked or not experience.takeover):
        if not is_marked:
            raise no_interventions()
        ring.weight_interventions(all_marks, experience.intervention_weight)
    return ring, all_marks


def _side_by_side(first: Batch, second: Batch) -> Batch:
    """Concatenate two batches; keys that only one of them has are left out."""
    merged: Batch = {}
    for key, value in first.items():
        if key not in second:
            continue
        if isinstance(value, Tensor):
            merged[key] = torch.cat([value, second[key]])
        else:
            merged[key] = {name: torch.cat([stream, second[key][name]]) for name, stream in value.items()}
    return merged
