"""`DatasetWriter`: writes episodes of arrays as a Minari or LeRobot dataset, whole or step by step."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import gymnasium
import numpy as np
from gymnasium import spaces

from deft import trust
from deft.data.datasets.dataset import Episode, action_space_of, space_of
from deft.data.datasets.minari import MinariFiles, dataset_path
from deft.data.recording import Recording, environment_details
from deft.data.recording_lerobot import LeRobotFiles
from deft.data.spaces import Stream, union
from deft.errors import InputError

INSTRUCTION, STATE = "instruction", "state"

log = logging.getLogger(__name__)


@dataclass
class DatasetSpec:
    """What a `DatasetWriter` writes; each field is a keyword argument of the writer."""

    fps: float | None = None  # steps per second; required for LeRobot
    observation_space: spaces.Space | None = None  # default: inferred (unbounded floats, uint8 images, texts)
    action_space: spaces.Space | None = None  # default: [-1, 1], or wider if the actions are; integers require one
    env: str | gymnasium.Env | None = None  # or its Gymnasium id, `module:Name-v0` if a module registers it
    metadata: Mapping[str, Any] | None = None  # additional entries of the dataset's metadata, in JSON
    robot_type: str | None = None  # for LeRobot
    use_videos: bool = True  # cameras of LeRobot as mp4; if false, as lossless PNG


def dataset_files(
    path: str | Path, format: str, spec: DatasetSpec, details: Mapping[str, Any]
) -> tuple[Path, MinariFiles | LeRobotFiles]:
    """Return the folder of a dataset and the files of its format; `details` are entries of its metadata."""
    if format == "minari":
        path = dataset_path(path)
        return path, MinariFiles(path, {**details, **({} if spec.fps is None else {"fps": spec.fps})})
    if format != "lerobot":
        raise InputError(f"format is {format!r}; it must be 'minari' or 'lerobot'")
    if spec.fps is None:
        raise InputError("fps is missing; LeRobot datasets need the number of steps per second")
    return Path(path).expanduser(), LeRobotFiles(spec.fps, details, spec.robot_type, spec.use_videos)


class DatasetWriter(Recording):
    """Writes episodes of arrays as a dataset for Minari or LeRobot, and for `deft.load_dataset`.

    Use it as a context manager. An episode is complete on disk when `add_episode` or `end_episode` returns. If the
    process is killed, raises an exception or finds the disk full, only the unfinished episode is lost.

    Args:
        path: The dataset's folder. The name of a Minari dataset has a version (`pick-v0`); `-v0` is added if not.
        format: `minari` or `lerobot` (v3.0).
        append: Append to the dataset if it exists.
        spec: The fields of `DatasetSpec`: `fps` (required for LeRobot), `observation_space`, `action_space` (required
            for integer actions), `env`, `metadata`, `robot_type`, `use_videos`.
    """

    def __init__(
        self, path: str | Path, format: Literal["minari", "lerobot"] = "minari", *, append: bool = False, **spec: Any
    ) -> None:
        self._spec = DatasetSpec(**spec)
        self._steps: list[tuple[Any, Any, float, bool, bool]] = []
        details = {**(self._spec.metadata or {}), **_environment(self._spec.env)}
        super().__init__(*dataset_files(path, format, self._spec, details), append=append)
        has_spaces = self._spec.observation_space and self._spec.action_space
        self._spaces = None if has_spaces else self._files.recorded_spaces()

    def add_episode(
        self,
        observations: Any,
        actions: Any,
        rewards: Any = None,
        terminations: Any = None,
        truncations: Any = None,
        *,
        instruction: str | Sequence[str] | None = None,
        **attributes: Any,
    ) -> None:
        """Write one episode of T actions.

        Args:
            observations: An array, or a dict of named arrays, each with T + 1 rows; the last row is the observation
                after the last action. For LeRobot, T rows are allowed. Images are uint8, H x W x 3 or 3 x H x W.
            actions: T rows of numbers.
            rewards: T numbers, by default 0.
            terminations: T booleans: whether the task ended with the step. By default false.
            truncations: T booleans: whether the episode was cut off at the step. By default true at the last step,
                unless it terminated.
            instruction: The task as a text, for the episode or for each row.
            attributes: Numbers, texts and booleans to store with the episode: `seed`, `success`, …
        """
        actions = np.asarray(actions)
        length = len(actions) if actions.ndim else 0
        if not length:
            raise InputError(f"actions has shape {actions.shape}; an episode needs one or more")
        tree = _tree(observations, "observations")
        count = _num_rows(tree)
        allowed = (length + 1,) if self._files.needs_final_observation else (length, length + 1)
        if count not in allowed:
            raise InputError(
                f"observations has {count} rows for {length} actions; it needs {' or '.join(map(str, allowed))}: "
                "the last one is the observation after the last action"
            )
        if instruction is not None:
            texts = [instruction] * count if isinstance(instruction, str) else list(instruction)
            tree = {**(tree if isinstance(tree, dict) else {STATE: tree}), INSTRUCTION: texts}
        rewards = _column(rewards, np.float32, length, "rewards")
        terminated = _column(terminations, np.bool_, length, "terminations")
        truncated = _column(truncations, np.bool_, length, "truncations")
        ends = np.flatnonzero(terminated | truncated)
        if len(ends) and ends[0] != length - 1:
            raise InputError(f"step {ends[0]} of {length} ends the episode; only the last step may")
        if truncations is None:
            truncated[-1] = not terminated[-1]
        self._set_spaces(tree, actions)
        rows = {stream.name: _rows(stream, _part(tree, stream.path)) for stream in self._files.observation}
        episode = Episode(rows.get("", rows), _rows(self._files.action, actions), rewards, terminated, truncated)
        for name, value in attributes.items():
            if value is not None and not isinstance(value, bool | int | float | str | np.generic):
                raise InputError(f"{name} is a {type(value).__name__}; an episode stores numbers, texts and booleans")
        self.add(episode, **attributes)

    def add_step(
        self, observation: Any, action: Any, reward: float = 0.0, terminated: bool = False, truncated: bool = False
    ) -> None:
        """Add one step: the observation, the action taken there, and its result. `end_episode` writes the steps."""
        if self._steps and (self._steps[-1][3] or self._steps[-1][4]):
            raise InputError("the last step ended the episode; call end_episode() before the next step")
        step = _copied(observation), np.array(action), float(reward), bool(terminated), bool(truncated)
        self._steps.append(step)

    def end_episode(
        self, final_observation: Any = None, *, instruction: str | Sequence[str] | None = None, **attributes: Any
    ) -> None:
        """Write the steps since the last episode as one episode; LeRobot does not need `final_observation`."""
        if not self._steps:
            raise InputError("end_episode: no step was added since the last episode")
        observations, actions, rewards, terminations, truncations = zip(*self._steps, strict=True)
        if final_observation is not None:
            observations = (*observations, final_observation)
        self.add_episode(
            _stacked(observations), np.stack(actions), rewards, terminations, truncations if any(truncations) else None,
            instruction=instruction, **attributes,
        )  # fmt: skip
        self._steps = []

    def discard_episode(self) -> None:
        """Discard the steps since the last episode."""
        self._steps = []

    def close(self) -> None:
        """Unlock the folder; raise InputError if there are steps that `end_episode` has not written."""
        super().close()
        if self._steps:
            raise InputError(
                f"{len(self._steps)} steps were added and not written; call end_episode() or discard_episode() first"
            )

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if error is not None and self._steps:
            log.warning("%s: %d steps of an unfinished episode are not written", self.path, len(self._steps))
            self._steps = []
        self.close()

    def _set_spaces(self, tree: Any, actions: np.ndarray) -> None:
        """Set the spaces: those given, or those that contain this episode and the earlier ones."""
        found = self._spec.observation_space or _inferred(tree), self._spec.action_space or _action_space(actions)
        before = self._spaces
        if before is not None:
            found = union(before[0], found[0], "observations"), union(before[1], found[1], "actions")
        if found != before or not self._files.observation:
            self.set_spaces(*found, widen=before is not None)
            self._spaces = found


def _environment(env: str | gymnasium.Env | None) -> dict[str, str]:
    if env is None or isinstance(env, gymnasium.Env):
        return {} if env is None else environment_details(env.spec, "")
    module, _, name = env.rpartition(":")
    try:
        if module:
            trust.name(env)  # the caller gave it
            trust.import_module(module, env, "env", "env=")
        return environment_details(gymnasium.spec(name), env)
    except (gymnasium.error.Error, ImportError) as error:
        raise InputError(f"env is {env!r}, which Gymnasium does not know: {error}") from None


def _tree(values: Any, name: str) -> Any:
    """Return observations as arrays and lists of texts, in dicts like the user's; tensors become arrays."""
    if isinstance(values, Mapping):
        return {str(key): _tree(value, f"{name}[{key!r}]") for key, value in values.items()}
    if isinstance(values, list | tuple) and values and all(isinstance(value, str) for value in values):
        return list(values)
    array = np.asarray(values)
    if array.dtype.kind not in "fiub" or not array.ndim:
        raise InputError(f"{name} is {array.dtype} of shape {array.shape}; it must be rows of numbers or of texts")
    return array[:, None] if array.ndim == 1 else array


def _num_rows(tree: Any, name: str = "observations") -> int:
    if not isinstance(tree, dict):
        return len(tree)
    counts = {key: _num_rows(part, f"{name}[{key!r}]") for key, part in tree.items()}
    if len(set(counts.values())) != 1:
        raise InputError(f"{name} has parts of different length: {counts or 'none'}")
    return next(iter(counts.values()))


def _inferred(tree: Any) -> spaces.Space:
    """Return the space of observations: 0 to 255 for uint8, texts of their length, otherwise unbounded floats."""
    if isinstance(tree, dict):
        return spaces.Dict({key: _inferred(part) for key, part in tree.items()})
    if isinstance(tree, list):
        characters = "".join(sorted(set("".join(tree)))) or " "
        return spaces.Text(max(1, *map(len, tree)), min_length=0, charset=characters)
    return space_of(tree.shape[1:], tree.dtype)


def _action_space(actions: np.ndarray) -> spaces.Space:
    if actions.dtype.kind != "f":
        raise InputError(f"actions are {actions.dtype}; give action_space, such as gymnasium.spaces.Discrete(4)")
    if not np.isfinite(actions).all():
        raise InputError("actions has a value that is not finite")
    actions = actions[:, None] if actions.ndim == 1 else actions
    return action_space_of(actions.min(0), actions.max(0))


def _part(tree: Any, path: Sequence[str | int]) -> Any:
    for step in path:
        if not isinstance(tree, dict) or str(step) not in tree:
            raise InputError(f"observations has no {step!r}, which observation_space contains")
        tree = tree[str(step)]
    return tree


def _rows(stream: Stream, values: Any) -> np.ndarray:
    """Return values of a space as rows of the stream."""
    if isinstance(values, np.ndarray) and isinstance(stream.source, spaces.Box) and values.ndim == 1:
        values = values[:, None]
    elif isinstance(values, np.ndarray) and values.shape[1:] == (1,) and not stream.shape:
        values = values[:, 0]
    try:
        return stream.to_rows(values)
    except (TypeError, ValueError, AttributeError) as error:
        raise InputError(f"{stream.name or 'values'} do not fit {stream.source}: {error}") from None


def _column(values: Any, dtype: type, length: int, name: str) -> np.ndarray:
    array: np.ndarray = np.zeros(length, dtype) if values is None else np.asarray(values).astype(dtype)
    if array.shape == (length, 1):
        array = array[:, 0]
    if array.shape != (length,):
        raise InputError(f"{name} has shape {array.shape}; it must be {(length,)}")
    return array


def _copied(observation: Any) -> Any:
    """Return a copy of an observation: the caller may write into its arrays."""
    if isinstance(observation, Mapping):
        return {key: _copied(part) for key, part in observation.items()}
    return observation if isinstance(observation, str) else np.array(observation)


def _stacked(observations: Sequence[Any]) -> Any:
    first = observations[0]
    if isinstance(first, Mapping):
        if any(not isinstance(other, Mapping) or other.keys() != first.keys() for other in observations):
            raise InputError("the steps of an episode have different observations")
        return {key: _stacked([observation[key] for observation in observations]) for key in first}
    if isinstance(first, str):
        return list(observations)
    try:
        return np.stack([np.asarray(observation) for observation in observations])
    except ValueError as error:
        raise InputError(f"the steps of an episode have different observations: {error}") from None
