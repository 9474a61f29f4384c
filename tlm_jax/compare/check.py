"""Finds what is wrong with the variants' configs on the devices at hand, in a process of its own.

    python -m tlm_jax.compare.check < JSON list of [variant's name, config as JSON text]

The comparison itself must not touch the devices, which belong to its runs; and what a later variant lacks is better
told before the first has trained for hours.
"""

from __future__ import annotations

import json
import sys

from tlm_jax.config import from_json
from tlm_jax.errors import EXIT_BAD_INPUT, EXIT_COMPLETE, UserError, raise_together
from tlm_jax.train.setup import build


def main() -> int:
    """Builds every run without an array; 2 with one line on standard error if any cannot be built."""
    problems: dict[str, UserError] = {}
    for name, text in json.load(sys.stdin):
        try:
            build(from_json(text))
        except UserError as problem:
            problems.setdefault(str(problem), UserError(str(problem), where=f"variant {name}"))
    try:
        raise_together(list(problems.values()))
    except UserError as problem:
        print(problem, file=sys.stderr)
        return EXIT_BAD_INPUT
    return EXIT_COMPLETE


if __name__ == "__main__":
    sys.exit(main())
