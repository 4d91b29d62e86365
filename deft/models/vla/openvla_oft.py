"""`openvla-oft`: OpenVLA with the optimised fine-tuning of Kim et al. (2025), from a local folder.

K · A empty tokens follow the cameras, the robot's state and the prompt. One pass of the language model with attention
in both directions decodes them in parallel, and a regression head maps the A tokens of each step to an action.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.nn import functional

from deft.errors import InputError
from deft.models.vla.interface import Sample
from deft.models.vla.loading import check_fit, read_weight_files, read_weights
from deft.models.vla.pretrained import (
    BYTES,
    DTYPES,
    InstructionTokenizer,
    PretrainedVLA,
    ValueHead,
    add_lora,
    checkpoint_layers,
    read_json,
    read_statistics,
)
from deft.models.vla.prismatic import PrismaticNetwork, film_weights, used_weights
from deft.models.vla.spec import PretrainedSpec, ProprioSpec
from deft.models.vla.streams import GaussianVLA, Statistics, check_images, read_stream

logger = logging.getLogger(__name__)

PROMPT = "In: What action should the robot take to {instruction}?\nOut:"
SPACE = 29871  # the token of a single space in Llama's vocabulary, which ends a prompt
STOP = 2  # </s>, after the tokens of the actions
IMAGENET = ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
HALF = ([0.5, 0.5, 0.5], [0.5, 0.5, 0.5])
HEAD, PROPRIO, FILM = "action_head", "proprio_projector", "vision_backbone"
BLOCKS = 2
KNOWN = ("text_config", "vision_config", "timm_model_ids", "image_sizes", "use_film")


@dataclass(kw_only=True)
class OpenVLAOFTSpec(ProprioSpec, PretrainedSpec):
    """The keywords of `OpenVLAOFT`. `chunk_size` is that of the training, which the folder does not contain."""

    chunk_length: int = 8
    chunk_size: int = 8
    proprio_dim: int = 8
    prompt_length: int = 64
    crop_scale: float = 1.0
    new_head: bool = False
    log_std_init: float = -2.0


class OpenVLAOFT(PretrainedVLA, GaussianVLA):
    """OpenVLA-OFT: cameras, instruction and the robot's state to the first K actions of the chunk, and a value.

    The policy is trained by an L1 error and has no distribution of its own: actions are a Gaussian around the chunk,
    with a learned deviation of each dim and step, in units of the normalised actions. SFT minimises the L1 error and
    leaves the deviation as it is. The value reads the mean of the hidden states that predict them.
    """

    spec_class = OpenVLAOFTSpec

    def __init__(self, spec: OpenVLAOFTSpec | None = None, **given: Any) -> None:
        spec = OpenVLAOFTSpec(**given) if spec is None else spec
        super().__init__(spec)
        if spec.chunk_length > spec.chunk_size:
            raise InputError(f"chunk_length {spec.chunk_length} is more than this OpenVLA-OFT has: {spec.chunk_size}")
        if spec.dtype not in DTYPES:
            raise InputError(f"dtype {spec.dtype!r} is none of {', '.join(DTYPES)}")
        files = OFTFolder(spec)
        self.backbone = PrismaticNetwork(files.config, files.use_film)
        width, self.chunk_size = self.backbone.width, spec.chunk_size
        self.action_head = ActionHead(width, spec.action_dim)
        if not files.has_proprio:
            self.proprio_key = None
        self.proprio_projector = ProprioProjector(spec.proprio_dim, width) if self.proprio_key is not None else None
        if files.path is not None and spec.load_weights:
            files.load(self.backbone, self.action_head, self.proprio_projector)
        self.images = OFTImages(files, self.image_keys, spec.crop_scale)
        end = () if spec.tokenizer == BYTES else (SPACE,)
        self.tokenize = InstructionTokenizer(
            spec.folder, spec.tokenizer, PROMPT, spec.prompt_length, self.backbone.vocabulary, end=end
        )
        known = read_statistics(spec.folder, spec.statistics)
        self.state_statistics = Statistics(spec.proprio_dim, known.get("state"), "state")
        self.clips_state = "state" in known
        self.action_statistics = Statistics(spec.action_dim, known.get("action"), "action")
        self._prepare_training(spec)
        self.log_std = nn.Parameter(torch.full((spec.chunk_length, spec.action_dim), float(spec.log_std_init)))
        self.value_head = ValueHead(width, spec.value_gradient)

    def _prepare_training(self, spec: OpenVLAOFTSpec) -> None:
        self.backbone.to(DTYPES[spec.dtype])
        film = [layer for name, layer in self.backbone.named_modules() if name.endswith((".scale", ".shift"))]
        if spec.freeze_vision:
            self.backbone.vision_backbone.requires_grad_(False)
        add_lora(self.backbone, spec.lora)
        for layer in film:  # new in OFT: trained with the adapters
            layer.requires_grad_(not spec.freeze_vision)
        if spec.gradient_checkpointing:
            checkpoint_layers(self.backbone.llama)

    def mean_and_value(self, observations: TensorDictBase, sample: Sample = None) -> tuple[Tensor, Tensor]:
        """Normalised actions of the chunk, [B, K, A], and the value [B, 1], in one pass."""
        hidden = self.action_states(observations)
        return self.action_head(hidden)[:, : self.chunk_length], self.value_head(hidden.mean((1, 2)))

    def imitation_loss(self, observations: TensorDictBase, actions: Tensor, step_mask: Tensor | None = None) -> Tensor:
        """The mean absolute error of demonstrated chunks [B, K, A]: [B]."""
        mean, _ = self.mean_and_value(observations)
        error = (mean - self.action_statistics.normalize(self.chunk(actions))).abs()
        return self.mean_over_steps(error, step_mask)

    def action_states(self, observations: TensorDictBase) -> Tensor:
        """Last hidden states that predict the action tokens, [B, chunk, A, W], float32.

        The sequence is <s>, the images, the state, the prompt, the action tokens, </s>. As in a language model, the
        hidden state of a token predicts the next one: those of the last word and of all action tokens but the last.
        """
        images = self.images(observations)
        batch, device = len(images[0]), images[0].device
        ids, is_word = self.tokenize.rows(self._lower_case(observations, batch), device)
        words = self.backbone.embed(ids)
        stop = self.backbone.embed(torch.full((batch, 1), STOP, device=device))
        # FiLM reads the mean of the prompt with </s>
        total = (words * is_word.unsqueeze(-1)).sum(1) + stop.squeeze(1)
        parts = [words[:, :1], self.backbone.read_images(images, total / (is_word.sum(1, keepdim=True) + 1))]
        if self.proprio_projector is not None:
            parts.append(self.proprio_projector(self._state(observations)).unsqueeze(1))
        seen = sum(part.shape[1] for part in parts)
        count = self.chunk_size * self.action_dim
        parts += [words[:, 1:], words.new_zeros(batch, count, words.shape[2]), stop]
        tokens = torch.cat([part.to(words.dtype) for part in parts], 1)
        others = is_word.new_ones(batch, seen), is_word[:, 1:], is_word.new_ones(batch, count + 1)
        hidden = self.backbone(tokens, torch.cat(others, 1))
        last_word = seen + is_word.sum(1) - 2  # the first word is <s>
        first = hidden[torch.arange(batch, device=device), last_word].unsqueeze(1)
        return torch.cat([first, hidden[:, -count - 1 : -2]], 1).unflatten(1, (self.chunk_size, self.action_dim))

    def _state(self, observations: TensorDictBase) -> Tensor:
        assert self.proprio_key is not None
        state = self.state_statistics.normalize(
            self.vectors(observations, self.proprio_key, self.proprio_dim, "proprio_dim")
        )
        return state.clamp(-1.0, 1.0) if self.clips_state else state

    def _lower_case(self, observations: TensorDictBase, batch: int) -> list[bytes]:
        texts = self.instructions(observations)
        if texts is None:
            return [b""] * batch
        rows = (row.tobytes().rstrip(b"\0") for row in texts.cpu().numpy())
        return [row.decode(errors="replace").lower().encode() for row in rows]


class ActionHead(nn.Module):
    """The A tokens of a step, [B, chunk, A, W], to its action [B, chunk, A]: an MLP with residual blocks."""

    def __init__(self, width: int, action_dim: int) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.layer_norm1 = nn.LayerNorm(width * action_dim)
        self.model.fc1 = nn.Linear(width * action_dim, width)
        blocks = [nn.Module() for _ in range(BLOCKS)]
        for block in blocks:
            block.ffn = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.ReLU())
        self.model.mlp_resnet_blocks = nn.ModuleList(blocks)
        self.model.layer_norm2 = nn.LayerNorm(width)
        self.model.fc2 = nn.Linear(width, action_dim)

    def forward(self, hidden: Tensor) -> Tensor:
        """[B, chunk, A, W] → [B, chunk, A]."""
        layer = self.model.get_submodule
        x = functional.relu(layer("fc1")(layer("layer_norm1")(hidden.flatten(2))))
        for index in range(BLOCKS):
            x = x + layer(f"mlp_resnet_blocks.{index}.ffn")(x)
        return layer("fc2")(layer("layer_norm2")(x))


class ProprioProjector(nn.Module):
    """The robot's state to a token."""

    def __init__(self, proprio_dim: int, width: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(proprio_dim, width), nn.Linear(width, width)

    def forward(self, state: Tensor) -> Tensor:
        """[B, P] → [B, W]."""
        return self.fc2(functional.gelu(self.fc1(state)))


class OFTFolder:
    """The files of OpenVLA-OFT: `config.json`, `model*.safetensors`, and one file for each added part."""

    def __init__(self, spec: OpenVLAOFTSpec) -> None:
        self.path = None if spec.folder is None else Path(spec.folder)
        if self.path is None:
            self.config = dict(spec.architecture or {})
            if not self.config:
                raise InputError("set either the folder of the model (model_path) or its architecture")
            if unknown := sorted(set(self.config) - set(KNOWN)):
                raise InputError(f"architecture.{unknown[0]} is no setting of OpenVLA; known: {', '.join(KNOWN)}")
            self.use_film, self.has_proprio = bool(self.config.get("use_film")), spec.proprio_key is not None
            return
        if spec.architecture is not None:
            raise InputError(f"architecture: the folder {self.path} has one; set either model_path or architecture")
        if not (self.path / "config.json").is_file():
            raise InputError(f"{self.path}: no OpenVLA: there is no config.json in it")
        self.config = read_json(self.path / "config.json")
        if self.config.get("model_type") != "openvla":
            raise InputError(
                f"{self.path / 'config.json'} has the model_type {self.config.get('model_type')!r}; the model class "
                "openvla-oft needs 'openvla'"
            )
        if self._part("noisy_action_projector") is not None:
            raise InputError(f"{self.path}: its action head is a diffusion; openvla-oft has the L1 regression head")
        self.use_film = self._part(FILM) is not None
        self.has_proprio = self._part(PROPRIO) is not None or (spec.new_head and spec.proprio_key is not None)
        if self._part(HEAD) is None and not spec.new_head and spec.load_weights:
            raise InputError(
                f"{self.path}: there is no {HEAD}--…_checkpoint.pt in it; if this is OpenVLA before OFT, set new_head "
                "in model_config to true, and train with sft"
            )
        if self.has_proprio and spec.proprio_key is None:
            raise InputError(f"{self.path}: the policy reads the robot's state, and there is none: set proprio_key")

    def load(self, network: nn.Module, head: nn.Module, proprio: nn.Module | None) -> None:
        """Load all weights; raise an error that names keys and shapes that do not fit."""
        assert self.path is not None
        where, weights = read_weight_files(self.path)
        film = self._part(FILM)
        if film is not None:
            weights = {name: value for name, value in weights.items() if not name.startswith(f"{FILM}.")}
            weights |= film_weights(read_weights(film))
        weights = used_weights(weights, self.config)
        check_fit(network.state_dict(), weights, where, "OpenVLA")
        network.load_state_dict(weights)
        for part, module in ((HEAD, head), (PROPRIO, proprio)):
            file = self._part(part)
            if module is not None and file is not None:
                found = {name.removeprefix("module."): value.float() for name, value in read_weights(file).items()}
                check_fit(module.state_dict(), found, file, f"the {part.replace('_', ' ')} of OpenVLA-OFT")
                module.load_state_dict(found)
            elif module is not None:
                logger.warning("%s starts from new weights: there is none in %s", part, self.path)

    def image_statistics(self) -> list[tuple[list[float], list[float]]]:
        """Mean and deviation of the pixels of each vision transformer, of `preprocessor_config.json` if it exists."""
        path = None if self.path is None else self.path / "preprocessor_config.json"
        if path is None or not path.is_file():
            return [IMAGENET, HALF] if len(self.config["image_sizes"]) > 1 else [HALF]
        settings = read_json(path)
        if not {"means", "stds"} <= set(settings):
            raise InputError(f"{path}: there are no means and stds of the pixels in it")
        return list(zip(settings["means"], settings["stds"], strict=True))

    def _part(self, name: str) -> Path | None:
        assert self.path is not None
        found = sorted(self.path.glob(f"{name}--*checkpoint.pt"))
        if len(found) > 1:
            raise InputError(f"{self.path}: there are {len(found)} files {name}--…_checkpoint.pt in it; keep one")
        return found[0] if found else None


class OFTImages(nn.Module):
    """Images of all cameras for each vision transformer: scaled to its size, cropped, and normalised.

    With `crop_scale` the centre with this share of the area is cropped and scaled to the size again.
    """

    def __init__(self, files: OFTFolder, keys: tuple[str, ...], crop_scale: float) -> None:
        super().__init__()
        if not 0 < crop_scale <= 1:
            raise InputError(f"crop_scale {crop_scale} must be above 0 and at most 1")
        self.keys, self.sizes, self.crop_scale = keys, list(files.config["image_sizes"]), crop_scale
        for index, statistics in enumerate(files.image_statistics()):
            for name, values in zip(("mean", "std"), statistics, strict=True):
                self.register_buffer(f"{name}{index}", torch.tensor(values).view(3, 1, 1), persistent=False)

    def forward(self, observations: TensorDictBase) -> list[Tensor]:
        """float32 [B, cameras, 3, h, w] for each vision transformer."""
        cameras = [check_images(read_stream(observations, key), key).float() / 255.0 for key in self.keys]
        scaled = {size: torch.stack([self._scaled(one, size) for one in cameras], 1) for size in set(self.sizes)}
        return [
            (scaled[size] - self.get_buffer(f"mean{index}")) / self.get_buffer(f"std{index}")
            for index, size in enumerate(self.sizes)
        ]

    def _scaled(self, pixels: Tensor, size: int) -> Tensor:
        if pixels.shape[2:] != (size, size):
            pixels = functional.interpolate(pixels, (size, size), mode="bicubic", antialias=True).clamp(0.0, 1.0)
        if self.crop_scale == 1.0:
            return pixels
        centre = torch.eye(2, 3, device=pixels.device).expand(len(pixels), -1, -1) * self.crop_scale**0.5
        grid = functional.affine_grid(centre, list(pixels.shape), align_corners=True)
        return functional.grid_sample(pixels, grid, align_corners=True)
