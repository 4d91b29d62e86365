"""The notebooks of the documentation run, in small form: each in a kernel of its own, in an empty folder.

The cell with the tag `parameters` holds the sizes; SMALL replaces them. Stored outputs would be out of date, and large.
"""

import ast
import json
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parents[1] / "docs" / "notebooks").glob("*.ipynb"))
SMALL = {
    "TOTAL_TIMESTEPS": 1024,
    "EPISODES": 2,
    "RECORDED_EPISODES": 4,
    "NUM_EPOCHS": 1,
    "UPDATES_PER_EPOCH": 2,
}
TIMEOUT = 120  # seconds of a cell


def read(path: Path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=4)


def parameters(book: nbformat.NotebookNode) -> nbformat.NotebookNode:
    (cell,) = [cell for cell in book.cells if "parameters" in cell.metadata.get("tags", ())]
    return cell


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs(path, tmp_path, monkeypatch):
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.setenv("DEFT_DATASETS", str(tmp_path))
    book = read(path)
    cell = parameters(book)
    names = [node.targets[0].id for node in ast.parse(cell.source).body]
    cell.source = "\n".join(f"{name} = {SMALL[name]}" for name in names)
    NotebookClient(
        book, timeout=TIMEOUT, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    printed = [output for cell in book.cells for output in cell.get("outputs", ()) if output.get("name") == "stdout"]
    assert printed
    assert any((tmp_path / "outputs").rglob("config.yaml"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_its_file(path):
    book = read(path)
    nbformat.validate(book)
    assert [cell.get("outputs") for cell in book.cells if cell.get("outputs") or cell.get("execution_count")] == []
    assert book.cells[0].source.startswith("# ")
    text = "\n".join(cell.source for cell in book.cells if cell.cell_type == "markdown")
    assert len(text.split()) < 500
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
        assert (path.parent / target).exists(), target
    stored = json.loads(path.read_text())
    assert stored["metadata"].keys() == {"kernelspec", "language_info"}


def test_there_are_four():
    assert [path.stem for path in NOTEBOOKS] == ["first-run", "offline", "own-environment", "own-model"]
