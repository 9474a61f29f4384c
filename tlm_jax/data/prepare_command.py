"""`tlm prepare`: text, JSON Lines and Parquet to a token store."""

from __future__ import annotations

import argparse
import signal
import sys
import textwrap
from collections.abc import Sequence

from tlm_jax.config import reject_overrides
from tlm_jax.data.documents import find_inputs
from tlm_jax.data.format_arguments import add_format_arguments, format_of
from tlm_jax.data.inspection import next_lines, summary
from tlm_jax.data.prepare import Settings, prepare
from tlm_jax.data.store import TokenStore
from tlm_jax.data.tokenizer_choices import TOKENIZER_HELP, add_tokenizer_choices, chosen_tokenizer
from tlm_jax.errors import EXIT_COMPLETE, EXIT_RESUMABLE, UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of `tlm prepare`."""
    parser.add_argument(
        "inputs",
        nargs="+",
        metavar="INPUT",
        help="text, JSON Lines (both plain, .gz or .zst) and Parquet files; directories",
    )
    parser.add_argument("--tokenizer", required=True, metavar="TOKENIZER", help=TOKENIZER_HELP)
    add_tokenizer_choices(parser)
    parser.add_argument("--output", required=True, metavar="STORE", help="directory of the token store")
    add_format_arguments(parser)
    parser.add_argument("--holdout", type=float, default=0.01, help="fraction of documents kept for validation")
    parser.add_argument("--dtype", choices=("auto", "uint16", "uint32"), default="auto", help="type of the stored ids")
    parser.add_argument(
        "--workers", type=int, default=0, help="how many tokenise at a time (0: one per CPU); the store is the same"
    )
    parser.add_argument(
        "--on-error", choices=("stop", "skip"), default="stop", help="at a document that cannot be read (default: stop)"
    )


def run(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Prepares the store; 0 when it is complete, 75 when interrupted: the same command goes on."""
    inputs = [*args.inputs, *(text for text in overrides if not text.startswith("-"))]  # those after an option
    reject_overrides([text for text in overrides if text.startswith("-")])
    if args.workers < 0:
        raise UserError(f"must be at least 0, not {args.workers}", where="--workers")
    settings = Settings(format_of(args), args.holdout, args.dtype)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        tokenizer = chosen_tokenizer(args)
        assert tokenizer is not None  # the argument is required
        store = prepare(inputs, tokenizer, args.output, settings, workers=args.workers, on_error=args.on_error)
    except KeyboardInterrupt:
        print("tlm prepare: interrupted; the same command goes on from here", file=sys.stderr)
        return EXIT_RESUMABLE
    finally:
        signal.signal(signal.SIGTERM, before)
    _summarise(store, inputs, args.split_text)
    return EXIT_COMPLETE


def _summarise(store: TokenStore, inputs: Sequence[str], split_text: str) -> None:
    print(f"{store.name}: complete")
    print(textwrap.indent("\n".join(summary(store)), "  "))
    # Documents are held out by their hashes: of a few, it may be none or all.
    if not store.split("validation").num_documents:
        finer = split_text in ("file", "paragraph") and any(file.kind == "text" for file in find_inputs(inputs))
        ways = "--split-text=line" if finer else "more documents"
        print(f"  nothing is held out for validation: prepare again with a larger --holdout, or with {ways}")
    elif not store.split("train").num_documents:
        print("  everything is held out for validation: prepare again with a smaller --holdout, or with more documents")
    print("\n".join(next_lines(store)))
