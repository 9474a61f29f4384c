"""`tlm adopt`: token files of nanoGPT, llm.c and Megatron as a token store, read where they lie."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from tlm_jax.config import reject_overrides
from tlm_jax.data.adopt import AUTO, NONE, Adoption, adopt
from tlm_jax.data.foreign import LAYOUTS
from tlm_jax.data.inspection import next_lines, summary
from tlm_jax.data.store import TokenStore
from tlm_jax.data.tokenizer import MOST_IDS
from tlm_jax.data.tokenizer_choices import TOKENIZER_HELP, add_tokenizer_choices, chosen_tokenizer
from tlm_jax.errors import EXIT_COMPLETE, UserError

_EPILOG = """\
examples:
  tlm adopt owt/train.bin --validation owt/val.bin --vocab-size=50257 --separator=50256 --output=owt_store
  tlm adopt fineweb_train_*.bin --validation fineweb_val_*.bin --vocab-size=50257 --separator=50256 --output=fineweb
  tlm adopt my_text_document.idx --tokenizer=my.model --holdout=0.005 --output=my_store

The ids stay where they are; the store holds offsets, checksums and the tokenizer. Without --tokenizer there are no
bytes of text: bits per byte are not available, and samples and prompts are ids. The separator ends the document before
it (and is predicted as its end) and begins the next one.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of `tlm adopt`."""
    parser.epilog, parser.formatter_class = _EPILOG, argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "train", nargs="+", metavar="FILE", help="training tokens: .bin files, or the .idx of Megatron pairs, in order"
    )
    parser.add_argument("--validation", nargs="+", action="extend", default=[], metavar="FILE", help="held-out tokens")
    parser.add_argument(
        "--holdout", type=float, help="without --validation: share of the tokens, the last documents (default: 0.01)"
    )
    parser.add_argument("--output", required=True, metavar="STORE", help="directory of the token store")
    known = parser.add_mutually_exclusive_group(required=True)
    known.add_argument("--tokenizer", metavar="TOKENIZER", help=f"the ids' tokenizer: {TOKENIZER_HELP}")
    known.add_argument("--vocab-size", type=int, metavar="N", help="the tokenizer is not known; ids are below N")
    add_tokenizer_choices(parser)
    parser.add_argument(
        "--separator",
        default=AUTO,
        metavar="ID",
        help="the id between documents, or none (default: the tokenizer's end id; Megatron: the id that ends every "
        "document, if there is one)",
    )
    parser.add_argument("--layout", choices=LAYOUTS, default="auto", help="of the files (default: as they look)")
    parser.add_argument(
        "--dtype", choices=("uint16", "uint32"), default="uint16", help="of ids in files without header or index"
    )


def run(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Adopts the files; 0 when the store is complete."""
    train = [*args.train, *(text for text in overrides if not text.startswith("-"))]  # those after an option
    reject_overrides([text for text in overrides if text.startswith("-")])
    if args.validation and args.holdout is not None:
        raise UserError("given beside --validation", where="--holdout", mend="give one of them")
    if args.vocab_size is not None and not 0 < args.vocab_size <= MOST_IDS:
        raise UserError(f"must be from 1 to {MOST_IDS}, not {args.vocab_size}", where="--vocab-size")
    holdout = Adoption.holdout if args.holdout is None else args.holdout
    adoption = Adoption(_separator(args.separator), holdout, args.layout, args.dtype)
    tokenizer = chosen_tokenizer(args) or args.vocab_size
    _say_next(adopt(train, args.validation, args.output, tokenizer, adoption))
    return EXIT_COMPLETE


def _separator(text: str) -> int | str:
    if text in (AUTO, NONE):
        return text
    if not (text.isascii() and text.isdigit() and len(text) <= 10):  # as many digits as 2^32 has
        raise UserError(f"{text!r} is no id", where="--separator", mend=f"give a number, {NONE} or {AUTO}")
    return int(text)


def _say_next(store: TokenStore) -> None:
    print(f"{store.name}: complete")
    for line in summary(store):
        print(f"  {line}")
    if not store.split("validation").num_documents:
        print("  nothing is held out for validation: give --validation, or raise --holdout")
    print("\n".join(next_lines(store)))
