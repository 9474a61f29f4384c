"""The reference points: gzip against Python's own gzip, the bigram model against a slow one and a worked example."""

from __future__ import annotations

import gzip
from collections import Counter, defaultdict

import numpy as np
import pytest

from tlm_jax.data.store import Borders
from tlm_jax.errors import UserError
from tlm_jax.evaluate import baselines

BOS, EOS, V = 0, 1, 31


class FakeTokenizer:
    bos_id, eos_id, vocab_size = BOS, EOS, V


class FakeSplit:
    def __init__(self, documents, num_bytes):
        self._tokens = np.array([t for d in documents for t in (BOS, *d, EOS)], np.uint16)
        self.num_tokens, self.num_bytes = self._tokens.size, num_bytes

    def read(self, start, stop):
        assert 0 <= start <= stop <= self.num_tokens
        return self._tokens[start:stop]


class FakeStore:
    borders = Borders(BOS, start_is_target=False)

    def __init__(self, train, validation, num_bytes):
        self._splits = {"train": FakeSplit(train, 1), "validation": FakeSplit(validation, num_bytes)}

    def tokenizer(self):
        return FakeTokenizer()

    def split(self, name):
        return self._splits[name]


def random_documents(seed, count):
    rng = np.random.default_rng(seed)
    return [list(2 + rng.zipf(1.5, rng.integers(0, 9)) % 27) for _ in range(count)]  # 29 and 30 never occur


def slow_kneser_ney(train, vocab_size):
    """p(w | v) from dictionaries, straight from the definition."""
    pairs = Counter(p for d in train for p in zip((BOS, *d), (*d, EOS), strict=True))
    successors, predecessors = defaultdict(set), defaultdict(set)
    for v, w in pairs:
        successors[v].add(w)
        predecessors[w].add(v)

    def discount(values):
        values = list(values)
        return values.count(1) / (values.count(1) + 2 * values.count(2))

    d, e = discount(pairs.values()), discount(len(s) for s in predecessors.values())

    def unigram(w):
        return (max(len(predecessors.get(w, ())) - e, 0) + e * len(predecessors) / vocab_size) / len(pairs)

    def bigram(v, w):
        total = sum(c for (a, _), c in pairs.items() if a == v)
        if not total:
            return unigram(w)
        return max(pairs[v, w] - d, 0) / total + d * len(successors[v]) / total * unigram(w)

    return bigram


def test_gzip_equals_the_gzip_module_on_the_concatenation():
    texts = ["one fish, two fish\n" * 40, "", "naïve café — 東京\n" * 25]
    whole = "".join(texts).encode()
    expected = 8 * len(gzip.compress(whole, compresslevel=9, mtime=0)) / len(whole)
    assert baselines.gzip_bits_per_byte(texts) == expected


def test_gzip_of_nothing_is_a_user_error():
    with pytest.raises(UserError, match="no held-out text"):
        baselines.gzip_bits_per_byte(["", ""])


def test_pair_counts_do_not_depend_on_chunks_and_stay_inside_documents(monkeypatch):
    documents = random_documents(0, 50)
    split = FakeSplit(documents, 1)
    expected = Counter(p for d in documents for p in zip((BOS, *d), (*d, EOS), strict=True))
    for chunk in (1, 7, 1000):
        monkeypatch.setattr(baselines, "_CHUNK_TOKENS", chunk)
        keys, counts = baselines.count_pairs(baselines._chunks(split), V, BOS)
        assert {(int(k) // V, int(k) % V): c for k, c in zip(keys, counts, strict=True)} == expected


def test_probabilities_equal_the_slow_model_and_sum_to_one():
    train = random_documents(1, 40)
    split = FakeSplit(train, 1)
    model = baselines.KneserNeyBigram.fit(*baselines.count_pairs(baselines._chunks(split), V, BOS), V)
    v, w = np.divmod(np.arange(V * V), V)
    probabilities = model.probability(v, w).reshape(V, V)
    slow = slow_kneser_ney(train, V)
    np.testing.assert_allclose(probabilities, [[slow(v, w) for w in range(V)] for v in range(V)], rtol=1e-12)
    np.testing.assert_allclose(probabilities.sum(1), 1, rtol=1e-12)
    assert (probabilities > 0).all()


def test_worked_example():
    # Pairs of (2 3) (2 3) (2 4): BOS>2 three times, 2>3 twice, 3>EOS twice, 2>4 and 4>EOS once.
    # n1 = 2, n2 = 2: d = 1/3. Predecessors: 2, 3 and 4 have one, EOS two: e = 3 / (3 + 2) = 3/5.
    # p(3) = (1 - 3/5) / 5 + 3/5 * 4/5 / 31 = 2/25 + 12/775 = 74/775
    # p(3 | 2) = (2 - 1/3) / 3 + 1/3 * 2/3 * 74/775
    keys, counts = baselines.count_pairs([np.array([0, 2, 3, 1, 0, 2, 3, 1, 0, 2, 4, 1])], V, BOS)
    model = baselines.KneserNeyBigram.fit(keys, counts, V)
    np.testing.assert_allclose(model.probability(2, 3), 5 / 9 + 2 / 9 * 74 / 775, rtol=1e-14)
    np.testing.assert_allclose(model.probability(10, 3), 74 / 775, rtol=1e-14)  # 10 was never seen


def test_bits_per_byte_over_the_held_out_split():
    train, held_out = random_documents(2, 60), random_documents(3, 20)
    slow = slow_kneser_ney(train, V)
    bits = -sum(np.log2(slow(v, w)) for d in held_out for v, w in zip((BOS, *d), (*d, EOS), strict=True))
    store = FakeStore(train, held_out, num_bytes=321)
    assert baselines.smoothed_bigram_bits_per_byte(store, FakeSplit(held_out, 642)) == pytest.approx(
        bits / 642, rel=1e-12
    )
    assert baselines.smoothed_bigram_bits_per_byte(store) == pytest.approx(bits / 321, rel=1e-12)


@pytest.mark.parametrize(("train", "held_out", "named"), [([], [[2]], "training"), ([[2]], [], "held-out")])
def test_empty_splits_are_user_errors(train, held_out, named):
    with pytest.raises(UserError, match=f"{named} split is empty"):
        baselines.smoothed_bigram_bits_per_byte(FakeStore(train, held_out, num_bytes=1))


def test_counts_too_few_for_a_discount_still_sum_to_one():
    model = baselines.KneserNeyBigram.fit(*baselines.count_pairs([np.array([0, 2, 1])], V, BOS), V)
    np.testing.assert_allclose(model.probability(2, np.arange(V)).sum(), 1, rtol=1e-14)
    assert model.probability(2, 1) > 0.5
