"""What the three phases of F1 training share: policy, optimizer, run folder, logging, checkpoints, resuming, signals.

A phase is a subclass with `train_round`, which trains on some episodes; `deft.cli` makes it from a `PhaseConfig` and
calls `train`. The unit of progress is the episode.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from deft.config.f1_settings import PhaseConfig
from deft.config.loading import to_dict
from deft.config.rl_yaml import CONFIG_FILE, phase_of_file, read_phase_config, write_phase_config
from deft.errors import InputError, RunError, Stopped
from deft.models.f1.config import F1Config, read_f1_config
from deft.models.f1.experts import GatedMLP
from deft.models.f1.loading import load_f1_policy
from deft.models.f1.lora import ADAPTER_FOLDER, base_state_dict, has_lora, save_adapter
from deft.models.f1.optimization import set_policy_requires_grad, setup_optimizer
from deft.models.f1.policy import F1Policy
from deft.models.f1.vision import VisionLayer
from deft.ownership import start_index
from deft.runs import checkpoint, sharding
from deft.runs.compute import Threads, choose_device, thread_counts
from deft.runs.directory import ELAPSED, MODEL_FILE, remove_run
from deft.runs.intervals import crossed
from deft.runs.json_files import write_json
from deft.runs.logging import RunLogger
from deft.runs.precision import choose_precision
from deft.runs.processes import Processes, SilentLogger
from deft.runs.random_state import get_random_state, seed_everything, set_random_state
from deft.runs.seeds import process_seed
from deft.runs.signals import StopSignal, interruptible, never

log = logging.getLogger(__name__)
RAMP = 50  # updates over which the learning rate rises to its highest
Metrics = dict[str, float | Tensor]


class BaseRLTrainer(ABC):
    """Trains one F1 policy for one phase; owns the loop and the run folder.

    `policy` replaces the one of `config.model`. A run goes on from `config.run.resume`, or, with `auto_resume`, from
    the latest whole checkpoint of its folder.
    """

    phase: ClassVar[str]
    unit: ClassVar[str] = "episodes"  # of progress
    can_shard: ClassVar[bool] = False  # whether all that uses the weights runs alike in all processes
    parts: ClassVar[tuple[str, ...]] = ()  # files that a checkpoint needs beside weights and training state

    def __init__(self, config: PhaseConfig, policy: F1Policy | None = None) -> None:
        self.config, self.training = config, config.training
        check_fsdp(config, self.phase, self.can_shard)
        self.processes = Processes()
        self.is_sharded = sharding.asks_for_shards(config.training.fsdp, self.phase, self.can_shard, self.processes)
        self.device = self.processes.device(choose_device(config.training.device))
        self.processes.open(self.device)
        self.run_dir, self.resume_from, self._replaces = self.processes.share(self._place())
        seed_everything(config.training.seed)
        self.policy = self._load_policy() if policy is None else policy.to(self.device)
        self.autocast_dtype = choose_precision(config.training.precision, self.device, self.policy)
        self.episode = 0  # trained on so far, by all processes
        self.num_updates = 0
        self.elapsed = 0.0  # seconds of training
        self._threads = Threads(thread_counts(self.training.threads, cores=self.processes.cores))
        self.choose_what_learns()
        if self.is_sharded:
            self._shard()
        elif config.training.compile:
            self.policy.model.compile_layers()
        self.optimizer: Any = self.make_optimizer()
        self.scheduler: Any = (
            None if self.optimizer is None else LambdaLR(self.optimizer, lambda _: self.learning_rate_factor())
        )
        self._log: RunLogger | None = None
        self._log_state: dict[str, Any] | None = None
        self._random_state: dict[str, Any] | None = None
        self._last_metrics: dict[str, float] = {}
        self._is_saved = False  # whether a checkpoint of this run holds all that it has learned
        self._stop: Callable[[], bool] = never
        self._unfinished: tuple[int, Metrics] | None = None
        """A round whose updates are done, not yet evaluated and logged: `episode` before it, and its metrics."""
        self.partial: tuple[Metrics, list[Metrics]] | None = None
        """A round whose updates were stopped: its metrics so far, and those of the batches that were trained on."""
        self._started = time.monotonic()
        self.ends_with: RunError | None = None  # what a round found, after which the run must not go on

    # -- what a phase is -----------------------------------------------------------------------------------------------

    @abstractmethod
    def train_round(self) -> tuple[int, Metrics]:
        """Train on some episodes; how many they were in all processes, and what is to be logged of it.

        What comes before the first update is `stoppable`: a run that stops there repeats the round when it is resumed.
        A phase that can stop between two updates sets `partial` and raises `Stopped`; it is called again with it.
        """

    def evaluate_round(self, metrics: Metrics) -> Metrics:
        """Evaluate after a round with these metrics; called once the round is saved. Returns further metrics."""
        return {}

    def collection_state(self) -> Any:
        """What collecting changes, apart from the random state."""
        return None

    def restore_collection(self, state: Any) -> None:  # noqa: B027
        """The inverse of `collection_state`."""

    def choose_what_learns(self) -> None:
        """Which weights of the policy get gradients."""
        set_policy_requires_grad(
            self.policy,
            freeze_vision_encoder=self.training.freeze_vision_encoder or not self.training.train_understanding,
            train_gen_expert_only=not self.training.train_understanding,
        )

    def make_optimizer(self) -> Any:
        """Of the weights that learn; None where the phase has an algorithm with its own."""
        return setup_optimizer(self.policy, self.training.learning_rate, self.training.weight_decay)

    def model_config(self) -> F1Config:
        """The model's sizes and switches: of the run that goes on, else of `model.config_file`."""
        model = self.config.model
        if self.resume_from is not None and (own := self.resume_from.parent / MODEL_FILE).is_file():
            config = read_f1_config(own)
            if model.tokenizer_weights not in (None, config.tokenizer_weights):
                raise InputError(
                    f"tokenizer_weights: this run goes on with {config.tokenizer_weights}; leave it as it was"
                )
            return config
        config = read_f1_config(model.config_file)
        if model.tokenizer_weights is not None:
            if model.checkpoint_path is not None:
                raise InputError("tokenizer_weights: for new models; the tokenizer of checkpoint_path comes with it")
            config.tokenizer_weights = model.tokenizer_weights
        return config

    def write_sample(self, path: Path, row: int) -> None:  # noqa: B027 (a phase may have none)
        """Draw an episode of the last round (`samples/episode_n.png`)."""

    def write_video(self, path: Path, row: int) -> None:  # noqa: B027
        """Write a video of an episode of the last round (`videos/episode_n.mp4`)."""

    def state_dict(self) -> dict[str, Any]:
        """What the phase needs beside policy and optimizer to go on."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027
        """The inverse of `state_dict`."""

    def write_beside(self, folder: Path) -> None:  # noqa: B027
        """Files of the phase's own in a checkpoint."""

    def close(self) -> None:
        """Free what the phase holds."""
        self.processes.close()

    # -- the loop ------------------------------------------------------------------------------------------------------

    @property
    def total(self) -> int:
        """Episodes (or what else `unit` says) that the run is long."""
        return self.training.num_episodes

    @property
    def progress(self) -> float:
        """How much of the run is done, 0 to 1: by episodes, or by the clock where that ends it sooner."""
        done = self.episode / self.total
        if self.training.max_minutes is not None:
            done = max(done, self.elapsed / (60.0 * self.training.max_minutes))
        return min(1.0, done)

    @property
    def schedule_progress(self) -> float:
        """How far the learning rate is on its way, 0 to 1."""
        return self.progress

    def learning_rate_factor(self) -> float:
        """What the highest learning rate is multiplied with now."""
        progress = self.schedule_progress
        lowest = min(1.0, self.training.min_learning_rate / self.training.learning_rate)
        shapes = {
            "cosine": 0.5 * (1.0 + math.cos(math.pi * progress)),
            "linear": 1.0 - progress,
            "constant": 1.0,
        }
        factor = lowest + (1.0 - lowest) * shapes[self.training.scheduler]
        return factor * min(1.0, (self.num_updates + 1) / RAMP)

    def train(self) -> dict[str, Any]:
        """Train until `total` or `max_minutes`, and return a summary.

        A signal (Ctrl-C, SIGTERM, SIGHUP, SIGUSR1) stops between two steps of collection or evaluation, two minibatches
        of the explorer, or two batches of the world model. The run is saved then, and also when it fails.
        """
        if self.resume_from is not None:
            self.load(self.resume_from)
        total, stop = self.total, StopSignal()
        # Several processes stop together, between two rounds.
        self._stop = stop if self.processes.count == 1 else never
        threads = self._threads.applied()
        with stop, threads, self._run_folder(total) as run_log:
            self._log = run_log
            if self._random_state is not None:
                set_random_state(self._random_state)
                self._random_state = None
            else:
                seed_everything(process_seed(self.training.seed, self.processes.rank))
            if self.episode >= total:
                log.warning("nothing to do: the run has %d of %d %s", self.episode, total, self.unit)
            elif self.progress >= 1.0:
                log.warning("nothing to do: the run has had its %g minutes (max_minutes)", self.training.max_minutes)
            self._started = time.monotonic() - self.elapsed
            try:
                if self._unfinished is not None:
                    self._finish_round(run_log)
                while not self._is_over(stop):
                    self._round(run_log)
                if (self.processes.is_first or self.is_sharded) and not self._is_saved:
                    self.save()
            except BaseException as error:
                self._save_after_failure(error)
                raise
            finally:
                self._log = None
                self.close()
        stop.reraise()
        return self.summary()

    def summary(self) -> dict[str, Any]:
        """What a command reports at the end."""
        return {
            "run_dir": str(self.run_dir),
            self.unit: self.episode,
            "updates": self.num_updates,
            "seconds": round(self.elapsed, 1),
            **{name.removeprefix("train/"): value for name, value in self._last_metrics.items() if "train/" in name},
        }

    def _is_over(self, stop: StopSignal) -> bool:
        over = self.episode >= self.total or stop() or self.progress >= 1.0
        return bool(self.processes.largest(float(over), self.device))

    @contextlib.contextmanager
    def stoppable(self) -> Iterator[None]:
        """Let a stop request end collection or evaluation, and restore what it has changed by then."""
        random_state, state = get_random_state(), self.collection_state()
        try:
            with interruptible(self._stop):
                yield
        except Stopped:
            set_random_state(random_state)
            self.restore_collection(state)
            raise

    def _round(self, run_log: RunLogger) -> None:
        self._threads.begin()
        try:
            count, metrics = self.train_round()
        except Stopped:
            self._is_saved = self._is_saved and self.partial is None
            return
        self._unfinished = (self.episode, metrics)
        self.episode += count
        self._is_saved = False
        self._threads.tick(count)
        self.elapsed = self.processes.share(time.monotonic() - self._started)
        self._set_learning_rate()
        self._finish_round(run_log)

    def _finish_round(self, run_log: RunLogger) -> None:
        """Save if it is due, then evaluate and log the round, and draw samples: nothing of that can lose the round."""
        assert self._unfinished is not None
        previous, metrics = self._unfinished
        settings, number = self.training, self.episode
        is_logged = crossed(previous, number, settings.log_freq) or self.progress >= 1.0
        is_saved = crossed(previous, number, settings.save_freq)
        saves = self.processes.is_first or self.is_sharded
        if is_logged and saves:
            self._check_finite()
            self._last_metrics = _floats(metrics)
        if is_saved and saves and not self._is_saved:
            self.save()
        try:
            with self.stoppable():
                metrics = {**metrics, **self.evaluate_round(metrics)}
        except Stopped:
            return
        self._unfinished = None
        if self.ends_with is not None:
            is_logged, self._is_saved = True, False  # what the evaluation found is part of the state
        if self.processes.is_first:
            if is_logged:
                self._last_metrics = _floats(metrics)
                run_log.log_metrics(number, self._last_metrics)
            if is_saved and self.ends_with is None:  # else those before are the good ones
                checkpoint.prune_checkpoints(self.run_dir, settings.keep_checkpoints, number)
            with contextlib.suppress(Stopped), interruptible(self._stop):
                self._write_samples(previous)
            self._show_progress(run_log)
        if self.ends_with is not None:
            raise self.ends_with

    def _write_samples(self, previous: int) -> None:
        """The images and videos that are due after a round."""
        for row, shown_as in self._due(previous, self.training.sample_freq):
            self.write_sample(self.run_dir / "samples" / f"episode_{shown_as}.png", row)
        for row, shown_as in self._due(previous, self.training.video_freq):
            self.write_video(self.run_dir / "videos" / f"episode_{shown_as}.mp4", row)

    def _show_progress(self, run_log: RunLogger) -> None:
        if self.training.max_minutes is not None:
            run_log.expect(max(self.episode, round(self.episode / self.progress)))  # where the clock will end it
        shown = {
            name: self._last_metrics[f"train/{name}"] for name in self.shown if f"train/{name}" in self._last_metrics
        }
        run_log.progress(self.episode, **shown)

    def _due(self, previous: int, interval: int) -> list[tuple[int, int]]:
        """Rows of this process's last batch, and the numbers of their episodes that are multiples of `interval`.

        The batches of all processes are numbered together: row i of the first is one of `count` numbers.
        """
        if not interval or self.is_sharded:
            return []
        numbers = range(previous + interval - previous % interval, self.episode + 1, interval)
        return list({(number - previous - 1) // self.processes.count: number for number in numbers}.items())

    shown: ClassVar[tuple[str, ...]] = ("loss",)  # metrics in the progress bar

    def apply_gradients(self, optimizer: torch.optim.Optimizer | None = None) -> Tensor:
        """One step of the optimizer (or of another one) with the gradients that are there; returns their norm."""
        chosen = self.optimizer if optimizer is None else optimizer
        parameters = [parameter for group in chosen.param_groups for parameter in group["params"]]
        if not self.is_sharded:  # else the backward pass has averaged them
            self.processes.average_gradients(parameters)
        limit = math.inf if self.training.max_grad_norm is None else self.training.max_grad_norm
        norm = sharding.whole(torch.nn.utils.clip_grad_norm_(parameters, limit))
        chosen.step()
        if chosen is self.optimizer:
            self.num_updates += 1
            if self.scheduler is not None:
                self.scheduler.step()
        return norm

    def _set_learning_rate(self) -> None:
        """As the progress has it now, so that a run which is resumed here goes on alike."""
        if self.scheduler is not None:
            for group, base in zip(self.optimizer.param_groups, self.scheduler.base_lrs, strict=True):
                group["lr"] = base * self.learning_rate_factor()

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def save(self, path: str | Path | None = None) -> Path:
        """Write a checkpoint into the run folder, or its content into `path`.

        The first process calls it; all do where weights are shared out, and the file is that of one process.
        """
        self._check_finite()
        if self._log is not None:
            self._log.flush()
        state = {
            "phase": self.phase,
            "episode": self.episode,
            "num_updates": self.num_updates,
            "elapsed": self.elapsed,
            "threads": self._threads.state_dict(),
            "optimizer": self.optimizer_state(self.optimizer),
            "scheduler": None if self.scheduler is None else {"last_epoch": self.scheduler.last_epoch},
            "random": get_random_state(),
            "log": self._log.state_dict() if self._log is not None else self._log_state,
            "config": to_dict(self.config),
            "state": self.state_dict(),
            "partial": None
            if self.partial is None
            else [_floats(self.partial[0]), list(map(_floats, self.partial[1]))],
            "unfinished": None if self._unfinished is None else [self._unfinished[0], _floats(self._unfinished[1])],
        }
        if self.is_sharded:
            weights = sharding.whole_weights(self.policy)
        else:
            weights = {name: value.detach().cpu().clone() for name, value in base_state_dict(self.policy).items()}

        def write_more(folder: Path) -> None:
            if has_lora(self.policy):
                save_adapter(self.policy, folder / ADAPTER_FOLDER)
            self.write_beside(folder)

        if path is None:
            self._is_saved = True
        place = self.run_dir if path is None else Path(path).parent
        if not self.processes.is_first:
            return place
        return checkpoint.save_checkpoint(
            place,
            self.episode,
            weights,
            state,
            {**self._last_metrics, ELAPSED: self.elapsed},
            name=None if path is None else Path(path).name,
            write_more=write_more,
        )

    def optimizer_state(self, optimizer: torch.optim.Optimizer | None) -> dict[str, Any] | None:
        """As one process would have it, whole."""
        if optimizer is None or not self.is_sharded:
            return None if optimizer is None else optimizer.state_dict()
        return sharding.whole_moments(optimizer, self.processes.is_first)

    def load(self, path: str | Path) -> None:
        """Go on from a checkpoint; the weights were loaded when the trainer was made from it, and are again here."""
        folder = checkpoint.find_checkpoint(path)
        state = checkpoint.load_training_state(folder)
        if state.get("phase") != self.phase:
            raise InputError(
                f"{folder}: a checkpoint of {state.get('phase') or 'another kind of run'}, not of {self.phase}"
            )
        if self.resume_from is None:
            fresh = load_f1_policy(self.policy.config, "cpu", checkpoint_path=folder).policy
            if self.is_sharded:
                sharding.load_whole_weights(self.policy, fresh.state_dict())
            else:
                self.policy.load_state_dict(fresh.state_dict())
        self.episode, self.num_updates, self.elapsed = state["episode"], state["num_updates"], state["elapsed"]
        self._threads.load_state_dict(state.get("threads"))
        if self.optimizer is not None and self.scheduler is not None:
            try:
                sharding.load_whole_moments(self.optimizer, state["optimizer"])
            except ValueError:
                raise InputError(
                    f"{folder}: other weights learned in it; resume with the same settings of the model"
                ) from None
            self.scheduler.last_epoch = state["scheduler"]["last_epoch"]
            self._set_learning_rate()  # a resumed run may be told another one
        if folder.resolve() == (self.run_dir / f"checkpoint-{self.episode}").resolve():
            self._is_saved = True
        self._log_state, self._random_state = state["log"], state["random"]
        unfinished = state.get("unfinished")  # earlier versions had none
        self._unfinished = None if unfinished is None else (unfinished[0], unfinished[1])
        partial = state.get("partial")
        self.partial = None if partial is None else (partial[0], partial[1])
        self.load_state_dict(state["state"])

    def _check_finite(self) -> None:
        if not sharding.are_finite(self.policy, self.processes, self.device):
            raise RunError(
                f"the policy's weights are no longer finite after {self.episode} episodes, so nothing was saved: "
                "lower learning_rate; any checkpoint saved before is good"
            )

    def _save_after_failure(self, error: BaseException) -> None:
        if not self.processes.is_first or not self.num_updates or self._is_saved:
            return
        if self.is_sharded:
            log.warning(sharding.NOT_SAVED)
            return
        try:
            log.warning("saved %s after the failure", self.save())
        except Exception as second:
            log.error("after %s the run could not be saved either: %s", type(error).__name__, second)

    # -- the run folder ------------------------------------------------------------------------------------------------

    def _shard(self) -> None:
        """Share out the weights, kept in float32; the image tokenizer codes frames between passes, and stays whole."""
        self.policy.use_dtype("float32")
        units = (GatedMLP, VisionLayer)
        passes = ("forward_motion_only", "forward_memory_only", "forward_remembered_picture", "expected_places")
        whole = list(self.policy.tokenizer.parameters())
        sharding.shard(self.policy, self.processes, self.device, units, whole, passes)
        self.policy.tokenizer.to(self.device)
        if self.processes.is_first and (self.training.sample_freq or self.training.video_freq):
            log.warning("fsdp: no pictures are drawn, nor films made: no process has the whole model")

    def _load_policy(self) -> F1Policy:
        model = self.config.model
        if model.lora is not None and model.checkpoint_path is None and self.resume_from is None:
            log.warning("model.lora: on new weights; all but the adapters and the memory stays as it was drawn")
        return load_f1_policy(
            self.model_config(),
            "cpu" if self.is_sharded else self.device,  # which may not hold all of it
            model.untrained_tokenizer,
            model.lora,
            self.resume_from if self.resume_from is not None else model.checkpoint_path,
        ).policy

    def _place(self) -> tuple[Path, Path | None, bool] | None:
        """The run folder, the checkpoint to go on from, and whether a run that is there is replaced."""
        if not self.processes.is_first:
            return None
        run, folder = self.config.run, Path(getattr(self.config, self.phase).output_dir)
        if folder.exists() and not folder.is_dir():
            raise InputError(f"output_dir: {folder} is a file; name a folder")
        if folder.is_dir():
            with checkpoint.folder_lock(folder):
                checkpoint.clean_temporary(folder)
        existing = checkpoint.list_checkpoints(folder)
        resume_from = None if run.resume is None else checkpoint.find_checkpoint(run.resume)
        is_own = resume_from is not None and resume_from.parent.resolve() == folder.resolve()
        if not is_own and (kind := phase_of_file(folder / CONFIG_FILE)) not in (None, self.phase):
            raise InputError(f"output_dir: {folder} is a folder of `deft train {kind}`; give another --output-dir")
        if resume_from is not None:
            if not existing or is_own:
                return folder, resume_from, False
        elif run.auto_resume:
            found, problems = checkpoint.latest_whole_checkpoint(folder, self.parts)
            if existing and found is None:
                raise InputError(
                    f"auto_resume: none of the {len(existing)} checkpoints in {folder} can be read: {problems[0]}"
                )
            for problem in problems:
                log.warning("passed over: %s", problem)
            return folder, found, False
        checkpoint.check_replaceable(existing, run.overwrite, "--auto-resume", "--output-dir")
        return folder, resume_from, bool(existing)

    def fixed_start(self, section: str, setting: str, always: bool = False) -> str | None:
        """The checkpoint that a setting means now, by its own name: a run that it names may go on, and its best change.

        Where this run goes on, what it began with: unless another checkpoint is asked for by name, or `always`.
        """
        given: str | None = getattr(getattr(self.config, section), setting)
        if self.resume_from is not None and (own := self.resume_from.parent / CONFIG_FILE).is_file():
            begun: str | None = getattr(getattr(read_phase_config(own), section), setting)
            begun = None if begun is None else str(moved_with(self.resume_from.parent, begun))
            is_same = given is None or (begun is not None and names_run_of(given, begun))
            if always and not is_same and begun != str(Path(given or "").resolve()):
                log.warning("%s: this run began from %s, which stays so", setting, begun or "what ships with Deft")
            if always or is_same:
                return begun
        if given is None or not Path(given).exists():
            return given
        return str(Path(given).resolve() if Path(given).is_file() else find_start(setting, given).resolve())

    @contextlib.contextmanager
    def _run_folder(self, total: int) -> Iterator[RunLogger]:
        """Hold the folder, write the settings, and log into it; only the first process does."""
        if not self.processes.is_first:
            yield SilentLogger()  # type: ignore[misc]
            return
        with checkpoint.folder_lock(self.run_dir):
            if self._replaces:
                remove_run(self.run_dir)
            start_index(self.run_dir)
            self._write_settings()
            run_config = to_dict(self.config)
            logged = self.episode if self._unfinished is None else self._unfinished[0]
            with RunLogger(
                self.run_dir,
                self.config.logging,
                total,
                logged,
                run_config,
                self.unit,
                write_start=self._write_settings,
            ) as run_log:
                if self._log_state is not None:
                    run_log.load_state_dict(self._log_state)
                yield run_log

    def _write_settings(self) -> None:
        write_phase_config(self.config, self.run_dir / CONFIG_FILE)
        write_json(to_dict(self.policy.config), self.run_dir / MODEL_FILE)


def _floats(metrics: Metrics) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items()}


def find_start(setting: str, given: str | Path) -> Path:
    """The checkpoint that a setting names."""
    try:
        return checkpoint.find_checkpoint(given)
    except InputError as error:
        pruned = not Path(given).exists() and checkpoint.list_checkpoints(Path(given).parent)
        hint = "; its run has kept only the latest (keep_checkpoints)" if pruned else ""
        raise InputError(f"{setting}: {error}{hint}") from None


def names_run_of(given: str, begun: str) -> bool:
    """Whether a path is a run folder, or a link such as its `best`, and a checkpoint is of that run."""
    path, run = Path(given), Path(begun).resolve().parent
    if path.is_symlink() and path.parent.resolve() == run:
        return True
    return not (path / checkpoint.MODEL).is_file() and path.resolve() == run


def moved_with(run: Path, start: str) -> Path:
    """Where a run's starting point is now: where it was, or beside the run, where both were moved."""
    path = Path(start)
    beside = run.resolve().parent / path.parent.name / path.name
    return beside if not path.exists() and beside.exists() else path


def check_fsdp(config: PhaseConfig, phase: str, can_shard: bool) -> None:
    """Refuse `training.fsdp` where a process needs the whole weights for itself."""
    if not config.training.fsdp:
        return
    if not can_shard:
        raise InputError(f"fsdp: in phase {phase} the explorer acts with whole weights; {sharding.WHO_CAN}")
    if config.model.lora is not None:
        raise InputError("fsdp: not with model.lora, whose adapters need little memory; leave one of them out")
    if config.training.compile:
        raise InputError(sharding.NOT_COMPILED)
    if not config.training.sequential_training:
        raise InputError(
            "fsdp: not on random steps, whose passes differ from process to process; use sequential_training"
        )
