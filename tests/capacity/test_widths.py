"""Shapes of the residual stream's width, and which coordinates are out of reach: drawn by hand."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tlm_jax.capacity.widths import RESIZES, SHAPES, WidthShape, narrowness, out_of_reach, turning_layer
from tlm_jax.errors import UserError


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ("x", [0, 0.5, 1, 0.75, 0.5, 0.25, 0]),
        ("diamond", [1, 0.5, 0, 0.25, 0.5, 0.75, 1]),
        ("v", [1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6, 0]),
        ("lambda", [0, 1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6, 1]),
    ],
)
def test_narrowness_of_seven_layers_that_turn_at_the_third(shape, expected):
    assert narrowness(shape, (1,) * 7, 3) == pytest.approx(expected)


def test_progressions_between_a_narrowest_of_8_and_a_widest_of_128():
    near = narrowness("x", (1,) * 7, 3)
    assert WidthShape((1,) * 7, near, 8, "geometric").widths(128) == pytest.approx([128, 32, 8, 16, 32, 64, 128])
    assert WidthShape((1,) * 7, near, 8, "arithmetic").widths(128) == pytest.approx([128, 68, 8, 38, 68, 98, 128])


def test_runs_turn_where_the_turning_layer_is():
    assert narrowness("x", (3, 2, 2, 2, 3), 8) == pytest.approx([0, 1 / 3, 2 / 3, 1, 0])
    assert narrowness("x", (3, 2, 2, 2, 3), 7) == pytest.approx([0, 0.5, 1, 0.5, 0])
    with pytest.raises(UserError, match="of 3 runs the last has the turning layer 11; take more"):
        narrowness("x", (4, 4, 4), 11)


def test_turning_layers():
    assert [turning_layer(depth, 0.75) for depth in (16, 24, 32, 40)] == [12, 18, 24, 30]
    assert turning_layer(6, 0.75) == 4  # 4.5: the earlier
    assert turning_layer(3, 0.75) == 2
    for depth, share in ((16, 0.01), (16, 0.99), (16, float("nan")), (16, 1e308), (2, 0.5), (3, 0.5)):
        with pytest.raises(UserError, match=r"^config.profile.bottleneck_depth: .*not one between"):
            turning_layer(depth, share)


@pytest.mark.parametrize(
    ("widths", "d_embedding", "fresh", "unread"),
    [
        ([6, 6, 6], 6, [0, 0, 0], [0, 0, 0]),
        ([10, 4, 10], 6, [4, 0, 0], [0, 0, 4]),  # ×: the first layer reads zeros, and of the last only 6 are read
        ([4, 10, 4], 6, [0, 4, 0], [0, 4, 0]),  # diamond: nobody reads what the widest adds beyond the embedding
        ([4, 8, 10], 6, [0, 2, 2], [0, 0, 4]),  # V
        ([10, 8, 4], 6, [4, 0, 0], [2, 2, 0]),  # Λ
        ([4, 4], 6, [0, 0], [0, 0]),  # narrower than the embedding: the rest of it passes by
        ([9], 6, [3], [3]),
    ],
)
def test_out_of_reach(widths, d_embedding, fresh, unread):
    assert [found.tolist() for found in out_of_reach(widths, d_embedding)] == [fresh, unread]


def test_out_of_reach_of_other_ways_to_change_the_width():
    widths, d = [10, 4, 8, 9], 6
    found = {resize: [part.tolist() for part in out_of_reach(widths, d, resize)] for resize in RESIZES}
    assert found == {
        "carry_forward": [[4, 0, 0, 0], [1, 0, 0, 3]],
        "zero_padding": [[4, 0, 4, 1], [6, 0, 0, 3]],
        "projection": [[0, 0, 0, 0], [0, 0, 0, 3]],
    }


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=8), st.integers(1, 12))
def test_out_of_reach_is_what_a_stream_of_coordinates_shows(widths, d_embedding):
    """Coordinate by coordinate: which are still zero when a layer reads, which no later reader touches."""
    written, zeros = set(range(d_embedding)), []
    for width in widths:
        zeros.append(len(set(range(width)) - written))
        written |= set(range(width))
    unread = []
    for index, width in enumerate(widths):
        readers = [*widths[index + 1 :], d_embedding]
        unread.append(len({c for c in range(width) if all(c >= reader for reader in readers)}))
    assert [found.tolist() for found in out_of_reach(widths, d_embedding)] == [zeros, unread]


@pytest.mark.parametrize("name", SHAPES)
def test_order_is_that_of_the_shape(name):
    shape = WidthShape((1,) * 9, narrowness(name, (1,) * 9, 6), 32, "geometric")
    widths = np.rint(shape.widths(512)).astype(int).tolist()
    for other in (1, 3):
        step = widths[other] - widths[2]
        assert shape.keeps_order(widths, [2], step)  # as wide is in order
        assert not shape.keeps_order(widths, [2], step + (1 if step > 0 else -1))
    assert shape.keeps_order(widths, list(range(9)), 1000)
