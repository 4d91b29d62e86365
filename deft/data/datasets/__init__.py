"""`load_dataset(name_or_path)` finds recorded data, recognises its format and loads it.

Each format is a module in this folder with two functions: `matches(path)`, which examines the content and raises no
error, and `load(path, name, **options)`. Offline training calls this; users call `deft.load_dataset`.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from deft import trust
from deft.data.datasets.dataset import Dataset, Episode, RenamedDataset, VectorDataset
from deft.data.datasets.fetch import d4rl_url, fetch_dataset, shown_progress
from deft.data.datasets.hdf5 import is_hdf5, open_hdf5
from deft.errors import DeftError, InputError, one_line

__all__ = [
    "Dataset",
    "Episode",
    "VectorDataset",
    "dataset_folders",
    "download_folder",
    "find_dataset",
    "load_dataset",
    "open_dataset",
]

FORMATS = {
    "minari": "Minari folder",
    "lerobot": "LeRobot folder",
    "robomimic": "robomimic hdf5",
    "d4rl": "D4RL hdf5",
    "npz": "folder of npz episodes",
}
MAX_EXAMINED = 20  # entries of a folder that is not a dataset itself
MINARI_ID = r"[\w-]+(/[\w-]+)+-v\d+"
OWN_DATASET = r"(driving|reach|tabletop|carla)-(expert|random)-v\d+"  # names in the documentation of `deft collect`


@trust.takes_remote_code
def load_dataset(
    name_or_path: str | Path,
    download: bool = False,
    rename_streams: Mapping[str, str] | None = None,
    *,
    trust_remote_code: bool = False,
    **options: Any,
) -> Dataset:
    """Load recorded episodes by path, by D4RL name (`hopper-medium-v2`) or by Minari id (`mujoco/hopper/medium-v0`).

    `download` fetches a D4RL name or a Minari id that is not on this machine. `rename_streams` renames streams:
    {new name: the dataset's name}. `trust_remote_code` allows importing the module of the environment that the dataset
    names. `options` are those of the format's `load`, for example `observation_keys` and `split` for robomimic.
    """
    return open_dataset(name_or_path, {"download": download, "rename_streams": rename_streams, **options})


def open_dataset(name_or_path: str | Path, options: Mapping[str, Any]) -> Dataset:
    """Load a dataset with options that may come from a file, which must not contain `trust_remote_code`."""
    options = dict(options)
    path, name = find_dataset(name_or_path, options.pop("download", False))
    names = options.pop("rename_streams", None) or {}
    loader = _loader_for(path)
    parameters = inspect.signature(loader.load).parameters
    allowed = [*parameters][2:]
    if unknown := sorted(options.keys() - set(allowed)):
        known = ", ".join(allowed) or "none"
        raise InputError(f"{path} has no loading option {', '.join(unknown)}; its format has: {known}")
    for option, value in options.items():
        if parameters[option].annotation in (bool, "bool") and not isinstance(value, bool):
            raise InputError(f"{option}: {value!r} is not true or false")
    try:
        dataset: Dataset = loader.load(path, name, **options)
    except DeftError:
        raise
    except Exception as error:  # a damaged file can cause any error in its reader
        raise InputError(f"{path}: damaged: {one_line(error)}") from error
    return RenamedDataset(dataset, names) if names else dataset


def dataset_folders() -> list[Path]:
    """Return the folders in which a dataset is searched by its name, in order."""
    home = Path.home()
    minari = Path(os.environ.get("MINARI_DATASETS_PATH") or home / ".minari" / "datasets")
    lerobot = Path(os.environ.get("HF_LEROBOT_HOME") or home / ".cache" / "huggingface" / "lerobot")
    return [
        *_own_folders(),
        Path("datasets"),
        home / ".deft" / "datasets",
        home / ".d4rl" / "datasets",
        minari,
        lerobot,
    ]


def download_folder() -> Path:
    """Return the folder for downloads: the first one of DEFT_DATASETS, or `~/.deft/datasets`."""
    return [*_own_folders(), Path.home() / ".deft" / "datasets"][0]


def _own_folders() -> list[Path]:
    return [Path(folder) for folder in os.environ.get("DEFT_DATASETS", "").split(os.pathsep) if folder]


def find_dataset(name_or_path: str | Path, download: bool = False) -> tuple[Path, str]:
    """Return the file or folder of a dataset and its name; `download` is that of `load_dataset`."""
    text = str(name_or_path)
    if not text.strip():
        raise InputError("a dataset needs a name or a path; none was given")
    given = Path(text).expanduser()
    # os.path.exists, unlike Path.exists, returns False for a name that is too long.
    if not os.path.exists(given) and os.path.isdir(f"{given}-v0"):  # as `deft collect --out` names it
        given = given.with_name(f"{given.name}-v0")
    if os.path.exists(given):
        return given, given.resolve().name if given.is_dir() else given.stem
    folders = dataset_folders()
    if not given.is_absolute():
        # D4RL's file of hopper-medium-v2 is hopper_medium-v2.hdf5.
        stem, dash, version = text.rpartition("-v")
        spellings = [text, f"{text}.hdf5", f"{stem.replace('-', '_')}{dash}{version}.hdf5"]
        for folder in folders:
            for spelling in spellings:
                if os.path.exists(folder / spelling):
                    return folder / spelling, text.removesuffix(".hdf5")
    failure = ""
    if download and d4rl_url(text) is not None:
        with shown_progress(text) as progress:
            found = fetch_dataset(text, download_folder(), progress=progress)
        return Path(found.dataset), text
    if download and re.fullmatch(MINARI_ID, text):
        try:
            return _format("minari").download(text), text
        except InputError as error:
            failure = f"; {error}"
    raise InputError(_not_found(text, folders, failure))


def _not_found(text: str, folders: list[Path], failure: str) -> str:
    """Return the message about a missing dataset: where it was searched, and how to get it."""
    searched = ", ".join(str(folder) for folder in folders)
    if re.fullmatch(MINARI_ID, text):
        advice = f"download=True (--download) fetches it, as does `minari download {text}`"
    elif url := d4rl_url(text):
        advice = f"`deft datasets fetch {text}` downloads it from {url}"
    elif own := re.fullmatch(OWN_DATASET, text):
        command = f"deft collect --env {own[1]} --policy {own[2]} --episodes 200 --out datasets/{text}"
        advice = f"record it with `{command}`"
    elif re.fullmatch(r"[\w-]+-v\d+", text):
        advice = "`deft datasets fetch` downloads D4RL's datasets, such as hopper-medium-v2"
    else:
        advice = "LeRobot datasets: `hf download NAME --repo-type dataset --local-dir FOLDER`"
    return (
        f"dataset {text} was not found: there is no such path, and it is not in {searched} (DEFT_DATASETS adds "
        f"folders){failure}; {advice}, or record your own with `deft collect`; if it was moved, give its new path"
    )


def _format(module_name: str) -> ModuleType:
    """Import the module of a format."""
    return importlib.import_module(f"deft.data.datasets.{module_name}")


def _loader_for(path: Path) -> ModuleType:
    """Return the module of the first format that recognises the path."""
    module = _matching(path)
    if module is not None:
        return module
    if is_hdf5(path) or path.suffix in (".hdf5", ".h5"):
        open_hdf5(path).close()  # raises an error for a file that cannot be opened
    inside = sorted(path.iterdir()) if path.is_dir() else []
    datasets = [entry.name for entry in inside[:MAX_EXAMINED] if _matching(entry) is not None]
    found = f"; it is a folder of datasets: give one of them ({', '.join(datasets[:5])})" if datasets else ""
    raise InputError(f"{path} has none of the formats that Deft reads: {', '.join(FORMATS.values())}{found}")


def _matching(path: Path) -> ModuleType | None:
    modules = map(_format, FORMATS)
    return next((module for module in modules if module.matches(path)), None)
