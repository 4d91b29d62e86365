"""What `Run` drives: a loop owns what is trained, and runs one iteration after another.

Online training (`trainer`), offline training (`offline`), the phases, the tokenizer and waypoints are loops.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from deft.runs.logging import WINDOW
from deft.runs.processes import Processes
from deft.runs.signals import never

if TYPE_CHECKING:
    from deft.training.lifecycle import Run

Metrics: TypeAlias = Mapping[str, float | Tensor]


def crossed(previous: int, step: int, interval: int) -> bool:
    """Whether a multiple of `interval` lies in (previous, step]: steps come in thousands. Never for interval 0."""
    return interval > 0 and step // interval > previous // interval


class Intervals(NamedTuple):
    """Steps between log lines, evaluations, checkpoints and videos, 0: none; and how many checkpoints are kept."""

    log: int
    evaluate: int
    save: int
    keep: int
    video: int = 0


class Loop(ABC):
    """One iteration after another: what `Run` drives. Subclasses set `run` and `device` in their constructor."""

    unit: ClassVar[str] = "updates"
    """What `global_step` counts."""
    stop_interval: ClassVar[int] = 1
    """Steps after which several processes agree whether to stop."""
    saves_process_parts: ClassVar[bool] = True
    """Whether each process after the first saves `process_state` in a file of its own."""
    run: Run
    device: torch.device
    stop_requested: Callable[[], bool] = staticmethod(never)
    """Asked inside an iteration; when it returns True the iteration ends early. Never with several processes."""

    # -- progress ----------------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def global_step(self) -> int:
        """Steps so far, in `unit`."""

    num_updates: int

    @property
    def progress(self) -> float:
        """The fraction of training that is done, 0 to 1."""
        return self.global_step / self.run.total

    @property
    def is_over(self) -> bool:
        """Whether training ends here."""
        return self.global_step >= self.run.total

    @property
    def intervals(self) -> Intervals:
        """What is done how often, in `unit`."""
        return Intervals(0, 0, 0, 1)

    @property
    def memory_advice(self) -> str:
        """What to change where an iteration does not fit into memory."""
        return "use a smaller batch_size, or a smaller model"

    # -- an iteration ------------------------------------------------------------------------------------------------

    def prepare(self) -> None:  # noqa: B027 (a loop may have nothing to prepare)
        """Called before the random state is set: create what may fail, such as an evaluation environment."""

    def begin(self) -> None:  # noqa: B027
        """Called before the first iteration, with the random state of the run."""

    @abstractmethod
    def step(self) -> Metrics | None:
        """Run one iteration; None if a stop request ended it early."""

    def finish_step(self, previous: int, metrics: Metrics) -> None:
        """Log, evaluate and save after an iteration that started at step `previous`."""
        self.run.finish_step(previous, metrics)

    def further_metrics(self, previous: int, logs: bool) -> dict[str, float]:
        """Return metrics beside those of the iteration; where there are any, they are logged at once."""
        return {}

    def is_logged(self, previous: int) -> bool:
        """Whether the metrics of this iteration are logged."""
        return crossed(previous, self.global_step, self.run.every.log)

    def logged(self, metrics: Metrics) -> Metrics:
        """Return the metrics as they are logged."""
        return metrics

    def check_metrics(self, metrics: Metrics) -> None:  # noqa: B027
        """Raise an error, or warn, if logged metrics are not what they should be."""

    def end(self) -> None:
        """Called after the last iteration, before the last evaluation and checkpoint."""
        self.halt()

    def latest_observation(self) -> Any:
        """Return the latest observation of the environments, arrays or tensors [N, …], for the live view; or None."""
        return None

    def halt(self) -> None:  # noqa: B027
        """Stop what runs in the background; also called after a failure."""

    # -- evaluation --------------------------------------------------------------------------------------------------

    @property
    def is_evaluated(self) -> bool:
        """Whether evaluations are made during training."""
        return False

    @property
    def evaluates_first(self) -> bool:
        """Whether the policy is evaluated before it is trained."""
        return False

    def start_evaluation(self, video: Path | None) -> list[tuple[int, dict[str, Any]]]:
        """Evaluate now, or start to; return steps and results of the evaluations that are complete."""
        return []

    def evaluation_weights(self) -> contextlib.AbstractContextManager[None]:
        """Gather sharded parameters for an evaluation; all processes call it."""
        return contextlib.nullcontext()

    def finished_evaluations(self, wait: bool = False) -> list[tuple[int, dict[str, Any]]]:
        """Return steps and results of evaluations that ended since the last call."""
        return []

    @property
    def pending_evaluations(self) -> Iterable[int]:
        """Steps whose evaluations are still to come: their checkpoints are not deleted."""
        return ()

    @property
    def is_best_by_validation(self) -> bool:
        """Whether the further metrics make these weights the best, where no evaluation does."""
        return False

    # -- checkpoints -------------------------------------------------------------------------------------------------

    @property
    def checkpoint_step(self) -> int:
        """The number of the next checkpoint."""
        return self.global_step

    @property
    def is_midway(self) -> bool:
        """Whether something happened since the last complete iteration that a checkpoint should hold."""
        return False

    def paused(self) -> contextlib.AbstractContextManager[None]:
        """Keep the state from changing while it is saved."""
        return contextlib.nullcontext()

    @abstractmethod
    def weights(self) -> Mapping[str, Tensor]:
        """Return the weights of `model.pt`; with sharded parameters all processes call it."""

    @abstractmethod
    def state_dict(self, after_failure: bool = False) -> dict[str, Any]:
        """Return the rest of the state that training resumes from, after a failure without what is undefined then."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any], folder: Path) -> None:
        """Load a training state, and the weights of its checkpoint."""

    def process_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return what each process keeps for itself."""
        return {}

    def own_state(self, state: dict[str, Any], part: dict[str, Any], saved: int) -> dict[str, Any]:
        """Return the state as this process had it; `part` is its file, of a run with `saved` processes.

        A `random` of None seeds this process anew.
        """
        return state | part

    def check_finite(self, state: dict[str, Any]) -> None:  # noqa: B027
        """Raise an error if weights or the state are not finite: they are not saved."""

    def write_files(self, folder: Path) -> None:  # noqa: B027
        """Write further files into a checkpoint."""

    @property
    def checkpoint_metrics(self) -> dict[str, Any]:
        """The metrics that a checkpoint holds."""
        return self.run.last_metrics

    @property
    def saved_config(self) -> dict[str, Any] | None:
        """The settings that a checkpoint holds."""
        return self.run.spec.config

    @property
    def is_sharded(self) -> bool:
        """Whether parameters are sharded among the processes."""
        return self.run.spec.acting is not None

    @property
    def modules(self) -> Iterable[nn.Module]:
        """The modules whose weights all processes start with alike."""
        return ()

    # -- the rest ----------------------------------------------------------------------------------------------------

    @property
    def window(self) -> int:
        """Episodes that logged means are over."""
        return WINDOW

    @property
    def logged_step(self) -> int:
        """The step up to which everything is logged."""
        return self.global_step

    @property
    def uses_small_matrices(self) -> bool:
        """Whether oneDNN is left out (`deft.runs.compute`)."""
        return False

    @abstractmethod
    def summary(self) -> dict[str, Any]:
        """Return what a command reports at the end."""

    # -- for users of the loop ---------------------------------------------------------------------------------------

    @property
    def run_dir(self) -> Path:
        """The run directory."""
        return self.run.directory

    @property
    def processes(self) -> Processes:
        """The processes that train together."""
        return self.run.processes

    @property
    def best_reward(self) -> float:
        """The highest mean return of an evaluation; −∞ before the first."""
        return self.run.best_reward

    @property
    def last_evaluation(self) -> dict[str, Any]:
        """Results of the latest evaluation; empty in all processes but the first."""
        return self.run.last_evaluation

    def save(self, path: str | Path | None = None) -> Path:
        """Write a checkpoint into the run directory, or as the folder `path`."""
        return self.run.save(path)

    def load(self, path: str | Path) -> None:
        """Resume from a checkpoint, or from the latest one of a run directory."""
        self.run.load(path)

    def close(self) -> None:
        """Free what the run holds."""
        self.processes.close()


def floats(metrics: Metrics) -> dict[str, float]:
    """Return metrics as numbers."""
    return {name: float(value) for name, value in metrics.items()}
