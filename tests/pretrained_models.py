"""Tiny shapes of real architectures, with new weights, and what they look at."""

from typing import Any

import torch
from tensordict import TensorDict

from deft.schema import encode_text

TEXT = {
    "model_type": "gemma", "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 600,
}  # fmt: skip
VISION = {
    "model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
    "num_attention_heads": 2, "patch_size": 14, "image_size": 28, "vision_use_head": False,
}  # fmt: skip
PALIGEMMA: dict[str, Any] = {
    "model_type": "paligemma", "text_config": TEXT, "vision_config": VISION, "projection_dim": 32,
    "image_token_id": 599,
}  # fmt: skip
CLIP = {**VISION, "model_type": "clip_vision_model", "num_hidden_layers": 2, "projection_dim": 32}
CLIP.pop("vision_use_head")
LLAMA = {**TEXT, "model_type": "llama"}
OTHERS: dict[str, dict[str, Any]] = {
    "llava": {"model_type": "llava", "text_config": LLAMA, "vision_config": CLIP, "image_token_id": 599},
    "gemma3": {
        "model_type": "gemma3", "text_config": {**TEXT, "model_type": "gemma3_text"}, "vision_config": VISION,
        "mm_tokens_per_image": 4, "image_token_id": 599, "boi_token_index": 598, "eoi_token_index": 597,
    },
    "smolvlm": {
        "model_type": "smolvlm", "text_config": LLAMA, "scale_factor": 2, "image_token_id": 599,
        "vision_config": {**VISION, "model_type": "smolvlm_vision"},
    },
}  # fmt: skip
PI0: dict[str, Any] = {
    "chunk_size": 4, "max_action_dim": 6, "max_state_dim": 5, "num_inference_steps": 3, "vlm_config": PALIGEMMA,
    "dit_config": {**TEXT, "hidden_size": 24, "intermediate_size": 48},
}  # fmt: skip
STREAMS: dict[str, Any] = {
    "action_dim": 3, "chunk_length": 2, "image_keys": ["head_rgb", "wrist_rgb"], "tokenizer": "bytes",
    "prompt_length": 96,
}  # fmt: skip
PROPRIO: dict[str, Any] = {"proprio_key": "state", "proprio_dim": 5}
TEXTS = ("pick up the red cube", "push the blue cylinder", "go")


def observations(batch: int = 3, seed: int = 0) -> TensorDict:
    """What a tabletop shows, small."""
    random = torch.Generator().manual_seed(seed)
    pictures = torch.randint(0, 256, (2, batch, 3, 20, 20), dtype=torch.uint8, generator=random)
    words = [torch.as_tensor(encode_text(TEXTS[index % 3], 40)) for index in range(batch)]
    return TensorDict(
        {
            "head_rgb": pictures[0],
            "wrist_rgb": pictures[1],
            "state": torch.randn(batch, 5, generator=random),
            "instruction": torch.stack(words),
        },
        [batch],
    )
