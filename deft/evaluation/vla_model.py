"""The policy of a Deft run as a model that is called with images and tokens: `VLAModel.from_pretrained(run)`.

For users who wrap a model in a policy of their own, with `get_action(obs, deterministic)`, and train that with PPO.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDict
from torch import Tensor, nn

from deft import schema
from deft.errors import InputError
from deft.evaluation.loaded_policy import load_policy
from deft.models.encoders import is_image
from deft.models.policy import Policy


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
