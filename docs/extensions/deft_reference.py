"""Sphinx directives that write the reference from the code.

- `settings CLASS`: a table of the settings of a class of `deft.config`: name, allowed values, default, meaning.
- `command ARGUMENTS`: the help text of a `deft` command.
- `aliases`: the other names of settings, from `deft.config.aliases`.
- `recipes`: the recipes that ship with Deft: what each trains, needs and reaches, and the page of its figures.
- `autoapi NAME …`: names of the package `deft`, by autodoc.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import itertools
import pkgutil
import re
from collections.abc import Iterator
from typing import Any

from docutils import nodes
from docutils.statemachine import StringList
from pydantic import TypeAdapter
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

import deft
import deft.config
from deft.cli import main
from deft.config import aliases
from deft.config.aliases import aliases_of
from deft.config.fields import description_of, nested_class, setting_names
from deft.config.recipes import describe_recipes

LIMITS = {"exclusiveMinimum": ">", "minimum": "≥", "exclusiveMaximum": "<", "maximum": "≤"}
WORDS = {"integer": "whole number", "number": "number", "string": "text", "boolean": "true, false", "object": "mapping"}
LARGEST = 2**63  # limits above are those of the type, not of the setting


def settings_classes() -> dict[str, type]:
    """Every settings class of `deft.config` by its name."""
    found = {}
    for module in pkgutil.iter_modules(deft.config.__path__, "deft.config."):
        for name, value in vars(importlib.import_module(module.name)).items():
            if isinstance(value, type) and hasattr(value, "__pydantic_fields__") and value.__module__ == module.name:
                found[name] = value
    return found


def allowed(schema: dict[str, Any], definitions: dict[str, Any]) -> str:
    """The values that a setting may have, from its JSON schema."""
    if "$ref" in schema:
        return allowed(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    if "anyOf" in schema:
        return " or ".join("none" if part.get("type") == "null" else allowed(part, definitions)
                           for part in schema["anyOf"])  # fmt: skip
    if "enum" in schema or "const" in schema:
        return ", ".join(f"`{value}`" for value in schema.get("enum", [schema.get("const")]))
    if "prefixItems" in schema:
        return f"list of {len(schema['prefixItems'])} values"
    if schema.get("type") == "array":
        return f"list of: {allowed(schema.get('items', {}), definitions)}"
    limits = [f"{sign} {schema[key]:g}" for key, sign in LIMITS.items() if key in schema and abs(schema[key]) < LARGEST]
    return " ".join([WORDS.get(schema.get("type", ""), "any value"), ", ".join(limits)]).strip()


def shown_default(schema: dict[str, Any]) -> str:
    """The default of a setting as it is written in a file."""
    if "default" not in schema:
        return "`{}`" if schema.get("type") == "object" else "required"
    default = schema["default"]
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    if isinstance(default, float):
        return f"`{default:g}`"
    return "`none`" if default is None else f"`{default}`"


def settings_rows(class_name: str) -> Iterator[tuple[str, str, str, str]]:
    """Setting and its aliases, allowed values, default, meaning; sections have tables of their own."""
    classes = settings_classes()
    if class_name not in classes:
        raise ValueError(f"deft.config has no settings class {class_name}; it has {', '.join(sorted(classes))}")
    cls = classes[class_name]
    schema = TypeAdapter(cls).json_schema()
    schema = schema["$defs"][class_name] if "properties" not in schema else schema
    for name in setting_names(cls):
        if nested_class(cls, name) is None:
            entry = schema["properties"][name]
            names = ", ".join(f"`{one}`" for one in (name, *aliases_of(cls, name)))
            yield names, allowed(entry, schema.get("$defs", {})), shown_default(entry), description_of(cls, name)


def settings_table(class_name: str) -> list[str]:
    """The table of a settings class, as lines of Markdown."""
    lines = [("setting", "value", "default", "meaning"), ("---", "---", "---", "---"), *settings_rows(class_name)]
    return [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines]


class Markdown(SphinxDirective):
    """A directive that writes lines of Markdown."""

    required_arguments = 1
    final_argument_whitespace = True

    def lines(self) -> list[str]:
        """The lines that replace the directive."""
        raise NotImplementedError

    def run(self) -> list[nodes.Node]:
        """Parse the lines where the directive stands."""
        container = nodes.container()
        try:
            lines = self.lines()
        except ValueError as error:
            raise self.error(str(error)) from error
        self.state.nested_parse(StringList(lines, self.get_source_info()[0]), self.content_offset, container)
        return container.children


class Settings(Markdown):
    """The table of a settings class."""

    def lines(self) -> list[str]:
        """Table lines."""
        return settings_table(self.arguments[0])


class Command(Markdown):
    """The help text of a `deft` command."""

    required_arguments = 0
    optional_arguments = 1

    def lines(self) -> list[str]:
        """A literal block."""
        return ["```text", *help_text(" ".join(self.arguments).split()).splitlines(), "```"]


def help_text(words: list[str]) -> str:
    """What `deft WORDS --help` prints."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        status = main([*words, "--help"])
    if status:
        raise ValueError(f"deft {' '.join(words)} --help ends with status {status}")
    return output.getvalue()


class Recipes(Markdown):
    """The recipes that ship with Deft."""

    required_arguments = 0

    def lines(self) -> list[str]:
        """A table as `deft recipes` prints it, with links to the results."""
        table = ["| recipe | trains | needs | time | reaches |", "| --- | --- | --- | --- | --- |"]
        for name, about in describe_recipes().items():
            page = f" ([results](../{about['results'].removeprefix('docs/')}))" if about["results"] else ""
            cells = (f"`{name}`", about["trains"], about["needs"], about["time"], f"{about['reaches']}{page}")
            table.append(f"| {' | '.join(cells)} |")
        return table


class Aliases(Markdown):
    """The other names of settings and of their values."""

    required_arguments = 0

    def lines(self) -> list[str]:
        """A table of aliases and settings."""
        found: dict[str, list[str]] = {}
        for table in (aliases.ALIASES, aliases.MOVED):
            for alias, setting in table.items():
                found.setdefault(setting, []).append(alias)
        for setting, values in aliases.VALUES.items():
            for alias, value in values.items():
                found.setdefault(f"{setting}: {value}", []).append(f"{setting}: {alias}")
        rows = [f"| {', '.join(f'`{one}`' for one in others)} | `{setting}` |" for setting, others in found.items()]
        return ["| alias | setting |", "| --- | --- |", *rows]


class Api(Markdown):
    """Names that the package `deft` offers, by autodoc."""

    def lines(self) -> list[str]:
        """An autodoc directive for each name."""
        lines = ["```{eval-rst}"]
        for name in self.arguments[0].split():
            value = getattr(deft, name, None)
            if value is None:
                raise ValueError(f"deft has no name {name}")
            is_settings = hasattr(value, "__pydantic_fields__")
            lines += [f".. {'autoclass' if isinstance(value, type) else 'autofunction'}:: deft.{name}"]
            lines += ["   :no-members:"] if is_settings else []
            lines += [""]
        return [*lines, "```"]


def escape(text: str) -> str:
    """Text of a docstring as reStructuredText: `code` as a literal, everything else as plain characters."""
    parts = re.split(r"(`[^`]+`)", text)
    plain = (re.sub(r"([\\*|]|_\b|`)", r"\\\1", part) for part in parts[::2])
    literals = (f" ``{part.strip('`')}`` " for part in parts[1::2])
    joined = "".join(word for pair in itertools.zip_longest(plain, literals, fillvalue="") for word in pair)
    return re.sub(r" (``[^`]+``) ", r"\\ \1\\ ", f" {joined} ").strip()


def convert_docstring(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Turn a docstring in Markdown into reStructuredText: paragraphs, lists, indented blocks and tables."""
    converted: list[str] = []
    for paragraph in re.split(r"\n\s*\n", "\n".join(lines)):
        rows = [row for row in paragraph.splitlines() if row.strip()]
        if not rows:
            continue
        if all(row.startswith(("  ", "|", "```")) for row in rows):
            converted += ["::", "", *(f"   {row}" for row in rows if not row.startswith("```")), ""]
            continue
        items: list[str] = []
        for row in rows:
            if not items or re.match(r"\s*(?:[-*]|\d+\.) ", row):
                items.append(row.strip())
            else:
                items[-1] += f" {row.strip()}"
        for item in items:
            bullet = re.match(r"(?:[-*]|\d+\.) ", item)
            converted += [f"- {escape(item[bullet.end() :])}" if bullet else escape(item), ""]
    lines[:] = converted


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directives, and the conversion of docstrings."""
    app.add_directive("settings", Settings)
    app.add_directive("command", Command)
    app.add_directive("aliases", Aliases)
    app.add_directive("recipes", Recipes)
    app.add_directive("autoapi", Api)
    app.connect("autodoc-process-docstring", convert_docstring)
    return {"version": "1", "parallel_read_safe": True}
