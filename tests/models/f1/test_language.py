"""Instructions as tokens."""

import pytest

from deft.errors import InputError
from deft.models.f1.config import PRESETS
from deft.models.f1.language import ByteTokenizer, FolderTokenizer, make_language_tokenizer


def test_bytes_as_words():
    tokens, mask = ByteTokenizer(6)(["ab", "abcdefgh", ""])
    assert tokens.tolist() == [[2, 100, 101, 13, 0, 0], [2, 100, 101, 102, 103, 104], [2, 13, 0, 0, 0, 0]]
    assert mask.sum(1).tolist() == [4, 6, 2]


def test_the_longest_instruction_of_the_tabletop_is_read_to_its_end():
    """55 bytes, a beginning and a new line: the object that it goes onto is named last."""
    text = "place the yellow cylinder on top of the purple cylinder"
    for preset in ("tiny", "small"):
        tokens, mask = make_language_tokenizer(PRESETS[preset]())([text])
        assert int(mask.sum()) == len(text) + 2 < tokens.shape[1]
        assert bytes(tokens[0, 1 : len(text) + 1].sub(3).tolist()).decode() == text


def test_a_language_tokenizer_that_is_not_there():
    with pytest.raises(InputError, match="language_tokenizer_path is not set"):
        FolderTokenizer("", 8)
    with pytest.raises(InputError, match="language_tokenizer_path /nowhere is not a folder"):
        FolderTokenizer("/nowhere", 8)
