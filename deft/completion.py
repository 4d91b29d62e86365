"""Shell completion: `deft completion SHELL` prints a script, which asks `deft` itself for completions (argcomplete).

Commands come from the tables in `deft.cli`, flags from the parser behind `--help`, values from the types of settings.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
from collections.abc import Sequence
from typing import Any, Literal, get_args, get_origin

import argcomplete
from argcomplete.completers import FilesCompleter

from deft import cli
from deft.config.algorithm_settings import ALGORITHM_SETTINGS
from deft.config.fields import alternatives, annotation_of
from deft.config.flags import Given, HelpShown
from deft.config.loading import preset_names
from deft.config.recipes import recipe_names
from deft.errors import CommandExit, DeftError


def script(shell: str) -> str:
    """Return the script that registers the completion of `deft` in a shell."""
    return argcomplete.shellcode(["deft"], shell=shell).strip()


def complete() -> None:
    """Write the completions of the command line that a completion script has put into COMP_LINE, and exit."""
    line = os.environ["COMP_LINE"].encode()[: int(os.environ["COMP_POINT"])].decode(errors="ignore")
    words = argcomplete.lexers.split_line(line)[3]
    argcomplete.autocomplete(build_parser(words[1:]), always_complete_options=False)


def build_parser(words: Sequence[str]) -> argparse.ArgumentParser:
    """Return a parser of all commands; the one that the words before the cursor are of has its flags."""
    top = argparse.ArgumentParser("deft", add_help=False)
    commands: dict[str, list[str]] = {"train": [*ALGORITHM_SETTINGS, *cli.TRAINING]}
    for name in cli.COMMANDS:
        first, _, second = name.partition(" ")
        commands.setdefault(first, []).extend([second] if second else [])
    parsers = top.add_subparsers()
    for first, following in commands.items():
        is_typed = words[:1] == [first]
        is_nested = is_typed and len(words) > 1 and words[1] in following
        flags = [_flags_of(words)] if is_typed and not is_nested else []
        parser = parsers.add_parser(first, parents=flags, add_help=False)
        if is_nested:
            nested_parser = parser.add_subparsers().add_parser(words[1], parents=[_flags_of(words)], add_help=False)
            if first != "train":
                _add_word(nested_parser, f"{first} {words[1]}")
        elif following and len(words) == 1:
            nested = parser.add_subparsers()
            for second in following:
                nested.add_parser(second, add_help=False)
        elif is_typed and first in cli.COMMANDS:
            _add_word(parser, first)
    return top


def _add_word(parser: argparse.ArgumentParser, command: str) -> None:
    """Add the setting of a command that is given without a flag, if it has one."""
    word = cli.COMMANDS[command].word
    if word is not None:
        annotation = annotation_of(cli.settings_class(command), word)
        _set_completer(parser.add_argument(word, nargs="*"), word, annotation)


def _flags_of(words: Sequence[str]) -> argparse.ArgumentParser:
    """Return the parser behind `deft WORDS --help`, with completers of values."""
    parser = argparse.ArgumentParser(add_help=False)
    for flag in ("--recipe", "--config", "--resume") if words[0] == "train" else ():  # until they say what is trained
        _set_completer(parser.add_argument(flag), flag[2:], str)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            cli.dispatch([*words, "--help"])
    except HelpShown as shown:
        parser = shown.parser
        for action in parser._actions:
            if isinstance(action, Given):
                _set_completer(action, action.flag.path, action.flag.annotation)
    except (CommandExit, DeftError):  # a command without flags, or a file that does not exist
        pass
    return parser


def _set_completer(action: argparse.Action, path: str, annotation: Any) -> None:
    """Make the values of a flag complete: choices, recipes, files, and nothing for a number."""
    kinds, _ = alternatives(annotation)
    choices = [str(choice) for kind in kinds if get_origin(kind) is Literal for choice in get_args(kind)]
    if path == "config":
        choices = preset_names()
    elif path == "recipe":
        choices = recipe_names()
    has_files = path == "config" or (not choices and kinds[0] not in (int, float))
    files = FilesCompleter()
    action.completer = lambda prefix, **_: [*choices, *(files(prefix) if has_files else ())]  # type: ignore[attr-defined]
