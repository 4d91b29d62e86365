import itertools
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


def test_deep_flow_yaml_is_an_error_before_it_is_scanned(tmp_path, monkeypatch):
    (tmp_path / "config.yaml").write_text("seed: " + "[" * 5000)
    # PyYAML looks ahead from every bracket: 5000 of them are 12.5 million looks without a bound.
    looks, look = [], yaml.scanner.Scanner.stale_possible_simple_keys

    def counted(scanner):
        looks.append(1)
        look(scanner)

    monkeypatch.setattr(yaml.scanner.Scanner, "stale_possible_simple_keys", counted)
    with pytest.raises(InputError, match=r"config\.yaml: nests deeper than 64 levels"):
        load_config(tmp_path / "config.yaml")
    assert len(looks) < 1000


def test_yaml_merges_that_multiply_are_an_error(tmp_path):
    # Six levels of nine merges each: 9⁶ = 531,441 settings.
    names = "abcdefg"
    text = "a: &a {x: 1}\n" + "".join(
        f"{name}: &{name} {{<<: [{','.join(['*' + before] * 9)}]}}\n" for before, name in itertools.pairwise(names)
    )
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(InputError, match=r"config\.yaml, line 6: .*'<<' merges more than 10,000 settings"):
        load_config(tmp_path / "config.yaml")


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("list.yaml", "{[1, 2]: 3}", "line 1: not valid YAML: found unhashable key"),
        ("twice.json", '{"a": 1, "b": 2, "a": 3}', "'a' is given twice in one section"),
        ("open.json", '{"seed": 1} /* and', r"a comment that '/\*' opens is not closed"),
        # Each of these was looked through once for every '/*' before it: 10¹⁰ characters.
        ("comments.json", "/*" * 100_000, "is not closed"),
        ("keys.json", json.dumps({str(number): 0 for number in range(100_000)}), "unknown setting"),
    ],
)
def test_other_text_that_is_no_config_is_an_error(tmp_path, name, text, words):
    (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=words):
        load_config(tmp_path / name)
