"""The network of GR00T N1.5 with its names: Eagle 2.5 (SigLIP and Qwen3), and a diffusion transformer over actions.

Eagle reads cameras and the instruction. Its features pass through a few layers of self-attention; the diffusion
transformer attends to them in every second block, and in the others to the state, to tokens without a meaning of their
own, and to the noised actions. State and actions have weights for each embodiment.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from deft.errors import InputError
from deft.models.vla.pretrained import transformers_module

TIME_CHANNELS = 256
PERIOD = 10_000.0
BLOCK_DEFAULTS = {"attention_bias": True, "activation_fn": "gelu-approximate", "positional_embeddings": "sinusoidal"}


class GrootNetwork(nn.Module):
    """Eagle 2.5 and the action head. Layers of Qwen3 after `select_layer` are never used and do not exist."""

    def __init__(self, eagle: Mapping[str, Any], backbone: Mapping[str, Any], head: Mapping[str, Any]) -> None:
        super().__init__()
        transformers = transformers_module()
        if eagle.get("use_pixel_shuffle", True) or eagle.get("mlp_connector_layers", 2) != 1:
            raise InputError("GR00T N1.5 has an Eagle with mlp_connector_layers 1 and without use_pixel_shuffle")
        if backbone.get("project_to_dim") is not None:
            raise InputError("backbone_cfg.project_to_dim must be null: GR00T N1 is not supported, only N1.5")
        vision, text = dict(eagle["vision_config"]), dict(eagle["text_config"])
        vision_config = transformers.SiglipVisionConfig(**vision | {"vision_use_head": False})
        kind = text.pop("model_type", "qwen3")
        text_config = transformers.AutoConfig.for_model(
            kind, **text | {"num_hidden_layers": min(backbone["select_layer"], text["num_hidden_layers"])}
        )
        self.image_token: int = eagle["image_token_index"]
        self.image_size: int = eagle.get("force_image_size") or vision_config.image_size
        self.num_patches = (self.image_size // vision_config.patch_size) ** 2
        self.width: int = text_config.hidden_size
        self.vocabulary: int = text_config.vocab_size
        self.backbone = nn.Module()
        self.backbone.eagle_model = nn.Module()
        self.backbone.eagle_model.vision_model = transformers.SiglipVisionModel(vision_config)
        self.backbone.eagle_model.language_model = nn.Module()
        self.backbone.eagle_model.language_model.model = transformers.AutoModel.from_config(text_config)
        self.backbone.eagle_model.mlp1 = nn.Sequential(nn.Linear(vision_config.hidden_size, self.width))
        self.action_head = ActionHead(head, self.width)

    @property
    def vision_model(self) -> Any:
        """SigLIP."""
        return self.get_submodule("backbone.eagle_model.vision_model")

    @property
    def language_model(self) -> Any:
        """Qwen3 without its head."""
        return self.get_submodule("backbone.eagle_model.language_model.model")

    def read(self, pixels: Tensor, ids: Tensor, real: Tensor) -> Tensor:
        """Features [B, T, W] of images [B, cameras, 3, h, w] and tokens [B, T]; image tokens stand for patches."""
        dtype = self.language_model.norm.weight.dtype
        patches = self.vision_model(pixel_values=pixels.flatten(0, 1).to(dtype)).last_hidden_state
        patches = self.get_submodule("backbone.eagle_model.mlp1")(patches)
        words = self.language_model.get_input_embeddings()(ids)
        is_patch = (ids == self.image_token).unsqueeze(-1)
        tokens = words.masked_scatter(is_patch, patches.reshape(-1, patches.shape[-1]).to(words.dtype))
        features = self.language_model(inputs_embeds=tokens, attention_mask=real.long(), use_cache=False)
        return self.action_head.read(features.last_hidden_state.float(), real)

    def forward(self, x: Tensor, time: Tensor, state: Tensor, features: Tensor, real: Tensor) -> Tensor:
        """The prediction a − ε, [B, chunk, dims], for x at the times [B], 0 … buckets − 1."""
        return self.action_head(x, time, state, features, real)


class ActionHead(nn.Module):
    """A diffusion transformer over the state, `num_target_vision_tokens` tokens, and the noised actions."""

    def __init__(self, config: Mapping[str, Any], features: int) -> None:
        super().__init__()
        width, hidden, embodiments = config["input_embedding_dim"], config["hidden_size"], config["max_num_embodiments"]
        self.embodiment = 0
        self.model = DiffusionTransformer(config["diffusion_model_cfg"])
        self.state_encoder = EmbodimentMLP(embodiments, config["max_state_dim"], hidden, width)
        self.action_encoder = ActionEncoder(embodiments, config["action_dim"], width)
        self.action_decoder = EmbodimentMLP(embodiments, hidden, hidden, config["action_dim"])
        self.future_tokens = nn.Embedding(config["num_target_vision_tokens"], width)
        nn.init.normal_(self.future_tokens.weight, std=0.02)
        self.vlln: nn.Module = nn.Identity()
        self.vl_self_attention: SelfAttention | None = None
        if config["use_vlln"]:
            self.vlln, self.vl_self_attention = nn.LayerNorm(features), SelfAttention(config["vl_self_attention_cfg"])
        self.position_embedding = None
        if config["add_pos_embed"]:
            self.position_embedding = nn.Embedding(config["max_seq_len"], width)
            nn.init.normal_(self.position_embedding.weight, std=0.02)

    def read(self, features: Tensor, real: Tensor) -> Tensor:
        """Self-attention over the features of Eagle."""
        features = self.vlln(features)
        return features if self.vl_self_attention is None else self.vl_self_attention(features, real)

    def forward(self, x: Tensor, time: Tensor, state: Tensor, features: Tensor, real: Tensor) -> Tensor:
        """[B, chunk, dims] from the state [B, P] and the features [B, T, W], of which some are `real` [B, T]."""
        actions = self.action_encoder(x, time, self.embodiment)
        if self.position_embedding is not None:
            actions = actions + self.position_embedding.weight[: x.shape[1]]
        tokens = [
            self.state_encoder(state.unsqueeze(1), self.embodiment),
            self.future_tokens.weight.expand(len(x), -1, -1),
            actions,
        ]
        hidden = self.model(torch.cat(tokens, 1), features, real, time)
        return self.action_decoder(hidden, self.embodiment)[:, -x.shape[1] :]


class DiffusionTransformer(nn.Module):
    """Blocks whose norms depend on the time; even ones attend to features, odd ones to the tokens themselves."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        config = checked_blocks(config, "diffusion_model_cfg")
        heads, width = config["num_attention_heads"], config["num_attention_heads"] * config["attention_head_dim"]
        if config.get("norm_type", "ada_norm") != "ada_norm":
            raise InputError(
                f"diffusion_model_cfg.norm_type {config['norm_type']!r} is not supported; it must be ada_norm"
            )
        is_mixed = bool(config.get("interleave_self_attention", False))
        self.timestep_encoder = nn.Module()
        self.timestep_encoder.timestep_embedder = nn.Module()
        self.timestep_encoder.timestep_embedder.linear_1 = nn.Linear(TIME_CHANNELS, width)
        self.timestep_encoder.timestep_embedder.linear_2 = nn.Linear(width, width)
        self.transformer_blocks = nn.ModuleList(
            Block(width, heads, None if is_mixed and index % 2 else config["cross_attention_dim"], has_time=True)
            for index in range(config["num_layers"])
        )
        self.proj_out_1, self.proj_out_2 = nn.Linear(width, 2 * width), nn.Linear(width, config["output_dim"])

    def forward(self, tokens: Tensor, features: Tensor, real: Tensor, time: Tensor) -> Tensor:
        """[B, T, width] → [B, T, output_dim]."""
        embed = self.timestep_encoder.get_submodule
        embedded = embed("timestep_embedder.linear_1")(time_features(time).to(tokens.dtype))
        embedded = embed("timestep_embedder.linear_2")(functional.silu(embedded))
        for block in self.transformer_blocks:
            tokens = block(tokens, features, real, embedded)
        shift, scale = self.proj_out_1(functional.silu(embedded)).unsqueeze(1).chunk(2, -1)
        return self.proj_out_2(functional.layer_norm(tokens, tokens.shape[-1:], eps=1e-6) * (1 + scale) + shift)


class SelfAttention(nn.Module):
    """Transformer blocks over the features of Eagle."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        config = checked_blocks(config, "vl_self_attention_cfg")
        heads, width = config["num_attention_heads"], config["num_attention_heads"] * config["attention_head_dim"]
        blocks = (Block(width, heads, None, has_time=False) for _ in range(config["num_layers"]))
        self.transformer_blocks = nn.ModuleList(blocks)

    def forward(self, tokens: Tensor, real: Tensor) -> Tensor:
        """[B, T, W] → [B, T, W]; tokens that are not `real` are not attended to."""
        for block in self.transformer_blocks:
            tokens = block(tokens, tokens, real, None)
        return tokens


class Block(nn.Module):
    """Attention and an MLP, each after a norm; with `has_time` the first norm is scaled and shifted by the time."""

    def __init__(self, width: int, heads: int, cross_dim: int | None, has_time: bool) -> None:
        super().__init__()
        self.is_cross, self.heads = cross_dim is not None, heads
        self.norm1: nn.Module = TimeNorm(width) if has_time else nn.LayerNorm(width)
        self.norm3 = nn.LayerNorm(width, elementwise_affine=not has_time)
        self.attn1, self.ff = nn.Module(), nn.Module()
        self.attn1.to_q = nn.Linear(width, width)
        self.attn1.to_k, self.attn1.to_v = (nn.Linear(cross_dim or width, width) for _ in range(2))
        self.attn1.to_out = nn.ModuleList([nn.Linear(width, width)])
        entry = nn.Module()
        entry.proj = nn.Linear(width, 4 * width)
        self.ff.net = nn.ModuleList([entry, nn.Identity(), nn.Linear(4 * width, width)])

    def forward(self, x: Tensor, features: Tensor, real: Tensor, time: Tensor | None) -> Tensor:
        """[B, T, width] → [B, T, width]."""
        normed = self.norm1(x) if time is None else self.norm1(x, time)
        source = features if self.is_cross else normed
        # Self-attention over features is masked too; that over the tokens of the actions has no padding.
        mask = real[:, None, None] if self.is_cross or time is None else None
        parts = [self.attn1.get_submodule(name)(given) for name, given in
                 (("to_q", normed), ("to_k", source), ("to_v", source))]  # fmt: skip
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        attended = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        x = x + self.attn1.get_submodule("to_out.0")(attended.transpose(1, 2).flatten(2))
        hidden = functional.gelu(self.ff.get_submodule("net.0.proj")(self.norm3(x)), approximate="tanh")
        return x + self.ff.get_submodule("net.2")(hidden)


class TimeNorm(nn.Module):
    """A layer norm that the time scales and shifts."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 2 * width)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """norm(x) · (1 + scale) + shift."""
        scale, shift = self.linear(functional.silu(time)).unsqueeze(1).chunk(2, -1)
        return functional.layer_norm(x, x.shape[-1:]) * (1 + scale) + shift


class EmbodimentLinear(nn.Module):
    """A linear layer with weights for each embodiment."""

    def __init__(self, embodiments: int, before: int, after: int) -> None:
        super().__init__()
        self.W = nn.Parameter(0.02 * torch.randn(embodiments, before, after))
        self.b = nn.Parameter(torch.zeros(embodiments, after))

    def forward(self, x: Tensor, embodiment: int) -> Tensor:
        """[B, T, before] → [B, T, after]."""
        return x @ self.W[embodiment] + self.b[embodiment]


class EmbodimentMLP(nn.Module):
    """Two layers with weights for each embodiment."""

    def __init__(self, embodiments: int, before: int, hidden: int, after: int) -> None:
        super().__init__()
        self.layer1 = EmbodimentLinear(embodiments, before, hidden)
        self.layer2 = EmbodimentLinear(embodiments, hidden, after)

    def forward(self, x: Tensor, embodiment: int) -> Tensor:
        """[B, T, before] → [B, T, after]."""
        return self.layer2(functional.relu(self.layer1(x, embodiment)), embodiment)


class ActionEncoder(nn.Module):
    """Noised actions and the time to tokens."""

    def __init__(self, embodiments: int, action_dim: int, width: int) -> None:
        super().__init__()
        self.width = width
        self.W1 = EmbodimentLinear(embodiments, action_dim, width)
        self.W2 = EmbodimentLinear(embodiments, 2 * width, width)
        self.W3 = EmbodimentLinear(embodiments, width, width)

    def forward(self, x: Tensor, time: Tensor, embodiment: int) -> Tensor:
        """[B, T, A] → [B, T, width]."""
        half = self.width // 2
        angles = time.float().unsqueeze(-1) * PERIOD ** (-torch.arange(half, device=x.device) / half)
        times = torch.cat([angles.sin(), angles.cos()], -1).unsqueeze(1).expand(-1, x.shape[1], -1)
        hidden = functional.silu(self.W2(torch.cat([self.W1(x, embodiment), times], -1), embodiment))
        return self.W3(hidden, embodiment)


def time_features(time: Tensor) -> Tensor:
    """Cosines, then sines of t / 10000^(i / 127): [B] → [B, 256]."""
    half = TIME_CHANNELS // 2
    frequencies = torch.exp(-math.log(PERIOD) * torch.arange(half, device=time.device) / (half - 1))
    angles = time.float().unsqueeze(-1) * frequencies
    return torch.cat([angles.cos(), angles.sin()], -1)


def checked_blocks(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Settings of transformer blocks with their defaults; raise an error for those that N1.5 does not use."""
    found = {**BLOCK_DEFAULTS, **config}
    for key, wanted in (
        ("attention_bias", True),
        ("activation_fn", "gelu-approximate"),
        ("positional_embeddings", None),
    ):
        if found[key] != wanted:
            raise InputError(f"{where}.{key} {found[key]!r} is not supported; GR00T N1.5 has {wanted!r}")
    return found
