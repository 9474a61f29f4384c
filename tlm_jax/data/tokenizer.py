"""Tokenizers: text to ids and back without loss, and how many bytes of text each id stands for.

Every tokenizer keeps two promises, on which bits per byte and the token store rest: `decode(encode(x)) == x` for every
string that UTF-8 can carry, and `token_bytes()[encode(x)].sum() == len(x.encode())`.
"""

from __future__ import annotations

import functools
import hashlib
import io
import itertools
import json
import random
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece

from tlm_jax.data.documents import DocumentFormat, Problem, find_inputs, read_documents
from tlm_jax.errors import UserError, raise_together
from tlm_jax.files import write_atomically, write_error

# SentencePiece writes a space as this character inside its pieces.
_SPACE_SYMBOL = "\u2581"
# Longer strings are encoded in parts of about this many characters: SentencePiece needs ~100 bytes a character.
_PART_CHARACTERS = 1 << 16
# What the trainer takes at a time, and the longest run without a space that it is given, in characters.
_SENTENCE_CHARACTERS = 1 << 12
_MAX_SENTENCE = 1 << 16
# A character that the trainer keeps for itself, as it does the space symbol: it would pass over text that holds one.
_UNKNOWN_SYMBOL = "\u2585"
_TRAINER_SETTINGS: dict[str, Any] = {
    "model_type": "bpe",
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
    "add_dummy_prefix": False,
    "byte_fallback": True,
    "split_digits": True,
    "allow_whitespace_only_pieces": True,
    "character_coverage": 0.9999,  # rarer characters are left to their bytes
    "max_sentence_length": 4 * _MAX_SENTENCE,  # bytes; longer ones would be passed over
    "unk_id": 0,
    "bos_id": 1,
    "eos_id": 2,
    "pad_id": 3,
    "num_threads": 4,  # a part of the model file, so not the machine's to choose
    "minloglevel": 2,
}
# Strings that a lossy model changes: spaces at the ends and in runs, compatibility forms, controls, unseen characters.
_PROBES = (
    " a",
    "a ",
    "a  b",
    "\n\t\r\n a",
    "\ufb01 \u2460 \uff21 A\u030a",
    "\x00\x01\x7f",
    "\U0001f9ea\U0010ffff",
    "<s></s>",
)


class Tokenizer(ABC):
    """What the rest of the project knows of a tokenizer.

    Attributes:
      kind: name under which `tokenizer_from_bytes` finds the class again.
      vocab_size: number of ids; every id is in [0, vocab_size).
      bos_id, eos_id, pad_id: three different ids that `encode` never returns.
    """

    kind: str
    vocab_size: int
    bos_id: int
    eos_id: int
    pad_id: int

    @abstractmethod
    def encode_array(self, text: str) -> np.ndarray:
        """Returns the ids of `text`, int32 [num_tokens], without specials."""

    @abstractmethod
    def id_bytes(self, token_id: int) -> bytes:
        """Returns the UTF-8 bytes that an id stands for; empty for specials."""

    @abstractmethod
    def to_bytes(self) -> bytes:
        """Returns all that defines the tokenizer; `tokenizer_from_bytes(kind, data)` inverts it."""

    def encode(self, text: str) -> list[int]:
        """Returns the ids of `text` without specials.

        Raises:
          UnicodeEncodeError: the text holds a lone surrogate, which UTF-8 cannot carry.
        """
        return self.encode_array(text).tolist()

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Returns the text of `ids`; specials are dropped, bytes that are no UTF-8 become U+FFFD."""
        table = self._bytes_by_id
        return b"".join([table[int(i)] for i in ids]).decode("utf-8", errors="replace")

    def token_bytes(self) -> np.ndarray:
        """Returns int32 [vocab_size]: the number of UTF-8 bytes of text each id stands for, 0 for specials."""
        return np.array([len(piece) for piece in self._bytes_by_id], np.int32)

    @property
    def hash(self) -> str:
        """The sha256 (hex) of what defines the tokenizer."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    @functools.cached_property
    def _bytes_by_id(self) -> list[bytes]:
        return [self.id_bytes(i) for i in range(self.vocab_size)]


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


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model that leaves text as it is: identity normalisation, byte fallback, no dummy prefix.

    Args:
      model: the bytes of a `.model` file.
      where: the file's name, for messages.

    Raises:
      UserError: the bytes are no model, or the model changes text, or lacks byte pieces or one of the specials.
    """

    kind = "sentencepiece"

    def __init__(self, model: bytes, where: str = "tokenizer") -> None:
        self._model = model
        mend = "train one with `tlm tokenizer`"
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        except (RuntimeError, ValueError, TypeError) as error:
            raise UserError("not a SentencePiece model", where=where, mend=mend) from error
        processor = self._processor
        self.vocab_size = processor.vocab_size()
        self._id_of_byte = [processor.piece_to_id(f"<0x{byte:02X}>") for byte in range(256)]
        if not all(processor.is_byte(i) for i in self._id_of_byte):
            raise UserError("the model has no byte fallback and would lose characters", where=where, mend=mend)
        self.bos_id, self.eos_id = processor.bos_id(), processor.eos_id()
        # A model without a padding id lends its unknown id, which byte fallback leaves unused.
        self.pad_id = processor.pad_id() if processor.pad_id() >= 0 else processor.unk_id()
        if min(self.bos_id, self.eos_id) < 0 or len({self.bos_id, self.eos_id, self.pad_id}) < 3:
            raise UserError("the model lacks a begin- or end-of-document id", where=where, mend=mend)
        for probe in _PROBES:
            if self.decode(self.encode(probe)) != probe:
                raise UserError(f"the model does not give back {probe!r} as it was", where=where, mend=mend)

    def encode_array(self, text: str) -> np.ndarray:
        text.encode()  # SentencePiece would replace a lone surrogate in silence
        literal = [self._id_of_byte[byte] for byte in _SPACE_SYMBOL.encode()]
        ids: list[np.ndarray] = []
        for i, between in enumerate(text.split(_SPACE_SYMBOL)):
            if i:  # the space symbol itself can only be told from a space by its bytes
                ids.append(np.array(literal, np.int32))
            ids.extend(np.array(self._processor.encode(part), np.int32) for part in _parts(between))
        return ids[0] if len(ids) == 1 else np.concatenate(ids or [np.empty(0, np.int32)])

    def id_bytes(self, token_id: int) -> bytes:
        processor = self._processor
        if processor.is_control(token_id) or processor.is_unknown(token_id):
            return b""
        piece = processor.id_to_piece(token_id)
        if processor.is_byte(token_id):
            return bytes([int(piece[3:5], 16)])
        return piece.replace(_SPACE_SYMBOL, " ").encode()

    def to_bytes(self) -> bytes:
        return self._model

    def __reduce__(self) -> tuple:
        return SentencePieceTokenizer, (self._model,)


def _parts(text: str, characters: int = _PART_CHARACTERS) -> Iterator[str]:
    """Cuts a long text where a word ends and a space begins; pieces split by whitespace never span such a place."""
    start = 0
    while len(text) - start > characters:
        stop = start + characters
        while stop < len(text) and (text[stop] != " " or text[stop - 1] == " "):
            stop += 1
        yield text[start:stop]
        start = stop
    if start < len(text):
        yield text[start:]


def tokenizer_from_bytes(kind: str, data: bytes, where: str = "tokenizer") -> Tokenizer:
    """Builds the tokenizer that `to_bytes` of the same kind wrote.

    Raises:
      UserError: an unknown kind, or data that define no such tokenizer.
    """
    from tlm_jax.data.adopted_tokenizer import adopted_tokenizer_from_bytes  # which is made of tokenizers itself

    if kind == SentencePieceTokenizer.kind:
        return SentencePieceTokenizer(data, where)
    if kind == ByteTokenizer.kind:
        tokenizer = ByteTokenizer()
        if data != tokenizer.to_bytes():
            raise UserError("not this version's byte tokenizer", where=where)
        return tokenizer
    if adopted := adopted_tokenizer_from_bytes(kind, data, where):
        return adopted
    raise UserError(f"unknown tokenizer kind {kind!r}", where=where)


def load_tokenizer(spec: str) -> Tokenizer:
    """Loads "byte" or a SentencePiece `.model` file.

    Raises:
      UserError: no such file, or the model is of no use here.
    """
    if spec == ByteTokenizer.kind:
        return ByteTokenizer()
    path = Path(spec)
    if not path.is_file():
        raise UserError("no such tokenizer", where=spec, mend="give `byte` or a .model file made by `tlm tokenizer`")
    return SentencePieceTokenizer(path.read_bytes(), where=spec)


def train_sentencepiece(
    files: Sequence[str],
    output: str | Path,
    vocab_size: int,
    *,
    layout: DocumentFormat | None = None,
    sample_bytes: int = 1 << 30,
    skip_problems: bool = False,
) -> SentencePieceTokenizer:
    """Trains a lossless byte-pair encoding and writes its model.

    Spaces begin pieces, digits stand alone, scripts and punctuation do not mix with letters, and runs of spaces can be
    one piece. The same files, in the same order, give the same model.

    Args:
      files: files and directories, as `tlm prepare` takes them.
      output: the `.model` file.
      vocab_size: number of ids: 4 specials, 256 bytes, the rest learnt.
      layout: how documents lie in the files; None: the defaults.
      sample_bytes: of inputs larger than this, about as much is used, spread evenly.
      skip_problems: pass over documents that cannot be read instead of stopping.

    Returns:
      The tokenizer.

    Raises:
      UserError: bad input, or text that is too little or too varied for the vocabulary.
    """
    inputs, layout = find_inputs(files), layout or DocumentFormat()
    keep = min(1.0, sample_bytes / max(1, sum(file.size for file in inputs)))
    problems: list[UserError] = []
    counted = [0]

    def sentences() -> Iterator[str]:
        chance = random.Random(0)
        for document in itertools.chain.from_iterable(read_documents(file, layout) for file in inputs):
            if isinstance(document, Problem):
                if skip_problems:
                    continue
                problems.append(document.error())
                return  # an exception would not pass through the trainer
            for sentence in _sentences(document.text):
                if keep == 1.0 or chance.random() < keep:
                    counted[0] += 1
                    yield sentence

    model = io.BytesIO()
    failure = ""
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=sentences(), model_writer=model, vocab_size=vocab_size, **_TRAINER_SETTINGS
        )
    except RuntimeError as error:
        failure = str(error)
    raise_together(problems)
    if not counted[0]:
        raise UserError("the inputs hold no document", where=str(files[0]))
    if failure:
        raise _training_error(failure, vocab_size)
    try:
        Path(output).parent.mkdir(parents=True, exist_ok=True)
        write_atomically(Path(output), model.getvalue())
    except OSError as error:
        raise write_error(error, Path(output)) from error
    return SentencePieceTokenizer(model.getvalue(), where=str(output))


def _sentences(text: str) -> Iterator[str]:
    """Cuts a document into what the trainer takes at a time, at spaces and around characters it keeps for itself."""
    for part in re.split(f"[{_SPACE_SYMBOL}{_UNKNOWN_SYMBOL}]", text):
        yield from (sentence for sentence in _parts(part, _SENTENCE_CHARACTERS) if len(sentence) <= _MAX_SENTENCE)


def _training_error(message: str, vocab_size: int) -> UserError:
    """Turns the trainer's complaint about the vocabulary into a line that says which size would do."""
    if limit := re.search(r"set it to a value <= (\d+)", message):
        what = f"the text is too little for a vocabulary of {vocab_size}"
        return UserError(what, where="--vocab-size", mend=f"the largest that works is {limit[1]}")
    if limit := re.search(r"smaller than required_chars\. \d+ vs (\d+)", message):
        what = f"a vocabulary of {vocab_size} does not hold the specials, the bytes and the text's characters"
        return UserError(what, where="--vocab-size", mend=f"the smallest that works is {limit[1]}")
    return UserError(f"SentencePiece could not train: {message.splitlines()[0]}", where="--vocab-size")
