"""`smolvla`: SmolVLA in LeRobot's layout, from a local folder, without LeRobot.

SmolVLM2 reads images, instruction and state once. An action expert denoises the chunk: layers that attend to the keys
and values of SmolVLM2 alternate with layers in which the actions attend to each other too.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    LeRobotFolder,
    Weights,
    load_published,
    with_prefix,
    without_prefix,
)
from deft.models.vla.pretrained import (
    InstructionTokenizer,
    ValueHead,
    read_architecture,
    transformers_module,
)

DEFAULTS: dict[str, Any] = {
    "chunk_size": 50, "max_state_dim": 32, "max_action_dim": 32, "resize_imgs_with_padding": (512, 512),
    "tokenizer_max_length": 48, "num_steps": 10, "freeze_vision_encoder": True, "train_expert_only": True,
    "vlm_model_name": "HuggingFaceTB/SmolVLM2-500M-Video-Instruct", "attention_mode": "cross_attn",
    "num_expert_layers": -1, "num_vlm_layers": 16, "self_attn_every_n_layers": 2, "expert_width_multiplier": 0.75,
    "min_period": 4e-3, "max_period": 4.0, "vlm_config": None,
}  # fmt: skip
REJECTED = ("adapt_to_pi_aloha", "use_delta_joint_actions_aloha", "add_image_special_tokens")
PROMPT = "{instruction}\n"
PREFIX = "model."
HEAD = "model.vlm_with_expert.vlm.lm_head.weight"  # predicts words; saved, and never used


@dataclass(kw_only=True)
class SmolVLASpec(LeRobotFlowSpec):
    """The keywords of `SmolVLA`. `vlm_folder` is a local copy of SmolVLM2: its config.json and its tokenizer."""

    vlm_folder: str | None = None
    chunk_length: int = 10
    prompt_length: int = 48


class SmolVLA(LeRobotFlowVLA):
    """Images, instruction and state to the first K actions of the chunk, and a value.

    `train_expert_only` (None: as the folder sets it) freezes SmolVLM2; with `lora` low-rank adapters in both networks
    are trained instead. The value reads the mean of the last hidden states of SmolVLM2, and the state.
    """

    spec_class = SmolVLASpec

    def __init__(self, spec: SmolVLASpec | None = None, **given: Any) -> None:
        spec = SmolVLASpec(**given) if spec is None else spec
        super().__init__(spec)
        folder = self.read_folder(spec, "smolvla", "SmolVLA", DEFAULTS)
        config = self.config
        for name in REJECTED:
            if config.get(name):
                raise InputError(f"{folder.path}: {name} is not supported; use the model class lerobot")
        check_at_most("SmolVLA", proprio_dim=(spec.proprio_dim, config["max_state_dim"]))
        sizes = (config["chunk_size"], config["max_action_dim"], config["num_steps"])
        self.add_flow(spec, FlowShape("SmolVLA", *sizes))
        size = config["resize_imgs_with_padding"]
        self.add_images(spec, folder, None if size is None else (size[1], size[0]))
        vlm_config, source = _vlm_config(spec, folder)
        length = min(spec.prompt_length, config["tokenizer_max_length"])
        self.tokenize = InstructionTokenizer(
            source, spec.tokenizer, PROMPT, length, vlm_config.text_config.vocab_size, own_begin=True
        )
        self.add_statistics(spec, folder)
        self.backbone = SmolVLANetwork(config, vlm_config)
        if folder.path is not None and spec.load_weights:
            load_published(self.backbone, folder, to_published, from_published, without_head)
        networks = self.backbone.vlm_with_expert
        self.prepare_training(spec, networks, networks.vlm, self.backbone.vision_model)
        self.value_head = ValueHead(vlm_config.text_config.hidden_size + spec.proprio_dim, spec.value_gradient)

    def field(self, observations: TensorDictBase) -> tuple[Velocity, Tensor]:
        """The velocity field given an observation, and the features of the value."""
        images = [2.0 * image - 1.0 for image in self.images(observations)]
        batch, device = len(images[0]), images[0].device
        ids, is_word = self.tokenize(self.instructions(observations), batch, device)
        state = self.state_statistics.normalize(self.proprio_vectors(observations, batch, device))
        padded = functional.pad(state, (0, self.config["max_state_dim"] - self.proprio_dim))
        prefix = self.backbone.read(images, ids, is_word, padded)
        return self.velocity_given(prefix, state)

    def gathered_layers(self) -> list[nn.Module]:
        """No layers: projections of one network's layers are called by the other one."""
        return []


class SmolVLANetwork(nn.Module):
    """The network of LeRobot's SmolVLA with its names, without the head that predicts words."""

    def __init__(self, config: Mapping[str, Any], vlm_config: Any) -> None:
        super().__init__()
        self.config = config
        self.vlm_with_expert = nn.Module()
        self.vlm_with_expert.vlm = nn.Module()
        transformers = transformers_module()
        model = transformers.AutoModel.from_config(vlm_config)
        text = vlm_config.text_config
        if 0 < config["num_vlm_layers"] < len(model.text_model.layers):
            model.text_model.layers = model.text_model.layers[: config["num_vlm_layers"]]
        self.vlm_with_expert.vlm.model = model
        depth, wanted = len(model.text_model.layers), config["num_expert_layers"]
        if 0 < wanted != depth:
            raise InputError(f"num_expert_layers {wanted} must be the number of layers of the VLM, {depth}")
        expert_config = copy.deepcopy(text)
        width = expert_config.hidden_size = int(text.hidden_size * config["expert_width_multiplier"])
        expert_config.intermediate_size = _intermediate_size(width)
        expert_config.num_hidden_layers = depth
        expert = transformers.AutoModel.from_config(expert_config)
        expert.embed_tokens = None
        size = text.num_key_value_heads * text.head_dim
        for index, layer in enumerate(expert.layers):
            if not self._self_attends(index):
                for name in ("k_proj", "v_proj"):
                    layer.self_attn.register_module(name, nn.Linear(size, size, bias=text.attention_bias))
        self.vlm_with_expert.lm_expert = expert
        self.width = width
        self.state_proj = nn.Linear(config["max_state_dim"], text.hidden_size)
        self.action_in_proj = nn.Linear(config["max_action_dim"], width)
        self.action_out_proj = nn.Linear(width, config["max_action_dim"])
        self.action_time_mlp_in = nn.Linear(2 * width, width)
        self.action_time_mlp_out = nn.Linear(width, width)

    @property
    def vision_model(self) -> nn.Module:
        """The vision encoder."""
        return self._vlm.vision_model

    @property
    def _vlm(self) -> Any:
        return self.get_submodule("vlm_with_expert.vlm.model")

    def _self_attends(self, index: int) -> bool:
        """Whether the actions attend to each other in this layer, beside the prefix."""
        every = self.config["self_attn_every_n_layers"]
        return "cross" not in self.config["attention_mode"] or (every > 0 and index % every == 0)

    def read(self, images: list[Tensor], ids: Tensor, is_word: Tensor, state: Tensor) -> Prefix:
        """Run images [B, 3, h, w] in [−1, 1], token ids [B, T] and the padded state through SmolVLM2.

        Images and words attend to each other; the state, which is last, attends to everything.
        """
        vlm = self._vlm
        dtype = vlm.text_model.norm.weight.dtype
        parts, batch = [], len(state)
        for image in images:
            cells = vlm.connector(vlm.vision_model(pixel_values=image.to(dtype)).last_hidden_state)
            parts.append(cells * cells.shape[-1] ** 0.5)
        words = vlm.text_model.get_input_embeddings()(ids)
        parts += [words * words.shape[-1] ** 0.5, self.state_proj(state).unsqueeze(1).to(dtype)]
        tokens = torch.cat(parts, 1)
        seen = is_word.new_ones(batch, tokens.shape[1] - ids.shape[1] - 1)
        real = torch.cat([seen, is_word, is_word.new_ones(batch, 1)], 1)
        mask = real.unsqueeze(1) & real.unsqueeze(2)
        mask[:, :-1, -1] = False
        return read_prefix(vlm.text_model, tokens, real, mask)

    def forward(self, x: Tensor, time: Tensor, prefix: Prefix) -> Tensor:
        """The velocity [B, chunk, dims] at x and t, float32."""
        expert: Any = self.get_submodule("vlm_with_expert.lm_expert")
        embedded = self.action_in_proj(x)
        times = time_embedding(time, self.width, self.config["min_period"], self.config["max_period"])
        fused = torch.cat([embedded, times.unsqueeze(1).expand_as(embedded)], 2)
        hidden = self.action_time_mlp_out(functional.silu(self.action_time_mlp_in(fused)))
        hidden = hidden.to(expert.norm.weight.dtype)
        steps = torch.arange(x.shape[1], device=x.device).expand(len(x), -1)
        to_prefix = prefix.real.unsqueeze(1).expand(-1, x.shape[1], -1)
        causal = (steps.unsqueeze(1) <= steps.unsqueeze(2)) & prefix.real[:, :1, None]  # an action reads earlier ones
        for index, (layer, (key, value)) in enumerate(zip(expert.layers, prefix.cached, strict=True)):
            normed = layer.input_layernorm(hidden)
            if self._self_attends(index):
                positions = prefix.real.sum(1, keepdim=True) + steps
                query, own_key, own_value = project(layer, normed)
                query, own_key = rotate(query, positions), rotate(own_key, positions)
                keys, values = torch.cat([key, own_key], 1), torch.cat([value, own_value], 1)
                attended = attend(query, keys, values, torch.cat([to_prefix, causal], 2))
            else:
                attention = layer.self_attn
                heads = (-1, attention.head_dim)
                query = rotate(attention.q_proj(normed).unflatten(-1, heads), steps)
                keys = attention.k_proj(key.flatten(2)).unflatten(-1, heads)
                values = attention.v_proj(value.flatten(2)).unflatten(-1, heads)
                attended = attend(query, keys, values, to_prefix)
            hidden = hidden + output(layer, attended)
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return self.action_out_proj(expert.norm(hidden).float())


def _intermediate_size(width: int) -> int:
    """Size of the MLP of an expert: 8/3 of its width, rounded up to a multiple of 256."""
    return 256 * ((4 * int(2 * width / 3) + 255) // 256)


def _vlm_config(spec: SmolVLASpec, folder: LeRobotFolder) -> tuple[Any, str | None]:
    """The config of SmolVLM2, and the folder of its tokenizer."""
    given = folder.config["vlm_config"]
    if given is not None:
        return read_architecture(None, {"model_type": "smolvlm", **given}, "smolvlm"), None
    source = spec.vlm_folder or folder.config["vlm_model_name"]
    if not (Path(source) / "config.json").is_file():
        raise InputError(
            f"vlm_folder: SmolVLA needs the config.json and the tokenizer of {folder.config['vlm_model_name']}, and "
            f"{source} is no folder that has them: download them, and set vlm_folder in model_config"
        )
    return read_architecture(source, None, "smolvlm"), source


def to_published(state: Weights) -> dict[str, Tensor]:
    """LeRobot's names."""
    return with_prefix(state, PREFIX)


def from_published(weights: Weights) -> dict[str, Tensor]:
    """The inverse of `to_published`."""
    return without_prefix(weights, PREFIX)


def without_head(weights: Weights) -> dict[str, Tensor]:
    """Remove the head that predicts words."""
    return {name: value for name, value in weights.items() if name != HEAD}
