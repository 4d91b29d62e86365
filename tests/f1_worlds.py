"""F1 models that are small enough to test with, and batches for them."""

from __future__ import annotations

from typing import Any

import torch

from deft import schema
from deft.models.f1.config import ExpertConfig, F1Config, TokenizerConfig, VisionConfig
from deft.models.f1.policy import F1Policy

PIXELS = 16


def micro_config(**changes: Any) -> F1Config:
    """16 px, 21 tokens a frame, two layers; what the published model lacks is there and without effect."""
    settings: dict[str, Any] = {
        "vision": VisionConfig(
            hidden_size=8, intermediate_size=16, num_layers=1, num_heads=2, patch_size=8, image_size=PIXELS
        ),
        "understanding": ExpertConfig(hidden_size=12, intermediate_size=24),
        "generation": ExpertConfig(hidden_size=16, intermediate_size=32),
        "action": ExpertConfig(hidden_size=8, intermediate_size=16),
        "tokenizer": TokenizerConfig(
            scales=(1, 2, 4),
            codebook_size=32,
            code_dim=4,
            channels=8,
            channel_multipliers=(1,),
            num_res_blocks=1,
            attention=False,
            stem_stride=4,
        ),
        "num_layers": 2,
        "num_heads": 2,
        "head_dim": 8,
        "vocab_size": 259,
        "language_heads": False,
        "language_tokenizer_path": "bytes",
        "tokenizer_max_length": 8,
        "chunk_size": 3,
        "memory_hidden": 6,
        "memory_num_layers": 2,
    }
    return F1Config(**{**settings, **changes})


def micro_policy(**changes: Any) -> F1Policy:
    """A policy of that size whose codes spread over the codebook."""
    torch.manual_seed(0)
    policy = F1Policy(micro_config(**changes)).eval()
    torch.nn.init.normal_(policy.tokenizer.quantize.embedding.weight)
    return policy


def small_policy(**changes: Any) -> F1Policy:
    """The same in training mode, conditioned on its inputs from the start."""
    return micro_policy(**{"condition_init": 0.05, **changes}).train()


def wake(policy: F1Policy) -> F1Policy:
    """Give an effect to all that starts without one."""
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if name.endswith(".gate") or name.startswith(("conditioning.output", "motion.camera", "motion.head")):
                parameter.normal_(std=0.5)
    return policy


def weights(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A copy of the weights as they are now."""
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def changed(before: dict[str, torch.Tensor], module: torch.nn.Module) -> set[str]:
    """The names of the weights that differ from those before."""
    return {name for name, value in module.state_dict().items() if not torch.equal(value, before[name])}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Whether two sets of weights have the same names and values."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def f1_batch(*leading: int, target: bool = True, seed: int = 0, pixels: int = PIXELS) -> dict[str, Any]:
    """A batch [B, …] or [T, B, …] of noise, with the frame to predict where `target`."""
    generator = torch.Generator().manual_seed(seed)

    def pictures(*shape: int) -> torch.Tensor:
        return torch.randint(0, 256, (*leading, *shape, 3, pixels, pixels), dtype=torch.uint8, generator=generator)

    return {
        schema.IMAGE0: pictures(),
        schema.IMAGE1: pictures(),
        schema.IMAGE0_HISTORY: pictures(5 if target else 4),
        schema.STATE: torch.randn(*leading, 32, generator=generator),
        schema.ACTION_HISTORY: torch.randn(*leading, 4, 32, generator=generator),
    }
