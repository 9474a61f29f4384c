"""The arguments that say how documents lie in files of text, shared by the commands that read such files."""

from __future__ import annotations

import argparse

from tlm_jax.data.documents import SPLIT_TEXT, DocumentFormat
from tlm_jax.errors import UserError


def add_format_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares `--text-field`, `--split-text` and `--document-bytes`."""
    parser.add_argument("--text-field", default="text", help="JSON Lines, Parquet: the key or column of the text")
    parser.add_argument(
        "--split-text", choices=SPLIT_TEXT, default="file", help="text files: what is a document (default: the file)"
    )
    parser.add_argument(
        "--document-bytes", type=int, default=1 << 16, help="--split-text=size: bytes, prolonged to the line's end"
    )


def format_of(args: argparse.Namespace) -> DocumentFormat:
    """The format that the parsed arguments name.

    Raises:
      UserError: documents of less than one byte.
    """
    if args.document_bytes < 1:
        raise UserError(f"must be at least 1, not {args.document_bytes}", where="--document-bytes")
    return DocumentFormat(args.text_field, args.split_text, args.document_bytes)
