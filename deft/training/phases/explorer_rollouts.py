"""Rollouts of an explorer: whole episodes, the world model's measures of them, and PPO.

Phases 2 and 3 use it alike:

    found = rollouts.collect()                                    the explorer acts: wrist camera alone, its own memory
    measures = measure(world_model, found)                        the world model observes: head and wrist, its memory
    found.pay(*reward(measures))                                  a reward for each (s_t, a_t, s_{t+1})
    metrics = ppo.update(iter([found.rollout]))                   PPO of the core

Only counters are carried from one rollout to the next: every rollout starts new episodes, whose scenes follow from the
seed and their number, so a resumed run is equal bit for bit.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from deft import schema
from deft.algorithms.algorithm import Metrics
from deft.algorithms.optimization import FlatAdam, clip_gradients, gradients_of
from deft.algorithms.ppo import PPO
from deft.config.f1_settings import ExplorerSettings
from deft.config.settings import EnvConfig
from deft.data.episodes import EpisodeBatch, batch_episodes
from deft.data.robot_episode import RobotEpisode
from deft.envs.f1 import ContactEnv, F1RLEnv, read_task_config
from deft.envs.history import executed_action
from deft.envs.make import make_tensor_env
from deft.envs.process import ProcessVectorEnv
from deft.envs.serial import SerialVectorEnv
from deft.envs.vector import VectorEnv, VectorStep
from deft.evaluation.world_model import step_results
from deft.machine import available_cores
from deft.models.f1.explorer import ExplorerPolicy
from deft.models.f1.frames import to_model
from deft.models.f1.policy import F1Policy
from deft.runs.processes import Processes
from deft.runs.random_state import process_seed
from deft.runs.rollout import rollout
from deft.runs.signals import raise_if_stopped
from deft.training.phases.exploration import Exploration

log = logging.getLogger(__name__)
STREAMS = ("wrist", "head", "state", "codes")  # of the frames that episodes are made of
MEASURED_TOGETHER = 512  # episodes
ACTING_RATE = 0.1  # the learning rate of the parameters that act, relative to that of the others


def make_student_env(environment: Mapping[str, Any]) -> F1RLEnv:
    """The student's environment, with the head camera for the world model and a count of contacts."""
    return ContactEnv(environment)


def open_envs(
    exploration: Exploration,
    num_envs: int,
    make: Callable[[Mapping[str, Any]], gymnasium.Env] = make_student_env,
    vector: str = "process",
    device: torch.device | None = None,
) -> tuple[VectorEnv, int]:
    """Make the environments that are explored; return them and the steps of an episode.

    They run in processes if there are several cores, or, with `vector` warp, in one simulation on `device`. Their own
    time limit is one step longer: the last step then does not reset the scene, which would take long.
    """
    num_steps = read_task_config(exploration.environment, {}).max_steps
    if vector == "warp":
        task = {**exploration.environment, "max_steps": num_steps + 1, "need_head_camera": True}
        config = EnvConfig(id="f1-student", vector="warp", num_envs=num_envs, kwargs={"task_config": task})
        return make_tensor_env(config, device=str(device or "auto")), num_steps
    functions = [partial(make, exploration.environment | {"max_steps": num_steps + 1}) for _ in range(num_envs)]
    if num_envs == 1 or available_cores() == 1:
        return SerialVectorEnv(functions), num_steps
    return ProcessVectorEnv(functions, restart_workers=0), num_steps


@dataclass
class Collected:
    """A rollout [T, N], one column an episode of T steps (or several, if the environment ended some early)."""

    rollout: TensorDict
    episodes: list[RobotEpisode]  # with head camera and codes
    positions: list[tuple[int, int]]  # of each: its first step and its column in the rollout
    remembered: Tensor  # [T, N, hidden]: the explorer's memory after each step
    contacts: int | None = None  # steps after which the robot touched an object, where the environment knows
    terms: dict[str, Tensor] = field(default_factory=dict)  # the reward's, [T, N] each
    streams: dict[str, Tensor] | None = None  # all episodes [N, T + 1, …] on the device, if each column is one of them

    def batch(self, policy: F1Policy) -> EpisodeBatch:
        """The episodes side by side, as a world model takes them."""
        config = policy.config
        if self.streams is not None:
            lengths = torch.full((len(self.episodes),), len(self.rollout))
            return EpisodeBatch(self.streams, lengths, config.n_obs_img_steps, config.obs_img_stride)
        return batch_episodes(self.episodes, config.n_obs_img_steps, config.obs_img_stride, policy.device)

    def spread(self, values: Tensor) -> Tensor:
        """Values of the episodes' steps, [longest, E, …], at their positions in the rollout, [T, N, …]."""
        if self.streams is not None:
            return values[: len(self.rollout)]
        found = values.new_zeros(*self.rollout.batch_size, *values.shape[2:])
        for index, (episode, (start, column)) in enumerate(zip(self.episodes, self.positions, strict=True)):
            found[start : start + len(episode), column] = values[: len(episode), index]
        return found

    def starts(self) -> Tensor:
        """bool [T, N]: which steps are an episode's first."""
        found = torch.zeros(self.rollout.batch_size, dtype=torch.bool, device=self.remembered.device)
        if self.streams is not None:
            found[0] = True
            return found
        for start, column in self.positions:
            found[start, column] = True
        return found

    def executed(self) -> Tensor:
        """The executed actions, [T, N, A]."""
        if self.streams is not None:
            return self.streams["action"].transpose(0, 1)
        longest = max(map(len, self.episodes))
        found = torch.zeros(longest, len(self.episodes), self.episodes[0].action.shape[-1])
        for row, episode in enumerate(self.episodes):
            found[: len(episode), row] = torch.as_tensor(episode.action)
        return self.spread(found)

    def observed(self) -> dict[str, float]:
        """What is observed of the episodes, and is no part of a reward: contacts with objects per 1,000 steps."""
        return {} if self.contacts is None else {"contacts_per_1000": 1000.0 * self.contacts / self.rollout.numel()}

    def pay(self, reward: Tensor, terms: dict[str, Tensor] | None = None) -> None:
        """Put the reward [T, N] into the rollout."""
        self.rollout[schema.NEXT_REWARD] = reward.to(self.remembered.device, torch.float32)
        self.terms = terms or {}


class ExplorerRollouts:
    """Collects rollouts of an explorer; owns the environments."""

    def __init__(
        self,
        explorer: ExplorerPolicy,
        env: VectorEnv,
        exploration: Exploration,
        num_steps: int,
        num_episodes: int,
        first: int = 0,
        every: int = 1,
    ) -> None:
        """Rollouts of `num_episodes` of `num_steps` steps; `first` and `every` split the scenes among processes.

        The environments' own time limit must be longer than `num_steps`, so that the last step resets no scene.
        """
        self.explorer, self.env, self.exploration = explorer, env, exploration
        self.num_steps = num_steps
        self.num_rounds = -(-num_episodes // env.num_envs)
        self.num_begun = 0  # rounds of all rollouts so far
        self._first, self._every = first, every
        self._restarts = True  # whether the next scenes are drawn from seeds, with an environment on the GPU

    @property
    def num_episodes(self) -> int:
        """Episodes of a rollout."""
        return self.num_rounds * self.env.num_envs

    @torch.no_grad()
    def collect(
        self,
        act: Callable[[TensorDict], TensorDictBase] | None = None,
        version: int = 0,
        watch: Callable[[int], None] | None = None,
        num_rounds: int | None = None,
    ) -> Collected:
        """A rollout of new episodes; `version`: which weights act.

        `act` replaces the explorer's method; its actions are executed without `action_scale`.
        `watch` is called with the number of episodes that have just been collected. `num_rounds`: episodes of each
        environment, by default as many as a rollout has.
        """
        rounds = []
        for _ in range(self.num_rounds if num_rounds is None else num_rounds):
            rounds.append(self._round(act, version))
            if watch is not None:
                watch(self.env.num_envs)
        if log.isEnabledFor(logging.DEBUG):  # reading the values waits for the device
            last = rounds[-1].remembered[-1]
            text = "memory state of the explorer: zeros at first, then (batch, hidden) = %s, mean |m| %.4f"
            log.debug(text, tuple(last.shape), float(last.abs().mean()))
        width = self.env.num_envs
        return Collected(
            torch.cat([one.rollout for one in rounds], 1),
            [episode for one in rounds for episode in one.episodes],
            [(start, column + width * number) for number, one in enumerate(rounds) for start, column in one.positions],
            torch.cat([one.remembered for one in rounds], 1),
            _total([one.contacts for one in rounds]),
            streams=_joined([one.streams for one in rounds]),
        )

    def state_dict(self) -> dict[str, Any]:
        """The number of rounds, which determines the next scenes."""
        return {"num_begun": self.num_begun}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`."""
        self.num_begun, self._restarts = state["num_begun"], True

    def close(self) -> None:
        """Free the environments."""
        self.env.close()

    # -- a round -------------------------------------------------------------------------------------------------------

    def _round(self, act: Callable[[TensorDict], TensorDictBase] | None, version: int) -> Collected:
        """One episode in every environment (one that ends early starts another)."""
        explorer, count, is_on_device = self.explorer, self.env.num_envs, self.env.device is not None
        numbers, seeds = self._next_scenes()
        # On the GPU the following scenes of every seed are drawn ahead of time, while the simulation runs.
        first = self.env.reset(seeds if self._restarts or not is_on_device else None)
        self._restarts = False
        seen, reached = [self._frames(first)], list[TensorDict]()  # before and after each step
        self.env.call("take_contacts")  # of a rollout that was stopped
        memory, noise = explorer.initial_memory(count), explorer.draw_noise(count)
        steps: list[TensorDictBase] = []
        remembered: list[Tensor] = []
        executed: list[Any] = []

        def choose(_: Any) -> Any:
            raise_if_stopped()
            td = TensorDict(
                {
                    schema.OBSERVATION: _observation(seen[-1]),
                    schema.MEMORY: memory,
                    schema.ACTION_MASK: explorer.action_mask.expand(count, -1),
                    schema.SAMPLE: TensorDict({schema.NOISE: noise}, batch_size=[count]),
                },
                batch_size=[count],
            )
            steps.append(explorer.act(td) if act is None else act(td))
            action = steps[-1][schema.ACTION]
            taken = explorer.executed(action) if act is None else executed_action(action, explorer.action_mask)
            executed.append(taken if is_on_device else taken.cpu().numpy())
            return executed[-1]

        def sink(_: Any, __: Any, step: VectorStep) -> None:
            nonlocal memory, noise
            acted, is_last = steps[-1], len(steps) == self.num_steps
            after, following = acted[schema.NEXT_MEMORY], self._frames(step.observation)
            true_next = following
            if step.final_observation is not None:  # never the frame after a reset
                true_next = following.clone()
                true_next[torch.as_tensor(step.done_index)] = self._frames(step.final_observation)
            terminated = _copy(step.terminated)
            truncated = (_copy(step.truncated) | is_last) & ~terminated
            ends, nothing = is_last or len(step.done_index) > 0, torch.zeros(count, device=terminated.device)
            acted[schema.NEXT] = TensorDict(
                {
                    schema.REWARD: nothing,
                    schema.TERMINATED: terminated,
                    schema.TRUNCATED: truncated,
                    schema.VALUE: self._bootstrap(true_next, after, truncated) if ends else torch.zeros_like(nothing),
                },
                batch_size=[count],
            )
            acted[schema.POLICY_VERSION] = torch.full((count,), version)
            remembered.append(after[:, -1])
            reached.append(true_next)
            if is_last:
                return
            seen.append(following)
            ended = (terminated | truncated).to(after.device)
            memory = after * ~ended[:, None, None]
            noise = explorer.draw_noise(count, noise, ended)

        rollout(self.env, choose, sink, None, self.num_steps)
        found: Any = torch.stack(steps).to(explorer.device)
        contacts = _total(self.env.call("take_contacts"))
        if is_on_device and not bool(found[schema.NEXT_TERMINATED].any()):
            streams = {name: torch.stack([one[name] for one in (seen[0], *reached)], 1) for name in STREAMS}
            streams["action"] = torch.stack(executed, 1)
            rows = [
                RobotEpisode(**{name: values[column] for name, values in streams.items()}, number=number)
                for column, number in enumerate(numbers)
            ]
            positions = [(0, column) for column in range(count)]
            return Collected(found, rows, positions, torch.stack(remembered), contacts, streams=streams)
        if is_on_device:
            executed = [one.cpu().numpy() for one in executed]
        before, after = (
            {name: torch.stack([one[name] for one in frames]).cpu().numpy() for name in STREAMS}
            for frames in (seen, reached)
        )
        over = (found[schema.NEXT_TERMINATED] | found[schema.NEXT_TRUNCATED]).cpu().numpy()
        episodes: list[RobotEpisode] = []
        positions = []
        for column, number in enumerate(numbers):
            start = 0
            for end in (np.flatnonzero(over[:, column]) + 1).tolist():
                arrays = {
                    name: np.concatenate([before[name][start : start + 1, column], after[name][start:end, column]])
                    for name in STREAMS
                }
                action = np.stack([one[column] for one in executed[start:end]])
                episodes.append(RobotEpisode(**arrays, action=action, number=number))
                positions.append((start, column))
                start = end
        return Collected(found, episodes, positions, torch.stack(remembered), contacts)

    def _next_scenes(self) -> tuple[list[int], list[int]]:
        """The numbers of the next round's episodes, and the seeds of their scenes, kept for `scenes_kept` rounds."""
        kept, width = self.exploration.scenes_kept, self.env.num_envs
        number, scene = (
            (rounds * self._every + self._first) * width for rounds in (self.num_begun, self.num_begun // kept)
        )
        self.num_begun += 1
        return list(range(number, number + width)), [self.exploration.scene_seed(scene + i) for i in range(width)]

    def _frames(self, observation: Any) -> TensorDict:
        """The newest frames of both cameras, the codes of the wrist's, the state, and a goal's words.

        They are copies: a vector environment writes into its arrays again.
        """
        f1 = self.explorer.f1
        newest = {
            "wrist": observation[schema.WRIST_RGB][:, -1],
            "head": observation[schema.HEAD_RGB][:, -1],
            **{name: observation[name] for name in (schema.STATE, schema.INSTRUCTION) if name in observation},
        }
        frames = {name: _copy(values).to(f1.device) for name, values in newest.items()}
        pixels = to_model(frames["wrist"], f1.config.tokenizer.image_size, schema.WRIST_RGB)
        return TensorDict({**frames, "codes": f1.tokenizer.encode(pixels)}, batch_size=[len(pixels)])

    def _bootstrap(self, frames: TensorDict, memory: Tensor, truncated: Tensor) -> Tensor:
        """V(the true next observation) where an episode was cut, 0 elsewhere."""
        values = torch.zeros(len(truncated), device=truncated.device)
        rows = truncated.nonzero().flatten().to(memory.device)
        if len(rows):
            td = {schema.OBSERVATION: _observation(frames[rows]), schema.MEMORY: memory[rows]}
            values[truncated] = self.explorer.get_value(TensorDict(td, batch_size=[len(rows)])).to(values)
        return values


def _copy(values: Any) -> Tensor:
    """A copy of an array or tensor, as a tensor."""
    return values.clone() if isinstance(values, Tensor) else torch.tensor(values)


def _joined(parts: Sequence[dict[str, Tensor] | None]) -> dict[str, Tensor] | None:
    """The streams of several rounds; None if a round has episodes of different lengths."""
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return None
    return known[0] if len(known) == 1 else {name: torch.cat([part[name] for part in known]) for name in known[0]}


def _total(counts: Sequence[int | None]) -> int | None:
    """The sum; None if a count is not known."""
    return None if any(count is None for count in counts) else sum(count or 0 for count in counts)


def _observation(frames: TensorDict) -> TensorDict:
    """The explorer's observation: the wrist's newest frame, its codes, the state, and a goal's words."""
    view = frames.select("wrist", "codes", schema.STATE, schema.INSTRUCTION, strict=False)
    return view.rename_key_("wrist", schema.IMAGE0).rename_key_("codes", schema.FRAME_TOKENS)


def act_randomly(explorer: ExplorerPolicy) -> Callable[[TensorDict], TensorDictBase]:
    """Return a function that replaces the explorer's actions by uniformly random ones."""

    def act(td: TensorDict) -> TensorDictBase:
        acted = explorer.act(td)
        action = acted[schema.ACTION]
        acted.set(schema.ACTION, (2.0 * torch.rand_like(action) - 1.0) * explorer.action_mask)
        return acted

    return act


# -- the world model's measures ----------------------------------------------------------------------------------------


@dataclass
class Measures:
    """Measures of the steps (s_t, a_t, s_{t+1}) of a rollout, [T, N] each."""

    divergence_before: Tensor  # D_t = ‖h_explorer − h_teacher‖₂ before the step
    divergence: Tensor  # D_{t+1}: after it
    uncertainty: Tensor  # mean entropy of the codes of img_{t+1}, as the world model predicted them from a_t, in nats
    error: Tensor  # their cross-entropy, in nats
    action_size: Tensor  # mean |a_t| over the real dims, as executed
    starts: Tensor  # bool: an episode's first step


@torch.no_grad()
def measure(world_model: F1Policy, found: Collected) -> Measures:
    """The world model's error at every step, given a_t, and the distance of the explorer's memory from its own.

    It sees head and wrist, and carries its memory through each episode from zeros. Its memory is stored in the
    rollout too (`teacher_memory`), for the explorer's memory to learn from.
    """
    batch, device = found.batch(world_model), found.remembered.device
    names = ("wm_losses", "wm_entropies", "remembered")
    parts = [step_results(world_model, part, names) for part in batch.parts(MEASURED_TOGETHER)]
    results = [torch.cat([_padded(part[name], batch.longest) for part in parts], 1) for name in names]
    error, uncertainty, remembered = (found.spread(values).float().to(device) for values in results)
    found.rollout[schema.TEACHER_MEMORY] = remembered
    starts = found.starts()
    after = torch.linalg.vector_norm(found.remembered - remembered, dim=-1)
    before = torch.cat([torch.zeros_like(after[:1]), after[:-1]]).masked_fill(starts, 0.0)  # both start with zeros
    mask = found.rollout[schema.ACTION_MASK]
    size = found.executed().abs().to(device)
    return Measures(before, after, uncertainty, error, (size * mask).sum(-1) / mask.sum(-1), starts)


def _padded(values: Tensor, length: int) -> Tensor:
    """[T, B, …] with zeros up to `length` steps."""
    return torch.cat([values, values.new_zeros(length - len(values), *values.shape[1:])])


# -- how it learns ---------------------------------------------------------------------------------------------------


class ExplorerPPO(PPO):
    """L = L_PPO + c · mean (h_explorer − h_teacher)²: the core's PPO, with a memory that learns from the teacher's."""

    name = "explorer-ppo"
    policy: ExplorerPolicy
    settings: ExplorerSettings

    @classmethod
    def of_run(cls, policy: ExplorerPolicy, settings: ExplorerSettings, seed: int, processes: Processes) -> ExplorerPPO:
        """In a run of one process, or of several that learn as one."""
        made = cls(policy, settings, process_seed(seed, processes.rank))
        if processes.count > 1:
            made.share(processes)
            processes.remember_statistics(policy)
        return made

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned; a learning rate that changed in the settings replaces the adapted one."""
        optimizer = state["optimizer"]
        if "others" in optimizer:  # the last version had an optimizer for each group
            others, rate = optimizer["others"], optimizer["others"]["learning_rate"]
            merged = {name: [*optimizer[name], *others[name]] for name in ("first", "second")}
            state = {**state, "optimizer": {**optimizer, **merged}}
        else:
            rate = optimizer["param_groups"][1]["lr"]
        super().load_state_dict(state)
        if not math.isclose(rate, self.settings.learning_rate):
            self._set_learning_rate(self.settings.learning_rate)

    def _make_optimizer(self) -> FlatAdam:
        """Return an optimizer of two groups: a large step of the parameters that act moves a chain's density far."""
        acting, others = self.policy.parameter_groups()
        rate = self.settings.learning_rate
        groups: list[dict[str, Any]] = [{"params": acting, "lr": ACTING_RATE * rate}, {"params": others}]
        return FlatAdam(groups, rate, eps=self.settings.adam_epsilon)

    def _set_learning_rate(self, learning_rate: float) -> None:
        """Set the rate of the parameters that act; the others keep the first one."""
        self.learning_rate = learning_rate
        self.optimizer.param_groups[0]["lr"] = learning_rate * ACTING_RATE

    def apply_gradients(self, optimizer: torch.optim.Optimizer, max_grad_norm: float | None = None) -> Tensor:
        """Clip the gradients of each group by themselves, step; return the norm of the acting parameters' gradients."""
        assert isinstance(optimizer, FlatAdam)
        if self.processes is not None:
            self.processes.average(gradients_of(optimizer))
        norms = [clip_gradients([flat.gradient for flat in flats], max_grad_norm) for flats in optimizer.flats]
        optimizer.step()
        return norms[0]

    def _scored(self, minibatch: TensorDictBase) -> dict[str, Tensor]:
        scored = super()._scored(minibatch)
        remembered = scored.pop("remembered")
        taught = minibatch.get(schema.TEACHER_MEMORY, None)
        if taught is not None:
            scored["memory_error"] = (remembered - taught).square().mean(-1)
        return scored

    def _loss(self, scored: dict[str, Tensor], minibatch: TensorDictBase) -> tuple[Tensor, Metrics]:
        loss, metrics = super()._loss(scored, minibatch)
        if "memory_error" in scored:
            error = scored["memory_error"].mean()
            metrics["memory_error"] = error.detach()
            loss = loss + self.settings.memory_loss_weight * error
        return loss, metrics

    def _metrics(self, losses: list[Metrics], first_of_last_epoch: int, rollout: TensorDict, stopped: bool) -> Metrics:
        metrics = super()._metrics(losses, first_of_last_epoch, rollout, stopped)
        if "memory_error" in losses[0]:
            metrics["memory_error"] = torch.stack([loss["memory_error"] for loss in losses]).mean()
        # How far the first minibatch's ratios were from 1, before anything was learned from this rollout: exactness.
        metrics["first_ratio_error"] = (losses[0]["log_ratio"].exp() - 1).abs().max()
        return metrics
