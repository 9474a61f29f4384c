"""Muon: momentum, and each hidden matrix of each layer brought near to the nearest orthogonal one.

N matrices of one shape, M their shorter side, L again M, K their longer side.

optax's Muon iterates leaf by leaf. Here all matrices of one shape, of any layer and kind, are one batch: that is faster
(about 0.6 of the time on two CPU cores for matrices of 256 × 256 to 256 × 960), compiles once per shape, and can be cut
over devices: what is sharded is gathered once, each device iterates on its share of the matrices alone, and the results
are gathered once. While that lasts, all matrices of a shape lie whole on each device, in the dtype of the iterations.
"""

from __future__ import annotations

import math
from collections import defaultdict
from contextlib import nullcontext
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from ml_collections import ConfigDict

from tlm_jax.parallel.devices import all_devices
from tlm_jax.parallel.rules import gather_whole, spread
from tlm_jax.train.per_layer import as_matrices

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic that Jordan et al. 2024 iterate
ITERATIONS = 5
# Root mean square of an update before the learning rate, as AdamW's (Liu et al. 2025, arXiv 2502.16982).
UPDATE_RMS = 0.2

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


class MomentumState(NamedTuple):
    """int32 steps taken, and the momentum, a tree like the parameters'."""

    steps: jax.Array
    mu: Any


def nesterov_momentum(decay: float) -> optax.GradientTransformation:
    """The direction that Muon orthogonalises: a moving average of gradients, one step ahead, both unbiased."""

    def init(parameters: Any) -> MomentumState:
        return MomentumState(jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, parameters))

    def update(updates: Any, state: MomentumState, parameters: Any = None) -> tuple[Any, MomentumState]:
        del parameters
        steps = optax.safe_increment(state.steps)
        mu = jax.tree.map(lambda m, g: decay * m + (1 - decay) * g, state.mu, updates)
        ahead, here = decay / (1 - decay ** (steps + 1.0)), (1 - decay) / (1 - decay ** (steps + 0.0))
        return jax.tree.map(lambda m, g: ahead * m + here * g, mu, updates), MomentumState(steps, mu)

    return optax.GradientTransformation(init, update)


def newton_schulz(x_NMK: jax.Array) -> jax.Array:
    """Brings the singular values of each matrix near 1, in the dtype given; a matrix of zeros stays one.

    M is at most K, so that the Gram matrix is the small one.
    """
    a, b, c = COEFFICIENTS

    def iterate(_: int, x_NMK: jax.Array) -> jax.Array:
        gram_NML = jnp.einsum("NMK,NLK->NML", x_NMK, x_NMK)
        return a * x_NMK + (b * gram_NML + c * (gram_NML @ gram_NML)) @ x_NMK

    exact = jax.default_matmul_precision("float32") if x_NMK.dtype == jnp.float32 else nullcontext()
    with exact, jax.named_scope("newton_schulz"):
        norm_N11 = jnp.linalg.norm(x_NMK.astype(jnp.float32), axis=(1, 2), keepdims=True)
        x_NMK = (x_NMK / (norm_N11 + 1e-8)).astype(x_NMK.dtype)
        return jax.lax.fori_loop(0, ITERATIONS, iterate, x_NMK)


def orthogonalise(updates: Any, dtype: jax.typing.DTypeLike) -> Any:
    """Each hidden matrix of a tree of nothing else made orthogonal, its entries of root mean square `UPDATE_RMS`.

    The entries of an orthogonal matrix have root mean square 1 / sqrt(K).
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(updates)
    batches: dict[tuple[int, ...], list[jax.Array]] = defaultdict(list)
    places: list[tuple[tuple[int, ...], bool, slice]] = []  # of each leaf: its batch, whether transposed, where in it
    for path, leaf in leaves:
        matrices = as_matrices(path, gather_whole(leaf.astype(dtype)))
        matrices = matrices.reshape(-1, *matrices.shape[-2:])
        transposed = matrices.shape[1] > matrices.shape[2]
        matrices = matrices.swapaxes(1, 2) if transposed else matrices
        batch = batches[matrices.shape[1:]]
        start = sum(len(earlier) for earlier in batch)
        batch.append(matrices)
        places.append((matrices.shape[1:], transposed, slice(start, start + len(matrices))))
    done = {
        shape: gather_whole(newton_schulz(spread(gather_whole(jnp.concatenate(batch)))))
        for shape, batch in batches.items()
    }
    found = []
    for (_, leaf), (shape, transposed, where) in zip(leaves, places, strict=True):
        matrices = done[shape][where].astype(jnp.float32) * (UPDATE_RMS * math.sqrt(shape[1]))
        found.append((matrices.swapaxes(1, 2) if transposed else matrices).reshape(leaf.shape))
    return jax.tree.unflatten(structure, found)


def muon(train: ConfigDict) -> optax.GradientTransformation:
    """Muon (Jordan et al. 2024) for hidden matrices, without learning rate and decay, from `config.train`."""
    chosen = train.muon_dtype
    if chosen == "auto":
        chosen = "float32" if all_devices()[0].platform == "cpu" else "bfloat16"
    return optax.chain(
        nesterov_momentum(train.muon_momentum),
        optax.stateless(lambda updates, _: orthogonalise(updates, DTYPES[chosen])),
    )
