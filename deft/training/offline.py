"""The offline loop: draw a batch of a dataset, update. One for all offline algorithms.

Built by `deft.training.offline_run` from a config, and by `IQLTrainer` and its siblings.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from deft.algorithms.offline import OfflineAlgorithm
from deft.config.settings import OfflineTrainerConfig
from deft.errors import InputError, RunError
from deft.evaluation.rollouts import merge_results, num_played
from deft.models.policy import Policy, members_of
from deft.runs import checkpoint
from deft.runs.compute import set_precision
from deft.runs.metric_ranges import OFFLINE_RANGES, RangeWatch
from deft.runs.random_state import process_seed
from deft.training.capture import CapturedUpdate, Sampler
from deft.training.evaluator import Evaluator
from deft.training.lifecycle import RunSpec
from deft.training.loop import Intervals, Metrics, crossed, floats
from deft.training.policy_loop import PolicyLoop
from deft.training.validation import Validation, check_held_out

log = logging.getLogger(__name__)
LOOK_INTERVAL = 256  # updates between looks for evaluations that ended in another process


def _no_score(mean_return: float) -> float | None:
    return None


@dataclasses.dataclass
class OfflineSpec(RunSpec):
    """What an offline run has beside policy, algorithm and sampler.

    `score` maps a mean return to the normalised score. `fingerprint` identifies the dataset of a run that is resumed.
    """

    evaluator: Evaluator | None = None
    score: Callable[[float], float | None] = _no_score
    fingerprint: str | None = None
    check_weights: Callable[[Mapping[str, Tensor]], None] | None = None
    validation: Validation | None = None


class OfflineTrainer(PolicyLoop):
    """Trains one policy by one algorithm on batches of one dataset.

    An epoch is as many updates as one pass over the dataset takes (batches are drawn at random), or
    `updates_per_epoch`. Keywords beyond the named ones are fields of `OfflineSpec` (`output_dir`, `seed`, …) and of
    `OfflineTrainerConfig` (`num_epochs`, `eval_freq`, …).
    """

    stop_interval: ClassVar[int] = 20
    state_keys = (
        "algorithm_name", "algorithm", "num_updates", "updates_per_epoch", "sampler", "transitions", "fingerprint",
        "log", "random",
    )  # fmt: skip
    cures = "lower learning_rate, or look at the dataset's rewards"
    algorithm: OfflineAlgorithm

    def __init__(
        self,
        policy: Policy,
        algorithm: OfflineAlgorithm,
        sampler: Sampler,
        *,
        spec: OfflineSpec | None = None,
        **settings: Any,
    ) -> None:
        self.spec = spec = OfflineSpec.take(spec, settings)
        if spec.output_dir is None:
            raise InputError("output_dir: missing; name the run directory")
        self.settings = OfflineTrainerConfig(**settings)
        super().__init__(policy, algorithm, spec, Path(spec.output_dir))
        self.sampler = sampler
        self.num_transitions = len(sampler)  # of all processes
        processes = self.processes
        if processes.count > 1:
            sampler.shard(processes.rank, processes.count)
            sampler.generator.manual_seed(process_seed(spec.seed, processes.rank))
        self.num_updates = 0
        self.evaluator = spec.evaluator if processes.is_first else None
        self.batch_size = algorithm.settings.batch_size
        one_pass = math.ceil(self.num_transitions / (self.batch_size * processes.count))
        self.updates_per_epoch = self.settings.updates_per_epoch or one_pass
        self._watch = RangeWatch(OFFLINE_RANGES)
        set_precision(self.device, algorithm.settings.precision)
        self._captured = self._capture()

    def _capture(self) -> CapturedUpdate | None:
        """Return the update as a CUDA graph, where it can be recorded; collectives of several processes cannot."""
        can_capture = self.device.type == "cuda" and self.algorithm.capturable and self.sampler.capturable
        can_capture &= self.spec.processes.count == 1
        if self.settings.capture == "on" and not can_capture:
            raise InputError("capture: 'on' needs a GPU and a dataset in memory; use auto")
        if not can_capture or self.settings.capture == "off":
            return None
        return CapturedUpdate(self.algorithm, self.sampler, self.batch_size)

    @property
    def global_step(self) -> int:
        """Gradient updates so far."""
        return self.num_updates

    @property
    def epoch(self) -> int:
        """Complete epochs so far."""
        return self.num_updates // self.updates_per_epoch

    @property
    def intervals(self) -> Intervals:
        """As in `OfflineTrainerConfig`, in updates."""
        own, epoch = self.settings, self.updates_per_epoch
        return Intervals(own.log_freq, own.eval_freq * epoch, own.save_freq * epoch, own.keep_checkpoints)

    def train(self, num_epochs: int | None = None, evaluates_last: bool = False) -> dict[str, Any]:
        """Train to `num_epochs` epochs in all, and return a summary; see `Run.execute`."""
        epochs = self.settings.num_epochs if num_epochs is None else num_epochs
        total = OfflineTrainerConfig(num_epochs=epochs).num_epochs * self.updates_per_epoch
        return self.run.execute(total, evaluates_last)

    # -- an iteration --------------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Log the length of training, and create the evaluation environment: what prevents it is known before."""
        log.info(
            "%d transitions, batch size %d: %d updates per epoch, %d epochs, %d updates in all",
            self.num_transitions,
            self.batch_size * self.processes.count,
            self.updates_per_epoch,
            self.run.total // self.updates_per_epoch,
            self.run.total,
        )
        if self.num_updates == 0:
            self.algorithm.check_updates(self.run.total)
        if not self.is_evaluated and self.settings.eval_freq:
            log.warning("not evaluated: there is no environment; give one with --env")
        if self.evaluator is not None and self.settings.eval_freq and not self.evaluator.in_background:
            self.evaluator.env()

    @property
    def is_over(self) -> bool:
        """Whether all updates are done, or the validation loss ends training early."""
        if super().is_over:
            return True
        validation = self.spec.validation
        if validation is None or not validation.is_over:
            return False
        log.info(
            "early_stopping: val_loss has not fallen below %.4g for %d epochs; stopped at update %d",
            validation.best,
            validation.since,
            self.num_updates,
        )
        return True

    def step(self) -> Metrics:
        """Update on a batch, or as often as a recorded CUDA graph does."""
        self.algorithm.progress = self.progress
        if self._captured is not None and self.num_updates + self.algorithm.period <= self.run.total:
            count, metrics = self._captured.run()
        else:
            self.algorithm.schedule()
            count, metrics = 1, self.algorithm.step(self.sampler.sample(self.batch_size))
        self.num_updates += count
        return metrics

    def is_logged(self, previous: int) -> bool:
        """Every `log_freq` updates, and at the end."""
        return super().is_logged(previous) or self.num_updates == self.run.total

    def further_metrics(self, previous: int, logs: bool) -> dict[str, float]:
        """Validate at the end of an epoch."""
        ends = crossed(previous, self.num_updates, self.updates_per_epoch) or self.num_updates == self.run.total
        return self.spec.validation.run() if self.spec.validation is not None and ends else {}

    def logged(self, metrics: Metrics) -> Metrics:
        """The metrics, with the epoch."""
        return {"epoch": self.num_updates / self.updates_per_epoch, **metrics}

    def check_metrics(self, metrics: Metrics) -> None:
        """Raise an error if a metric is not finite, and warn of those outside their usual range."""
        values = floats(metrics)
        bad = [name for name, value in values.items() if not math.isfinite(value)]
        if bad:
            raise RunError(
                f"{bad[0]} is no longer finite at update {self.num_updates}: {self.cures}; any checkpoint saved before "
                "is good"
            )
        self._watch.check(self.num_updates, values)

    def end(self) -> None:
        """Gather sharded parameters, for an evaluation after training."""
        self.gather_weights()

    def summary(self) -> dict[str, Any]:
        """Return what a command reports at the end."""
        summary = {**super().summary(), **self.run.last_metrics}
        best = summary["best_reward"]
        if best is not None and (score := self.spec.score(best)) is not None:
            summary["best_normalized_score"] = score
        return summary

    def counts(self) -> dict[str, Any]:
        """Return updates and epochs."""
        return {"updates": self.num_updates, "epochs": self.num_updates / self.updates_per_epoch}

    # -- evaluation ----------------------------------------------------------------------------------------------------

    @property
    def is_evaluated(self) -> bool:
        """Whether there is an environment to evaluate in; the first process does."""
        return self.evaluator is not None or self.spec.evaluator is not None

    @property
    def is_best_by_validation(self) -> bool:
        """Whether the weights are the best by `val_loss`, which decides where no environment does."""
        is_played = self.is_evaluated and self.settings.eval_freq > 0
        return self.spec.validation is not None and self.spec.validation.chooses_best and not is_played

    def evaluate(self, num_episodes: int | None = None, video: Path | None = None) -> dict[str, Any]:
        """Return the mean return over whole episodes (`eval_deterministic`), with the normalised score if known."""
        if self.evaluator is None:
            raise InputError("evaluate: the dataset names no environment; give one (--env, or env=)")
        episodes = self.settings.eval_episodes if num_episodes is None else num_episodes
        return merge_results(self.evaluator.evaluate(members_of(self.acting), episodes, None, video), self.spec.score)

    def start_evaluation(self, video: Path | None) -> list[tuple[int, dict[str, Any]]]:
        """Evaluate now, or in another process: then the results come later."""
        assert self.evaluator is not None
        policies, episodes = members_of(self.acting), self.settings.eval_episodes
        with self.run.evaluation(sum(num_played(policy, episodes) for policy in policies)) as watch:
            return self._merged(self.evaluator.start(self.num_updates, policies, episodes, watch))

    def finished_evaluations(self, wait: bool = False) -> list[tuple[int, dict[str, Any]]]:
        """Return what another process has found."""
        if self.evaluator is None or not (wait or self.num_updates % LOOK_INTERVAL < self.algorithm.period):
            return []
        return self._merged(self.evaluator.finished(wait, self.run.stop))

    def _merged(self, found: list[tuple[int, list[dict[str, Any]]]]) -> list[tuple[int, dict[str, Any]]]:
        """Return each evaluation's results over the seeds that are trained at once."""
        return [(step, merge_results(results, self.spec.score)) for step, results in found]

    @property
    def pending_evaluations(self) -> Iterable[int]:
        """Steps that another process still evaluates."""
        return () if self.evaluator is None else self.evaluator.pending

    @contextlib.contextmanager
    def evaluation_weights(self) -> Iterator[None]:
        """Gather sharded parameters, and free them if training continues."""
        self.gather_weights()
        yield
        if not self.is_over:
            self.free_weights()

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def check_finite(self, state: dict[str, Any]) -> None:
        """Raise an error if the policy's weights or the algorithm's state are not finite."""
        super().check_finite(state)
        if not _is_finite(state["algorithm"]):
            raise self.not_finite()

    def state_dict(self, after_failure: bool = False) -> dict[str, Any]:
        """Return algorithm, sampler, validation and counters, and what identifies the dataset."""
        validation = self.spec.validation
        return {
            "algorithm_name": self.algorithm.name,
            "algorithm": self.algorithm.state_dict(),
            "num_updates": self.num_updates,
            "updates_per_epoch": self.updates_per_epoch,
            "sampler": self.sampler.state_dict(),
            "transitions": self.num_transitions,
            "fingerprint": self.spec.fingerprint,
            "validation": None if validation is None else validation.state_dict(),
        }

    def process_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """The sampler of this process."""
        return {"sampler": state["sampler"]}

    def own_state(self, state: dict[str, Any], part: dict[str, Any], saved: int) -> dict[str, Any]:
        """Return the state of this process; with another number of processes each draws new batches."""
        return state | part if saved == self.processes.count else {**state, "random": None}

    def load_state_dict(self, state: dict[str, Any], folder: Path) -> None:
        """Load weights, algorithm, sampler and counters, in the middle of an epoch too."""
        self.check_state(state, folder)
        validation = self.spec.validation
        check_held_out(state.get("validation"), [] if validation is None else validation.held_out)
        self._check_dataset(state, folder)
        weights = checkpoint.load_part(folder, checkpoint.MODEL)
        checkpoint.check_weights(self.policy, weights, folder / checkpoint.MODEL)
        if self.spec.check_weights is not None:
            self.spec.check_weights(weights)
        self.algorithm.check_weights(weights)
        checkpoint.load_weights(self.policy, weights, folder / checkpoint.MODEL)
        self.algorithm.load_state_dict(state["algorithm"])
        self.algorithm.resumed()
        self.num_updates = state["num_updates"]
        if state["random"] is None:  # another number of processes
            self.sampler.generator.manual_seed(process_seed(self.seed + self.num_updates, self.processes.rank))
        else:
            self.sampler.load_state_dict(state["sampler"])
        if validation is not None:
            validation.load_state_dict(state["validation"])
        if state["updates_per_epoch"] != self.updates_per_epoch:
            log.warning(
                "an epoch is now %d updates, not %d: num_epochs counts all %d that were made so far in these",
                self.updates_per_epoch,
                state["updates_per_epoch"],
                self.num_updates,
            )

    def _check_dataset(self, state: dict[str, Any], folder: Path) -> None:
        count = state["transitions"]
        if count != self.num_transitions or state["fingerprint"] != self.spec.fingerprint:
            differs = f"this one has {self.num_transitions}" if count != self.num_transitions else "this one has others"
            raise InputError(
                f"{folder}: trained on another dataset ({count} transitions; {differs}): resume with the same, or "
                "start from its weights with --model-path"
            )

    def close(self) -> None:
        """Free the evaluation environment, and destroy the process group."""
        super().close()
        if self.evaluator is not None:
            self.evaluator.close()


def _is_finite(state: Any) -> bool:
    """Whether every number in a nested state of tensors is finite."""
    if isinstance(state, torch.Tensor):
        return bool(torch.isfinite(state).all())
    return all(_is_finite(value) for value in state.values()) if isinstance(state, Mapping) else True
