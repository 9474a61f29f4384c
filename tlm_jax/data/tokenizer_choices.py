"""The arguments by which commands take a tokenizer that exists."""

from __future__ import annotations

import argparse

from tlm_jax.data.tokenizer import Tokenizer, load_tokenizer
from tlm_jax.errors import UserError

TOKENIZER_HELP = (
    "`byte`, a SentencePiece .model such as `tlm tokenizer` makes, a Hugging Face tokenizer.json, or a .tiktoken file "
    "of ranks"
)


def add_tokenizer_choices(parser: argparse.ArgumentParser) -> None:
    """Declares what some tokenizers have to be told beside `--tokenizer`."""
    for name, verb in (("--bos-token", "begins"), ("--eos-token", "ends")):
        text = f"tokenizer.json: {verb} a document (default: as its tokenizer_config.json says)"
        parser.add_argument(name, default="", metavar="TOKEN", help=text)
    parser.add_argument(
        "--tiktoken-pattern",
        default="",
        metavar="REGEX",
        help=".tiktoken: splits text before pieces are merged; or an encoding with such a pattern, as cl100k_base "
        "(default: of published files, their own)",
    )


def chosen_tokenizer(args: argparse.Namespace) -> Tokenizer | None:
    """Loads `--tokenizer` with its choices; None where none is given.

    Raises:
      UserError: as `load_tokenizer`, or choices without a tokenizer.
    """
    choices = {name: getattr(args, name) for name in ("bos_token", "eos_token", "tiktoken_pattern")}
    if args.tokenizer is not None:
        return load_tokenizer(args.tokenizer, **choices)
    if useless := [name for name, value in choices.items() if value]:
        raise UserError("there is no --tokenizer that it could be for", where=f"--{useless[0].replace('_', '-')}")
    return None
