"""`tlm inspect`: what token stores hold, and how they are packed into windows."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict
from fractions import Fraction
from typing import Any

from tlm_jax.config import reject_overrides
from tlm_jax.counts import counted
from tlm_jax.data.inspection import (
    as_json,
    bars,
    document_lengths,
    frequent_tokens,
    samples,
    shown_token,
    summary,
)
from tlm_jax.data.mixture import Mixture, components
from tlm_jax.data.packing import packing, packing_by_store
from tlm_jax.data.store import SPLITS, TokenStore
from tlm_jax.errors import EXIT_COMPLETE, UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of `tlm inspect`."""
    parser.add_argument("stores", nargs="+", metavar="STORE", help="token stores, prepared or adopted")
    parser.add_argument("--split", choices=SPLITS, default="train", help="whose documents to look at (default: train)")
    parser.add_argument("--sequence-length", type=int, default=1024, metavar="T", help="of the windows (default: 1024)")
    parser.add_argument(
        "--weights",
        nargs="+",
        type=float,
        metavar="W",
        help="of the stores, in order: also show them as a mixture (config.data.mixture)",
    )
    parser.add_argument("--samples", type=int, default=3, metavar="N", help="documents to show (default: 3)")
    parser.add_argument("--tokens", type=int, default=16, metavar="N", help="frequent tokens to show (default: 16)")
    parser.add_argument("--verify", action="store_true", help="also compare every file's checksum with the manifest's")
    parser.add_argument("--json", action="store_true", help="print JSON only")


def run(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Describes the stores; 0 when they are what their manifests say."""
    reject_overrides(overrides)
    for name, value in (("--samples", args.samples), ("--tokens", args.tokens)):
        if value < 0:
            raise UserError(f"must be at least 0, not {value}", where=name)
    if args.sequence_length < 1:
        raise UserError(f"must be at least 1, not {args.sequence_length}", where="--sequence-length")
    if args.weights and len(args.weights) != len(args.stores):
        what = f"{counted(len(args.weights), 'weight')} for {counted(len(args.stores), 'store')}"
        raise UserError(what, where="--weights", mend="give one for each")
    stores = [TokenStore.open(path, verify=args.verify) for path in args.stores]
    if args.verify:  # before what is printed about them, which may be long
        print("every checksum is the manifest's", file=sys.stderr, flush=True)
    mixture = _mixture_epochs(Mixture(stores, args.weights), args) if args.weights else []
    if args.json:
        found = {"stores": [_measure(store, args) for store in stores], "mixture": mixture}
        print(json.dumps(found, indent=1, ensure_ascii=False))
        return EXIT_COMPLETE
    for number, store in enumerate(stores):
        print("\n".join(([""] if number else []) + _describe(store, args)))
    if mixture:
        print("\nas a mixture")
    for part in mixture:
        to_epoch = counted(part["windows_to_epoch"], "window"), counted(part["tokens_to_epoch"], "token")
        once = f"read once after {', '.join(to_epoch)}, of it"
        print(f"  {part['name']}: {part['share']} of the windows, {counted(part['windows'], 'window')}; {once}")
    return EXIT_COMPLETE


def _mixture_epochs(mixture: Mixture, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Of each store: its share, and how much of the mixture is one epoch of it."""
    found = []
    for part, packed in zip(components(mixture), packing_by_store(mixture, args.sequence_length), strict=True):
        windows = math.ceil(packed.windows / Fraction(part["share"]))
        length = {"windows_to_epoch": windows, "tokens_to_epoch": windows * args.sequence_length}
        found.append({**part, "windows": packed.windows, **length})
    return found


def _splits(store: TokenStore) -> list[str]:
    """The splits that can be cut into windows."""
    return [name for name in SPLITS if store.split(name).num_tokens > 1]


def _measure(store: TokenStore, args: argparse.Namespace) -> dict[str, Any]:
    found = as_json(store)
    packed = {name: packing(store, name, args.sequence_length) for name in _splits(store)}
    found["packing"] = {name: asdict(entry) | {"fill": entry.fill} for name, entry in packed.items()}
    seen, frequent = frequent_tokens(store, args.split, args.tokens)
    lengths = document_lengths(store, args.split)
    found["inspected"] = {
        "split": args.split,
        "document_lengths": [{"least": low, "most": high, "documents": n} for low, high, n in lengths],
        "tokens_counted": seen,
        "frequent_tokens": [
            {"id": i, "shown": shown_token(store.tokenizer(), i), "count": count} for i, count in frequent
        ],
        "samples": [{"document": i, "text": text} for i, text in samples(store, args.split, args.samples)],
    }
    return found


def _describe(store: TokenStore, args: argparse.Namespace) -> list[str]:
    lines = [store.name, *(f"  {line}" for line in summary(store))]
    for name in _splits(store):
        lines.append(f"  {name}: {packing(store, name, args.sequence_length).summary()}")
    lengths = document_lengths(store, args.split)
    if lengths:
        lines += ["", f"  lengths of {args.split} documents, in tokens", *(f"    {line}" for line in bars(lengths))]
    seen, frequent = frequent_tokens(store, args.split, args.tokens)
    if frequent:
        tokenizer = store.tokenizer()
        lines += ["", f"  most frequent of {counted(seen, f'{args.split} token')}"]
        lines += [
            f"    {i:>8}  {count:>12,}  {count / seen:>6.2%}  {shown_token(tokenizer, i)}" for i, count in frequent
        ]
    for document, text in samples(store, args.split, args.samples):
        lines += ["", f"  {args.split} document {document:,}", *(f"    {line}" for line in text.splitlines())]
    return lines
