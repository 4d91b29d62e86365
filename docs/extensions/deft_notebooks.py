"""Notebooks as pages: their Markdown and their code, without outputs, which are not stored."""

from __future__ import annotations

import json
from typing import Any

from docutils import nodes
from myst_parser.parsers.sphinx_ import MystParser
from sphinx.application import Sphinx

SUFFIX = ".ipynb"


def as_markdown(notebook: dict[str, Any]) -> str:
    """Return the cells of a notebook as one page of Markdown."""
    parts = []
    for cell in notebook["cells"]:
        text = "".join(cell["source"])
        parts.append(f"```python\n{text}\n```" if cell["cell_type"] == "code" else text)
    return "\n\n".join(parts) + "\n"


class NotebookParser(MystParser):
    """Parses a notebook as Markdown."""

    supported = ("notebook",)

    def parse(self, inputstring: str, document: nodes.document) -> None:
        """Parse the text of a notebook file."""
        super().parse(as_markdown(json.loads(inputstring)), document)


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the parser."""
    app.add_source_suffix(SUFFIX, "notebook")
    app.add_source_parser(NotebookParser)
    return {"version": "1", "parallel_read_safe": True}
