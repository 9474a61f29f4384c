from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

import pytest

from tlm_jax.data.near_duplicates import near_duplicates
from tlm_jax.data.units import is_held_out

_CORPUS = Path(__file__).parents[2] / "corpus"


def _document(seed: int, words: int) -> list[str]:
    chance = random.Random(seed)
    return [f"w{chance.randrange(3000)}" for _ in range(words)]


def _shingles(words: list[str]) -> set[tuple[str, ...]]:
    return {tuple(words[i : i + 5]) for i in range(len(words) - 4)}


def test_similarities_are_exact() -> None:
    held_out = [_document(0, 200), _document(1, 150)]
    train = [_document(2, 300), held_out[0][:120] + _document(3, 80), _document(4, 500) + held_out[1] + _document(5, 9)]
    found = near_duplicates(map(" ".join, held_out), map(" ".join, train), min_jaccard=0.3, min_containment=0.9)
    assert [(pair.held_out, pair.train) for pair in found] == [(0, 1), (1, 2)]
    for pair in found:
        a, b = _shingles(held_out[pair.held_out]), _shingles(train[pair.train])
        assert pair.jaccard == pytest.approx(len(a & b) / len(a | b))
        assert pair.containment == pytest.approx(len(a & b) / len(a))


def test_case_punctuation_and_layout_do_not_hide_a_duplicate() -> None:
    (pair,) = near_duplicates(["Call me Ishmael. Some years ago!"], ["x", "call me -- ISHMAEL:\nsome\tyears ago"])
    assert (pair.train, pair.jaccard, pair.containment) == (1, 1.0, 1.0)
    assert near_duplicates(["Hello there"], ["hello, there?", "there hello"]) == near_duplicates(["a b"], ["A b", "c"])
    assert near_duplicates(["...", "a b c d e f"], ["...", "f e d c b a"]) == []


@pytest.mark.skipif(not list(_CORPUS.glob("*.jsonl.gz")), reason="the corpus is not here")
@pytest.mark.parametrize("holdout", [0.01, 0.05])
def test_no_held_out_document_of_the_shipped_corpus_is_in_training(holdout: float) -> None:
    texts = [
        json.loads(line)["text"]
        for path in sorted(_CORPUS.glob("*.jsonl.gz"))
        for line in gzip.decompress(path.read_bytes()).splitlines()
    ]
    held_out = [text for text in texts if is_held_out(text.encode(), holdout)]
    train = [text for text in texts if not is_held_out(text.encode(), holdout)]
    assert held_out
    found = near_duplicates(held_out, train, min_jaccard=0.5, min_containment=0.5)
    assert not found, [(held_out[pair.held_out][:80], train[pair.train][:80], pair) for pair in found]
