"""The config of an F1 model, its three presets, and the reader of configs in the published layout.

`read_f1_config` takes the name of a preset or a JSON/YAML file. `full` has the published sizes; `small` fits one
consumer GPU; `tiny` trains on a CPU.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from deft.config.loading import read_mapping, to_dict
from deft.config.validation import Count, Fraction, NonNegative, NonNegativeInt, Positive, Switch, checked, settings
from deft.errors import InputError

log = logging.getLogger(__name__)


@settings
class TokenizerConfig:
    """The image tokenizer."""

    scales: tuple[Count, ...] = (1, 2, 3, 4, 5, 6, 8, 10, 13, 16)
    """Sides of the token grids, coarse to fine; the last is the latent grid."""
    codebook_size: Count = 4096
    code_dim: Count = 32
    channels: Count = 160
    """Width of the finest level of the encoder."""
    channel_multipliers: tuple[Count, ...] = (1, 1, 2, 2, 4)
    """Widths of the levels, in `channels`; each level but the last halves the image."""
    num_res_blocks: Count = 2
    attention: Switch = True
    """Attention at the coarsest level."""
    stem_stride: Count = 1
    """Size of the patches that the first layer reads; more than 1 saves the work at full resolution."""
    linear_path: Switch = False
    """A linear map from patches to features, and one back, beside the networks; training starts with principal
    components there, so that a small tokenizer is usable within minutes."""
    num_residual_convolutions: Count = 4
    residual_ratio: Fraction = 0.5
    commitment: NonNegative = 0.25
    """β, the weight of the commitment loss."""

    @property
    def patch_size(self) -> int:
        """Side length in pixels of a cell of the latent grid."""
        return self.stem_stride * 2 ** (len(self.channel_multipliers) - 1)

    @property
    def image_size(self) -> int:
        """Side length of the frames in pixels."""
        return self.scales[-1] * self.patch_size

    @property
    def num_tokens(self) -> int:
        """L, the number of tokens per frame."""
        return sum(scale * scale for scale in self.scales)


@settings
class VisionConfig:
    """The SigLIP vision tower."""

    hidden_size: Count = 1152
    intermediate_size: Count = 4304
    num_layers: Count = 27
    num_heads: Count = 16
    patch_size: Count = 14
    image_size: Count = 224

    @property
    def num_tokens(self) -> int:
        """The number of tokens per image."""
        return (self.image_size // self.patch_size) ** 2


@settings
class ExpertConfig:
    """The sizes of one expert; the attention sizes are shared by all experts."""

    hidden_size: Count = 1024
    intermediate_size: Count = 4096


@settings
class F1Config:
    """An F1 model; the defaults are the published model's (`full`)."""

    vision: VisionConfig = Field(default_factory=VisionConfig)
    understanding: ExpertConfig = Field(default_factory=lambda: ExpertConfig(hidden_size=2048, intermediate_size=16384))
    generation: ExpertConfig = Field(default_factory=ExpertConfig)
    action: ExpertConfig = Field(default_factory=ExpertConfig)
    tokenizer: TokenizerConfig = Field(default_factory=TokenizerConfig)
    num_layers: Count = 18
    num_heads: Count = 8
    num_kv_heads: Count = 1
    head_dim: Count = 256
    vocab_size: Count = 257152
    """Vocabulary size of the language tokenizer."""
    language_heads: Switch = True
    """Keep the experts' word output layers: published checkpoints include them; Deft does not use them."""
    language_tokenizer_path: str = ""
    """Folder of the language tokenizer's files; "bytes" needs no files."""
    tokenizer_max_length: Count = 48
    """Maximum number of tokens of an instruction."""
    tokenizer_weights: str = ""
    """File of the image tokenizer's weights, used without a checkpoint; a bare name is a file that ships with Deft."""

    understanding_weights: str = ""
    """Folder of a PaliGemma model of this size, to initialise the understanding expert without a checkpoint."""

    n_obs_img_steps: Count = 4
    """Frames of history; also the kernel of the convolution that compresses them to one."""
    obs_img_stride: Count = 1
    """Steps between two frames of the history."""
    n_pred_img_steps: Literal[1] = 1
    """Frames predicted at a time; `roll_out` predicts further frames from its own predictions."""
    max_state_dim: Count = 32
    max_action_dim: Count = 32
    chunk_size: Count = 50
    """Actions predicted at a time."""
    num_steps: Count = 10
    """Euler steps from noise to actions."""
    wm_loss_weight: NonNegative = 0.1
    """loss = action loss + this · world-model loss; without actions the loss is the world model's."""
    mask_sequence_rate: Fraction = 0.1
    """Share of training rows in which codes of the true frame are hidden from the finer scales …"""
    mask_token_rate: Fraction = 0.15
    """… and the share of such codes."""
    top_k: NonNegativeInt = 900
    """Sample codes from this many most likely ones; 0: from all."""
    top_p: Fraction = 0.95
    """… and from the smallest set with this total probability."""

    memory_enabled: Switch = True
    memory_hidden: Count = 2048
    memory_num_layers: Count = 4
    memory_project_to_vae_dim: Switch = True
    """Add the memory to the frame history in the tokenizer's dims; off: to the condition, in the expert's width."""
    memory_picture: Switch = False
    """The memory also corrects the image predicted by the motion prior."""
    condition_on_actions: Switch = True
    """Condition the world model on the actions up to a_t and the state."""
    unknown_action_rate: Fraction = 0.0
    """Share of training steps in which a_t is hidden, so that the model can also predict before it acts."""
    motion_prior: Switch = False
    """First warp the last frame by predicted motion, and derive prior logits of the codes from it."""
    motion_channels: Count = 32
    motion_loss_weight: NonNegative = 1.0
    motion_tail: NonNegative = 0.0
    """ν > 0: codes far from the warped frame's have p ~ ‖z − e‖^−2ν, not e^−β‖z − e‖²; for static cameras."""
    detail_of_motion: Switch = False
    """Predicted images are the warped frame plus the change due to the codes, which keeps fine detail."""
    condition_init: NonNegative = 0.0
    """Initial standard deviation of parts that the published model lacks; 0 leaves its outputs unchanged."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of the vision tower and the experts' layers; the rest is float32."""
    activation_checkpointing: Switch = False
    """Recompute each layer in the backward pass instead of storing its activations."""
    initializer_range: Positive = 0.02

    @property
    def num_tokens(self) -> int:
        """L, the number of tokens per frame."""
        return self.tokenizer.num_tokens


def tiny() -> F1Config:
    """64 px, about 2.6 million parameters; needs no files but its tokenizer's weights."""
    return F1Config(
        vision=VisionConfig(
            hidden_size=64, intermediate_size=128, num_layers=2, num_heads=2, patch_size=16, image_size=64
        ),
        understanding=ExpertConfig(hidden_size=64, intermediate_size=192),
        generation=ExpertConfig(hidden_size=128, intermediate_size=384),
        action=ExpertConfig(hidden_size=64, intermediate_size=192),
        tokenizer=TokenizerConfig(
            scales=(1, 2, 4, 8), codebook_size=512, code_dim=16, channels=64, channel_multipliers=(1,),
            num_res_blocks=1, attention=False, stem_stride=8, linear_path=True,
        ),
        num_layers=4, num_heads=4, num_kv_heads=1, head_dim=32,
        vocab_size=259, language_heads=False, language_tokenizer_path="bytes", tokenizer_max_length=64,
        chunk_size=4, top_k=64,
        memory_hidden=128, memory_num_layers=2, memory_project_to_vae_dim=False, memory_picture=True,
        tokenizer_weights="tiny_tokenizer", unknown_action_rate=0.1, motion_prior=True, condition_init=0.05,
    )  # fmt: skip


def small() -> F1Config:
    """128 px, about 100 million parameters: one consumer GPU."""
    return F1Config(
        vision=VisionConfig(
            hidden_size=384, intermediate_size=1536, num_layers=8, num_heads=6, patch_size=16, image_size=128
        ),
        understanding=ExpertConfig(hidden_size=512, intermediate_size=2048),
        generation=ExpertConfig(hidden_size=512, intermediate_size=2048),
        action=ExpertConfig(hidden_size=256, intermediate_size=1024),
        tokenizer=TokenizerConfig(
            scales=(1, 2, 4, 6, 8), codebook_size=2048, code_dim=32, channels=64, channel_multipliers=(1, 1, 2, 2, 4),
        ),
        num_layers=8, num_heads=8, num_kv_heads=1, head_dim=64,
        vocab_size=259, language_heads=False, language_tokenizer_path="bytes", tokenizer_max_length=64,
        chunk_size=16, top_k=300,
        memory_hidden=512, memory_num_layers=2, memory_project_to_vae_dim=False, memory_picture=True,
        unknown_action_rate=0.1, motion_prior=True, motion_channels=64, condition_init=0.05,
    )  # fmt: skip


def full() -> F1Config:
    """The published sizes."""
    return F1Config(dtype="bfloat16")


PRESETS = {"tiny": tiny, "small": small, "full": full}


def read_f1_config(source: str | Path | Mapping[str, Any] | F1Config) -> F1Config:
    """Read a config from the name of a preset, a JSON/YAML file, or a mapping.

    A file is in the published layout (`und_expert_config`, …), with the memory's settings beside it, or has a
    `preset` and the values that differ from it. Without a `preset`, a file with sizes is based on `full`, a file
    without sizes on the preset with the same `memory_hidden`, else on `tiny`.
    """
    if isinstance(source, F1Config):
        return copy.deepcopy(source)
    if isinstance(source, Mapping):
        return _from_mapping(source, "the F1 config")
    if str(source) in PRESETS:
        return PRESETS[str(source)]()
    path = Path(source)
    if not path.exists() and path.name == str(source) and not path.suffix:
        raise InputError(f"{source}: no such F1 config; name a file or a preset ({', '.join(PRESETS)})")
    return _from_mapping(read_mapping(path), str(path))


def _from_mapping(mapping: Mapping[str, Any], where: str) -> F1Config:
    if "und_expert_config" in mapping:
        return _from_published(mapping, where)
    values = dict(mapping)
    preset = values.pop("preset", None) or _implied_preset(values, where)
    if preset not in PRESETS:
        raise InputError(f"{where}: preset is {preset!r}; choose {', '.join(PRESETS)}")
    base = to_dict(PRESETS[preset]())
    for name, value in values.items():
        is_section = isinstance(base.get(name), dict) and isinstance(value, Mapping)
        base[name] = {**base[name], **value} if is_section else value
    return checked(F1Config, base)


# Settings that determine the size of the model.
_SIZES = ("vision", "understanding", "generation", "action", "tokenizer", "num_layers", "num_heads", "head_dim")


def _implied_preset(values: Mapping[str, Any], where: str) -> str:
    """Return the preset on which a mapping without a `preset` is based; log it, because `full` has 4.8 B weights."""
    if any(name in values for name in _SIZES):
        return "full"
    found = next((name for name, make in PRESETS.items() if make().memory_hidden == values.get("memory_hidden")), None)
    reason = "with no sizes it is" if found is None else "its memory_hidden is that of"
    chosen = found or "tiny"
    log.warning("%s names no preset: %s %r; write preset: %s in it", where, reason, chosen, " or ".join(PRESETS))
    return chosen


# Top-level keys that the published config shares with ours.
_PUBLISHED_TOP = (
    "chunk_size", "max_state_dim", "max_action_dim", "tokenizer_max_length", "language_tokenizer_path", "num_steps",
    "memory_enabled", "memory_hidden", "memory_num_layers", "memory_project_to_vae_dim",
    "n_obs_img_steps", "obs_img_stride", "n_pred_img_steps",
)  # fmt: skip
# Our settings → keys of the published sections.
_SIZE_KEYS = {"hidden_size": "hidden_size", "intermediate_size": "intermediate_size"}
_ATTENTION_KEYS = {"num_layers": "num_hidden_layers", "num_heads": "num_attention_heads"}
_TOKENIZER_KEYS = {
    "codebook_size": "vocab_size",
    "code_dim": "z_channels",
    "channels": "ch",
    "num_residual_convolutions": "share_quant_resi",
}


def _from_published(mapping: Mapping[str, Any], where: str) -> F1Config:
    """The published layout: three experts as transformers' configs, with defaults of PaliGemma and Gemma."""
    try:
        words, vision = mapping["und_expert_config"]["text_config"], mapping["und_expert_config"]["vision_config"]
        generation, action = mapping["gen_expert_config"], mapping["act_expert_config"]
        vae, scales = generation["vae"], tuple(int(size) for size in str(generation["pn"]).split("_"))
        for name in ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"):
            if len({expert.get(name, 256) for expert in (words, generation, action)}) > 1:
                raise InputError(f"{where}: {name} differs between the experts; joint attention needs one value")
        if generation.get("num_resolutions", 0) not in (0, len(scales)):
            raise InputError(f"{where}: num_resolutions must be the number of scales in pn")
        if generation.get("temporal_conv_kernel_size", 4) != generation.get("temporal_conv_stride", 4):
            raise InputError(f"{where}: temporal_conv_kernel_size and temporal_conv_stride must be equal")
        sections = {"understanding": words, "generation": generation, "action": action, "vision": vision}
        values: dict[str, Any] = {name: _renamed(section, _SIZE_KEYS) for name, section in sections.items()}
        values["vision"] |= _renamed(vision, {**_ATTENTION_KEYS, "patch_size": "patch_size"})
        values["vision"]["image_size"] = vision.get("image_size", 224)
        known = {ours: theirs for ours, theirs in _TOKENIZER_KEYS.items() if theirs in vae}
        values |= {
            **_renamed(words, {**_ATTENTION_KEYS, "num_kv_heads": "num_key_value_heads"}),
            "tokenizer": {"scales": scales, **_renamed(vae, known)},
            "head_dim": words.get("head_dim", 256),
            "vocab_size": words["vocab_size"],
            "n_obs_img_steps": generation.get("temporal_conv_kernel_size", 4),
        }
    except (KeyError, TypeError) as error:
        raise InputError(f"{where}: not a published F1 config: {error} is missing or not a section") from None
    return checked(F1Config, {**values, **{name: mapping[name] for name in _PUBLISHED_TOP if name in mapping}})


def _renamed(section: Mapping[str, Any], keys: Mapping[str, str]) -> dict[str, Any]:
    return {ours: section[theirs] for ours, theirs in keys.items()}
