"""Tokenizers: text to ids and back, and how many bytes of text each id stands for.

Every tokenizer keeps two promises, on which bits per byte and the token store rest. With `x` any string that UTF-8 can
carry and `document(x)` its begin id, `encode(x)` and its end id:

    decode(encode(x)) == x
    token_bytes()[document(x)].sum() == len(x.encode())

A tokenizer that brings text into a Unicode normalisation form (`unicode_form`) keeps them for x in that form. One that
puts a space before a text gives the end id -1 byte, which takes that space back.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tlm_jax.errors import UserError
from tlm_jax.files import parse_json

# Kinds of tokenizers that need a library: module and class.
_KINDS = {
    "sentencepiece": ("tlm_jax.data.sentencepiece_tokenizer", "SentencePieceTokenizer"),
    "huggingface": ("tlm_jax.data.huggingface_tokenizer", "HuggingFaceTokenizer"),
    "tiktoken": ("tlm_jax.data.tiktoken_tokenizer", "TiktokenTokenizer"),
}
MOST_IDS = 2**24  # of a vocabulary; tables of all ids are held
_RANK_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\r?\n")
_WHAT_THERE_IS = "give `byte`, a SentencePiece .model, a Hugging Face tokenizer.json or a .tiktoken file"


class UnfitText(UserError):
    """A tokenizer that serves in general would change this one text."""


class Tokenizer(ABC):
    """What the rest of the project knows of a tokenizer.

    Attributes:
      kind: name under which `tokenizer_from_bytes` finds the class again.
      vocab_size: number of ids; every id is in [0, vocab_size).
      bos_id, eos_id, pad_id: what begins and ends a document and fills a window. They are three different ids that
        `encode` never returns; only those of adopted stores may be one id, and one that a text can name.
      marks_documents: whether documents begin with bos_id (and end with eos_id, if that is another); if not, a store's
        offsets tell them apart, and no prompt begins with bos_id.
      unicode_form: "NFC", "NFKC", "NFD" or "NFKD" if the tokenizer brings text into that form; else "".
      prefix: what it puts before every text, b" " or nothing.
    """

    kind: str
    vocab_size: int
    bos_id: int
    eos_id: int
    pad_id: int
    marks_documents: bool = True
    unicode_form: str = ""
    prefix: bytes = b""

    @abstractmethod
    def encode_array(self, text: str) -> np.ndarray:
        """Returns the ids of `text`, int32 [num_tokens], without specials.

        Raises:
          UnicodeEncodeError: the text holds a lone surrogate, which UTF-8 cannot carry.
          UnfitText: the promises would not hold for this text.
        """

    @abstractmethod
    def id_bytes(self, token_id: int) -> bytes:
        """Returns the UTF-8 bytes that an id stands for; empty for specials."""

    @abstractmethod
    def to_bytes(self) -> bytes:
        """Returns all that defines the tokenizer; `tokenizer_from_bytes(kind, data)` inverts it."""

    def special_name(self, token_id: int) -> str:
        """How the tokenizer calls a special id; "added" for one that it lacked."""
        return "added"

    def encode(self, text: str) -> list[int]:
        """Returns the ids of `text` without specials; raises as `encode_array`."""
        return self.encode_array(text).tolist()

    def spell(self, ids: Sequence[int] | np.ndarray) -> bytes:
        """Returns the bytes that ids stand for, one after the other."""
        return b"".join(map(self._bytes_by_id.__getitem__, ids.tolist() if isinstance(ids, np.ndarray) else ids))

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Returns the text of `ids`; specials and the prefix are dropped, bytes that are no UTF-8 become U+FFFD."""
        return self.spell(ids).removeprefix(self.prefix).decode("utf-8", errors="replace")

    def token_bytes(self) -> np.ndarray:
        """Returns int32 [vocab_size]: the number of UTF-8 bytes of text each id stands for.

        0 for specials, but minus the prefix's length for the end id.
        """
        lengths = np.array([len(piece) for piece in self._bytes_by_id], np.int32)
        lengths[self.eos_id] -= len(self.prefix)
        return lengths

    @property
    def hash(self) -> str:
        """The sha256 (hex) of what defines the tokenizer."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    @functools.cached_property
    def _bytes_by_id(self) -> list[bytes]:
        return [self.id_bytes(i) for i in range(self.vocab_size)]

    def __reduce__(self) -> tuple:
        return tokenizer_from_bytes, (self.kind, self.to_bytes())


class ByteTokenizer(Tokenizer):
    """One id per UTF-8 byte, then the specials."""

    kind = "byte"
    vocab_size = 259
    bos_id, eos_id, pad_id = 256, 257, 258

    def encode_array(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def id_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else b""

    def to_bytes(self) -> bytes:
        return json.dumps({"kind": self.kind, "vocab_size": self.vocab_size}).encode()


def tokenizer_from_bytes(kind: str, data: bytes, where: str = "tokenizer") -> Tokenizer:
    """Builds the tokenizer that `to_bytes` of the same kind wrote.

    Raises:
      UserError: an unknown kind, data that define no such tokenizer, or a library that is not installed.
    """
    from tlm_jax.data.adopted_tokenizer import adopted_tokenizer_from_bytes  # which is made of tokenizers itself

    if kind == ByteTokenizer.kind:
        tokenizer = ByteTokenizer()
        if data != tokenizer.to_bytes():
            raise UserError("not this version's byte tokenizer", where=where)
        return tokenizer
    if kind in _KINDS:
        module, name = _KINDS[kind]
        return getattr(importlib.import_module(module), name)(data, where)
    if adopted := adopted_tokenizer_from_bytes(kind, data, where):
        return adopted
    raise UserError(f"unknown tokenizer kind {kind!r}", where=where)


def read_definition(data: bytes, types: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Reads a `to_bytes` that is JSON.

    Args:
      data: the text.
      types: of each key's value.
      where: the file's name, for messages.

    Raises:
      UserError: it is none, or one of the keys is missing or of another type.
    """
    try:
        found = parse_json(data)
        chosen = {key: found[key] for key in types}
        if not all(isinstance(chosen[key], kind) for key, kind in types.items()):
            raise TypeError
        return chosen
    except (ValueError, LookupError, TypeError) as error:
        raise UserError("not a tokenizer that this version wrote", where=where, mend=_WHAT_THERE_IS) from error


def load_tokenizer(spec: str, *, bos_token: str = "", eos_token: str = "", tiktoken_pattern: str = "") -> Tokenizer:
    """Loads "byte", a SentencePiece model, a Hugging Face `tokenizer.json`, a `.tiktoken` file, or a store's tokenizer.

    Args:
      spec: "byte" or a file.
      bos_token, eos_token: for a `tokenizer.json`: which of its tokens begin and end a document.
      tiktoken_pattern: for a `.tiktoken` file: the regular expression that splits text, or the name of an encoding.

    Raises:
      UserError: no such file, the tokenizer is of no use here, or it has no use for one of the choices.
    """
    path = Path(spec)
    if spec != ByteTokenizer.kind and not path.is_file():
        mend = "name the file in it" if path.is_dir() else _WHAT_THERE_IS
        raise UserError("no such tokenizer", where=spec, mend=mend)
    data = b"" if spec == ByteTokenizer.kind else path.read_bytes()
    chosen = {"--bos-token": bos_token, "--eos-token": eos_token, "--tiktoken-pattern": tiktoken_pattern}
    kind = _kind_of(spec, data)
    uses = {"huggingface": ("--bos-token", "--eos-token"), "tiktoken": ("--tiktoken-pattern",)}.get(kind, ())
    if useless := [name for name, value in chosen.items() if value and name not in uses]:
        raise UserError(f"{spec} has no use for it", where=useless[0], mend="leave it out")
    if kind == "huggingface":
        from tlm_jax.data.huggingface_tokenizer import definition_from_file

        data = definition_from_file(path, bos_token, eos_token)
    elif kind == "tiktoken":
        from tlm_jax.data.tiktoken_tokenizer import definition_from_ranks

        data = definition_from_ranks(data, tiktoken_pattern, spec)
    elif kind == "ours":
        kind = parse_json(data)["kind"]
    return tokenizer_from_bytes(kind, data or ByteTokenizer().to_bytes(), where=spec)


def _kind_of(spec: str, data: bytes) -> str:
    """The kind of a tokenizer file; "ours" for one that `to_bytes` wrote as JSON."""
    if spec == ByteTokenizer.kind:
        return ByteTokenizer.kind
    if spec.endswith(".tiktoken") or _RANK_LINE.match(data):
        return "tiktoken"
    if not spec.endswith(".json"):
        return "sentencepiece"
    try:
        definition = parse_json(data)
    except ValueError as error:
        raise UserError(f"malformed JSON: {error}", where=spec, mend=_WHAT_THERE_IS) from error
    return "ours" if isinstance(definition, dict) and isinstance(definition.get("kind"), str) else "huggingface"
