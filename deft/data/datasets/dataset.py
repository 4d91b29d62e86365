"""What every dataset offers, whatever its format: episodes, spaces, lengths and the D4RL-normalised score.

The loaders beside this file make these; replay buffers, sequence windows and offline training read them.
"""

from __future__ import annotations

import hashlib
import io
import re
import struct
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces

from deft.data.replay import TransitionTable
from deft.errors import InputError

Observation = np.ndarray | dict[str, np.ndarray]
MAX_ROWS_PER_BYTE = 64  # in tables: one row of the most regular recording takes more than an eighth of a byte
IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")  # of the others, some run programs
HASHED_EPISODES, HASHED_BLOCK, HASHED_BYTES = 16, 2**14, 2**26  # of a fingerprint; bytes of all files together


@dataclass
class Episode:
    """One episode of T transitions; row t + 1 of `observation` is the next observation of transition t."""

    observation: Observation  # [T + 1, …], or named streams of that; images uint8, `instruction` rows of encode_text
    action: np.ndarray  # float32 [T, A], or int64 [T] for discrete actions
    reward: np.ndarray  # float32 [T]
    terminated: np.ndarray  # bool [T]: the episode really ended here
    truncated: np.ndarray  # bool [T]: a time limit, or the end of the recording, cut it here

    def __len__(self) -> int:
        """Transitions."""
        return len(self.reward)

    @property
    def streams(self) -> dict[str, np.ndarray]:
        """The observation as named streams; a plain one has the empty name."""
        return self.observation if isinstance(self.observation, dict) else {"": self.observation}

    @property
    def nbytes(self) -> int:
        """What the episode takes in memory."""
        arrays = (*self.streams.values(), self.action, self.reward, self.terminated, self.truncated)
        return sum(array.nbytes for array in arrays)


class KnownTask(NamedTuple):
    """What D4RL publishes about a family of datasets, and the Gymnasium environment that has the same observations."""

    random_return: float
    expert_return: float
    max_episode_steps: int | None = None
    env_id: str | None = None
    observation_dim: int = 0  # of `env_id`
    action_dim: int = 0


# How the names of D4RL's datasets begin, as regular expressions, and the returns of its random and expert policies.
# An environment stands where Gymnasium's observations and actions mean what the dataset's do.
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
    """What is known of the task behind a dataset's name: `hopper-medium-v2`, `mujoco/hopper/medium-v0`, …"""
    plain = re.sub(r"^(d4rl|mujoco)/", "", name.lower()).replace("_", "-").replace("/", "-")
    return next((task for pattern, task in KNOWN_TASKS.items() if re.match(pattern + r"\b", plain)), None)


def known_env(env_id: str) -> KnownTask | None:
    """What is known of the task of a Gymnasium id, whatever its version: `Hopper-v4` is hopper."""
    family = env_id.rpartition("-v")[0]
    return next(
        (task for task in KNOWN_TASKS.values() if family and (task.env_id or "").startswith(family + "-v")), None
    )


def normalized_score(mean_return: float, reference_returns: tuple[float, float] | None) -> float | None:
    """The D4RL-normalised score: 100 · (return − random) / (expert − random); None where these are not known."""
    if reference_returns is None:
        return None
    random, expert = reference_returns
    return 100.0 * (mean_return - random) / (expert - random)


class Dataset(ABC):
    """Recorded episodes. Where `table` is None they are read from disk when asked for."""

    table: TransitionTable | None = None

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
        self.lengths = np.asarray(lengths, np.int64)  # [E]: transitions of each episode
        self.env_id = env_id  # the Gymnasium id to evaluate in
        self.env_kwargs: dict[str, Any] = {}  # for its constructor
        self.reference_returns = reference_returns  # of a random and an expert policy
        if len(self.lengths) == 0 or self.lengths.min() < 1:
            raise InputError(
                f"dataset {name} is empty: it needs at least one episode, and each at least one transition"
            )

    def __len__(self) -> int:
        """Transitions."""
        return int(self.lengths.sum())

    @property
    def num_episodes(self) -> int:
        """How many episodes there are."""
        return len(self.lengths)

    @abstractmethod
    def episode(self, index: int) -> Episode:
        """One episode: views where the dataset is in memory, read from disk where it streams."""

    def episode_returns(self) -> np.ndarray:
        """The undiscounted return of each episode, float64 [E]."""
        return np.array([self.episode(index).reward.sum(dtype=np.float64) for index in range(self.num_episodes)])

    def score(self, mean_return: float) -> float | None:
        """The D4RL-normalised score; None where its reference returns are not known."""
        return normalized_score(mean_return, self.reference_returns)

    def source_files(self) -> list[Path]:
        """The files that episodes are read from as they are asked for; none where they are in memory."""
        return []

    def fingerprint(self) -> str:
        """A text that tells this dataset from others, by its content; `same_fingerprint` compares two.

        A table in memory is hashed whole: every changed value shows. Of a dataset that is read from disk, the first and
        last episodes and all files up to 64 KiB are hashed whole, and of each larger file its size and blocks of 16 KiB
        spread evenly over it, the first and the last among them: files that were recorded, encoded or cut anew show,
        a few bytes that were changed in the midst of a large file may not. Where neither is known, 16 episodes are
        hashed.
        """
        number = zlib.crc32(self.lengths.tobytes())  # earlier versions had this alone
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
        """The arrays of an episode as bytes."""
        episode = self.episode(index)
        arrays = (*episode.streams.values(), episode.action, episode.reward)
        return [np.ascontiguousarray(array).tobytes() for array in arrays]

    def close(self) -> None:  # noqa: B027 (most datasets hold nothing open)
        """Let go of open files."""


def same_fingerprint(saved: object, own: object) -> bool:
    """Whether a checkpoint's fingerprint is that of a dataset.

    Checkpoints of earlier versions hold a number, which is the first part of the text that is saved now.
    """
    if isinstance(saved, int) and isinstance(own, str):
        return own.partition("-")[0] == f"{saved:08x}"
    return saved == own


def _blocks(file: Path, budget: int) -> Iterator[bytes]:
    """A file's size, and up to `budget` bytes of it in blocks that are spread evenly; small files whole."""
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
    """Vector observations, all in memory, in a table that replay buffers share without a copy."""

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

    def episode(self, index: int) -> Episode:
        """Views of the table's rows."""
        length = int(self.lengths[index])
        rows = self.table.rows[self.table.episode_rows(index)].numpy()
        steps, dim = rows[:length], self.table.observation_dim
        action = steps[:, dim:-2]
        if isinstance(self.action_space, spaces.Discrete):
            action = action[:, 0].astype(np.int64)
        terminated = steps[:, -1] > 0
        truncated = np.zeros(length, bool)
        truncated[-1] = not terminated[-1]
        return Episode(rows[:, :dim], action, steps[:, -2], terminated, truncated)

    def episode_returns(self) -> np.ndarray:
        """The undiscounted return of each episode, float64 [E]; an episode's last row has reward 0."""
        return np.add.reduceat(self.table.reward.numpy().astype(np.float64), self.table.starts)


def box(dim: int, low: float = -np.inf, high: float = np.inf) -> spaces.Box:
    """A space of float32 vectors."""
    return spaces.Box(low, high, (dim,), np.float32)


def action_space_of(low: np.ndarray, high: np.ndarray) -> spaces.Box:
    """The space of continuous actions that were recorded between two bounds: ±1, and wider where the data is."""
    return spaces.Box(np.minimum(low, -1.0).astype(np.float32), np.maximum(high, 1.0).astype(np.float32))


def space_of(array: np.ndarray) -> spaces.Box:
    """The space of one row of an array: 0 to 255 for uint8, unbounded otherwise."""
    if array.dtype == np.uint8:
        return spaces.Box(0, 255, array.shape[1:], np.uint8)
    return spaces.Box(-np.inf, np.inf, array.shape[1:], np.float32)


def task_of(name: str, observation_dim: int, action_dim: int) -> tuple[str | None, tuple[float, float] | None]:
    """The environment to evaluate in and the reference returns of a named dataset.

    The environment is given only where its observations and actions have the dataset's sizes.
    """
    task = known_task(name)
    if task is None:
        return None, None
    fits = (task.observation_dim, task.action_dim) == (observation_dim, action_dim)
    return (task.env_id if fits else None), (task.random_return, task.expert_return)


def damaged(path: Path | str, where: str, field: str, what: str) -> InputError:
    """The one line that a damaged file is reported with: the file, the episode or row, the field, what is wrong."""
    return InputError(f"{path}: damaged at {where}, field {field}: {what}")


def check_rows(count: int, num_bytes: int, path: Path | str, where: str, field: str) -> None:
    """Raise an error if a file declares more rows than its bytes can hold, before memory is taken for them."""
    if count > MAX_ROWS_PER_BYTE * num_bytes:
        raise damaged(path, where, field, f"declares {count:,} rows, more than its {num_bytes:,} bytes can hold")


def decode_image(content: Any, size: tuple[int, int]) -> np.ndarray:
    """The pixels of an image file of a dataset, uint8 [height, width, …]; a ValueError if it is none of that size.

    The size that the file declares is compared with `size` (height, width) before anything is decoded: a few bytes can
    declare an image of any size.
    """
    from PIL import Image, UnidentifiedImageError  # comes with imageio

    try:
        image = Image.open(io.BytesIO(bytes(content)), formats=IMAGE_FORMATS)
        if image.size[::-1] != size:
            raise ValueError(f"is {image.height} × {image.width} pixels, and the metadata says {size[0]} × {size[1]}")
        return np.asarray(image if image.mode in ("L", "RGB", "RGBA") else image.convert("RGB"))
    except Image.DecompressionBombError:
        raise ValueError(f"is larger than the {size[0]} × {size[1]} pixels of the metadata") from None
    except UnidentifiedImageError:
        raise ValueError(f"is no image of {', '.join(IMAGE_FORMATS)}") from None
    except (OSError, TypeError, SyntaxError, EOFError, struct.error, zlib.error) as error:
        raise ValueError(f"is no whole image: {' '.join(str(error).split())}") from None


def check_finite(values: np.ndarray, path: Path | str, where: str, field: str) -> np.ndarray:
    """The values as they are, after refusing NaN and infinities."""
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        row = int(np.argmin(np.isfinite(values.reshape(len(values), -1)).all(1)))
        raise damaged(path, where, field, f"row {row} is not a finite number")
    return values


def write_episode(table: TransitionTable, index: int, path: Path | str, where: str, **fields: Any) -> None:
    """Write one episode into its rows of the table.

    `fields` are `observation` [T + 1, D], `action` [T, A] or [T], `reward` [T] and `terminated` [T]. One that is not of
    that shape, or not finite, is refused with the file, the episode (`where`) and its name.
    """
    rows = table.rows[table.episode_rows(index)].numpy()
    length, dim = int(table.lengths[index]), table.observation_dim
    places = {
        "observation": rows[:, :dim],
        "action": rows[:length, dim:-2],
        "reward": rows[:length, -2],
        "terminated": rows[:length, -1],
    }
    for field, place in places.items():
        values = np.asarray(fields[field])
        if field == "action" and values.ndim == 1:
            values = values[:, None]
        if values.shape != place.shape:
            raise damaged(path, where, field, f"has shape {values.shape}, not {place.shape}")
        place[...] = check_finite(values, path, where, field)
