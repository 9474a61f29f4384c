"""Input files and the documents in them: text, JSON Lines and Parquet, plain or compressed, read by byte range.

Parquet, plain JSON Lines, and plain text whose documents are parts of a file, can be read by byte range: a document
belongs to the range in which it starts, so ranges that tile a file yield its documents in order, each once.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Literal

from tlm_jax.data.compressed import DAMAGE, ENDINGS, Compression, compression_of, open_input, require_compression
from tlm_jax.data.parquet import Row, read_rows, require_parquet
from tlm_jax.errors import UserError
from tlm_jax.files import parse_json, reason

SplitText = Literal["file", "paragraph", "line", "size"]
SPLIT_TEXT: tuple[SplitText, ...] = ("file", "paragraph", "line", "size")
Kind = Literal["text", "jsonl", "parquet"]
_KINDS: dict[str, Kind] = {
    **dict.fromkeys((".txt", ".text", ".md"), "text"),
    **dict.fromkeys((".jsonl", ".ndjson"), "jsonl"),
    ".parquet": "parquet",
}
_FOREIGN_ENDINGS = (".arrow", ".bz2", ".xz", ".zip", ".tar", ".7z", ".pdf", ".docx")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_READ_BYTES = 1 << 20


@dataclass(frozen=True)
class InputFile:
    """One input: its path as given, its size in bytes on disk, what it holds, and how that is compressed."""

    path: str
    size: int
    kind: Kind
    compression: Compression


@dataclass(frozen=True)
class DocumentFormat:
    """How documents lie in files.

    Attributes:
      text_field: the key of a JSON object, or the column of a Parquet file, that holds its text.
      split_text: what is a document in a text file: the whole file; a paragraph (between blank lines); a line; or
        `document_bytes` bytes, prolonged to the end of a line.
      document_bytes: for split_text "size".
    """

    text_field: str = "text"
    split_text: SplitText = "file"
    document_bytes: int = 1 << 16

    def divisible(self, file: InputFile) -> bool:
        """Whether the file can be read by byte range."""
        return not file.compression and (file.kind != "text" or self.split_text != "file")


@dataclass(frozen=True)
class Document:
    """One document's text; it can be written as UTF-8 and is not blank.

    Attributes:
      place: finds its path and line (of a Parquet file, row); that may mean counting lines, so it is for problems.
    """

    text: str
    place: Callable[[], tuple[str, int]] = field(default=lambda: ("", 1), compare=False, repr=False)

    def problem(self, reason: str, detail: str) -> Problem:
        """What is wrong with this document after all."""
        return Problem(reason, detail, *self.place())


@dataclass(frozen=True)
class Problem:
    """What kept a document from being read: a reason to count by, what exactly, and where.

    Attributes:
      line: from 1; of a Parquet file, the row.
    """

    reason: str
    detail: str
    path: str
    line: int

    def error(self) -> UserError:
        """The problem as an error that names file and line or row."""
        place = f": row {self.line}" if self.path.lower().endswith(".parquet") else f":{self.line}"
        return UserError(f"{self.reason}{f': {self.detail}' if self.detail else ''}", where=f"{self.path}{place}")


def find_inputs(paths: Iterable[str]) -> list[InputFile]:
    """Lists the input files: those named, and in directories every file of a known kind below, by name.

    Raises:
      UserError: a path does not exist, is named twice, holds no input, is of a kind that cannot be read,
        or needs a library that is not installed.
    """
    found: list[InputFile] = []
    for path in paths:
        if os.path.isdir(path):
            below = sorted(str(file) for file in Path(path).rglob("*") if file.is_file() and _is_input(file.name))
            if not below:
                raise UserError("the directory holds no text, JSON Lines or Parquet file", where=path)
            found += [_input_file(file) for file in below]
        elif os.path.isfile(path):
            found.append(_input_file(path))
        else:
            raise UserError("no such file", where=path)
    seen: set[str] = set()
    for file in found:
        real = os.path.realpath(file.path)
        if real in seen:
            raise UserError("the file is given twice", where=file.path, mend="its documents would count twice")
        seen.add(real)
    return found


def _kind(name: str) -> Kind | None:
    """What a file of this name holds; None: its ending does not say."""
    return next((kind for ending, kind in _KINDS.items() if name.endswith(ending)), None)


def _is_input(name: str) -> bool:
    return _kind(compression_of(name)[0]) is not None


def _input_file(path: str) -> InputFile:
    name, compression = compression_of(path.lower())
    kind = _kind(name) or "text"
    if name.endswith(_FOREIGN_ENDINGS) or (kind == "parquet" and compression):
        mend = f"convert to text or JSON Lines, plain or {' or '.join(ENDINGS)}, or to Parquet"
        raise UserError("files of this kind cannot be read", where=path, mend=mend)
    if kind == "parquet":
        require_parquet(path)
    require_compression(path, compression)
    try:
        with open(path, "rb"):
            size = os.path.getsize(path)
    except OSError as error:
        raise UserError(f"cannot be read: {reason(error)}", where=path) from error
    return InputFile(path, size, kind, compression)


def read_documents(
    file: InputFile, layout: DocumentFormat, start: int = 0, stop: int | None = None
) -> Iterator[Document | Problem]:
    """Yields the documents that start in bytes [start, stop) of a file, and what is wrong with the others.

    Args:
      file: the file; only a divisible one takes a range.
      layout: how documents lie in it.
      start, stop: the range; by default all of the file. For split_text "size" both are multiples of document_bytes.
    """
    stop = file.size if stop is None else stop
    if file.size == 0:
        yield Problem("empty file", "", file.path, 1)
        return
    if file.kind == "parquet":
        for row in read_rows(file.path, file.size, layout.text_field, start, stop):
            yield _parquet_document(row, file.path)
        return
    stop = stop if layout.divisible(file) else 1 << 62  # sizes on disk say nothing about compressed contents
    lines = _Lines(file.path, start, stop)
    try:
        with open_input(file.path, file.compression) as stream:
            if file.kind == "jsonl":
                yield from (
                    _parse_json(line, number, lines, layout.text_field) for number, line in _one_line(lines, stream)
                )
            elif layout.split_text == "file":
                yield _decode(stream.read().removeprefix(_BYTE_ORDER_MARK), 1, lines)
            else:
                records = {"line": _one_line, "paragraph": _paragraphs, "size": _sized(layout.document_bytes)}
                for number, record in records[layout.split_text](lines, stream):
                    yield _decode(record, number, lines)
    except DAMAGE as error:
        yield Problem(f"damaged {file.compression}", str(error), file.path, lines.absolute(max(lines.number, 1)))


class _Lines:
    """The lines that start in bytes [start, stop) of a file, numbered from 1 within the range.

    Lines before the range are counted only when a problem has to name its line in the file.
    """

    def __init__(self, path: str, start: int, stop: int) -> None:
        self.path, self.start, self.stop = path, start, stop
        self.number = 0  # of the line last read

    def read(self, stream: IO[bytes]) -> Iterator[tuple[int, int, bytes]]:
        """Yields (offset, number, line) from the range's first line on; goes on past `stop`: records may."""
        position = self.start
        if self.start:
            # The line that holds the byte before the range belongs to an earlier range. One that spans this range
            # too is not read to its end, which would cost its length again in every range that it spans.
            position -= 1
            stream.seek(position)
            while position < self.stop:
                block = stream.readline(_READ_BYTES)
                position += len(block)
                if not block or block.endswith(b"\n"):
                    break
            else:
                return
        while line := stream.readline():
            self.number += 1
            yield position, self.number, line.removeprefix(_BYTE_ORDER_MARK) if position == 0 else line
            position += len(line)

    def absolute(self, number: int) -> int:
        """The number in the file of a line of this range."""
        return self._before + number

    @functools.cached_property
    def _before(self) -> int:
        """How many lines start before the range."""
        if self.start == 0:
            return 0
        newlines, left = 0, self.start - 1
        with open(self.path, "rb") as stream:
            while left and (block := stream.read(min(_READ_BYTES, left))):
                newlines += block.count(b"\n")
                left -= len(block)
        return newlines + 1


# Each of these yields (number of its first line, bytes) of the records that belong to the range; blank ones are none.
_Records = Callable[[_Lines, IO[bytes]], Iterator[tuple[int, bytes]]]


def _one_line(lines: _Lines, stream: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    for position, number, line in lines.read(stream):
        if position >= lines.stop:
            return
        if line.strip():
            yield number, line.rstrip(b"\r\n")


def _paragraphs(lines: _Lines, stream: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """A paragraph belongs to the range in which the blank line right before it starts."""
    mine = lines.start == 0
    first, paragraph = 0, list[bytes]()
    for position, number, line in lines.read(stream):
        if line.strip():
            if not mine and position >= lines.stop:
                return
            if mine:
                first = first if paragraph else number
                paragraph.append(line)
            continue
        if paragraph:
            yield first, b"".join(paragraph).rstrip(b"\r\n")
            paragraph = []
        if position >= lines.stop:
            return
        mine = True
    if paragraph:
        yield first, b"".join(paragraph).rstrip(b"\r\n")


def _sized(document_bytes: int) -> _Records:
    """A record is the lines that start in one run of `document_bytes` bytes of the file."""

    def records(lines: _Lines, stream: IO[bytes]) -> Iterator[tuple[int, bytes]]:
        run, first, record = -1, 0, list[bytes]()
        for position, number, line in lines.read(stream):
            if position // document_bytes != run:
                if b"".join(record).strip():
                    yield first, b"".join(record)
                run, first, record = position // document_bytes, number, []
            if position >= lines.stop:
                return
            record.append(line)
        if b"".join(record).strip():
            yield first, b"".join(record)

    return records


def _parse_json(line: bytes, number: int, lines: _Lines, text_field: str) -> Document | Problem:
    def problem(reason: str, detail: str = "") -> Problem:
        return Problem(reason, detail, lines.path, lines.absolute(number))

    try:
        record = parse_json(line.decode().rstrip("\r\n"))
    except UnicodeDecodeError as error:
        return problem("invalid UTF-8", f"byte {error.start + 1} of the line")
    except json.JSONDecodeError as error:  # to it every line is the first
        return problem("malformed JSON", f"{error.msg} at column {error.colno}")
    except ValueError as error:
        return problem("malformed JSON", str(error))
    if not isinstance(record, dict):
        return problem("not a JSON object", f"a {type(record).__name__}")
    if text_field not in record:
        return problem("missing field", repr(text_field))
    text = record[text_field]
    if not isinstance(text, str):
        return problem("field is not a string", f"{text_field!r} is a {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError:
        return problem("lone surrogate", "half of an escaped character pair")
    return _document(text, lines, number)


def _decode(record: bytes, number: int, lines: _Lines) -> Document | Problem:
    try:
        text = record.decode()
    except UnicodeDecodeError as error:
        number += record.count(b"\n", 0, error.start)
        return Problem("invalid UTF-8", "", lines.path, lines.absolute(number))
    return _document(text, lines, number)


def _document(text: str, lines: _Lines, number: int) -> Document | Problem:
    document = Document(text, lambda: (lines.path, lines.absolute(number)))
    return document if text.strip() else document.problem("empty document", "")


def _parquet_document(row: Row, path: str) -> Document | Problem:
    if row.reason:
        return Problem(row.reason, row.detail, path, row.number)
    try:
        text = row.text.decode()
    except UnicodeDecodeError as error:
        return Problem("invalid UTF-8", f"byte {error.start + 1} of the text", path, row.number)
    document = Document(text, lambda: (path, row.number))
    return document if text.strip() else document.problem("empty document", "")
