"""`tlm tokenizer`: trains a SentencePiece tokenizer."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Sequence

from tlm_jax.config import reject_overrides
from tlm_jax.data.format_arguments import add_format_arguments, format_of
from tlm_jax.data.sentencepiece_training import train_sentencepiece
from tlm_jax.errors import EXIT_COMPLETE, UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of `tlm tokenizer`."""
    parser.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="FILE",
        help="text, JSON Lines (both plain, .gz or .zst) and Parquet; directories",
    )
    parser.add_argument("--vocab-size", type=int, required=True, help="number of ids, specials and bytes included")
    parser.add_argument("--output", required=True, metavar="FILE.model", help="the model file to write")
    add_format_arguments(parser)
    parser.add_argument("--sample-megabytes", type=int, default=1000, help="use about this much of larger inputs")
    parser.add_argument(
        "--on-error", choices=("stop", "skip"), default="stop", help="at a document that cannot be read (default: stop)"
    )


def run(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Trains the tokenizer and tells what to run next."""
    reject_overrides(overrides)
    if args.sample_megabytes < 1:
        raise UserError(f"must be at least 1, not {args.sample_megabytes}", where="--sample-megabytes")
    if args.vocab_size < 1:
        raise UserError(f"must be at least 1, not {args.vocab_size}", where="--vocab-size")
    if os.path.isdir(args.output):
        raise UserError("is a directory", where=args.output, mend="give the name of a file")
    tokenizer = train_sentencepiece(
        args.input,
        args.output,
        args.vocab_size,
        layout=format_of(args),
        sample_bytes=args.sample_megabytes * 1_000_000,
        skip_problems=args.on_error == "skip",
    )
    print(f"{args.output}: {tokenizer.vocab_size:,} ids, sha256 {tokenizer.hash[:16]}")
    print("next:")
    print(f"  {shlex.join(['tlm', 'prepare', *args.input, f'--tokenizer={args.output}', '--output=STORE'])}")
    return EXIT_COMPLETE
