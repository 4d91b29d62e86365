"""Spaces in Minari's JSON, and the streams of observations."""

import json

import numpy as np
import pytest
from gymnasium import spaces

from deft.data.spaces import (
    MAX_SIZE,
    action_stream,
    recorded_space,
    space_from_json,
    space_to_json,
    stream_space,
    streams,
    union,
)
from deft.errors import InputError

IMAGE = spaces.Box(0, 255, (8, 6, 3), np.uint8)
NESTED = spaces.Dict(
    {
        "arm": spaces.Dict({"joints": spaces.Box(-1, 1, (2,), np.float64), "grip": spaces.Discrete(3, start=5)}),
        "camera": IMAGE,
        "parts": spaces.Tuple([spaces.MultiBinary(2), spaces.MultiDiscrete([2, 3])]),
        "task": spaces.Text(4, min_length=0, charset="ab é"),
    }
)


@pytest.mark.parametrize("compact", [False, True])
def test_a_space_comes_back_from_its_json(compact):
    assert space_from_json(space_to_json(NESTED, compact)) == NESTED


def test_compact_json_has_constant_bounds_as_one_number():
    assert json.loads(space_to_json(IMAGE, compact=True))["high"] == 255
    mixed = spaces.Box(np.array([0, 1], np.float32), np.array([2, 2], np.float32))
    assert json.loads(space_to_json(mixed, compact=True))["low"] == [0.0, 1.0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "Expecting"),
        ("[1]", "is not an object with a type"),
        ('{"type": "Box"}', "a Box needs shape, which is missing"),
        ('{"type": "Dict", "subspaces": []}', r"the subspaces of a Dict are \[\]"),
        ('{"type": "Discrete", "n": "x"}', "is not a valid Discrete"),
        ('{"type": "Box", "shape": [1], "dtype": "S3", "low": 0, "high": 1}', "is not a valid Box"),
        (None, "None is not text"),
    ],
)
def test_what_is_no_space_is_a_value_error(text, message):
    with pytest.raises(ValueError, match=message):
        space_from_json(text)


@pytest.mark.parametrize(
    ("plain", "message"),
    [
        ({"type": "Graph"}, "a Graph space is not supported; Deft records and reads Box"),
        ({"type": "Discrete", "n": MAX_SIZE + 1}, "it must have 1 to 67,108,864"),
        ({"type": "Box", "shape": [2**20, 2**20], "dtype": "float32", "low": 0, "high": 1}, "numbers is not supported"),
    ],
)
def test_spaces_that_deft_does_not_read(plain, message):
    with pytest.raises(InputError, match=message):
        space_from_json(json.dumps(plain))


def test_streams_are_named_by_their_path():
    parts = streams(NESTED)
    assert [part.name for part in parts] == ["arm/grip", "arm/joints", "camera", "parts/0", "parts/1", "task"]
    space = stream_space(parts)
    assert space["camera"].shape == (3, 8, 6)  # channels first
    assert space["arm/joints"].dtype == np.float32
    assert space["arm/grip"] == spaces.Discrete(3)  # from 0 on
    assert space["task"].shape == (4 * len("é".encode()),)
    assert stream_space(streams(IMAGE)) == spaces.Box(0, 255, (3, 8, 6), np.uint8)


def test_rows_and_recorded_values_are_inverse():
    generator = np.random.default_rng(0)
    values = {
        "arm/grip": np.array([5, 7, 6]),
        "arm/joints": generator.random((3, 2)).astype(np.float32),
        "camera": generator.integers(0, 256, (3, 8, 6, 3), np.uint8),
        "parts/0": np.array([[0, 1], [1, 1], [0, 0]], np.int8),
        "parts/1": np.array([[0, 2], [1, 1], [1, 0]]),
        "task": ["", "ab", "é"],
    }
    for part in streams(NESTED):
        rows = part.to_rows(values[part.name])
        assert rows.shape == (3, *part.shape)
        assert rows.dtype == part.space.dtype
        assert all(part.space.contains(row) for row in rows)
        back = part.from_rows(rows)
        assert back == values[part.name] if part.name == "task" else np.array_equal(back, values[part.name])


def test_actions_must_be_one_array():
    assert action_stream(spaces.MultiBinary(3)).space == spaces.MultiDiscrete([2, 2, 2])
    assert action_stream(spaces.Discrete(4, start=2)).to_rows(np.array([2, 5])).tolist() == [0, 3]
    with pytest.raises(InputError, match="actions of a Dict space are not supported"):
        action_stream(spaces.Dict({"a": spaces.Discrete(2)}))


def test_the_union_contains_both():
    one = spaces.Dict({"a": spaces.Box(-1, 1, (1,)), "t": spaces.Text(2, min_length=1, charset="ab")})
    other = spaces.Dict({"a": spaces.Box(0, 3, (1,)), "t": spaces.Text(5, min_length=0, charset="bc")})
    both = union(one, other, "observations")
    assert both["a"] == spaces.Box(-1, 3, (1,))
    assert (both["t"].min_length, both["t"].max_length, both["t"].character_set) == (0, 5, set("abc"))
    with pytest.raises(
        InputError, match=r"^actions is float32 of shape \(2,\), and in earlier episodes float32 of shape"
    ):
        union(spaces.Box(0, 1, (3,)), spaces.Box(0, 1, (2,)), "actions")
    with pytest.raises(InputError, match=r"observations\['a'\] is Discrete\(3\)"):
        union(spaces.Dict({"a": spaces.Discrete(2)}), spaces.Dict({"a": spaces.Discrete(3)}), "observations")


def test_floats_are_recorded_as_float32_and_images_unchanged():
    found = recorded_space(NESTED)
    assert found["arm"]["joints"].dtype == np.float32
    assert found["camera"] == IMAGE
    assert found["parts"] == NESTED["parts"]
