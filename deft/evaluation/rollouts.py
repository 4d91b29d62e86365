"""How a policy acts step by step, and whole episodes that it plays.

A policy carries its memory along and plays chunks of actions to their end. `deft collect`, `deft.load_policy`, the
trainers and `deft evaluate` use it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDict

from deft import schema
from deft.data.spaces import action_stream
from deft.data.tensors import check_log_prob, policy_inputs, zero_rows
from deft.envs.layout import Observation, take_rows
from deft.envs.make import wrap
from deft.envs.vector import Episode, VectorEnv, VectorStep
from deft.errors import InputError
from deft.evaluation.video import write_video
from deft.models.decision_transformer import DecisionTransformerPolicy
from deft.models.inpainting import MAX_GUIDANCE, Inpainting, soft_mask
from deft.models.policy import Policy
from deft.runs.rollout import rollout

RANDOM, EXPERT = "random", "expert"  # policies that are not checkpoints
EXPERT_METHOD = "expert_action"
TERMS, MEASURES = "terms/", "measures/"  # prefixes in the results: mean sums of reward terms, means of measures


class Actor(Protocol):
    """Decides one step of every environment."""

    action_selection: str
    """How actions are selected before any noise: `Policy.action_selection`, or the script's name."""

    def act(self, observation: Observation, reward: np.ndarray | None = None) -> np.ndarray:
        """Return actions [N, …], as `VectorEnv.step` takes them; `reward` [N] is that of the last ones."""

    def ended(self, done_index: np.ndarray) -> None:
        """Start a new episode in these environments."""


class ScriptedActor:
    """Actions of a function: they depend on nothing but the environments' present state."""

    def __init__(self, function: Callable[[], np.ndarray], action_selection: str) -> None:
        self._function, self.action_selection = function, action_selection

    def act(self, observation: Observation, reward: np.ndarray | None = None) -> np.ndarray:
        """Return the function's actions."""
        return self._function()

    def ended(self, done_index: np.ndarray) -> None:
        """Do nothing: there is no memory."""


def execution_horizon(length: int, given: int | None, name: str) -> int:
    """Return the steps of a chunk after which the next one is started: half of them if not given by `name`."""
    if given is not None and given > length:
        raise InputError(f"{name} {given} is larger than the chunk; give {length} or less")
    return max(1, length // 2) if given is None else given


def check_inpainting(policy: Policy, setting: str, samples: bool) -> None:
    """Raise an error if `setting` rtc, real-time chunking, is not for this policy or for sampled actions."""
    if not policy.can_inpaint:
        raise InputError(
            f"{setting} rtc guides the denoising of a flow or a diffusion, and this policy "
            f"({type(policy).__name__}) has no denoising chain that can be guided: use {setting} async"
        )
    if samples:
        raise InputError(f"{setting} rtc adds no noise in the denoising steps; leave out --stochastic")


class PolicyActor:
    """A policy for `num_envs` environments.

    A chunk of K actions is played step by step to its end, or the episode's. In environments that play whole chunks
    themselves, `chunk_length` is 1.
    """

    def __init__(
        self,
        policy: Policy,
        num_envs: int,
        action_mask: np.ndarray | None,
        deterministic: bool,
        chunk_length: int | None = None,
    ) -> None:
        self._policy, self._deterministic = policy, deterministic
        self._chunk_length = chunk_length or policy.chunk_length
        self.action_selection = policy.action_selection(deterministic)
        self._device = next(iter(policy.parameters())).device
        self._memory = policy.initial_memory(num_envs)
        self._mask = None
        if action_mask is not None:
            self._mask = torch.as_tensor(action_mask, device=self._device).expand(num_envs, -1)
        self._chunks: np.ndarray | None = None  # [N, K, …]
        self._played = np.full(num_envs, self._chunk_length)  # [N]: how much of its chunk each has played

    @property
    def is_due(self) -> np.ndarray:
        """bool [N]: the environments in which the policy decides with the next call of `act`."""
        return self._played >= self._chunk_length

    def state_dict(self) -> dict[str, Any]:
        """Return the chunks under way and the memory."""
        chunks = None if self._chunks is None else torch.from_numpy(self._chunks.copy())
        memory = None if self._memory is None else self._memory.clone().cpu()
        return {"chunks": chunks, "played": self._played.tolist(), "memory": memory}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned."""
        self._chunks = None if state["chunks"] is None else state["chunks"].numpy().copy()
        self._played = np.array(state["played"])
        if state["memory"] is not None:
            self._memory = state["memory"].to(self._device)

    @torch.inference_mode()
    def act(self, observation: Observation, reward: np.ndarray | None = None) -> np.ndarray:
        """Return actions [N, …]; policies with `needs_reward` use the reward of the last ones."""
        is_due = self.is_due
        if is_due.any():
            self._decide(observation, is_due, reward)
        assert self._chunks is not None
        actions = self._chunks[np.arange(len(is_due)), self._played]
        self._played += 1
        return actions

    @torch.inference_mode()
    def act_chunk(self, observation: Observation, reward: np.ndarray | None = None) -> np.ndarray:
        """Return new chunks [N, K, …] of actions, whatever was left to play of the last ones."""
        self._decide(observation, np.ones(len(self._played), bool), reward)
        assert self._chunks is not None
        self._played[:] = self._chunk_length
        return self._chunks.copy()

    @torch.no_grad()
    def inpaint(
        self,
        observation: Observation,
        running: np.ndarray,
        left: np.ndarray,
        frozen: np.ndarray,
        max_guidance: float = MAX_GUIDANCE,
    ) -> np.ndarray:
        """Return new chunks [N, K, A] that agree with the rest of those that are executed (real-time chunking).

        `running` [N, K, A] has the actions from this step on, of which `left` [N] are real; the first `frozen` [N] of
        them are executed whatever is computed here, and are those of the new chunk too. Denoised without noise in the
        steps, as a deterministic action.
        """
        policy, (count, length, _) = self._policy, running.shape
        if not policy.can_inpaint or policy.noise_shape is None:
            raise InputError(
                f"real-time chunking: {type(policy).__name__} has no denoising chain that can be guided; use one with "
                "--distribution flow or diffusion, vla-tiny with head=flow or head=diffusion, or pi0, pi05, smolvla, "
                "groot or diffusion-policy"
            )
        td = self._inputs(observation, np.arange(count), None)
        state = policy.encode_to_act(td[schema.OBSERVATION])
        actions = torch.as_tensor(running, dtype=torch.float32, device=self._device)
        weights = soft_mask(length, *(torch.as_tensor(steps, device=self._device) for steps in (left, frozen)))
        inpainting = Inpainting(policy.to_unit(actions).reshape(running.shape), weights, max_guidance)
        noise = torch.randn(count, *policy.noise_shape, device=self._device)
        found = policy.from_unit(policy.denoise(state, noise, self._mask, inpainting)).numpy(force=True)
        is_frozen = np.arange(length)[:, None] < frozen[:, None, None]
        return np.where(is_frozen, running, found.reshape(running.shape)).astype(found.dtype)

    def interrupt(self, rows: np.ndarray) -> None:
        """Decide anew in these environments with the next call of `act`: something else acted."""
        self._played[rows] = self._chunk_length

    def ended(self, done_index: np.ndarray) -> None:
        """Start a new episode in these environments."""
        self._played[done_index] = self._chunk_length
        if self._memory is not None:
            self._memory = zero_rows(self._memory, done_index)

    def _decide(self, observation: Observation, is_due: np.ndarray, reward: np.ndarray | None) -> None:
        """New chunks for the environments that are due, from their rows of the observation alone."""
        due = np.flatnonzero(is_due)
        td = self._policy.act(self._inputs(observation, due, reward), self._deterministic)
        check_log_prob(td.get(schema.LOG_PROB, None))
        chunks = td[schema.ACTION].numpy(force=True)
        if self._chunk_length == 1:
            chunks = chunks[:, None]
        if self._chunks is None:
            self._chunks = np.zeros((len(is_due), *chunks.shape[1:]), chunks.dtype)
        self._chunks[due] = chunks
        self._played[due] = 0
        if self._memory is not None:
            self._memory = self._memory.clone()
            self._memory[torch.as_tensor(due, device=self._device)] = td[schema.NEXT_MEMORY]

    def _inputs(self, observation: Observation, due: np.ndarray, reward: np.ndarray | None) -> TensorDict:
        """The inputs of the policy for the rows `due`."""
        rows = torch.as_tensor(due, device=self._device)
        memory = None if self._memory is None else self._memory[rows]
        mask = None if self._mask is None else self._mask[rows]
        rewards = reward[due] if reward is not None and self._policy.needs_reward else None
        return policy_inputs(take_rows(observation, due), self._device, memory, mask, rewards)


def expert_actions(env: VectorEnv, action_space: spaces.Space) -> Callable[[], np.ndarray]:
    """Return a function that returns the actions [N, …] of the environments' scripted expert.

    `action_space` is that of a single environment, in which its expert acts.
    """
    stream = action_stream(action_space)
    return lambda: stream.to_rows(np.stack(env.call(EXPERT_METHOD)))


def check_expert(env: gymnasium.Env, name: str) -> None:
    """Raise an error if the environment has no scripted expert."""
    if not env.has_wrapper_attr(EXPERT_METHOD):
        raise InputError(
            f"--policy expert: {name} offers no scripted expert (a method {EXPERT_METHOD}() of the environment); use a "
            "trained policy or random actions"
        )


EVALUATION_ENVS = 10  # environments that an evaluation steps at once
WARP_ENVS = 1024  # the same on MuJoCo Warp, where a step of many takes little longer than a step of few


def evaluation_envs(num_episodes: int, vector: str = "sync") -> int:
    """How many environments an evaluation steps at once."""
    return min(num_episodes, WARP_ENVS if vector == "warp" else EVALUATION_ENVS)


@torch.inference_mode()
def play_episodes(
    policy: Policy | None,
    env: VectorEnv,
    num_episodes: int,
    seed: int = 0,
    deterministic: bool = True,
    frames: list[np.ndarray] | None = None,
    act: Callable[[], np.ndarray] | None = None,
    watch: Callable[[int], None] | None = None,
) -> list[Episode]:
    """Play `num_episodes` episodes, episode i from seed + i, for any policy and number of environments.

    `policy` None acts at random, or as `act` decides, which returns actions [N, …].
    Images of the first environment are appended to `frames`. `watch` is called before every step with the number of
    episodes that ended since its last call; an exception that it raises ends the evaluation.
    """
    check_num_episodes(num_episodes)
    scripted = ScriptedActor(act or partial(random_actions, env, np.random.default_rng(seed)), "random")
    episodes: list[Episode] = []
    while len(episodes) < num_episodes:
        actor: Actor = scripted
        if policy is not None:
            actor = PolicyActor(policy, env.num_envs, env.action_mask, deterministic, chunk_length=1)
        wanted = min(env.num_envs, num_episodes - len(episodes))
        episodes += play_round(actor, env, wanted, seed + len(episodes), frames, watch or (lambda _: None))
    return episodes


def play_round(
    actor: Actor,
    env: VectorEnv,
    wanted: int,
    seed: int,
    frames: list[np.ndarray] | None,
    watch: Callable[[int], None],
) -> list[Episode]:
    """Play one episode in each of the first `wanted` environments."""
    finished: dict[int, Episode] = {}
    num_watched = 0
    reward = np.zeros(env.num_envs, np.float32)

    def report() -> None:
        nonlocal num_watched
        num_new, num_watched = len(finished) - num_watched, len(finished)
        watch(num_new)

    def act(observation: Observation) -> np.ndarray:
        report()
        if frames is not None and 0 not in finished and (frame := env.render(0)) is not None:
            frames.append(frame)
        return actor.act(observation, reward)

    def sink(_: Any, __: Any, step: VectorStep) -> bool:
        nonlocal reward
        reward = step.reward.astype(np.float32)
        reward[step.done_index] = 0.0
        actor.ended(step.done_index)
        ended = [episode for episode in step.episodes if episode.env_index < wanted]
        for episode in ended:
            finished.setdefault(episode.env_index, episode)
        if ended and len(finished) < wanted:
            env.suspend([episode.env_index for episode in ended])
        return len(finished) >= wanted

    observation = env.reset(seed)
    if wanted < env.num_envs:
        env.suspend(range(wanted, env.num_envs))
    rollout(env, act, sink, observation)
    report()
    return [finished[index] for index in range(wanted)]


def num_played(policy: Policy | None, num_episodes: int) -> int:
    """How many episodes `evaluate_policy` plays for `num_episodes`: so many for each target return."""
    return num_episodes * (len(policy.target_returns) if isinstance(policy, DecisionTransformerPolicy) else 1)


def check_num_episodes(count: int) -> None:
    """Raise an error for an evaluation of no episodes, which has no mean."""
    if count < 1:
        raise InputError(f"num_episodes: {count} is out of range; must be at least 1")


def evaluate_policy(
    policy: Policy | None,
    env: VectorEnv,
    num_episodes: int,
    seed: int = 0,
    played: list[Episode] | None = None,
    deterministic: bool = True,
    watch: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """`play_episodes`, summed up, and how actions were selected; the episodes themselves are added to `played`.

    A policy with several target returns plays for each; the first one's results lead, and its episodes are kept.
    """
    targets: list[Any] = policy.target_returns if isinstance(policy, DecisionTransformerPolicy) else [None]
    summaries: list[dict[str, Any]] = []
    try:
        for target in targets:
            if isinstance(policy, DecisionTransformerPolicy):
                policy.target_return.fill_(target)
            episodes = play_episodes(policy, env, num_episodes, seed, deterministic, watch=watch)
            if played is not None and not summaries:
                played += episodes
            summaries.append(summarize(episodes))
    finally:
        if isinstance(policy, DecisionTransformerPolicy):
            policy.target_return.fill_(targets[0])
    results: dict[str, Any] = {} if targets[0] is None else {"target_return": targets[0]}
    results |= {**summaries[0], "action_selection": action_selection(policy, deterministic)}
    for target, summary in zip(targets[1:], summaries[1:], strict=True):
        results[f"target_{target:g}/mean_reward"] = summary["mean_reward"]
    return results


def action_selection(policy: Policy | None, deterministic: bool) -> str:
    """How the actions of an evaluation are selected, as its results name it (`Policy.action_selection`)."""
    return "random" if policy is None else policy.action_selection(deterministic)


def record_video(
    policy: Policy | None,
    env: gymnasium.Env,
    path: Path,
    num_episodes: int,
    seed: int,
    deterministic: bool = True,
    watch: Callable[[int], None] | None = None,
) -> Path:
    """A video of whole episodes, from the same seeds as `play_episodes`; `env` renders, and is closed."""
    frames: list[np.ndarray] = []
    fps = env.metadata.get("render_fps", 30)
    vector = wrap(env) if policy is None else wrap(env, chunk_length=policy.chunk_length)
    try:
        play_episodes(policy, vector, num_episodes, seed, deterministic, frames=frames, watch=watch)
    finally:
        vector.close()
    return write_video(frames, path, fps=fps)


def random_actions(env: VectorEnv, generator: np.random.Generator) -> np.ndarray:
    """One uniformly random action an environment."""
    env.action_space.seed(int(generator.integers(2**31)))
    return np.stack([env.action_space.sample() for _ in range(env.num_envs)])


def summarize(episodes: list[Episode]) -> dict[str, Any]:
    """Mean and deviation of the return, mean length, and the share of successes where the environment reports them."""
    returns = [episode.episode_return for episode in episodes]
    summary: dict[str, Any] = {
        "episodes": len(episodes),
        "mean_reward": float(np.mean(returns)),
        "std_reward": float(np.std(returns)),
        "mean_length": float(np.mean([episode.length for episode in episodes])),
    }
    successes = [episode.success for episode in episodes if episode.success is not None]
    if successes:
        summary["success_rate"] = float(np.mean(successes))
    for name in sorted({name for episode in episodes for name in episode.terms}):
        summary[f"{TERMS}{name}"] = float(np.mean([episode.terms.get(name, 0.0) for episode in episodes]))
    for name in sorted({name for episode in episodes for name in episode.measures}):
        values = [episode.measures[name] for episode in episodes if name in episode.measures]
        summary[f"{MEASURES}{name}"] = float(np.mean(values))
    return summary


def merge_results(results: list[dict[str, Any]], score: Callable[[float], float | None]) -> dict[str, Any]:
    """The results of several seeds as one: means over them and each one's return; with the normalised score."""
    merged = dict(results[0])
    if len(results) > 1:
        returns = [result["mean_reward"] for result in results]
        for name in merged:
            if name in ("mean_reward", "mean_length", "success_rate") or name.startswith((TERMS, MEASURES)):
                merged[name] = float(np.mean([result[name] for result in results]))
        merged["std_reward"] = float(np.std(returns))
        merged["mean_rewards"] = returns
    normalized = score(merged["mean_reward"])
    if normalized is not None:
        merged["normalized_score"] = normalized
        if len(results) > 1:
            merged["normalized_scores"] = [score(value) for value in merged["mean_rewards"]]
    return merged
