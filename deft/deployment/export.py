"""`deft export`: the policy of a run for other programs, as safetensors, a torch.export program or ONNX.

A program is the deterministic policy for one observation (a batch of 1), with normalisation, action scale and clipping
inside. It is compared with the policy on random observations before it is written.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from safetensors.torch import save_file
from tensordict import TensorDict
from torch import Tensor, nn

from deft import schema
from deft.config.deployment_settings import ExportConfig
from deft.config.loading import write_config
from deft.deployment.description import describe
from deft.errors import InputError, RunError, one_line
from deft.evaluation import evaluate
from deft.evaluation.loaded_policy import LoadedPolicy, load_policy
from deft.models.encoders import is_image
from deft.models.policy import MODE
from deft.runs import model_files
from deft.runs.checkpoint import MODEL_SAFETENSORS, load_model
from deft.runs.directory import CONFIG_FILE
from deft.runs.policy_spaces import PolicySpaces

SCHEMA, PROGRAM, ONNX = "schema.json", "policy.pt2", "policy.onnx"
NUM_CHECKS = 5  # random observations on which a program is compared with the policy
TOLERANCE = 1e-4  # largest difference, in half ranges of an action
INSTEAD = "use --format safetensors, or deft serve"


def export(config: ExportConfig) -> Mapping[str, Any]:
    """Write the policy of a run to a folder, completely or not at all, and return what was written."""
    check_installed(config.format)
    out = Path(config.out or f"{Path(config.path).resolve().name}-{config.format}")
    if os.path.lexists(out):
        raise InputError(f"{out}: exists; give another folder with --out")
    policy = load_policy(config.path, device="cpu")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    except OSError as error:
        raise InputError(f"{out}: cannot be written: {error.strerror or error}") from error
    try:
        found = _FORMATS[config.format](Path(config.path), policy, temporary)
        content = describe(policy) | {"format": config.format, **found}
        (temporary / SCHEMA).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        temporary.chmod(0o755)
        os.replace(temporary, out)
    except OSError as error:
        raise RunError(f"{out}: cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    files = sorted(path.name for path in out.iterdir())
    return {"folder": str(out), "files": files, **{name: found[name] for name in found if name == "max_error"}}


def check_installed(format: str) -> None:
    """Raise an error if a package of the extra `export` is missing, which only ONNX needs."""
    for name in ("onnx", "onnxscript", "onnxruntime") if format == "onnx" else ():
        if importlib.util.find_spec(name) is None:
            raise InputError(
                f"--format onnx needs {name}, which is not installed: in Deft's folder run `pip install -e "
                '".[export]"`, or use --format torch-export'
            )


# --------------------------------------------------------------------------------------------------------- safetensors


def export_safetensors(path: Path, policy: LoadedPolicy, folder: Path) -> dict[str, Any]:
    """Write weights, settings and spaces: a folder that `deft.load_policy` and `deft evaluate` load as a checkpoint."""
    checkpoint, config = evaluate.find_run(path)
    recorded = PolicySpaces.read(checkpoint)
    if recorded is None:
        raise InputError(f"{checkpoint}: does not record its spaces, since an earlier version saved it; train it again")
    weights = {name: tensor.clone().contiguous() for name, tensor in load_model(checkpoint).items()}
    save_file(weights, folder / MODEL_SAFETENSORS, {"format": "pt"})
    write_config(model_files.export_files(config, folder), folder / CONFIG_FILE)
    recorded.write(folder)
    return {}


# ------------------------------------------------------------------------------------------------------------ programs


class PolicyProgram(nn.Module):
    """The deterministic policy as a function of tensors: one for each stream, and the memory if it has one.

    The action is that of `LoadedPolicy.get_chunk` with a leading dim: [1, …], or [1, K, …] for chunks.
    """

    low: Tensor | None
    high: Tensor | None
    start: Tensor | None
    mask: Tensor | None

    def __init__(self, loaded: LoadedPolicy) -> None:
        super().__init__()
        self.policy = loaded.policy
        self.names = loaded.streams
        space, mask = loaded.action_space, loaded.made_for.action_mask
        bounds = {"low": space.low, "high": space.high} if isinstance(space, spaces.Box) else {}
        for name in ("low", "high"):
            self.register_buffer(name, torch.as_tensor(bounds[name]) if name in bounds else None)
        start = space.start if isinstance(space, spaces.Discrete | spaces.MultiDiscrete) else None
        self.register_buffer("start", None if start is None else torch.as_tensor(start))
        self.register_buffer("mask", None if mask is None else torch.as_tensor(mask)[None])

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Return the action, and the next memory if the policy has one."""
        observation: Any = dict(zip(self.names, inputs, strict=False)) if self.names else inputs[0]
        td = TensorDict({schema.OBSERVATION: observation}, batch_size=[1])
        if self.policy.recurrent:
            td.set(schema.MEMORY, inputs[-1])
        if self.mask is not None:
            td.set(schema.ACTION_MASK, self.mask)
        td = self.policy.act(td, True)
        action = td[schema.ACTION]
        if self.low is not None and self.high is not None:
            action = torch.minimum(torch.maximum(action, self.low), self.high)
        if self.start is not None:
            action = action + self.start
        return (action, td[schema.NEXT_MEMORY]) if self.policy.recurrent else (action,)


def export_program(path: Path, policy: LoadedPolicy, folder: Path) -> dict[str, Any]:
    """Write a program of torch.export: `torch.export.load(file).module()(*inputs)`."""
    program = trace(policy)
    error = compare(policy, program.module())
    torch.export.save(program, folder / PROGRAM)
    return _signature(policy) | {"max_error": error}


def export_onnx(path: Path, policy: LoadedPolicy, folder: Path) -> dict[str, Any]:
    """Write an ONNX model, compared with the policy in ONNX Runtime."""
    import onnxruntime

    signature = _signature(policy)
    names = {key: [one["name"] for one in signature[key]] for key in ("inputs", "outputs")}
    program = trace(policy)
    with _quiet():
        try:
            model = torch.onnx.export(
                program, input_names=names["inputs"], output_names=names["outputs"], dynamo=True, verbose=False
            )
            assert model is not None
            model.save(folder / ONNX)
        except Exception as error:  # of the converter: anything
            raise InputError(
                f"--format onnx: torch.onnx cannot convert {type(policy.policy).__name__}: {_short(error)}; use "
                "--format torch-export"
            ) from error
        session = onnxruntime.InferenceSession(folder / ONNX, providers=["CPUExecutionProvider"])

    def run(*inputs: Tensor) -> tuple[Tensor, ...]:
        given = {name: value.numpy() for name, value in zip(names["inputs"], inputs, strict=True)}
        return tuple(torch.as_tensor(value) for value in session.run(names["outputs"], given))

    return signature | {"max_error": compare(policy, run)}


def trace(policy: LoadedPolicy) -> torch.export.ExportedProgram:
    """Return the program of a policy; an error for one that samples, or that torch.export cannot trace."""
    name = type(policy.policy).__name__
    if policy.action_selection != MODE:
        raise InputError(f"{name} acts by {policy.action_selection}, and a program has no random numbers; {INSTEAD}")
    if policy.policy.needs_reward:
        raise InputError(f"{name} reads rewards and keeps a history, which a program does not; {INSTEAD}")
    program, example = PolicyProgram(policy).eval(), example_inputs(policy, np.random.default_rng(0))
    with torch.no_grad(), _quiet():
        program(*example)  # fills the caches of the model with real tensors, not with those of the tracer
        try:
            return torch.export.export(program, example, strict=False)
        except Exception as error:  # of the tracer: anything
            raise InputError(f"torch.export cannot trace {name}: {_short(error)}; {INSTEAD}") from error


@torch.no_grad()
def compare(policy: LoadedPolicy, program: Callable[..., Sequence[Tensor]]) -> float:
    """Return the largest difference from the policy on random observations; raise an error if it is not negligible."""
    own, random = PolicyProgram(policy).eval(), np.random.default_rng(1)
    space, errors = policy.action_space, []
    for _ in range(NUM_CHECKS):
        inputs = example_inputs(policy, random)
        for mine, other in zip(own(*inputs), program(*inputs), strict=True):
            errors.append(float((mine.double() - other.double()).abs().max()))
    scale = 1.0
    if isinstance(space, spaces.Box) and np.isfinite(space.high - space.low).all():
        scale = max(1.0, float((space.high - space.low).max()) / 2)
    largest = float(np.max(errors))  # NaN if one is
    if not largest <= TOLERANCE * scale:
        raise RunError(
            f"the exported program differs from the policy by {largest:.3g} on random observations, more than "
            f"{TOLERANCE * scale:g}; nothing was written: {INSTEAD}"
        )
    return largest


def example_inputs(policy: LoadedPolicy, random: np.random.Generator) -> tuple[Tensor, ...]:
    """Return random inputs of a `PolicyProgram`."""
    space = policy.observation_space
    parts = [space[name] for name in policy.streams] if isinstance(space, spaces.Dict) else [space]
    inputs = [torch.as_tensor(_random_row(part, random))[None] for part in parts]
    memory = policy.policy.initial_memory(1)
    if memory is not None:
        inputs.append(torch.as_tensor(random.normal(size=memory.shape), dtype=memory.dtype))
    return tuple(inputs)


def _random_row(space: gymnasium.Space, random: np.random.Generator) -> np.ndarray:
    shape = space.shape or ()
    if isinstance(space, spaces.Discrete):
        return np.asarray(random.integers(space.n), space.dtype)
    if isinstance(space, spaces.MultiDiscrete):
        return random.integers(space.nvec).astype(space.dtype)
    if is_image(space):
        return random.integers(0, 256, shape).astype(np.uint8)
    if space.dtype == np.uint8:  # words and spaces, with padding at the end
        row = random.choice(np.frombuffer(b"abcdefghij    ", np.uint8), shape)
        row[random.integers(1, len(row) + 1) :] = 0
        return row
    return random.normal(size=shape).astype(space.dtype)


def _signature(policy: LoadedPolicy) -> dict[str, Any]:
    """Describe the inputs of a program, in their order, and its outputs."""
    names = [*(policy.streams or ["observation"]), *(["memory"] if policy.policy.recurrent else [])]
    example = example_inputs(policy, np.random.default_rng(0))
    inputs = [
        {"name": name, "shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
        for name, value in zip(names, example, strict=True)
    ]
    outputs = [{"name": "action"}, *([{"name": "next_memory"}] if policy.policy.recurrent else [])]
    return {"inputs": inputs, "outputs": outputs}


def _short(error: BaseException) -> str:
    return one_line(error)[:200]


class _quiet(warnings.catch_warnings):
    """Without the warnings and the log of torch's exporters."""

    def __enter__(self) -> Any:
        found = super().__enter__()
        warnings.simplefilter("ignore")
        self._disabled = logging.root.manager.disable
        logging.disable(logging.WARNING)
        return found

    def __exit__(self, *exc_info: Any) -> None:
        logging.disable(self._disabled)
        super().__exit__(*exc_info)


_FORMATS: dict[str, Callable[[Path, LoadedPolicy, Path], dict[str, Any]]] = {
    "safetensors": export_safetensors,
    "torch-export": export_program,
    "onnx": export_onnx,
}
