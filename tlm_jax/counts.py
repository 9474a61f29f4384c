"""Counts of things as people write them."""

from __future__ import annotations


def counted(number: int, one: str, several: str = "") -> str:
    """`1 document`, `2,000 documents`.

    Args:
      number: how many.
      one: what one of them is called.
      several: what other numbers of them are called; by default `one` with an s.
    """
    return f"{number:,} {one if number == 1 else several or one + 's'}"
