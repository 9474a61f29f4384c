from __future__ import annotations

from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tlm_jax.data.interleaving import Interleaving
from tlm_jax.errors import UserError

_weights = st.lists(st.integers(1, 60), min_size=1, max_size=7)


@settings(max_examples=150, deadline=None)
@given(weights=_weights)
def test_every_prefix_is_within_one_of_its_share(weights: list[int]) -> None:
    turns = Interleaving(weights)
    total, seen = sum(weights), Counter[int]()
    for n in range(2 * total + 1):
        assert turns.counts(n) == [seen[c] for c in range(len(weights))]
        for c, weight in enumerate(weights):
            assert abs(seen[c] - Fraction(n * weight, total)) < 1
        source, place = turns.locate(n)
        assert place == seen[source], "each source's items in its own order, none left out"
        seen[source] += 1


@settings(max_examples=50, deadline=None)
@given(weights=_weights, far=st.integers(10**9, 10**15))
def test_far_places_are_as_exact_as_near_ones(weights: list[int], far: int) -> None:
    turns = Interleaving(weights)
    counts = turns.counts(far)
    assert sum(counts) == far
    for c, weight in enumerate(weights):
        assert abs(counts[c] - Fraction(far * weight, sum(weights))) < 1
    source, place = turns.locate(far)
    assert place == counts[source]


def test_the_order_is_pinned() -> None:
    """Saved positions mean nothing if it changes. Worked out by hand from the definition."""
    turns = Interleaving([0.5, 0.3, 0.2])
    assert [turns.locate(n)[0] for n in range(10)] == [0, 1, 0, 2, 0, 1, 0, 1, 0, 2]
    assert turns.shares == [Fraction(1, 2), Fraction(3, 10), Fraction(1, 5)]


def test_only_ratios_count_and_decimals_are_exact() -> None:
    assert Interleaving([0.7, 0.2, 0.1]).shares == Interleaving([7, 2, 1]).shares
    assert Interleaving([0.1, 0.2]).shares == [Fraction(1, 3), Fraction(2, 3)]
    long = Interleaving([0.00001, 0.99999])
    assert long.counts(10**5) == [1, 99_999]


@pytest.mark.parametrize("weight", [0, -1, float("nan"), float("inf"), True, "2", None])
def test_weights_that_are_none(weight: object) -> None:
    with pytest.raises(UserError, match="a weight must be a positive number, not"):
        Interleaving([1, weight])  # type: ignore[list-item]


def test_ratios_that_never_come_round() -> None:
    with pytest.raises(
        UserError, match=r"the weights 1, 0.33333333 repeat only after .* windows, more than 100,000; use"
    ):
        Interleaving([1, 0.33333333])
