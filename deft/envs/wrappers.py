"""The wrappers that Deft adds to Gymnasium environments, and questions about an environment and its wrappers.

    RenamedStreams   new names for streams (`env.rename_streams`): policies match streams by name
    RewardWeights    a reward that is the weighted sum of its named terms (`env.reward_weights`)
    ActionChunk      one action of the policy is several environment steps, so that a slow policy is called less often
    Difficulty       `set_difficulty(level)` on the outermost wrapper: Gymnasium's own wrappers do not forward it
    Captions         video frames with the instruction below the image; FrameRecorder keeps those of an episode

`deft.envs.make` and the trainers add them with `rename`, `weigh`, `forward_difficulty`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import WrapperSpec
from gymnasium.utils import RecordConstructorArgs
from gymnasium.wrappers import OrderEnforcing, TimeLimit

from deft.envs.checks import check_whole
from deft.envs.layout import ObservationLayout, value_at
from deft.envs.state import layers
from deft.envs.vector import VectorEnv
from deft.errors import InputError, RunError, one_line
from deft.schema import renamed_streams

log = logging.getLogger(__name__)
CAPTION_HEIGHT = 22  # pixels; H.264 needs an even number


def wrapper_attribute(env: gymnasium.Env, name: str, default: Any = None) -> Any:
    """Return an attribute of the environment or of any of its wrappers."""
    return env.get_wrapper_attr(name) if env.has_wrapper_attr(name) else default


def reward_term_names(declared: Any) -> tuple[str, ...]:
    """Return an attribute `reward_terms` as names; () if it is something else of that name."""
    is_declaration = isinstance(declared, list | tuple) and all(isinstance(name, str) for name in declared)
    return tuple(declared) if is_declaration else ()


def env_reward_terms(env: gymnasium.Env) -> tuple[str, ...]:
    """Return the names of the reward terms that an environment declares."""
    return reward_term_names(wrapper_attribute(env, "reward_terms", ()))


def describe_env(env: gymnasium.Env, index: int) -> str:
    """Name an environment in error messages."""
    return f"environment {index} ({env.spec.id if env.spec is not None else type(env.unwrapped).__name__})"


def close_env(env: Any, name: str | None = None) -> None:
    """Close an environment. An exception in close() becomes a warning, so that no results are lost."""
    try:
        env.close()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        name = name or describe_env(env, 0)
        log.warning("%s, close() raised %s; the results so far are kept", name, one_line(error))


class RenamedStreams(gymnasium.ObservationWrapper, RecordConstructorArgs):
    """The environment's observation as one Dict of streams, nested names joined with a slash, some of them renamed.

    `rename`: {new name: name in the environment}.
    """

    def __init__(self, env: gymnasium.Env, rename: Mapping[str, str]) -> None:
        RecordConstructorArgs.__init__(self, rename=dict(rename))
        gymnasium.ObservationWrapper.__init__(self, env)
        layout = ObservationLayout(env.observation_space)
        paths = {"/".join(path): path for path in layout.paths}
        names = renamed_streams(paths, rename, describe_env(env, 0))
        self._paths = {new: paths[name] for name, new in names.items()}
        leaves = {name: value_at(env.observation_space, path) for name, path in self._paths.items()}
        self.observation_space = gymnasium.spaces.Dict(leaves)

    def observation(self, observation: Any) -> dict[str, Any]:
        """Return the streams by their new names."""
        return {name: value_at(observation, path) for name, path in self._paths.items()}


def rename(env: Any, streams: Mapping[str, str]) -> Any:
    """Rename the streams of an environment, or of each in a list; return it unchanged without new names."""
    if not streams:
        return env
    if isinstance(env, gymnasium.Env):
        return RenamedStreams(env, streams)
    if isinstance(env, list | tuple):
        return [rename(item, streams) for item in env]
    raise InputError(
        f"rename_streams: the streams of a {type(env).__name__} cannot be renamed; pass a list of "
        "environments, or wrap each of them in deft.envs.wrappers.RenamedStreams"
    )


class RewardWeights(gymnasium.Wrapper, RecordConstructorArgs):
    """reward = Σ weight · term over `info["reward_terms"]`; the default weight is 1."""

    def __init__(self, env: gymnasium.Env, weights: Mapping[str, float]) -> None:
        RecordConstructorArgs.__init__(self, weights=dict(weights))
        gymnasium.Wrapper.__init__(self, env)
        declared = env_reward_terms(env)
        self._is_checked = bool(declared)
        if declared:
            _check_names(weights, declared)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Step, and weight the terms of the reward."""
        observation, _, terminated, truncated, info = self.env.step(action)
        weights = self._saved_kwargs["weights"]  # not part of the saved state: a resumed run may use other weights
        if "reward_terms" not in info:
            raise (RunError if self._is_checked else InputError)(
                f"env.reward_weights: {describe_env(self.env, 0)} reports no reward terms in the info of a step "
                '("reward_terms"): remove the weights'
            )
        terms = info["reward_terms"]
        if not self._is_checked:
            _check_names(weights, terms)
            self._is_checked = True
        reward = sum(weights.get(name, 1.0) * float(value) for name, value in terms.items())
        return observation, reward, terminated, truncated, info


def weigh(env: Any, weights: Mapping[str, float]) -> Any:
    """Weight the reward of an environment, of each in a list, or of a vector environment."""
    if isinstance(env, list | tuple):
        return [weigh(item, weights) for item in env]
    if weights and isinstance(env, gymnasium.Env):
        return RewardWeights(env, weights)
    if weights and isinstance(env, gymnasium.vector.VectorEnv):
        from deft.envs.adapters.gymnasium_vector import GymnasiumVectorEnv

        env = GymnasiumVectorEnv(env)
    if isinstance(env, VectorEnv) and hasattr(env, "reward_weights"):
        env.reward_weights = _weight_columns(env, weights) if weights else None
    return env


def _weight_columns(env: VectorEnv, weights: Mapping[str, float]) -> np.ndarray:
    """Return the weights [K] in the order of the vector environment's reward terms."""
    if not env.reward_terms:
        raise InputError(f"env.reward_weights: {type(env).__name__} declares no reward terms: remove the weights")
    if env.chunk_length > 1 and env.device is None:
        raise InputError("env.reward_weights: put deft.envs.wrappers.RewardWeights inside the action chunks")
    _check_names(weights, env.reward_terms)
    return np.array([weights.get(name, 1.0) for name in env.reward_terms])


def _check_names(weights: Mapping[str, float], known: Sequence[str] | Mapping[str, Any]) -> None:
    unknown = [name for name in weights if name not in known]
    if unknown:
        raise InputError(
            f"env.reward_weights: there is no reward term {', '.join(map(repr, unknown))}; the terms are "
            f"{', '.join(known)}"
        )


PASSES_OBSERVATIONS = (TimeLimit, OrderEnforcing, RewardWeights)
"""Wrappers that do not change observations."""


def chunk_space(space: spaces.Space, chunk_length: int) -> spaces.Space:
    """Return the space of chunks of actions."""
    if isinstance(space, spaces.Box):
        repeats = (chunk_length, *([1] * len(space.shape)))
        return spaces.Box(np.tile(space.low, repeats), np.tile(space.high, repeats), dtype=space.dtype.type)
    if isinstance(space, spaces.Discrete):
        return spaces.MultiDiscrete(np.full(chunk_length, space.n), start=np.full(chunk_length, space.start))
    raise InputError(f"action chunks need a Box or Discrete action space, not {space}")


class ActionChunk(gymnasium.Wrapper):
    """Takes actions [K, A] (or [K] for Discrete) and executes up to K steps, fewer if the episode ends.

    The reward is Σ_i γ^i r_i over the executed steps, so that a discount of γ^num_steps from one action to the next
    gives the same return as single steps. info holds `num_steps`, `raw_reward` = Σ_i r_i, and the sums of
    `reward_terms`.

    Observations within a chunk are not used. An environment with an attribute `observes` and a method `observe()`
    observes only at the end of the chunk: cameras take most of the time of a step.
    """

    def __init__(self, env: gymnasium.Env, chunk_length: int, gamma: float) -> None:
        super().__init__(env)
        check_whole("chunk_length", chunk_length, 1)
        self.chunk_length = chunk_length
        self._gamma = gamma
        space = env.action_space
        self.action_space = chunk_space(space, chunk_length)
        self._is_discrete = isinstance(space, spaces.Discrete)
        self._is_lazy = _observes_on_demand(env)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Execute the chunk until it or the episode ends."""
        total, raw, num_steps = 0.0, 0.0, 0
        terms: dict[str, float] = {}
        if self._is_lazy:
            self._core.observes = False
        try:
            for single in action.tolist() if self._is_discrete else action:
                observation, reward, terminated, truncated, info = self.env.step(single)
                total += self._gamma**num_steps * float(reward)
                raw += float(reward)
                num_steps += 1
                for name, value in info.get("reward_terms", {}).items():
                    terms[name] = terms.get(name, 0.0) + float(value)
                if terminated or truncated:
                    break
        finally:
            if self._is_lazy:
                self._core.observes = True
        if self._is_lazy:
            observation = self._core.observe()
        info = {**info, "num_steps": num_steps, "raw_reward": raw}
        if terms:
            info["reward_terms"] = terms
        return observation, total, terminated, truncated, info

    @property
    def _core(self) -> Any:
        return self.env.unwrapped


def _observes_on_demand(env: gymnasium.Env) -> bool:
    """Return whether the environment can skip observations, and no wrapper reads or changes them."""
    *wrappers, core = layers(env)
    has_switch = hasattr(core, "observes") and callable(getattr(core, "observe", None))
    return has_switch and all(isinstance(wrapper, PASSES_OBSERVATIONS) for wrapper in wrappers)


class Difficulty(gymnasium.Wrapper, RecordConstructorArgs):
    """Forwards `set_difficulty` to the environment that has it."""

    is_stateless = True  # saved states are equal with and without it

    def __init__(self, env: gymnasium.Env) -> None:
        RecordConstructorArgs.__init__(self)
        super().__init__(env)

    def set_difficulty(self, level: Any) -> None:
        """Set the difficulty of the next episodes."""
        self.env.get_wrapper_attr("set_difficulty")(level)


DIFFICULTY = WrapperSpec("Difficulty", "deft.envs.wrappers:Difficulty", {})


def forward_difficulty(env: gymnasium.Env) -> gymnasium.Env:
    """Wrap an environment in `Difficulty` if an inner layer has `set_difficulty`."""
    return Difficulty(env) if not hasattr(env, "set_difficulty") and env.has_wrapper_attr("set_difficulty") else env


class Captions(gymnasium.Wrapper):
    """Adds the attribute `instruction` of an environment, if it has one, below every rendered image."""

    def render(self) -> Any:
        """Return the image with a line of text below."""
        frame: Any = self.env.render()
        frame = frame[-1] if isinstance(frame, list) else frame
        text = wrapper_attribute(self.env, "instruction")
        if frame is None or not isinstance(text, str) or not text:
            return frame
        from PIL import Image, ImageDraw

        width = frame.shape[1]
        strip = Image.new("RGB", (width, CAPTION_HEIGHT), "black")
        font = _font_that_fits(text, width - 8)
        ImageDraw.Draw(strip).text((width / 2, CAPTION_HEIGHT / 2), text, "white", font, anchor="mm")
        return np.concatenate([np.asarray(frame), np.asarray(strip)])


class FrameRecorder(Captions):
    """Records an image of every step, including those within an action chunk."""

    def __init__(self, env: gymnasium.Env) -> None:
        super().__init__(env)
        self._frames: list[np.ndarray] = []
        self.last_episode: list[np.ndarray] = []
        """The images of the previous episode."""

    def reset(self, **keywords: Any) -> Any:
        """Start the next episode."""
        found = self.env.reset(**keywords)
        self.last_episode, self._frames = self._frames, [self.render()]
        return found

    def step(self, action: Any) -> Any:
        """Step, then record an image."""
        found = self.env.step(action)
        self._frames.append(self.render())
        return found


def _font_that_fits(text: str, width: int) -> Any:
    """Return the largest font, up to 14 pixels, in which the text is at most `width` wide."""
    from PIL import ImageFont

    for size in range(14, 5, -1):
        font = ImageFont.load_default(size)
        if font.getlength(text) <= width:
            break
    return font
