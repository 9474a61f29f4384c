"""Adopting token files of other programs: one pass over them, then a store that reads them where they lie.

What the files do not say is found or given: where documents end (an id that stands between them, or an index file),
the tokenizer, the bytes of text, and which part is held out. The store holds offsets, tokenizer and a manifest with
the files' places and checksums; no token is copied.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tlm_jax.data.adopted_tokenizer import IdTokenizer, tokenizer_with_separator
from tlm_jax.data.foreign import ForeignFile, open_foreign
from tlm_jax.data.store import (
    FORMAT_VERSION,
    MANIFEST,
    OFFSET_DTYPE,
    SPLITS,
    TOKEN_DTYPES,
    TokenStore,
    shard_name,
    tokenizer_entry,
    tokenizer_file,
)
from tlm_jax.data.tokenizer import Tokenizer
from tlm_jax.errors import UserError
from tlm_jax.files import only_writer, write_atomically, write_error
from tlm_jax.progress import ProgressBar

AUTO, NONE = "auto", "none"
_CHUNK_TOKENS = 1 << 22


@dataclass(frozen=True)
class Adoption:
    """What the files do not say.

    Attributes:
      separator: the id between documents; "none": there is none; "auto": the tokenizer's end id, and of Megatron files
        the id that ends every document and stands nowhere else, if there is one.
      holdout: without validation files, the share of the tokens held out: the last documents. 0: none.
      layout: of the files, one of `foreign.LAYOUTS`.
      raw_dtype: of the ids of files without header or index.
    """

    separator: int | str = AUTO
    holdout: float = 0.01
    layout: str = "auto"
    raw_dtype: str = "uint16"


@dataclass(frozen=True)
class _Scan:
    """What one pass over a file found: its checksum, where the separator stands, and its largest and smallest id."""

    file: ForeignFile
    sha256: str
    separators: np.ndarray
    smallest: int
    largest: int


@dataclass(frozen=True)
class _Piece:
    """A run of ids [start, stop) of a file, and where documents that end in it do so, counted from `start`."""

    scan: _Scan
    start: int
    stop: int
    ends: np.ndarray


def adopt(
    train: Sequence[str],
    validation: Sequence[str],
    output: str | Path,
    tokenizer: Tokenizer | int,
    adoption: Adoption | None = None,
) -> TokenStore:
    """Makes a store of files of ids that stay where they are.

    Args:
      train, validation: files as `open_foreign` takes them, in order; each list is one stream of ids.
      output: directory of the store.
      tokenizer: the ids' tokenizer, or, where that is not known, how many ids there are.
      adoption: the rest; None: the defaults.

    Returns:
      The store, opened.

    Raises:
      UserError: files that are not what they should be, are given twice or do not fit together, ids beyond the
        tokenizer, a separator that cannot be found, or an output that cannot be written or holds something else.
    """
    adoption, output = adoption or Adoption(), Path(output)
    if not 0.0 <= adoption.holdout < 1.0:
        raise UserError(f"the held-out fraction must be in [0, 1), not {adoption.holdout}", where="--holdout")
    _check_free(output)
    files = {
        "train": [open_foreign(path, adoption.layout, adoption.raw_dtype) for path in train],
        "validation": [open_foreign(path, adoption.layout, adoption.raw_dtype) for path in validation],
    }
    every = [*files["train"], *files["validation"]]
    _check_different(every)
    _check_alike(every)
    candidate = _candidate(every, tokenizer, adoption.separator)
    with ProgressBar("reading", sum(file.size for file in every), unit="bytes") as progress:
        scans = {name: [_scan(file, candidate, progress) for file in files[name]] for name in SPLITS}
    _check_ids([scan for name in SPLITS for scan in scans[name]], tokenizer)
    separator = _confirm(candidate, [scan for name in SPLITS for scan in scans[name]], adoption.separator)
    known = IdTokenizer(tokenizer, separator) if isinstance(tokenizer, int) else tokenizer
    known = tokenizer_with_separator(known, separator)
    streams = {name: _stream(scans[name], separator) for name in SPLITS}
    pieces = {name: stream.pieces(0, stream.num_tokens) for name, stream in streams.items()}
    if not validation and adoption.holdout:
        pieces["train"], pieces["validation"] = _hold_out(streams["train"], adoption.holdout)
    try:
        output.mkdir(parents=True, exist_ok=True)
        with only_writer(output):
            _check_free(output)  # again: another adoption may have come first
            return _write(output, known, separator, pieces)
    except OSError as error:
        raise write_error(error, output) from error


def _check_free(output: Path) -> None:
    ours = {*SPLITS, "tokenizer.json", "tokenizer.model"}  # what an adoption that was interrupted has left
    if (output / MANIFEST).exists():
        raise UserError("the output holds a store", where=str(output), mend="choose another --output, or delete it")
    if output.exists() and (not output.is_dir() or any(path.name not in ours for path in output.iterdir())):
        raise UserError("the output holds something else", where=str(output), mend="choose another --output")


def _check_different(files: list[ForeignFile]) -> None:
    seen: set[Path] = set()
    for file in files:
        real = file.path.resolve()
        if real in seen:
            mend = "its tokens would count twice, or be both trained on and held out"
            raise UserError("the file is given twice", where=str(file.path), mend=mend)
        seen.add(real)


def _check_alike(files: list[ForeignFile]) -> None:
    first = files[0]
    for file in files:
        if (file.layout, file.dtype) != (first.layout, first.dtype):
            raise UserError(
                f"{file.layout} file of {file.dtype} beside {first.path}, a {first.layout} file of {first.dtype}",
                where=str(file.path),
                mend="adopt them as two stores; config.data.mixture reads both",
            )


def _candidate(files: list[ForeignFile], tokenizer: Tokenizer | int, separator: int | str) -> int | None:
    """The id that may be the separator, before it has been looked for everywhere."""
    if separator == NONE:
        return None
    if isinstance(separator, int):
        return separator
    if files[0].document_ends is not None:
        last = [file.tokens()[ends[ends > 0] - 1] for file in files if (ends := file.document_ends) is not None]
        ids = np.unique(np.concatenate(last))
        return int(ids[0]) if len(ids) == 1 else None
    if isinstance(tokenizer, int):
        raise UserError(
            "the files do not say where documents end",
            where="--separator",
            mend="give the id that stands between documents (GPT-2: 50256), or none",
        )
    return tokenizer.eos_id


def _scan(file: ForeignFile, separator: int | None, progress: ProgressBar) -> _Scan:
    digest = hashlib.sha256()
    with file.path.open("rb") as head:
        digest.update(head.read(file.offset))
    progress.advance(file.offset)
    found: list[np.ndarray] = [np.empty(0, np.int64)]
    smallest, largest = np.iinfo(np.int64).max, -1
    tokens = file.tokens()
    for start in range(0, len(tokens), _CHUNK_TOKENS):
        chunk = tokens[start : start + _CHUNK_TOKENS]
        digest.update(chunk.data)
        smallest, largest = min(smallest, int(chunk.min())), max(largest, int(chunk.max()))
        if separator is not None:
            found.append(np.flatnonzero(chunk == separator) + start)
        progress.advance(chunk.nbytes)
    return _Scan(file, digest.hexdigest(), np.concatenate(found), smallest, largest)


def _confirm(candidate: int | None, scans: list[_Scan], asked: int | str) -> int | None:
    """The separator, once it is known where it stands; None: documents are as the index says, or one a split."""
    if candidate is None:
        return None
    where, count = "--separator", sum(len(scan.separators) for scan in scans)
    if scans[0].file.document_ends is None:
        if not count:
            raise UserError(f"the id {candidate} does not occur", where=where, mend="give the right one, or none")
        return candidate
    for scan in scans:
        assert scan.file.document_ends is not None  # all files are of one layout
        ends = np.unique(scan.file.document_ends)
        if not np.array_equal(scan.separators, ends[ends > 0] - 1):
            if asked == AUTO:
                return None
            what = f"the id {candidate} does not stand at the end of every document, and there alone"
            raise UserError(what, where=where, mend=f"give none: documents are as the index of {scan.file.path} says")
    return candidate


def _check_ids(scans: list[_Scan], tokenizer: Tokenizer | int) -> None:
    where, limit = ("--vocab-size", tokenizer) if isinstance(tokenizer, int) else ("--tokenizer", tokenizer.vocab_size)
    for scan in scans:
        for found in (scan.smallest, scan.largest):
            if not 0 <= found < limit:
                what = f"the file holds the id {found}, the vocabulary has {limit}"
                raise UserError(what, where=str(scan.file.path), mend=f"another {where}, or another dtype of the ids")


@dataclass(frozen=True)
class _Stream:
    """Files end to end, and where documents end in them all; the last one ends where the files do."""

    scans: list[_Scan]
    ends: np.ndarray

    @property
    def num_tokens(self) -> int:
        """Ids of all files together."""
        return sum(scan.file.num_tokens for scan in self.scans)

    def pieces(self, start: int, stop: int) -> list[_Piece]:
        """The ids [start, stop) file by file."""
        found, origin = [], 0
        for scan in self.scans:
            size = scan.file.num_tokens
            first, last = max(start - origin, 0), min(stop - origin, size)
            if first < last:
                ends = self.ends - origin
                found.append(_Piece(scan, first, last, ends[(ends > first) & (ends <= last)] - first))
            origin += size
        return found


def _stream(scans: list[_Scan], separator: int | None) -> _Stream:
    """Cuts files into documents: one begins at each separator, which is its first id.

    A separator that is the first id of all begins the first document; one that is the last of all ends the last.
    """
    total, origin = sum(scan.file.num_tokens for scan in scans), 0
    borders: list[np.ndarray] = [np.array([total], np.int64)]
    for scan in scans:
        if separator is not None:
            borders.append(scan.separators[scan.separators + origin < total - 1] + origin)
        elif scan.file.document_ends is not None:
            borders.append(scan.file.document_ends + origin)
        origin += scan.file.num_tokens
    ends = np.unique(np.concatenate(borders))
    return _Stream(scans, ends[ends > 0])


def _hold_out(stream: _Stream, share: float) -> tuple[list[_Piece], list[_Piece]]:
    """Cuts a stream at the last border between documents that leaves at least `share` of its ids behind."""
    total = stream.num_tokens
    limit = int(total * (1 - share))
    if len(stream.ends) == 1:  # a single document is cut in two
        stream = _Stream(stream.scans, np.array([limit, total]))
    before = stream.ends[stream.ends <= limit]
    if not limit or not len(before):
        what = f"the first document is longer than what --holdout={share} leaves for training"
        raise UserError(what, where=str(stream.scans[0].file.path), mend="lower --holdout, or give --validation files")
    cut = int(before[-1])
    return stream.pieces(0, cut), stream.pieces(cut, total)


def _write(output: Path, tokenizer: Tokenizer, separator: int | None, pieces: dict[str, list[_Piece]]) -> TokenStore:
    token_bytes = tokenizer.token_bytes()
    splits: dict[str, Any] = {}
    for name in SPLITS:
        (output / name).mkdir(parents=True, exist_ok=True)
        shards = [_shard(output, shard_name(name, i), piece, token_bytes) for i, piece in enumerate(pieces[name])]
        totals = {key: sum(shard[key] for shard in shards) for key in ("documents", "tokens", "bytes")}
        splits[name] = {**totals, "shards": shards}
    first = pieces["train"][0].scan.file
    ends = [piece.scan.file.document_ends for name in SPLITS for piece in pieces[name] if piece.start == 0]
    empty = sum(int((np.diff(found, prepend=0) == 0).sum()) for found in ends if found is not None)
    write_atomically(output / tokenizer_file(tokenizer), tokenizer.to_bytes())
    manifest = {
        "format_version": FORMAT_VERSION,
        "tokenizer": tokenizer_entry(tokenizer),
        "dtype": first.dtype,
        "splits": splits,
        "skipped": {"empty document": empty} if empty else {},
        "skipped_examples": [],
        "adopted": {"layout": first.layout, "separator": separator},
    }
    write_atomically(output / MANIFEST, json.dumps(manifest, indent=1).encode())
    return TokenStore.open(output)


def _shard(output: Path, name: str, piece: _Piece, token_bytes: np.ndarray) -> dict[str, Any]:
    """Writes a piece's offsets and returns its entry in the manifest."""
    file = piece.scan.file
    offsets = piece.ends.astype(OFFSET_DTYPE).tobytes()
    write_atomically(output / f"{name}.offsets", offsets)
    tokens, num_bytes = file.tokens()[piece.start : piece.stop], 0
    if token_bytes.any():
        for start in range(0, len(tokens), _CHUNK_TOKENS):
            num_bytes += int(token_bytes[tokens[start : start + _CHUNK_TOKENS]].sum(dtype=np.int64))
    return {
        "name": name,
        "file": _place(file.path, output),
        "offset": file.offset + piece.start * TOKEN_DTYPES[file.dtype].itemsize,
        "size": file.size,
        "modified": file.modified,
        "documents": len(piece.ends),
        "tokens": len(tokens),
        "bytes": num_bytes,
        "tokens_sha256": piece.scan.sha256,
        "offsets_sha256": hashlib.sha256(offsets).hexdigest(),
    }


def _place(path: Path, output: Path) -> str:
    """A file's path for the manifest: relative where it lies beside the store or deeper, so that both move together."""
    file, store = path.resolve(), output.resolve()
    return os.path.relpath(file, store) if file.is_relative_to(store.parent) else str(file)
