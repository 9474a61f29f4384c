"""Tokenizers of the Hugging Face library `tokenizers`, from their `tokenizer.json`."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tlm_jax.data.extras import optional_library
from tlm_jax.data.pieces import SPACE_SYMBOL, PieceTokenizer
from tlm_jax.data.tokenizer import MOST_IDS, read_definition
from tlm_jax.errors import UserError
from tlm_jax.files import parse_json

# Specials by which published tokenizers begin, end and pad documents; used where nothing else says which.
_DEEPSEEK = "<\uff5c{}\u2581of\u2581sentence\uff5c>"
_KNOWN_BOS = ("<s>", "<bos>", "<|bos|>", "[BOS]", "<|begin_of_text|>", "<|startoftext|>", _DEEPSEEK.format("begin"))
_KNOWN_EOS = ("</s>", "<eos>", "<|eos|>", "[EOS]", "<|end_of_text|>", "<|endoftext|>", "<EOT>", _DEEPSEEK.format("end"))
_KNOWN_PAD = ("<pad>", "[PAD]", "<|pad|>", "<|padding|>")
_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")
_MEND = "train one with `tlm tokenizer`, or choose a byte-level one"


def definition_from_file(path: Path, bos_token: str = "", eos_token: str = "") -> bytes:
    """Returns what defines the tokenizer here: the file, and which of its tokens begin, end and pad a document.

    A `tokenizer.json` does not say the latter. In this order it is: the token given; the one that a
    `tokenizer_config.json` beside the file names; the only special with a known name; none, and an id is added.

    Raises:
      UserError: a token that the tokenizer lacks, or several specials with known names.
    """
    text = _read_text(path)
    added = _dictionary(text.encode(), str(path)).get("added_tokens") or []
    if not isinstance(added, list) or not all(isinstance(token, dict) for token in added):
        raise UserError("`added_tokens` is not a list of objects", where=str(path))
    special = {str(token.get("content")) for token in added if token.get("special")}
    config = path.with_name("tokenizer_config.json")
    named = _dictionary(config.read_bytes(), str(config)) if config.is_file() else {}

    def choose(role: str, given: str, known: tuple[str, ...]) -> str | None:
        if given:
            return given
        if f"{role}_token" in named:
            token = named[f"{role}_token"]
            token = token.get("content") if isinstance(token, dict) else token
            if not isinstance(token, str | None):
                raise UserError(f"{role}_token is no text", where=str(config))
            return token
        found = [name for name in known if name in special]
        if len(found) > 1 and role != "pad":
            what = f"several tokens could be meant: {', '.join(found)}"
            raise UserError(what, where=str(path), mend=f"say which with --{role}-token")
        return found[0] if found else None

    tokens = {
        "bos_token": choose("bos", bos_token, _KNOWN_BOS),
        "eos_token": choose("eos", eos_token, _KNOWN_EOS),
        "pad_token": choose("pad", "", _KNOWN_PAD),
    }
    return json.dumps({"kind": HuggingFaceTokenizer.kind, **tokens, "tokenizer.json": text}, sort_keys=True).encode()


def _read_text(path: Path) -> str:
    try:
        return path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise UserError("invalid UTF-8", where=str(path)) from error


def _dictionary(data: bytes, where: str) -> dict[str, Any]:
    try:
        found = parse_json(data)
    except ValueError as error:
        raise UserError(f"malformed JSON: {error}", where=where) from error
    if not isinstance(found, dict):
        raise UserError("not a JSON object", where=where)
    return found


class HuggingFaceTokenizer(PieceTokenizer):
    """A tokenizer of the library `tokenizers` that loses no text: byte-level, or with byte fallback.

    Its ids are the library's, with special tokens in the text taken as the text that they are. Truncation and padding
    that the file asks for are not done.

    Args:
      definition: what `definition_from_file` returns.
      where: the file's name, for messages.

    Raises:
      UserError: the library is missing or cannot read the file, or the tokenizer would lose text.
    """

    kind = "huggingface"
    _part_characters, _longest_part = 1 << 20, 1 << 22  # seldom cut: pieces may span spaces

    def __init__(self, definition: bytes, where: str = "tokenizer") -> None:
        self._definition = definition
        self._library = optional_library("tokenizers", where)
        types = {**dict.fromkeys(("bos_token", "eos_token", "pad_token"), str | None), "tokenizer.json": str}
        chosen = read_definition(definition, types, where)
        self._spec = _dictionary(chosen["tokenizer.json"].encode(), where)
        self._first = self._build(chosen["tokenizer.json"], where)
        self._byte_level = self._check_lossless(where)
        self._added_tokens = self._first.get_added_tokens_decoder()
        self._names = {i: token for token, i in self._first.get_vocab(with_added_tokens=True).items()}
        self.vocab_size = max(self._names, default=-1) + 1
        if self.vocab_size > MOST_IDS:
            raise UserError(f"an id is {self.vocab_size - 1}", where=where, mend=f"there are at most {MOST_IDS}")
        ids = [self._id_of(chosen[f"{role}_token"], role, where) for role in ("bos", "eos", "pad")]
        self._add_specials(*ids)
        if not self._byte_level:
            self._symbol_ids = [self._first.token_to_id(f"<0x{byte:02X}>") for byte in SPACE_SYMBOL.encode()]
        self._examine(where, _MEND)

    def _build(self, spec: str, where: str) -> Any:
        try:
            tokenizer = self._library.Tokenizer.from_str(spec)
        except Exception as error:  # the library raises no narrower class
            raise UserError(f"not a tokenizer of this library: {error}", where=where, mend=_MEND) from error
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = True
        return tokenizer

    def _check_lossless(self, where: str) -> bool:
        """Whether tokens are spelled in the byte-level alphabet; the other way is byte fallback."""
        model, decoders = self._spec["model"], {str(node.get("type")) for node in _nodes(self._spec.get("decoder"))}
        if model.get("dropout"):
            raise UserError("the tokenizer leaves out merges at random", where=where, mend="set its dropout to null")
        if "ByteLevel" in decoders:
            return True
        if not model.get("byte_fallback") or not decoders & {"ByteFallback", "Metaspace"}:
            what = "the tokenizer is neither byte-level nor has it byte fallback, and would lose characters"
            raise UserError(what, where=where, mend=_MEND)
        lacks = [byte for byte in range(256) if self._first.token_to_id(f"<0x{byte:02X}>") is None]
        if lacks:
            raise UserError(f"the tokenizer lacks the byte token <0x{lacks[0]:02X}>", where=where, mend=_MEND)
        return False

    def _id_of(self, token: str | None, role: str, where: str) -> int | None:
        try:
            token_id = None if token is None else self._first.token_to_id(token)
        except UnicodeEncodeError:  # half of a surrogate pair
            token_id = None
        if token is not None and token_id is None:
            mend = f"name one of its tokens with --{role}-token"
            raise UserError(f"the tokenizer has no {role}_token {token!r}", where=where, mend=mend)
        return token_id

    @functools.cached_property
    def _rest(self) -> Any:
        """Encodes what follows the first part of a text: without a prefix."""
        return self._build(json.dumps(_without_prefix(self._spec)), "tokenizer") if self.prefix else self._first

    def _encode_part(self, text: str, first: bool) -> Sequence[int]:
        encoder = self._first if first else self._rest
        return encoder.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def id_bytes(self, token_id: int) -> bytes:
        name, added = self._names.get(token_id), self._added_tokens.get(token_id)
        if name is None or token_id in (self.bos_id, self.eos_id, self.pad_id):
            return b""
        if not self._byte_level and (byte := _BYTE_TOKEN.fullmatch(name)):
            return bytes([int(byte[1], 16)])
        if (added is not None and added.special) or name == self._spec["model"].get("unk_token"):
            return b""
        if not self._byte_level:
            return name.replace(SPACE_SYMBOL, " ").encode()
        table = _byte_level_alphabet()
        if added is not None or not all(character in table for character in name):
            return name.encode()
        return bytes([table[character] for character in name])

    def special_name(self, token_id: int) -> str:
        return self._names.get(token_id, "added")

    def to_bytes(self) -> bytes:
        return self._definition


def _nodes(component: Any) -> Iterator[dict[str, Any]]:
    """A component of a `tokenizer.json` and, of a sequence, its parts."""
    if isinstance(component, dict):
        yield component
        for parts in ("decoders", "normalizers", "pretokenizers"):
            for part in component.get(parts, []):
                yield from _nodes(part)


def _without_prefix(spec: dict[str, Any]) -> dict[str, Any]:
    """The same tokenizer, putting nothing before a text."""
    spec = json.loads(json.dumps(spec))
    normalizer = spec.get("normalizer") or {}
    if normalizer.get("type") == "Prepend":
        spec["normalizer"] = None
    for node in _nodes(spec.get("normalizer")):
        if "normalizers" in node:
            node["normalizers"] = [part for part in node["normalizers"] if part.get("type") != "Prepend"]
    for node in _nodes(spec.get("pre_tokenizer")):
        if node.get("type") == "Metaspace":
            node["prepend_scheme"] = "never"
            node.pop("add_prefix_space", None)
        elif node.get("type") == "ByteLevel":
            node["add_prefix_space"] = False
    return spec


@functools.cache
def _byte_level_alphabet() -> dict[str, int]:
    """The characters that stand for bytes in byte-level tokens: printable ones for themselves, the others from 256 on.

    Language Models are Unsupervised Multitask Learners (GPT-2), section 2.2, and its released encoder.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
