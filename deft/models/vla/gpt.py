"""`gpt-vla`: a small VLA model that maps images, proprioception and an instruction to a chunk of actions.

The entry point `gpt-vla` of the group `deft.vla_models`; loaded by `load_vla_model`, trained behind `VLAPolicy`.
The instruction runs through a causal byte-level GPT. Visual tokens, a proprioception token, one query per action step
and a value query run through the same layers, attending to the instruction and to one another, so that one forward pass
gives actions, log-probs and value.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.nn import functional

from deft.errors import InputError
from deft.models.vla.interface import Sample
from deft.models.vla.spec import ProprioSpec
from deft.models.vla.streams import GaussianVLA, Statistics, read_stream, square_images

BYTE_VALUES = 256
PADDING_BYTE = 0  # never part of UTF-8 text, except for the character NUL
CHANNELS_PER_GROUP = 16  # of a GroupNorm


@dataclass(frozen=True)
class VisionSpec:
    """Shape of a residual network: `stem_stride` pixels to a cell, then stages of blocks."""

    stem_kernel: int
    stem_stride: int
    stem_pool: bool
    stem_channels: int
    widths: tuple[int, ...]
    depths: tuple[int, ...]
    strides: tuple[int, ...]
    bottleneck: bool

    @property
    def pixels_per_token(self) -> int:
        """Side of the square of pixels that one visual token covers."""
        return self.stem_stride * (2 if self.stem_pool else 1) * math.prod(self.strides)


@dataclass(frozen=True)
class LanguageSpec:
    """Shape of the transformer."""

    layers: int
    width: int
    heads: int


VISION_ENCODERS = {
    "resnet-tiny": VisionSpec(4, 4, False, 24, (32, 80), (1, 1), (2, 2), False),
    "resnet18": VisionSpec(7, 2, True, 64, (64, 128, 256, 512), (2, 2, 2, 2), (1, 2, 2, 2), False),
    "resnet50": VisionSpec(7, 2, True, 64, (256, 512, 1024, 2048), (3, 4, 6, 3), (1, 2, 2, 2), True),
}
LANGUAGE_MODELS = {
    "gpt-tiny": LanguageSpec(2, 96, 4),
    "gpt2": LanguageSpec(12, 768, 12),
    "gpt2-medium": LanguageSpec(24, 1024, 16),
}


class ConvNorm(nn.Sequential):
    """Convolution and GroupNorm: independent of the batch, so acting and training compute the same function."""

    def __init__(self, in_channels: int, out_channels: int, kernel: int, stride: int = 1) -> None:
        padding = 0 if kernel == stride else kernel // 2
        super().__init__(
            nn.Conv2d(in_channels, out_channels, kernel, stride, padding, bias=False),
            nn.GroupNorm(max(1, out_channels // CHANNELS_PER_GROUP), out_channels),
        )


class ResidualBlock(nn.Module):
    """relu(skip(x) + F(x)), where F is two 3×3 convolutions, or 1×1, 3×3, 1×1 in a bottleneck."""

    def __init__(self, in_channels: int, out_channels: int, stride: int, bottleneck: bool) -> None:
        super().__init__()
        if bottleneck:
            inner = out_channels // 4
            layers = [
                ConvNorm(in_channels, inner, 1),
                nn.ReLU(),
                ConvNorm(inner, inner, 3, stride),
                nn.ReLU(),
                ConvNorm(inner, out_channels, 1),
            ]
        else:
            layers = [
                ConvNorm(in_channels, out_channels, 3, stride),
                nn.ReLU(),
                ConvNorm(out_channels, out_channels, 3),
            ]
        self.body = nn.Sequential(*layers)
        same_shape = stride == 1 and in_channels == out_channels
        self.skip = nn.Identity() if same_shape else ConvNorm(in_channels, out_channels, 1, stride)

    def forward(self, features: Tensor) -> Tensor:
        """[N, C, h, w] to [N, C', h / stride, w / stride]."""
        return functional.relu(self.skip(features) + self.body(features))


class VisionEncoder(nn.Module):
    """A residual network whose last feature map is a grid of visual tokens."""

    def __init__(self, spec: VisionSpec) -> None:
        super().__init__()
        self.stem = ConvNorm(3, spec.stem_channels, spec.stem_kernel, spec.stem_stride)
        self.pool = nn.MaxPool2d(3, 2, 1) if spec.stem_pool else nn.Identity()
        blocks: list[nn.Module] = []
        channels = spec.stem_channels
        for width, depth, stride in zip(spec.widths, spec.depths, spec.strides, strict=True):
            for index in range(depth):
                blocks.append(ResidualBlock(channels, width, stride if index == 0 else 1, spec.bottleneck))
                channels = width
        self.stages = nn.Sequential(*blocks)
        self.width = channels

    def forward(self, images: Tensor) -> Tensor:
        """Scaled images [N, 3, h, w] to tokens [N, cells, width], row by row."""
        features = self.stages(self.pool(functional.relu(self.stem(images))))
        return features.flatten(2).transpose(1, 2)


class TransformerBlock(nn.Module):
    """A pre-norm GPT-2 block in two halves, so that other tokens can use the keys and values of some.

    ReLU in place of GELU: the gradient costs a tenth on a CPU.
    """

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def project(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value of each token: [B, heads, length, width / heads]."""
        batch, length, width = tokens.shape
        projected = self.query_key_value(self.attention_norm(tokens))
        query, key, value = projected.view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        return query, key, value

    def attend(
        self,
        tokens: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None = None,
        causal: bool = False,
    ) -> Tensor:
        """The tokens of `query` after attention and MLP; `mask` is True where a key may be attended to."""
        attended = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=causal)
        tokens = tokens + self.dropout(self.attention_out(attended.transpose(1, 2).flatten(2)))
        hidden = functional.relu(self.mlp_in(self.mlp_norm(tokens)))
        return tokens + self.dropout(self.mlp_out(hidden))


@dataclass(frozen=True)
class InstructionMemory:
    """Keys and values of the instruction in each layer, which scene tokens attend to, and the attention mask."""

    keys: list[Tensor]  # one per layer: [B, heads, length, width / heads]
    values: list[Tensor]
    mask: Tensor  # bool [B, 1, 1, length + scene tokens]: False at padding


@dataclass(kw_only=True)
class GPTSpec(ProprioSpec):
    """The keywords of `GPTVLAModel`."""

    vision_encoder: str = "resnet-tiny"
    language_model: str = "gpt-tiny"
    freeze_vision_encoder: bool = False
    image_size: int = 64
    proprio_key: str | None = "proprio"
    max_instruction_length: int = 64
    log_std_init: float = 0.0
    dropout: float = 0.0

    def __post_init__(self) -> None:
        """Check the values."""
        self.check_choice(vision_encoder=VISION_ENCODERS, language_model=LANGUAGE_MODELS)
        pixels = VISION_ENCODERS[self.vision_encoder].pixels_per_token
        if self.image_size < 1 or self.image_size % pixels:
            raise InputError(f"image_size {self.image_size} is no multiple of {pixels} ({self.vision_encoder})")
        super().__post_init__()
        self.check_least(max_instruction_length=1)


class GPTVLAModel(GaussianVLA):
    """A Gaussian policy over action chunks and a value, from images, proprioception and an instruction.

    `vision_encoder` and `language_model` name a shape (`VISION_ENCODERS`, `LANGUAGE_MODELS`), not pretrained weights:
    those come from `load_vla_model`. `proprio_key` and `instruction_key` may be None for environments without them.
    """

    spec_class = GPTSpec

    def __init__(self, spec: GPTSpec | None = None, **given: Any) -> None:
        spec = GPTSpec(**given) if spec is None else spec
        super().__init__(spec)
        vision, language = VISION_ENCODERS[spec.vision_encoder], LANGUAGE_MODELS[spec.language_model]
        self.freeze_vision_encoder = spec.freeze_vision_encoder
        self.image_size = spec.image_size
        self.max_instruction_length = spec.max_instruction_length

        width = language.width
        cells = (spec.image_size // vision.pixels_per_token) ** 2
        self.vision = VisionEncoder(vision)
        self.vision_projection = nn.Linear(self.vision.width, width)
        self.visual_position = nn.Parameter(torch.empty(len(self.image_keys) * cells, width))
        if spec.proprio_key is not None:
            self.proprio_projection = nn.Linear(spec.proprio_dim, width)
        if spec.instruction_key is not None:
            self.byte_embedding = nn.Embedding(BYTE_VALUES, width)
            self.instruction_position = nn.Parameter(torch.empty(spec.max_instruction_length, width))
        # One per action step, then that of the value
        self.queries = nn.Parameter(torch.empty(spec.chunk_length + 1, width))
        # Any: a ModuleList does not keep the type of its modules.
        self.blocks: Any = nn.ModuleList(
            TransformerBlock(width, language.heads, spec.dropout) for _ in range(language.layers)
        )
        self.final_norm = nn.LayerNorm(width)
        self.action_head = nn.Linear(width, spec.action_dim)
        self.value_head = nn.Linear(width, 1)
        self.log_std = nn.Parameter(torch.full((spec.chunk_length, spec.action_dim), float(spec.log_std_init)))
        self.action_statistics = Statistics(spec.action_dim, None, "action", persistent=False)  # actions are unscaled
        self.dropout = nn.Dropout(spec.dropout)
        self._initialise()
        if spec.freeze_vision_encoder:
            self.vision.requires_grad_(False)

    def _initialise(self) -> None:
        """Initialise layers of unit variance, smaller embeddings, and a mean action near 0."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=1.0 / math.sqrt(module.in_features))
                nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        for name, parameter in self.named_parameters():
            if name.endswith(("position", "queries", "byte_embedding.weight")):
                nn.init.normal_(parameter, std=0.3)
            elif name.endswith(("attention_out.weight", "mlp_out.weight")):
                with torch.no_grad():
                    parameter.div_(math.sqrt(2 * len(self.blocks)))  # two residual sums per block, as in GPT-2
        nn.init.normal_(self.action_head.weight, std=0.002)

    def mean_and_value(self, observations: TensorDictBase, sample: Sample = None) -> tuple[Tensor, Tensor]:
        """Mean actions [B, K, A] and the value [B, 1], in one pass through the trunk."""
        tokens = self._scene_tokens(observations)
        instruction = self._read_instruction(observations, tokens.shape[1])
        num_queries = self.chunk_length + 1
        for index, block in enumerate(self.blocks):
            query, key, value = block.project(tokens)
            if instruction is not None:
                key = torch.cat((instruction.keys[index], key), 2)
                value = torch.cat((instruction.values[index], value), 2)
            if index == len(self.blocks) - 1:  # the heads read the queries alone
                tokens, query = tokens[:, -num_queries:], query[:, :, -num_queries:]
            tokens = block.attend(tokens, query, key, value, None if instruction is None else instruction.mask)
        features = self.final_norm(tokens)
        return self.action_head(features[:, :-1]), self.value_head(features[:, -1])

    def _scene_tokens(self, observations: TensorDictBase) -> Tensor:
        """Visual tokens of each camera, the proprioception token, the action queries and the value query."""
        images = torch.cat([self._scaled_image(observations, key) for key in self.image_keys])
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.freeze_vision_encoder):
            visual = self.vision(images)
        visual = torch.cat(visual.chunk(len(self.image_keys)), 1)  # [B, cameras * cells, channels]
        batch = visual.shape[0]
        tokens = [self.vision_projection(visual) + self.visual_position]
        if self.proprio_key is not None:
            proprio = self.proprio_vectors(observations, batch, visual.device)
            tokens.append(self.proprio_projection(proprio.to(visual.dtype)).unsqueeze(1))
        tokens.append(self.queries.expand(batch, -1, -1))
        return self.dropout(torch.cat(tokens, 1))

    def _read_instruction(self, observations: TensorDictBase, num_scene_tokens: int) -> InstructionMemory | None:
        """Keys and values of the instructions, each distinct one encoded once; None if all are empty."""
        text = self.instructions(observations)
        if text is None:
            return None
        columns = torch.arange(1, text.shape[1] + 1, device=text.device)
        longest = int(((text != PADDING_BYTE) * columns).amax())
        if longest > self.max_instruction_length:
            raise InputError(
                f"an instruction has {longest} bytes; the model was built for max_instruction_length "
                f"{self.max_instruction_length}"
            )
        if longest == 0:
            return None
        text, which = torch.unique(text[:, :longest], dim=0, return_inverse=True)
        lengths = ((text != PADDING_BYTE) * columns[:longest]).amax(1)
        tokens = self.dropout(self.byte_embedding(text.int()) + self.instruction_position[:longest])
        keys, values = [], []
        for index, block in enumerate(self.blocks):
            query, key, value = block.project(tokens)
            keys.append(key[which])
            values.append(value[which])
            if index < len(self.blocks) - 1:  # nothing reads the tokens after the last layer
                # Causal, and padding is at the end: no real byte attends to it.
                tokens = block.attend(tokens, query, key, value, causal=True)
        visible = columns[:longest] <= lengths.unsqueeze(1)
        visible = functional.pad(visible, (0, num_scene_tokens), value=True)
        return InstructionMemory(keys, values, visible[which][:, None, None])

    def _scaled_image(self, observations: TensorDictBase, key: str) -> Tensor:
        """A camera's images as floats in [-1, 1], [B, 3, image_size, image_size]."""
        image = square_images(read_stream(observations, key), self.image_size, key)
        return image.to(self.queries.dtype, memory_format=torch.contiguous_format) / 127.5 - 1.0
