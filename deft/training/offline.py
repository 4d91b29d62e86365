"""The loop on a dataset: draw a batch, update, and now and then log, evaluate and save. One for all offline algorithms.

Made by `deft.training.offline_run` from a config, and by `IQLTrainer` and its siblings.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from deft.algorithms.algorithm import Metrics
from deft.algorithms.offline import OfflineAlgorithm
from deft.config.settings import LoggingConfig, OfflineTrainerConfig
from deft.data.datasets.dataset import same_fingerprint
from deft.errors import InputError, RunError, Stopped
from deft.evaluation.rollouts import film_episodes, merge_results, num_played
from deft.models.policy import Policy, members_of
from deft.runs import checkpoint, sharding
from deft.runs.compute import is_small, threads_for
from deft.runs.intervals import crossed
from deft.runs.logging import RunLogger, best_logged, logged_evaluations
from deft.runs.metric_ranges import OFFLINE_RANGES, RangeWatch
from deft.runs.policy_spaces import PolicySpaces
from deft.runs.precision import set_precision
from deft.runs.processes import Processes, SilentLogger
from deft.runs.random_state import get_random_state, seed_everything, set_random_state
from deft.runs.seeds import process_seed
from deft.runs.signals import StopSignal, never
from deft.training.capture import CapturedUpdate, Sampler
from deft.training.evaluator import Evaluator
from deft.training.validation import Validation, check_held_out

log = logging.getLogger(__name__)
STOP_INTERVAL = 20  # updates between questions of several processes to each other whether to stop
STATE_KEYS = (
    "algorithm_name", "algorithm", "num_updates", "updates_per_epoch", "best_reward", "sampler", "transitions",
    "fingerprint", "log", "random",
)  # fmt: skip


class OfflineTrainer:
    """Runs one algorithm on batches of one dataset; owns the loop and nothing else.

    An epoch is one pass over the dataset's transitions in number (batches are drawn at random), or
    `updates_per_epoch`. Keywords beyond the named ones are those of `OfflineTrainerConfig`. `acting` is evaluated in
    place of a policy whose weights are shared out.
    """

    def __init__(
        self,
        policy: Policy,
        algorithm: OfflineAlgorithm,
        sampler: Sampler,
        *,
        evaluator: Evaluator | None = None,
        score: Callable[[float], float | None] | None = None,
        fingerprint: str | None = None,
        video_env: Callable[[], Any] | None = None,
        output_dir: str | Path,
        logging_config: LoggingConfig | None = None,
        seed: int = 0,
        threads: int | None = None,
        run_config: dict[str, Any] | None = None,
        on_start: Callable[[], None] | None = None,
        processes: Processes | None = None,
        acting: sharding.WholeCopy | None = None,
        check_weights: Callable[[Mapping[str, torch.Tensor]], None] | None = None,
        spaces: PolicySpaces | None = None,
        validation: Validation | None = None,
        **settings: Any,
    ) -> None:
        self.settings = OfflineTrainerConfig(**settings)
        self.policy, self.algorithm, self.sampler = policy, algorithm, sampler
        self._whole = acting
        self.seed = seed
        self.run_dir = Path(output_dir)
        self.logging_config = logging_config or LoggingConfig()
        self.device = next(iter(policy.parameters())).device
        self.processes = processes or Processes()
        self.processes.open(self.device)
        self.num_transitions = len(sampler)  # of all processes
        if self.processes.count > 1:
            algorithm.share(self.processes)
            sampler.shard(self.processes.rank, self.processes.count)
            sampler.generator.manual_seed(process_seed(seed, self.processes.rank))
        self.threads = threads_for(threads, policy, algorithm.settings.batch_size, cores=self.processes.cores)
        self.num_updates = 0
        self.best_reward = -math.inf
        self.last_evaluation: dict[str, Any] = {}  # what it found; empty in all processes but the first
        self._evaluated_at = -1  # updates
        self._owes_evaluation = False  # the run was saved for one, and ended before it was complete
        self._stop: Callable[[], bool] = never
        self.evaluator = evaluator if self.processes.is_first else None
        self._evaluated_elsewhere = evaluator is not None and not self.processes.is_first
        self._score = score or (lambda _: None)
        self._fingerprint = fingerprint
        self._spaces = spaces
        self._video_env = video_env
        self._run_config, self._on_start, self._check_weights = run_config, on_start, check_weights
        self._loaded = False
        self._log: RunLogger | None = None
        self._log_state: dict[str, Any] | None = None
        self.early_records: list[logging.LogRecord] = []  # logged while it was built, for the run's log file
        self._random_state: dict[str, Any] | None = None
        self._last_metrics: dict[str, float] = {}
        self._watch = RangeWatch(OFFLINE_RANGES)
        self._validation = validation
        self.batch_size = algorithm.settings.batch_size
        device = self.device
        self._captured: CapturedUpdate | None = None
        self._saved_step: int | None = None
        self._total = 0
        set_precision(device, algorithm.settings.precision)
        can_capture = device.type == "cuda" and algorithm.capturable and sampler.capturable
        can_capture &= self.processes.count == 1  # what processes say to each other is not recorded
        if self.settings.capture == "on" and not can_capture:
            raise InputError("capture: 'on' needs a GPU and a dataset in memory; use auto")
        if can_capture and self.settings.capture != "off":
            self._captured = CapturedUpdate(algorithm, sampler, self.batch_size)

    @property
    def acting(self) -> Policy:
        """The policy that is evaluated: the one that learns, or its copy with whole weights."""
        return self.policy if self._whole is None else self._whole.policy

    @property
    def is_evaluated(self) -> bool:
        """Whether the run is evaluated, by this process or by the first."""
        return self.evaluator is not None or self._evaluated_elsewhere

    @property
    def updates_per_epoch(self) -> int:
        """Gradient updates of an epoch."""
        each = self.settings.updates_per_epoch
        return each or math.ceil(self.num_transitions / (self.batch_size * self.processes.count))

    @property
    def epoch(self) -> int:
        """Whole epochs trained."""
        return self.num_updates // self.updates_per_epoch

    def train(self, num_epochs: int | None = None, evaluates_last: bool = False) -> dict[str, Any]:
        """Train to `num_epochs` epochs in all, and return a summary.

        A signal (Ctrl-C, SIGTERM, SIGHUP, SIGUSR1) stops between two updates, or two steps of an evaluation; the run is
        saved, and so it is when it fails. `evaluates_last`: evaluate when all updates are done, also between two
        periodic evaluations, so that the end can be the best.
        """
        epochs = self.settings.num_epochs if num_epochs is None else num_epochs
        total = OfflineTrainerConfig(num_epochs=epochs).num_epochs * self.updates_per_epoch
        self._total = total
        stop, started = StopSignal(), time.monotonic()
        self._stop = stop
        # oneDNN is what knows bf16; without it such products are emulated.
        small = is_small(self.policy) and self.algorithm.settings.precision != "bf16"
        threads = self.threads.applied(small)
        first = self.processes.is_first
        folder = checkpoint.folder_lock(self.run_dir) if first else contextlib.nullcontext()
        with stop, threads, folder, self._logging(total) as run_log:
            self._log = run_log
            try:
                self._start(total)
                if self.is_evaluated and self.processes.share(self._owes_evaluation):
                    self._save_and_evaluate(run_log)
                self._loop(total, stop, run_log)
                if evaluates_last and self._evaluated_at != self.num_updates and not self._stops(stop):
                    self._save_and_evaluate(run_log)
                self._save_once()
                self._take_evaluations(run_log, wait=True)
                if self._whole is not None:  # for an evaluation at the end
                    self._whole.take()
            except BaseException as error:
                self._save_after_failure(error)
                raise
            finally:
                self._log_state = run_log.state_dict()
                self._log, self._stop = None, never
            summary = self._summary(time.monotonic() - started)
            if stop():
                log.warning("stopped by %s at %d updates", stop.received.name, self.num_updates)  # type: ignore[union-attr]
        stop.reraise()
        return summary

    def _loop(self, total: int, stop: StopSignal, run_log: RunLogger) -> None:
        """Update, and after it what is due."""
        while self.num_updates < total and not self._stops(stop) and not self._is_validated_enough():
            self.threads.begin()
            self.algorithm.progress = self.num_updates / total
            previous = self.num_updates
            if self._captured is not None and self.num_updates + self.algorithm.period <= total:
                count, metrics = self._captured.run()
            else:
                self.algorithm.schedule()
                count, metrics = 1, self.algorithm.step(self.sampler.sample(self.batch_size))
            self.num_updates += count
            self.threads.tick(count)
            self._after_update(previous, metrics, run_log)

    def _stops(self, stop: StopSignal) -> bool:
        """Whether the run is to end here; several processes ask each other only now and then."""
        if self.processes.count == 1:
            return stop()
        asks = self.num_updates % STOP_INTERVAL == 0
        return asks and bool(self.processes.largest(float(stop()), self.device))

    def _after_update(self, previous: int, metrics: Metrics, run_log: RunLogger) -> None:
        """Log, evaluate and save what is due; an update may be several, so crossings count, not multiples."""
        step, settings, epoch = self.num_updates, self.settings, self.updates_per_epoch
        validated = {}
        if self._validation is not None and (crossed(previous, step, epoch) or step == self._total):
            validated = self._validation.run()
        if crossed(previous, step, settings.log_freq) or step == self._total or validated:
            values = {name: float(value) for name, value in metrics.items()} | validated
            run_log.log_metrics(step, {"epoch": step / epoch, **values})
            self._last_metrics = values
            bad = [name for name, value in values.items() if not math.isfinite(value)]
            if bad:
                raise RunError(
                    f"{bad[0]} is no longer finite at update {step}: lower learning_rate, or look at the dataset's "
                    "rewards; any checkpoint saved before is good"
                )
            self._watch.check(step, values)
        if self.is_evaluated and crossed(previous, step, settings.eval_freq * epoch):
            self._save_and_evaluate(run_log)
        chosen = bool(validated) and self._validation_chooses()
        if chosen or crossed(previous, step, settings.save_freq * epoch):
            self._save_once()
            if chosen and self.processes.is_first:
                checkpoint.mark_best(self.run_dir, self.run_dir / f"checkpoint-{step}")
            self._prune()
        if step % 256 < step - previous:
            self._take_evaluations(run_log)
        run_log.progress(step)

    def _validation_chooses(self) -> bool:
        """Whether these weights are the best by `val_loss`, which counts where no environment evaluates."""
        is_played = self.is_evaluated and self.settings.eval_freq > 0
        return self._validation is not None and self._validation.chooses_best and not is_played

    def _is_validated_enough(self) -> bool:
        if self._validation is None or not self._validation.is_over:
            return False
        log.info(
            "early_stopping: val_loss has not fallen below %.4g for %d epochs; stopped at update %d",
            self._validation.best,
            self._validation.since,
            self.num_updates,
        )
        return True

    # -- evaluation ----------------------------------------------------------------------------------------------------

    def evaluate(self, num_episodes: int | None = None, video: Path | None = None) -> dict[str, Any]:
        """Mean return over whole episodes (`eval_deterministic`), with the normalised score where there is one."""
        if self.evaluator is None:
            raise InputError("evaluate: the dataset names no environment; give one (--env, or env=)")
        episodes = self.settings.eval_episodes if num_episodes is None else num_episodes
        results = self.evaluator.evaluate(members_of(self.acting), episodes)
        summary = merge_results(results, self._score)
        if video is not None:
            if self._video_env is None:
                raise InputError("video: there is no environment to film")
            first, deterministic = members_of(self.acting)[0], self.settings.eval_deterministic
            summary["video"] = str(film_episodes(first, self._video_env(), video, 1, self.seed, deterministic))
        return summary

    def _save_and_evaluate(self, run_log: RunLogger) -> None:
        """Save, so that nothing of the evaluation can lose what was learned; then evaluate in the first process."""
        self._owes_evaluation = True  # the checkpoint says so, until the metrics hold the result
        self._save_once()
        if self._whole is not None:
            self._whole.take()
        if self.evaluator is not None:
            with contextlib.suppress(Stopped):
                self._evaluate_now(run_log)
                self._owes_evaluation = False
            self._prune()
        if self._whole is not None:
            self._whole.free()
        self._evaluated_at, self._owes_evaluation = self.processes.share((self._evaluated_at, self._owes_evaluation))

    def _evaluate_now(self, run_log: RunLogger) -> None:
        assert self.evaluator is not None
        policies, episodes = members_of(self.acting), self.settings.eval_episodes
        with run_log.evaluation(sum(num_played(policy, episodes) for policy in policies), self._stop) as watch:
            found = self.evaluator.start(self.num_updates, policies, episodes, watch)
        self._evaluated_at = self.num_updates
        for step, results in found:
            self._record_evaluation(step, results, run_log)

    def _take_evaluations(self, run_log: RunLogger, wait: bool = False) -> None:
        if self.evaluator is not None:
            finished = self.evaluator.finished(wait, self._stop)
            for step, results in finished:
                self._record_evaluation(step, results, run_log)
            if finished:  # not between two that came back together: the second may be the best
                self._prune()

    def _record_evaluation(self, step: int, results: list[dict[str, Any]], run_log: RunLogger) -> None:
        self.last_evaluation = merged = merge_results(results, self._score)
        run_log.log_evaluation(step, merged)
        score = merged.get("normalized_score")
        log.info(
            "evaluation at %d updates (epoch %d): mean_reward %.4g ± %.3g%s (actions: %s)",
            step,
            step // self.updates_per_epoch,
            merged["mean_reward"],
            merged["std_reward"],
            "" if score is None else f", normalized_score {score:.1f}",
            merged["action_selection"],
        )
        # On a tie the later weights, which saw more.
        if merged["mean_reward"] >= self.best_reward or not (self.run_dir / checkpoint.BEST).exists():
            self.best_reward = merged["mean_reward"]
            folder = self.run_dir / f"checkpoint-{step}"
            if folder.exists():
                checkpoint.mark_best(self.run_dir, folder)

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def _prune(self) -> None:
        if not self.processes.is_first:
            return
        pending = [] if self.evaluator is None else self.evaluator.pending
        checkpoint.prune_checkpoints(self.run_dir, self.settings.keep_checkpoints, self.num_updates, pending)

    def _save_once(self) -> None:
        """Save, unless a checkpoint of these updates is there."""
        is_there = (self.run_dir / f"checkpoint-{self.num_updates}").exists()  # not where the folder was removed
        if self._saved_step != self.num_updates or not self.processes.share(is_there):
            self.save()

    def save(self, path: str | Path | None = None, alone: bool = False) -> Path:
        """Write a checkpoint into the run folder, or its content into `path`; `alone`: other processes are gone."""
        learned = self.algorithm.state_dict()
        finite = sharding.are_finite(self.policy, self.processes, self.device) and _is_finite(learned)
        if not finite:
            raise RunError(
                f"the networks are no longer finite after {self.num_updates} updates, so nothing was saved: lower "
                "learning_rate, or look at the dataset's rewards; any checkpoint saved before is good"
            )
        shared_out = self._whole is not None  # all processes give their part
        weights = sharding.whole_weights(self.policy) if shared_out else self.policy.state_dict()
        count = 1 if alone else self.processes.count
        place = self.run_dir if path is None else Path(path).parent
        if count > 1:
            place.mkdir(parents=True, exist_ok=True)
            if not self.processes.is_first:
                part = {"sampler": self.sampler.state_dict(), "random": get_random_state()}
                checkpoint.write_process_part(place, self.num_updates, self.processes.rank, part)
            self.processes.wait()
            if not self.processes.is_first:
                self.processes.wait()
                self._saved_step = self.num_updates
                return place / f"checkpoint-{self.num_updates}"
        if self._log is not None:
            self._log.flush()
        state = {
            "algorithm_name": self.algorithm.name,
            "algorithm": learned,
            "num_updates": self.num_updates,
            "updates_per_epoch": self.updates_per_epoch,
            "best_reward": self.best_reward,
            "owes_evaluation": self._owes_evaluation,
            "sampler": self.sampler.state_dict(),
            "transitions": self.num_transitions,
            "processes": count,
            "threads": self.threads.state_dict(),
            "fingerprint": self._fingerprint,
            "log": self._log.state_dict() if self._log is not None else self._log_state or {"window": []},
            "random": get_random_state(),
            "config": self._run_config,
            "validation": None if self._validation is None else self._validation.state_dict(),
        }
        weights = {name: value.detach().cpu() for name, value in weights.items()}
        folder = checkpoint.save_checkpoint(
            place,
            self.num_updates,
            weights,
            state,
            self._last_metrics,
            name=None if path is None else Path(path).name,
            write_more=partial(checkpoint.move_process_parts, place, self.num_updates, count),
            spaces=self._spaces,
        )
        if count > 1:
            self.processes.wait()
        if path is None:
            self._saved_step = self.num_updates
        return folder

    def load(self, path: str | Path) -> None:
        """Go on from a checkpoint (or the latest of a run folder), in the middle of an epoch too."""
        folder = checkpoint.find_checkpoint(path)
        state = checkpoint.load_training_state(folder)
        missing = [name for name in STATE_KEYS if name not in state]
        if missing:
            raise InputError(f"{folder}: its training state lacks {', '.join(missing)}; it is not of an offline run")
        if state["algorithm_name"] != self.algorithm.name:
            raise InputError(f"{folder}: a checkpoint of {state['algorithm_name']}, not of {self.algorithm.name}")
        check_held_out(state.get("validation"), [] if self._validation is None else self._validation.held_out)
        count = state["transitions"]
        if count != self.num_transitions or not same_fingerprint(state["fingerprint"], self._fingerprint):
            differs = f"this one has {self.num_transitions}" if count != self.num_transitions else "this one has others"
            raise InputError(
                f"{folder}: trained on another dataset ({count} transitions; {differs}): resume with the same, or "
                "start from its weights with --model-path"
            )
        weights = checkpoint.load_part(folder, checkpoint.MODEL)
        checkpoint.check_weights(self.policy, weights, folder / checkpoint.MODEL)
        if self._check_weights is not None:
            self._check_weights(weights)
        self.algorithm.check_weights(weights)
        checkpoint.load_weights(self.policy, weights, folder / checkpoint.MODEL)
        self.algorithm.load_state_dict(state["algorithm"])
        self.algorithm.resumed()
        self._load_sampler(folder, state)
        if self._validation is not None:
            self._validation.load_state_dict(state["validation"])
        self.num_updates = state["num_updates"]
        self.threads.load_state_dict(state.get("threads"))
        # An evaluation beside the training may have come back after the checkpoint was written.
        evaluations = logged_evaluations(folder.parent, self.num_updates)
        is_own = folder.parent.resolve() == self.run_dir.resolve()  # another folder has its own best
        if is_own:
            self.best_reward = max(state["best_reward"], best_logged(folder.parent, self.num_updates))
        is_logged = bool(evaluations) and evaluations[-1]["step"] == self.num_updates
        self._owes_evaluation = state.get("owes_evaluation", False) and not is_logged
        is_same = _evaluates(state.get("config")) == _evaluates(self._run_config)
        if is_own and is_same and is_logged:
            self._evaluated_at = self.num_updates
            own = ("type", "step", "time")  # of the line
            self.last_evaluation = {name: value for name, value in evaluations[-1].items() if name not in own}
        if state["updates_per_epoch"] != self.updates_per_epoch:
            log.warning(
                "an epoch is now %d updates, not %d: num_epochs counts all %d that were made so far in these",
                self.updates_per_epoch,
                state["updates_per_epoch"],
                self.num_updates,
            )
        self._log_state = state["log"]
        self._loaded = True

    def _load_sampler(self, folder: Path, state: dict[str, Any]) -> None:
        """Go on with the batches; of a run with another number of processes, with new ones of each one's share."""
        saved, own = state.get("processes", 1), state
        if saved != self.processes.count:
            if self.processes.is_first:
                now = self.processes.count
                log.warning("the run had %d processes, now %d: it goes on with other batches", saved, now)
            seed = process_seed(self.seed + state["num_updates"], self.processes.rank)
            self.sampler.generator.manual_seed(seed)
            seed_everything(seed)
            return
        if not self.processes.is_first:
            own = checkpoint.load_process_part(folder, self.processes.rank) or state
        self.sampler.load_state_dict(own["sampler"])
        self._random_state = own["random"]

    def close(self) -> None:
        """Free the evaluation's environment."""
        self.processes.close()
        if self.evaluator is not None:
            self.evaluator.close()

    def _start(self, total: int) -> None:
        if self.num_updates >= total:
            log.warning("nothing to do: the run has %d of %d updates", self.num_updates, total)
        log.info(
            "%d transitions, %d in a batch: %d updates per epoch, %d epochs, %d updates in all",
            self.num_transitions,
            self.batch_size * self.processes.count,
            self.updates_per_epoch,
            total // self.updates_per_epoch,
            total,
        )
        if not self.is_evaluated and self.settings.eval_freq:
            log.warning("not evaluated: there is no environment to do it in; give one with --env")
        if self.evaluator is not None and self.settings.eval_freq and not self.evaluator.beside:
            self.evaluator.env()  # what keeps it from being made is better known before training than after
        if self._random_state is not None:
            set_random_state(self._random_state)
            self._random_state = None
        elif self.num_updates == 0:
            seed_everything(process_seed(self.seed, self.processes.rank))
        self.processes.equalize(self.policy)
        for part in vars(self.algorithm).values():
            if isinstance(part, torch.nn.Module) and part is not self.policy:
                self.processes.equalize(part)

    def _logging(self, total: int) -> RunLogger:
        if not self.processes.is_first:
            return SilentLogger()  # type: ignore[return-value]
        checkpoint.clean_temporary(self.run_dir)
        if self._on_start is not None and (self.num_updates < total or not checkpoint.list_checkpoints(self.run_dir)):
            self._on_start()
        if self.num_updates == 0 and not self._loaded and checkpoint.list_checkpoints(self.run_dir):
            raise InputError(
                f"output_dir: {self.run_dir} already holds a run; load() it to go on, or use another folder"
            )
        run_log = RunLogger(
            self.run_dir,
            self.logging_config,
            total,
            self.num_updates,
            self._run_config,
            "updates",
            write_start=self._on_start,
            early_records=self.early_records,
        )
        if self._log_state is not None:
            run_log.load_state_dict(self._log_state)
        return run_log

    def _save_after_failure(self, error: BaseException) -> None:
        """Keep what was learned since the latest checkpoint."""
        if self.num_updates == 0 or self._saved_step == self.num_updates or not self.processes.is_first:
            return
        if self._whole is not None:
            log.warning(sharding.NOT_SAVED)
            return
        run_log, self._log = self._log, None  # it may be what failed
        try:
            if run_log is not None:
                run_log.restore_folder()
            folder = self.save(alone=True)
        except Exception as second:
            # Two of a kind say the same: that the networks are no longer finite, or that the disk is full.
            level = logging.DEBUG if isinstance(error, RunError) and isinstance(second, RunError) else logging.ERROR
            log.log(level, "after %s the run could not be saved either: %s", type(error).__name__, second)
        else:
            log.warning("saved %s after the failure", folder)

    def _summary(self, seconds: float) -> dict[str, Any]:
        best = self.best_reward if math.isfinite(self.best_reward) else None
        summary: dict[str, Any] = {
            "run_dir": str(self.run_dir),
            "updates": self.num_updates,
            "epochs": self.num_updates / self.updates_per_epoch,
            "best_reward": best,
            "seconds": round(seconds, 3),
            **self._last_metrics,
        }
        if best is not None and (score := self._score(best)) is not None:
            summary["best_normalized_score"] = score
        return summary


def _evaluates(config: Mapping[str, Any] | None) -> Any:
    """What an evaluation's results depend on, of a run's settings."""
    config = config or {}
    settings = [config.get("env"), config.get("dataset", {}).get("reference_returns")]
    trainer = config.get("trainer", {})
    settings += [trainer.get("eval_episodes"), trainer.get("eval_deterministic", True)]  # absent in earlier versions
    return json.dumps(settings, default=str)


def _is_finite(state: Any) -> bool:
    """Whether every number in a nested state of tensors is finite."""
    if isinstance(state, torch.Tensor):
        return bool(torch.isfinite(state).all())
    return all(_is_finite(value) for value in state.values()) if isinstance(state, Mapping) else True
