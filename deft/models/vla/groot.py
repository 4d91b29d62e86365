"""`groot`: GR00T N1.5 from a local folder, in the layout of NVIDIA, without its code.

Eagle 2.5 reads cameras and the instruction; a diffusion transformer denoises a chunk of actions as a flow.
"""

from __future__ import annotations

import functools
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
from deft.models.vla.flow import FlowShape, FlowSpec, FlowVLA
from deft.models.vla.groot_network import GrootNetwork
from deft.models.vla.loading import check_fit, read_weight_files
from deft.models.vla.pretrained import (
    BYTES,
    DTYPES,
    ImagePreprocessor,
    InstructionTokenizer,
    ValueHead,
    add_lora,
    pretrained_keywords,
    read_json,
    read_statistics,
    transformers_module,
)
from deft.models.vla.spec import PretrainedSpec, ProprioSpec
from deft.models.vla.streams import Statistics

HEAD_DEFAULTS = {
    "add_pos_embed": True, "use_vlln": True, "input_embedding_dim": 1536, "hidden_size": 1024, "max_seq_len": 1024,
    "noise_beta_alpha": 1.5, "noise_beta_beta": 1.0, "noise_s": 0.999, "num_timestep_buckets": 1000,
    "num_inference_timesteps": 4, "max_num_embodiments": 32, "num_target_vision_tokens": 32, "max_state_dim": 64,
}  # fmt: skip
PARTS = ("action_head_cfg", "backbone_cfg", "eagle_config")
LORA_TARGETS = ("q_proj", "v_proj", "to_q", "to_v")
PREFIX = "_groot_model."  # in the weights that LeRobot saves
TOWER, NESTED_TOWER = "eagle_model.vision_model.", "eagle_model.vision_model.vision_model."
UNUSED = ("backbone.eagle_model.language_model.lm_head.", f"backbone.{NESTED_TOWER}head.")
NO_INSTRUCTION = "Perform the task."
ROUNDING = 1e-3  # of a bucket: times that are a multiple of a bucket may be a rounding error below it


@dataclass(kw_only=True)
class GrootSpec(FlowSpec, ProprioSpec, PretrainedSpec):
    """The keywords of `GrootVLA`. `embodiment` is the number of the robot; 31 is a new one."""

    chunk_length: int = 16
    prompt_length: int = 64
    vlm_folder: str | None = None
    embodiment: int = 31


class GrootVLA(FlowVLA):
    """Cameras, instruction and the robot's state to the first K actions of the chunk, and a value.

    Qwen3 and SigLIP are frozen as the folder sets it (`tune_llm`, `tune_visual`). The value reads the mean of the
    features of Eagle, and the state.
    """

    spec_class = GrootSpec

    def __init__(self, spec: GrootSpec | None = None, **given: Any) -> None:
        spec = GrootSpec(**given) if spec is None else spec
        super().__init__(spec)
        if spec.dtype not in DTYPES:
            raise InputError(f"dtype {spec.dtype!r} is none of {', '.join(DTYPES)}")
        if self.proprio_key is None:
            raise InputError("GR00T reads the robot's state, and there is none: set proprio_key to a stream of vectors")
        head, backbone, eagle = _read_config(spec)
        self.head, count = head, head["max_num_embodiments"]
        if not 0 <= spec.embodiment < count:
            raise InputError(f"embodiment {spec.embodiment} must be 0 to {count - 1}")
        check_at_most("GR00T", proprio_dim=(spec.proprio_dim, head["max_state_dim"]))
        scale = 1.0 / head["noise_s"]
        sizes = (head["action_horizon"], head["action_dim"], head["num_inference_timesteps"])
        self.add_flow(spec, FlowShape("GR00T", *sizes, head["noise_beta_alpha"], scale, 0.0))
        self.backbone = GrootNetwork(eagle, backbone, head)
        self.backbone.action_head.embodiment = spec.embodiment
        if spec.folder is not None and spec.load_weights:
            _load(self.backbone, Path(spec.folder))
        self.preprocess = ImagePreprocessor(spec.image_keys, self.backbone.image_size, spec.vlm_folder)
        self._add_prompt(spec)
        known = read_statistics(spec.folder, spec.statistics)
        self.state_statistics = Statistics(spec.proprio_dim, known.get("state"), "state")
        self.action_statistics = Statistics(spec.action_dim, known.get("action"), "action")
        self._prepare_training(spec, backbone)
        self.value_head = ValueHead(self.backbone.width + spec.proprio_dim, spec.value_gradient)

    def _add_prompt(self, spec: GrootSpec) -> None:
        """Add the tokenizer. Image tokens are a part of the prompt."""
        patches, cameras = self.backbone.num_patches, len(self.image_keys)
        source = spec.tokenizer if spec.tokenizer not in (None, BYTES) else spec.vlm_folder
        if spec.tokenizer == BYTES:
            if self.backbone.image_token != 1:
                raise InputError("tokenizer 'bytes' needs image_token_index 1, the token of the byte 0")
            prompt = "\0" * patches * cameras + "{instruction}"
        else:
            prompt = chat_prompt(source, patches, cameras)
        length = spec.prompt_length + patches * cameras
        self.tokenize = InstructionTokenizer(
            source, spec.tokenizer, prompt, length, self.backbone.vocabulary, own_begin=True
        )

    def _prepare_training(self, spec: GrootSpec, backbone: dict[str, Any]) -> None:
        network = self.backbone
        network.backbone.to(DTYPES[spec.dtype])
        if not backbone.get("tune_llm", False):
            network.language_model.requires_grad_(False)
        if spec.freeze_vision or not backbone.get("tune_visual", True):
            network.vision_model.requires_grad_(False)
            network.get_submodule("backbone.eagle_model.mlp1").requires_grad_(False)
        add_lora(network, spec.lora, LORA_TARGETS)
        self.gradient_checkpointing = spec.gradient_checkpointing

    def field(self, observations: TensorDictBase) -> tuple[Velocity, Tensor]:
        """The velocity field given an observation, and the features of the value."""
        pixels = self.preprocess(observations)
        batch, device = len(pixels), pixels.device
        ids, is_real = self.tokenize.rows(self._instructions(observations, batch), device)
        features = self.backbone.read(pixels, ids, is_real)
        state = self.state_statistics.normalize(self.proprio_vectors(observations, batch, device))
        padded = functional.pad(state, (0, self.head["max_state_dim"] - self.proprio_dim))
        buckets = self.head["num_timestep_buckets"]
        network = functools.partial(self.backbone, state=padded, features=features, real=is_real)

        def velocity(x: Tensor, time: Tensor) -> Tensor:
            # GR00T's time is 0 for noise and 1 for actions, and it predicts a − ε
            return -network(x, ((1.0 - time) * buckets + ROUNDING).long())

        weight = is_real.unsqueeze(-1).float()
        return velocity, torch.cat([(features * weight).sum(1) / weight.sum(1), state], 1)

    def _instructions(self, observations: TensorDictBase, batch: int) -> list[bytes]:
        """Instructions as GR00T writes them: a list with one text."""
        texts = self.instructions(observations)
        if texts is None:
            return [str([NO_INSTRUCTION]).encode()] * batch
        rows = (row.tobytes().rstrip(b"\0").decode(errors="replace") for row in texts.cpu().numpy())
        return [str([row or NO_INSTRUCTION]).encode() for row in rows]

    def gathered_layers(self) -> list[nn.Module]:
        """The blocks of the diffusion transformer, whose weights FSDP gathers one at a time."""
        return list(self.backbone.action_head.model.transformer_blocks)


def chat_prompt(folder: str | None, patches: int, cameras: int) -> str:
    """The chat of one user with images and a text, as the template of the tokenizer writes it."""
    if folder is None or not Path(folder).is_dir():
        raise InputError(
            f"vlm_folder: GR00T needs config.json and the tokenizer of Eagle 2.5, and {folder} is no folder that has "
            "them: set vlm_folder in model_config"
        )
    try:
        tokenizer = transformers_module().AutoTokenizer.from_pretrained(folder, **pretrained_keywords())
        content = [{"type": "image", "image": ""}] * cameras + [{"type": "text", "text": "{instruction}"}]
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{folder}: the chat template cannot be read: {str(error).partition(chr(10))[0]}") from None
    for camera in range(1, cameras + 1):
        if f"<image-{camera}>" not in text:
            raise InputError(f"{folder}: the chat template has no <image-{camera}> for camera {camera}")
        image = f"<image {camera}><img>{'<IMG_CONTEXT>' * patches}</img>"
        text = text.replace(f"<image-{camera}>", image)
    return text


def _read_config(spec: GrootSpec) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Settings of the action head, of the backbone, and of Eagle."""
    if (spec.folder is None) == (spec.architecture is None):
        raise InputError("set either the folder of the model (model_path) or its architecture")
    if spec.folder is None:
        config = dict(spec.architecture or {})
        if unknown := sorted(set(config) - set(PARTS)):
            raise InputError(f"architecture.{unknown[0]} is no setting of GR00T; known: {', '.join(PARTS)}")
    else:
        path = Path(spec.folder) / "config.json"
        if not path.is_file():
            raise InputError(f"{spec.folder}: no GR00T: there is no config.json in it")
        config = read_json(path)
        if config.get("model_type") != "gr00t_n1_5":
            raise InputError(f"{path} has the model_type {config.get('model_type')!r}; groot needs 'gr00t_n1_5'")
    if "eagle_config" not in config:
        eagle = None if spec.vlm_folder is None else Path(spec.vlm_folder) / "config.json"
        if eagle is None or not eagle.is_file():
            raise InputError(
                f"vlm_folder: GR00T needs config.json and the tokenizer of Eagle 2.5, and {spec.vlm_folder} is no "
                "folder that has them: set vlm_folder in model_config"
            )
        config["eagle_config"] = read_json(eagle)
    head = {**HEAD_DEFAULTS, **config["action_head_cfg"]}
    if head["noise_beta_beta"] != 1.0:
        raise InputError("action_head_cfg.noise_beta_beta must be 1")
    return head, dict(config["backbone_cfg"]), config["eagle_config"]


def _load(network: GrootNetwork, folder: Path) -> None:
    where, weights = read_weight_files(folder)
    published = {name.removeprefix(PREFIX): value for name, value in weights.items()}
    depth = len(network.language_model.layers)
    kept = {
        name: value for name, value in published.items() if not name.startswith(UNUSED) and not _is_later(name, depth)
    }
    own = {name.replace(TOWER, NESTED_TOWER): value for name, value in network.state_dict().items()}
    check_fit(own, kept, where, "GR00T N1.5")
    network.load_state_dict({name.replace(NESTED_TOWER, TOWER): value for name, value in kept.items()})


def _is_later(name: str, depth: int) -> bool:
    """Whether a weight is of a layer of Qwen3 that is not used."""
    layer = name.partition("language_model.model.layers.")[2].partition(".")[0]
    return layer.isdigit() and int(layer) >= depth
