"""Parts of the adapters of pretrained models: reading a folder, images, instructions, statistics, LoRA, the value.

`pi0`, `vlm`, `openvla` and `lerobot` are built from these parts. Nothing is downloaded; a folder in which something is
missing raises an error.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from deft import trust
from deft.config.validation import checked
from deft.errors import InputError
from deft.models.lora import LoraSettings
from deft.models.vla.streams import StreamVLA, check_images, read_stream

logger = logging.getLogger(__name__)

BYTES = "bytes"
BYTE_VALUES = 256
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
FILTERS = {0: "nearest", 2: "bilinear", 3: "bicubic"}  # numbers of Pillow's filters
CACHED_TEXTS = 4096
OWN_CODE = "if you trust its author, use --trust-remote-code (in Python: trust_remote_code=True)"


# ------------------------------------------------------------------------------------------------- folders and weights


def transformers_module() -> Any:
    """Import transformers; raise an error with the install command where it is missing."""
    try:
        import transformers
    except ImportError:
        raise InputError('this VLA model needs transformers: pip install "deft[vla]"') from None
    transformers.utils.logging.disable_progress_bar()
    return transformers


def read_architecture(folder: str | None, architecture: Mapping[str, Any] | None, kind: str | None = None) -> Any:
    """The transformers config of a folder, or of keywords with `model_type`; `kind` is the required model type."""
    transformers = transformers_module()
    if (folder is None) == (architecture is None):
        raise InputError(
            "set either the folder of the model (model_path) or its architecture; a folder has config.json, the "
            "weights and the tokenizer"
        )
    try:
        if folder is not None:
            if not (Path(folder) / "config.json").is_file():
                raise InputError(f"{folder}: no pretrained model: there is no config.json in it")
            config = transformers.AutoConfig.from_pretrained(folder, **pretrained_keywords())
        else:
            keywords = dict(architecture or {})
            config = transformers.AutoConfig.for_model(keywords.pop("model_type", kind or ""), **keywords)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{folder or 'architecture'}: {_first_line(error)}") from None
    choices = _attention_choices(config, architecture or {})
    if not trust.trusts_remote_code() and any("/" in str(choice) for choice in choices):
        raise InputError(f"{folder or 'architecture'}: attn_implementation names code of a repository; {OWN_CODE}")
    if kind is not None and config.model_type != kind:
        raise InputError(f"{folder or 'architecture'}: the model has type {config.model_type!r}; it must be {kind!r}")
    return config


def _attention_choices(*configs: Any) -> Iterator[Any]:
    """Yield every `attn_implementation` in configs and in the configs nested in them."""
    for config in configs:
        values = config if isinstance(config, Mapping) else vars(config)
        for name, value in values.items():
            if str(name).startswith(("attn_implementation", "_attn_implementation")):
                yield value
            elif isinstance(value, Mapping | transformers_module().PretrainedConfig):
                yield from _attention_choices(value)


def build_backbone(model_class: Any, config: Any, folder: str | None, load_weights: bool, dtype: str) -> Any:
    """Build the transformers model of a config, with the complete weights of the folder, or with new weights."""
    if dtype not in DTYPES:
        raise InputError(f"dtype {dtype!r} is none of {', '.join(DTYPES)}")
    wanted = DTYPES[dtype]
    if folder is None or not load_weights:
        if issubclass(model_class, transformers_module().PreTrainedModel):  # not an Auto class
            return model_class(config).to(wanted)
        try:
            return model_class.from_config(config, trust_remote_code=trust.trusts_remote_code()).to(wanted)
        except ValueError as error:
            raise InputError(f"architecture: {_first_line(error)}") from None
    try:
        model, found = model_class.from_pretrained(
            folder, config=config, dtype=wanted, output_loading_info=True, **pretrained_keywords()
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise InputError(f"{folder}: the weights cannot be read: {_first_line(error)}") from None
    missing = sorted(found.get("missing_keys", ()))
    if missing:
        shown = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        raise InputError(f"{folder}: the weights lack {shown}; is it the folder of a {type(model).__name__}?")
    return model


def pretrained_keywords() -> dict[str, bool]:
    """Keywords of `from_pretrained`: nothing is downloaded, and code in the folder runs only if the user trusts it."""
    return {"local_files_only": True, "trust_remote_code": trust.trusts_remote_code()}


def _first_line(error: BaseException) -> str:
    if "trust_remote_code=True" in str(error):
        return f"it contains code of its own; {OWN_CODE}"
    return str(error).strip().partition("\n")[0]


def add_lora(model: nn.Module, lora: Mapping[str, Any] | None, targets: Sequence[str] | None = None) -> None:
    """Add low-rank adapters to the layers that `lora` names, and freeze all other weights.

    `targets` replace the default `target_modules`, for models whose layers have other names.
    """
    if lora is None:
        if next(model.parameters()).dtype == torch.bfloat16:
            logger.warning("weights trained in bfloat16 lose small updates: use lora, or dtype float32")
        return
    settings = checked(LoraSettings, ({} if targets is None else {"target_modules": targets}) | dict(lora))
    if settings.lora_dropout:
        raise InputError("lora_dropout must be 0: the network that scores an action must be the one that sampled it")
    try:
        import peft
    except ImportError:
        raise InputError('LoRA needs peft: pip install "deft[vla]"') from None
    config = peft.LoraConfig(r=settings.r, lora_alpha=settings.lora_alpha, target_modules=list(settings.target_modules))
    try:
        peft.inject_adapter_in_model(config, model)
    except ValueError as error:
        raise InputError(f"lora: {_first_line(error)}") from None
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
        if "lora_" in name:  # small updates would be lost in bfloat16
            parameter.data = parameter.data.float()


def checkpoint_layers(model: nn.Module) -> None:
    """Checkpoint the layers of the transformer: their activations are recomputed in the backward pass.

    transformers does so only in training mode; a policy stays in evaluation mode (`VLAPolicy`).
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.forward = functools.partial(_checkpointed, module)  # copied with the module, unlike a closure


def _checkpointed(module: nn.Module, *inputs: Any, **keywords: Any) -> Any:
    forward = functools.partial(type(module).forward, module)
    if not torch.is_grad_enabled() or keywords.get("past_key_values") is not None:  # a cache would be filled twice
        return forward(*inputs, **keywords)
    return checkpoint(forward, *inputs, use_reentrant=False, **keywords)


# -------------------------------------------------------------------------------------------------------- observations


class ImagePreprocessor(nn.Module):
    """Resize camera images with their aspect ratio, pad them to a square, and normalise them; without torchvision.

    `image_mean`, `image_std` and `resample` come from `preprocessor_config.json` of the folder, if it has one.
    """

    mean: Tensor
    deviation: Tensor

    def __init__(self, keys: Sequence[str], size: int, folder: str | None = None) -> None:
        super().__init__()
        path = None if folder is None else Path(folder) / "preprocessor_config.json"
        settings = {} if path is None or not path.is_file() else read_json(path)
        self.keys, self.size = tuple(keys), size
        self.filter = FILTERS.get(settings.get("resample", 3), "bicubic")
        for name, key in (("mean", "image_mean"), ("deviation", "image_std")):
            values = torch.tensor(settings.get(key, [0.5, 0.5, 0.5]), dtype=torch.float32).view(3, 1, 1)
            self.register_buffer(name, values, persistent=False)

    def forward(self, observations: TensorDictBase) -> Tensor:
        """float32 [B, cameras, 3, size, size]."""
        return torch.stack([self._camera(check_images(read_stream(observations, key), key)) for key in self.keys], 1)

    def _camera(self, image: Tensor) -> Tensor:
        pixels, (height, width) = image.float(), image.shape[-2:]
        if (height, width) != (self.size, self.size):
            ratio = max(height, width) / self.size
            shape = (max(1, int(height / ratio)), max(1, int(width / ratio)))
            smooth = {"antialias": True, "align_corners": False} if self.filter != "nearest" else {}
            pixels = functional.interpolate(pixels, size=shape, mode=self.filter, **smooth).round().clamp(0, 255)
            pixels = functional.pad(pixels, (0, self.size - shape[1], 0, self.size - shape[0]))
        return (pixels / 255.0 - self.mean) / self.deviation


class InstructionTokenizer:
    """Tokenize instructions, with a cache: rows of bytes → ids [B, length] and the mask of real tokens, bool.

    A text begins with the token of the beginning, if there is one; with `own_begin` only if the tokenizer adds it. It
    ends with the tokens `end`, if it does not already.
    """

    def __init__(
        self,
        folder: str | None,
        tokenizer: str | None,
        prompt: str,
        length: int,
        vocabulary: int,
        own_begin: bool = False,
        end: Sequence[int] = (),
    ) -> None:
        if "{instruction}" not in prompt:
            raise InputError(f"prompt {prompt!r} must contain {{instruction}}")
        self.prompt, self.length, self.own_begin, self.end = prompt, length, own_begin, list(end)
        self._known: dict[bytes, tuple[list[int], int]] = {}
        self._tokenizer: Any = None
        if tokenizer == BYTES:
            if vocabulary < BYTE_VALUES + 1:
                raise InputError(f"tokenizer 'bytes' needs {BYTE_VALUES + 1} tokens; the model has {vocabulary}")
            return
        source = tokenizer or folder
        if source is None:
            raise InputError("tokenizer: missing; name the folder of a tokenizer, or 'bytes'")
        try:
            self._tokenizer = transformers_module().AutoTokenizer.from_pretrained(source, **pretrained_keywords())
        except (OSError, ValueError, KeyError) as error:
            raise InputError(f"tokenizer {source} cannot be read: {_first_line(error)}") from None

    def __call__(self, texts: Tensor | None, batch: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Token ids [B, length], padded at the end, and the mask of real tokens; no `texts` are empty instructions."""
        rows = [b""] * batch if texts is None else [row.tobytes().rstrip(b"\0") for row in texts.cpu().numpy()]
        return self.rows(rows, device)

    def rows(self, rows: Sequence[bytes], device: torch.device) -> tuple[Tensor, Tensor]:
        """As a call, with one text per row."""
        ids = np.zeros((len(rows), self.length), np.int64)
        counts = np.zeros((len(rows), 1), np.int64)
        for index, row in enumerate(rows):
            tokens, counts[index] = self._tokens(row)
            ids[index] = tokens
        mask = np.arange(self.length) < counts
        return torch.from_numpy(ids).to(device), torch.from_numpy(mask).to(device)

    def _tokens(self, row: bytes) -> tuple[list[int], int]:
        found = self._known.get(row)
        if found is not None:
            return found
        text = self.prompt.format(instruction=row.decode(errors="replace"))
        if self._tokenizer is None:
            tokens = [1 + byte for byte in text.encode()]
        elif self.own_begin:
            tokens = self._tokenizer(text)["input_ids"]
        else:
            begin = self._tokenizer.bos_token_id
            tokens = ([] if begin is None else [begin]) + self._tokenizer(text, add_special_tokens=False)["input_ids"]
        if self.end and tokens[-len(self.end) :] != self.end:
            tokens = tokens + self.end
        if len(tokens) > self.length:
            raise InputError(f"an instruction has {len(tokens)} tokens, and prompt_length is {self.length}: {text!r}")
        if len(self._known) >= CACHED_TEXTS:
            self._known.clear()
        self._known[row] = tokens + [0] * (self.length - len(tokens)), len(tokens)
        return self._known[row]


# ---------------------------------------------------------------------------------------------------------- statistics


def read_statistics(folder: str | None, given: Mapping[str, Any] | str | None) -> dict[str, dict[str, Any]]:
    """Return the `state` and `action` statistics: as given, of a JSON file, or of the files of the folder.

    Files of a folder that are read: `processor_config.json` of transformers' π0 (`state_mean`, …),
    `dataset_statistics.json` and `norm_stats` of `config.json` as OpenVLA writes them. Without statistics, values are
    not normalised.
    """
    if isinstance(given, str):
        return _known_statistics(read_json(Path(given)), given)
    if given is not None:
        return _known_statistics(dict(given), "statistics")
    if folder is None:
        return {}
    for file in ("processor_config.json", "dataset_statistics.json", "config.json"):
        path = Path(folder) / file
        if path.is_file():
            content = read_json(path)
            found = _known_statistics(content.get("norm_stats", content), str(path), strict=False)
            if found:
                return found
    logger.warning("%s has no statistics: states and actions are not normalised", folder)
    return {}


def _known_statistics(content: Mapping[str, Any], source: str, strict: bool = True) -> dict[str, dict[str, Any]]:
    if "actions_mean" in content and "actions_std" in content:
        found = {"action": {"mean": content["actions_mean"], "std": content["actions_std"]}}
        if "state_mean" in content:
            found["state"] = {"mean": content["state_mean"], "std": content["state_std"]}
        return found
    named = {name: inner for name, inner in content.items() if isinstance(inner, Mapping) and "action" in inner}
    if len(named) > 1:  # OpenVLA: by the dataset's name
        raise InputError(
            f"{source}: statistics of {len(named)} datasets ({', '.join(sorted(named))}); write those of the "
            "dataset that matches the robot to a file, and set `statistics` to it"
        )
    if named:
        content = next(iter(named.values()))
    if isinstance(content.get("action"), Mapping):
        state = content.get("state", content.get("proprio"))
        action = dict(content["action"])
        keys = ("mean", "std", "q01", "q99", "mask")
        found = {"action": {key: action[key] for key in keys if key in action}}
        if isinstance(state, Mapping):
            found["state"] = {key: state[key] for key in keys if key in state}
        return found
    if strict:
        raise InputError(f"{source}: no statistics of `action`; it has {', '.join(map(str, content))}")
    return {}


def read_json(path: Path) -> dict[str, Any]:
    """Return the mapping in a JSON file of a pretrained model."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {_first_line(error)}") from None
    if not isinstance(found, dict):
        raise InputError(f"{path} must contain a mapping")
    return found


# ------------------------------------------------------------------------------------------------- value and base class


class ValueHead(nn.Sequential):
    """The value of features of the trunk; with `gradient` its loss trains the trunk too."""

    def __init__(self, features: int, gradient: bool, width: int = 256) -> None:
        super().__init__(nn.LayerNorm(features), nn.Linear(features, width), nn.GELU(), nn.Linear(width, 1))
        self.gradient = gradient
        nn.init.zeros_(self[-1].weight)  # type: ignore[arg-type]
        nn.init.zeros_(self[-1].bias)  # type: ignore[arg-type]

    def forward(self, features: Tensor) -> Tensor:
        """[B, F] → [B, 1]."""
        return super().forward(features.float() if self.gradient else features.detach().float())


class PretrainedVLA(StreamVLA):
    """Base class of adapters, which build a `backbone` from a folder and a new value head."""

    value_head: ValueHead
    backbone: Any
    reads_folder = True  # `load_vla_model` passes the folder, which has more files than weights

    def gathered_layers(self) -> list[nn.Module]:
        """The layers of the transformer, whose weights FSDP gathers one at a time."""
        models = [module for module in self.modules() if isinstance(module, transformers_module().PreTrainedModel)]
        names = {name for model in models for name in model._no_split_modules or ()}
        lists = [module for module in self.modules() if isinstance(module, nn.ModuleList)]
        return [layer for members in lists for layer in members if type(layer).__name__ in names]
