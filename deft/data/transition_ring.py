"""The replay buffer of online off-policy training: a ring of the latest transitions.

A collector writes steps of all environments; `deft.algorithms.sac` samples batches. An image is stored once, although
it is the observation of one transition and the next observation of the transition before it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deft import schema
from deft.data.datasets.dataset import Episode
from deft.data.replay import cumulative_weights, weighted_draws
from deft.data.rollout import check_memory
from deft.data.tensors import Batch, Key, Row, restore_generator, to_device, to_numpy
from deft.errors import InputError

_FRAME, _NEXT_FRAME = "frame", "next_frame"  # columns with the numbers of a transition's images, counted from 0
_EXTRA_FRAMES = 8  # one in so many frames may be the last one of an episode, which starts no transition
_BLOCK = 4096  # rows copied at once
_POLICY_OUTPUTS = (schema.LOG_PROB, schema.VALUE, schema.POLICY_VERSION)


class _Ring:
    """Tensors of `size` rows by key. Rows are numbered from the first one written: row i is stored at i % size."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.size = device, 0
        self.tensors: dict[Key, Tensor] = {}

    def allocate(self, size: int, rows: Mapping[Key, Any]) -> None:
        """Allocate memory for `size` rows like these; floats are stored as float32."""
        examples = {key: _tensor(values) for key, values in rows.items()}
        row_bytes = sum(example.nbytes // len(example) for example in examples.values())
        check_memory("buffer_size", size, row_bytes, "observations", "use a smaller buffer_size", self.device)
        self.size = size
        for key, example in examples.items():
            dtype = torch.float32 if example.is_floating_point() else example.dtype
            self.tensors[key] = torch.zeros(size, *example.shape[1:], dtype=dtype, device=self.device)

    def resize(self, size: int, first: int, stop: int) -> None:
        """Move rows first … stop − 1 to a ring of another size."""
        numbers = torch.arange(first, stop, device=self.device)
        for key, rows in self.tensors.items():
            self.tensors[key] = rows.new_zeros(size, *rows.shape[1:])
            self.tensors[key][numbers % size] = rows[numbers % self.size]
        self.size = size

    def write(self, number: int, rows: Mapping[Key, Any]) -> None:
        """Write rows number, number + 1, …"""
        start = number % self.size
        left = self.size - start
        for key, tensor in self.tensors.items():
            values = to_device(_tensor(rows[key]).to(tensor.dtype), self.device)
            tensor[start : start + len(values)] = values[:left]
            if len(values) > left:
                tensor[: len(values) - left] = values[left:]

    def rows(self, numbers: Tensor) -> dict[Key, Tensor]:
        """Return the rows of these numbers."""
        index = numbers % self.size
        return {key: tensor.index_select(0, index) for key, tensor in self.tensors.items()}

    def state_dict(self, first: int, stop: int) -> dict[str, Tensor]:
        """Return rows first … stop − 1, with keys that are text."""
        if not self.tensors:
            return {}
        rows = self.rows(torch.arange(first, stop, device=self.device))
        return {_join(key): values.cpu() for key, values in rows.items()}


class TransitionRing:
    """Stores the latest `capacity` transitions. It allocates memory for all of them, or as `reserve` requests.

    With `n_step` n a transition is (s_t, a_t, Σ γ^k r_{t+k}, s_{t+n}), or shorter at the end of an episode, with
    `schema.DISCOUNT`: γ^n, or 0 after a terminal step. Samples come from its own random generator, or the given one.

    An action chunk [K, A] is one transition. Batches of chunks hold `schema.STEP_MASK`, bool [B, K]: which of its
    steps were taken before the episode ended.

    With `returns` batches hold `schema.VALUE_TARGET`, the discounted return from the transition to the end of its
    episode. Transitions then wait for the end of their episode before they can be sampled.
    """

    capturable = True  # `sample` may be captured in a CUDA graph
    kept: Sequence[Key] = ()
    """Further keys of a step that are stored, where a step has them; set before the first step is written."""

    def __init__(
        self,
        capacity: int,
        seed: int = 0,
        device: torch.device | str = "cpu",
        n_step: int = 1,
        gamma: float = 0.99,
        generator: torch.Generator | None = None,
        returns: bool = False,
    ) -> None:
        self.capacity, self.n_step, self.gamma, self.returns = capacity, n_step, gamma, returns
        self._room = capacity  # transitions for which memory is allocated
        self.device = torch.device(device)
        self.generator = generator or torch.Generator(self.device).manual_seed(seed)
        self._steps = _Ring(self.device)
        self._frames = _Ring(self.device)  # images
        self._num_frames = 0  # written so far
        self._written, self._oldest = 0, 0  # transitions, counted from the first one written
        self._bounds = torch.zeros(2, dtype=torch.float64, device=self.device)  # oldest, and count, on the device
        self._num_envs = 0
        self._last_frame: dict[int, int] = {}  # of each environment whose episode continues
        self._waiting: dict[int, deque[dict[Key, Any]]] = {}  # steps of each environment with fewer than n rewards
        self._unfinished: dict[int, deque[dict[Key, Any]]] = {}  # episodes whose return is not known yet
        self.num_moves = 0
        """How often the rows moved in memory: a CUDA graph that reads them must then be captured again."""
        self._weights: Tensor | None = None  # cumulative weights of the transitions, if they differ

    def __len__(self) -> int:
        """Return the number of transitions that can be sampled."""
        return self._written - self._oldest

    def reserve(self, count: int) -> bool:
        """Allocate memory for only `count` more steps, if that is less than the capacity; return whether rows moved.

        This saves memory in a run that will not write more. If it does, more memory is allocated.
        """
        waiting = sum(map(len, (*self._waiting.values(), *self._unfinished.values())))
        room = min(self.capacity, max(len(self) + waiting + count, 1))
        if not self._steps.tensors and not self._frames.tensors:
            self._room = room
            return False
        if room > self._room:
            self._grow(room)
            return True
        return False

    def _grow(self, room: int) -> None:
        self._room, self.num_moves = room, self.num_moves + 1
        self._steps.resize(room, self._oldest, self._written)
        if self._frames.tensors:
            size = max(self._frames_for(self._num_envs), self._frames.size)
            self._frames.resize(size, max(0, self._num_frames - self._frames.size), self._num_frames)

    # -- writing -------------------------------------------------------------------------------------------------------

    @torch.inference_mode(False)  # collectors write in inference mode; training needs ordinary tensors
    def write(self, row: Row, numbers: Sequence[int] | None = None) -> None:
        """Append one step of all environments, {key: [N, …]} with next observations.

        `numbers` are the indices of the environments if these are only some of them. Rows that `schema.STEP_MASK`
        excludes, if it is present, are not stored: their episode was lost. Tensors of environments are stored without
        a copy on the host; only the flags of ended episodes are copied there, if there are images.
        """
        # The policy's log-probs and values are not stored, and copying each of them would wait for the device.
        kept = {
            key: value
            for key, value in row.items()
            if key in self.kept or (key not in _POLICY_OUTPUTS and key[0] != schema.SAMPLE)
        }
        if isinstance(row[schema.NEXT_TERMINATED], Tensor):
            arrays: dict[Key, Any] = {key: to_device(_tensor(value), self.device) for key, value in kept.items()}
        else:
            arrays = {key: value if isinstance(value, np.ndarray) else to_numpy(value) for key, value in kept.items()}
        envs = np.arange(len(arrays[schema.NEXT_TERMINATED])) if numbers is None else np.asarray(numbers)
        mask = arrays.pop(schema.STEP_MASK, None)
        if mask is not None:
            arrays = {key: value[mask] for key, value in arrays.items()}
            mask = _array(mask)
            self.cut(envs[~mask].tolist())
            envs = envs[mask]
        terminated = arrays[schema.NEXT_TERMINATED]
        if len(envs):
            self._add(arrays, terminated, terminated | arrays[schema.NEXT_TRUNCATED], envs.tolist())

    @torch.inference_mode(False)
    def extend(self, episode: Episode, chunk_length: int = 1) -> None:
        """Append a whole episode of a dataset, as single steps or as chunks.

        A chunk starts at every step; with images at every K-th one, so that each image is stored once.
        """
        if chunk_length > 1:
            self._extend_chunks(episode, chunk_length)
            return
        steps: dict[Key, Any] = {schema.ACTION: episode.action, schema.NEXT_REWARD: episode.reward}
        for name, stream in episode.streams.items():
            key: Key = (schema.OBSERVATION, name) if name else schema.OBSERVATION
            steps[key], steps[_following(key)] = stream[:-1], stream[1:]
        self._add_episode(steps, episode.terminated, 0)  # a recording is of one environment

    def _extend_chunks(self, episode: Episode, chunk_length: int) -> None:
        has_images, count = any(map(_is_image, episode.streams.values())), len(episode)
        starts = np.arange(0, count, chunk_length if has_images else 1)
        ends = np.minimum(starts + chunk_length, count)
        inside = np.minimum(starts[:, None] + np.arange(chunk_length), count - 1)
        weights = self.gamma ** np.arange(chunk_length) * (np.arange(chunk_length) < (ends - starts)[:, None])
        steps: dict[Key, Any] = {
            schema.ACTION: episode.action[inside],  # the last one is repeated
            schema.NEXT_REWARD: (episode.reward[inside] * weights).sum(1).astype(np.float32),
            schema.NEXT_NUM_STEPS: ends - starts,
        }
        for name, stream in episode.streams.items():
            key: Key = (schema.OBSERVATION, name) if name else schema.OBSERVATION
            steps[key], steps[_following(key)] = stream[starts], stream[ends]
        if self.returns:
            steps[schema.VALUE_TARGET] = self._returns({schema.NEXT_REWARD: episode.reward})[starts]
        self._add_episode(steps, episode.terminated[ends - 1], 0)

    def _add_episode(self, steps: dict[Key, Any], terminated: np.ndarray, env: int) -> None:
        """Append the steps of a whole episode, {key: [T, …]}, of one environment."""
        count = len(terminated)
        done = terminated.copy()
        done[-1] = True
        if self.returns and schema.VALUE_TARGET not in steps:
            steps = {**steps, schema.VALUE_TARGET: self._returns(steps)}
        alone = self.n_step > 1 or any(map(_is_image, steps.values()))
        size = 1 if alone else self.capacity  # n-step returns and shared images need single steps
        for start in range(0, count, size):
            part = slice(start, start + size)
            rows = {key: value[part] for key, value in steps.items()}
            self._add(rows, terminated[part], done[part], [env] * len(done[part]))

    def _returns(self, steps: dict[Key, Any]) -> np.ndarray:
        """G_t = r_t + γ^k G_{t+1} to the end of an episode, where step t took k env steps."""
        rewards = steps[schema.NEXT_REWARD]
        discounts = self.gamma ** np.asarray(steps.get(schema.NEXT_NUM_STEPS, np.ones(len(rewards))), np.float64)
        returns, following = np.zeros(len(rewards)), 0.0
        for step in range(len(rewards) - 1, -1, -1):
            returns[step] = following = float(rewards[step]) + discounts[step] * following
        return returns.astype(np.float32)

    def _hold(self, arrays: dict[Key, Any], done: Any, envs: list[int]) -> None:
        """Keep rows until their episodes end, and append these."""
        done, rows = _array(done), {key: _array(value) for key, value in arrays.items()}
        for index, env in enumerate(envs):
            # A copy: the environments write their next observation to the same memory.
            steps = self._unfinished.setdefault(env, deque())
            steps.append({key: np.array(value[index]) for key, value in rows.items()})
            if done[index]:
                del self._unfinished[env]
                whole = {key: np.stack([step[key] for step in steps]) for key in rows}
                self._add_episode(whole, whole[schema.NEXT_TERMINATED], env)

    def _add(self, arrays: dict[Key, Any], terminated: Any, done: Any, envs: list[int]) -> None:
        """Append rows, which are numpy arrays or tensors."""
        self._num_envs = max(self._num_envs, max(envs) + 1)
        if self.returns and schema.VALUE_TARGET not in arrays:
            self._hold(arrays, done, envs)
            return
        steps: dict[Key, Any] = {key: arrays[key] for key in (schema.ACTION, *self.kept) if key in arrays}
        if self.returns:
            steps[schema.VALUE_TARGET] = arrays[schema.VALUE_TARGET]
        if schema.NEXT_NUM_STEPS in arrays:
            steps[schema.STEP_MASK] = _steps_taken(arrays[schema.NEXT_NUM_STEPS], arrays[schema.ACTION].shape[1])
        images: dict[Key, tuple[Any, Any]] = {}
        for key, value in arrays.items():
            if key != schema.OBSERVATION and key[0] != schema.OBSERVATION:
                continue
            following = arrays[_following(key)]
            if _is_image(value):
                images[key] = value, following
            else:
                steps[key], steps[_following(key)] = value, following
        if images or self.n_step > 1:
            done = _array(done)
        if images:
            steps[_FRAME], steps[_NEXT_FRAME] = self._keep_images(images, done, envs)
        discount = self._discounts(arrays, terminated)
        if self.n_step == 1:
            reward = arrays[schema.NEXT_REWARD]
            self._append({**steps, schema.NEXT_REWARD: reward, schema.DISCOUNT: discount}, len(envs))
            return
        steps = {key: _array(value) for key, value in steps.items()}
        reward, discount = np.asarray(_array(arrays[schema.NEXT_REWARD]), np.float32), _array(discount)
        for index, env in enumerate(envs):
            # A copy: the environments write their next observation to the same memory.
            step = {key: np.array(value[index]) for key, value in steps.items()}
            self._gather(env, step, reward[index], discount[index], bool(done[index]))

    def _discounts(self, arrays: dict[Key, Any], terminated: Any) -> Any:
        if isinstance(terminated, Tensor):
            gamma_n = self.gamma ** arrays.get(schema.NEXT_NUM_STEPS, torch.ones_like(terminated, dtype=torch.float32))
            return gamma_n * ~terminated
        gamma = np.float32(self.gamma)
        if schema.NEXT_NUM_STEPS in arrays:  # a chunk of several env steps
            return np.where(terminated, 0.0, gamma ** arrays[schema.NEXT_NUM_STEPS]).astype(np.float32)
        return np.where(terminated, np.float32(0.0), gamma)

    def _gather(self, env: int, step: dict[Key, Any], reward: Any, discount: Any, done: bool) -> None:
        """Add this reward to the waiting steps of an environment, and store those that have n rewards."""
        waiting = self._waiting.setdefault(env, deque())
        waiting.append({**step, schema.NEXT_REWARD: np.float32(0.0), schema.DISCOUNT: np.float32(1.0)})
        for earlier in waiting:
            earlier[schema.NEXT_REWARD] += earlier[schema.DISCOUNT] * reward
            earlier[schema.DISCOUNT] *= discount
        while waiting and (done or len(waiting) >= self.n_step):
            first = waiting.popleft()
            for key, value in step.items():
                if key == _NEXT_FRAME or key[0] == schema.NEXT:
                    first[key] = value
            self._append({key: np.asarray(value)[None] for key, value in first.items()}, 1)

    def _append(self, rows: dict[Key, Any], count: int) -> None:
        held = len(self) + count
        if held > self._room < self.capacity:
            self._grow(min(self.capacity, max(held, 2 * self._room)))
        if not self._steps.tensors:
            if count > self.capacity:
                raise InputError(
                    f"buffer_size: {self.capacity} is smaller than the {count} environments; use a larger one"
                )
            self._steps.allocate(self._room, rows)
        self._steps.write(self._written, rows)
        self._written += count
        self._oldest = max(self._oldest, self._written - self.capacity)
        if self._frames.tensors:
            self._forget_overwritten()
        if self.device.type != "cpu":
            self._bounds.copy_(to_device(np.array([self._oldest, len(self)], np.float64), self.device))

    # -- images --------------------------------------------------------------------------------------------------------

    def _keep_images(
        self, images: dict[Key, tuple[Any, Any]], done: np.ndarray, envs: list[int]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Store the images before and after a step and return their numbers; the last step's image is reused."""
        if not self._frames.tensors:
            self._frames.allocate(
                self._frames_for(self._num_envs), {key: before for key, (before, _) in images.items()}
            )
        numbers = np.array([self._last_frame.get(env, -1) for env in envs])
        is_first = numbers < 0
        if is_first.any():
            index: Any = np.flatnonzero(is_first)
            before = {key: pair[0] for key, pair in images.items()}
            numbers[index] = self._keep({key: value[_index(index, value)] for key, value in before.items()}, len(index))
        next_numbers = self._keep({key: pair[1] for key, pair in images.items()}, len(envs))
        self._last_frame.update(zip(envs, next_numbers.tolist(), strict=True))
        for place in np.flatnonzero(done):
            del self._last_frame[envs[place]]
        return numbers, next_numbers

    def _frames_for(self, num_envs: int) -> int:
        most = self.capacity + self.capacity // _EXTRA_FRAMES
        return min(most, 2 * self._room) + 4 * (self.n_step + 1) * num_envs  # a transition has at most two new images

    def _keep(self, images: dict[Key, Any], count: int) -> np.ndarray:
        """Store `count` images of each key; return their numbers."""
        self._frames.write(self._num_frames, images)
        self._num_frames += count
        return np.arange(self._num_frames - count, self._num_frames)

    def _forget_overwritten(self) -> None:
        """Remove transitions whose images are overwritten: many short episodes need more images than expected.

        Images of several environments, and of waiting steps, have another order than their transitions, so transitions
        whose images could be overwritten are removed too.
        """
        slack = 2 * (self.n_step + 1) * self._num_envs
        numbers, gone = self._steps.tensors[_FRAME], self._num_frames - self._frames.size + slack
        while gone > 0 and self._oldest < self._written and int(numbers[self._oldest % self._room]) < gone:
            start, count = self._oldest % self._room, min(_BLOCK, self._written - self._oldest)
            is_gone = numbers[start : start + count] < gone
            self._oldest += int(is_gone.cumprod(0).sum())  # those before the first that remains

    def cut(self, numbers: Sequence[int] | None = None) -> None:
        """Discard waiting steps of all environments, or of these: they begin new episodes."""
        for waiting in (self._waiting, self._unfinished, self._last_frame):
            for number in list(waiting) if numbers is None else numbers:
                waiting.pop(number, None)

    # -- sampling ------------------------------------------------------------------------------------------------------

    def sample(self, batch_size: int) -> Batch:
        """Return a batch in the schema's keys, sampled with replacement."""
        if self._weights is not None:
            return self._rows(weighted_draws(self._weights, batch_size, self.generator) + self._oldest)
        if self.device.type == "cpu":
            drawn = torch.randint(len(self), (batch_size,), generator=self.generator) + self._oldest
        else:  # the bounds change between replays of a CUDA graph, so they are read on the device
            share = torch.rand(batch_size, generator=self.generator, device=self.device, dtype=torch.float64)
            drawn = (self._bounds[0] + share * self._bounds[1]).long()
        return self._rows(drawn)

    def weight_interventions(self, marks: np.ndarray, weight: float) -> None:
        """Sample the marked transitions, bool [N] in the order of writing, `weight` times as often as others.

        For a ring that is full and no longer written to.
        """
        self._weights = cumulative_weights(torch.from_numpy(marks).to(self.device), weight)

    def _rows(self, numbers: Tensor) -> Batch:
        batch: Batch = {}
        for key, column in self._steps.rows(numbers).items():
            _put(batch, key, column)
        if self._frames.tensors:
            for key, images in self._frames.rows(batch[_FRAME]).items():
                _put(batch, key, images)
            for key, images in self._frames.rows(batch[_NEXT_FRAME]).items():
                _put(batch, _following(key), images)
        return batch

    def observations(self) -> Iterator[Any]:
        """Yield the observations at which transitions start, in blocks, for observation normalisation."""
        for start in range(self._oldest, self._written, _BLOCK):
            stop = min(start + _BLOCK, self._written)
            yield self._rows(torch.arange(start, stop, device=self.device))[schema.OBSERVATION]

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the whole buffer, with the transitions in their order: a resumed run samples the same batches."""
        return {
            "columns": self._steps.state_dict(self._oldest, self._written),
            "frames": self._frames.state_dict(max(0, self._num_frames - self._frames.size), self._num_frames),
            "num_frames": self._num_frames,
            "num_envs": self._num_envs,
            "last_frame": dict(self._last_frame),
            "waiting": _steps_state(self._waiting),
            "unfinished": _steps_state(self._unfinished),
            "written": self._written,
            "oldest": self._oldest,
            "generator": self.generator.get_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned; a smaller buffer stores the latest transitions."""
        restore_generator(self.generator, state["generator"])
        self._waiting = _steps_of(state["waiting"])
        self._unfinished = _steps_of(state.get("unfinished", {}))
        self._num_envs, self._last_frame = state["num_envs"], dict(state["last_frame"])
        self._steps, self._frames = _Ring(self.device), _Ring(self.device)
        count = state["written"] - state["oldest"]
        self._room = min(self.capacity, max(self._room, count))
        self._written = self._oldest = state["oldest"]
        self._num_frames = state["num_frames"]
        frames = {_split(key): kept for key, kept in state["frames"].items()}
        if frames:
            held = len(next(iter(frames.values())))
            self._frames.allocate(max(self._frames_for(self._num_envs), held), frames)
            for start in range(0, held, _BLOCK):
                block = {key: kept[start : start + _BLOCK] for key, kept in frames.items()}
                self._frames.write(self._num_frames - held + start, block)
        size = min(_BLOCK, self.capacity)
        for start in range(0, count, size):
            rows = {_split(key): column[start : start + size].numpy() for key, column in state["columns"].items()}
            self._append(rows, min(size, count - start))


def _steps_taken(num_steps: Any, chunk_length: int) -> Any:
    """Return which steps of chunks were taken, bool [N, K], as an array or a tensor."""
    if isinstance(num_steps, Tensor):
        return torch.arange(chunk_length, device=num_steps.device) < num_steps[:, None]
    return np.arange(chunk_length) < num_steps[:, None]


def _steps_state(waiting: Mapping[int, Iterable[Mapping[Key, Any]]]) -> dict[int, list[dict[str, Tensor]]]:
    """Return the steps of each environment as tensors with keys that are text."""
    return {
        env: [{_join(key): torch.as_tensor(np.asarray(value)) for key, value in step.items()} for step in steps]
        for env, steps in waiting.items()
    }


def _steps_of(state: Mapping[int, Iterable[Mapping[str, Tensor]]]) -> dict[int, deque[dict[Key, Any]]]:
    """The inverse of `_steps_state`."""
    return {
        env: deque({_split(key): value.numpy() for key, value in step.items()} for step in steps)
        for env, steps in state.items()
    }


def _is_image(rows: Any) -> bool:
    """Return whether rows are uint8 arrays or tensors of two or more dimensions."""
    return rows.dtype in (np.uint8, torch.uint8) and rows.ndim > 2


def _tensor(values: Any) -> Tensor:
    return values if isinstance(values, Tensor) else torch.as_tensor(np.asarray(values))


def _array(values: Any) -> np.ndarray:
    return to_numpy(values) if isinstance(values, Tensor) else np.asarray(values)


def _index(rows: np.ndarray, values: Any) -> Any:
    """Return row numbers as an index of `values`."""
    return to_device(rows, values.device) if isinstance(values, Tensor) else rows


def _following(key: Key) -> Key:
    """Return the key of the next observation of a stream."""
    return schema.NEXT_OBSERVATION if isinstance(key, str) else (*schema.NEXT_OBSERVATION, *key[1:])


def _put(batch: Batch, key: Key, value: Tensor) -> None:
    """Add a column to a batch; named streams are grouped as one observation."""
    if isinstance(key, tuple) and key[0] == schema.OBSERVATION:
        batch.setdefault(schema.OBSERVATION, {})[key[1]] = value
    elif isinstance(key, tuple) and len(key) == 3:
        batch.setdefault(schema.NEXT_OBSERVATION, {})[key[2]] = value
    else:
        batch[key] = value


def _join(key: Key) -> str:
    return key if isinstance(key, str) else "\n".join(key)


def _split(key: str) -> Key:
    return tuple(key.split("\n")) if "\n" in key else key
