"""Byte-pair encodings of the library `tiktoken`, from a file of ranks.

A `.tiktoken` file holds pieces and their ranks, `base64 rank` a line, but neither the regular expression that splits
text before pieces are merged, nor special tokens. For published files, told by their sha256, both are known. For any
other the pattern has to be given, and specials get the ids after the ranks: begin, end, padding.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tlm_jax.data.extras import optional_library
from tlm_jax.data.pieces import PieceTokenizer
from tlm_jax.data.tokenizer import MOST_IDS, UnfitText, read_definition
from tlm_jax.errors import UserError

_R50K = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
_CL100K = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]"
    r"|\s+(?!\S)|\s"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_O200K = "|".join(
    [
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
_END_OF_TEXT = "<|endoftext|>"


@dataclass(frozen=True)
class Encoding:
    """A published encoding: the sha256 of its file of ranks, its pattern, its end-of-text id and number of ids."""

    ranks_sha256: str
    pattern: str
    eos_id: int
    vocab_size: int


# Facts of the released encodings; GPT-2's are those of r50k_base.
ENCODINGS = {
    "r50k_base": Encoding("306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930", _R50K, 50256, 50257),
    "p50k_base": Encoding("94b5ca7dff4d00767bc256fdd1b27e5b17361d7b8a5f968547f9f23eb70d2069", _R50K, 50256, 50281),
    "cl100k_base": Encoding(
        "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7", _CL100K, 100257, 100277
    ),
    "o200k_base": Encoding("446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d", _O200K, 199999, 200019),
}
_ALIASES = {"gpt2": "r50k_base"}


def definition_from_ranks(ranks: bytes, pattern: str = "", where: str = "tokenizer") -> bytes:
    """Returns what defines the tokenizer here: the ranks, the pattern, and for a published encoding its specials.

    Args:
      ranks: the file.
      pattern: a regular expression, or the name of a published encoding for its pattern; "": the file is published.
      where: the file's name, for messages.

    Raises:
      UserError: a file that is not published, and no pattern.
    """
    checksum = hashlib.sha256(ranks).hexdigest()
    published = next((each for each in ENCODINGS.values() if each.ranks_sha256 == checksum), None)
    named = ENCODINGS.get(_ALIASES.get(pattern, pattern))
    if not pattern and published is None:
        names = ", ".join([*_ALIASES, *ENCODINGS])
        what = f"the file holds ranks only, and is none of the published ones (sha256 {checksum[:12]})"
        mend = f"give --tiktoken-pattern: a regular expression, or the name of an encoding for its pattern ({names})"
        raise UserError(what, where=where, mend=mend)
    own = (
        published if published is not None and named in (None, published) and not (pattern and named is None) else None
    )
    definition: dict[str, Any] = {
        "kind": TiktokenTokenizer.kind,
        "pattern": named.pattern if named else pattern or (published.pattern if published else ""),
        "eos_id": own.eos_id if own else None,
        "vocab_size": own.vocab_size if own else None,
        "ranks": ranks.decode("ascii", errors="replace"),
    }
    return json.dumps(definition, sort_keys=True).encode()


class TiktokenTokenizer(PieceTokenizer):
    """A byte-pair encoding of the library `tiktoken`; special tokens in the text are taken as the text that they are.

    Args:
      definition: what `definition_from_ranks` returns.
      where: the file's name, for messages.

    Raises:
      UserError: the library is missing, ranks that cannot be read or are incomplete, a pattern that does not cover
        all text or is no regular expression.
    """

    kind = "tiktoken"
    _longest_part = 1 << 18  # patterns run out of stack on a million spaces

    def __init__(self, definition: bytes, where: str = "tokenizer") -> None:
        self._definition = definition
        library = optional_library("tiktoken", where)
        types = {"pattern": str, "eos_id": int | None, "vocab_size": int | None, "ranks": str}
        chosen = read_definition(definition, types, where)
        ranks = _read_ranks(chosen["ranks"], where)
        self._pieces = {rank: piece for piece, rank in ranks.items()}
        self.vocab_size = _checked_size(max(self._pieces) + 1, chosen["vocab_size"], chosen["eos_id"], where)
        try:
            self._encoding = library.Encoding(
                "ranks", pat_str=chosen["pattern"], mergeable_ranks=ranks, special_tokens={}
            )
        except ValueError as error:
            what = f"not a regular expression that tiktoken can use: {error}"
            raise UserError(what, where="--tiktoken-pattern") from error
        self._add_specials(None, chosen["eos_id"], None)
        self._examine(where, "give a --tiktoken-pattern that matches every character")

    def _encode_part(self, text: str, first: bool) -> Sequence[int]:
        try:
            return self._encoding.encode_ordinary(text)
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # of no class that could be imported
                raise
            raise UnfitText(f"the split pattern fails on it: {error}") from error

    def id_bytes(self, token_id: int) -> bytes:
        return self._pieces.get(token_id, b"")

    def special_name(self, token_id: int) -> str:
        return _END_OF_TEXT if token_id < self._added_from else "added"

    def to_bytes(self) -> bytes:
        return self._definition


def _checked_size(least: int, vocab_size: int | None, eos_id: int | None, where: str) -> int:
    """The number of ids that a definition names, or the least for its ranks; also checks that the end id is of them."""
    size = least if vocab_size is None else vocab_size
    if not least <= size <= MOST_IDS:
        what = f"vocab_size {size} is not from {least}, by the ranks, to {MOST_IDS}"
        raise UserError(what, where=where, mend="was the file changed?")
    if eos_id is not None and not 0 <= eos_id < size:
        raise UserError(f"eos_id {eos_id} is no id of {size}", where=where, mend="was the file changed?")
    return size


def _read_ranks(text: str, where: str) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        try:
            piece, rank = line.split()
            ranks[base64.b64decode(piece, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise UserError("not a base64 piece and its rank", where=f"{where}:{number}") from error
    lacks = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if lacks:
        raise UserError(f"the ranks lack the byte 0x{lacks[0]:02X}", where=where, mend="was the file cut short?")
    if len(set(ranks.values())) < len(ranks) or min(ranks.values()) < 0:
        raise UserError("two pieces have the same rank, or one a negative", where=where, mend="was the file changed?")
    if max(ranks.values()) >= MOST_IDS:
        raise UserError(f"a rank is {max(ranks.values())}", where=where, mend=f"there are at most {MOST_IDS}")
    return ranks
