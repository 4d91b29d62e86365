"""Messages of clients: every mistake is one clear error, and arrays arrive with the same bits."""

import base64
import json

import numpy as np
import pytest

from deft.client import encode as encode_value
from deft.deployment.messages import decode, encode, error_answer
from deft.errors import InputError


def array(dtype="uint8", shape=(2,), data=b"ab"):
    return {"dtype": dtype, "shape": list(shape), "data": base64.b64encode(data).decode()}


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64"])
def test_arrays_arrive_with_the_same_bits(dtype):
    sent = (np.random.default_rng(0).normal(size=(2, 3, 4)) * 50).astype(dtype)
    got = decode(json.dumps({"observation": {"a": encode_value(sent[:, ::2])}})).observation["a"]
    assert got.dtype == dtype
    assert got.tobytes() == sent[:, ::2].tobytes()


def test_big_endian_arrays_and_scalars_arrive_with_the_same_values():
    got = decode(json.dumps({"observation": encode_value(np.array([1.5, 2.5], ">f4"))})).observation
    np.testing.assert_array_equal(got, [1.5, 2.5])
    assert decode(json.dumps({"observation": encode_value(np.int64(2))})).observation == 2


def test_lists_texts_and_nested_streams():
    message = decode('{"observation": {"a": [0, 255], "b": [-1, 2], "c": {"d": [0.5]}, "e": "pick ü"}, "id": 7}')
    streams = message.observation
    assert streams["a"].dtype == np.uint8  # may be an image
    assert streams["b"].dtype == np.int64
    assert (streams["c"]["d"].tolist(), streams["e"], message.id) == ([0.5], "pick ü", 7)
    assert decode('{"reset": true}').observation is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ("[1]", "send an object with observation"),
        ("null", "send an object"),
        ("{}", "no observation"),
        (b"\xff\xfe", "not JSON"),
        ('{"observation": [NaN]}', "NaN is not a finite number"),
        ('{"observation": [-Infinity]}', "-Infinity is not a finite number"),
        ('{"observation": [1], "action": 2}', "unknown key 'action'"),
        ('{"observation": [1], "id": [1]}', "id [1] is not"),
        ('{"observation": [1], "id": true}', "id True is not"),
        ('{"observation": [1], "reset": 1}', "reset 1 is not true or false"),
        ('{"observation": [1], "reward": "1"}', "reward '1' is not a number"),
        ('{"observation": [1, [2]]}', "different lengths"),
        ('{"observation": [null]}', "not numbers"),
        ('{"observation": {"a": null}}', "not numbers"),
        ('{"observation": ["a", "b"]}', "not numbers"),
        (f'{{"observation": [1{"0" * 400}]}}', "not numbers"),
        (f'{{"observation": [1{"0" * 5000}]}}', "not JSON"),
        ('{"observation": {"a": "\\ud800"}}', "UTF-8"),
        ("[" * 100_000, "nests deeper"),
        ('{"observation": ' + "[" * 100 + "1" + "]" * 100 + "}", "nests deeper"),
    ],
)
def test_wrong_messages(text, words):
    with pytest.raises(InputError, match=r"\S") as error:
        decode(text)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (array(dtype="object"), "dtype 'object'"),
        (array(dtype="O"), "dtype 'O'"),
        (array(dtype=["u1"]), "dtype"),
        (array(shape=(3,)), "data has 2 bytes; uint8 of shape [3] has 3"),
        (array(shape=(-2, -1)), "sizes"),
        (array(shape=(2**31, 2**31)), "data has 2 bytes"),
        (array(shape=(1,) * 9), "sizes"),
        (array() | {"shape": "2"}, "sizes"),
        (array() | {"shape": [2.0]}, "sizes"),
        (array() | {"data": "é"}, "not base64"),
        (array() | {"data": "YW"}, "not base64"),
        (array() | {"data": "YW I="}, "not base64"),
        (array() | {"data": 5}, "not base64"),
        (array(dtype="bool"), "0 or 1"),
    ],
)
def test_wrong_arrays(value, words):
    with pytest.raises(InputError) as error:
        decode(json.dumps({"observation": {"rgb": value}}))
    assert words in str(error.value)
    assert "rgb" in str(error.value)


def test_answers_keep_the_bits_of_float32_and_errors_are_short():
    action = np.random.default_rng(0).normal(size=(50, 7)).astype(np.float32)
    again = np.asarray(json.loads(encode({"action": action}))["action"], np.float32)
    assert again.tobytes() == action.tobytes()
    assert len(error_answer(InputError("x" * 10_000))["error"]) == 400
