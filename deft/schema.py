"""The names and shapes that every part of Deft shares; the only place where a key is spelled.

A transition is a TensorDict with batch [N] (one row per environment); a rollout is time-major, [T, N]. Per-step scalars
have no trailing dimension. `terminated` and `truncated` are separate; truncation bootstraps from the final observation.
Importing this module does not import torch: environment workers use it too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from deft.errors import InputError

if TYPE_CHECKING:
    from tensordict import TensorDictBase

OBSERVATION = "observation"  # [B, …], or nested named streams (`state`, `wrist_rgb`, `instruction`, …)
MEMORY = "memory"  # [B, layers, hidden]: recurrent state before this step; zeros at an episode's first step
ACTION = "action"  # [B] (Discrete), [B, A], or [B, K, A] for a chunk of K steps; before any clipping the env does
ACTION_MASK = "action_mask"  # bool [B, A]: which of the padded action dims are real
LOG_PROB = "sample_log_prob"  # [B]: log-prob of `action` under the policy that acted
VALUE = "value"  # [B]: V(observation) by the policy that acted
POLICY_VERSION = "policy_version"  # int64 [B]: version of the weights that acted
SAMPLE = "sample"  # nested, optional: random values of `act` that are needed to score the action again
NOISE = "noise"  # [B, K, A], in `sample` of a flow policy: its initial noise, given to `act` or stored by it
CHAIN = "chain"  # [B, S + 1, K, A], in `sample` of a flow policy: its denoising chain from noise to the action
TOKENS = "tokens"  # int64 [B, K · A], in `sample` of a policy with action tokens: the sampled tokens
EXPERT_ACTION = "expert_action"  # [B, A]: what an expert would have done here; `action` is what was executed
# The key `advantage` is also a stream of observations: the indicator of `deft.models.advantage`, [B, 1] in {1, −1, 0}.
INTERVENTION = "intervention"  # bool [B]: whether an expert decided the executed action
BASE_ACTION = "base_action"  # [B, K · A], in `sample` of a residual policy: the unit action of the frozen policy
BEFORE_TANH = "before_tanh"  # [B, K · A], in `sample` of a squashed Gaussian: the sample before tanh
USES_RESIDUAL = "uses_residual"  # bool [B], in `sample` of a residual policy: whether the residual was added
NEXT = "next"
REWARD = "reward"
TERMINATED = "terminated"
TRUNCATED = "truncated"
NUM_STEPS = "num_steps"  # int64 [B]: env steps that this transition took; only with action chunks
REWARD_TERMS = "reward_terms"  # [B, K]: the named terms of the reward, in the order of `VectorEnv.reward_terms`
ADVANTAGE = "advantage"
VALUE_TARGET = "value_target"
PREVIOUS_REWARD = "previous_reward"  # [B]: reward of the last action, 0 at an episode's first step
DISCOUNT = "discount"  # [B]: discount of the value of the next observation, γ (γ^n after n rewards), 0 at a terminal
RETURN_TO_GO = "return_to_go"  # [B, K]: undiscounted, from this step to the end of its episode
TIMESTEP = "timestep"  # int64 [B, K]: index in the episode, from 0
STEP_MASK = "step_mask"  # bool [B, K]: which steps of a window are real; padding is at its end. [T, B] in F1

# The streams of a robot's observation.
STATE = "state"  # [B, 32]: joints (or the hand) and gripper in the padded layout of the actions, each about -1 to 1
WRIST_RGB = "wrist_rgb"  # uint8 [B, 3, h, w], with history [B, H, 3, h, w], oldest first
HEAD_RGB = "head_rgb"  # likewise
ACTION_HISTORY = "action_history"  # [B, H, 32]: the actions before this observation, oldest first
OBJECT_POSITIONS = "places"  # float [B, n]: labels, which only training reads; a policy learns to predict them
KEYFRAMES = "keyframes"  # likewise: where the robot goes next, computed from a recording
LABELS = (OBJECT_POSITIONS, KEYFRAMES)
INSTRUCTION = "instruction"  # uint8 [B, L]: see `encode_text`

# The batches of the F1 model, [B, …] or a sequence [T, B, …]; images are uint8, the model scales them.
IMAGE0 = "image0"  # [B, 3, h, w]: input of the understanding expert; the head camera for the teacher
IMAGE1 = "image1"  # likewise; the wrist camera for the teacher
IMAGE0_HISTORY = "image0_history"  # [B, H + n, 3, h, w]: img_{t-3} of the wrist … img_t, then the n frames to predict
FRAME_TOKENS = "frame_tokens"  # int64 [B, H + n, L], optional: the codes of these frames, if they are known
MASK_SUFFIX = "_mask"  # bool [B], under the name of an image with this suffix: whether there is one
ACTION_IS_PAD = "action_is_pad"  # bool [B, K]: which steps of an action chunk lie after the episode's end
MEMORY_STATE = "memory_state"  # [layers, B, hidden] before the batch's first step
TEACHER_MEMORY = "teacher_memory"  # [B, hidden], in an explorer's rollout: memory of the teacher after this step

# The streams of a driving observation, and what a waypoint policy stores in `sample`.
CAMERA = "camera"  # uint8 [B, 3, h, w]
MOTION = "motion"  # [B, M]: motion of the vehicle, and the gap to the one ahead
SFT_OFFSET = "sft_offset"  # [B, K, 2]: metres by which the supervised policy's waypoints are wrong in this episode
LATENT = "latent"  # [B, Z]: features of the frozen encoder
SFT_WAYPOINTS = "sft_waypoints"  # [B, K, 2]: the supervised policy's waypoints, with the episode's error

NEXT_OBSERVATION = (NEXT, OBSERVATION)  # the true final one at an episode's end, never the one after a reset
NEXT_MEMORY = (NEXT, MEMORY)
NEXT_REWARD = (NEXT, REWARD)
NEXT_TERMINATED = (NEXT, TERMINATED)
NEXT_TRUNCATED = (NEXT, TRUNCATED)
NEXT_NUM_STEPS = (NEXT, NUM_STEPS)
NEXT_ACTION = (NEXT, ACTION)  # like `action`: the one recorded at the next observation; see the mask
NEXT_STEP_MASK = (NEXT, STEP_MASK)  # bool [B, K]: which of its K steps were recorded; K is 1 without chunks
NEXT_REWARD_TERMS = (NEXT, REWARD_TERMS)
# V(next observation) where a segment of a rollout ends without the next row following it: at a truncation and at the
# rollout's last step. Elsewhere 0. So rollouts of images do not store every observation twice.
NEXT_VALUE = (NEXT, VALUE)

CHANNELS = (1, 3, 4)  # of an image

PER_STEP_SCALARS = (LOG_PROB, VALUE, POLICY_VERSION, NEXT_REWARD, NEXT_TERMINATED, NEXT_TRUNCATED, NEXT_VALUE)


def check_scalars(transition: TensorDictBase) -> None:
    """Raise an error for per-step scalars with a trailing dimension: [B] and [B, 1] would broadcast to [B, B]."""
    batch_size = tuple(transition.batch_size)
    for key in PER_STEP_SCALARS:
        value: Any = transition.get(key, None)
        if value is not None and tuple(value.shape) != batch_size:
            raise InputError(f"{key} has shape {tuple(value.shape)}; a per-step scalar must have {batch_size}")


def renamed_streams(names: Iterable[str], rename: Mapping[str, str], where: str) -> dict[str, str]:
    """Map the names of the streams of `where` to their new names; `rename` is {new name: own name}."""
    known, new = list(names), {own: name for name, own in rename.items()}
    if len(new) < len(rename):
        raise InputError(f"rename_streams: {dict(rename)} gives one stream two names; give each one")
    if rename and not any(known):
        raise InputError(f"rename_streams: {where} has one unnamed observation, nothing to rename; leave it out")
    if unknown := [own for own in new if own not in known]:
        raise InputError(
            f"rename_streams: {where} has no stream {unknown[0]!r}; it has {', '.join(known)}: "
            "write NEW_NAME=STREAM with one of these"
        )
    renamed = {name: new.get(name, name) for name in known}
    if twice := [name for name in rename if list(renamed.values()).count(name) > 1]:
        raise InputError(f"rename_streams: {where} has another stream {twice[0]!r} already; rename that one too")
    return renamed


def has_channels_last(shape: tuple[int, ...], dtype: Any) -> bool:
    """Whether uint8 arrays of a shape are images [h, w, C], or histories [H, h, w, C], of 1, 3 or 4 channels.

    Deft stores images with channels first, [C, h, w] and [H, C, h, w]; environments and datasets transpose theirs.
    """
    return len(shape) in (3, 4) and dtype == np.uint8 and shape[-1] in CHANNELS and shape[-3] not in CHANNELS


def channels_first(images: np.ndarray) -> np.ndarray:
    """Return images […, h, w, C] as […, C, h, w], without a copy."""
    return np.moveaxis(images, -1, -3)


def channels_last(images: np.ndarray) -> np.ndarray:
    """The inverse of `channels_first`."""
    return np.moveaxis(images, -3, -1)


def encode_text(text: str, length: int) -> np.ndarray:
    """Return text as UTF-8 bytes in a uint8 row, padded with zeros, so that instructions are tensors."""
    data = text.encode("utf-8")
    if len(data) > length:
        raise InputError(f"instruction of {len(data)} bytes does not fit its space of {length}: {text[:40]!r}…")
    row = np.zeros(length, np.uint8)
    row[: len(data)] = np.frombuffer(data, np.uint8)
    return row


def decode_text(row: np.ndarray) -> str:
    """The inverse of `encode_text`."""
    return bytes(np.asarray(row, np.uint8)).rstrip(b"\0").decode("utf-8")
