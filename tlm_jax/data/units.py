"""Units of preparation: which parts of the inputs become which shard, and the work of making one.

Everything a unit writes appears by renaming, its result last; two processes that make the same unit write the same.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import os
import unicodedata
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tlm_jax.data.documents import Document, DocumentFormat, InputFile, Problem, read_documents
from tlm_jax.data.store import OFFSET_DTYPE, SPLITS, TOKEN_DTYPES, document_tokens, shard_name
from tlm_jax.data.tokenizer import Tokenizer, UnfitText, tokenizer_from_bytes
from tlm_jax.errors import UserError
from tlm_jax.files import partial_path, write_atomically, write_error

UNITS = "units"  # directory of the results of finished units
MAX_EXAMPLES = 20  # skipped documents that are told one by one
_MIN_UNIT_BYTES = 1 << 20
# Enough units to keep many workers busy, few enough that a store of any size has a few thousand shards.
_MANY_UNITS = 2048
_FLUSH_TOKENS = 1 << 20
_BATCH_CHARACTERS = 1 << 16  # what a thread tokenises at a time
_AHEAD_CHARACTERS = 1 << 18  # read ahead for each thread


@dataclass(frozen=True)
class Span:
    """Bytes [start, stop) of input number `input`."""

    input: int
    start: int
    stop: int


@dataclass(frozen=True)
class Plan:
    """All that a worker needs to know."""

    output: Path
    inputs: list[InputFile]
    units: list[list[Span]]
    layout: DocumentFormat
    holdout: float
    dtype: str
    tokenizer_kind: str
    tokenizer_data: bytes
    stop_on_error: bool


def plan_units(inputs: Sequence[InputFile], layout: DocumentFormat) -> list[list[Span]]:
    """Cuts the inputs, in order, into units of at least a megabyte, where they can be cut and there is as much."""
    total = sum(file.size for file in inputs)
    unit_bytes = max(_MIN_UNIT_BYTES, 1 << (total // _MANY_UNITS).bit_length())
    if layout.split_text == "size":  # ranges must begin where documents may
        unit_bytes = -(-unit_bytes // layout.document_bytes) * layout.document_bytes
    units: list[list[Span]] = []
    unit: list[Span] = []
    left = unit_bytes
    for number, file in enumerate(inputs):
        step = unit_bytes if layout.divisible(file) else max(file.size, 1)
        for start in range(0, max(file.size, 1), step):
            unit.append(Span(number, start, min(start + step, file.size)))
            left -= unit[-1].stop - start
            if left <= 0:
                units.append(unit)
                unit, left = [], unit_bytes
    return [*units, unit] if unit else units


def finished_unit(plan: Plan, number: int) -> dict[str, Any] | None:
    """The result of a unit that an earlier run finished, if its files are whole and it skipped nothing it may not."""
    try:
        result = json.loads((plan.output / UNITS / f"{number:05d}.json").read_bytes())
        itemsize = TOKEN_DTYPES[plan.dtype].itemsize
        for shard in (shard for shards in result["shards"].values() for shard in shards):
            tokens, offsets = (plan.output / f"{shard['name']}{ending}" for ending in (".tokens", ".offsets"))
            if tokens.stat().st_size != shard["tokens"] * itemsize:
                return None
            if offsets.stat().st_size != shard["documents"] * OFFSET_DTYPE.itemsize:
                return None
    except (FileNotFoundError, ValueError, KeyError):
        return None
    return None if plan.stop_on_error and result["skipped"] else result


@functools.cache
def _tokenizer(kind: str, data: bytes) -> Tokenizer:
    return tokenizer_from_bytes(kind, data)


def tokenize_unit(plan: Plan, number: int, threads: int = 1) -> tuple[int, dict[str, Any] | Problem]:
    """Writes one unit's shards and result; returns (number, result), or the problem that stops it."""
    tokenizer = _tokenizer(plan.tokenizer_kind, plan.tokenizer_data)
    token_bytes = tokenizer.token_bytes()
    form: Any = tokenizer.unicode_form
    normalized = 0
    skipped: Counter[str] = Counter()
    examples: list[str] = []
    dtype = TOKEN_DTYPES[plan.dtype]
    shards = {split: _ShardWriter(plan.output, shard_name(split, number), dtype) for split in SPLITS}
    try:
        for span in plan.units[number]:
            file = plan.inputs[span.input]
            documents = read_documents(file, plan.layout, span.start, span.stop)
            for document, ids in _tokenized(documents, tokenizer, threads):
                if isinstance(document, Problem):
                    if plan.stop_on_error:
                        return number, document
                    skipped[document.reason] += 1
                    examples.append(str(document.error()))
                    continue
                data = document.text.encode()
                num_bytes = int(token_bytes[ids].sum())
                if form and not unicodedata.is_normalized(form, document.text):
                    normalized += 1
                elif num_bytes != len(data):
                    raise UserError("the tokenizer does not stand for all of a document's text", where=file.path)
                held_out = is_held_out(data, plan.holdout)
                shards["validation" if held_out else "train"].add(ids, num_bytes)
        result = {
            "shards": {split: [writer.finish()] if writer.documents else [] for split, writer in shards.items()},
            "normalized": normalized,
            "skipped": dict(sorted(skipped.items())),
            "examples": examples[:MAX_EXAMPLES],
        }
        write_atomically(plan.output / UNITS / f"{number:05d}.json", json.dumps(result).encode())
        return number, result
    except OSError as error:
        raise write_error(error, plan.output) from error
    finally:
        for writer in shards.values():
            writer.discard()


def _tokenized(
    documents: Iterable[Document | Problem], tokenizer: Tokenizer, threads: int
) -> Iterator[tuple[Document | Problem, np.ndarray]]:
    """Yields documents with their ids, in order; one that the tokenizer would change becomes a problem.

    With more than one thread, that many tokenise beside the caller's: tokenizers release the interpreter's lock.
    """
    encode = functools.partial(_encode_batch, tokenizer)
    if threads == 1:
        yield from itertools.chain.from_iterable(map(encode, _batches(documents)))
        return
    pool = ThreadPoolExecutor(threads)
    running: deque[tuple[int, Future[list[tuple[Document | Problem, np.ndarray]]]]] = deque()
    ahead = 0  # characters of the batches that are running or wait for a thread
    try:
        for batch in _batches(documents):
            characters = sum(map(_characters, batch))
            running.append((characters, pool.submit(encode, batch)))
            ahead += characters
            # Enough that no thread waits for this one, without holding many documents that are large.
            while len(running) > threads and ahead > threads * _AHEAD_CHARACTERS:
                characters, done = running.popleft()
                ahead -= characters
                yield from done.result()
        for _, done in running:
            yield from done.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _characters(document: Document | Problem) -> int:
    return len(document.text) if isinstance(document, Document) else 0


def _batches(documents: Iterable[Document | Problem]) -> Iterator[list[Document | Problem]]:
    """Collects documents until they are enough to be worth a thread's while."""
    batch: list[Document | Problem] = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += _characters(document)
        if characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    yield batch


def _encode_batch(tokenizer: Tokenizer, batch: list[Document | Problem]) -> list[tuple[Document | Problem, np.ndarray]]:
    nothing = np.empty(0, np.int32)
    found: list[tuple[Document | Problem, np.ndarray]] = []
    for document in batch:
        if isinstance(document, Document):
            try:
                found.append((document, document_tokens(document.text, tokenizer)))
            except UnfitText as error:
                found.append((document.problem("unfit for the tokenizer", error.what), nothing))
        else:
            found.append((document, nothing))
    return found


def is_held_out(text: bytes, holdout: float) -> bool:
    """Whether a document with this UTF-8 text belongs to the split "validation"."""
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") < holdout * 2.0**64


class _ShardWriter:
    """Writes one shard under passing names; `finish` gives it its own."""

    def __init__(self, output: Path, name: str, dtype: np.dtype) -> None:
        self.documents = self._tokens = self._bytes = 0
        self._name, self._dtype = name, dtype
        self._path = output / f"{name}.tokens"
        self._offsets_path = output / f"{name}.offsets"
        self._partial = partial_path(self._path)
        self._file = open(self._partial, "wb")  # noqa: SIM115 (closed by finish or discard)
        self._hash = hashlib.sha256()
        self._waiting: list[np.ndarray] = []
        self._waiting_tokens = 0
        self._ends: list[int] = []

    def add(self, ids: np.ndarray, num_bytes: int) -> None:
        """Appends one document."""
        self.documents += 1
        self._tokens += len(ids)
        self._bytes += num_bytes
        self._ends.append(self._tokens)
        self._waiting.append(ids)
        self._waiting_tokens += len(ids)
        if self._waiting_tokens >= _FLUSH_TOKENS:
            self._flush()

    def _flush(self) -> None:
        if self._waiting:
            data = np.concatenate(self._waiting).astype(self._dtype).tobytes()
            self._hash.update(data)
            self._file.write(data)
        self._waiting, self._waiting_tokens = [], 0

    def finish(self) -> dict[str, Any]:
        """Puts the shard in place and returns its entry in the manifest."""
        self._flush()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        offsets = np.array(self._ends, OFFSET_DTYPE).tobytes()
        write_atomically(self._offsets_path, offsets)
        os.replace(self._partial, self._path)
        return {
            "name": self._name,
            "documents": self.documents,
            "tokens": self._tokens,
            "bytes": self._bytes,
            "tokens_sha256": self._hash.hexdigest(),
            "offsets_sha256": hashlib.sha256(offsets).hexdigest(),
        }

    def discard(self) -> None:
        """Removes what is not in place."""
        with contextlib.suppress(OSError):  # of bytes still buffered on a full disk, which has been raised already
            self._file.close()
        self._partial.unlink(missing_ok=True)
