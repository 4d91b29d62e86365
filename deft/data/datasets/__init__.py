"""The one front for recorded data: `load_dataset(name_or_path)` finds it, sees which format it has, and loads it.

Each format is a module beside this file with `matches(path)`, which looks at content and raises nothing, and
`load(path, name, **options)`. Offline training calls this; so do users, as `deft.load_dataset`.
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
from deft.data.datasets.dataset import Dataset, Episode, VectorDataset
from deft.data.datasets.fetch import d4rl_url, fetch_dataset, shown_progress
from deft.data.datasets.hdf5 import is_hdf5, open_hdf5
from deft.data.datasets.views import RenamedDataset
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
MOST_LOOKED_AT = 20  # of what lies in a folder that is no dataset itself
MINARI_ID = r"[\w-]+(/[\w-]+)+-v\d+"
OWN_DATASET = r"(driving|reach|tabletop|carla)-(expert|random)-v\d+"  # names of what `deft collect` records


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

    `download` fetches a D4RL name or a Minari id that is not on this machine; `rename_streams` gives streams other
    names, as {new name: the dataset's name}; `trust_remote_code` allows the module of the environment that the dataset
    names to be imported; `options` are those of the format's `load`: `observation_keys` and `split` for robomimic, and
    so on.
    """
    return open_dataset(name_or_path, {"download": download, "rename_streams": rename_streams, **options})


def open_dataset(name_or_path: str | Path, options: Mapping[str, Any]) -> Dataset:
    """`load_dataset` with options that may come from a file: `trust_remote_code` is not one of them."""
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
    except Exception as error:  # whatever a damaged file makes of its reader
        raise InputError(f"{path}: damaged: {one_line(error)}") from error
    return RenamedDataset(dataset, names) if names else dataset


def dataset_folders() -> list[Path]:
    """Where a dataset is looked for by its name, in order."""
    own = [Path(folder) for folder in os.environ.get("DEFT_DATASETS", "").split(os.pathsep) if folder]
    home = Path.home()
    minari = Path(os.environ.get("MINARI_DATASETS_PATH") or home / ".minari" / "datasets")
    lerobot = Path(os.environ.get("HF_LEROBOT_HOME") or home / ".cache" / "huggingface" / "lerobot")
    return [*own, Path("datasets"), home / ".deft" / "datasets", home / ".d4rl" / "datasets", minari, lerobot]


def download_folder() -> Path:
    """Where downloads go: the first folder of DEFT_DATASETS, or `~/.deft/datasets`."""
    own = next((folder for folder in os.environ.get("DEFT_DATASETS", "").split(os.pathsep) if folder), None)
    return Path.home() / ".deft" / "datasets" if own is None else Path(own)


def find_dataset(name_or_path: str | Path, download: bool = False) -> tuple[Path, str]:
    """The file or folder of a dataset and the name it goes by; `download` as in `load_dataset`."""
    text = str(name_or_path)
    if not text.strip():
        raise InputError("a dataset needs a name or a path; none was given")
    given = Path(text).expanduser()
    # os.path, unlike Path, says False of a name too long for one.
    if not os.path.exists(given) and os.path.isdir(f"{given}-v0"):  # as `deft collect --out` names it
        given = given.with_name(f"{given.name}-v0")
    if os.path.exists(given):
        return given, given.resolve().name if given.is_dir() else given.stem
    folders = dataset_folders()
    if not given.is_absolute():
        # D4RL's own files write hopper-medium-v2 as hopper_medium-v2.hdf5.
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
    """Where was looked, and how to get the dataset."""
    looked = ", ".join(str(folder) for folder in folders)
    if re.fullmatch(MINARI_ID, text):
        advice = f"download=True (--download) fetches it, as does `minari download {text}`"
    elif url := d4rl_url(text):
        advice = f"`deft datasets fetch {text}` downloads it from {url}"
    elif own := re.fullmatch(OWN_DATASET, text):
        command = f"deft collect --env {own[1]} --policy {own[2]} --episodes 200 --out datasets/{text}"
        advice = f"it is recorded with `{command}`"
    elif re.fullmatch(r"[\w-]+-v\d+", text):
        advice = "`deft datasets fetch` downloads D4RL's datasets, such as hopper-medium-v2"
    else:
        advice = "LeRobot datasets: `hf download NAME --repo-type dataset --local-dir FOLDER`"
    return (
        f"dataset {text} was not found: no such path, nor in {looked} (DEFT_DATASETS adds folders){failure}; {advice}, "
        "or record one of your own with `deft collect`; of one that has moved, give the new place"
    )


def _format(module_name: str) -> ModuleType:
    """The module of a format, imported when first needed."""
    return importlib.import_module(f"deft.data.datasets.{module_name}")


def _loader_for(path: Path) -> ModuleType:
    """The module of the first format that recognises what the path holds."""
    module = _matching(path)
    if module is not None:
        return module
    if is_hdf5(path) or path.suffix in (".hdf5", ".h5"):
        open_hdf5(path).close()  # says what is wrong with a file that cannot be opened
    inside = sorted(path.iterdir()) if path.is_dir() else []
    datasets = [place.name for place in inside[:MOST_LOOKED_AT] if _matching(place) is not None]
    found = f"; a folder of datasets: give one of them ({', '.join(datasets[:5])})" if datasets else ""
    raise InputError(f"{path} is none of the formats that Deft reads: {', '.join(FORMATS.values())}{found}")


def _matching(path: Path) -> ModuleType | None:
    modules = map(_format, FORMATS)
    return next((module for module in modules if module.matches(path)), None)
