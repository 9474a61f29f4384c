"""Tokenizers of adopted stores, whose documents are told apart by one id that both ends and begins them, or by none."""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np

from tlm_jax.data.tokenizer import MOST_IDS, Tokenizer, tokenizer_from_bytes
from tlm_jax.errors import UserError
from tlm_jax.files import parse_json


class SeparatedTokenizer(Tokenizer):
    """A tokenizer of which one id, the separator, serves as begin and as end of a document, or none does.

    Args:
      inner: encodes and decodes.
      separator: the id; it stands for no text. None: documents are not marked.
    """

    kind = "separated"

    def __init__(self, inner: Tokenizer, separator: int | None) -> None:
        self._inner, self._separator = inner, separator
        self.marks_documents = separator is not None
        self.vocab_size = inner.vocab_size
        self.bos_id, self.eos_id = (inner.bos_id, inner.eos_id) if separator is None else (separator, separator)
        self.pad_id = inner.pad_id
        self.prefix, self.unicode_form = inner.prefix, inner.unicode_form

    def encode_array(self, text: str) -> np.ndarray:
        return self._inner.encode_array(text)

    def id_bytes(self, token_id: int) -> bytes:
        return b"" if token_id == self._separator else self._inner.id_bytes(token_id)

    def special_name(self, token_id: int) -> str:
        return self._inner.special_name(token_id)

    def to_bytes(self) -> bytes:
        inner = base64.b64encode(self._inner.to_bytes()).decode()
        return json.dumps({"kind": self._inner.kind, "separator": self._separator, "data": inner}).encode()


class IdTokenizer(Tokenizer):
    """Ids whose tokenizer is not known. Its texts are decimal ids with spaces between; no id has any bytes of text.

    Args:
      num_ids: ids are in [0, num_ids).
      separator: the id between documents; None: there is none, and one more id is made to pad with.
    """

    kind = "ids"
    prefix = b" "

    def __init__(self, num_ids: int, separator: int | None) -> None:
        self._num_ids, self._separator = num_ids, separator
        self.marks_documents = separator is not None
        self.vocab_size = num_ids + (separator is None)
        self.bos_id = self.eos_id = self.pad_id = num_ids if separator is None else separator

    def special_name(self, token_id: int) -> str:
        return "added" if self._separator is None else "between documents"

    def encode_array(self, text: str) -> np.ndarray:
        parts = text.split()
        for part in parts:
            if not (part.isascii() and part.isdigit() and int(part) < self._num_ids):
                raise UserError(
                    f"{part!r} is no id below {self._num_ids}",
                    where="text",
                    mend="the tokenizer is not known: give ids with spaces between, or adopt with --tokenizer",
                )
        return np.array(parts, np.int32)

    def id_bytes(self, token_id: int) -> bytes:
        return b"" if token_id == self.eos_id else f" {token_id}".encode()

    def token_bytes(self) -> np.ndarray:
        return np.zeros(self.vocab_size, np.int32)

    def to_bytes(self) -> bytes:
        return json.dumps({"num_ids": self._num_ids, "separator": self._separator}).encode()


def tokenizer_with_separator(tokenizer: Tokenizer, separator: int | None) -> Tokenizer:
    """Returns the tokenizer itself where its documents already begin and end with the separator, or with none."""
    marks = {tokenizer.bos_id, tokenizer.eos_id} if tokenizer.marks_documents else {None}
    if marks == {separator}:
        return tokenizer
    return SeparatedTokenizer(tokenizer, separator)


def adopted_tokenizer_from_bytes(kind: str, data: bytes, where: str) -> Tokenizer | None:
    """Builds the tokenizer that `to_bytes` of one of these kinds wrote; None: the kind is none of them.

    Raises:
      UserError: data that define no such tokenizer.
    """
    if kind not in (SeparatedTokenizer.kind, IdTokenizer.kind):
        return None
    try:
        entry: dict[str, Any] = parse_json(data)
        if kind == IdTokenizer.kind:
            if not 0 < entry["num_ids"] <= MOST_IDS:
                raise ValueError
            return IdTokenizer(entry["num_ids"], entry["separator"])
        inner = tokenizer_from_bytes(entry["kind"], base64.b64decode(entry["data"], validate=True), where)
        return SeparatedTokenizer(inner, entry["separator"])
    except (ValueError, LookupError, TypeError) as error:
        raise UserError(f"defines no tokenizer of kind {kind!r}", where=where) from error
