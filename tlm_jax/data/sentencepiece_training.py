"""Trains a lossless SentencePiece byte-pair encoding."""

from __future__ import annotations

import io
import itertools
import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import sentencepiece

from tlm_jax.data.documents import DocumentFormat, Problem, find_inputs, read_documents
from tlm_jax.data.pieces import SPACE_SYMBOL, parts
from tlm_jax.data.sentencepiece_tokenizer import SentencePieceTokenizer
from tlm_jax.errors import UserError, raise_together
from tlm_jax.files import write_atomically, write_error

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
    for part in re.split(f"[{SPACE_SYMBOL}{_UNKNOWN_SYMBOL}]", text):
        yield from (sentence for sentence in parts(part, _SENTENCE_CHARACTERS) if len(sentence) <= _MAX_SENTENCE)


def _training_error(message: str, vocab_size: int) -> UserError:
    """Turns the trainer's complaint about the vocabulary into a line that says which size would do."""
    if limit := re.search(r"set it to a value <= (\d+)", message):
        what = f"the text is too little for a vocabulary of {vocab_size}"
        return UserError(what, where="--vocab-size", mend=f"the largest that works is {limit[1]}")
    if limit := re.search(r"smaller than required_chars\. \d+ vs (\d+)", message):
        what = f"a vocabulary of {vocab_size} does not hold the specials, the bytes and the text's characters"
        return UserError(what, where="--vocab-size", mend=f"the smallest that works is {limit[1]}")
    return UserError(f"SentencePiece could not train: {message.splitlines()[0]}", where="--vocab-size")
