"""Read the folder of a LeRobot policy without the LeRobot package: config, statistics, cameras and weights.

The native adapters of LeRobot's policies (`act`, `smolvla`, `pi05`, `diffusion-policy`) call this. A folder has
`config.json` and `model.safetensors`. Statistics are in the files of its processors (LeRobot 0.4 and newer) or among
the weights (older).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from deft.errors import InputError
from deft.models.vla.experts import resize_with_padding
from deft.models.vla.loading import check_fit, read_weights
from deft.models.vla.pretrained import read_json, read_statistics
from deft.models.vla.spec import FolderSpec, ProprioSpec
from deft.models.vla.streams import Observations, Statistics, check_images, read_stream

logger = logging.getLogger(__name__)

STATE, ACTION = "observation.state", "action"
WEIGHTS = "model.safetensors"
PROCESSORS = ("policy_preprocessor.json", "policy_postprocessor.json")
NORMALIZERS = ("normalizer_processor", "unnormalizer_processor")
# Steps of processors that the adapters compute themselves, or that do not change a value.
KNOWN_STEPS = frozenset(
    (
        *NORMALIZERS, "rename_observations_processor", "to_batch_processor", "device_processor", "tokenizer_processor",
        "smolvla_new_line_processor", "pi0_new_line_processor", "pi05_prepare_state_tokenizer_processor_step",
    )
)  # fmt: skip
OPTIONAL_STEPS = ("relative_actions_processor", "absolute_actions_processor")  # off unless `enabled`
BOUNDS = {"MIN_MAX": ("min", "max"), "QUANTILES": ("q01", "q99"), "QUANTILE10": ("q10", "q90")}
OLD_NORMALIZERS = ("normalize_inputs.", "normalize_targets.", "unnormalize_outputs.")

IMAGENET = {"mean": torch.tensor([0.485, 0.456, 0.406]), "std": torch.tensor([0.229, 0.224, 0.225])}

Weights = Mapping[str, Tensor]


@dataclass(kw_only=True)
class LeRobotFolderSpec(ProprioSpec, FolderSpec):
    """A policy in LeRobot's layout. `cameras` maps Deft's streams to the cameras of the policy."""

    cameras: Mapping[str, str] | None = None


@dataclass(frozen=True)
class Feature:
    """An input or output of a policy: VISUAL, STATE, ENV or ACTION, and its shape."""

    kind: str
    shape: tuple[int, ...]


@dataclass
class LeRobotFolder:
    """What a LeRobot policy reads and returns, its settings, and its statistics by feature."""

    path: Path | None
    config: dict[str, Any]
    inputs: dict[str, Feature]
    outputs: dict[str, Feature]
    modes: dict[str, str]
    statistics: dict[str, dict[str, Tensor]] = field(default_factory=dict)

    @property
    def cameras(self) -> dict[str, Feature]:
        """The cameras by name, in the order of the config."""
        return {name: feature for name, feature in self.inputs.items() if feature.kind == "VISUAL"}

    @property
    def state_dim(self) -> int | None:
        """Number of dims of the robot's state; None: the policy reads none."""
        feature = self.inputs.get(STATE)
        return None if feature is None else feature.shape[0]

    def normalizer(self, name: str, size: int, given: Mapping[str, Any] | None = None) -> Statistics:
        """The normalisation of the state or the action; `given` replaces the statistics of the folder."""
        if given is not None:
            return Statistics(size, given, name)
        return Statistics(size, self.mean_and_deviation(name), name)

    def mean_and_deviation(self, name: str) -> dict[str, Tensor] | None:
        """`mean` and `std` with which the policy normalises a feature as (x − mean) / std; None: it does not."""
        feature = self.inputs.get(name) or self.outputs[name]
        mode, known = self.modes.get(feature.kind, "IDENTITY"), self.statistics.get(name, {})
        if mode == "IDENTITY" or not known:
            return None
        if mode != "MEAN_STD" and mode not in BOUNDS:
            raise InputError(f"{self.path}: {name} is normalised by {mode}; known: MEAN_STD, {', '.join(BOUNDS)}")
        keys = BOUNDS.get(mode, ("mean", "std"))
        if missing := [key for key in keys if key not in known]:
            raise InputError(f"{self.path}: {name} is normalised by {mode}; its statistics lack {', '.join(missing)}")
        first, second = (known[key].float().flatten() for key in keys)
        if mode == "MEAN_STD":
            return {"mean": first, "std": second}
        # 2 (x − low) / (high − low) − 1; a constant dim becomes −1, as in LeRobot
        width = (second - first) / 2
        constant = width == 0
        return {"mean": torch.where(constant, first + 1.0, first + width), "std": torch.where(constant, 1.0, width)}


def read_lerobot_folder(
    spec: LeRobotFolderSpec, kind: str, defaults: Mapping[str, Any], model_class: str | None = None
) -> LeRobotFolder:
    """Read the folder of a policy of type `kind`, or describe a new policy with the streams of `spec`.

    `defaults` are LeRobot's settings of this type; those of the folder, or of `spec.architecture`, replace them.
    `model_class` is Deft's name of the type, if it is another one.
    """
    if spec.folder is None:
        return _new_policy(spec, defaults)
    path = Path(spec.folder)
    if spec.architecture is not None:
        raise InputError(f"architecture: the folder {path} has one; set either the folder (model_path) or architecture")
    if not (path / "config.json").is_file():
        raise InputError(f"{path}: no LeRobot policy: there is no config.json in it")
    config = read_json(path / "config.json")
    if config.get("type") != kind:
        has = f"has the type {config['type']!r}" if "type" in config else "has no 'type'"
        raise InputError(
            f"{path / 'config.json'} {has}; the model class {model_class or kind} needs a LeRobot policy of type "
            f"{kind!r}"
        )
    inputs, outputs = (_features(config, key, path) for key in ("input_features", "output_features"))
    if ACTION not in outputs:
        raise InputError(f"{path / 'config.json'}: output_features has no {ACTION!r}")
    found = LeRobotFolder(path, {**defaults, **config}, inputs, outputs, dict(config.get("normalization_mapping", {})))
    _read_processors(found)
    if not found.statistics and (path / WEIGHTS).is_file():
        found.statistics = _statistics_in_weights(path / WEIGHTS, {**inputs, **outputs})
    if not found.statistics and spec.statistics is None:
        logger.warning("%s has no statistics: states and actions are not normalised", path)
    return found


def _new_policy(spec: LeRobotFolderSpec, defaults: Mapping[str, Any]) -> LeRobotFolder:
    given = dict(spec.architecture or {})
    if unknown := sorted(set(given) - set(defaults)):
        raise InputError(f"architecture.{unknown[0]} is no setting of the policy; known: {', '.join(sorted(defaults))}")
    inputs = {key: Feature("VISUAL", ()) for key in spec.image_keys}
    if spec.proprio_key is not None:
        inputs[STATE] = Feature("STATE", (spec.proprio_dim,))
    return LeRobotFolder(None, {**defaults, **given}, inputs, {ACTION: Feature("ACTION", (spec.action_dim,))}, {})


def _features(config: Mapping[str, Any], key: str, path: Path) -> dict[str, Feature]:
    try:
        return {name: Feature(str(one["type"]), tuple(one["shape"])) for name, one in config[key].items()}
    except (KeyError, TypeError, AttributeError):
        raise InputError(
            f"{path / 'config.json'}: {key} must map names to a type and a shape; convert a policy of a LeRobot "
            "older than 0.2 with LeRobot's own scripts"
        ) from None


def _read_processors(folder: LeRobotFolder) -> None:
    """Add the statistics and normalisation modes of the processor files; reject a step that changes values."""
    assert folder.path is not None
    for file in PROCESSORS:
        path = folder.path / file
        if not path.is_file():
            continue
        for step in read_json(path).get("steps", ()):
            name, settings = step.get("registry_name"), step.get("config") or {}
            if name in OPTIONAL_STEPS and not settings.get("enabled", False):
                continue
            if name not in KNOWN_STEPS:
                raise InputError(
                    f"{path}: the adapter does not know the step {name or step.get('class')!r}; use the model class "
                    "lerobot, which runs LeRobot's own processors"
                )
            if name in NORMALIZERS:
                folder.modes |= settings.get("norm_map", {})
                for key, value in _read_state(folder.path, step.get("state_file"), path).items():
                    feature, _, statistic = key.rpartition(".")
                    folder.statistics.setdefault(feature, {})[statistic] = value


def _read_state(folder: Path, file: Any, where: Path) -> Weights:
    if file is None:
        return {}
    if Path(str(file)).name != file or not (folder / file).is_file():
        raise InputError(f"{where}: its statistics are in {file}, which is not in the folder")
    return read_weights(folder / file)


def _statistics_in_weights(path: Path, features: Mapping[str, Feature]) -> dict[str, dict[str, Tensor]]:
    """The statistics that LeRobot before 0.4 saved among the weights: `normalize_inputs.buffer_….mean`."""
    names = {name.replace(".", "_"): name for name in features}
    found: dict[str, dict[str, Tensor]] = {}
    for key, value in read_weights(path).items():
        if key.startswith(OLD_NORMALIZERS):
            buffer, _, statistic = key.partition(".buffer_")[2].rpartition(".")
            if buffer in names:
                found.setdefault(names[buffer], {})[statistic] = value
    return found


# ------------------------------------------------------------------------------------------------- streams and weights


def match_cameras(
    image_keys: Sequence[str], wanted: Sequence[str], cameras: Mapping[str, str] | None, optional: bool = False
) -> dict[str, str]:
    """Map streams to cameras of the policy by their full name or its last part; a single one needs no name.

    `optional`: the policy accepts missing cameras, but at least one must be there.
    """
    if cameras is not None:
        found = dict(cameras)
    elif len(wanted) == len(image_keys) == 1:
        found = {image_keys[0]: wanted[0]}
    else:
        found = {key: name for key in image_keys for name in wanted if key in (name, name.rpartition(".")[2])}
    unknown = [name for name in found.values() if name not in wanted]
    missing = [name for name in wanted if name not in found.values()]
    if unknown or (missing and not (optional and found)):
        raise InputError(
            f"the policy reads {', '.join(wanted)}; the streams {', '.join(image_keys)} do not include "
            f"{', '.join(missing)}: use --rename_streams, or set cameras in model_config to {{stream: name}}"
        )
    return found


class CameraImages(nn.Module):
    """Images of the cameras of a policy: floats in [0, 1], normalised by its statistics, in the size of the policy.

    With `padded` (height, width) they are resized with their aspect ratio and padded with zeros, `centered` or at the
    left and the top; otherwise they are scaled to the size in the config. A new policy has no size of its own, and
    without `padded` the statistics of ImageNet.
    """

    def __init__(
        self,
        folder: LeRobotFolder,
        cameras: Mapping[str, str],
        padded: tuple[int, int] | None = None,
        centered: bool = False,
    ) -> None:
        super().__init__()
        self.padded, self.centered = padded, centered
        self.streams = {name: key for key, name in cameras.items()}
        self.sizes = {name: one.shape[1:] for name, one in folder.cameras.items() if name in self.streams}
        for index, name in enumerate(self.sizes):
            new = IMAGENET if padded is None else None
            known = folder.mean_and_deviation(name) if folder.path is not None else new
            for statistic, otherwise in (("mean", 0.0), ("std", 1.0)):
                values = torch.full((3,), otherwise) if known is None else known[statistic]
                self.register_buffer(f"{statistic}{index}", values.view(3, 1, 1), persistent=False)

    @property
    def image_keys(self) -> tuple[str, ...]:
        """The streams of the cameras, in the order of the policy."""
        return tuple(self.streams[name] for name in self.sizes)

    def forward(self, observations: Observations) -> list[Tensor]:
        """float32 [B, 3, h, w] of each camera, in the order of the policy."""
        return [self._camera(observations, index, name) for index, name in enumerate(self.sizes)]

    def _camera(self, observations: Observations, index: int, name: str) -> Tensor:
        key = self.streams[name]
        pixels = check_images(read_stream(observations, key), key).float() / 255.0
        if self.padded is None and self.sizes[name] and pixels.shape[2:] != self.sizes[name]:
            pixels = functional.interpolate(pixels, self.sizes[name], mode="bilinear", antialias=True)
        pixels = (pixels - self.get_buffer(f"mean{index}")) / self.get_buffer(f"std{index}")
        return pixels if self.padded is None else resize_with_padding(pixels, self.padded, self.centered)


def check_dims(folder: LeRobotFolder, spec: LeRobotFolderSpec) -> None:
    """Raise an error if the state or the actions of the environment do not fit the policy."""
    wanted = folder.outputs[ACTION].shape[0]
    if wanted != spec.action_dim:
        raise InputError(f"{folder.path}: the policy has actions of {wanted} dims, the environment {spec.action_dim}")
    if folder.state_dim is None:
        return
    if spec.proprio_key is None:
        raise InputError(f"{folder.path}: the policy reads {STATE}, and the environment has no vector: set proprio_key")
    if folder.state_dim != spec.proprio_dim:
        raise InputError(
            f"{folder.path}: {STATE} has {folder.state_dim} dims, and {spec.proprio_key!r} of the environment has "
            f"{spec.proprio_dim}; set proprio_key in model_config to the stream that the policy was trained on"
        )


def given_statistics(spec: FolderSpec) -> dict[str, dict[str, Any]]:
    """The `state` and `action` statistics of `model_config`, which replace those of the folder."""
    return {} if spec.statistics is None else read_statistics(None, spec.statistics)


def load_published(
    module: nn.Module,
    folder: LeRobotFolder,
    to_published: Callable[[Weights], dict[str, Tensor]],
    from_published: Callable[[Weights], dict[str, Tensor]],
    clean: Callable[[Weights], dict[str, Tensor]] = dict,
) -> None:
    """Load `model.safetensors` into `module`, whose names the two functions convert to LeRobot's and back.

    Keys and shapes must be those of LeRobot's policy, after `clean` has removed weights that are never used.
    """
    assert folder.path is not None
    path = folder.path / WEIGHTS
    if not path.is_file():
        raise InputError(f"{folder.path}: there is no {WEIGHTS} in it")
    weights = {key: value for key, value in read_weights(path).items() if not key.startswith(OLD_NORMALIZERS)}
    weights = clean(weights)
    check_fit(to_published(module.state_dict()), weights, path, f"a LeRobot policy of type {folder.config['type']!r}")
    module.load_state_dict(from_published(weights))


def with_prefix(state: Weights, prefix: str) -> dict[str, Tensor]:
    """Add a prefix to every name."""
    return {prefix + name: value for name, value in state.items()}


def without_prefix(state: Weights, prefix: str) -> dict[str, Tensor]:
    """Remove a prefix from every name."""
    return {name.removeprefix(prefix): value for name, value in state.items()}
