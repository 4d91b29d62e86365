"""Open-loop prediction, for evaluation: frame after frame from the model's own predictions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deft import schema
from deft.models.f1.frames import to_images, to_model
from deft.models.f1.policy import F1Policy

ENCODED_TOGETHER = 256  # frames


@torch.no_grad()
def roll_out(
    policy: F1Policy,
    batch: Mapping[str, Any],
    actions: Tensor,
    memory_state: Tensor | None = None,
    states: Tensor | None = None,
) -> dict[str, Tensor]:
    """Predict the K frames after `actions` [B, K, 32] (a_t, a_{t+1}, …), and their codes.

    The batch is an observation's [B, …]: its history ends with img_t and a_{t-1}. `states` [B, K, 32] are s_t, s_{t+1},
    … if known; else s_t is used for all steps. The understanding expert's wrist image is the last predicted
    frame; its head image stays that of time t. Returns `images` uint8 [B, K, 3, h, w], `frame_tokens` [B, K, L]
    and `memory_state`.
    """
    length = policy.config.n_obs_img_steps
    wrist = schema.IMAGE1 if schema.IMAGE1 in set(batch.keys()) else schema.IMAGE0
    step = dict(batch)
    step[schema.IMAGE0_HISTORY] = batch[schema.IMAGE0_HISTORY][:, :length]
    step.pop(schema.FRAME_TOKENS, None)
    images, codes = [], []
    for index in range(actions.shape[1]):
        history = step[schema.ACTION_HISTORY]
        step[schema.ACTION_HISTORY] = torch.cat([history[:, 1:], actions[:, index : index + 1].to(history)], 1)
        if states is not None:
            step[schema.STATE] = states[:, index]
        found = policy.predict_images_only(step, memory_state)
        memory_state = found.get(schema.MEMORY_STATE)
        image = found["images"]
        images.append(image)
        codes.append(found[schema.FRAME_TOKENS])
        frames = step[schema.IMAGE0_HISTORY]
        step[schema.IMAGE0_HISTORY] = torch.cat([_sized(frames, image)[:, 1:], image[:, None].to(frames.device)], 1)
        step[wrist] = image
    results = {"images": torch.stack(images, 1), schema.FRAME_TOKENS: torch.stack(codes, 1)}
    return results if memory_state is None else {**results, schema.MEMORY_STATE: memory_state}


def _sized(frames: Tensor, image: Tensor) -> Tensor:
    """Resize frames [B, T, 3, h, w] to the size of the predicted frames."""
    size = image.shape[-1]
    if frames.shape[-2:] == image.shape[-2:]:
        return frames
    return to_images(to_model(frames, size, schema.IMAGE0_HISTORY))


@torch.no_grad()
def encode_frames(policy: F1Policy, frames: np.ndarray) -> Tensor:
    """Encode uint8 frames [N, 3, h, w]: int64 [N, L], on the policy's device."""
    found = []
    for start in range(0, len(frames), ENCODED_TOGETHER):
        pixels = torch.as_tensor(frames[start : start + ENCODED_TOGETHER], device=policy.device)
        found.append(policy.tokenizer.encode(to_model(pixels, policy.config.tokenizer.image_size, schema.WRIST_RGB)))
    return torch.cat(found)
