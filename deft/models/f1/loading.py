"""Builds an F1 policy and loads its weights from a published checkpoint or from one of Deft.

`load_f1_policy` is what users and trainers call; `save_published` writes the published layout.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from deft.config.loading import read_mapping, to_dict
from deft.errors import InputError
from deft.models.f1.config import PRESETS, F1Config, read_f1_config
from deft.models.f1.model import ADDED_PARTS
from deft.models.f1.optimization import ADAPTER_FOLDER, add_lora, base_state_dict, load_adapter
from deft.models.f1.policy import F1Policy
from deft.models.f1.teacher import TeacherPolicy
from deft.models.f1.vq import MultiScaleTokenizer
from deft.models.lora import LoraSettings
from deft.models.vla.loading import check_fit, read_weights

logger = logging.getLogger(__name__)

WEIGHTS = Path(__file__).parent / "weights"  # weights that ship with the package
SHIPPED = "shipped"  # as `checkpoint_path`: the teacher in WEIGHTS
WEIGHT_FILES = ("model.safetensors", "model.pt")

# Our prefixes → published prefixes; the first match is used.
_PALIGEMMA = "model.paligemma_with_expert.paligemma."
_PREFIXES = {
    "tokenizer.": "vae.",
    "model.vision.embeddings.": f"{_PALIGEMMA}vision_tower.vision_model.embeddings.",
    "model.vision.layers.": f"{_PALIGEMMA}vision_tower.vision_model.encoder.layers.",
    "model.vision.post_layernorm.": f"{_PALIGEMMA}vision_tower.vision_model.post_layernorm.",
    "model.vision.projector.": f"{_PALIGEMMA}multi_modal_projector.linear.",
    "model.words.": f"{_PALIGEMMA}language_model.model.embed_tokens.",
    "model.experts.understanding.": f"{_PALIGEMMA}language_model.model.",
    "model.experts.generation.": "model.paligemma_with_expert.gemma_wm_expert.model.",
    "model.experts.action.": "model.paligemma_with_expert.gemma_expert.model.",
    "model.language_heads.understanding.": f"{_PALIGEMMA}language_model.lm_head.",
    "model.language_heads.generation.": "model.paligemma_with_expert.gemma_wm_expert.lm_head.",
    "model.language_heads.action.": "model.paligemma_with_expert.gemma_expert.lm_head.",
    "model.world_model.temporal.": "model.temporal_conv.conv.",
    "model.world_model.history_positions": "model.wm_hist_pos_embs",
    "model.world_model.embedding.": "model.wm_embeddings.",
    "model.world_model.start": "model.wm_sos_token_embs",
    "model.world_model.condition_positions": "model.wm_cond_pos_embs",
    "model.world_model.output_positions": "model.wm_output_position_embedding",
    "model.world_model.level_embedding.": "model.lvl_embed.",
    "model.world_model.level": "model.lvl_1L",
    "model.world_model.mask_embedding": "model.mask_embedding",
    "model.world_model.norm.": "model.wm_out_layer_norm.",
    "model.world_model.output.": "model.wm_out_proj.",
    "model.flow.": "model.",
}
OWN_PREFIXES = tuple(f"model.{name}." for name in ADDED_PARTS)
REPEATED = "model.vae."
"""The published file may hold the tokenizer a second time under this name."""


class LoadedPolicy(NamedTuple):
    """What `load_f1_policy` returns."""

    policy: F1Policy
    config: F1Config
    full_config: dict[str, Any]  # the config file as it stands, or the preset's settings

    def as_teacher(self, phase: str = "teacher") -> TeacherPolicy:
        """The policy as the reward of one F1 environment."""
        return self.policy.as_teacher(phase)


def load_f1_policy(
    config_file: str | Path | Mapping[str, Any] | F1Config,
    device: str | torch.device = "cpu",
    debug: bool = False,
    lora_config: Mapping[str, Any] | LoraSettings | None = None,
    checkpoint_path: str | Path | None = None,
) -> LoadedPolicy:
    """Build the policy of a preset or a config file, with the weights of `checkpoint_path`, on `device`.

    `checkpoint_path` is a weights file, or a folder with `model.safetensors` or `model.pt` (and `peft_adapter/`), in
    the published layout or ours, or `shipped`: the teacher that ships with Deft. Without it the weights are new, and a
    warning is logged; the image tokenizer always needs weights, unless `debug` is set. `lora_config` adds new adapters
    if the checkpoint has none.
    """
    _check_device(device)
    config = read_f1_config(config_file)
    if checkpoint_path == SHIPPED:
        checkpoint_path = default_teacher()
    if checkpoint_path is not None:
        weights_file = _find_weights(Path(checkpoint_path))
        policy = _filled(config, read_weights(weights_file), weights_file).to(device)
    else:
        tokenizer_file = _tokenizer_file(config, debug)
        logger.warning("the F1 model starts from new weights: no checkpoint_path was given")
        with torch.device(device):
            policy = F1Policy(config)
        if tokenizer_file is not None:
            fill_tokenizer(policy.tokenizer, tokenizer_file)
        if config.understanding_weights:
            load_paligemma(policy, config.understanding_weights)
    adapter = None if checkpoint_path is None else Path(checkpoint_path) / ADAPTER_FOLDER
    if adapter is not None and adapter.is_dir():
        load_adapter(policy, adapter)
    elif lora_config is not None:
        add_lora(policy, lora_config)
    return LoadedPolicy(policy, config, _as_written(config_file, config))


def default_teacher() -> Path:
    """Return the weights of the teacher that ships with Deft: `tiny`, trained on the tabletop (see its JSON file)."""
    return WEIGHTS / "tiny_teacher.safetensors"


def published_name(name: str) -> str | None:
    """Return the published name of one of our tensors; None if the published model lacks it."""
    if name.startswith(OWN_PREFIXES):
        return None
    for ours, theirs in _PREFIXES.items():
        if name.startswith(ours):
            return theirs + name.removeprefix(ours)
    raise KeyError(name)


def published_state_dict(policy: F1Policy) -> dict[str, Tensor]:
    """Return the policy's tensors under published names, without parts that the published model lacks."""
    named = ((published_name(name), tensor) for name, tensor in base_state_dict(policy).items())
    return {name: tensor for name, tensor in named if name is not None}


def save_published(policy: F1Policy, path: str | Path) -> None:
    """Write a checkpoint that the published code reads. Memory and conditioning on actions are not part of it."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in published_state_dict(policy).items()}
    save_file(tensors, path)


def _check_device(device: str | torch.device) -> None:
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        first_line = str(error).strip().partition("\n")[0]
        raise InputError(f"device {str(device)!r} cannot be used: {first_line}") from None


def _find_weights(path: Path) -> Path:
    if path.is_dir():
        found = next((path / name for name in WEIGHT_FILES if (path / name).is_file()), None)
        if found is None:
            raise InputError(f"checkpoint_path {path} has no {' or '.join(WEIGHT_FILES)}")
        return found
    if not path.exists():
        raise InputError(f"checkpoint_path {path} does not exist; leave it out to start from new weights")
    return path


def fill_tokenizer(tokenizer: MultiScaleTokenizer, path: Path) -> None:
    """Load an image tokenizer from a file of its own tensors, or from a checkpoint of a whole policy."""
    weights = read_weights(path)
    for prefix in ("tokenizer.", "vae."):
        if any(name.startswith(prefix) for name in weights):
            weights = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
            break
    own = tokenizer.state_dict()
    check_fit(own, weights, path, "the image tokenizer")
    tokenizer.load_state_dict({name: weights[name].to(own[name].dtype) for name in own})


def find_tokenizer(name: str, setting: str = "tokenizer_weights") -> Path:
    """Return the file of an image tokenizer's weights from a path, a run directory, or the name of one of Deft's."""
    path = Path(name)
    if path.is_dir() and (own := path / "tokenizer.safetensors").is_file():
        return own
    if path.name == name and not path.suffix:
        path = WEIGHTS / f"{name}.safetensors"
    if not path.is_file():
        raise InputError(
            f"{setting}: the image tokenizer's weights {path} are not there; `deft train tokenizer` makes such a file"
        )
    return path


def load_paligemma(policy: F1Policy, folder: str | Path) -> None:
    """Load vision tower, words and understanding expert from the safetensors files of a PaliGemma model."""
    folder = Path(folder)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise InputError(f"understanding_weights {folder} has no .safetensors files")
    parts = ("vision.", "words.", "experts.understanding.")
    own = {name: tensor for name, tensor in policy.model.state_dict().items() if name.startswith(parts)}
    ours = {_paligemma_name(published_name(f"model.{name}") or ""): name for name in own}
    weights: dict[str, Tensor] = {}
    for file in files:
        for name, value in read_weights(file).items():
            if "lm_head." not in name:  # F1 predicts no words
                weights[ours.get(_paligemma_name(name), name)] = value
    words = weights.get("words.weight")
    if words is not None and len(words) > policy.config.vocab_size:  # later releases added words at the end
        weights["words.weight"] = words[: policy.config.vocab_size]
    check_fit(own, weights, folder, "the understanding expert")
    policy.model.load_state_dict({name: weights[name].to(own[name].dtype) for name in own}, strict=False)


def _paligemma_name(name: str) -> str:
    """Return the name of a tensor in PaliGemma without the parts that differ between its releases."""
    plain = name.removeprefix(_PALIGEMMA).removeprefix("model.")
    return plain.replace("language_model.model.", "language_model.").replace("vision_model.", "")


def _filled(config: F1Config, weights: dict[str, Tensor], path: Path) -> F1Policy:
    """Build a policy from the file's tensors; parts that a published file lacks are initialised without effect."""
    from_published = any(name.startswith(("vae.", "model.paligemma_with_expert.")) for name in weights)
    if from_published:
        probe = weights.get("model.paligemma_with_expert.gemma_wm_expert.model.layers.0.self_attn.q_proj.weight")
        config.dtype = "bfloat16" if probe is not None and probe.dtype == torch.bfloat16 else "float32"
        weights = {name: value for name, value in weights.items() if not name.startswith(REPEATED)}
    with torch.device("meta"):  # allocate no memory for weights that are replaced at once
        policy = F1Policy(config)
    own = policy.state_dict()
    if from_published:
        theirs = {name: published_name(name) for name in own}
        expected = {found: own[name] for name, found in theirs.items() if found is not None}
        check_fit(expected, weights, path, "F1Policy")
        weights = {name: weights[found] for name, found in theirs.items() if found is not None}
        added = {name: part(config) for name, part in ADDED_PARTS.items() if getattr(policy.model, name) is not None}
        for name, part in added.items():
            weights |= {f"model.{name}.{key}": value.detach() for key, value in part.state_dict().items()}
        if added:
            logger.info("%s is a published checkpoint: %s are initialised, without effect", path, ", ".join(added))
    check_fit(own, weights, path, "F1Policy")
    policy.load_state_dict({name: weights[name].to(own[name].dtype) for name in own}, assign=True)
    return policy


def _tokenizer_file(config: F1Config, debug: bool) -> Path | None:
    """Return the file of the image tokenizer's weights; None if `debug` allows new weights."""
    try:
        if config.tokenizer_weights:
            return find_tokenizer(config.tokenizer_weights)
        raise InputError("the image tokenizer has no weights: give checkpoint_path, or tokenizer_weights in the config")
    except InputError:
        if not debug:
            raise
    logger.warning("the image tokenizer starts from new weights: its codes mean nothing yet")
    return None


def _as_written(source: str | Path | Mapping[str, Any] | F1Config, config: F1Config) -> dict[str, Any]:
    if isinstance(source, Mapping):
        return dict(source)
    if isinstance(source, F1Config) or str(source) in PRESETS:
        return to_dict(config)
    return read_mapping(source)
