"""The policy of a run without its environment, in Python.

`deft.load_policy`: observations in, actions out, as numpy arrays. `VLAModel.from_pretrained(run)`: a model that is
called with images and tokens, for users who wrap it in a policy of their own with `get_action(obs, deterministic)`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDict
from torch import Tensor, nn

from deft import schema, trust
from deft.config.settings import RunConfig
from deft.envs.layout import ActionLayout, ObservationLayout
from deft.envs.make import wrap
from deft.errors import InputError, RunError
from deft.evaluation import evaluate
from deft.evaluation.rollouts import PolicyActor
from deft.models.decision_transformer import DecisionTransformerPolicy
from deft.models.encoders import ObservationEncoder, is_image
from deft.models.inpainting import MAX_GUIDANCE
from deft.models.policy import Policy, members_of
from deft.models.vla.policy import VLAPolicy
from deft.runs.checkpoint import TRAINING_STATE
from deft.runs.compute import choose_device
from deft.runs.policy_spaces import SPACES_FILE, PolicySpaces
from deft.runs.waypoint_files import FINAL, load_ppo


@trust.takes_remote_code
def load_policy(
    path: str | Path,
    *,
    deterministic: bool = True,
    device: str = "auto",
    target_return: float | None = None,
    env: gymnasium.Env | None = None,
    trust_remote_code: bool = False,
) -> LoadedPolicy:
    """Load the policy of a run directory (its best checkpoint) or of a checkpoint, ready to act.

    `deterministic` selects actions as `deft evaluate` does by default, else they are sampled. `target_return` is the
    return that a Decision Transformer aims at. `env` gives the spaces in place of the checkpoint's `spaces.json`, as
    for `deft evaluate`: checkpoints of earlier versions need it. Of a run of several seeds the first one acts.
    `trust_remote_code` allows the modules that the run's files name to be imported.
    """
    if not isinstance(deterministic, bool):
        raise InputError(f"load_policy: deterministic {deterministic!r} is not True or False")
    path = Path(path)
    if path.is_file() and (path.parent / TRAINING_STATE).is_file():
        raise InputError(f"{path}: is one file of a checkpoint; give its folder {path.parent}")
    if path.is_file() or (path / FINAL).is_file():
        policy, own = _load_waypoints(path)
        policy.to(choose_device(device))
    else:
        folder, config = evaluate.find_run(path)
        if env is not None:
            vector = wrap([env], chunk_length=config.policy.chunk_length)
            whole = evaluate.load_policy(folder, config, vector, device)
            own = PolicySpaces(vector.observation_space, vector.env_action_space, vector.action_mask)
        else:
            recorded = PolicySpaces.read(folder)
            if recorded is None:
                raise InputError(
                    f"{folder}: has no {SPACES_FILE}, since an earlier version saved it; give load_policy(…, env=…) an "
                    "environment with the observations and actions of the policy"
                )
            own = recorded
            observation, action = ObservationLayout(own.observation).space, ActionLayout(own.action).space
            whole = evaluate.rebuild_policy(folder, config, observation, action, device)
            own = PolicySpaces(observation, own.action, own.action_mask)
        if isinstance(config, RunConfig) and config.policy.chunk_length > 1:
            own = PolicySpaces(own.observation, _single_step(own.action), own.action_mask)
        policy = members_of(whole)[0]
    if isinstance(policy, DecisionTransformerPolicy):
        aim = policy.target_returns[0] if target_return is None else target_return
        policy.target_return.fill_(_number("load_policy: target_return", aim))
    elif target_return is not None:
        raise InputError(f"target_return {target_return}: only a Decision Transformer takes one; leave it out")
    return LoadedPolicy(policy, own, deterministic)


class LoadedPolicy:
    """A trained policy in a control loop: `get_action(observation)` at every step, `reset()` before every episode.

    Memory is carried from step to step, and a chunk of actions is played to its end before the next observation counts.
    """

    policy: Policy
    made_for: PolicySpaces
    observation_space: spaces.Space
    """Of the rows that the policy reads: channels of images first, texts as uint8."""
    action_space: spaces.Space
    """Of one step. Box actions are clipped to its bounds, as an environment of the policy clips them."""
    action_selection: str
    """`mode`, `sample` or `sampled noise`, as in the results of `deft evaluate`."""
    scales_images: bool
    """Whether images may have another size than in training: a VLA model resizes them."""

    def __init__(self, policy: Policy, own: PolicySpaces, deterministic: bool = True) -> None:
        self.policy = policy.eval()
        self.observation_space, self.action_space = own.observation, own.action
        self.made_for, self._deterministic = own, deterministic
        self._actor = PolicyActor(policy, 1, own.action_mask, deterministic)
        self.action_selection = self._actor.action_selection
        self._actions = ActionLayout(own.action)
        has_encoder = isinstance(getattr(policy, "encoder", None), ObservationEncoder)  # for images of one size
        self.scales_images = isinstance(policy, VLAPolicy) and not has_encoder
        self._is_first = True

    @property
    def streams(self) -> list[str]:
        """Names of the streams that an observation must have; none where it is one array."""
        space = self.observation_space
        names = list(space.spaces) if isinstance(space, spaces.Dict) else []
        return [name for name in names if self.policy.streams is None or name in self.policy.streams]

    def reset(self) -> None:
        """Begin an episode: the memory is empty, and the rest of a chunk is dropped."""
        self._actor.ended(np.zeros(1, np.int64))
        self._is_first = True

    def copy(self) -> LoadedPolicy:
        """Return a policy with the same weights, not copied, and its own memory and chunk: for a further robot."""
        return LoadedPolicy(self.policy, self.made_for, self._deterministic)

    def get_action(self, observation: Any, reward: float | None = None) -> np.ndarray:
        """The action for one observation: an array, or a dict of the policy's streams (more streams are ignored).

        Images are uint8 with the channels first or last, instructions are text. `reward` is what the last action
        earned; only a Decision Transformer reads it.
        """
        rewards = self._rewards(reward)
        action: np.ndarray = self._finished(self._actor.act(self._rows(observation), rewards))[0]
        return action

    def get_chunk(self, observation: Any, reward: float | None = None) -> np.ndarray:
        """The whole chunk of actions for one observation, [K, …], computed at every call; K is 1 without chunks.

        The first one is the action of `get_action` at the start of a chunk. The memory advances once per call.
        """
        rewards = self._rewards(reward)
        return self._finished(self._actor.act_chunk(self._rows(observation), rewards)[0])

    def inpaint_chunk(
        self, observation: Any, running: np.ndarray, frozen_steps: int, max_guidance: float = MAX_GUIDANCE
    ) -> np.ndarray:
        """A chunk [K, A] for one observation that continues the chunk which is executed: real-time chunking.

        `running` [L, A] are the actions that this chunk has left from this step on, L ≤ K. The first `frozen_steps` of
        them are executed while this is computed, and are the first ones of the new chunk. The next ones guide its
        denoising with decreasing weights, by factors of at most `max_guidance`.
        """
        length, size = self.policy.chunk_length, int(np.prod(self.action_space.shape or ()))
        running = np.asarray(running, np.float32)
        left = len(running) if running.ndim else 0
        if running.shape != (left, size) or not 1 <= left <= length or not np.isfinite(running).all():
            raise InputError(
                f"inpaint_chunk: running has the shape {list(running.shape)}; give the finite actions that the chunk "
                f"has left, [1 to {length}, {size}]"
            )
        if not 0 <= frozen_steps <= left:
            raise InputError(f"inpaint_chunk: frozen_steps {frozen_steps} must be 0 to {left}, the steps of running")
        padded = np.concatenate([running, np.repeat(running[-1:], length - left, 0)])
        counts = (np.array([left]), np.array([frozen_steps]))
        return self._finished(self._actor.inpaint(self._rows(observation), padded[None], *counts, max_guidance)[0])

    def check(self, observation: Any) -> None:
        """Raise an error for an observation that `get_action` rejects."""
        self._rows(observation)

    def _rewards(self, reward: float | None) -> np.ndarray | None:
        """The reward of the last action as a batch of one; None where the policy reads none."""
        if not self.policy.needs_reward:
            return None
        if reward is None and not self._is_first:
            raise InputError("get_action: a Decision Transformer needs the reward of its last action; give reward=")
        return np.array([0.0 if reward is None else _number("get_action: reward", reward)], np.float32)

    def _finished(self, actions: np.ndarray) -> np.ndarray:
        """Actions [n, …] of the policy as those of the robot."""
        self._is_first = False
        if actions.dtype.kind == "f" and not np.isfinite(actions).all():
            raise RunError(f"get_action: the policy's action {actions[0]} is not finite; its weights are damaged")
        return self._actions.prepare(actions, len(actions))

    def _rows(self, observation: Any) -> np.ndarray | dict[str, np.ndarray]:
        """The observation as a batch of one, as the policy reads it."""
        space = self.observation_space
        if not isinstance(space, spaces.Dict):
            return self._row("the observation", observation, space)[None]
        given = dict(_named(observation)) if isinstance(observation, Mapping) else {}
        if any(name not in given for name in self.streams):
            raise InputError(
                f"get_action: the observation has the streams {', '.join(given) or 'none'}; the policy reads "
                f"{', '.join(self.streams)}: give a dict with all of these"
            )
        return {
            name: self._row(f"stream {name!r}", given[name], part)[None]
            if name in given
            else np.zeros((1, *(part.shape or ())), part.dtype)  # one that the policy does not read
            for name, part in space.spaces.items()
        }

    def _row(self, what: str, value: Any, space: spaces.Space) -> np.ndarray:
        shape, dtype = tuple(space.shape or ()), np.dtype(space.dtype)
        if isinstance(value, str) and dtype == np.uint8 and len(shape) == 1:
            return schema.encode_text(value, shape[0])
        try:
            row = np.asarray(value)
        except (TypeError, ValueError, RuntimeError) as error:  # ragged lists, tensors with gradients or on a GPU
            reason = " ".join(str(error).split())
            raise InputError(f"get_action: {what} cannot be converted to a numpy array: {reason}") from error
        if is_image(space):
            if schema.has_channels_last(row.shape, row.dtype):
                row = np.ascontiguousarray(schema.channels_first(row))
            if self.scales_images and row.ndim == len(shape) and row.shape[:-2] == shape[:-2] and row.size:
                shape = row.shape
        if row.shape != shape or not np.can_cast(row.dtype, dtype, "same_kind"):
            raise InputError(f"get_action: {what} is {row.dtype} {row.shape}, the policy reads {dtype} {shape}")
        with np.errstate(over="ignore"):  # a float64 beyond the range of float32 becomes infinite
            row = row.astype(dtype, copy=False)
        if dtype.kind == "f" and not np.isfinite(row).all():
            raise InputError(f"get_action: {what} holds values that are infinite or not a number in {dtype}")
        if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
            sizes = space.n if isinstance(space, spaces.Discrete) else space.nvec
            if ((row < 0) | (row >= sizes)).any():
                raise InputError(f"get_action: {what} {row.tolist()} is out of range; the policy reads {space} from 0")
        return row


def _number(what: str, value: Any) -> float:
    """The value as a finite number in the range of float32."""
    try:
        number = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        number = math.nan
    if not abs(number) <= float(np.finfo(np.float32).max):  # also of NaN
        raise InputError(f"{what} {value!r} is not a finite number in float32")
    return number


def _named(observation: Mapping[Any, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """The streams of an observation by name, those of nested dicts joined with a slash."""
    for name, value in observation.items():
        if isinstance(value, Mapping):
            yield from _named(value, (*path, str(name)))
        else:
            yield "/".join((*path, str(name))), value


def _single_step(space: spaces.Space) -> spaces.Space:
    """The action space of one step of an `ActionChunk`."""
    if isinstance(space, spaces.Box):
        return spaces.Box(space.low[0], space.high[0], dtype=space.dtype.type)
    assert isinstance(space, spaces.MultiDiscrete)
    return spaces.Discrete(int(space.nvec[0]), start=int(space.start[0]))


def _load_waypoints(path: Path) -> tuple[Policy, PolicySpaces]:
    """The policy of `deft train waypoint-ppo`; its actions are waypoints [K, 2] in metres."""
    policy, _ = load_ppo(path)
    shape = policy.sft.shape
    waypoints = spaces.Box(-np.inf, np.inf, (shape.num_waypoints, 2), np.float32)
    streams: dict[str, spaces.Space] = {
        schema.CAMERA: spaces.Box(0, 255, (3, shape.camera_size, shape.camera_size), np.uint8),
        schema.MOTION: spaces.Box(-np.inf, np.inf, (shape.motion_dim,), np.float32),
        schema.SFT_OFFSET: waypoints,  # zeros outside of environments that disturb the supervised waypoints
    }
    policy.streams = frozenset((schema.CAMERA, schema.MOTION))
    return policy, PolicySpaces(spaces.Dict(streams), waypoints)


class VLAModel(nn.Module):
    """Images and tokens in, actions out: `model(pixel_values, input_ids)["predicted_actions"]`, differentiable.

    The action is the policy's most likely one, in the units of the environment, [B, A], or [B, K, A] for a chunk.
    """

    def __init__(self, policy: Policy, observation_space: spaces.Dict) -> None:
        super().__init__()
        if not policy.is_continuous:
            raise InputError(
                f"VLAModel: {type(policy).__name__} has no action to differentiate; use a run of sft, iql, cql, td3-bc "
                "or sac, or one with a VLA model"
            )
        self.policy = policy.eval()
        streams = observation_space.spaces
        self.cameras = [name for name, space in streams.items() if is_image(space)]
        texts = [name for name, space in streams.items() if space.dtype == np.uint8 and len(space.shape or ()) == 1]
        self.text = schema.INSTRUCTION if schema.INSTRUCTION in texts else next(iter(texts), None)
        self.max_text_length = 0 if self.text is None else int(np.prod(streams[self.text].shape or ()))
        self.others = [name for name in streams if name not in (*self.cameras, self.text)]

    @classmethod
    def from_pretrained(cls, path: str | Path, device: str | torch.device = "cpu", **options: Any) -> VLAModel:
        """Load the policy of a run directory (its best checkpoint) or of a checkpoint, such as `output/sft/best`.

        `options` are those of `deft.load_policy`: `env`, `trust_remote_code`.
        """
        loaded = load_policy(path, device=str(device), **options)
        space = loaded.observation_space
        if not isinstance(space, spaces.Dict) or not any(map(is_image, space.spaces.values())):
            raise InputError(f"{path}: its policy reads {space}; VLAModel is for named streams with images")
        return cls(loaded.policy, spaces.Dict({name: space[name] for name in loaded.streams}))

    def tokenize(self, instructions: str | Sequence[str]) -> Tensor:
        """Texts as the tokens that this model reads: UTF-8 bytes, uint8 [B, max_text_length], zeros after them."""
        if self.text is None:
            raise InputError("tokenize: this model reads no instruction")
        texts = [instructions] if isinstance(instructions, str) else list(instructions)
        rows = np.stack([schema.encode_text(text, self.max_text_length) for text in texts])
        return torch.as_tensor(rows, device=next(self.parameters()).device)

    def forward(
        self, pixel_values: Tensor | Mapping[str, Tensor], input_ids: Tensor | None = None, **streams: Tensor
    ) -> dict[str, Tensor]:
        """`predicted_actions` for uint8 images [B, 3, h, w] (a dict of them with several cameras) and tokens [B, L].

        What else the policy reads, such as `state`, is given by its stream's name.
        """
        images = {self.cameras[0]: pixel_values} if isinstance(pixel_values, Tensor) else dict(pixel_values)
        given: dict[str, Any] = {**images, **streams}
        if input_ids is not None and self.text is not None:
            given[self.text] = input_ids.expand(len(next(iter(images.values()))), -1)
        needed = [*self.cameras, *([] if self.text is None else [self.text]), *self.others]
        missing = [name for name in needed if name not in given]
        if missing or set(given) - set(needed):
            raise InputError(f"VLAModel reads {', '.join(needed)}; given: {', '.join(given)}: give each by its name")
        device = next(self.parameters()).device
        td = TensorDict({name: given[name].to(device) for name in needed}, [len(given[needed[0]])])
        return {"predicted_actions": self._actions(td)}

    def _actions(self, observation: TensorDict) -> Tensor:
        return self.policy.from_unit(self.policy.mean(self.policy.encode(observation))[0])
