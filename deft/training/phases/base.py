"""What the three phases of F1 training share: policy, optimizer, rounds of episodes, checkpoints.

A phase is a subclass with `train_round`, which trains on some episodes; `deft.cli` builds it from a `PhaseConfig` and
calls `train`. Progress is counted in episodes.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from deft.algorithms.optimization import full_tensor, load_optimizer_state, optimizer_state
from deft.config.f1_settings import PhaseConfig
from deft.config.loading import to_dict
from deft.config.rl_yaml import CONFIG_FILE, phase_of_file, read_phase_config, write_phase_config
from deft.data.episodes import EpisodeBatch
from deft.errors import InputError, RunError, Stopped
from deft.evaluation.predictions import draw_sample, predict_episode, write_prediction_video
from deft.models.f1.config import F1Config, read_f1_config
from deft.models.f1.experts import GatedMLP
from deft.models.f1.loading import load_f1_policy
from deft.models.f1.optimization import (
    ADAPTER_FOLDER,
    base_state_dict,
    has_lora,
    save_adapter,
    set_policy_requires_grad,
    setup_optimizer,
)
from deft.models.f1.policy import F1Policy
from deft.models.f1.vision import VisionLayer
from deft.models.targets import cpu_weights
from deft.runs import checkpoint, sharding
from deft.runs.compute import Threads, choose_device, choose_precision, thread_counts
from deft.runs.directory import ELAPSED, MODEL_FILE, directory_opener, place_directory
from deft.runs.json_files import write_json
from deft.runs.processes import Processes
from deft.runs.random_state import get_random_state, seed_everything, set_random_state
from deft.runs.signals import interruptible
from deft.training.lifecycle import Run, RunSpec
from deft.training.loop import Intervals, Loop, crossed, floats

log = logging.getLogger(__name__)
WARMUP_UPDATES = 50  # over which the learning rate rises to its highest
Metrics = dict[str, float | Tensor]


class BaseRLTrainer(Loop):
    """Trains one F1 policy for one phase, in rounds of episodes.

    `policy` replaces the one of `config.model`. A run resumes from `config.run.resume`, or, with `auto_resume`, from
    the latest complete checkpoint of its directory.
    """

    phase: ClassVar[str]
    unit: ClassVar[str] = "episodes"
    saves_process_parts: ClassVar[bool] = False
    can_shard: ClassVar[bool] = False
    """Whether all processes use the weights in the same order, so that their parameters can be sharded."""
    parts: ClassVar[tuple[str, ...]] = ()
    """Files that a checkpoint needs beside weights and training state."""
    shown: ClassVar[tuple[str, ...]] = ("loss",)
    """Metrics in the progress bar."""
    is_sharded: bool = False

    def __init__(self, config: PhaseConfig, policy: F1Policy | None = None) -> None:
        self.config, self.training = config, config.training
        check_fsdp(config, self.phase, self.can_shard)
        processes = Processes()
        self.is_sharded = sharding.should_shard(config.training.fsdp, self.phase, self.can_shard, processes)
        self.device = processes.device(choose_device(config.training.device))
        processes.open(self.device)
        folder = Path(getattr(config, self.phase).output_dir)
        placed = self._place(folder) if processes.is_first else None
        self.resume_from, replaces = processes.broadcast(placed)
        threads = Threads(thread_counts(self.training.threads, cores=processes.cores))
        on_start = directory_opener(folder, replaces, self._write_settings)
        spec = RunSpec(logging_config=config.logging, seed=config.training.seed, on_start=on_start, processes=processes)
        self.run = Run(self, spec, folder, threads)
        seed_everything(config.training.seed)
        self.policy = self._load_policy() if policy is None else policy.to(self.device)
        self.autocast_dtype = choose_precision(config.training.precision, self.device, self.policy)
        self.episode = 0  # trained on so far, by all processes
        self.num_updates = 0
        self.elapsed = 0.0  # seconds of training
        self._started = time.monotonic()
        self.choose_trained_weights()
        if self.is_sharded:
            self._shard()
        elif config.training.compile:
            self.policy.model.compile_layers()
        self.optimizer: Any = self.make_optimizer()
        self.highest_rates = [] if self.optimizer is None else [group["lr"] for group in self.optimizer.param_groups]
        self._set_learning_rate()
        self.stateful: dict[str, Any] = {}
        """What `phase_state` saves, by name: objects with `state_dict` and `load_state_dict`."""
        self.shown_episodes: EpisodeBatch | None = None
        """The episodes of the last round, for samples and videos."""
        self._unfinished: tuple[int, Metrics] | None = None
        """A round whose updates are done, not yet evaluated and logged: `episode` before it, and its metrics."""
        self.partial: tuple[Metrics, list[Metrics]] | None = None
        """A round whose updates were stopped: its metrics so far, and those of the batches that were trained on."""
        self.ends_with: RunError | None = None
        """The error that a round found, after which the run ends."""

    # -- what a phase defines ------------------------------------------------------------------------------------------

    @abstractmethod
    def train_round(self) -> tuple[int, Metrics]:
        """Train on some episodes; return their number in all processes, and the metrics to log.

        What comes before the first update is `stoppable`: a run that stops there repeats the round when it is resumed.
        A phase that can stop between two updates sets `partial` and raises `Stopped`; it is called again with it.
        """

    def evaluate_round(self, metrics: Metrics) -> Metrics:
        """Evaluate after a round with these metrics, once the round is saved; return further metrics."""
        return {}

    def collection_state(self) -> Any:
        """Return what collection changes, apart from the random state."""
        return None

    def restore_collection(self, state: Any) -> None:
        """Restore a `collection_state`."""

    def choose_trained_weights(self) -> None:
        """Set which weights of the policy have gradients."""
        set_policy_requires_grad(
            self.policy,
            freeze_vision_encoder=self.training.freeze_vision_encoder or not self.training.train_understanding,
            train_gen_expert_only=not self.training.train_understanding,
        )

    def make_optimizer(self) -> Any:
        """Return the optimizer of the trained weights; None where the phase has an algorithm with its own."""
        return setup_optimizer(self.policy, self.training.learning_rate, self.training.weight_decay)

    def model_config(self) -> F1Config:
        """Return the model's config: of the run that is resumed, else of `model.config_file`."""
        model = self.config.model
        if self.resume_from is not None and (own := self.resume_from.parent / MODEL_FILE).is_file():
            config = read_f1_config(own)
            if model.tokenizer_weights not in (None, config.tokenizer_weights):
                raise InputError(
                    f"tokenizer_weights: {model.tokenizer_weights} differs from the resumed run's "
                    f"{config.tokenizer_weights or 'own'}; leave it out"
                )
            return config
        config = read_f1_config(model.config_file)
        if model.tokenizer_weights is not None:
            if model.checkpoint_path is not None:
                raise InputError("tokenizer_weights: for new models only; checkpoint_path has its own tokenizer")
            config.tokenizer_weights = model.tokenizer_weights
        return config

    @property
    def world_model(self) -> F1Policy:
        """The model whose predictions samples and videos show."""
        return self.policy

    def write_sample(self, path: Path, row: int) -> None:
        """Draw true frames, predictions and errors of an episode of the last round (`samples/episode_n.png`)."""
        if self.shown_episodes is not None:
            draw_sample(predict_episode(self.world_model, self.shown_episodes, row), path)

    def write_video(self, path: Path, row: int) -> None:
        """Write a video of it: head, true wrist and predicted wrist (`videos/episode_n.mp4`)."""
        if self.shown_episodes is not None:
            write_prediction_video(predict_episode(self.world_model, self.shown_episodes, row), path)

    def latest_observation(self) -> Any:
        """The cameras at the end of the episodes of the last round."""
        if self.shown_episodes is None:
            return None
        streams, last = self.shown_episodes.streams, int(self.shown_episodes.lengths.min())
        return {name: streams[name][:, last] for name in ("head", "wrist") if name in streams}

    def phase_state(self) -> dict[str, Any]:
        """Return what the phase resumes from beside policy and optimizer."""
        return {name: part.state_dict() for name, part in self.stateful.items()}

    def load_phase_state(self, state: dict[str, Any], folder: Path) -> None:
        """Load a `phase_state`, and the phase's own files in the checkpoint."""
        for name, part in self.stateful.items():
            part.load_state_dict(state[name])

    # -- progress ------------------------------------------------------------------------------------------------------

    @property
    def total(self) -> int:
        """Episodes (or `unit`) of the whole run."""
        return self.training.num_episodes

    @property
    def global_step(self) -> int:
        """Episodes (or `unit`) so far."""
        return self.episode

    @property
    def logged_step(self) -> int:
        """Episodes up to the last round that was evaluated and logged."""
        return self.episode if self._unfinished is None else self._unfinished[0]

    @property
    def progress(self) -> float:
        """The fraction of training that is done, 0 to 1: by episodes, or by time where that ends it sooner."""
        done = self.episode / self.total
        if self.training.max_minutes is not None:
            done = max(done, self.elapsed / (60.0 * self.training.max_minutes))
        return min(1.0, done)

    @property
    def is_over(self) -> bool:
        """Whether all episodes, or all minutes, are done."""
        return self.episode >= self.total or self.progress >= 1.0

    @property
    def intervals(self) -> Intervals:
        """As in `training`."""
        return Intervals(self.training.log_freq, 0, self.training.save_freq, self.training.keep_checkpoints)

    @property
    def schedule_progress(self) -> float:
        """The fraction of the learning rate schedule that is done, 0 to 1."""
        return self.progress

    def learning_rate_factor(self) -> float:
        """Return what the highest learning rate is multiplied by now."""
        progress = self.schedule_progress
        lowest = min(1.0, self.training.min_learning_rate / self.training.learning_rate)
        shapes = {"cosine": 0.5 * (1.0 + math.cos(math.pi * progress)), "linear": 1.0 - progress, "constant": 1.0}
        factor = lowest + (1.0 - lowest) * shapes[self.training.scheduler]
        return factor * min(1.0, (self.num_updates + 1) / WARMUP_UPDATES)

    # -- the loop ------------------------------------------------------------------------------------------------------

    def train(self) -> dict[str, Any]:
        """Train until `total` or `max_minutes`, and return a summary.

        A stop request ends collection or evaluation between two steps, and training between two minibatches of the
        explorer or two batches of the world model.
        """
        if self.resume_from is not None:
            self.load(self.resume_from)
        try:
            return self.run.execute(self.total)
        finally:
            self.close()

    def begin(self) -> None:
        """Start the clock, and finish a round that was saved before it was evaluated and logged."""
        if self.is_over and self.episode < self.total:
            log.warning("nothing to do: the run has had its %g minutes (max_minutes)", self.training.max_minutes)
        self._started = time.monotonic() - self.elapsed
        if self._unfinished is not None:
            self._finish_round()

    def step(self) -> Metrics | None:
        """Train one round."""
        try:
            count, metrics = self.train_round()
        except Stopped:
            return None
        self._unfinished = (self.episode, metrics)
        self.episode += count
        self.elapsed = self.processes.broadcast(time.monotonic() - self._started)
        self._set_learning_rate()
        return metrics

    def finish_step(self, previous: int, metrics: Mapping[str, float | Tensor]) -> None:
        """Save if it is due, then evaluate and log the round."""
        self._finish_round()

    @contextlib.contextmanager
    def stoppable(self) -> Iterator[None]:
        """Let a stop request end collection or evaluation, and restore what it has changed by then."""
        random_state, state = get_random_state(), self.collection_state()
        try:
            with interruptible(self.stop_requested):
                yield
        except Stopped:
            set_random_state(random_state)
            self.restore_collection(state)
            raise

    def _finish_round(self) -> None:
        """Save if it is due, then evaluate and log the round, and draw samples: nothing of that can lose the round."""
        assert self._unfinished is not None
        previous, metrics = self._unfinished
        settings, number, run = self.training, self.episode, self.run
        is_logged = crossed(previous, number, settings.log_freq) or self.progress >= 1.0
        saves = crossed(previous, number, settings.save_freq)
        if is_logged:
            self.check_finite({})
            run.last_metrics = floats(metrics)
        if saves and not run.is_saved:
            self.save()
        try:
            with self.stoppable():
                metrics = {**metrics, **self.evaluate_round(metrics)}
        except Stopped:
            return
        self._unfinished = None
        if self.ends_with is not None:
            is_logged, run.is_saved = True, False  # what the evaluation found is part of the state
        if self.processes.is_first:
            assert run.log is not None
            if is_logged:
                run.last_metrics = floats(metrics)
                run.log.log_metrics(number, run.last_metrics)
            if saves and self.ends_with is None:  # else the earlier checkpoints are the good ones
                checkpoint.prune_checkpoints(run.directory, settings.keep_checkpoints, number)
            with contextlib.suppress(Stopped), interruptible(self.stop_requested):
                for row, episode in self._due(previous, settings.sample_freq):
                    self.write_sample(self.run_dir / "samples" / f"episode_{episode}.png", row)
                for row, episode in self._due(previous, settings.video_freq):
                    self.write_video(self.run_dir / "videos" / f"episode_{episode}.mp4", row)
            self._show_progress()
        if self.ends_with is not None:
            raise self.ends_with

    def _show_progress(self) -> None:
        assert self.run.log is not None
        if self.training.max_minutes is not None:
            self.run.log.expect(max(self.episode, round(self.episode / self.progress)))  # when the time is over
        metrics = self.run.last_metrics
        shown = {name: metrics[f"train/{name}"] for name in self.shown if f"train/{name}" in metrics}
        self.run.log.progress(self.episode, **shown)

    def _due(self, previous: int, interval: int) -> list[tuple[int, int]]:
        """Return rows of this process's last batch whose episodes' numbers are multiples of `interval`, with these.

        The batches of all processes are numbered together: row i of the first is one of `count` numbers.
        """
        if not interval or self.is_sharded:
            return []
        numbers = range(previous + interval - previous % interval, self.episode + 1, interval)
        return list({(number - previous - 1) // self.processes.count: number for number in numbers}.items())

    def apply_gradients(self, optimizer: torch.optim.Optimizer | None = None) -> Tensor:
        """Take one step of the optimizer (or of another one) with the current gradients; return their norm."""
        chosen = self.optimizer if optimizer is None else optimizer
        parameters = [parameter for group in chosen.param_groups for parameter in group["params"]]
        if not self.is_sharded:  # else the backward pass has averaged them
            self.processes.average_gradients(parameters)
        limit = math.inf if self.training.max_grad_norm is None else self.training.max_grad_norm
        norm = full_tensor(torch.nn.utils.clip_grad_norm_(parameters, limit))
        chosen.step()
        if chosen is self.optimizer:
            self.num_updates += 1
            self._set_learning_rate()
        return norm

    def _set_learning_rate(self) -> None:
        """Set it by the current progress, so that a run which is resumed here continues alike."""
        if self.optimizer is not None:
            for group, highest in zip(self.optimizer.param_groups, self.highest_rates, strict=True):
                group["lr"] = highest * self.learning_rate_factor()

    def summary(self) -> dict[str, Any]:
        """Return what a command reports at the end."""
        metrics = self.run.last_metrics
        return {
            "run_dir": str(self.run_dir),
            self.unit: self.episode,
            "updates": self.num_updates,
            "seconds": round(self.elapsed, 1),
            **{name.removeprefix("train/"): value for name, value in metrics.items() if "train/" in name},
        }

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    @property
    def is_midway(self) -> bool:
        """Whether the updates of a round were stopped."""
        return self.partial is not None

    @property
    def checkpoint_metrics(self) -> dict[str, Any]:
        """The latest metrics, and the seconds of training."""
        return {**self.run.last_metrics, ELAPSED: self.elapsed}

    @property
    def saved_config(self) -> dict[str, Any]:
        """The settings, with the checkpoints that the run started from."""
        return to_dict(self.config)

    def check_finite(self, state: dict[str, Any]) -> None:
        """Raise an error if weights are not finite."""
        if not sharding.are_finite(self.policy, self.processes, self.device):
            raise RunError(
                f"the policy's weights are no longer finite after {self.episode} {self.unit}, so nothing was saved: "
                "lower learning_rate; any checkpoint saved before is good"
            )

    def weights(self) -> Mapping[str, Tensor]:
        """The policy's, without adapters, which are files of their own."""
        if self.is_sharded:
            return sharding.full_weights(self.policy)
        return cpu_weights(base_state_dict(self.policy))

    def state_dict(self, after_failure: bool = False) -> dict[str, Any]:
        """Return optimizer, counters, a round that is not finished, and the state of the phase."""
        partial, unfinished = self.partial, self._unfinished
        return {
            "phase": self.phase,
            "episode": self.episode,
            "num_updates": self.num_updates,
            "elapsed": self.elapsed,
            "optimizer": None if self.optimizer is None else optimizer_state(self.optimizer),
            "state": self.phase_state(),
            "partial": None if partial is None else [floats(partial[0]), list(map(floats, partial[1]))],
            "unfinished": None if unfinished is None else [unfinished[0], floats(unfinished[1])],
        }

    def load_state_dict(self, state: dict[str, Any], folder: Path) -> None:
        """Load the state; a trainer that was built from the checkpoint has its weights already."""
        if state.get("phase") != self.phase:
            raise InputError(
                f"{folder}: a checkpoint of {state.get('phase') or 'another kind of run'}, not of {self.phase}"
            )
        if self.resume_from is None:
            loaded = load_f1_policy(self.policy.config, "cpu", checkpoint_path=folder).policy.state_dict()
            if self.is_sharded:
                sharding.load_full_weights(self.policy, loaded)
            else:
                self.policy.load_state_dict(loaded)
        self.episode, self.num_updates, self.elapsed = state["episode"], state["num_updates"], state["elapsed"]
        if self.optimizer is not None:
            try:
                load_optimizer_state(self.optimizer, state["optimizer"], hyperparameters=True)
            except ValueError:
                raise InputError(
                    f"{folder}: other weights were trained in it; resume with the same settings of the model"
                ) from None
            self._set_learning_rate()  # a resumed run may be given another one
        self._unfinished, self.partial = state["unfinished"], state["partial"]
        self.load_phase_state(state["state"], folder)

    def write_files(self, folder: Path) -> None:
        """Write the LoRA adapter, where there is one."""
        if has_lora(self.policy):
            save_adapter(self.policy, folder / ADAPTER_FOLDER)

    # -- the start of a run --------------------------------------------------------------------------------------------

    def _shard(self) -> None:
        """Shard the parameters, in float32; the image tokenizer codes frames between passes, and stays whole."""
        self.policy.use_dtype("float32")
        units = (GatedMLP, VisionLayer)
        passes = ("forward_motion_only", "forward_memory_only", "forward_memory_correction", "predicted_residuals")
        whole = list(self.policy.tokenizer.parameters())
        sharding.shard(self.policy, self.processes, self.device, units, whole, passes)
        self.policy.tokenizer.to(self.device)
        if self.processes.is_first and (self.training.sample_freq or self.training.video_freq):
            log.warning("fsdp: no images or videos are written: no process has the whole model")

    def _load_policy(self) -> F1Policy:
        model = self.config.model
        if model.lora is not None and model.checkpoint_path is None and self.resume_from is None:
            log.warning("model.lora: the model is new; all but the adapters and the memory keep their random weights")
        return load_f1_policy(
            self.model_config(),
            "cpu" if self.is_sharded else self.device,  # which may not hold all of it
            model.untrained_tokenizer,
            model.lora,
            self.resume_from if self.resume_from is not None else model.checkpoint_path,
        ).policy

    def _place(self, folder: Path) -> tuple[Path | None, bool]:
        """Return the checkpoint to resume from, and whether a run in the directory is replaced."""
        run = self.config.run
        resumed = None if run.resume is None else checkpoint.find_checkpoint(run.resume).parent.resolve()
        if resumed != folder.resolve() and (kind := phase_of_file(folder / CONFIG_FILE)) not in (None, self.phase):
            raise InputError(f"output_dir: {folder} holds a run of `deft train {kind}`; give another --output-dir")
        return place_directory(folder, run.resume, run.auto_resume, run.overwrite, self.parts)

    def fixed_start(self, section: str, setting: str, always: bool = False) -> str | None:
        """Return the checkpoint that a setting means now: a run that it names may continue, and its best change.

        A resumed run keeps the one that it started from, unless the setting names another checkpoint and not `always`.
        """
        given: str | None = getattr(getattr(self.config, section), setting)
        if self.resume_from is not None and (own := self.resume_from.parent / CONFIG_FILE).is_file():
            begun: str | None = getattr(getattr(read_phase_config(own), section), setting)
            begun = None if begun is None else str(moved_with(self.resume_from.parent, begun))
            is_same = given is None or (begun is not None and names_run_of(given, begun))
            if always and not is_same and begun != str(Path(given or "").resolve()):
                log.warning("%s: ignored; the run started from %s", setting, begun or "the weights that ship with Deft")
            if always or is_same:
                return begun
        if given is None or not Path(given).exists():
            return given
        return str(Path(given).resolve() if Path(given).is_file() else find_start(setting, given).resolve())

    def _write_settings(self) -> None:
        write_phase_config(self.config, self.run_dir / CONFIG_FILE)
        write_json(to_dict(self.policy.config), self.run_dir / MODEL_FILE)


def find_start(setting: str, given: str | Path) -> Path:
    """Return the checkpoint that a setting names."""
    try:
        return checkpoint.find_checkpoint(given)
    except InputError as error:
        pruned = not Path(given).exists() and checkpoint.list_checkpoints(Path(given).parent)
        hint = "; its run has kept only the latest (keep_checkpoints)" if pruned else ""
        raise InputError(f"{setting}: {error}{hint}") from None


def names_run_of(given: str, begun: str) -> bool:
    """Whether a path is a run directory, or a link such as its `best`, and a checkpoint belongs to that run."""
    path, run = Path(given), Path(begun).resolve().parent
    if path.is_symlink() and path.parent.resolve() == run:
        return True
    return not (path / checkpoint.MODEL).is_file() and path.resolve() == run


def moved_with(run: Path, start: str) -> Path:
    """Return where a run's starting point is now: where it was, or beside the run, if both were moved."""
    path = Path(start)
    beside = run.resolve().parent / path.parent.name / path.name
    return beside if not path.exists() and beside.exists() else path


def check_fsdp(config: PhaseConfig, phase: str, can_shard: bool) -> None:
    """Raise an error if `training.fsdp` is set where a process needs the whole weights for itself."""
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
