"""The base class of datasets: episodes, spaces, lengths and the D4RL-normalised score; and checks that readers share.

The modules in this folder each read one format. Replay buffers, sequence windows and offline training use datasets.
"""

from __future__ import annotations

import hashlib
import importlib
import io
import re
import struct
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces

from deft.data.replay import TransitionTable
from deft.errors import InputError
from deft.plain_data import parse_bounded, read_bounded
from deft.schema import renamed_streams

Observation = np.ndarray | dict[str, np.ndarray]
MAX_ROWS_PER_BYTE = 64  # of a table in a file: even constant values need more than this
IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")  # some of Pillow's other formats run programs
HASHED_EPISODES, HASHED_BLOCK, HASHED_BYTES = 16, 2**14, 2**26  # for fingerprints; bytes of all files together


@dataclass
class Episode:
    """One episode of T transitions; row t + 1 of `observation` is the next observation of transition t."""

    observation: Observation  # [T + 1, …], or named streams of that; images uint8, `instruction` rows of encode_text
    action: np.ndarray  # float32 [T, A], or int64 [T] for discrete actions
    reward: np.ndarray  # float32 [T]
    terminated: np.ndarray  # bool [T]: the task ended here
    truncated: np.ndarray  # bool [T]: a time limit, or the end of the recording, ended the episode here
    intervention: np.ndarray | None = None  # bool [T]: an expert decided the action, where this is recorded
    expert_action: np.ndarray | None = None  # like `action`: what an expert would have done, where this is recorded

    def __len__(self) -> int:
        """Return the number of transitions."""
        return len(self.reward)

    @property
    def streams(self) -> dict[str, np.ndarray]:
        """The observation as named streams; a single array has the empty name."""
        return self.observation if isinstance(self.observation, dict) else {"": self.observation}

    @property
    def marks(self) -> np.ndarray:
        """Which steps an expert decided, bool [T]; none where this is not recorded."""
        return np.zeros(len(self), bool) if self.intervention is None else self.intervention

    @property
    def nbytes(self) -> int:
        """The size of the episode in memory, in bytes."""
        arrays = (*self.streams.values(), self.action, self.reward, self.terminated, self.truncated)
        optional = (self.intervention, self.expert_action)
        return sum(array.nbytes for array in (*arrays, *optional) if array is not None)


def truncated_at_end(terminated: np.ndarray) -> np.ndarray:
    """Return the `truncated` flags of a recorded episode: true at its last step unless that step is terminated."""
    truncated = np.zeros(len(terminated), bool)
    truncated[-1] = not terminated[-1]
    return truncated


class KnownTask(NamedTuple):
    """Reference returns that D4RL publishes for a family of datasets, and the corresponding Gymnasium environment."""

    random_return: float
    expert_return: float
    max_episode_steps: int | None = None
    env_id: str | None = None
    observation_dim: int = 0  # of `env_id`
    action_dim: int = 0


# Regular expressions for the beginnings of D4RL's dataset names, with the returns of its random and expert policies.
# An environment is given if Gymnasium's observations and actions have the same meaning as the dataset's.
_KINDS = "-(random|simple|medium|expert|full)"
_ADROIT = "-(human|cloned|expert)"
KNOWN_TASKS = {
    "hopper" + _KINDS: KnownTask(-20.272305, 3234.3, 1000, "Hopper-v5", 11, 3),
    "halfcheetah" + _KINDS: KnownTask(-280.178953, 12135.0, 1000, "HalfCheetah-v5", 17, 6),
    "walker2d" + _KINDS: KnownTask(1.629008, 4592.3, 1000, "Walker2d-v5", 17, 6),
    "ant" + _KINDS: KnownTask(-325.6, 3879.7, 1000, "Ant-v5", 105, 8),
    "pen" + _ADROIT: KnownTask(96.262799, 3076.8331, None, "AdroitHandPen-v1", 45, 24),
    "hammer" + _ADROIT: KnownTask(-274.856578, 12794.134825, None, "AdroitHandHammer-v1", 46, 26),
    "door" + _ADROIT: KnownTask(-56.512833, 2880.569309, None, "AdroitHandDoor-v1", 39, 28),
    "relocate" + _ADROIT: KnownTask(-6.425911, 4233.877798, None, "AdroitHandRelocate-v1", 39, 30),
    "maze2d-open-dense": KnownTask(11.17817, 27.166539, 150),
    "maze2d-umaze-dense": KnownTask(68.537689, 193.662856, 300),
    "maze2d-medium-dense": KnownTask(44.264742, 297.455255, 600),
    "maze2d-large-dense": KnownTask(30.569041, 303.485738, 800),
    "maze2d-open": KnownTask(0.01, 20.66, 150),
    "maze2d-umaze": KnownTask(23.85, 161.86, 300),
    "maze2d-medium": KnownTask(13.13, 277.39, 600),
    "maze2d-large": KnownTask(6.7, 273.99, 800),
    "antmaze-umaze": KnownTask(0.0, 1.0, 700),
    "antmaze-(medium|large)": KnownTask(0.0, 1.0, 1000),
    "kitchen-(complete|partial|mixed)": KnownTask(0.0, 4.0, 280),
}


def known_task(name: str) -> KnownTask | None:
    """Return the known task of a dataset's name: `hopper-medium-v2`, `mujoco/hopper/medium-v0`, …"""
    plain = re.sub(r"^(d4rl|mujoco)/", "", name.lower()).replace("_", "-").replace("/", "-")
    return next((task for pattern, task in KNOWN_TASKS.items() if re.match(pattern + r"\b", plain)), None)


def known_env(env_id: str) -> KnownTask | None:
    """Return the known task of a Gymnasium id of any version: `Hopper-v4` is hopper."""
    family = env_id.rpartition("-v")[0]
    return next(
        (task for task in KNOWN_TASKS.values() if family and (task.env_id or "").startswith(family + "-v")), None
    )


def normalized_score(mean_return: float, reference_returns: tuple[float, float] | None) -> float | None:
    """Return 100 · (return − random) / (expert − random), the D4RL-normalised score; None without references."""
    if reference_returns is None:
        return None
    random, expert = reference_returns
    return 100.0 * (mean_return - random) / (expert - random)


class Dataset(ABC):
    """Recorded episodes. If `table` is None, they are read from disk on demand."""

    table: TransitionTable | None = None
    env_args: dict[str, Any] | None = None  # the robosuite environment that a robomimic file names

    def __init__(
        self,
        name: str,
        observation_space: spaces.Space,
        action_space: spaces.Space,
        lengths: np.ndarray,
        env_id: str | None = None,
        reference_returns: tuple[float, float] | None = None,
    ) -> None:
        self.name = name
        self.observation_space = observation_space
        self.action_space = action_space
        self.lengths = np.asarray(lengths, np.int64)  # [E]: the transitions of each episode
        self.env_id = env_id  # the Gymnasium environment to evaluate in
        self.env_kwargs: dict[str, Any] = {}  # for its constructor
        self.reference_returns = reference_returns  # of a random and an expert policy
        if len(self.lengths) == 0 or self.lengths.min() < 1:
            raise InputError(
                f"dataset {name} is empty: it needs at least one episode, and each at least one transition"
            )

    def __len__(self) -> int:
        """Return the number of transitions."""
        return int(self.lengths.sum())

    @property
    def num_episodes(self) -> int:
        """The number of episodes."""
        return len(self.lengths)

    @property
    def is_vector(self) -> bool:
        """Whether the episodes fit into a `TransitionTable`: float32 vectors, with vectors or integers as actions."""
        space, action = self.observation_space, self.action_space
        is_flat = isinstance(space, spaces.Box) and len(space.shape) == 1 and space.dtype == np.float32
        return is_flat and (
            isinstance(action, spaces.Discrete) or (isinstance(action, spaces.Box) and len(action.shape) == 1)
        )

    @abstractmethod
    def episode(self, index: int) -> Episode:
        """Return one episode: views if the dataset is in memory, otherwise read from disk."""

    def episode_returns(self) -> np.ndarray:
        """Return the undiscounted return of each episode, float64 [E]."""
        return np.array([self.episode(index).reward.sum(dtype=np.float64) for index in range(self.num_episodes)])

    def score(self, mean_return: float) -> float | None:
        """Return the D4RL-normalised score; None if the reference returns are not known."""
        return normalized_score(mean_return, self.reference_returns)

    def source_files(self) -> list[Path]:
        """Return the files from which episodes are read on demand; empty if they are in memory."""
        return []

    def fingerprint(self) -> str:
        """Return a text that identifies the dataset by its content.

        A table in memory is hashed completely. For a dataset on disk, the first and the last episode and all files of
        up to 64 KiB are hashed completely; from each larger file its size and evenly spaced blocks of 16 KiB, including
        the first and the last. This detects files that were recorded, encoded or cut again, but may miss a change of a
        few bytes inside a large file. If there is neither a table nor a file, 16 episodes are hashed.
        """
        number = zlib.crc32(self.lengths.tobytes())
        for index in (0, self.num_episodes - 1):
            for content in self._content(index):
                number = zlib.crc32(content, number)
        digest, files = hashlib.blake2b(digest_size=16), self.source_files()
        if self.table is not None:
            digest.update(self.table.rows.contiguous().numpy().data)
        elif not files:
            for index in np.linspace(0, self.num_episodes - 1, HASHED_EPISODES).astype(int):
                for content in self._content(int(index)):
                    digest.update(content)
        for file in files:
            for block in _blocks(file, HASHED_BYTES // len(files)):
                digest.update(block)
        return f"{number:08x}-{digest.hexdigest()}"

    def _content(self, index: int) -> list[bytes]:
        """Return the arrays of an episode as bytes."""
        episode = self.episode(index)
        arrays = (*episode.streams.values(), episode.action, episode.reward)
        return [np.ascontiguousarray(array).tobytes() for array in arrays]

    def close(self) -> None:  # noqa: B027 (most datasets hold nothing open)
        """Close open files."""


def _blocks(file: Path, budget: int) -> Iterator[bytes]:
    """Yield a file's size and up to `budget` bytes of it, in evenly spaced blocks; small files completely."""
    try:
        size, count = file.stat().st_size, max(4, budget // HASHED_BLOCK)
        yield size.to_bytes(8, "little")
        with open(file, "rb") as content:
            if size <= count * HASHED_BLOCK:
                yield content.read()
                return
            for index in range(count):
                content.seek((size - HASHED_BLOCK) * index // (count - 1))
                yield content.read(HASHED_BLOCK)
    except OSError as error:
        raise InputError(f"{file}: cannot be read: {error.strerror}") from error


class VectorDataset(Dataset):
    """Vector observations in memory, in a table that replay buffers use without a copy."""

    table: TransitionTable

    def __init__(
        self,
        table: TransitionTable,
        name: str,
        observation_space: spaces.Space | None = None,
        action_space: spaces.Space | None = None,
        env_id: str | None = None,
        reference_returns: tuple[float, float] | None = None,
    ) -> None:
        observation_space = observation_space or box(table.observation_dim)
        action_space = action_space or box(table.action_dim)
        super().__init__(name, observation_space, action_space, table.lengths, env_id, reference_returns)
        self.table = table

    @classmethod
    def from_dataset(cls, source: Dataset) -> VectorDataset:
        """Read a dataset with `is_vector` into memory, one episode at a time, and close it."""
        observation_shape, action_shape = source.observation_space.shape, source.action_space.shape
        assert observation_shape is not None
        assert action_shape is not None
        table = TransitionTable(source.lengths, observation_shape[0], action_shape[0] if action_shape else 1)
        dim = table.observation_dim
        try:
            for index in range(source.num_episodes):
                episode = source.episode(index)
                rows = table.rows[table.episode_rows(index)].numpy()
                rows[:, :dim] = episode.observation
                rows[:-1, dim:-2] = episode.action.reshape(len(episode), -1)
                rows[:-1, -2], rows[:-1, -1] = episode.reward, episode.terminated
                if episode.intervention is not None:
                    table.mark_interventions(index, episode.intervention)
        finally:
            source.close()
        spaces_of_source = source.observation_space, source.action_space
        dataset = cls(table, source.name, *spaces_of_source, source.env_id, source.reference_returns)
        dataset.env_kwargs, dataset.env_args = source.env_kwargs, source.env_args
        return dataset

    def episode(self, index: int) -> Episode:
        """Return views of the table's rows."""
        rows = self.table.rows[self.table.episode_rows(index)].numpy()
        steps, dim = rows[:-1], self.table.observation_dim
        action = steps[:, dim:-2]
        if isinstance(self.action_space, spaces.Discrete):
            action = action[:, 0].astype(np.int64)
        terminated, marks = steps[:, -1] > 0, self.table.interventions
        marked = None if marks is None else marks[self.table.episode_rows(index)][:-1].numpy()
        return Episode(rows[:, :dim], action, steps[:, -2], terminated, truncated_at_end(terminated), marked)

    def episode_returns(self) -> np.ndarray:
        """Return the undiscounted return of each episode, float64 [E]; the last row of an episode has reward 0."""
        return np.add.reduceat(self.table.reward.numpy().astype(np.float64), self.table.starts)


def box(dim: int, low: float = -np.inf, high: float = np.inf) -> spaces.Box:
    """Return a space of float32 vectors."""
    return spaces.Box(low, high, (dim,), np.float32)


def action_space_of(low: np.ndarray, high: np.ndarray) -> spaces.Box:
    """Return the space of continuous actions with these bounds in the data: [-1, 1], or wider."""
    return spaces.Box(np.minimum(low, -1.0).astype(np.float32), np.maximum(high, 1.0).astype(np.float32))


def space_of(shape: tuple[int, ...], dtype: Any) -> spaces.Box:
    """Return the space of arrays of a shape: 0 to 255 for uint8, unbounded float32 otherwise."""
    if dtype == np.uint8:
        return spaces.Box(0, 255, shape, np.uint8)
    return spaces.Box(-np.inf, np.inf, shape, np.float32)


def task_of(name: str, observation_dim: int, action_dim: int) -> tuple[str | None, tuple[float, float] | None]:
    """Return the evaluation environment and the reference returns of a dataset's name.

    The environment is None unless its observations and actions have the dataset's sizes.
    """
    task = known_task(name)
    if task is None:
        return None, None
    fits = (task.observation_dim, task.action_dim) == (observation_dim, action_dim)
    return (task.env_id if fits else None), (task.random_return, task.expert_return)


# -- datasets that show another one differently ----------------------------------------------------------------------


class DatasetView(Dataset):
    """Another dataset, with an observation space and episodes of its own."""

    def __init__(self, dataset: Dataset, observation_space: spaces.Space, lengths: np.ndarray) -> None:
        super().__init__(
            dataset.name, observation_space, dataset.action_space, lengths, dataset.env_id, dataset.reference_returns
        )
        self.env_kwargs = dataset.env_kwargs
        self._dataset = dataset

    def close(self) -> None:
        """Close the files of the dataset."""
        self._dataset.close()


class RenamedDataset(DatasetView):
    """A dataset whose streams have other names (`dataset.rename_streams`): `rename` is {new name: old name}."""

    def __init__(self, dataset: Dataset, rename: Mapping[str, str]) -> None:
        space = dataset.observation_space
        streams = dict(space.spaces) if isinstance(space, spaces.Dict) else {}
        self._names = renamed_streams(streams, rename, f"dataset {dataset.name}")
        renamed = spaces.Dict({new: streams[name] for name, new in self._names.items()})
        super().__init__(dataset, renamed, dataset.lengths)

    def episode(self, index: int) -> Episode:
        """Return one episode, with the new names of its streams."""
        episode = self._dataset.episode(index)
        return replace(episode, observation={self._names[k]: rows for k, rows in episode.streams.items()})

    def episode_returns(self) -> np.ndarray:
        """Return the undiscounted return of each episode, float64 [E]."""
        return self._dataset.episode_returns()

    def fingerprint(self) -> str:
        """Return the fingerprint of the dataset: names are not part of the content."""
        return self._dataset.fingerprint()

    def source_files(self) -> list[Path]:
        """Return the files of the dataset."""
        return self._dataset.source_files()


class EpisodeSubset(DatasetView):
    """Some episodes of a dataset, for example without those held out for validation. Rows of a table are copied."""

    def __init__(self, dataset: Dataset, episodes: np.ndarray) -> None:
        super().__init__(dataset, dataset.observation_space, dataset.lengths[episodes])
        self._episodes = episodes
        self.table = None if dataset.table is None else dataset.table.select(episodes)

    def episode(self, index: int) -> Episode:
        """Return one of the episodes."""
        return self._dataset.episode(int(self._episodes[index]))

    def episode_returns(self) -> np.ndarray:
        """Return the undiscounted return of each episode, float64 [E]."""
        return self._dataset.episode_returns()[self._episodes]


def validation_episodes(num_episodes: int, fraction: float, seed: int) -> np.ndarray:
    """Return the episodes to hold out, sorted: `fraction` of all, rounded, never all; determined by the seed."""
    count = min(int(fraction * num_episodes + 0.5), num_episodes - 1)
    return np.sort(np.random.default_rng(seed).permutation(num_episodes)[:count])


# -- what readers of files share -------------------------------------------------------------------------------------


def import_optional(name: str, purpose: str) -> Any:
    """Return a module of the extra `data`; raise InputError with the install command if it is missing."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise InputError(f'{purpose} needs {name.partition(".")[0]}: pip install "deft[data]"') from None


def damaged(path: Path | str, where: str, field: str, what: str) -> InputError:
    """Return the error for a damaged file: the file, the episode or row, the field, and what is wrong."""
    return InputError(f"{path}: damaged at {where}, field {field}: {what}")


def read_json(path: Path, where: str = "the top", field: str = "JSON") -> dict[str, Any]:
    """Return the object in a JSON file of bounded size and depth."""
    try:
        return json_object(read_bounded(path), path, where, field)
    except FileNotFoundError:
        raise damaged(path, where, field, "the file is missing") from None
    except (OSError, UnicodeDecodeError) as error:
        raise damaged(path, where, field, f"cannot be read: {error}") from None


def json_object(text: str, path: Path, where: str, field: str = "JSON") -> dict[str, Any]:
    """Return the object in a JSON text from a file."""
    try:
        found = parse_bounded(text)
    except ValueError as error:
        raise damaged(path, where, field, f"is not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise damaged(path, where, field, "is not an object")
    return found


def check_rows(count: int, num_bytes: int, path: Path | str, where: str, field: str) -> None:
    """Raise InputError if a file declares more rows than its bytes can hold, before memory is allocated for them."""
    if count > MAX_ROWS_PER_BYTE * num_bytes:
        raise damaged(path, where, field, f"declares {count:,} rows, more than its {num_bytes:,} bytes can hold")


def check_finite(values: np.ndarray, path: Path | str, where: str, field: str) -> np.ndarray:
    """Return the values; raise InputError if one is NaN or infinite."""
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        row = int(np.argmin(np.isfinite(values.reshape(len(values), -1)).all(1)))
        raise damaged(path, where, field, f"row {row} is not a finite number")
    return values


def check_array(values: np.ndarray, shape: tuple[int, ...], path: Path | str, where: str, field: str) -> np.ndarray:
    """Return finite values of this shape; raise InputError for others. Scalars may have a trailing dimension."""
    if len(shape) == 1 and values.shape == (*shape, 1):
        values = values[:, 0]
    if values.shape != shape:
        raise damaged(path, where, field, f"has shape {values.shape}, not {shape}")
    return check_finite(values, path, where, field)


def decode_image(content: Any, size: tuple[int, int]) -> np.ndarray:
    """Return the pixels of an encoded image, uint8 [height, width, …]; raise ValueError if it is invalid.

    The size in the image's header is compared with `size` (height, width) before decoding: a few bytes can declare an
    image of any size.
    """
    from PIL import Image, UnidentifiedImageError  # a dependency of imageio

    try:
        image = Image.open(io.BytesIO(bytes(content)), formats=IMAGE_FORMATS)
        if image.size[::-1] != size:
            raise ValueError(f"has {image.height} × {image.width} pixels; the metadata declares {size[0]} × {size[1]}")
        return np.asarray(image if image.mode in ("L", "RGB", "RGBA") else image.convert("RGB"))
    except Image.DecompressionBombError:
        raise ValueError(f"is larger than the {size[0]} × {size[1]} pixels that the metadata declares") from None
    except UnidentifiedImageError:
        raise ValueError(f"is not an image ({', '.join(IMAGE_FORMATS)})") from None
    except (OSError, TypeError, SyntaxError, EOFError, struct.error, zlib.error) as error:
        raise ValueError(f"is not a complete image: {error}") from None
