"""The gated MLP as Pallas kernels for TPUs (Mosaic): one forward, two backward.

N tokens, D this layer's d_model, F this layer's d_ff; `bn` and `bf` are a tile's tokens and hidden columns.

A tile of tokens stays in VMEM while the weights stream past it, `bf` columns at a time; the hidden activations exist
for one tile only. The backward pass makes them again from x, unless the forward pass was asked to keep gate and up:

    forward         y = h @ w_down,  h = activation(gate) * up,  gate = x @ w_gate,  up = x @ w_up       6 N D F FLOPs
    backward_tokens d_x, and d_gate, d_up and h for the second kernel                            10 N D F, or 6 if kept
    backward_weights  d_w_gate = x.T @ d_gate, d_w_up = x.T @ d_up, d_w_down = h.T @ d_y                 6 N D F

Together that is what differentiating the plain products under full rematerialisation costs, with less written to HBM.
Any N, D and F: the last tile's part beyond the array is cut off inside the kernel, and nothing is padded in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tlm_jax.kernels.gated_mlp_tiles import Tiles
from tlm_jax.kernels.plain_mlp import Activation

Weights = tuple[jax.Array, jax.Array, jax.Array]  # w_gate [D, F], w_up [D, F], w_down [F, D]

ROWS = 256  # tokens whose hidden activations exist at one time within a tile: larger ones only lengthen the program
F32 = jnp.float32


def _dot(a: jax.Array, b: jax.Array, axis_a: int, axis_b: int, precision: jax.lax.Precision) -> jax.Array:
    dimensions = (((axis_a,), (axis_b,)), ((), ()))
    return jax.lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=F32)


def _precision(dtype: jnp.dtype, name: str | None) -> jax.lax.Precision:
    """Exact products for float32 where the caller asked for them; bfloat16 has one precision."""
    exact = dtype == F32 and name in ("float32", "highest")
    return jax.lax.Precision.HIGHEST if exact else jax.lax.Precision.DEFAULT


def _rows(tokens: int) -> int:
    return ROWS if tokens % ROWS == 0 else tokens


def _over_rows(tokens: int, body: Callable[[Any], None]) -> None:
    """Calls `body` with each slice of `_rows(tokens)` rows."""
    rows = _rows(tokens)

    def one(i: jax.Array, _: None) -> None:
        body(pl.ds(pl.multiple_of(i * rows, rows), rows))

    jax.lax.fori_loop(0, tokens // rows, one, None)


def _over_columns(d_ff: int, bf: int, axis: int, body: Callable[[int], None]) -> None:
    """Calls `body` with how many columns of this step's tile are in the array: a static number in every branch."""
    last = d_ff % bf
    if not last:
        body(bf)
        return
    is_last = pl.program_id(axis) == pl.num_programs(axis) - 1
    pl.when(jnp.logical_not(is_last))(lambda: body(bf))
    pl.when(is_last)(lambda: body(last))


def _forward_kernel(
    x_ref: Any, w_gate_ref: Any, w_up_ref: Any, w_down_ref: Any, *refs: Any,
    activation: Activation, precision: jax.lax.Precision, d_ff: int, keeps: bool,
) -> None:  # fmt: skip
    y_ref, *kept_refs, sum_ref = refs
    bn, bf = x_ref.shape[0], w_gate_ref.shape[1]
    j = pl.program_id(1)

    @pl.when(j == 0)
    def _() -> None:
        sum_ref[...] = jnp.zeros_like(sum_ref)

    def columns(count: int) -> None:
        def rows(slice_: Any) -> None:
            x = x_ref[slice_]
            gate = _dot(x, w_gate_ref[:, :count], 1, 0, precision)
            up = _dot(x, w_up_ref[:, :count], 1, 0, precision)
            if keeps:  # what is kept is what the activation sees: both passes have the same hidden activations
                gate, up = gate.astype(x.dtype), up.astype(x.dtype)
                kept_refs[0][slice_, :count], kept_refs[1][slice_, :count] = gate, up
            h = activation(gate.astype(F32)) * up.astype(F32)
            sum_ref[slice_] += _dot(h.astype(x.dtype), w_down_ref[:count], 1, 0, precision)

        _over_rows(bn, rows)

    _over_columns(d_ff, bf, 1, columns)

    @pl.when(j == pl.num_programs(1) - 1)
    def _() -> None:
        y_ref[...] = sum_ref[...].astype(y_ref.dtype)


def _backward_tokens_kernel(
    *refs: Any, activation: Activation, precision: jax.lax.Precision, d_ff: int, keeps: bool
) -> None:
    a_ref, b_ref, d_y_ref, w_gate_ref, w_up_ref, w_down_ref, d_x_ref, d_gate_ref, d_up_ref, h_ref, sum_ref = (
        refs if keeps else (refs[0], None, *refs[1:])
    )
    bn, bf = d_y_ref.shape[0], w_gate_ref.shape[1]
    j = pl.program_id(1)

    @pl.when(j == 0)
    def _() -> None:
        sum_ref[...] = jnp.zeros_like(sum_ref)

    def columns(count: int) -> None:
        def rows(slice_: Any) -> None:
            if keeps:
                gate, up = a_ref[slice_, :count].astype(F32), b_ref[slice_, :count].astype(F32)
            else:
                x = a_ref[slice_]
                gate = _dot(x, w_gate_ref[:, :count], 1, 0, precision)
                up = _dot(x, w_up_ref[:, :count], 1, 0, precision)
            h, pull_back = jax.vjp(lambda gate, up: activation(gate) * up, gate, up)
            d_gate, d_up = pull_back(_dot(d_y_ref[slice_], w_down_ref[:count], 1, 1, precision))
            dtype = d_y_ref.dtype
            d_gate, d_up = d_gate.astype(dtype), d_up.astype(dtype)
            d_gate_ref[slice_, :count], d_up_ref[slice_, :count] = d_gate, d_up
            h_ref[slice_, :count] = h.astype(dtype)
            d_x = _dot(d_gate, w_gate_ref[:, :count], 1, 1, precision)
            sum_ref[slice_] += d_x + _dot(d_up, w_up_ref[:, :count], 1, 1, precision)

        _over_rows(bn, rows)

    _over_columns(d_ff, bf, 1, columns)

    @pl.when(j == pl.num_programs(1) - 1)
    def _() -> None:
        d_x_ref[...] = sum_ref[...].astype(d_x_ref.dtype)


def _backward_weights_kernel(
    x_ref: Any, d_y_ref: Any, d_gate_ref: Any, d_up_ref: Any, h_ref: Any, *refs: Any,
    precision: jax.lax.Precision, tokens: int,
) -> None:  # fmt: skip
    outputs, sums = refs[:3], refs[3:]
    i = pl.program_id(1)

    @pl.when(i == 0)
    def _() -> None:
        for sum_ref in sums:
            sum_ref[...] = jnp.zeros_like(sum_ref)

    def rows(count: int) -> None:
        x_DN = x_ref[:count].T
        sums[0][...] += _dot(x_DN, d_gate_ref[:count], 1, 0, precision)
        sums[1][...] += _dot(x_DN, d_up_ref[:count], 1, 0, precision)
        sums[2][...] += _dot(h_ref[:count].T, d_y_ref[:count], 1, 0, precision)

    _over_columns(tokens, x_ref.shape[0], 1, rows)

    @pl.when(i == pl.num_programs(1) - 1)
    def _() -> None:
        for output, sum_ref in zip(outputs, sums, strict=True):
            output[...] = sum_ref[...].astype(output.dtype)


def _call(
    kernel: Any, name: str, flops: float, grid: tuple[int, int], vmem_bytes: int, interpret: Any, inputs: Sequence[Any],
    in_specs: Sequence[pl.BlockSpec], out_shapes: Sequence[Any], out_specs: Sequence[pl.BlockSpec],
    scratch: Sequence[tuple[int, int]],
) -> Sequence[jax.Array]:  # fmt: skip
    moved = sum(a.size * a.dtype.itemsize for a in (*inputs, *out_shapes))
    return pl.pallas_call(
        kernel,
        name=name,
        grid=grid,
        in_specs=list(in_specs),
        out_specs=list(out_specs),
        out_shape=list(out_shapes),
        scratch_shapes=[pltpu.VMEM(shape, F32) for shape in scratch],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=vmem_bytes
        ),
        cost_estimate=pl.CostEstimate(flops=int(flops), bytes_accessed=int(moved), transcendentals=0),
        interpret=interpret,
    )(*inputs)


class _Blocks:
    """The block of each kind of array for a grid of (token tiles, column tiles), or the reverse."""

    def __init__(self, bn: int, bf: int, d_model: int, *, tokens_first: bool) -> None:
        def spec(shape: tuple[int, int], place: Callable[[Any, Any], tuple[Any, Any]]) -> pl.BlockSpec:
            return pl.BlockSpec(shape, place if tokens_first else lambda j, i: place(i, j))

        self.tokens = spec((bn, d_model), lambda i, j: (i, 0))
        self.hidden = spec((bn, bf), lambda i, j: (i, j))
        self.into = spec((d_model, bf), lambda i, j: (0, j))
        self.out = spec((bf, d_model), lambda i, j: (j, 0))


def forward(
    x_ND: jax.Array, weights: Weights, activation: Activation, tiles: Tiles, *,
    keeps: bool, precision: str | None, interpret: Any,
) -> tuple[jax.Array, tuple[jax.Array, ...]]:  # fmt: skip
    """y [N, D], and gate and up [N, F] if they are to be kept; dtypes as x's."""
    (N, D), F, dtype = x_ND.shape, weights[0].shape[1], x_ND.dtype
    bn, bf = tiles.forward
    blocks = _Blocks(bn, bf, D, tokens_first=True)
    hidden = [jax.ShapeDtypeStruct((N, F), dtype)] * 2 if keeps else []
    kernel = partial(
        _forward_kernel, activation=activation, precision=_precision(dtype, precision), d_ff=F, keeps=keeps
    )
    y_ND, *kept = _call(
        kernel, "gated_mlp_forward", 6 * N * D * F, (pl.cdiv(N, bn), pl.cdiv(F, bf)), tiles.vmem_bytes, interpret,
        (x_ND, *weights), (blocks.tokens, blocks.into, blocks.into, blocks.out),
        (jax.ShapeDtypeStruct((N, D), dtype), *hidden), (blocks.tokens, *[blocks.hidden] * len(hidden)), ((bn, D),),
    )  # fmt: skip
    return y_ND, tuple(kept)


def backward(
    x_ND: jax.Array, kept: tuple[jax.Array, ...], d_y_ND: jax.Array, weights: Weights,
    activation: Activation, tiles: Tiles, *, precision: str | None, interpret: Any,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """d_x [N, D], d_w_gate and d_w_up [D, F], d_w_down [F, D]; `kept` is what `forward` kept, or empty."""
    (N, D), F, dtype = x_ND.shape, weights[0].shape[1], x_ND.dtype
    sums = _precision(dtype, precision)

    bn, bf = tiles.backward_tokens
    blocks = _Blocks(bn, bf, D, tokens_first=True)
    sources, source_blocks = (kept, [blocks.hidden] * 2) if kept else ((x_ND,), [blocks.tokens])
    kernel = partial(_backward_tokens_kernel, activation=activation, precision=sums, d_ff=F, keeps=bool(kept))
    d_x_ND, d_gate_NF, d_up_NF, h_NF = _call(
        kernel, "gated_mlp_backward_tokens", (6 if kept else 10) * N * D * F, (pl.cdiv(N, bn), pl.cdiv(F, bf)),
        tiles.vmem_bytes, interpret, (*sources, d_y_ND, *weights),
        (*source_blocks, blocks.tokens, blocks.into, blocks.into, blocks.out),
        (jax.ShapeDtypeStruct((N, D), dtype), *[jax.ShapeDtypeStruct((N, F), dtype)] * 3),
        (blocks.tokens, *[blocks.hidden] * 3), ((bn, D),),
    )  # fmt: skip

    bn, bf = tiles.backward_weights
    blocks = _Blocks(bn, bf, D, tokens_first=False)
    d_w_gate_DF, d_w_up_DF, d_w_down_FD = _call(
        partial(_backward_weights_kernel, precision=sums, tokens=N), "gated_mlp_backward_weights", 6 * N * D * F,
        (pl.cdiv(F, bf), pl.cdiv(N, bn)), tiles.vmem_bytes, interpret, (x_ND, d_y_ND, d_gate_NF, d_up_NF, h_NF),
        (blocks.tokens, blocks.tokens, *[blocks.hidden] * 3),
        [jax.ShapeDtypeStruct(w.shape, dtype) for w in weights],
        (blocks.into, blocks.into, blocks.out), ((D, bf), (D, bf), (bf, D)),
    )  # fmt: skip
    return d_x_ND, d_w_gate_DF, d_w_up_DF, d_w_down_FD
