"""`pi05`: π0.5 in LeRobot's layout, from a local folder, without LeRobot.

PaliGemma reads images and a prompt once; the prompt contains the instruction and the state, as numbers of bins. An
action expert denoises the chunk: its norms are scaled, shifted and gated by the time of the flow (adaRMSNorm).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.nn import functional

from deft.errors import InputError
from deft.models.flow_chain import Velocity
from deft.models.vla.denoising import check_at_most
from deft.models.vla.experts import Prefix, attend, output, project, read_prefix, rotate, time_embedding
from deft.models.vla.flow import FlowShape
from deft.models.vla.lerobot_flow import LeRobotFlowSpec, LeRobotFlowVLA
from deft.models.vla.lerobot_folder import (
    Weights,
    load_published,
    with_prefix,
    without_prefix,
)
from deft.models.vla.pretrained import InstructionTokenizer, ValueHead, transformers_module

DEFAULTS: dict[str, Any] = {
    "paligemma_variant": "gemma_2b", "action_expert_variant": "gemma_300m", "chunk_size": 50, "max_state_dim": 32,
    "max_action_dim": 32, "num_inference_steps": 10, "time_sampling_beta_alpha": 1.5, "time_sampling_beta_beta": 1.0,
    "time_sampling_scale": 0.999, "time_sampling_offset": 0.001, "min_period": 4e-3, "max_period": 4.0,
    "image_resolution": (224, 224), "tokenizer_max_length": 200, "freeze_vision_encoder": False,
    "train_expert_only": False, "vlm_config": None,
}  # fmt: skip
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 256, "num_hidden_layers": 18}
VARIANTS = {
    "gemma_2b": {"hidden_size": 2048, "intermediate_size": 16_384, **HEADS},
    "gemma_300m": {"hidden_size": 1024, "intermediate_size": 4096, **HEADS},
}
VISION = {
    "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16,
    "patch_size": 14,
}  # fmt: skip
VOCABULARY = 257_152
BINS = 256  # of a normalised state in [−1, 1]
PREFIX = "model."
EMBEDDING = "model.paligemma_with_expert.paligemma.model.language_model.embed_tokens.weight"
HEAD = (
    "model.paligemma_with_expert.paligemma.lm_head.weight"  # equal to the embedding; one of the two is saved, or both
)
EXPERT_HEAD = "model.paligemma_with_expert.gemma_expert.lm_head.weight"  # saved, and never used
TOWER, NESTED_TOWER = ".vision_tower.", ".vision_tower.vision_model."  # of newer and older versions of transformers


@dataclass(kw_only=True)
class Pi05Spec(LeRobotFlowSpec):
    """The keywords of `Pi05VLA`. `tokenizer` is a local folder with the tokenizer of PaliGemma."""

    chunk_length: int = 10
    prompt_length: int = 200


class Pi05VLA(LeRobotFlowVLA):
    """Images, instruction and state to the first K actions of the chunk, and a value.

    `train_expert_only` (None: as the folder sets it) freezes PaliGemma; with `lora` low-rank adapters in both networks
    are trained instead. The value reads the mean of the last hidden states of PaliGemma, and the state.
    """

    spec_class = Pi05Spec

    def __init__(self, spec: Pi05Spec | None = None, **given: Any) -> None:
        spec = Pi05Spec(**given) if spec is None else spec
        super().__init__(spec)
        folder = self.read_folder(spec, "pi05", "π0.5", DEFAULTS)
        config = self.config
        if config.get("use_relative_actions"):
            raise InputError(f"{folder.path}: use_relative_actions is not supported; use the model class lerobot")
        if config["time_sampling_beta_beta"] != 1.0:
            raise InputError(f"{folder.path}: time_sampling_beta_beta must be 1")
        check_at_most("π0.5", proprio_dim=(spec.proprio_dim, config["max_state_dim"]))
        sizes = (config["chunk_size"], config["max_action_dim"], config["num_inference_steps"])
        times = (config[f"time_sampling_{name}"] for name in ("beta_alpha", "scale", "offset"))
        self.add_flow(spec, FlowShape("π0.5", *sizes, *times))
        height, width = config["image_resolution"]
        self.add_images(spec, folder, (height, width), centered=True)
        self.backbone = Pi05Network(config)
        length = min(spec.prompt_length, config["tokenizer_max_length"])
        source = None if folder.path is None else str(folder.path)
        self.tokenize = InstructionTokenizer(
            source, spec.tokenizer, "{instruction}", length, self.backbone.vocabulary, own_begin=True
        )
        self.add_statistics(spec, folder)
        if folder.path is not None and spec.load_weights:
            back = functools.partial(from_published, own=list(self.backbone.state_dict()))
            load_published(self.backbone, folder, to_published, back, clean)
        paligemma = self.backbone.paligemma
        self.prepare_training(spec, self.backbone.paligemma_with_expert, paligemma, paligemma.vision_tower)
        self.value_head = ValueHead(self.backbone.prefix_width + spec.proprio_dim, spec.value_gradient)

    def field(self, observations: TensorDictBase) -> tuple[Velocity, Tensor]:
        """The velocity field given an observation, and the features of the value."""
        images = [2.0 * image.clamp(0.0, 1.0) - 1.0 for image in self.images(observations)]
        batch, device = len(images[0]), images[0].device
        state = self.state_statistics.normalize(self.proprio_vectors(observations, batch, device))
        ids, is_word = self.tokenize.rows(self.prompts(self.instructions(observations), state), device)
        prefix = self.backbone.read(images, ids, is_word)
        return self.velocity_given(prefix, state)

    def prompts(self, texts: Tensor | None, state: Tensor) -> list[bytes]:
        """Prompts with the instruction and the bin of every dim of the normalised state."""
        edges = np.linspace(-1, 1, BINS + 1)[:-1]
        bins = np.digitize(state.detach().cpu().numpy(), edges) - 1
        rows = [b""] * len(state) if texts is None else [row.tobytes().rstrip(b"\0") for row in texts.cpu().numpy()]
        prompts = []
        for row, numbers in zip(rows, bins, strict=True):
            task = row.decode(errors="replace").strip().replace("_", " ").replace("\n", " ")
            prompts.append(f"Task: {task}, State: {' '.join(map(str, numbers))};\nAction: ".encode())
        return prompts

    def gathered_layers(self) -> list[nn.Module]:
        """No layers: projections are called without their layer."""
        return []


class AdaptiveNorm(nn.Module):
    """RMSNorm whose scale, shift and gate are a function of a condition."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.dense = nn.Linear(width, 3 * width)
        nn.init.zeros_(self.dense.weight)

    def forward(self, x: Tensor, condition: Tensor) -> tuple[Tensor, Tensor]:
        """x / rms(x) · (1 + scale) + shift, and the gate of the branch; `condition` is [B, W]."""
        scale, shift, gate = self.dense(condition.to(self.dense.weight.dtype)).unsqueeze(1).chunk(3, -1)
        normed = x.float() * (x.float().square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return (normed * (1 + scale.float()) + shift.float()).to(x.dtype), gate.to(x.dtype)


class Pi05Network(nn.Module):
    """The network of LeRobot's π0.5 with its names, without the heads that predict words."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.config = config
        transformers = transformers_module()
        given = config["vlm_config"] or {}
        text, expert = (
            given.get(key) or _variant(config[name])
            for key, name in (("text_config", "paligemma_variant"), ("expert_config", "action_expert_variant"))
        )
        self.vocabulary = given.get("vocab_size", VOCABULARY)
        side = config["image_resolution"][0]
        vision = {**VISION, **given.get("vision_config", {}), "projection_dim": text["hidden_size"], "image_size": side}
        paligemma = transformers.AutoConfig.for_model(
            "paligemma",
            text_config={"model_type": "gemma", "vocab_size": self.vocabulary, **text},
            vision_config={"model_type": "siglip_vision_model", "vision_use_head": False, **vision},
            projection_dim=text["hidden_size"],
            image_token_id=self.vocabulary - 1,
        )
        self.prefix_width, self.width = text["hidden_size"], expert["hidden_size"]
        parts = self.paligemma_with_expert = nn.Module()
        parts.paligemma, parts.gemma_expert = nn.Module(), nn.Module()
        parts.paligemma.model = transformers.AutoModel.from_config(paligemma)
        # Its embedding is not used: a small one is built and removed.
        action_expert = transformers.AutoModel.from_config(
            transformers.AutoConfig.for_model("gemma", vocab_size=8, pad_token_id=0, **expert)
        )
        action_expert.embed_tokens = None
        eps = action_expert.config.rms_norm_eps
        for layer in action_expert.layers:
            layer.input_layernorm = AdaptiveNorm(self.width, eps)
            layer.post_attention_layernorm = AdaptiveNorm(self.width, eps)
        action_expert.norm = AdaptiveNorm(self.width, eps)
        parts.gemma_expert.model = action_expert
        self.action_in_proj = nn.Linear(config["max_action_dim"], self.width)
        self.action_out_proj = nn.Linear(self.width, config["max_action_dim"])
        self.time_mlp_in, self.time_mlp_out = nn.Linear(self.width, self.width), nn.Linear(self.width, self.width)

    @property
    def paligemma(self) -> Any:
        """The vision-language model."""
        return self.get_submodule("paligemma_with_expert.paligemma.model")

    def read(self, images: list[Tensor], ids: Tensor, is_word: Tensor) -> Prefix:
        """Run images [B, 3, h, w] in [−1, 1] and token ids [B, T] through PaliGemma; all attend to each other."""
        model = self.paligemma
        weight = model.language_model.embed_tokens.weight
        parts = [
            model.multi_modal_projector(model.vision_tower(pixel_values=image.to(weight.dtype)).last_hidden_state)
            for image in images
        ]
        parts.append(functional.embedding(ids, weight) * self.prefix_width**0.5)
        tokens = torch.cat(parts, 1)
        real = torch.cat([is_word.new_ones(len(ids), tokens.shape[1] - ids.shape[1]), is_word], 1)
        return read_prefix(model.language_model, tokens, real, real.unsqueeze(1) & real.unsqueeze(2))

    def forward(self, x: Tensor, time: Tensor, prefix: Prefix) -> Tensor:
        """The velocity [B, chunk, dims] at x and t, float32; the actions attend to the prefix and to each other."""
        expert: Any = self.get_submodule("paligemma_with_expert.gemma_expert.model")
        times = time_embedding(time, self.width, self.config["min_period"], self.config["max_period"])
        condition = functional.silu(self.time_mlp_out(functional.silu(self.time_mlp_in(times))))
        hidden = self.action_in_proj(x).to(expert.norm.dense.weight.dtype)
        positions = prefix.real.sum(1, keepdim=True) + torch.arange(x.shape[1], device=x.device)
        real = torch.cat([prefix.real, prefix.real.new_ones(x.shape[:2])], 1)
        mask = real.unsqueeze(1).expand(-1, x.shape[1], -1)
        for layer, (key, value) in zip(expert.layers, prefix.cached, strict=True):
            normed, gate = layer.input_layernorm(hidden, condition)
            query, own_key, own_value = project(layer, normed)
            query, own_key = rotate(query, positions), rotate(own_key, positions)
            attended = attend(query, torch.cat([key, own_key], 1), torch.cat([value, own_value], 1), mask)
            hidden = hidden + gate * output(layer, attended)
            normed, gate = layer.post_attention_layernorm(hidden, condition)
            hidden = hidden + gate * layer.mlp(normed)
        return self.action_out_proj(expert.norm(hidden, condition)[0].float())


def _variant(name: str) -> Mapping[str, int]:
    if name not in VARIANTS:
        raise InputError(f"π0.5 has no network {name!r}; known: {', '.join(VARIANTS)}")
    return VARIANTS[name]


# --------------------------------------------------------------------------------------------------- names of weights


def to_published(state: Weights) -> dict[str, Tensor]:
    """LeRobot's names."""
    return {_published(name): value for name, value in state.items()}


def from_published(weights: Weights, own: Iterable[str]) -> dict[str, Tensor]:
    """The names `own` of a network."""
    return {name: weights[_published(name)] for name in own}


def _published(name: str) -> str:
    return PREFIX + (name if NESTED_TOWER in name else name.replace(TOWER, NESTED_TOWER))


def clean(weights: Weights) -> dict[str, Tensor]:
    """Add the prefix that openpi's conversion leaves out, and keep one copy of the embedding of PaliGemma."""
    found = with_prefix(without_prefix(weights, PREFIX), PREFIX)
    found.pop(EXPERT_HEAD, None)
    head = found.pop(HEAD, None)
    return found if head is None else {EMBEDDING: head, **found}
