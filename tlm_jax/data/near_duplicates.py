"""Near-duplicates between held-out and training documents, by the words they share in sequence.

A document is the set of its shingles, runs of five words without case and punctuation. Two sets are compared by
Jaccard similarity, |A & B| / |A | B|, and by containment, the share of the held-out document's shingles that the
training document has: a passage quoted in a long document has a small Jaccard similarity but a containment near 1.
Both are exact; memory is that of the held-out shingles, and training documents pass by once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

_SHINGLE_WORDS = 5
_WORD = re.compile(r"\w+")
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # odd, so that multiplying loses nothing


@dataclass(frozen=True)
class NearDuplicate:
    """A held-out document and a training document that share much, by their numbers, with both similarities."""

    held_out: int
    train: int
    jaccard: float
    containment: float


class _Shingler:
    """Turns texts to sorted arrays of distinct shingle hashes, uint64, the same for equal shingles of all its texts."""

    def __init__(self) -> None:
        self._word_ids: dict[str, int] = {}

    def __call__(self, text: str) -> np.ndarray:
        ids = self._word_ids
        words = np.array([ids.setdefault(word, len(ids) + 1) for word in _WORD.findall(text.lower())], np.uint64)
        width = min(_SHINGLE_WORDS, len(words))  # a shorter document is one shingle
        hashes = np.zeros(len(words) - width + 1 if len(words) else 0, np.uint64)
        for offset in range(width):
            hashes = (hashes ^ words[offset : offset + len(hashes)]) * _MULTIPLIER
            hashes ^= hashes >> np.uint64(29)
        return np.unique(hashes)


def near_duplicates(
    held_out: Iterable[str], train: Iterable[str], *, min_jaccard: float = 0.5, min_containment: float = 1.0
) -> list[NearDuplicate]:
    """Finds the pairs whose Jaccard similarity or containment reaches a threshold, by held-out, then train number.

    Args:
      held_out: texts; their shingles are held in memory.
      train: texts; read once.
      min_jaccard, min_containment: thresholds in (0, 1]; a pair that reaches either is found.
    """
    shingler = _Shingler()
    sets = [shingler(text) for text in held_out]
    sizes = np.array([len(shingles) for shingles in sets])
    owners = np.repeat(np.arange(len(sets)), sizes)
    flat = np.concatenate([np.empty(0, np.uint64), *sets])
    order = np.argsort(flat, kind="stable")
    flat, owners = flat[order], owners[order]
    found: list[NearDuplicate] = []
    for number, text in enumerate(train):
        shingles = shingler(text)
        first, last = np.searchsorted(flat, shingles, "left"), np.searchsorted(flat, shingles, "right")
        shared = [owners[a:b] for a, b in zip(first, last, strict=True) if b > a]
        if not shared:
            continue
        counts = np.bincount(np.concatenate(shared), minlength=len(sets))
        for owner in np.flatnonzero(counts):
            common = int(counts[owner])
            jaccard = common / (int(sizes[owner]) + len(shingles) - common)
            containment = common / int(sizes[owner])
            if jaccard >= min_jaccard or containment >= min_containment:
                found.append(NearDuplicate(int(owner), number, jaccard, containment))
    return sorted(found, key=lambda pair: (pair.held_out, pair.train))
