"""`act`: the Action Chunking Transformer in LeRobot's layout, from a local folder or with new weights.

A residual network reads the cameras; a transformer encoder reads their features, the robot's state and a latent; a
decoder with one query per step returns the chunk. In SFT the latent comes from an encoder of the demonstrated chunk (a
conditional VAE), otherwise it is 0. LeRobot itself is not needed.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.nn import functional

from deft.errors import InputError
from deft.models.flow_chain import hold_last
from deft.models.vla.interface import Sample
from deft.models.vla.lerobot_folder import (
    ACTION,
    STATE,
    CameraImages,
    LeRobotFolderSpec,
    Weights,
    check_dims,
    given_statistics,
    load_published,
    match_cameras,
    read_lerobot_folder,
    with_prefix,
    without_prefix,
)
from deft.models.vla.pretrained import PretrainedVLA, ValueHead, add_lora
from deft.models.vla.resnet import FrozenBatchNorm, ResNet
from deft.models.vla.streams import GaussianVLA

DEFAULTS = {
    "chunk_size": 100, "vision_backbone": "resnet18", "replace_final_stride_with_dilation": False, "pre_norm": False,
    "dim_model": 512, "n_heads": 8, "dim_feedforward": 3200, "feedforward_activation": "relu", "n_encoder_layers": 4,
    "n_decoder_layers": 1, "use_vae": True, "latent_dim": 32, "n_vae_encoder_layers": 4, "kl_weight": 10.0,
}  # fmt: skip
ACTIVATIONS = {"relu": functional.relu, "gelu": functional.gelu}
LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "out_proj", "linear1", "linear2")
PREFIX = "model."
PERIOD = 10_000.0


@dataclass(kw_only=True)
class ACTSpec(LeRobotFolderSpec):
    """The keywords of `ACTVLA`."""

    log_std_init: float = -2.0


class ACTVLA(PretrainedVLA, GaussianVLA):
    """ACT: images and the robot's state to the first K actions of the chunk, and a value.

    ACT is trained by an L1 error and has no distribution of its own: actions are a Gaussian around the chunk, with a
    learned deviation of each dim and step, in units of the normalised actions. SFT minimises ACT's loss,
    ‖a − â‖₁ + β KL(q(z | a, state) ‖ N(0, 1)), and leaves the deviation as it is. The value reads the mean of the
    tokens of the encoder.
    """

    spec_class = ACTSpec

    def __init__(self, spec: ACTSpec | None = None, **given: Any) -> None:
        spec = ACTSpec(**given) if spec is None else spec
        super().__init__(spec)
        folder = read_lerobot_folder(spec, "act", DEFAULTS)
        if "ENV" in {feature.kind for feature in folder.inputs.values()}:
            raise InputError(f"{folder.path}: the policy reads observation.environment_state, which is not supported")
        check_dims(folder, spec)
        self.config = folder.config
        if spec.chunk_length > self.config["chunk_size"]:
            raise InputError(f"chunk_length {spec.chunk_length} is more than this ACT has: {self.config['chunk_size']}")
        cameras = match_cameras(spec.image_keys, list(folder.cameras), spec.cameras)
        self.images = CameraImages(folder, cameras)
        self.image_keys, self.instruction_key = self.images.image_keys, None
        if folder.state_dim is None:
            self.proprio_key = None
        known = given_statistics(spec)
        if folder.state_dim is not None:
            self.state_statistics = folder.normalizer(STATE, folder.state_dim, known.get("state"))
        self.action_statistics = folder.normalizer(ACTION, spec.action_dim, known.get("action"))
        self.backbone = ACTNetwork(self.config, folder.state_dim, spec.action_dim)
        if folder.path is not None and spec.load_weights:
            load_published(self.backbone, folder, to_published, from_published)
        if spec.freeze_vision:
            self.backbone.backbone.requires_grad_(False)
        add_lora(self.backbone, spec.lora, LORA_TARGETS)
        self.log_std = nn.Parameter(torch.full((spec.chunk_length, spec.action_dim), float(spec.log_std_init)))
        self.value_head = ValueHead(self.config["dim_model"], spec.value_gradient)

    def mean_and_value(self, observations: TensorDictBase, sample: Sample = None) -> tuple[Tensor, Tensor]:
        """Normalised actions of the chunk, [B, K, A], and the value [B, 1], in one pass; the latent is 0."""
        images, state = self.images(observations), self._state(observations)
        chunk, features = self.backbone(images, state, self.backbone.no_latent(images[0]))
        return chunk[:, : self.chunk_length], self.value_head(features)

    def imitation_loss(self, observations: TensorDictBase, actions: Tensor, step_mask: Tensor | None = None) -> Tensor:
        """The loss of ACT for demonstrated chunks [B, K, A]: [B].

        Steps beyond K, and those that `step_mask` [B, K] leaves out, are hidden from the VAE and not counted.
        """
        chunk = self.chunk(actions)
        if step_mask is None:
            step_mask = torch.ones(chunk.shape[:2], dtype=torch.bool, device=chunk.device)
        target = self.action_statistics.normalize(hold_last(chunk, step_mask))
        images, state = self.images(observations), self._state(observations)
        latent, divergence = self.backbone.no_latent(images[0]), torch.zeros(len(chunk), device=chunk.device)
        if self.config["use_vae"]:
            mean, log_variance = self.backbone.posterior(target, state, step_mask)
            latent = mean + (log_variance / 2).exp() * torch.randn_like(mean)
            # KL(N(μ, σ²) ‖ N(0, 1)) = −½ Σ (1 + log σ² − μ² − σ²)
            divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(-1)
        predicted, _ = self.backbone(images, state, latent)
        error = (predicted[:, : self.chunk_length] - target).abs()
        return self.mean_over_steps(error, step_mask) + self.config["kl_weight"] * divergence

    def _state(self, observations: TensorDictBase) -> Tensor | None:
        if self.proprio_key is None:
            return None
        vectors = self.vectors(observations, self.proprio_key, self.proprio_dim, "proprio_dim")
        return self.state_statistics.normalize(vectors)

    def gathered_layers(self) -> list[nn.Module]:
        """The layers of the transformers, whose weights FSDP gathers one at a time."""
        return [module for module in self.modules() if isinstance(module, Layer)]


class ACTNetwork(nn.Module):
    """The network of LeRobot's ACT with its names; projections of queries, keys and values are separate layers."""

    vae_encoder_pos_enc: Tensor

    def __init__(self, config: dict[str, Any], state_dim: int | None, action_dim: int) -> None:
        super().__init__()
        width, latent = config["dim_model"], config["latent_dim"]
        self.latent_dim = latent
        vectors = 1 if state_dim is None else 2  # the latent or the class token, and the state
        if config["use_vae"]:
            self.vae_encoder = Encoder(config, config["n_vae_encoder_layers"])
            self.vae_encoder_cls_embed = nn.Embedding(1, width)
            if state_dim is not None:
                self.vae_encoder_robot_state_input_proj = nn.Linear(state_dim, width)
            self.vae_encoder_action_input_proj = nn.Linear(action_dim, width)
            self.vae_encoder_latent_output_proj = nn.Linear(width, 2 * latent)
            positions = torch.arange(vectors + config["chunk_size"], dtype=torch.float32)
            self.register_buffer("vae_encoder_pos_enc", sinusoids(positions, width).unsqueeze(0))
        dilate = bool(config["replace_final_stride_with_dilation"])
        self.backbone = ResNet(config["vision_backbone"], FrozenBatchNorm, dilate)
        self.encoder = Encoder(config, config["n_encoder_layers"])
        self.decoder = Decoder(config, config["n_decoder_layers"])
        if state_dim is not None:
            self.encoder_robot_state_input_proj = nn.Linear(state_dim, width)
        self.encoder_latent_input_proj = nn.Linear(latent, width)
        self.encoder_img_feat_input_proj = nn.Conv2d(self.backbone.channels, width, 1)
        self.encoder_1d_feature_pos_embed = nn.Embedding(vectors, width)
        self.decoder_pos_embed = nn.Embedding(config["chunk_size"], width)
        self.action_head = nn.Linear(width, action_dim)
        for parameter in (*self.encoder.parameters(), *self.decoder.parameters()):
            if parameter.ndim > 1:
                nn.init.xavier_uniform_(parameter)

    def no_latent(self, like: Tensor) -> Tensor:
        """The latent 0, [B, latent]: the mean of the prior."""
        return torch.zeros(len(like), self.latent_dim, device=like.device)

    def posterior(self, actions: Tensor, state: Tensor | None, step_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log-variance [B, latent] of the latent given a chunk; steps outside of `step_mask` are hidden."""
        batch, steps = actions.shape[:2]
        tokens = [self.vae_encoder_cls_embed.weight.expand(batch, 1, -1)]
        if state is not None:
            tokens.append(self.vae_encoder_robot_state_input_proj(state).unsqueeze(1))
        real = torch.cat([step_mask.new_ones(batch, len(tokens)), step_mask], 1)
        tokens.append(self.vae_encoder_action_input_proj(actions))
        positions = self.vae_encoder_pos_enc[:, : len(tokens) - 1 + steps]
        hidden = self.vae_encoder(torch.cat(tokens, 1), positions, real)[:, 0]
        mean, log_variance = self.vae_encoder_latent_output_proj(hidden).chunk(2, -1)
        return mean, log_variance

    def forward(self, images: list[Tensor], state: Tensor | None, latent: Tensor) -> tuple[Tensor, Tensor]:
        """The chunk [B, chunk_size, A], and the mean of the encoded tokens [B, D]."""
        batch = len(latent)
        vectors = [self.encoder_latent_input_proj(latent)]
        if state is not None:
            vectors.append(self.encoder_robot_state_input_proj(state))
        tokens, positions = [torch.stack(vectors, 1)], [self.encoder_1d_feature_pos_embed.weight]
        for features in self._feature_maps(images):
            tokens.append(features.flatten(2).transpose(1, 2))
            positions.append(grid_sinusoids(features))
        where = torch.cat(positions).unsqueeze(0)
        encoded = self.encoder(torch.cat(tokens, 1), where)
        queries = self.decoder_pos_embed.weight.expand(batch, -1, -1)
        decoded = self.decoder(torch.zeros_like(queries), queries, encoded, encoded + where)
        return self.action_head(decoded), encoded.mean(1)

    def _feature_maps(self, images: list[Tensor]) -> list[Tensor]:
        """A feature map [B, D, h, w] of each camera; cameras of one size run as one batch."""
        if len({image.shape for image in images}) == 1:
            return list(self.encoder_img_feat_input_proj(self.backbone(torch.cat(images))).chunk(len(images)))
        return [self.encoder_img_feat_input_proj(self.backbone(image)) for image in images]


class Encoder(nn.Module):
    """Transformer layers; positions are added to queries and keys in every layer."""

    def __init__(self, config: dict[str, Any], depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(config, cross=False) for _ in range(depth))
        self.norm = nn.LayerNorm(config["dim_model"]) if config["pre_norm"] else nn.Identity()

    def forward(self, x: Tensor, positions: Tensor, real: Tensor | None = None) -> Tensor:
        """Tokens [B, T, D]; `real` [B, T] is False for tokens that are hidden."""
        for layer in self.layers:
            x = layer(x, positions, real)
        return self.norm(x)


class Decoder(nn.Module):
    """Transformer layers with cross-attention to encoded tokens."""

    def __init__(self, config: dict[str, Any], depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(config, cross=True) for _ in range(depth))
        self.norm = nn.LayerNorm(config["dim_model"])

    def forward(self, x: Tensor, positions: Tensor, values: Tensor, keys: Tensor) -> Tensor:
        """Tokens [B, T, D]; `keys` are `values` with their positions, [B, S, D]."""
        for layer in self.layers:
            x = layer(x, positions, None, values, keys)
        return self.norm(x)


class Layer(nn.Module):
    """Self-attention, cross-attention if `cross`, and an MLP; each with a norm before it or after it."""

    def __init__(self, config: dict[str, Any], cross: bool) -> None:
        super().__init__()
        width, hidden, activation = (config[key] for key in ("dim_model", "dim_feedforward", "feedforward_activation"))
        if activation not in ACTIVATIONS:
            raise InputError(f"feedforward_activation {activation!r} is none of {', '.join(ACTIVATIONS)}")
        self.activation: Any = ACTIVATIONS[activation]
        self.pre_norm = bool(config["pre_norm"])
        self.self_attn = Attention(width, config["n_heads"])
        self.multihead_attn = Attention(width, config["n_heads"]) if cross else None
        self.linear1, self.linear2 = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        if cross:
            self.norm3 = nn.LayerNorm(width)

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        real: Tensor | None = None,
        values: Tensor | None = None,
        keys: Tensor | None = None,
    ) -> Tensor:
        """Tokens [B, T, D] → [B, T, D]."""
        x = self._add(x, self.norm1, lambda y: self.self_attn(y + positions, y + positions, y, real))
        last = self.norm2
        if self.multihead_attn is not None:
            cross = self.multihead_attn
            x, last = self._add(x, self.norm2, lambda y: cross(y + positions, keys, values)), self.norm3
        return self._add(x, last, lambda y: self.linear2(self.activation(self.linear1(y))))

    def _add(self, x: Tensor, norm: nn.Module, branch: Any) -> Tensor:
        return x + branch(norm(x)) if self.pre_norm else norm(x + branch(x))


class Attention(nn.Module):
    """Multi-head attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        if width % heads:
            raise InputError(f"dim_model {width} is no multiple of n_heads {heads}")
        self.heads = heads
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            self.add_module(name, nn.Linear(width, width))

    def forward(self, query: Tensor, key: Tensor, value: Tensor, real: Tensor | None = None) -> Tensor:
        """[B, T, D] from the queries [B, T, D] and the keys and values [B, S, D] that are `real` [B, S]."""
        projected = zip(("q_proj", "k_proj", "v_proj"), (query, key, value), strict=True)
        q, k, v = (self.get_submodule(name)(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for name, x in projected)
        mask = None if real is None else real[:, None, None]
        attended = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.get_submodule("out_proj")(attended.transpose(1, 2).flatten(2))


def sinusoids(positions: Tensor, width: int) -> Tensor:
    """[…] → […, width]: sin(p / 10000^(i / width)) for even i, and its cosine after it."""
    even = torch.arange(0, width, 2, device=positions.device) / width
    angles = positions.unsqueeze(-1) / PERIOD**even
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(-2)


def grid_sinusoids(features: Tensor) -> Tensor:
    """Positions [h · w, D] of a feature map [B, D, h, w]: half of the dims for the row, half for the column."""
    width, rows, columns = features.shape[1:]
    vertical, horizontal = (
        sinusoids(torch.arange(1, count + 1, device=features.device) / (count + 1e-6) * 2 * math.pi, width // 2)
        for count in (rows, columns)
    )
    grid = [vertical.unsqueeze(1).expand(-1, columns, -1), horizontal.unsqueeze(0).expand(rows, -1, -1)]
    return torch.cat(grid, -1).flatten(0, 1)


# -------------------------------------------------------------------------------------------------- names of weights


def to_published(state: Weights) -> dict[str, Tensor]:
    """LeRobot's names: torch's attention has one matrix for queries, keys and values."""
    found: dict[str, Tensor] = {}
    for name, value in state.items():
        part = re.fullmatch(r"(.*attn\.)([qkv])_proj\.(weight|bias)", name)
        if part is None:
            found[name] = value
        elif part[2] == "q":
            found[f"{part[1]}in_proj_{part[3]}"] = torch.cat([state[f"{part[1]}{x}_proj.{part[3]}"] for x in "qkv"])
    return with_prefix(found, PREFIX)


def from_published(weights: Weights) -> dict[str, Tensor]:
    """The inverse of `to_published`."""
    found: dict[str, Tensor] = {}
    for name, value in without_prefix(weights, PREFIX).items():
        part = re.fullmatch(r"(.*attn\.)in_proj_(weight|bias)", name)
        if part is None:
            found[name] = value
        else:
            found |= {f"{part[1]}{x}_proj.{part[2]}": third for x, third in zip("qkv", value.chunk(3), strict=True)}
    return found
