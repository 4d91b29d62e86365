"""Recipes: the config files that ship with Deft, each with a header that describes what it trains, needs and reaches.

A recipe is a preset whose file has the section `recipe`. `deft recipes` lists them, `deft train --recipe NAME` trains
one, and `deft.training.preparation` makes what it starts from.
"""

from __future__ import annotations

import io
import shutil
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from deft.config.loading import HEADER, PRESETS, find_preset, preset_names, read_file, value_at
from deft.config.settings import GPU_VECTORS
from deft.config.validation import checked, settings
from deft.errors import InputError

UNKNOWN = "not measured"
COLUMNS = {"trains": 4, "needs": 2, "time": 3, "reaches": 4}  # with their shares of the width
WIDTH, NARROWEST = 110, 100  # characters of the table: without a terminal, and the fewest; below it is a list


@settings
class Recipe:
    """The header of a recipe."""

    trains: str
    """What it trains, in a few words."""
    extras: tuple[str, ...] = ()
    """Extras of Deft that it needs."""
    suites: tuple[str, ...] = ()
    """Benchmark suites that it needs; `deft suite install` installs them."""
    needs: str = ""
    """What else it needs, for the table."""
    time: str = UNKNOWN
    """How long it takes, and on which machine."""
    reaches: str = UNKNOWN
    """What it reaches."""
    results: str | None = None
    """The page of the documentation with these figures."""
    prepare: tuple[str, ...] = ()
    """Commands that make the dataset and the policy that it starts from, in order; each runs if its result is missing
    or incomplete."""


@settings
class RecipesConfig:
    """List the recipes: what each trains, what it needs, how long it takes and what it reaches."""


@settings
class ShowRecipeConfig:
    """Print the file of a recipe."""

    recipe: str
    """Name of the recipe."""


def recipe_names() -> list[str]:
    """Return the names of all recipes."""
    return list(_recipe_files())


def _recipe_files() -> dict[str, dict[str, Any]]:
    """Return the content of every recipe, by name."""
    found = {name: read_file(PRESETS / f"{name}.yaml") for name in preset_names()}
    in_order = sorted(found, key=lambda name: name.split("-"))  # ppo before ppo-labels
    return {name: found[name] for name in in_order if HEADER in found[name]}


def find_recipe(name: str) -> Path:
    """Return the file of a recipe."""
    if Path(name).name != name or Path(name).suffix:
        raise InputError(f"{name}: not the name of a recipe; --config reads a file, `deft recipes` lists the names")
    file = find_preset(name, "recipe", recipe_names)
    if HEADER not in read_file(file):
        raise InputError(f"{name}: settings without the header of a recipe; use --config {name}")
    return file


def read_recipe(file: Path) -> Recipe | None:
    """Return the header of a config file; None if it has none."""
    header = read_file(file).get(HEADER)
    return None if header is None else _checked_header(file, header)


def _checked_header(file: Path, header: Any) -> Recipe:
    if not isinstance(header, dict):
        raise InputError(f"{file}: {HEADER}: is not a mapping; copy the header of `deft recipes show NAME`")
    return checked(Recipe, header, written={name: f"{HEADER}.{name}" for name in header})


def describe_recipes() -> dict[str, dict[str, Any]]:
    """Return what `deft recipes` shows of each recipe, by name."""
    return {name: _described(PRESETS / f"{name}.yaml", content) for name, content in _recipe_files().items()}


def _described(file: Path, mapping: dict[str, Any]) -> dict[str, Any]:
    recipe = _checked_header(file, mapping[HEADER])
    needs = ["CUDA GPU"] if value_at(mapping, "env.vector") in GPU_VECTORS else []
    if recipe.extras:
        needs.append(f"extra{'s' * (len(recipe.extras) > 1)} {', '.join(recipe.extras)}")
    needs += [f"suite {suite}" for suite in recipe.suites]
    needs += [recipe.needs] if recipe.needs else []
    return {
        "trains": recipe.trains,
        "needs": "; ".join(needs) or "CPU",
        "time": recipe.time,
        "reaches": recipe.reaches,
        "results": recipe.results,
        "first": list(recipe.prepare),
    }


def recipe_table(recipes: dict[str, dict[str, Any]]) -> str:
    """Return the recipes as a table in text, as wide as the terminal; as a list in a narrow one."""
    width = shutil.get_terminal_size((WIDTH, 0)).columns
    lines = _table_lines(recipes, width) if width >= NARROWEST else _list_lines(recipes, width)
    advice = [
        "deft train --recipe NAME trains one; flags override its settings",
        "deft recipes show NAME prints its file",
    ]
    return "\n".join([*lines, *advice])


def _list_lines(recipes: dict[str, dict[str, Any]], width: int) -> Iterator[str]:
    for name, about in recipes.items():
        yield name
        for column in COLUMNS:
            yield from textwrap.wrap(f"{column}: {about[column]}", width, initial_indent="  ", subsequent_indent="    ")
        yield ""


def _table_lines(recipes: dict[str, dict[str, Any]], width: int) -> list[str]:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_lines=True, expand=True, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("recipe", no_wrap=True)
    for column, share in COLUMNS.items():
        table.add_column(column, ratio=share)
    for name, about in recipes.items():
        table.add_row(name, *(about[column] for column in COLUMNS))
    text = io.StringIO()
    Console(file=text, width=width, markup=False).print(table)
    return [line.rstrip() for line in text.getvalue().splitlines()]
