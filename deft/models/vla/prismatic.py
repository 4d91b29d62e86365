"""The network of OpenVLA with its names: two vision transformers, a projector, and Llama.

The vision transformers have the names and shapes of timm's, without timm. The features of an image are those before
the last block; the last block, the norm after it and the pooling are part of the published weights but never used, and
neither is the head that predicts words. OpenVLA-OFT adds FiLM: the mean embedding of the prompt scales and shifts the
channels of every block.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from deft.errors import InputError
from deft.models.vla.pretrained import transformers_module

Weights = Mapping[str, Tensor]
VISION = "vision_backbone."
FEATURIZERS = ("featurizer", "fused_featurizer")
LORA_ALPHA = 16  # of the adapters in a file with FiLM, or their rank if it is less


@dataclass(frozen=True, kw_only=True)
class ViTShape:
    """Sizes of a vision transformer; `registers` are tokens beside the class token, if there is one."""

    width: int
    depth: int
    heads: int
    hidden: int
    patch: int = 14
    registers: int = 0
    has_class: bool = False
    has_scales: bool = False


SIGLIP = ViTShape(width=1152, depth=27, heads=16, hidden=4304)
SHAPES = {
    "vit_large_patch14_reg4_dinov2.lvd142m": ViTShape(
        width=1024, depth=24, heads=16, hidden=4096, registers=4, has_class=True, has_scales=True
    ),
    "vit_so400m_patch14_siglip_224": SIGLIP,
    "vit_so400m_patch14_siglip_384": SIGLIP,
}


class PrismaticNetwork(nn.Module):
    """Images and words to the last hidden states of Llama, with attention in both directions."""

    def __init__(self, config: Mapping[str, Any], use_film: bool) -> None:
        super().__init__()
        transformers = transformers_module()
        text = dict(config["text_config"])
        text_config = transformers.AutoConfig.for_model(text.pop("model_type", "llama"), **text)
        self.width: int = text_config.hidden_size
        self.vocabulary: int = text_config.vocab_size
        shapes = vision_shapes(config)
        sizes = list(config["image_sizes"])
        if len(sizes) != len(shapes):
            raise InputError(f"image_sizes has {len(sizes)} numbers for {len(shapes)} vision transformers")
        self.vision_backbone = nn.Module()
        for name, shape, size in zip(FEATURIZERS, shapes, sizes, strict=False):
            self.vision_backbone.add_module(name, VisionTransformer(shape, size, self.width if use_film else None))
        self.projector = Projector(sum(shape.width for shape in shapes), self.width, len(shapes) > 1)
        self.language_model = nn.Module()
        self.language_model.model = transformers.AutoModel.from_config(text_config)

    @property
    def transformers(self) -> list[VisionTransformer]:
        """The vision transformers."""
        return [module for module in self.vision_backbone.children() if isinstance(module, VisionTransformer)]

    @property
    def llama(self) -> Any:
        """The language model without its head."""
        return self.get_submodule("language_model.model")

    def embed(self, ids: Tensor) -> Tensor:
        """Embeddings of token ids."""
        return self.llama.get_input_embeddings()(ids)

    def read_images(self, images: Sequence[Tensor], prompt: Tensor) -> Tensor:
        """Tokens [B, cameras · patches, W] of images [B, cameras, 3, h, w], one for each vision transformer.

        `prompt` [B, W] is the mean embedding of the prompt, for FiLM.
        """
        batch, cameras = images[0].shape[:2]
        language = prompt.repeat_interleave(cameras, 0)
        dtype = self.projector.fc1.weight.dtype
        features = [
            read(pixels.flatten(0, 1).to(dtype), language)
            for read, pixels in zip(self.transformers, images, strict=True)
        ]
        return self.projector(torch.cat(features, -1)).unflatten(0, (batch, cameras)).flatten(1, 2)

    def forward(self, tokens: Tensor, real: Tensor) -> Tensor:
        """Last hidden states [B, T, W], float32, of tokens that attend to all `real` [B, T] ones."""
        mask = torch.zeros(len(tokens), 1, *tokens.shape[1:2] * 2, dtype=tokens.dtype, device=tokens.device)
        mask = mask.masked_fill(~real[:, None, None], torch.finfo(tokens.dtype).min)
        positions = (real.long().cumsum(1) - 1).clamp(min=0)
        return self.llama(
            inputs_embeds=tokens, attention_mask=mask, position_ids=positions, use_cache=False
        ).last_hidden_state.float()


class Projector(nn.Module):
    """Features of patches to tokens of the language model: two layers, or three for two vision transformers."""

    def __init__(self, before: int, after: int, is_fused: bool) -> None:
        super().__init__()
        inner = 4 * before if is_fused else after
        self.fc1, self.fc2 = nn.Linear(before, inner), nn.Linear(inner, after)
        self.fc3 = nn.Linear(after, after) if is_fused else None

    def forward(self, x: Tensor) -> Tensor:
        """[…, before] → […, after]."""
        x = self.fc2(functional.gelu(self.fc1(x)))
        return x if self.fc3 is None else self.fc3(functional.gelu(x))


class VisionTransformer(nn.Module):
    """Images to the features of their patches before the last block."""

    def __init__(self, shape: ViTShape, image_size: int, film_dim: int | None) -> None:
        super().__init__()
        if image_size % shape.patch:
            raise InputError(f"image_sizes {image_size} is no multiple of the patch, {shape.patch}")
        self.image_size = image_size
        self.patch_embed = nn.Module()
        self.patch_embed.proj = nn.Conv2d(3, shape.width, shape.patch, shape.patch)
        self.pos_embed = nn.Parameter(0.02 * torch.randn(1, (image_size // shape.patch) ** 2, shape.width))
        self.cls_token = nn.Parameter(torch.zeros(1, 1, shape.width)) if shape.has_class else None
        self.reg_token = nn.Parameter(torch.zeros(1, shape.registers, shape.width)) if shape.registers else None
        self.blocks = nn.ModuleList(Block(shape, film_dim) for _ in range(shape.depth - 1))

    def forward(self, images: Tensor, language: Tensor) -> Tensor:
        """[N, 3, h, w] → [N, patches, width]; `language` [N, W] is for FiLM."""
        x = self.get_submodule("patch_embed.proj")(images).flatten(2).transpose(1, 2) + self.pos_embed
        added = [token.expand(len(x), -1, -1) for token in (self.cls_token, self.reg_token) if token is not None]
        first = sum(token.shape[1] for token in added)
        x = torch.cat([*added, x], 1)
        for block in self.blocks:
            x = block(x, language)
        return x[:, first:]


class Block(nn.Module):
    """Attention and an MLP, each after a norm; with `film_dim` FiLM between them: (1 + γ) x + β."""

    def __init__(self, shape: ViTShape, film_dim: int | None) -> None:
        super().__init__()
        width, self.heads = shape.width, shape.heads
        self.norm1, self.norm2 = nn.LayerNorm(width, eps=1e-6), nn.LayerNorm(width, eps=1e-6)
        self.attn, self.mlp = nn.Module(), nn.Module()
        self.attn.qkv, self.attn.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp.fc1, self.mlp.fc2 = nn.Linear(width, shape.hidden), nn.Linear(shape.hidden, width)
        self.ls1, self.ls2 = (Scale(width) if shape.has_scales else nn.Identity() for _ in range(2))
        self.scale = self.shift = None
        if film_dim is not None:
            self.scale, self.shift = nn.Linear(film_dim, width), nn.Linear(film_dim, width)
            for layer in (self.scale, self.shift):  # no effect at first
                nn.init.zeros_(layer.weight)
                nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor, language: Tensor) -> Tensor:
        """[N, T, width] → [N, T, width]."""
        qkv = self.get_submodule("attn.qkv")(self.norm1(x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        x = x + self.ls1(self.get_submodule("attn.proj")(attended))
        if self.scale is not None and self.shift is not None:
            x = x * (1 + self.scale(language).unsqueeze(1)) + self.shift(language).unsqueeze(1)
        hidden = functional.gelu(self.get_submodule("mlp.fc1")(self.norm2(x)))
        return x + self.ls2(self.get_submodule("mlp.fc2")(hidden))


class Scale(nn.Module):
    """A factor of each channel, small at first."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale_factor = nn.Parameter(torch.full((width,), 1e-5))

    def forward(self, x: Tensor) -> Tensor:
        """[…, width] → […, width]."""
        return x * self.scale_factor


def vision_shapes(config: Mapping[str, Any]) -> list[ViTShape]:
    """Sizes of the vision transformers: of `vision_config`, or of timm's models by their names."""
    if config.get("vision_config") is not None:
        return [ViTShape(**sizes) for sizes in config["vision_config"]]
    names = list(config.get("timm_model_ids") or ())
    if unknown := [name for name in names if name not in SHAPES]:
        raise InputError(f"timm_model_ids: {unknown[0]!r} is not supported; known: {', '.join(SHAPES)}")
    if not 1 <= len(names) <= len(FEATURIZERS):
        raise InputError(f"timm_model_ids names {len(names)} vision transformers; OpenVLA has one or two")
    return [SHAPES[name] for name in names]


# -------------------------------------------------------------------------------------------------- names of weights


def used_weights(weights: Weights, config: Mapping[str, Any]) -> dict[str, Tensor]:
    """Published weights without those that are never used: see the module."""
    unused = [r"language_model\.lm_head\.", r".*rotary_emb\.inv_freq$"]
    for name, shape in zip(FEATURIZERS, vision_shapes(config), strict=False):
        unused.append(rf"vision_backbone\.{name}\.(norm|attn_pool|blocks\.{shape.depth - 1})\.")
    pattern = re.compile("|".join(unused))
    return {name: value for name, value in weights.items() if not pattern.match(name)}


def film_weights(weights: Weights) -> dict[str, Tensor]:
    """Weights of the file `vision_backbone--…_checkpoint.pt` with the names of a network with FiLM.

    Low-rank adapters in it are merged: W + α / r · B A.
    """
    return {f"{VISION}{name}": value for name, value in _merged(weights)}


def _merged(weights: Weights) -> Iterator[tuple[str, Tensor]]:
    for published, value in weights.items():
        if ".lora_" in published:
            continue
        if published.endswith(".base_layer.weight"):
            layer = published.removesuffix(".base_layer.weight")
            down, up = (weights[f"{layer}.lora_{part}.default.weight"].float() for part in "AB")
            value = (value.float() + min(LORA_ALPHA, len(down)) / len(down) * up @ down).to(value.dtype)
        name = published.removeprefix("module.").removeprefix(VISION)
        yield name.replace(".base_layer.", ".").replace(".block.", "."), value
