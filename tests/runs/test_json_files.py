"""JSON files that a run writes."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from deft.errors import InputError
from deft.runs.json_files import plain, read_json, write_json


def test_plain_converts_arrays_and_numbers_that_are_not_finite() -> None:
    given = {"array": np.array([1.0, np.nan]), 2: torch.tensor(3), "nested": ({"x": float("inf")}, np.float32(0.5))}
    assert plain(given) == {"array": [1.0, None], "2": 3, "nested": [{"x": None}, 0.5]}


def test_a_written_file_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "new" / "results.json"
    assert read_json(path) == []
    write_json({"loss": float("nan"), "steps": [1, 2]}, path)
    assert read_json(path) == {"loss": None, "steps": [1, 2]}
    assert [file.name for file in path.parent.iterdir()] == ["results.json"]  # no temporary file remains
    with pytest.raises(TypeError):
        write_json({"object": object()}, path)
    assert json.loads(path.read_text())["steps"] == [1, 2]  # a failed write leaves the earlier file


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text("{")
    with pytest.raises(InputError, match=r"results\.json: cannot be read as JSON"):
        read_json(tmp_path / "results.json")
