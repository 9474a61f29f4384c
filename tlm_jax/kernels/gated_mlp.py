"""The gated MLP: one operation, and the choice of what computes it.

N tokens, D this layer's d_model, F this layer's d_ff; B batch, T time.

On a mesh the kernel runs inside `jax.shard_map`: tokens are cut over the axes that cut the batch, d_ff over the one
that cuts the MLP, whose partial sums are added up; the weights are whole along d_model, as a layer's are once gathered.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from tlm_jax.kernels import gated_mlp_tpu
from tlm_jax.kernels.gated_mlp_tiles import Tiles, choose
from tlm_jax.kernels.plain_mlp import GATE, UP, Activation, plain_gated_mlp

IMPLEMENTATIONS = ("plain", "pallas_tpu")
KERNEL_TOKENS = 256  # with fewer on a device, as in decoding, the weights' way through HBM is all there is to it


@dataclass(frozen=True)
class Placement:
    """The mesh axes that cut an MLP: those of its tokens, and that of d_ff (None: none does)."""

    tokens: tuple[str, ...] = ()
    d_ff: str | None = None


def implementation_for(platform: str, requested: str, tokens: int, d_model: int, d_ff: int, itemsize: int) -> str:
    """What computes a gated MLP: a name of `IMPLEMENTATIONS`.

    Args:
      platform: cpu | gpu | tpu.
      requested: auto, or such a name.
      tokens: N, on one device, as d_ff is.
      d_model: D.
      d_ff: F.
      itemsize: bytes of an element.

    By itself a TPU takes its kernel wherever a tile fits and there are tokens enough, all other platforms the plain
    products.
    """
    if requested != "auto":
        return requested
    serves = platform == "tpu" and tokens >= KERNEL_TOKENS and choose(tokens, d_model, d_ff, itemsize)
    return "pallas_tpu" if serves else "plain"


@dataclass(frozen=True)
class _Call:
    """What is static of one call of the kernels."""

    activation: Activation
    tiles: Tiles
    placement: Placement
    keeps: bool
    precision: str | None
    interpret: Any

    def sharded(self, function: Any, in_specs: Any, out_specs: Any) -> Any:
        """`function` of the local arrays, on the mesh in context; itself where there is no mesh."""
        if jax.sharding.get_abstract_mesh().empty:
            return function
        return jax.shard_map(function, in_specs=in_specs, out_specs=out_specs, check_vma=False)

    @property
    def tokens_spec(self) -> P:
        return P(self.placement.tokens or None, None)

    @property
    def hidden_spec(self) -> P:
        return P(self.placement.tokens or None, self.placement.d_ff)

    @property
    def weight_specs(self) -> tuple[P, P, P]:
        into = P(None, self.placement.d_ff)
        return into, into, P(self.placement.d_ff, None)

    def summed(self, x: jax.Array, axes: str | tuple[str, ...] | None) -> jax.Array:
        """The sum over mesh axes, inside `sharded`."""
        return x if not axes or jax.sharding.get_abstract_mesh().empty else jax.lax.psum(x, axes)


def gated_mlp(
    x_BTD: jax.Array,
    w_gate_DF: jax.Array,
    w_up_DF: jax.Array,
    w_down_FD: jax.Array,
    activation: Activation = jax.nn.silu,
    *,
    implementation: str = "plain",
    keeps: bool = False,
    placement: Placement | None = None,
    tiles: Tiles | None = None,
    interpret: Any = False,
) -> jax.Array:
    """`(activation(x @ w_gate) * (x @ w_up)) @ w_down`, SwiGLU by default (Shazeer 2020, arXiv 2002.05202).

    Args:
      x_BTD: [B, T, D], or tokens alone, [N, D]; bfloat16 or float32, as the weights.
      w_gate_DF: [D, F]; any D and F, as any number of tokens.
      w_up_DF: [D, F].
      w_down_FD: [F, D].
      activation: elementwise; silu, gelu (tanh) and relu make SwiGLU, GeGLU and ReGLU.
      implementation: `plain` is XLA's products, accumulated as the backend does for the dtype; `pallas_tpu` the kernels
        of `gated_mlp_tpu`, accumulated in float32.
      keeps: of the kernels: the backward pass has gate and up from the forward pass, named for `jax.checkpoint` as the
        plain products are, instead of making them again from x; without it only x and the weights are kept.
      placement: of the kernels on a mesh; None: nothing is cut.
      tiles: of the kernels; None: `gated_mlp_tiles.choose`.
      interpret: of the kernels: run without a TPU, as in `pallas_call`.

    Returns:
      [B, T, D], x's dtype.

    Raises:
      ValueError: no such implementation, or no tile fits.
    """
    if implementation == "plain":
        return plain_gated_mlp(x_BTD, w_gate_DF, w_up_DF, w_down_FD, activation)
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"no gated MLP is called {implementation!r}: {', '.join(IMPLEMENTATIONS)}")
    placement = placement or Placement()
    D, F = w_gate_DF.shape
    x_ND = x_BTD.reshape(-1, D)
    sizes = jax.sharding.get_abstract_mesh().shape
    N = x_ND.shape[0] // math.prod(sizes[axis] for axis in placement.tokens)
    tiles = tiles or choose(N, D, F // sizes.get(placement.d_ff, 1), x_ND.dtype.itemsize)
    if tiles is None:
        raise ValueError(f"no tile of d_model {D} and d_ff {F} fits into the kernel's memory")
    precision = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    call = _Call(activation, tiles, placement, keeps, precision, interpret)
    return _kernel(call, x_ND, w_gate_DF, w_up_DF, w_down_FD).reshape(x_BTD.shape)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _kernel(call: _Call, x_ND: jax.Array, w_gate_DF: jax.Array, w_up_DF: jax.Array, w_down_FD: jax.Array) -> jax.Array:
    return _forward(call, False, x_ND, w_gate_DF, w_up_DF, w_down_FD)[0]


def _forward(call: _Call, keeps: bool, *arrays: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    def local(x_ND: jax.Array, *weights: Any) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        y_ND, kept = gated_mlp_tpu.forward(
            x_ND, weights, call.activation, call.tiles, keeps=keeps, precision=call.precision, interpret=call.interpret
        )
        return call.summed(y_ND, call.placement.d_ff), kept

    kept_specs = (call.hidden_spec,) * 2 if keeps else ()
    return call.sharded(local, (call.tokens_spec, *call.weight_specs), (call.tokens_spec, kept_specs))(*arrays)


def _kernel_forward(
    call: _Call, x_ND: jax.Array, w_gate_DF: jax.Array, w_up_DF: jax.Array, w_down_FD: jax.Array
) -> tuple[jax.Array, Any]:
    weights = (w_gate_DF, w_up_DF, w_down_FD)
    y_ND, kept = _forward(call, call.keeps, x_ND, *weights)
    kept = tuple(checkpoint_name(a, name) for a, name in zip(kept, (GATE, UP), strict=False))
    return y_ND, (x_ND, kept, weights)


def _kernel_backward(call: _Call, residuals: Any, d_y_ND: jax.Array) -> tuple[jax.Array, ...]:
    x_ND, kept, weights = residuals

    def local(x_ND: jax.Array, kept: tuple[jax.Array, ...], d_y_ND: jax.Array, *weights: Any) -> tuple[jax.Array, ...]:
        d_x_ND, *d_weights = gated_mlp_tpu.backward(
            x_ND, kept, d_y_ND, weights, call.activation, call.tiles,
            precision=call.precision, interpret=call.interpret,
        )  # fmt: skip
        d_weights = [call.summed(d, call.placement.tokens) for d in d_weights]
        return call.summed(d_x_ND, call.placement.d_ff), *d_weights

    kept_specs = (call.hidden_spec,) * len(kept)
    in_specs = (call.tokens_spec, kept_specs, call.tokens_spec, *call.weight_specs)
    out_specs = (call.tokens_spec, *call.weight_specs)
    return call.sharded(local, in_specs, out_specs)(x_ND, kept, d_y_ND, *weights)


_kernel.defvjp(_kernel_forward, _kernel_backward)
