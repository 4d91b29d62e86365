"""The tabletop as one batched environment on MuJoCo Warp; its observations, rewards and flags are torch tensors.

`deft.envs.make` makes it for `env.vector: warp`. Scenes, tasks, rewards and time limits are those of `TabletopEnv`, and
a seed gives the same scenes. Differences: physics in float32 without sleeping objects, images by ray tracing, and other
random colours of flickering lights and of the noise patch.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import warp as wp
from torch import Tensor

from deft.envs.layout import ActionLayout, ObservationLayout
from deft.envs.state import decode, encode
from deft.envs.tabletop.env import INSTRUCTION_LENGTH, RENDER_SIZE, TabletopEnv
from deft.envs.tabletop.model import HEAD_CAMERA, WRIST_CAMERA
from deft.envs.tabletop.starts import FIRST_RATE, PARTS, WHOLE, draw_part, updated
from deft.envs.tabletop.tasks import GOAL_TASKS, TASKS
from deft.envs.tabletop.warp.episodes import EpisodeSource
from deft.envs.tabletop.warp.model import batch_model
from deft.envs.tabletop.warp.rendering import Cameras
from deft.envs.tabletop.warp.simulation import WarpSimulation
from deft.envs.vector import Episode, VectorEnv, VectorStep
from deft.errors import NOT_FINITE, InputError, RunError, fits_memory
from deft.schema import decode_text

NUM_SCENES = 32_768
CAMERA_NAMES = {"head": HEAD_CAMERA, "wrist": WRIST_CAMERA}
TASK_NAMES = tuple(TASKS)

log = logging.getLogger(__name__)


class WarpTabletopEnv(VectorEnv):
    """N tabletops in one simulation. The tensors of a step stay valid until the call after next."""

    def __init__(
        self,
        num_envs: int,
        *,
        device: str | torch.device = "auto",
        num_scenes: int = NUM_SCENES,
        chunk_length: int = 1,
        gamma: float = 1.0,
        max_episode_steps: int | None = None,
        **arguments: Any,
    ) -> None:
        """`arguments` are those of `TabletopEnv`. After `num_scenes` scenes, the first ones follow again.

        With `chunk_length` above 1 an action is a chunk of steps, as in `deft.envs.ActionChunk`.
        """
        template = TabletopEnv(**arguments, max_episode_steps=max_episode_steps)
        layout = ObservationLayout(template.observation_space)
        actions = ActionLayout(_chunk_space(template.action_space, chunk_length))
        super().__init__(
            num_envs,
            observation_space=layout.space,
            action_space=actions.space,
            chunk_length=chunk_length,
            reward_terms=template.reward_terms,
            has_splits=True,
        )
        self.device = choose_device(device)
        self._template = template
        self._arguments = arguments
        self._gamma = gamma
        self._max_episode_steps = max_episode_steps
        with self._fits_memory():
            self._allocate(num_scenes)

    def _fits_memory(self) -> contextlib.AbstractContextManager[None]:
        return fits_memory(f"use fewer environments than num_envs {self.num_envs}")

    def _allocate(self, num_scenes: int) -> None:
        num_envs, template = self.num_envs, self._template
        self._batch = batch_model(template)
        self._source = EpisodeSource(self._arguments, num_envs, max(1, num_scenes // num_envs), self.device)
        self.simulation = WarpSimulation(
            self._batch, num_envs, template.settings.control_mode, template.settings.action_scale, self.device
        )
        self._looks = self._allocate_looks()
        self._cameras: Cameras | None = None
        if template.settings.observation != "state":
            self._cameras = self._make_cameras(template.cameras, template.settings.image_size)
        self._observations = [self._allocate_observation() for _ in range(2)]
        self._final = self._allocate_observation() if self.chunk_length > 1 else None
        self._results = [_Result(num_envs, max(1, len(self.reward_terms)), self.device) for _ in range(2)]
        self._current = 0
        self._weights: Tensor | None = None
        self._rows = torch.arange(num_envs, dtype=torch.int32, device=self.device)
        self._instructions = self._zeros(INSTRUCTION_LENGTH, dtype=torch.uint8)
        self._episode_numbers = self._zeros(dtype=torch.int64)
        self._latest_episode = 0
        self._lengths = self._zeros(dtype=torch.int64)
        self._returns = self._zeros()
        self._term_sums = self._zeros(max(1, len(self.reward_terms)))
        self._has_starts = bool(template.settings.expert_starts)
        self._parts = self._zeros(dtype=torch.int64)  # of the expert's way, in which the present episodes began
        self._start_rates = torch.full((len(TASKS), PARTS), FIRST_RATE, device=self.device)
        self._no_rows = torch.zeros(0, dtype=torch.int64, device=self.device)
        self._generator = torch.Generator(self.device)
        self._seeds: list[int] = []
        self._groups = self._zeros(dtype=torch.int64)  # `EpisodeSource.groups`
        self._has_started = False
        self._closed = False

    @property
    def observation(self) -> Any:
        """The latest observation."""
        return _streams(self._observations[self._current])

    @property
    def reward_weights(self) -> Any:
        """[K]: weights of the reward terms; None: all are 1."""
        return self._weights

    @reward_weights.setter
    def reward_weights(self, weights: Any) -> None:
        self._weights = None if weights is None else torch.as_tensor(weights, dtype=torch.float32, device=self.device)

    def reset(self, seed: int | Sequence[int] | None = None) -> Any:
        """Start an episode in every environment; environment i gets `seed + i`, or the i-th of several seeds."""
        if seed is not None or not self._has_started:
            drawn = np.random.SeedSequence().generate_state(self.num_envs).tolist()
            self._start_seeds(drawn if seed is None else [int(one or 0) for one in self._env_seeds(seed)])
            self._generator.manual_seed(self._seeds[0])
            self._episode_numbers.zero_()
            self._latest_episode = 0
        else:
            self._episode_numbers += 1
            self._latest_episode += 1
        self._begin_all()
        self._current ^= 1
        self._observe(self._rows, self._observations[self._current])
        return self.observation

    def _start_seeds(self, seeds: list[int]) -> None:
        self._seeds = seeds
        self._start_rates.fill_(FIRST_RATE)
        self._source.start(seeds)
        self._groups.copy_(torch.from_numpy(self._source.groups))

    def _begin_all(self) -> None:
        """Start the present episode of every environment; the first time, compile the simulation."""
        rows = self._rows.long()
        with self._fits_memory():
            self._begin(rows)
            if not self._has_started:
                self.simulation.prepare()
                self._begin(rows)
                self._has_started = True

    def step(self, actions: Any) -> VectorStep:
        """Step every environment with its row of `actions`: a tensor or array [N, A], [N, K, A] for chunks."""
        actions = self._prepare(actions)
        self._current ^= 1
        result, present = self._results[self._current], self._observations[self._current]
        result.clear()
        ended = []
        for number in range(self.chunk_length):
            is_last = number == self.chunk_length - 1
            self._advance(actions[:, number], self._gamma**number, result)
            if is_last:
                self._observe(self._rows, present)
            # The only transfer of a step in which no episode ends: two numbers.
            newly = (result.terminated | result.truncated) & result.alive
            num_ended, num_bad = torch.stack([newly.sum(), (~torch.isfinite(actions)).sum()]).tolist()
            if num_bad:
                bad = int((~torch.isfinite(actions)).flatten(1).any(1).nonzero()[0])
                raise RunError(f"the policy's action for environment {bad} is infinite or not a number, {NOT_FINITE}")
            if num_ended:
                rows = newly.nonzero().squeeze(1)
                ended.append(rows)
                if self._final is not None:
                    self._observe(rows.int(), self._final)
                result.alive &= ~newly
        return self._finish(ended, result, present)

    def _finish(self, ended: list[Tensor], result: _Result, present: dict[str, Tensor]) -> VectorStep:
        """Restart the environments whose episodes ended, and return the result of the step."""
        rows, final, episodes = self._no_rows, None, []
        if ended:
            rows = torch.cat(ended).sort().values
            final = {name: stream[rows] for name, stream in (self._final or present).items()}
            episodes = self._end_episodes(rows, result.success)
            self._begin(rows)
            self._observe(rows.int(), present)
        tensors: dict[str, Any] = {
            "observation": _streams(present),
            "reward": result.reward,
            "terminated": result.terminated,
            "truncated": result.truncated,
            "num_steps": result.num_steps,
            "done_index": rows,
            "final_observation": None if final is None else _streams(final),
            "lost_index": self._no_rows,
            "reward_terms": result.terms if self.reward_terms else None,
        }
        return VectorStep(episodes=episodes, **tensors)

    def render(self, index: int = 0) -> np.ndarray | None:
        """Return the head camera's image of one environment for videos, uint8 [320, 320, 3]."""
        cameras = self._make_cameras(("head",), RENDER_SIZE)
        images = self._zeros(3, RENDER_SIZE, RENDER_SIZE, dtype=torch.uint8)
        self._draw(cameras, self._rows[index : index + 1], images)
        return np.ascontiguousarray(images[index].permute(1, 2, 0).cpu().numpy())

    def get_state(self) -> list[dict[str, Any]] | None:
        """Return plain data for `set_state`: seed and episode, which give the scene, and the simulation's state."""
        if not self._has_started:
            raise InputError("get_state() was called before reset()")
        saved = {name: tensor.cpu().numpy() for name, tensor in self._saved_tensors().items()}
        rates = {"start_rates": self._start_rates.cpu().numpy().copy()} if self._has_starts else {}
        return [
            encode(
                {"seed": self._seeds[index], **{name: values[index].copy() for name, values in saved.items()}, **rates}
            )
            for index in range(self.num_envs)
        ]

    def set_state(self, states: list[dict[str, Any]]) -> None:
        """Continue from saved states; the random colours of flickering lights and of the noise patch are new ones."""
        self._check_states(states)
        states = [decode(state) for state in states]
        self._start_seeds([int(state["seed"]) for state in states])
        self._latest_episode = max(int(state["episode"]) for state in states)
        self._episode_numbers.copy_(torch.tensor([int(state["episode"]) for state in states]))
        self._begin_all()
        for name, tensor in self._saved_tensors().items():
            if name in states[0]:
                tensor.copy_(torch.from_numpy(np.stack([state[name] for state in states])))
        if "start_rates" in states[0]:
            self._start_rates.copy_(torch.from_numpy(states[0]["start_rates"]))
        self.simulation.locate(None)
        self._current ^= 1
        self._observe(self._rows, self._observations[self._current])

    def _saved_tensors(self) -> dict[str, Tensor]:
        simulation = self.simulation
        return {
            "episode": self._episode_numbers,
            "length": self._lengths,
            "return": self._returns,
            "terms": self._term_sums,
            "qpos": simulation.qpos,
            "qvel": simulation.qvel,
            "ctrl": simulation.ctrl,
            "warmstart": simulation.warmstart,
            "targets": simulation.targets,
            "fingers": simulation.fingers,
            "potentials": simulation.episodes["potentials"],
            **({"part": self._parts} if self._has_starts else {}),
        }

    def state_obstacle(self) -> str | None:
        """Explain in one line why the state cannot be saved; None if it can."""
        return None

    def call(self, name: str, *args: Any) -> list[Any]:
        """Call a method that is the same for every environment: `action_names`."""
        if name != "action_names":
            return super().call(name, *args)
        return [self._template.action_names()] * self.num_envs

    def close(self) -> None:
        """Stop the processes that draw scenes. Further calls do nothing."""
        if not self._closed:
            self._closed = True
            self._source.close()

    # ---------------------------------------------------------------------------------------------------- episodes

    def _prepare(self, actions: Any) -> Tensor:
        """Return actions as a tensor [N, K, A]."""
        if not self._has_started:
            raise InputError("step() was called before reset()")
        actions = torch.as_tensor(actions, dtype=torch.float32, device=self.device)
        expected = (self.num_envs, *(self.action_space.shape or ()))
        if actions.shape != expected:
            raise InputError(
                f"actions have shape {tuple(actions.shape)}; {self.num_envs} environments with {self.action_space} "
                f"take {expected}"
            )
        return actions if self.chunk_length > 1 else actions[:, None]

    def _advance(self, actions: Tensor, discount: float, result: _Result) -> None:
        """Simulate one step; add it to the result of the environments whose episode has not ended."""
        self.simulation.actions.copy_(actions)
        self.simulation.advance()
        self.simulation.judge(result.step_terms, result.step_success, result.step_terminated)
        alive, terms = result.alive, result.step_terms * result.alive[:, None]
        reward = terms.sum(1) if self._weights is None else terms @ self._weights
        result.reward += discount * reward
        result.terms += terms
        result.num_steps += alive
        result.success |= result.step_success & alive
        result.terminated |= result.step_terminated & alive
        self._returns += reward
        self._term_sums += terms
        self._lengths += alive
        if self._max_episode_steps is not None:
            result.truncated |= (self._lengths >= self._max_episode_steps) & alive

    def _end_episodes(self, rows: Tensor, success: Tensor) -> list[Episode]:
        """Return the ended episodes; move their environments on to the next ones."""
        self._episode_numbers[rows] += 1
        if self._has_starts:
            self._note_successes(rows, success[rows])
        columns = [
            self._episode_numbers[rows, None],
            self._lengths[rows, None],
            success[rows, None],
            self.simulation.episodes["task"][rows, None],
            self._returns[rows, None],
            self._term_sums[rows],
            self._instructions[rows],
        ]
        table = torch.cat([column.double() for column in columns], 1).cpu().numpy()
        self._latest_episode = max(self._latest_episode, int(table[:, 0].max()))
        num_terms = self._term_sums.shape[1]
        episodes = []
        for index, row in zip(rows.tolist(), table, strict=True):
            task = TASK_NAMES[int(row[3])]
            text = decode_text(row[5 + num_terms :].astype(np.uint8))
            terms = dict(zip(self.reward_terms, row[5 : 5 + num_terms].tolist(), strict=False))
            won = bool(row[2]) if task in GOAL_TASKS else None
            labels = {"task": task, "instruction": text}
            episodes.append(Episode(index, float(row[4]), int(row[1]), won, terms, labels=labels))
        return episodes

    def _note_successes(self, rows: Tensor, success: Tensor) -> None:
        """Count the episodes that end in `rows` and began on the expert's way."""
        cells = self.simulation.episodes["task"][rows].long() * PARTS + self._parts[rows]
        is_counted = (self._parts[rows] != WHOLE).to(self._start_rates)
        nothing = torch.zeros_like(self._start_rates).flatten()
        episodes, successes = (
            nothing.index_add(0, cells.clamp(min=0), one).view_as(self._start_rates)
            for one in (is_counted, is_counted * success)
        )
        self._start_rates = updated(self._start_rates, episodes, successes)

    def _on_the_way(self, rows: Tensor, numbers: dict[str, Tensor]) -> dict[str, Tensor]:
        """Choose where on the expert's way the episodes of `rows` begin; return their numbers."""
        draw = numbers["start_draw"]
        part = draw_part(self._start_rates[numbers["task"].long()], draw)
        self._parts[rows] = torch.where(draw < 0, WHOLE, part)
        index = torch.arange(len(rows), device=self.device)
        names = [name.removeprefix("way_") for name in numbers if name.startswith("way_")]
        return {**numbers, **{name: numbers[f"way_{name}"][index, part] for name in names}}

    def _begin(self, rows: Tensor) -> None:
        """Start the present episode of the environments `rows`."""
        numbers = self._source.take(rows, self._episode_numbers[rows], self._latest_episode)
        if self._has_starts:
            numbers = self._on_the_way(rows, numbers)
        self.simulation.place(rows, numbers)
        self.simulation.locate(rows.int())
        for name, target in self._looks.items():
            target[rows] = numbers[name]
        self._instructions[rows] = numbers["instruction"]
        self._lengths[rows] = 0
        self._returns[rows] = 0.0
        self._term_sums[rows] = 0.0

    # ------------------------------------------------------------------------------------------------ observations

    def _zeros(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(self.num_envs, *shape, dtype=dtype, device=self.device)

    def _allocate_observation(self) -> dict[str, Tensor]:
        """Return tensors for the observation's streams; the name of a single one is ""."""
        template = self._template
        spaces = getattr(template.observation_space, "spaces", None)
        if spaces is None:
            return {"": self._zeros(template.observation_space.shape[0])}  # type: ignore[index]
        streams = {"state": self._zeros(spaces["state"].shape[0])}
        # views of one tensor, which the renderer fills
        side = template.settings.image_size
        images = self._zeros(3 * len(template.cameras), side, side, dtype=torch.uint8)
        for number, name in enumerate(template.cameras):
            streams[f"{name}_rgb"] = images[:, 3 * number : 3 * number + 3]
        streams["instruction"] = self._zeros(INSTRUCTION_LENGTH, dtype=torch.uint8)
        for further in ("places", "scene_state"):
            if further in spaces:
                streams[further] = self._zeros(spaces[further].shape[0])
        return {name: streams[name] for name in spaces}

    def _observe(self, rows: Tensor, streams: dict[str, Tensor]) -> None:
        """Write the present observations of the environments `rows` (int32)."""
        state = streams.get("", streams.get("state"))
        assert state is not None
        whole = streams.get("scene_state", state)
        self.simulation.observe(rows, whole, streams.get("places", state[:, :0]))
        if whole is not state:
            state[rows] = whole[rows, : state.shape[1]]
        if self._cameras is None:
            return
        streams["instruction"][rows] = self._instructions[rows]
        images = streams[f"{self._template.cameras[0]}_rgb"]
        shape = (self.num_envs, 3 * len(self._template.cameras), *images.shape[2:])
        self._draw(self._cameras, rows, images.as_strided(shape, images.stride(), images.storage_offset()))

    def _draw(self, cameras: Cameras, rows: Tensor, images: Tensor) -> None:
        looks = self._looks
        randomization = self._template.randomization
        if randomization.random_light and randomization.crazy_random_light_rate:
            colours = self._random(rows, looks["lights"].shape[1]) * 0.8 + 0.1
            flickers = looks["flickers"][rows, None, None] > 0
            looks["lights"][rows, :, 6:] = torch.where(flickers, colours, looks["lights"][rows, :, 6:])
        if self._batch.tiles:
            tiles = slice(self._batch.tiles[0], self._batch.tiles[-1] + 1)
            looks["rgba"][rows, tiles, :3] = self._random(rows, len(self._batch.tiles))
        with self.simulation.stream():
            cameras.render(wp.from_torch(rows), self.simulation.model.geom_rbound, self.simulation.data, images)

    def _random(self, rows: Tensor, count: int) -> Tensor:
        """Return random colours [rows, count, 3]; environments with the same seed have the same."""
        colours = torch.rand(self.num_envs, count, 3, generator=self._generator, device=self.device)
        return colours[self._groups[rows]]

    def _allocate_looks(self) -> dict[str, Tensor]:
        geoms = self._batch.model.ngeom
        return {
            "rgba": self._zeros(geoms, 4),
            "material": self._zeros(geoms, dtype=torch.int32),
            "lights": self._zeros(3, 9),
            "ambient": self._zeros(),
            "flickers": self._zeros(),
        }

    def _make_cameras(self, names: Sequence[str], size: int) -> Cameras:
        model = self._batch.model
        numbers = [model.camera(CAMERA_NAMES[name]).id for name in names]
        cameras = Cameras(model, numbers, size, self.num_envs, self.simulation.device)
        cameras.looks.size = self.simulation.model.geom_size
        cameras.looks.rgba = wp.from_torch(self._looks["rgba"], dtype=wp.vec4)
        for name in ("material", "lights", "ambient"):
            setattr(cameras.looks, name, wp.from_torch(self._looks[name]))
        return cameras


class _Result:
    """The tensors of one step of N environments, and of the last step of its chunk."""

    def __init__(self, num_envs: int, num_terms: int, device: torch.device) -> None:
        def flags() -> Tensor:
            return torch.zeros(num_envs, dtype=torch.bool, device=device)

        self.reward = torch.zeros(num_envs, device=device)
        self.terms = torch.zeros(num_envs, num_terms, device=device)
        self.num_steps = torch.zeros(num_envs, dtype=torch.int64, device=device)
        self.success, self.terminated, self.truncated, self.alive = flags(), flags(), flags(), flags()
        self.step_terms = torch.zeros(num_envs, num_terms, device=device)
        self.step_success, self.step_terminated = flags(), flags()

    def clear(self) -> None:
        """Prepare for a step."""
        for tensor in (self.reward, self.terms, self.num_steps, self.success, self.terminated, self.truncated):
            tensor.zero_()
        self.alive.fill_(True)


def _streams(streams: dict[str, Tensor]) -> Any:
    """Return an observation: its streams, or the single one without a name."""
    return streams[""] if "" in streams else dict(streams)


def _chunk_space(space: Any, chunk_length: int) -> Any:
    if chunk_length == 1:
        return space
    low, high = (np.tile(bound, (chunk_length, 1)) for bound in (space.low, space.high))
    return type(space)(low, high, dtype=space.dtype.type)


def choose_device(device: str | torch.device) -> torch.device:
    """Return the torch device of a name; `auto` is the GPU if there is one."""
    if str(device) == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
        if device == "cpu":
            log.warning(
                "torch finds no CUDA device: MuJoCo Warp simulates on the CPU, where `--vector process` is faster"
            )
    try:
        chosen = torch.device(device)
    except RuntimeError:
        chosen = torch.device("meta")
    if chosen.type not in ("cpu", "cuda"):
        raise InputError(f"device is {str(device)!r}; env.vector warp takes auto, cpu, cuda or cuda:N")
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise InputError(f"device is {str(device)!r}, but torch finds no CUDA device; use --device cpu")
    if chosen.type == "cuda" and chosen.index is None:
        chosen = torch.device("cuda", torch.cuda.current_device())
    return chosen
