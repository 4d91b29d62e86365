"""How the messages of one client become actions: one class for each `--mode` of `deft serve`.

Every session has a `LoadedPolicy` of its own, with the memory and the chunk of that client; the weights are shared.
Let c_j[i] be action i = 0 … K − 1 of the chunk that `LoadedPolicy.get_chunk` computes from the observation of step j.
A step is one message with an observation, counted from the last reset.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
from gymnasium import spaces

from deft.config.deployment_settings import ServeConfig
from deft.errors import InputError
from deft.evaluation.loaded_policy import LoadedPolicy
from deft.evaluation.rollouts import check_inpainting, execution_horizon
from deft.models.inpainting import MAX_GUIDANCE
from deft.models.policy import SAMPLE

REMEMBERED_DELAYS = 10
Infer = Callable[..., Awaitable[np.ndarray]]
"""Call a method of the policy with the arguments that follow it, in the thread of the policy."""


class ActionSession:
    """`get_action`: a chunk is played to its end, a_t = c_j[t − j] with j = K ⌊t / K⌋."""

    mode = "action"

    def __init__(self, policy: LoadedPolicy, infer: Infer) -> None:
        self._policy, self._infer = policy, infer

    def warm_up(self, observation: Any) -> None:
        """Call the policy as `act` will, since the first call of a network is slow."""
        self._policy.get_chunk(observation)

    def reset(self) -> None:
        """Begin an episode."""
        self._policy.reset()

    async def act(self, observation: Any, reward: float | None) -> np.ndarray:
        """Return the action of one step, or a chunk of them."""
        return await self._infer(self._policy.get_action, observation, reward)


class ChunkSession(ActionSession):
    """`get_chunk`: the whole chunk c_t for every message; the client decides how much of it is executed."""

    mode = "chunk"

    async def act(self, observation: Any, reward: float | None) -> np.ndarray:
        """Return the chunk [K, …] of this observation."""
        return await self._infer(self._policy.get_chunk, observation, reward)


class EnsembleSession(ActionSession):
    """Temporal ensembling of ACT: every step computes a chunk, and the action is the mean of all that cover the step.

        a_t = Σ_i w_i c_{s+i}[t − s − i] / Σ_i w_i,   w_i = exp(−m i),   i = 0 … t − s,   s = max(0, t − K + 1)

    i = 0 is the oldest chunk; with a smaller m = `decay` new observations count for more, with m = 0 all chunks the
    same. The mean is computed in float64.
    """

    mode = "ensemble"

    def __init__(self, policy: LoadedPolicy, infer: Infer, decay: float = 0.01) -> None:
        super().__init__(policy, infer)
        _check_chunks(policy, self.mode, needs_box=True)
        self._decay = decay
        self._chunks: deque[np.ndarray] = deque(maxlen=policy.policy.chunk_length)  # oldest first

    def reset(self) -> None:
        """Begin an episode without chunks."""
        super().reset()
        self._chunks.clear()

    async def act(self, observation: Any, reward: float | None) -> np.ndarray:
        """Return the weighted mean of the actions that the chunks have for this step."""
        self._chunks.append(await self._infer(self._policy.get_chunk, observation, reward))
        age = len(self._chunks) - 1  # steps since the oldest chunk
        actions = np.stack([chunk[age - i] for i, chunk in enumerate(self._chunks)]).astype(np.float64)
        weights = np.exp(-self._decay * np.arange(len(actions)))
        mean = np.tensordot(weights / weights.sum(), actions, 1)
        return mean.astype(self._chunks[-1].dtype)


class AsyncSession(ActionSession):
    """Asynchronous inference: the next chunk is computed while the last one is executed.

    With the horizon H (1 ≤ H ≤ K) and a chunk c_j that is executed: the message of the first step n ≥ j + H starts the
    computation of c_n from its observation, and is answered from c_j. The first step u > n at which c_n is complete
    (the delay is d = u − n steps) changes to it, at the action that belongs to that step:

        a_t = c_j[t − j] for t < u,        a_t = c_n[t − n] for t ≥ u

    So the first d actions of c_n are not executed: the actions of c_j that were executed meanwhile are kept in their
    place. If c_j has no action left, the step waits for c_n (a stall). With H = K every chunk is waited for, and the
    actions are those of `ActionSession`.

    With `blend_steps` B the change is gradual, as long as c_j has actions left:

        a_t = w c_j[t − j] + (1 − w) c_n[t − n],   w = 1 − (t − u + 1) / (B + 1)   for u ≤ t < u + B

    c_n is computed without knowledge of c_j; `RealTimeSession` computes one that continues it.
    """

    mode = "async"

    def __init__(
        self,
        policy: LoadedPolicy,
        infer: Infer,
        horizon: int | None = None,
        blend_steps: int = 0,
        stalled: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(policy, infer)
        _check_chunks(policy, self.mode, needs_box=blend_steps > 0)
        self._length = policy.policy.chunk_length
        self._horizon = execution_horizon(self._length, horizon, "execution_horizon")
        self._blend_steps, self._stalled = blend_steps, stalled
        self._clear()

    def _clear(self) -> None:
        self._step = self._changed = 0
        self._chunk: tuple[int, np.ndarray] | None = None  # (the step of its observation, actions)
        self._last: tuple[int, np.ndarray] | None = None
        self._next: tuple[int, asyncio.Task[np.ndarray]] | None = None

    def reset(self) -> None:
        """Begin an episode; a chunk that is being computed is dropped."""
        super().reset()
        if self._next is not None:
            self._next[1].cancel()
        self._clear()

    async def act(self, observation: Any, reward: float | None) -> np.ndarray:
        """Return the action of this step."""
        self._policy.check(observation)  # also of a message whose observation is not used
        step = self._step
        if self._chunk is None:
            self._chunk = (step, await self._compute(observation, reward))
        if self._next is not None and self._next[1].done():
            await self._change(step)
        if self._next is None and step - self._chunk[0] >= self._horizon:
            self._next = (step, asyncio.create_task(self._compute_next(step, observation, reward)))
            self._next[1].add_done_callback(_take_error)
        if self._next is not None and step - self._chunk[0] >= self._length:
            if step > self._next[0]:
                self._stalled()
            await self._change(step)
        self._step += 1
        return self._action(step)

    async def _compute(self, observation: Any, reward: float | None) -> np.ndarray:
        return await self._infer(self._policy.get_chunk, observation, reward)

    async def _compute_next(self, step: int, observation: Any, reward: float | None) -> np.ndarray:
        """Compute the chunk of this step while the last one is executed."""
        return await self._compute(observation, reward)

    async def _change(self, step: int) -> None:
        """Execute the next chunk from this step on; an error of its computation is that of this message."""
        assert self._next is not None
        start, task = self._next
        try:
            chunk = await task
        finally:
            self._next = None
        self._last, self._chunk, self._changed = self._chunk, (start, chunk), step

    def _action(self, step: int) -> np.ndarray:
        assert self._chunk is not None
        start, chunk = self._chunk
        action: np.ndarray = chunk[step - start]
        since = step - self._changed
        if self._last is None or since >= self._blend_steps or step - self._last[0] >= self._length:
            return action
        weight = 1.0 - (since + 1) / (self._blend_steps + 1)
        last = self._last[1][step - self._last[0]].astype(np.float64)
        return (weight * last + (1.0 - weight) * action).astype(action.dtype)


class RealTimeSession(AsyncSession):
    """Real-time chunking: as `AsyncSession`, and c_n is denoised so that it continues c_j (`deft.models.inpainting`).

    Of the L = K − (n − j) actions that c_j has left at step n, the first d are frozen, c_n[i] = c_j[n − j + i] for
    i < d, and the others guide the denoising with decreasing weights. d is the expected delay in steps, at least 1 and
    at most L: `delay` at first, then the longest one of the last `REMEMBERED_DELAYS` chunks.
    """

    mode = "rtc"

    def __init__(
        self,
        policy: LoadedPolicy,
        infer: Infer,
        horizon: int | None = None,
        blend_steps: int = 0,
        stalled: Callable[[], None] = lambda: None,
        delay: int = 1,
        max_guidance: float = MAX_GUIDANCE,
    ) -> None:
        super().__init__(policy, infer, horizon, blend_steps, stalled)
        check_inpainting(policy.policy, "mode", samples=policy.action_selection == SAMPLE)
        self._delays = deque([delay], maxlen=REMEMBERED_DELAYS)
        self._max_guidance = max_guidance

    def warm_up(self, observation: Any) -> None:
        """Compute a chunk, and one that continues it."""
        chunk = self._policy.get_chunk(observation)
        self._policy.inpaint_chunk(observation, chunk, 1, self._max_guidance)

    async def _compute_next(self, step: int, observation: Any, reward: float | None) -> np.ndarray:
        assert self._chunk is not None
        running = self._chunk[1][step - self._chunk[0] :]
        if not len(running):
            return await self._compute(observation, reward)
        frozen = min(max(1, *self._delays), len(running))
        return await self._infer(self._policy.inpaint_chunk, observation, running, frozen, self._max_guidance)

    async def _change(self, step: int) -> None:
        assert self._next is not None
        delay = step - self._next[0]
        await super()._change(step)
        self._delays.append(delay)


def _take_error(task: asyncio.Task[np.ndarray]) -> None:
    """Retrieve the error of a chunk that may have been dropped, which asyncio would log otherwise."""
    if not task.cancelled():
        task.exception()


def _check_chunks(policy: LoadedPolicy, mode: str, needs_box: bool) -> None:
    """Raise an error for a policy whose chunks cannot be computed at any step, or not be averaged."""
    if policy.policy.chunk_length == 1:
        raise InputError(f"mode {mode} is for chunks; this policy decides one action at a time: use mode action")
    if policy.policy.recurrent:
        raise InputError(f"mode {mode}: the memory of this policy advances once per chunk; use mode action or chunk")
    if needs_box and not isinstance(policy.action_space, spaces.Box):
        raise InputError(f"mode {mode} averages actions, and those of this policy are {policy.action_space}")


SESSIONS = {kind.mode: kind for kind in (ActionSession, ChunkSession, EnsembleSession, AsyncSession, RealTimeSession)}


def make_session(
    mode: str, policy: LoadedPolicy, infer: Infer, config: ServeConfig, stalled: Callable[[], None]
) -> ActionSession:
    """Return a session of this mode with the settings of the server."""
    if mode not in SESSIONS:
        raise InputError(f"mode {mode!r} is not one of {', '.join(SESSIONS)}")
    if mode == EnsembleSession.mode:
        return EnsembleSession(policy, infer, config.ensemble_decay)
    if mode == AsyncSession.mode:
        return AsyncSession(policy, infer, config.execution_horizon, config.blend_steps, stalled)
    if mode == RealTimeSession.mode:
        how = (config.execution_horizon, config.blend_steps, stalled, config.inference_delay, config.max_guidance)
        return RealTimeSession(policy, infer, *how)
    return SESSIONS[mode](policy, infer)
