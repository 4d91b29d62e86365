"""Decide whether Deft may import a module whose name is given as text. No other module imports by such a name.

A name is the user's own if it comes from the command line, from a call in Python, or from the allow-list
`DEFT_TRUSTED_MODULES`. A name in a file (a config, a run directory, a checkpoint, a dataset) is not: its module is
imported only if it is imported already, is part of Deft, is registered as an entry point, or if the user gave
`--trust-remote-code`. `docs/security.md` describes the whole model.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import importlib
import importlib.util
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

from deft.errors import InputError

log = logging.getLogger(__name__)
P = ParamSpec("P")
R = TypeVar("R")

FLAG = "--trust-remote-code"
ALLOW_LIST = "DEFT_TRUSTED_MODULES"
ENTRY_POINT_GROUPS = ("gymnasium.envs", "deft.vla_models")
LONGEST_TEXT = 500  # characters; of longer text in a file only the hash is kept
OTHER_REGISTRIES = ("GymV21Environment-v0", "GymV26Environment-v0")  # Gymnasium's wrappers, which import by `env_id`
SAFE_PATH = "PYTHONSAFEPATH"  # Python's own: new processes do not put the current directory on their path


@dataclass
class _State:
    """The names that this process has recorded."""

    named: set[str] = field(default_factory=set)
    """Names given by the user."""
    modules: set[str] = field(default_factory=set)
    """Modules that were imported because their names were allowed, and the modules of `allow`."""
    vouched: set[str] = field(default_factory=set)
    """Text of trusted files, which were read within `remote_code`, by `_key`."""
    files: dict[str, str] = field(default_factory=dict)
    """Text that was read from files, by `_key`, with its file."""
    remote_code: bool = False
    """Whether the user trusts every name."""
    command_line: bool = False
    """Whether this process runs the command `deft`; names that are not on the command line then come from files."""


_state = _State()


# ----------------------------------------------------------------------------------------------- sources of names


def name(*values: Any) -> None:
    """Record names given by the user: strings, or mappings and lists of strings."""
    _state.named.update(_strings(values))


def allow(*modules: str) -> None:
    """Allow files to name these modules and their submodules, in this process."""
    _state.modules.update(modules)


def read_from(file: str | Path, *values: Any) -> None:
    """Record text that was read from a file. Within `remote_code` it is trusted."""
    for text in _strings(values):
        key = _key(text)
        _state.files.setdefault(key, str(file))
        if _state.remote_code:
            _state.vouched.add(key)


@contextlib.contextmanager
def remote_code(trusted: bool = True) -> Iterator[None]:
    """Trust all names that are read from files or used within the block."""
    before = _state.remote_code
    _state.remote_code = before or trusted
    try:
        yield
    finally:
        _state.remote_code = before


def takes_remote_code(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function to run within `remote_code` if its keyword `trust_remote_code` is true."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with remote_code(bool(kwargs.get("trust_remote_code", False))):
            return function(*args, **kwargs)

    return run


def trusts_remote_code() -> bool:
    """Return whether code of files may run: the argument `trust_remote_code` of transformers."""
    return _state.remote_code


@contextlib.contextmanager
def command_line(trusted: bool) -> Iterator[None]:
    """Run one command with an empty record of names; `trusted`: whether `--trust-remote-code` was given."""
    before, path, safe_path = snapshot(), set(sys.path), os.environ.get(SAFE_PATH)
    restore(_State(remote_code=trusted, command_line=True))
    os.environ[SAFE_PATH] = "1"
    try:
        yield
    finally:
        restore(before)
        with contextlib.suppress(OSError, ValueError):
            if (here := os.getcwd()) not in path:
                sys.path.remove(here)
        if safe_path is None:
            del os.environ[SAFE_PATH]
        else:
            os.environ[SAFE_PATH] = safe_path


def on_command_line() -> bool:
    """Return whether this process runs the command `deft`, which does not search the current directory by default."""
    return _state.command_line


def snapshot() -> _State:
    """Return the state of this process, for `restore` in another process."""
    state = copy.deepcopy(_state)
    for text in state.files:  # modules imported in this process are allowed in the other one
        state.modules |= {text.partition(":")[0], text.rpartition(".")[0]} & sys.modules.keys()
    if state.command_line:  # names that are not the user's own are rejected whatever their file
        state.files.clear()
        state.vouched.clear()
    return state


def restore(state: _State) -> None:
    """Use the state of another process, from `snapshot`."""
    vars(_state).update(vars(state))


def child_command(code: str) -> list[str]:
    """Return the command that runs `code` in a new Python process with the path and state of this process."""
    setup = f"import sys; sys.path[:] = {sys.path!r}; from deft import trust; trust.restore(trust.{snapshot()!r}); "
    return [sys.executable, "-P", "-c", setup + code]  # -P: do not search the current directory before that


# -------------------------------------------------------------------------------------------------- allowed modules


def import_module(module: str, given: str, setting: str, flag: str) -> ModuleType:
    """Import a module that is named by the value `given` of a setting, if that is allowed.

    `flag` is the command line flag of the setting. An ImportError is propagated.
    """
    if not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*", module):
        raise InputError(f"{setting} {given!r}: {module!r} is not the name of a module")
    if exists(module):  # otherwise the import raises the error
        _check_module(module, given, setting, flag)
        if _state.command_line and not _is_on_path(module):
            sys.path.append(os.getcwd())  # last, so that no installed package is shadowed
    return importlib.import_module(module)


def exists(module: str) -> bool:
    """Return whether a module's top-level package is on the path or in the current directory, without importing."""
    return _is_on_path(module) or _is_here(module)


def _check_module(module: str, given: str, setting: str, flag: str) -> None:
    parts = module.split(".")
    parents = {".".join(parts[: count + 1]) for count in range(len(parts))}
    allowed = _state.modules | set(re.split(r"[,\s]+", os.environ.get(ALLOW_LIST, "")))
    if module in sys.modules or not parents.isdisjoint(allowed) or _is_installed_for_deft(module):
        return
    check(
        given,
        setting,
        f"Deft does not import a module that only a file names ({module})",
        f"{flag} {given}" if _state.command_line else f"import {module} first",
        f"; {ALLOW_LIST}={module} allows it always",
    )
    _state.modules.add(module)


def check(given: str, setting: str, reason: str, instead: str, more: str = "") -> None:
    """Raise InputError if the value `given` of a setting runs code and is not the user's own.

    `reason` is the reason in the message; `instead` is how the user can give the name.
    """
    text = given.strip()
    key = _key(text)
    file = _state.files.get(key)
    if text in _state.named or not (_state.command_line or file):  # not from a file: from a call in Python
        return
    place = "" if file is None else f" (in {file})"
    if _state.remote_code or key in _state.vouched:
        log.warning("%s %s%s runs code of its author, as %s allows", setting, given, place, FLAG)
        return
    trust = FLAG if _state.command_line else "trust_remote_code=True"
    raise InputError(f"{setting} {given!r}{place}: {reason}; if you trust it, use {trust} or {instead}{more}")


def check_env_kwargs(env_name: str, kwargs: Mapping[str, Any]) -> None:
    """Raise InputError if the arguments of a registered environment name a module that is not the user's own."""
    if env_name in OTHER_REGISTRIES and ":" in (other := str(kwargs.get("env_id"))):
        reason = "Deft does not import a module that only a file names"
        check(other, "env.kwargs.env_id", reason, f"--env-kwargs env_id={other}")


def _is_installed_for_deft(module: str) -> bool:
    """Return whether a module is part of Deft or of a package that registers environments or models."""
    from importlib.metadata import entry_points  # slow to import and rarely needed

    registered = (entry.module for group in ENTRY_POINT_GROUPS for entry in entry_points(group=group))
    return any(module == known or module.startswith(f"{known}.") for known in ("deft", *registered))


def _is_on_path(module: str) -> bool:
    top = module.partition(".")[0]
    return top in sys.modules or importlib.util.find_spec(top) is not None


def _is_here(module: str) -> bool:
    with contextlib.suppress(OSError):  # there may be no current directory
        return PathFinder.find_spec(module.partition(".")[0], [os.getcwd()]) is not None
    return False


def _key(text: str) -> str:
    """Return the key of a text: the text itself, or its hash if it is long."""
    return text if len(text) <= LONGEST_TEXT else hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


def _strings(values: Any) -> Iterator[str]:
    """Yield the strings in nested mappings, lists and sets; each container is visited once (YAML aliases repeat them).

    Bytes (YAML's `!!binary`) are decoded as settings decode them.
    """
    waiting, seen = [values], set()
    while waiting:
        value = waiting.pop()
        if isinstance(value, bytes | bytearray):
            value = value.decode(errors="replace")
        if isinstance(value, str):
            if text := value.strip():
                yield text
        elif isinstance(value, Mapping | list | tuple | set | frozenset) and id(value) not in seen:
            seen.add(id(value))
            waiting.extend(value.values() if isinstance(value, Mapping) else value)
