"""Pieces of HTML that the sections of a report are made of, and the page around them. Text is escaped here."""

from __future__ import annotations

import base64
import os
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

HERE = Path(__file__).parent
GENERATOR = "Deft report"  # the file that `deft report` may replace has it
LARGEST_EMBEDDED = 8 * 2**20  # bytes of an image or video that is part of the page; a larger one is linked
TYPES = {".png": "image/png", ".gif": "image/gif", ".jpg": "image/jpeg", ".mp4": "video/mp4"}


def page(title: str, about: str, sections: Mapping[str, str], command: str) -> str:
    """Return the whole page. `sections` are by their title, for the links at the top; `command` writes the page."""
    style = "".join(file.read_text(encoding="utf-8") for file in (HERE.parent / "palette.css", HERE / "report.css"))
    script = (HERE / "report.js").read_text(encoding="utf-8")
    links = "".join(f'<a href="#{anchor(name)}">{escape(name)}</a>' for name in sections)
    body = "".join(f'<section id="{anchor(name)}">{content}</section>' for name, content in sections.items())
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8" />'
        '<meta name="viewport" content="width=device-width, initial-scale=1" />'
        f'<meta name="color-scheme" content="light dark" /><meta name="generator" content="{GENERATOR}" />'
        f"<title>Deft · {escape(title)}</title><style>{style}</style></head><body>"
        f"<header><div><h1>{escape(title)}</h1><p>{about}</p></div><nav>{links if len(sections) > 1 else ''}</nav>"
        f"</header><main>{body}</main>"
        f"<footer>Written on {datetime.now():%Y-%m-%d %H:%M} by <code>{escape(command)}</code></footer>"
        f"<script>{script}</script></body></html>\n"
    )


def anchor(title: str) -> str:
    """Return a title as the id of a section."""
    return "".join(char if char.isalnum() else "-" for char in title.lower()).strip("-")


def heading(title: str, lead: str = "") -> str:
    """Return the title of a section, and a sentence below it."""
    return f"<h2>{escape(title)}</h2>" + (f"<p class=lead>{escape(lead)}</p>" if lead else "")


def cards(facts: Mapping[str, str]) -> str:
    """Return figures with their names."""
    inner = "".join(f"<div><b>{escape(value)}</b><span>{escape(name)}</span></div>" for name, value in facts.items())
    return f'<div class="cards">{inner}</div>' if inner else ""


def table(head: Sequence[str], rows: Iterable[Sequence[Any]], kind: str = "") -> str:
    """Return a table that scrolls sideways where it is wider than the screen; the first cell of a row is its name."""
    top = "".join(f"<th>{escape(str(name))}</th>" for name in head)
    body = "".join(
        f"<tr><th>{_breakable(str(first))}</th>{''.join(f'<td>{cell(one)}</td>' for one in rest)}</tr>"
        for first, *rest in rows
    )
    return f'<div class="scroll"><table class="{kind}"><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def _breakable(name: str) -> str:
    """Return a name that a narrow screen may break after its dots and underscores."""
    return escape(name).replace("_", "_<wbr>").replace(".", ".<wbr>")


def cell(value: Any) -> str:
    """Return a value as the text of a table; a list of numbers as mean ± deviation."""
    if value is None:
        return "–"
    if isinstance(value, list) and value and all(isinstance(one, int | float) for one in value):
        mean = sum(value) / len(value)
        spread = (sum((one - mean) ** 2 for one in value) / len(value)) ** 0.5
        return f"{mean:.4g} ± {spread:.2g}"
    return f"{value:.4g}" if isinstance(value, float) else escape(str(value))


def grid(charts: Iterable[str], size: str = "") -> str:
    """Return charts side by side, as many as fit; those of size `large` are the main ones."""
    shown = "".join(charts)
    return f'<div class="charts {size}">{shown}</div>' if shown else ""


def details(summary: str, content: str) -> str:
    """Return what is shown on a click."""
    return f"<details><summary>{escape(summary)}</summary>{content}</details>" if content else ""


def commands(rows: Mapping[str, str]) -> str:
    """Return commands to copy, with what they do."""
    inner = "".join(f"<dt>{escape(name)}</dt><dd><code>{escape(line)}</code></dd>" for name, line in rows.items())
    return f'<dl class="commands">{inner}</dl>' if inner else ""


def media(files: Sequence[tuple[Path, str]], page_folder: Path) -> str:
    """Return images and videos with their captions: in the page, or linked beside it where they are large."""
    parts = []
    for path, caption in files:
        source = _source(path, page_folder)
        words = escape(caption)
        if path.suffix == ".mp4":
            shown = f'<video controls loop muted playsinline preload="auto" src="{source}"></video>'
        else:
            shown = f'<img alt="{words}" loading="lazy" src="{source}" />'
        parts.append(f"<figure>{shown}<figcaption>{words}</figcaption></figure>")
    return f'<div class="media">{"".join(parts)}</div>' if parts else ""


def _source(path: Path, page_folder: Path) -> str:
    if path.stat().st_size > LARGEST_EMBEDDED:
        return quote(Path(os.path.relpath(path, page_folder)).as_posix())
    return f"data:{TYPES[path.suffix]};base64,{base64.b64encode(path.read_bytes()).decode()}"
