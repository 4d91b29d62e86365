"""Build a vision-language-action model, load its weights, and save them.

Called for policies with `name: vla`, and by users: `load_vla_model(model_path, model_class, model_config)`. A
file that is missing, damaged or of another model is an error.
"""

from __future__ import annotations

import difflib
import logging
import os
import pickle
import re
from collections.abc import Iterable, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import torch
from gymnasium import spaces
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from deft import trust
from deft.config.settings import VLAConfig
from deft.errors import InputError, RunError
from deft.models.vla.interface import as_vla_class, missing_methods
from deft.models.vla.spec import model_defaults, model_keywords
from deft.ownership import verify

logger = logging.getLogger(__name__)

ENTRY_POINT_GROUP = "deft.vla_models"
# The models that ship with Deft, by their short names and by the path that the documents' example gives one.
OWN_MODELS = {
    **dict.fromkeys(("gpt-vla", "vla_models.GPTVLAModel"), "deft.models.vla.gpt.GPTVLAModel"),
    "vla-tiny": "deft.models.vla.tiny.TinyVLAModel",
    "pi0": "deft.models.vla.pi0.Pi0VLA",
    "vlm": "deft.models.vla.vlm.VisionLanguageVLA",
    "openvla": "deft.models.vla.openvla.TokenVLA",
    "lerobot": "deft.models.vla.lerobot.LeRobotVLA",
    "act": "deft.models.vla.act.ACTVLA",
    "smolvla": "deft.models.vla.smolvla.SmolVLA",
    "pi05": "deft.models.vla.pi05.Pi05VLA",
    "diffusion-policy": "deft.models.vla.diffusion_policy.DiffusionPolicyVLA",
    "openvla-oft": "deft.models.vla.openvla_oft.OpenVLAOFT",
    "groot": "deft.models.vla.groot.GrootVLA",
}
SAFETENSORS_SUFFIX = ".safetensors"
TORCH_SUFFIXES = (".pth", ".pt")
WEIGHT_SUFFIXES = (SAFETENSORS_SUFFIX, *TORCH_SUFFIXES)
WRAPPER_KEYS = ("state_dict", "model")
NAMES_SHOWN = 3
SHIPPED = Path(__file__).parent / "weights"
PROVENANCE = "provenance.json"  # in the run directory of a policy that ships with Deft: how it was trained


def shipped_policy(name: str = "tabletop-pick") -> Path:
    """Return the run directory of a policy that ships with Deft; its `provenance.json` records how it was trained."""
    return SHIPPED / name


@trust.takes_remote_code
def load_vla_model(
    model_path: str | Path | None,
    model_class: str | type[nn.Module],
    model_config: Mapping[str, Any] | None = None,
    device: str | torch.device = "cpu",
    *,
    trust_remote_code: bool = False,
) -> nn.Module:
    """Build `model_class(**model_config)` with the weights of `model_path`, on `device`.

    `model_class` is a class, a dotted class path ("package.module.Class"), or the name of an entry point of the group
    `deft.vla_models`. `model_path` is a `.safetensors`, `.pth` or `.pt` file of tensors, whose keys and shapes must be
    the model's; None keeps new weights and logs a warning. Adapters of pretrained models (`pi0`, `vlm`, `openvla`,
    `openvla-oft`, `groot`, `lerobot`, `act`, `smolvla`, `pi05`, `diffusion-policy`) take a local folder in its place,
    with config, weights and tokenizer; `trust_remote_code` allows code in that folder to run.
    """
    if isinstance(model_class, str):
        trust.name(model_class)
    found_class = find_vla_class(model_class)
    path = None if model_path is None else Path(model_path)
    if path is not None and path.is_dir() and as_vla_class(found_class).reads_folder:
        return _to_device(build_vla_model(found_class, {**(model_config or {}), "folder": str(path)}), device)
    if path is not None:
        _check_weights_path(path)  # before the model is built, which may be slow
    model = build_vla_model(found_class, {} if model_config is None else model_config)
    if path is None:
        logger.warning("%s starts from new weights: no model_path was given", found_class.__name__)
    else:
        weights = read_weights(path)
        check_fit(model.state_dict(), weights, path, found_class.__name__)
        model.load_state_dict(weights)
    return _to_device(model, device)


def _to_device(model: nn.Module, device: str | torch.device) -> nn.Module:
    try:
        return model.to(device)
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"device {str(device)!r} cannot be used: {_first_line(error)}") from error


def load_vla_model_for(
    config: VLAConfig,
    observation_space: spaces.Space,
    action_space: spaces.Space,
    where: str,
    chunk_length: int = 1,
    weights_follow: bool = False,
) -> nn.Module:
    """Build the model of a config; keywords that the config does not set come from the spaces of `where`.

    `weights_follow`: weights of a checkpoint are loaded next, so the pretrained file is neither read nor needed.
    """
    if not isinstance(action_space, spaces.Box) or len(action_space.shape) != (1 if chunk_length == 1 else 2):
        raise InputError(f"policy.name: a VLA policy acts in a Box with one dimension; {where} has {action_space}")
    if not isinstance(observation_space, spaces.Dict):
        raise InputError(
            f"policy.name: a VLA policy reads named streams; {where} observes {observation_space}: use an environment "
            "with a Dict of them (env.kwargs: observation=vla for reach, observation=images for the tabletop)"
        )
    model_class = find_vla_class(config.model_class)
    given = config.model_config
    keywords = model_defaults(model_class, given, observation_space, action_space, chunk_length) | given
    if weights_follow:
        if as_vla_class(model_class).reads_folder and config.model_path is not None:
            if not Path(config.model_path).exists():
                raise InputError(
                    f"policy.vla_config.model_path: the folder {config.model_path} does not exist; a run needs config "
                    "and tokenizer of the model that it started from: put the folder back, or change model_path in the "
                    "config.yaml of the run"
                )
            keywords |= {"folder": config.model_path, "load_weights": False}
        return build_vla_model(model_class, keywords)
    return load_vla_model(config.model_path, model_class, keywords)


def save_vla_model(model: nn.Module, path: str | Path) -> None:
    """Write a model's weights as `.safetensors`, `.pth` or `.pt`; a file already there is replaced in one step."""
    path = Path(path)
    _check_suffix(path)
    # Cloned: tensors that share memory could not be written to a safetensors file.
    weights = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in model.state_dict().items()}
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == SAFETENSORS_SUFFIX:
            save_file(weights, unfinished)
        else:
            torch.save(weights, unfinished)
        os.replace(unfinished, path)
    except (OSError, RuntimeError, SafetensorError) as error:
        unfinished.unlink(missing_ok=True)
        raise RunError(f"weights could not be written to {path}: {_first_line(error)}") from error


def find_vla_class(model_class: str | type[nn.Module]) -> type[nn.Module]:
    """The class behind a dotted path or an entry point, checked for the methods that a VLA model needs."""
    found: Any = _import_class(model_class) if isinstance(model_class, str) else model_class
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise InputError(f"model_class {model_class!r} is {found!r}; it must be a subclass of torch.nn.Module")
    missing = missing_methods(found)
    if missing:
        raise InputError(f"model_class {found.__name__} lacks {', '.join(missing)}: see deft.VLAModelInterface")
    return found


def _import_class(name: str) -> Any:
    registered = OWN_MODELS | {e.name: e.value.replace(":", ".") for e in entry_points(group=ENTRY_POINT_GROUP)}
    # If the module exists, the name is a path.
    if name in registered and ("." not in name or not trust.exists(name)):
        name = registered[name]
    module_name, _, class_name = name.rpartition(".")
    hint = _registered_hint(name, class_name, {entry: path.rpartition(".")[2] for entry, path in registered.items()})
    if not module_name:
        raise InputError(f"model_class {name!r} is neither a registered model nor a path 'package.module.Class'{hint}")
    try:
        module = trust.import_module(module_name, name, "model_class", "--model")
    except (InputError, KeyboardInterrupt):
        raise
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module_name}.".startswith(f"{error.name}."):
            raise InputError(
                f"model_class {name!r}: there is no module {error.name!r} (is its folder on PYTHONPATH?){hint}"
            ) from error
        raise InputError(f"model_class {name!r}: importing {module_name!r} failed: {_first_line(error)}") from error
    except BaseException as error:  # any error of a user's module, and sys.exit()
        raise InputError(
            f"model_class {name!r}: importing {module_name!r} failed: {type(error).__name__}: {_first_line(error)}"
        ) from error
    found = getattr(module, class_name, None)
    if found is None:
        classes = [key for key, value in vars(module).items() if isinstance(value, type)]
        near_class = _nearest(class_name, classes)
        hint = f"; did you mean '{module_name}.{near_class}'?" if near_class else hint
        raise InputError(f"model_class {name!r}: module {module_name!r} has no class {class_name!r}{hint}")
    return found


def _registered_hint(name: str, class_name: str, registered: dict[str, str]) -> str:
    """The registered model that was meant: one with this class, or one spelled alike; else all of them."""
    same_class = [entry for entry, attribute in registered.items() if attribute == class_name]
    nearest = same_class[0] if same_class else _nearest(name, registered)
    if nearest is not None:
        return f"; did you mean {nearest!r}?"
    return f"; registered models: {', '.join(sorted(registered)) or 'none'}"


def build_vla_model(model_class: type[nn.Module], model_config: Mapping[str, Any]) -> nn.Module:
    """`model_class(**model_config)` with new weights; an unknown keyword is an error."""
    name = model_class.__name__
    if not isinstance(model_config, Mapping):
        raise InputError(f"model_config must hold the keywords of {name}; it is {model_config!r}")
    keywords, accepts_any = model_keywords(model_class)
    for keyword in model_config:
        if keyword not in keywords and not accepts_any:
            nearest = _nearest(keyword, keywords)
            hint = f"did you mean {nearest!r}?" if nearest else f"allowed: {', '.join(keywords)}"
            raise InputError(f"model_config.{keyword} is not a keyword of {name}; {hint}")
    try:
        return model_class(**model_config)
    except (TypeError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{name} cannot be built from model_config: {_first_line(error)}") from error


def _check_suffix(path: Path) -> None:
    if path.suffix not in WEIGHT_SUFFIXES:
        raise InputError(f"weights file {path} must end in {', '.join(WEIGHT_SUFFIXES)}")


def _check_weights_path(path: Path) -> None:
    if path.is_dir():
        inside = sorted(entry.name for entry in path.iterdir() if entry.suffix in WEIGHT_SUFFIXES)
        hint = f"name one of {', '.join(inside[:NAMES_SHOWN])}" if inside else "name a weights file"
        raise InputError(f"model_path {path} is a folder; {hint}")
    if not path.exists():
        raise InputError(f"model_path {path} does not exist; leave model_path out to start from new weights")
    _check_suffix(path)


def check_fit(own: Mapping[str, Tensor], weights: Mapping[str, Tensor], path: Path, what: str) -> None:
    """Raise an error where keys or shapes of a file differ from the model's."""
    shapes = [
        f"{name} is {list(weights[name].shape)} in the file and {list(own[name].shape)} in the model"
        for name in own
        if name in weights and weights[name].shape != own[name].shape
    ]
    problems = {
        "missing": [name for name in own if name not in weights],
        "unexpected": [name for name in weights if name not in own],
        "of another shape": shapes,
    }
    found = [f"{len(names)} {kind} ({_some(names)})" for kind, names in problems.items() if names]
    if found:
        raise InputError(f"{path} does not fit {what}: keys {', '.join(found)}")


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a weights file, by name, on the CPU; an error if a checkpoint's manifest lists another hash."""
    verify(path)
    try:
        if path.suffix == SAFETENSORS_SUFFIX:
            return load_file(path, device="cpu")
        content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        foreign = re.search(r"(?:GLOBAL|class) ([\w.]+)", str(error))
        if foreign is None:
            raise InputError(f"{path} cannot be read as weights: it is damaged or no torch file") from error
        raise InputError(
            f"{path} holds code ({foreign[1]}), not tensors alone, and was not opened: save model.state_dict()"
        ) from error
    except (OSError, EOFError, RuntimeError, ValueError, SafetensorError) as error:
        raise InputError(f"{path} cannot be read as weights: {_first_line(error)}") from error
    if isinstance(content, Mapping):
        for key in WRAPPER_KEYS:
            if isinstance(content.get(key), Mapping):
                content = content[key]
                break
    if not isinstance(content, Mapping) or not all(isinstance(value, Tensor) for value in content.values()):
        raise InputError(
            f"{path} holds no weights: expected tensors by name, alone or under {' or '.join(map(repr, WRAPPER_KEYS))}"
        )
    return dict(content)


def read_weight_files(folder: Path) -> tuple[Path, dict[str, Tensor]]:
    """The tensors of `model.safetensors`, or of several files `model-….safetensors`, and where they are."""
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        raise InputError(f"{folder}: there is no model.safetensors in it")
    weights = {name: value for file in files for name, value in read_weights(file).items()}
    return files[0] if len(files) == 1 else folder, weights


def _nearest(name: str, options: Iterable[str]) -> str | None:
    """The option spelled most like `name`, if one is near."""
    return next(iter(difflib.get_close_matches(name, list(options), n=1)), None)


def _some(names: list[str]) -> str:
    more = len(names) - NAMES_SHOWN
    return ", ".join(names[:NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or "it is empty or cut off"
