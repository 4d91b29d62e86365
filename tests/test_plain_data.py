import json

import pytest
import yaml

from deft.config.loading import load_config
from deft.errors import InputError
from deft.plain_data import parse_bounded

# Nine levels of nine references each: 9⁹ values in 381 bytes.
BOMB = "a: &a [1,1,1,1,1,1,1,1,1]\n" + "".join(
    f"{name}: &{name} [{','.join(['*' + before] * 9)}]\n" for before, name in zip("abcdefghi", "bcdefghij", strict=True)
)


def test_yaml_aliases_that_expand_without_end_are_an_error(tmp_path):
    (tmp_path / "config.yaml").write_text(BOMB)
    with pytest.raises(InputError, match=r"config\.yaml: holds more than 2,000,000 values"):
        load_config(tmp_path / "config.yaml")


@pytest.mark.parametrize("depth", [100, 100_000])
def test_deep_nesting_is_an_error(tmp_path, depth):
    with pytest.raises(ValueError, match="nests deeper than 64 levels"):
        parse_bounded("[" * depth + "]" * depth)
    (tmp_path / "config.json").write_text('{"seed": ' + "[" * depth + "]" * depth + "}")
    with pytest.raises(InputError, match="nests deeper than 64 levels"):
        load_config(tmp_path / "config.json")


def test_ordinary_data_is_as_it_was():
    value = {"a": [1, 2.5, None], "b": {"c": "d", "e": [[], {}]}}
    assert parse_bounded(json.dumps(value)) == value
    assert parse_bounded(yaml.safe_dump(value), yaml.safe_load) == value
