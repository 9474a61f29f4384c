"""Parquet files by row group: the texts of one column, and by row what keeps one from being read.

A file is read by byte range as the other inputs are. Its row groups are taken to lie evenly over its bytes, so which
range a row group belongs to follows from the file's size and their number, however the writer laid them out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tlm_jax.data.extras import optional_library

_BATCH_ROWS = 1024


@dataclass(frozen=True)
class Row:
    """A row of the file, counted from 1: the text's bytes, or the reason (and detail) that there are none."""

    number: int
    text: bytes = b""
    reason: str = ""
    detail: str = ""


def require_parquet(path: str) -> None:
    """Checks that what reading needs is installed.

    Raises:
      UserError: the library is missing.
    """
    optional_library("pyarrow.parquet", path)


def read_rows(path: str, size: int, text_field: str, start: int, stop: int) -> Iterator[Row]:
    """Yields the rows of the row groups that begin in bytes [start, stop) of a file, each once.

    Args:
      path, size: the file and its size in bytes.
      text_field: the column of strings, or of UTF-8 bytes, to read.
      start, stop: the range. A file that cannot be opened is told by the range that begins at 0, in one row.
    """
    pyarrow, parquet = optional_library("pyarrow", path), optional_library("pyarrow.parquet", path)
    try:
        with parquet.ParquetFile(path, page_checksum_verification=True) as file:
            count = file.metadata.num_row_groups
            if start == 0 and file.metadata.num_rows == 0:
                yield Row(1, reason="empty file")
            lacks = _what_column_lacks(pyarrow, file.schema_arrow, text_field)
            first = 1
            for group in range(count):
                rows = file.metadata.row_group(group).num_rows
                if start <= size * group // count < stop:
                    if lacks:
                        yield from (Row(first + i, b"", *lacks) for i in range(rows))
                    else:
                        yield from _read_group(pyarrow, file, group, text_field, first, rows)
                first += rows
    except (pyarrow.ArrowException, OSError) as error:
        if start == 0:
            yield Row(1, reason="damaged parquet", detail=_one_line(error))


def _what_column_lacks(pyarrow: Any, schema: Any, text_field: str) -> tuple[str, str] | None:
    """Reason and detail if the column cannot be read as text."""
    if schema.names.count(text_field) != 1:
        listed = ", ".join(map(repr, schema.names))
        return "missing field", f"{text_field!r} is not one of the columns {listed}"
    column_type = schema.field(text_field).type
    value_type = column_type.value_type if pyarrow.types.is_dictionary(column_type) else column_type
    texts = (pyarrow.string(), pyarrow.large_string(), pyarrow.binary(), pyarrow.large_binary())
    return None if value_type in texts else ("field is not a string", f"{text_field!r} is a {column_type}")


def _read_group(pyarrow: Any, file: Any, group: int, text_field: str, first: int, rows: int) -> Iterator[Row]:
    """Yields the rows of one row group; from where it is damaged on, every row is one that cannot be read."""
    done, damage = 0, "the row group is shorter than the file says"
    try:
        batches = file.iter_batches(_BATCH_ROWS, row_groups=[group], columns=[text_field], use_threads=False)
        for batch in batches:
            column = batch.column(0)
            if pyarrow.types.is_dictionary(column.type):
                column = column.dictionary_decode()
            # As bytes, since Arrow does not make sure that a string is UTF-8.
            for value in column.cast(pyarrow.large_binary()):
                data = value.as_py()
                number, done = first + done, done + 1
                if data is None:
                    yield Row(number, reason="field is not a string", detail=f"{text_field!r} is null")
                else:
                    yield Row(number, data)
    except (pyarrow.ArrowException, OSError) as error:
        damage = _one_line(error)
    yield from (Row(first + i, reason="damaged parquet", detail=damage) for i in range(done, rows))


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
