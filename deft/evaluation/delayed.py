"""`deft evaluate RUN --inference_delay D`: chunks that take D steps to compute, while the environment continues.

Measures what a robot loses to the time of inference, and what asynchronous inference and real-time chunking
(`deft.models.inpainting`) win back. The modes are those of `deft serve`, with a delay that is exactly D steps.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces

from deft import trust
from deft.config.command_settings import EvaluateConfig
from deft.envs.layout import Observation
from deft.envs.make import make_vector_env
from deft.envs.vector import Episode, VectorEnv
from deft.errors import InputError
from deft.evaluation.evaluate import env_of_run, find_run, first_seed, merge_env_kwargs, rebuild_policy
from deft.evaluation.rollouts import (
    PolicyActor,
    check_inpainting,
    check_num_episodes,
    evaluation_envs,
    execution_horizon,
    play_round,
    summarize,
)
from deft.evaluation.success import reward_interval, success_tables
from deft.models.action_scale import chunk_space
from deft.models.policy import Policy, members_of
from deft.runs.directory import checkpoint_choice
from deft.runs.logging import show_evaluation
from deft.runs.policy_spaces import PolicySpaces, check_streams, policy_space
from deft.runs.random_state import seed_everything

WAIT, RTC = "wait", "rtc"


def evaluate_delayed(config: EvaluateConfig) -> dict[str, Any]:
    """Play the episodes of `deft evaluate` step by step, with chunks that are complete `inference_delay` steps late."""
    assert config.path is not None
    check_num_episodes(config.episodes)
    trust.name(config.env, config.env_kwargs)
    folder, run = find_run(Path(config.path))
    kwargs = merge_env_kwargs(config.env_kwargs, config.task, config.split, config.shuffle_instructions)
    names, vector = config.rename_streams, config.vector or "sync"
    env_config = env_of_run(run, config.env, kwargs, names, vector=vector, suite_path=config.suite_path)
    seed_everything(config.seed)
    count = evaluation_envs(config.episodes, vector)
    with closing(make_vector_env(env_config, num_envs=count, device=str(config.device))) as env:
        observation = policy_space(PolicySpaces.read(folder), env.observation_space, folder, "the environment")
        chunks = chunk_space(env.action_space, run.policy.chunk_length)
        policy = members_of(rebuild_policy(folder, run, observation, chunks, config.device))[0].eval()
        check_streams(policy, observation, env.observation_space, "the environment")
        policy.check_box(chunks)
        actor = DelayedActor(policy, PolicyActor(policy, count, env.action_mask, config.deterministic), env, config)
        seed, episodes = first_seed(env, config.seed, env_config.id), list[Episode]()
        seed_everything(config.seed)
        with show_evaluation(config.episodes) as watch:
            while len(episodes) < config.episodes:
                wanted = min(count, config.episodes - len(episodes))
                actor.begin(wanted)
                episodes += play_round(actor, env, wanted, seed + len(episodes), None, watch)
    return {
        **summarize(episodes),
        "action_selection": actor.action_selection,
        **reward_interval([episodes]),
        **success_tables([episodes]),
        **actor.measures(),
        "first_seed": seed,
        "checkpoint": str(folder),
        "checkpoint_choice": checkpoint_choice(config.path, folder),
    }


class DelayedActor:
    """Plays chunks of K actions step by step; a chunk c_n that is started at step n is complete at step u = n + d.

    The next chunk is started after H steps of the running one, c_j, and

    - `wait`: the robot stands still, a_t = 0 for n ≤ t < u, and continues with c_n[0];
    - `async`: a_t = c_j[t − j] for n ≤ t < u, and continues with c_n[d]; it stands still where c_j has no action left;
    - `rtc`: as `async`, and c_n is denoised so that it continues c_j, with d frozen steps.

    The first chunk of an episode is not late. Measures are those of the first episode of the first environments.
    """

    def __init__(self, policy: Policy, actor: PolicyActor, env: VectorEnv, config: EvaluateConfig) -> None:
        self._length, self._num_envs, space = policy.chunk_length, env.num_envs, env.action_space
        self._actor, self._mode, self._delay = actor, config.chunking, config.inference_delay or 0
        self._max_guidance = config.max_guidance
        if self._length == 1 or policy.recurrent:
            raise InputError("--inference_delay: is for policies without memory that decide chunks (chunk_length > 1)")
        self._horizon = execution_horizon(self._length, config.execution_horizon, "--execution_horizon")
        if self._mode != WAIT and self._delay >= self._length:
            raise InputError(
                f"--inference_delay {self._delay}: a chunk of {self._length} actions is over when it is complete; give "
                f"{self._length - 1} or less, or use --chunking wait"
            )
        if self._mode == RTC:
            check_inpainting(policy, "--chunking", samples=not config.deterministic)
        if not isinstance(space, spaces.Box):
            raise InputError(f"--inference_delay: is for continuous actions; those here are {space}")
        self._low, self._high = space.low, space.high
        self._chunks = np.zeros((self._num_envs, self._length, *space.shape), np.float32)
        self._pending = np.zeros_like(self._chunks)
        self._age, self._late = np.full((2, self._num_envs), -1)  # steps since the observation of either; -1: none
        self._recent = np.full((2, self._num_envs, *space.shape), np.nan)  # the last two actions, scaled
        self._is_measured, self._was_still = np.ones((2, self._num_envs), bool)
        self.action_selection = actor.action_selection
        self._jumps: dict[str, list[np.ndarray]] = {"border": [], "within": [], "bend": []}
        self._num_steps = self._num_still = 0

    def begin(self, num_measured: int) -> None:
        """Begin episodes in all environments; the first `num_measured` are measured."""
        self._is_measured = np.arange(self._num_envs) < num_measured
        self._age[:], self._late[:] = -1, -1

    def act(self, observation: Observation, reward: np.ndarray | None = None) -> np.ndarray:
        """Return the actions of one step."""
        is_new = self._age < 0
        if is_new.any():
            self._chunks[is_new] = self._actor.act_chunk(observation)[is_new]
            self._age[is_new] = 0
            self._recent[:, is_new] = np.nan
        is_changing = self._change()
        is_due = (self._late < 0) & (self._age >= self._horizon)
        if is_due.any():
            self._pending[is_due] = self._next(observation)[is_due]
            self._late[is_due] = 0
            is_changing |= self._change()
        is_still = (self._age >= self._length) | ((self._late >= 0) & (self._mode == WAIT))
        rows = np.arange(len(self._age))
        actions = self._chunks[rows, np.minimum(self._age, self._length - 1)]
        actions = np.where(is_still[:, None], np.float32(0), actions).clip(self._low, self._high)
        self._measure(actions, is_changing | (is_still & ~self._was_still), is_still)
        self._age += 1
        self._late[self._late >= 0] += 1
        return actions

    def ended(self, done_index: np.ndarray) -> None:
        """Begin an episode in these environments, which is not measured."""
        self._age[done_index], self._late[done_index] = -1, -1
        self._is_measured[done_index] = False

    def measures(self) -> dict[str, Any]:
        """Return the settings and the differences of actions, root mean squares in half ranges of the action space.

        `border_jump`: |a_t − a_{t−1}| where a chunk begins, or the robot begins to stand still; `step_jump`: at all
        other steps; `action_bend`: |a_t − 2 a_{t−1} + a_{t−2}| at all steps.
        """
        found = {name: np.concatenate([np.zeros(0), *values]) for name, values in self._jumps.items()}
        rms = {name: float(np.sqrt(np.mean(values))) if values.size else None for name, values in found.items()}
        return {
            "chunking": self._mode,
            "inference_delay": self._delay,
            "execution_horizon": self._horizon,
            "border_jump": rms["border"],
            "step_jump": rms["within"],
            "action_bend": rms["bend"],
            "still_share": self._num_still / max(1, self._num_steps),
        }

    def _next(self, observation: Observation) -> np.ndarray:
        """Chunks of this step; in mode `rtc` they continue what is left of the running ones."""
        if self._mode != RTC:
            return self._actor.act_chunk(observation)
        left = (self._length - self._age).clip(0)
        steps = np.minimum(self._age[:, None] + np.arange(self._length), self._length - 1)
        running = np.take_along_axis(self._chunks, steps[..., None], 1).clip(self._low, self._high)
        return self._actor.inpaint(observation, running, left, np.minimum(self._delay, left), self._max_guidance)

    def _change(self) -> np.ndarray:
        """Continue with the chunks that are complete; return where there are any."""
        is_complete = self._late >= self._delay
        self._chunks[is_complete] = self._pending[is_complete]
        self._age[is_complete] = 0 if self._mode == WAIT else self._delay
        self._late[is_complete] = -1
        return is_complete

    def _measure(self, actions: np.ndarray, is_border: np.ndarray, is_still: np.ndarray) -> None:
        """Add the squared differences to the last action, and of differences, summed over the dims."""
        scaled = actions / (0.5 * (self._high - self._low))
        jump = np.square(scaled - self._recent[1]).sum(-1)
        bend = np.square(scaled - 2 * self._recent[1] + self._recent[0]).sum(-1)
        everywhere = np.ones_like(is_border)
        parts = {"border": (jump, is_border), "within": (jump, ~is_border), "bend": (bend, everywhere)}
        for name, (values, where) in parts.items():
            self._jumps[name].append(values[self._is_measured & where & np.isfinite(values)])
        self._num_steps += int(self._is_measured.sum())
        self._num_still += int((self._is_measured & is_still).sum())
        self._recent, self._was_still = np.stack([self._recent[1], scaled]), is_still
