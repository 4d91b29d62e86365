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
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

from deft import schema
from deft.algorithms.algorithm import Metrics
from deft.algorithms.optimization import FlatAdam, clip_gradients
from deft.algorithms.ppo import PPO
from deft.config.f1_settings import ExplorerSettings
from deft.data.episodes import EpisodeBatch, batch_episodes
from deft.data.robot_episode import RobotEpisode
from deft.envs.f1 import F1RLEnv, StudentEnv, read_task_config
from deft.envs.history import executed_action
from deft.envs.layout import take_rows
from deft.envs.process import ProcessVectorEnv
from deft.envs.serial import SerialVectorEnv
from deft.envs.vector import VectorEnv, VectorStep
from deft.machine import available_cores
from deft.models.f1.explorer import ExplorerPolicy
from deft.models.f1.frames import to_model
from deft.models.f1.policy import F1Policy
from deft.runs.processes import Processes
from deft.runs.random_state import process_seed
from deft.runs.rollout import rollout
from deft.runs.signals import raise_if_stopped
from deft.training.phases.exploration import Exploration
from deft.training.phases.rewards import Measures

log = logging.getLogger(__name__)
ACTING_RATE = 0.1  # the learning rate of the parameters that act, relative to that of the others
STEPS_TOGETHER = 10  # steps of all episodes in one forward pass of the world model
Observation = dict[str, np.ndarray]


def make_student_env(environment: Mapping[str, Any]) -> F1RLEnv:
    """The student's environment, with the head camera for the world model."""
    return StudentEnv({**environment, "need_head_camera": True})


def open_envs(
    exploration: Exploration, num_envs: int, make: Callable[[Mapping[str, Any]], gymnasium.Env] = make_student_env
) -> tuple[VectorEnv, int]:
    """Make the environments that are explored, in processes if there are several cores; return them and the steps of
    an episode.

    Their own time limit is one step longer: the last step then does not reset the scene, which would take long.
    """
    num_steps = read_task_config(exploration.environment, {}).max_steps
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
    terms: dict[str, Tensor] = field(default_factory=dict)  # the reward's, [T, N] each

    def batch(self, policy: F1Policy) -> EpisodeBatch:
        """The episodes side by side, as a world model takes them."""
        config = policy.config
        return batch_episodes(self.episodes, config.n_obs_img_steps, config.obs_img_stride, policy.device)

    def spread(self, values: Tensor) -> Tensor:
        """Values of the episodes' steps, [longest, E, …], at their positions in the rollout, [T, N, …]."""
        found = values.new_zeros(*self.rollout.batch_size, *values.shape[2:])
        for index, (episode, (start, column)) in enumerate(zip(self.episodes, self.positions, strict=True)):
            found[start : start + len(episode), column] = values[: len(episode), index]
        return found

    def starts(self) -> Tensor:
        """bool [T, N]: which steps are an episode's first."""
        found = torch.zeros(self.rollout.batch_size, dtype=torch.bool, device=self.remembered.device)
        for start, column in self.positions:
            found[start, column] = True
        return found

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
    ) -> Collected:
        """A rollout of new episodes; `version`: which weights act.

        `act` replaces the explorer's method; its actions are executed without `action_scale`.
        `watch` is called with the number of episodes that have just been collected.
        """
        rounds = []
        for _ in range(self.num_rounds):
            rounds.append(self._round(act, version))
            if watch is not None:
                watch(self.env.num_envs)
        if log.isEnabledFor(logging.DEBUG):  # reading the values waits for the device
            last = rounds[-1].remembered[-1]
            size = float(last.abs().mean())
            log.debug(
                "memory state of the explorer: zeros at first, then (batch, hidden) = %s, mean |m| %.4f",
                tuple(last.shape),
                size,
            )
        width = self.env.num_envs
        positions = [
            (start, column + width * number) for number, one in enumerate(rounds) for start, column in one.positions
        ]
        return Collected(
            torch.cat([one.rollout for one in rounds], 1),
            [episode for one in rounds for episode in one.episodes],
            positions,
            torch.cat([one.remembered for one in rounds], 1),
        )

    def state_dict(self) -> dict[str, Any]:
        """The number of rounds, which determines the next scenes."""
        return {"num_begun": self.num_begun}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`."""
        self.num_begun = state["num_begun"]

    def close(self) -> None:
        """Free the environments."""
        self.env.close()

    # -- a round -------------------------------------------------------------------------------------------------------

    def _round(self, act: Callable[[TensorDict], TensorDictBase] | None, version: int) -> Collected:
        """One episode in every environment (one that ends early starts another)."""
        explorer, count = self.explorer, self.env.num_envs
        seen = _copied(self.env.reset(self._seeds()))
        memory, codes = explorer.initial_memory(count), self._codes(seen)
        mask = explorer.action_mask.expand(count, -1)
        noise = explorer.draw_noise(count)
        steps: list[TensorDictBase] = []
        records = [_Record(number, seen, codes.cpu(), column) for column, number in enumerate(self._numbers())]
        done: list[_Record] = []

        def choose(_: Any) -> np.ndarray:
            raise_if_stopped()
            td = TensorDict(
                {
                    schema.OBSERVATION: self._observation(seen, codes),
                    schema.MEMORY: memory,
                    schema.ACTION_MASK: mask,
                    schema.SAMPLE: TensorDict({schema.NOISE: noise}, batch_size=[count]),
                },
                batch_size=[count],
            )
            steps.append(explorer.act(td) if act is None else act(td))
            action = steps[-1][schema.ACTION]
            executed = explorer.executed(action) if act is None else executed_action(action, explorer.action_mask)
            actions: np.ndarray = executed.cpu().numpy()
            return actions

        def sink(_: Any, actions: np.ndarray, step: VectorStep) -> None:
            nonlocal seen, codes, memory, noise
            time, acted = len(steps) - 1, steps[-1]
            next_memory = acted[schema.NEXT_MEMORY]
            following = _copied(step.observation)
            true_next = _with_final(following, step)
            next_codes = self._codes(true_next)
            is_last = time == self.num_steps - 1
            terminated = torch.as_tensor(step.terminated.copy())
            truncated = (torch.as_tensor(step.truncated.copy()) | is_last) & ~terminated
            over = (terminated | truncated).numpy()
            acted[schema.NEXT] = TensorDict(
                {
                    schema.REWARD: torch.zeros(count),
                    schema.TERMINATED: terminated,
                    schema.TRUNCATED: truncated,
                    schema.VALUE: self._bootstrap(true_next, next_codes, next_memory, truncated),
                },
                batch_size=[count],
            )
            acted[schema.POLICY_VERSION] = torch.full((count,), version)
            acted["remembered"] = next_memory[:, -1]
            found = next_codes.cpu()
            for column, record in enumerate(records):
                record.add(torch.as_tensor(actions[column]), true_next, found)
                if over[column]:
                    done.append(record)
            if is_last:
                return
            seen, codes = following, next_codes
            if over.any():
                codes = self._codes(following)
                for column in np.flatnonzero(over).tolist():
                    records[column] = _Record(records[column].number, following, codes.cpu(), column, time + 1)
            ended = torch.as_tensor(over, device=next_memory.device)
            memory = next_memory * ~ended[:, None, None]
            noise = explorer.draw_noise(count, noise, ended)

        rollout(self.env, choose, sink, None, self.num_steps)
        stacked: Any = torch.stack(steps)
        remembered = stacked.pop("remembered")
        done.sort(key=lambda record: (record.column, record.start))
        return Collected(
            stacked.to(explorer.device),
            [record.episode() for record in done],
            [(record.start, record.column) for record in done],
            remembered,
        )

    def _seeds(self) -> list[int]:
        """The scenes of the next round: the seed's and its number's, each kept for `scenes_kept` rounds."""
        kept, width = self.exploration.scenes_kept, self.env.num_envs
        first = (self.num_begun // kept * self._every + self._first) * width
        return [self.exploration.scene_seed(first + column) for column in range(width)]

    def _numbers(self) -> list[int]:
        width = self.env.num_envs
        first = (self.num_begun * self._every + self._first) * width
        self.num_begun += 1
        return list(range(first, first + width))

    def _codes(self, seen: Observation) -> Tensor:
        """The codes of the newest wrist frames, int64 [N, L]."""
        f1 = self.explorer.f1
        pixels = torch.as_tensor(seen[schema.WRIST_RGB][:, -1], device=f1.device)
        return f1.tokenizer.encode(to_model(pixels, f1.config.tokenizer.image_size, schema.WRIST_RGB))

    def _observation(self, seen: Observation, codes: Tensor) -> TensorDict:
        """The explorer's observation: the wrist's newest frame, its codes, the state, and a goal's words."""
        device = self.explorer.device
        streams = {
            schema.IMAGE0: torch.as_tensor(seen[schema.WRIST_RGB][:, -1].copy(), device=device),
            schema.FRAME_TOKENS: codes,
            schema.STATE: torch.as_tensor(seen[schema.STATE], device=device),
        }
        if schema.INSTRUCTION in seen:
            streams[schema.INSTRUCTION] = torch.as_tensor(seen[schema.INSTRUCTION], device=device)
        return TensorDict(streams, batch_size=[len(codes)])

    def _bootstrap(self, seen: Observation, codes: Tensor, memory: Tensor, truncated: Tensor) -> Tensor:
        """V(the true next observation) where an episode was cut, 0 elsewhere."""
        values = torch.zeros(len(codes))
        index = truncated.nonzero().flatten()
        if len(index):
            rows = index.to(memory.device)
            chosen: Any = take_rows(seen, index.numpy())
            view = self._observation(chosen, codes[rows])
            td = TensorDict({schema.OBSERVATION: view, schema.MEMORY: memory[rows]}, batch_size=[len(index)])
            values[index] = self.explorer.get_value(td).cpu()
        return values


class _Record:
    """One episode as it is made."""

    def __init__(self, number: int, seen: Observation, codes: Tensor, column: int, start: int = 0) -> None:
        self.number, self.column, self.start = number, column, start
        self._frames: dict[str, list[Any]] = {"wrist": [], "head": [], "state": [], "codes": []}
        self._actions: list[Tensor] = []
        self._store(seen, codes)

    def add(self, action: Tensor, seen: Observation, codes: Tensor) -> None:
        """A step: the action as executed, and what it led to."""
        self._actions.append(action)
        self._store(seen, codes)

    def _store(self, seen: Observation, codes: Tensor) -> None:
        column, frames = self.column, self._frames
        for name, stream in (("wrist", schema.WRIST_RGB), ("head", schema.HEAD_RGB)):
            frames[name].append(seen[stream][column, -1].copy())  # a view would keep the whole history
        frames["state"].append(seen[schema.STATE][column])
        frames["codes"].append(codes[column])

    def episode(self) -> RobotEpisode:
        """All of it."""
        frames = self._frames
        return RobotEpisode(
            wrist=np.stack(frames["wrist"]),
            head=np.stack(frames["head"]),
            state=np.stack(frames["state"]),
            action=torch.stack(self._actions).numpy(),
            codes=torch.stack(frames["codes"]).numpy(),
            number=self.number,
        )


def _copied(observation: Any) -> Observation:
    """An observation of one's own: a vector environment writes into its arrays again."""
    return {name: stream.copy() for name, stream in observation.items()}


def _with_final(following: Observation, answer: VectorStep) -> Observation:
    """The true next observation: the final one where an episode ended, never the one after its reset."""
    final: Any = answer.final_observation
    if final is None:
        return following
    true_next = _copied(following)
    for name, stream in true_next.items():
        stream[answer.done_index] = final[name]
    return true_next


# -- the world model's measures ----------------------------------------------------------------------------------------


@torch.no_grad()
def measure(world_model: F1Policy, found: Collected) -> Measures:
    """The world model's error at every step, given a_t, and the distance of the explorer's memory from its own.

    It sees head and wrist, and carries its memory through each episode from zeros. Its memory is stored in the
    rollout too (`teacher_memory`), for the explorer's memory to learn from.
    """
    was_training = world_model.training
    world_model.eval()
    batch = found.batch(world_model)
    columns: dict[str, list[Tensor]] = {"wm_losses": [], "wm_entropies": [], "remembered": []}
    memory = world_model.initial_memory(len(batch.lengths))
    for start in range(0, batch.longest, STEPS_TOGETHER):
        raise_if_stopped()
        cut = batch.chunk(start, STEPS_TOGETHER)
        assert cut is not None
        steps, rows = cut[0], cut[1].to(memory.device)
        results = world_model.forward_with_world_model(steps, memory_state=memory[:, rows], by_step=True)
        memory[:, rows] = results[schema.MEMORY_STATE]
        for name, parts in columns.items():
            values = results[name]
            whole = values.new_zeros(len(values), len(batch.lengths), *values.shape[2:])
            whole[:, rows] = values
            parts.append(whole)
    world_model.train(was_training)
    error, uncertainty, remembered = (found.spread(torch.cat(parts)).float() for parts in columns.values())
    remembered = remembered.to(found.remembered.device)
    found.rollout[schema.TEACHER_MEMORY] = remembered
    starts = found.starts()
    after = torch.linalg.vector_norm(found.remembered - remembered, dim=-1)
    before = torch.cat([torch.zeros_like(after[:1]), after[:-1]]).masked_fill(starts, 0.0)  # both start with zeros
    mask = found.rollout[schema.ACTION_MASK]
    size = found.spread(batch.streams["action"].transpose(0, 1)).abs().to(after.device)
    return Measures(
        divergence_before=before,
        divergence=after,
        uncertainty=uncertainty.to(after.device),
        error=error.to(after.device),
        action_size=(size * mask).sum(-1) / mask.sum(-1),
        starts=starts,
    )


# -- how it learns ---------------------------------------------------------------------------------------------------


class ExplorerPPO(PPO):
    """L = L_PPO + c · mean (h_explorer − h_teacher)²: the core's PPO, with a memory that learns from the teacher's.

    With several processes, `average` replaces gradients by their mean before every step, and `largest` makes all stop
    and change pace by the same KL.
    """

    name = "explorer-ppo"
    policy: ExplorerPolicy
    settings: ExplorerSettings

    def __init__(
        self,
        policy: ExplorerPolicy,
        settings: ExplorerSettings | None = None,
        seed: int = 0,
        average: Callable[[Iterable[nn.Parameter]], None] | None = None,
        largest: Callable[[float], float] | None = None,
    ) -> None:
        super().__init__(policy, settings or ExplorerSettings(), seed)
        self._average, self._largest = average, largest

    @classmethod
    def of_run(cls, policy: ExplorerPolicy, settings: ExplorerSettings, seed: int, processes: Processes) -> ExplorerPPO:
        """In a run of one process, or of several that learn as one."""
        if processes.count == 1:
            return cls(policy, settings, seed)
        device = policy.device
        average, seed = processes.average_gradients, process_seed(seed, processes.rank)
        return cls(policy, settings, seed, average, lambda value: processes.maximum(value, device))

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

    def _share_gradients(self) -> None:
        if self._average is not None:
            self._average(parameter for parameter in self.policy.parameters() if parameter.requires_grad)

    def _adapt_learning_rate(self, approx_kl: Tensor) -> None:
        shared = approx_kl if self._largest is None else torch.tensor(self._largest(float(approx_kl)))
        super()._adapt_learning_rate(shared)

    def _kl_too_large(self, epoch: list[Metrics]) -> bool:
        is_large = super()._kl_too_large(epoch)
        if self._largest is None or self.settings.target_kl is None:
            return is_large
        return bool(self._largest(float(is_large)))
