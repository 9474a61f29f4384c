"""The command `tlm`. Each subcommand lives in its own room and is imported only when it is called."""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from tlm_jax import __version__
from tlm_jax.errors import EXIT_BAD_INPUT, EXIT_BROKEN_PIPE, EXIT_INTERRUPTED, UserError
from tlm_jax.files import reason

# name -> (module with `add_arguments(parser)` and `run(args, overrides) -> exit code`, one line of help)
COMMANDS: dict[str, tuple[str, str]] = {
    "config": ("tlm_jax.config_command", "every config key with its default and meaning"),
    "profile": ("tlm_jax.capacity.command", "show the layers of a config, their budget, and the difference to another"),
    "tokenizer": ("tlm_jax.data.tokenizer_command", "train a SentencePiece tokenizer"),
    "prepare": ("tlm_jax.data.prepare_command", "turn text and JSONL into a token store"),
    "adopt": ("tlm_jax.data.adopt_command", "use token files of nanoGPT, llm.c or Megatron as a token store, in place"),
    "inspect": (
        "tlm_jax.data.inspect_command",
        "show what token stores hold and how their documents fill windows",
    ),
    "train": ("tlm_jax.train.command", "train a model; the same command again resumes it"),
    "eval": ("tlm_jax.evaluate.eval_command", "loss, perplexity and bits per byte of a checkpoint"),
    "generate": ("tlm_jax.evaluate.generate_command", "sample text from a checkpoint"),
    "checkpoint": ("tlm_jax.checkpoint.command", "list, verify, prune, export or convert the checkpoints of a run"),
    "compare": ("tlm_jax.compare.command", "variants at equal budget over seeds, and what their differences say"),
    "report": ("tlm_jax.report.command", "one HTML page about one or more runs"),
}

# These have nothing to tidy up, and JAX's start-up and XLA's callbacks may swallow a KeyboardInterrupt.
_ENDED_BY_CTRL_C = ("train", "eval", "generate")  # training until it listens by itself


class _Parser(argparse.ArgumentParser):
    """Tells a wrong argument in one line, as every other bad input."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_BAD_INPUT, f"{self.prog}: error: {message}; `{self.prog} --help` lists what there is\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `tlm` and returns its exit code: 0 complete, 2 bad input, 75 stopped early and resumable."""
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(argv)
    except KeyboardInterrupt:  # while it was being imported, too
        print(f"{' '.join(['tlm', *argv[:1]])}: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def _run(argv: Sequence[str]) -> int:
    parser = _Parser(prog="tlm", description="Pretrain language models whose layers differ in size.")
    parser.add_argument("--version", action="version", version=f"tlm_jax {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    module = importlib.import_module(COMMANDS[argv[0]][0]) if argv and argv[0] in COMMANDS else None
    for name, (_, text) in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        if module and name == argv[0]:
            module.add_arguments(subparser)
    args, overrides = parser.parse_known_args(argv)
    assert module is not None  # argparse has exited on any other command
    if args.command not in _ENDED_BY_CTRL_C and signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # `__main__` had Ctrl-C end imports at once
    try:
        code = module.run(args, overrides)
        sys.stdout.flush()
        return code
    except UserError as error:
        print(f"tlm {args.command}: error: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except BrokenPipeError:  # the reader of our output, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except OSError as error:
        if error.errno != errno.ENOSPC or error.filename is not None:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print(f"tlm {args.command}: error: standard output: {reason(error)}", file=sys.stderr)
        return EXIT_BAD_INPUT


if __name__ == "__main__":
    sys.exit(main())
