"""Which tokens can be drawn, how often, and that a row's draw is its own."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tlm_jax.errors import UserError
from tlm_jax.evaluate.sampling import Sampling, sample

PROBABILITIES = np.array([0.1, 0.4, 0.05, 0.3, 0.15])  # by likelihood: 1, 3, 4, 0, 2
LOGITS_V = np.log(PROBABILITIES).astype(np.float32)
DRAWS = 4000


def frequencies(sampling: Sampling, logits_V: np.ndarray = LOGITS_V) -> np.ndarray:
    logits_BV = jnp.broadcast_to(jnp.asarray(logits_V), (DRAWS, logits_V.size))
    tokens_B = sample(logits_BV, jax.random.split(jax.random.key(0), DRAWS), sampling)
    assert tokens_B.dtype == jnp.int32
    return np.bincount(tokens_B, minlength=logits_V.size) / DRAWS


def normalised(kept: list[int], probabilities: np.ndarray = PROBABILITIES) -> np.ndarray:
    expected = np.zeros_like(probabilities)
    expected[kept] = probabilities[kept]
    return expected / expected.sum()


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(), PROBABILITIES),
        (Sampling(temperature=0.5), normalised([0, 1, 2, 3, 4], PROBABILITIES**2)),
        (Sampling(top_k=2), normalised([1, 3])),
        (Sampling(top_k=1), normalised([1])),
        (Sampling(top_k=100), PROBABILITIES),
        (Sampling(top_p=0.65), normalised([1, 3])),
        (Sampling(top_p=0.75), normalised([1, 3, 4])),  # the token that crosses p stays
        (Sampling(top_p=0.01), normalised([1])),
        # Among 1, 3 and 4 the first two have 0.82: top-p acts on what top-k left.
        (Sampling(top_k=3, top_p=0.8), normalised([1, 3])),
        # Temperature comes first: squared probabilities of 1 and 3 sum to 0.83.
        (Sampling(temperature=0.5, top_p=0.8), normalised([1, 3], PROBABILITIES**2)),
    ],
)
def test_frequencies(sampling, expected):
    drawn = frequencies(sampling)
    assert (drawn[expected == 0] == 0).all()
    np.testing.assert_allclose(drawn, expected, atol=4 * np.sqrt(0.25 / DRAWS))


def test_temperature_zero_is_argmax_whatever_the_keys():
    logits_BV = jax.random.normal(jax.random.key(1), (16, 50))
    tokens_B = sample(logits_BV, jax.random.split(jax.random.key(2), 16), Sampling(0, top_k=3, top_p=0.5))
    np.testing.assert_array_equal(tokens_B, np.argmax(logits_BV, -1))


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(top_p=0.99), Sampling(top_k=4)])
def test_tokens_at_minus_infinity_are_never_drawn(sampling):
    assert frequencies(sampling, np.where([1, 0, 1, 0, 1], LOGITS_V, -np.inf))[[1, 3]].sum() == 0


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.7, 10, 0.9)])
def test_a_rows_draw_depends_on_its_logits_and_key_alone(sampling):
    logits_BV, keys_B = jax.random.normal(jax.random.key(3), (8, 50)), jax.random.split(jax.random.key(4), 8)
    together = sample(logits_BV, keys_B, sampling)
    alone = [sample(logits_BV[i : i + 1], keys_B[i : i + 1], sampling)[0] for i in range(8)]
    np.testing.assert_array_equal(together, alone)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_k": -1}, "top-k"),
        ({"top_p": 0.0}, "top-p"),
        ({"top_p": 1.5}, "top-p"),
        ({"top_p": float("nan")}, "top-p"),
    ],
)
def test_values_out_of_range_are_named(values, named):
    with pytest.raises(UserError, match=f"^{named}: must be"):
        Sampling(**values)


def test_all_values_out_of_range_are_told_together():
    with pytest.raises(UserError, match="3 problems"):
        Sampling(-1.0, -1, 2.0)
