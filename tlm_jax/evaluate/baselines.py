"""Reference points for held-out bits per byte: `gzip -9`, and a smoothed bigram model of the tokens.

Both are measured on the text a model is evaluated on: the bigram model predicts the same tokens (each token of a
document after its first, its end included, from the token before), and both divide by the same UTF-8 bytes.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from tlm_jax.data.mixture import JoinedSplit, Mixture
from tlm_jax.data.store import MemorySplit, Split, TokenStore
from tlm_jax.errors import UserError

_CHUNK_TOKENS = 1 << 22  # 32 MiB of int64 pair keys at one time
_GZIP_WBITS = 31  # zlib: the gzip container with a 32 KiB window

AnySplit = Split | MemorySplit | JoinedSplit


def gzip_bits_per_byte(texts: Iterable[str]) -> float:
    """Bits per UTF-8 byte of the concatenated `texts` compressed as one `gzip -9` stream.

    Raises:
      UserError: there is no text.
    """
    compressor = zlib.compressobj(level=9, wbits=_GZIP_WBITS)
    text_bytes = compressed_bytes = 0
    for text in texts:
        data = text.encode()
        text_bytes += len(data)
        compressed_bytes += len(compressor.compress(data))
    compressed_bytes += len(compressor.flush())
    if not text_bytes:
        raise UserError("there is no held-out text to compress", where="gzip baseline")
    return 8 * compressed_bytes / text_bytes


def smoothed_bigram_bits_per_byte(store: TokenStore | Mixture, held_out: AnySplit | None = None) -> float:
    """Bits per byte of a bigram model counted on the store's whole training split.

    The model is `KneserNeyBigram`; its discounts come from the training counts alone.

    Args:
      store: a token store; what begins its documents is predicted only where it also ends the one before.
      held_out: the split to predict, of the same tokenizer; by default the store's held-out split.

    Returns:
      Negative log2 probability summed over the held-out tokens, divided by the bytes of the held-out text.

    Raises:
      UserError: a split is empty, or documents have no begin of their own.
    """
    held_out = store.split("validation") if held_out is None else held_out
    vocab_size, borders = store.tokenizer().vocab_size, store.borders
    if borders.start_id is None and store.split("train").num_documents > 1:
        what = "the documents do not begin with an id of their own, so pairs across them cannot be told"
        raise UserError(what, where=store.name, mend="leave out --baselines")
    never = borders.start_id if borders.start_id is not None and not borders.start_is_target else -1
    model = KneserNeyBigram.fit(*count_pairs(_chunks(store.split("train")), vocab_size, never), vocab_size)
    keys, counts = count_pairs(_chunks(held_out), vocab_size, never)
    if not held_out.num_bytes or not counts.size:
        raise UserError("the held-out split is empty", where="bigram baseline")
    probabilities = model.probability(keys // vocab_size, keys % vocab_size)
    return float(-(counts * np.log2(probabilities)).sum() / held_out.num_bytes)


def _chunks(split: AnySplit) -> Iterator[np.ndarray]:
    """Reads a split in pieces that overlap by one token, so that each pair of neighbours is in exactly one piece."""
    for start in range(0, split.num_tokens - 1, _CHUNK_TOKENS):
        yield split.read(start, min(start + _CHUNK_TOKENS + 1, split.num_tokens))


def count_pairs(chunks: Iterable[np.ndarray], vocab_size: int, never: int) -> tuple[np.ndarray, np.ndarray]:
    """Counts pairs of neighbouring tokens within documents.

    Args:
      chunks: 1-D integer arrays of tokens; pairs across two chunks are not counted.
      vocab_size: V, greater than every token.
      never: the token that begins a document and is therefore never predicted; -1: there is none.

    Returns:
      Sorted distinct keys `previous * V + next`, int64, and their counts, float64 (exact below 2**53).
    """
    keys: np.ndarray = np.zeros(0, np.int64)
    counts: np.ndarray = np.zeros(0)
    for chunk in chunks:
        tokens = np.asarray(chunk, np.int64)
        inside = tokens[1:] != never
        new_keys, new_counts = np.unique((tokens[:-1] * vocab_size + tokens[1:])[inside], return_counts=True)
        keys, place = np.unique(np.concatenate([keys, new_keys]), return_inverse=True)
        counts = np.bincount(place, np.concatenate([counts, new_counts]), minlength=keys.size)
    return keys, counts


@dataclass(frozen=True)
class KneserNeyBigram:
    """Bigrams by interpolated Kneser–Ney smoothing, backing off to unigrams and then to the uniform distribution.

    With c(v w) the count of a pair, N(v ·) the number of distinct successors of v, N(· w) of distinct predecessors of
    w and N(· ·) of distinct pairs:

        p(w | v) = max(c(v w) - d, 0) / c(v ·) + d N(v ·) / c(v ·) p(w)
        p(w)     = max(N(· w) - e, 0) / N(· ·) + e |{w: N(· w) > 0}| / N(· ·) / V

    and p(w | v) = p(w) for a v never seen. Both discounts are n1 / (n1 + 2 n2), where n1 and n2 are how many pairs
    (words) were seen once and twice, by c for d and by N(· w) for e. Sources: Kneser and Ney, "Improved backing-off
    for m-gram language modeling", 1995; discounts and interpolation as in Chen and Goodman, "An Empirical Study of
    Smoothing Techniques for Language Modeling", 1998, sections 2.6 and 2.7.

    Attributes:
      keys: sorted distinct pairs `v * V + w`, int64.
      discounted: max(c(v w) - d, 0) / c(v ·) by pair, float64.
      backoff_V: weight of the unigram after each v, float64 [V].
      unigram_V: p(w), float64 [V].
    """

    keys: np.ndarray
    discounted: np.ndarray
    backoff_V: np.ndarray
    unigram_V: np.ndarray

    @classmethod
    def fit(cls, keys: np.ndarray, counts: np.ndarray, vocab_size: int) -> KneserNeyBigram:
        """Estimates the model from `count_pairs`' result.

        Raises:
          UserError: there are no pairs.
        """
        if not keys.size:
            raise UserError("the training split is empty", where="bigram baseline")
        previous, following = keys // vocab_size, keys % vocab_size
        predecessors_V = np.bincount(following, minlength=vocab_size).astype(np.float64)
        discount = _discount(predecessors_V)
        unigram_V = np.maximum(predecessors_V - discount, 0) / keys.size
        unigram_V += discount * np.count_nonzero(predecessors_V) / keys.size / vocab_size

        discount = _discount(counts)
        totals_V = np.bincount(previous, counts, minlength=vocab_size)
        successors_V = np.bincount(previous, minlength=vocab_size)
        backoff_V = np.divide(discount * successors_V, totals_V, out=np.ones(vocab_size), where=totals_V > 0)
        return cls(keys, np.maximum(counts - discount, 0) / totals_V[previous], backoff_V, unigram_V)

    def probability(self, previous: np.ndarray, following: np.ndarray) -> np.ndarray:
        """p(following | previous), float64, elementwise for integer arrays of one shape."""
        keys = np.asarray(previous, np.int64) * self.unigram_V.size + following
        place = np.minimum(np.searchsorted(self.keys, keys), self.keys.size - 1)
        seen = np.where(self.keys[place] == keys, self.discounted[place], 0.0)
        return seen + self.backoff_V[previous] * self.unigram_V[following]


def _discount(counts: np.ndarray) -> float:
    """n1 / (n1 + 2 n2), kept inside (0, 1) so that every token keeps some probability."""
    once, twice = np.count_nonzero(counts == 1), np.count_nonzero(counts == 2)
    if not once or not twice:  # too few counts to estimate from
        return 0.5
    return once / (once + 2 * twice)
