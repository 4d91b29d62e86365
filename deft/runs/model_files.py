"""The files that a pretrained VLA model is rebuilt from beside its weights: config, tokenizer and statistics.

The config of a run names them by absolute paths. `deft export` copies them into the folder that it writes, and
`deft.evaluation.evaluate` finds them there.
"""

from __future__ import annotations

import fnmatch
import shutil
from collections.abc import Mapping
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file

from deft.config.loading import Config, replace
from deft.config.settings import OfflineRunConfig, RunConfig
from deft.errors import InputError
from deft.models.vla.lerobot_folder import OLD_NORMALIZERS
from deft.models.vla.pretrained import BYTES

FOLDER = "model_files"  # in a folder of `deft export`
KEYWORDS = ("vlm_folder", "tokenizer", "statistics")  # of model_config, which may name a folder or a file
WEIGHTS = ("model*.safetensors", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.gguf", "*.h5", "*.msgpack", "*.onnx")
LARGEST_STATISTICS = 10 * 2**20  # bytes; a larger file of tensors contains weights, whatever its name


def with_absolute_paths(config: Config) -> Config:
    """Return the config of a run with absolute paths of the model's files, so that any working directory will do."""
    return _with_paths(config, {name: str(path.absolute()) for name, path in _named(config).items() if path.exists()})


def export_files(config: Config, out: Path) -> Config:
    """Copy the model's files, without its weights, and return the config with their paths in the folder."""
    paths = {}
    for name, path in _named(config).items():
        if path.is_dir():
            _copy_folder(path, out / FOLDER / name)
        elif path.is_file() and name != "model_path":  # of a weights file nothing is read again
            (out / FOLDER / name).mkdir(parents=True)
            shutil.copyfile(path, out / FOLDER / name / path.name)
        else:
            continue
        paths[name] = f"{FOLDER}/{name}" if path.is_dir() else f"{FOLDER}/{name}/{path.name}"
    return _with_paths(config, paths)


def find_files(config: Config, out: Path) -> Config:
    """Return the config of an exported folder with the paths of the files in it."""
    inside = {name: path for name, path in _named(config).items() if path.parts[:1] == (FOLDER,)}
    return _with_paths(config, {name: str((out / path).absolute()) for name, path in inside.items()})


def _named(config: RunConfig | OfflineRunConfig) -> dict[str, Path]:
    """Return the files and folders that the settings of a VLA model name, by setting."""
    vla = config.policy.vla_config
    if vla is None:
        return {}
    named = {"model_path": vla.model_path, **{name: vla.model_config.get(name) for name in KEYWORDS}}
    return {name: Path(value) for name, value in named.items() if isinstance(value, str) and value != BYTES}


def _with_paths(config: Config, paths: Mapping[str, str]) -> Config:
    vla = config.policy.vla_config
    if vla is None or not paths:
        return config
    keywords = {name: path for name, path in paths.items() if name != "model_path"}
    section = "policy.vla_config"
    changes = {f"{section}.model_config": {**vla.model_config, **keywords}}
    return replace(config, **changes, **{f"{section}.model_path": paths.get("model_path", vla.model_path)})


def _copy_folder(source: Path, target: Path) -> None:
    """Copy the files of a model; its weights are replaced by empty files, whose names tell which parts it has."""
    for file in sorted(source.rglob("*")):
        inside = file.relative_to(source)
        if not file.is_file() or any(part.startswith(".") for part in inside.parts):
            continue
        copy = target / inside
        copy.parent.mkdir(parents=True, exist_ok=True)
        is_tensors = file.suffix == ".safetensors"
        is_large = is_tensors and file.stat().st_size > LARGEST_STATISTICS
        if not is_large and not any(fnmatch.fnmatch(file.name, pattern) for pattern in WEIGHTS):
            shutil.copyfile(file, copy)
        elif is_tensors:
            _copy_statistics(file, copy)
        else:
            copy.touch()


def _copy_statistics(file: Path, copy: Path) -> None:
    """Copy the statistics among the weights, where LeRobot before 0.4 saved them."""
    try:
        with safe_open(file, "pt") as weights:
            kept = {name: weights.get_tensor(name) for name in weights.keys() if name.startswith(OLD_NORMALIZERS)}  # noqa: SIM118
    except Exception as error:  # safetensors has its own class for damaged files
        raise InputError(f"{file}: damaged or cannot be read: {error}; restore the folder of the model") from error
    save_file(kept, copy)
