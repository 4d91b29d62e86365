"""Instructions as tokens for the understanding expert: bytes, which need no files, or a tokenizer from a folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from deft import schema, trust
from deft.config.validation import Count
from deft.errors import InputError
from deft.models.f1.config import F1Config

BYTES = "bytes"
PADDING, BEGINNING, FIRST_BYTE = 0, 2, 3


# Converts texts to tokens of a fixed length: int64 [B, W], and their mask, bool [B, W].
LanguageTokenizer: TypeAlias = Callable[[Sequence[str]], tuple[Tensor, Tensor]]


class ByteTokenizer:
    """UTF-8 bytes after a start token, with a newline at the end; 259 tokens."""

    def __init__(self, length: Count) -> None:
        self.length = length

    def __call__(self, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Return tokens, int64 [B, W], and their mask, bool [B, W]. Long texts are truncated."""
        tokens = np.full((len(texts), self.length), PADDING, np.int64)
        for row, text in zip(tokens, texts, strict=True):
            codes = [BEGINNING, *(FIRST_BYTE + byte for byte in _prompt(text).encode())][: self.length]
            row[: len(codes)] = codes
        found = torch.from_numpy(tokens)
        return found, found != PADDING


class FolderTokenizer:
    """A tokenizer of transformers, from a folder on this machine."""

    def __init__(self, folder: str, length: int) -> None:
        if not folder:
            raise InputError(
                "language_tokenizer_path is not set; set the folder of the language tokenizer's files, or 'bytes'"
            )
        if not Path(folder).is_dir():
            raise InputError(
                f"language_tokenizer_path {folder} is not a folder; give the folder with the tokenizer's files"
            )
        try:
            from transformers import AutoTokenizer
        except ImportError:
            raise InputError('a language tokenizer needs transformers: pip install "deft[vla]"') from None
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=trust.trusts_remote_code()
            )
        except (OSError, ValueError) as error:
            reason = str(error).strip().partition("\n")[0]
            if "trust_remote_code=True" in str(error):
                reason = "it contains its own code; if you trust its author, use --trust-remote-code"
            raise InputError(f"language_tokenizer_path {folder} cannot be read: {reason}") from None
        self.length = length

    def __call__(self, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Return tokens, int64 [B, W], and their mask, bool [B, W]."""
        found = self._tokenizer(
            [_prompt(text) for text in texts],
            padding="max_length",
            padding_side="right",
            max_length=self.length,
            truncation=True,
            return_tensors="pt",
        )
        return found["input_ids"], found["attention_mask"].bool()


def make_language_tokenizer(config: F1Config) -> LanguageTokenizer:
    """Create the tokenizer of a config."""
    if config.language_tokenizer_path == BYTES:
        return ByteTokenizer(config.tokenizer_max_length)
    return FolderTokenizer(config.language_tokenizer_path, config.tokenizer_max_length)


def instruction_texts(instructions: Tensor) -> list[str]:
    """Rows of instruction bytes (`schema.encode_text`) as texts."""
    return [schema.decode_text(row) for row in instructions.cpu().numpy()]


def _prompt(text: str) -> str:
    """A prompt ends with a new line."""
    return text if text.endswith("\n") else f"{text}\n"
