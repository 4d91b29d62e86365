"""How spaces, observations and actions become arrays."""

import re

import numpy as np
import pytest
import torch
from gymnasium import spaces

from deft.envs.layout import ActionLayout, ObservationLayout, first_not_finite, take_rows, with_rows
from deft.errors import InputError
from deft.schema import decode_text


def test_nested_dict_is_flattened_and_text_becomes_bytes() -> None:
    robot = spaces.Dict({"joints": spaces.Box(-1, 1, (2,), np.float64), "mode": spaces.Discrete(3, start=5)})
    layout = ObservationLayout(
        spaces.Dict(
            {
                "robot": robot,
                "instruction": spaces.Text(12),
                "wrist_rgb": spaces.Box(0, 255, (4, 4, 3), np.uint8),
                "switches": spaces.MultiBinary(2),
            }
        )
    )
    assert set(layout.space.spaces) == {"robot/joints", "robot/mode", "instruction", "wrist_rgb", "switches"}
    assert layout.space["robot/joints"].dtype == np.float32
    assert layout.space["robot/mode"] == spaces.Discrete(3)
    assert layout.space["instruction"] == spaces.Box(0, 255, (12,), np.uint8)
    arrays = layout.allocate(3)
    observation = {
        "robot": {"joints": np.array([0.5, -0.5]), "mode": 7},
        "instruction": "pickup",
        "wrist_rgb": np.full((4, 4, 3), 9, np.uint8),
        "switches": np.array([1, 0], np.int8),
    }
    assert layout.difference(observation) is None
    layout.write(observation, arrays, 1)
    assert arrays["robot/joints"].dtype == np.float32
    assert arrays["robot/joints"].tolist() == [[0, 0], [0.5, -0.5], [0, 0]]
    assert arrays["robot/mode"].dtype == np.int64
    assert arrays["robot/mode"].tolist() == [0, 2, 0]  # 7 - start 5
    assert decode_text(arrays["instruction"][1]) == "pickup"
    assert arrays["wrist_rgb"].dtype == np.uint8
    assert arrays["switches"].tolist() == [[0, 0], [1, 0], [0, 0]]
    assert ObservationLayout(layout.space).space == layout.space


def test_text_of_wide_characters_has_room_for_its_bytes() -> None:
    layout = ObservationLayout(spaces.Text(4, charset="aé"))  # é takes two bytes in UTF-8
    arrays = layout.allocate(1)
    layout.write("éééé", arrays, 0)
    assert isinstance(arrays, np.ndarray)
    assert decode_text(arrays[0]) == "éééé"


def test_discrete_observation_is_int64_of_shape_n() -> None:
    arrays = ObservationLayout(spaces.Discrete(5)).allocate(4)
    assert isinstance(arrays, np.ndarray)
    assert arrays.shape == (4,)
    assert arrays.dtype == np.int64


@pytest.mark.parametrize(
    "space",
    [
        spaces.Tuple((spaces.Discrete(2), spaces.Discrete(2))),
        spaces.Dict({"inner": spaces.Tuple((spaces.Discrete(2),))}),
        spaces.Sequence(spaces.Discrete(2)),
    ],
)
def test_unsupported_observation_space_is_rejected(space: spaces.Space) -> None:
    with pytest.raises(InputError, match="Deft takes Box") as caught:
        ObservationLayout(space)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("observation", "message"),
    [
        ({"a": np.zeros(1, np.float32), "b": 0}, r"'a' is float32 \(1,\)"),  # would broadcast into (2,)
        ({"a": np.zeros(2, np.float32), "b": 0.5}, "'b' is float64"),  # would be cut to 0
        ({"a": np.zeros(2, np.float32)}, "no 'b'"),
    ],
)
def test_observation_that_does_not_fit_its_space_is_described(observation: dict, message: str) -> None:
    layout = ObservationLayout(spaces.Dict({"a": spaces.Box(-1, 1, (2,)), "b": spaces.Discrete(3)}))
    assert re.search(message, layout.difference(observation) or "")


def test_row_survives_encoding() -> None:
    layout = ObservationLayout(spaces.Dict({"a": spaces.Box(-1, 1, (2,)), "b": spaces.Discrete(3)}))
    arrays, other = layout.allocate(2), layout.allocate(2)
    layout.write({"a": np.array([0.1, -0.7], np.float32), "b": 2}, arrays, 1)
    layout.decode_row(layout.encode_row(arrays, 1), other, 1)
    assert other["a"].tobytes() == arrays["a"].tobytes()
    assert other["b"].tolist() == [0, 2]


@pytest.mark.parametrize(
    ("shape", "row"),
    [
        ((32, 48, 3), (3, 32, 48)),
        ((84, 84, 1), (1, 84, 84)),
        ((2, 32, 48, 3), (2, 3, 32, 48)),  # a history
        ((3, 32, 48), (3, 32, 48)),  # these have them first already, or have none
        ((9, 64, 64), (9, 64, 64)),
        ((2, 3, 32, 48), (2, 3, 32, 48)),
        ((84, 84), (84, 84)),
    ],
)
def test_images_have_their_channels_first(shape: tuple[int, ...], row: tuple[int, ...]) -> None:
    layout = ObservationLayout(spaces.Dict({"camera": spaces.Box(0, 255, shape, np.uint8)}))
    assert layout.space["camera"] == spaces.Box(0, 255, row, np.uint8)
    image = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    assert layout.difference({"camera": image}) is None
    arrays, batched, restored = layout.allocate(2), layout.allocate(2), layout.allocate(2)
    layout.write({"camera": image}, arrays, 1)
    layout.write_batch({"camera": np.stack([image, image])}, batched, np.arange(2))
    expected = image if row == shape else np.moveaxis(image, -1, -3)
    assert np.array_equal(arrays["camera"][1], expected)
    assert np.array_equal(batched["camera"], np.stack([expected, expected]))
    layout.decode_row(layout.encode_row(arrays, 1), restored, 1)
    assert np.array_equal(restored["camera"], arrays["camera"])


def test_an_image_of_another_size_is_named_as_the_environment_has_it() -> None:
    layout = ObservationLayout(spaces.Box(0, 255, (32, 48, 3), np.uint8))
    expected = "the observation is uint8 (48, 32, 3), but the observation_space is uint8 (32, 48, 3)"
    assert layout.difference(np.zeros((48, 32, 3), np.uint8)) == expected


def test_floats_are_no_images() -> None:
    assert ObservationLayout(spaces.Box(0, 1, (32, 48, 3), np.float32)).space.shape == (32, 48, 3)


def test_taken_rows_are_copies() -> None:
    array = np.arange(6).reshape(3, 2)
    taken = take_rows({"a": array}, np.array([2, 0]))
    array[:] = -1
    assert taken["a"].tolist() == [[4, 5], [0, 1]]


@pytest.mark.parametrize("make", [np.array, torch.tensor])
def test_rows_are_replaced_in_a_copy(make) -> None:
    rows, other = make([[1.0], [2.0], [3.0]]), make([[9.0], [8.0]])
    for observation, given in ((rows, other), ({"a": rows}, {"a": other})):
        found = with_rows(observation, make([2, 0]), given)
        assert (found["a"] if isinstance(found, dict) else found).tolist() == [[8.0], [2.0], [9.0]]
    assert rows.tolist() == [[1.0], [2.0], [3.0]]


def test_box_actions_are_clipped_in_a_new_array() -> None:
    layout = ActionLayout(spaces.Box(np.array([-1, -np.inf], np.float32), np.array([1, 2], np.float32)))
    actions = np.array([[-3, -9], [0.5, 9]])
    prepared = layout.prepare(actions, 2)
    assert prepared.tolist() == [[-1, -9], [0.5, 2]]
    assert prepared.dtype == np.float32
    assert actions.tolist() == [[-3, -9], [0.5, 9]]


def test_discrete_actions_count_from_zero() -> None:
    layout = ActionLayout(spaces.Discrete(3, start=-1))
    assert layout.space == spaces.Discrete(3)
    rows = layout.rows(layout.prepare(np.array([0, 2]), 2))
    assert rows == [-1, 1]
    assert type(rows[0]) is int
    multi = ActionLayout(spaces.MultiDiscrete([2, 3], start=[1, 0]))
    assert multi.prepare(np.array([[0, 2]]), 1).tolist() == [[1, 2]]
    assert ActionLayout(spaces.MultiBinary(3)).space == spaces.MultiDiscrete([2, 2, 2])


@pytest.mark.parametrize(
    "space",
    [
        spaces.Dict({"a": spaces.Discrete(2)}),
        spaces.Tuple((spaces.Discrete(2),)),
        spaces.Box(0, 9, (2,), np.int64),
        spaces.MultiBinary((2, 2)),
    ],
)
def test_unsupported_action_space_is_rejected(space: spaces.Space) -> None:
    with pytest.raises(InputError, match="is not supported") as caught:
        ActionLayout(space)
    assert "\n" not in str(caught.value)


def test_actions_of_another_shape_are_rejected() -> None:
    with pytest.raises(InputError, match=r"shape \(2, 1\).*take \(2,\)"):
        ActionLayout(spaces.Discrete(2)).prepare(np.zeros((2, 1), np.int64), 2)


def test_the_first_row_that_is_not_finite_is_found():
    values = np.zeros((3, 2))
    assert first_not_finite(values) is None
    assert first_not_finite(values.astype(int)) is None
    values[2, 1], values[1, 0] = np.nan, -np.inf
    assert first_not_finite(values) == 1
    assert first_not_finite(np.full((3, 2), 1e308)) is None  # their sum overflows, and each of them is a number
