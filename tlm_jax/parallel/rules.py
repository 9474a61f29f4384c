"""Where arrays live: logical axis names to mesh axes, in one table, and the pins on activations.

Widths vary by layer, so divisibility is decided per array: `tensor` takes the first axis of its list that divides;
`fsdp` the first of its list, in that order, among the axes that are left. What nothing divides is replicated, and
`replicated_bytes` counts it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tlm_jax.parallel.mesh import BATCH_AXES

TENSOR_AXES = ("vocabulary", "kv_heads", "heads", "mlp")
FSDP_AXES = ("embed", "mlp", "vocabulary", "heads", "kv_heads")


def parameter_spec(shape: tuple[int, ...], axes: tuple[str | None, ...], mesh_sizes: Mapping[str, int]) -> P:
    """The PartitionSpec of one parameter.

    Args:
      shape: its shape, leading layer axis of a stacked run included.
      axes: a logical name for each of its last `len(axes)` axes; a leading layer axis is never cut.
      mesh_sizes: size by mesh axis.
    """
    names: list[str | None] = [*[None] * (len(shape) - len(axes)), *axes]
    spec: list[str | None] = [None] * len(shape)
    for mesh_axis, order in (("tensor", TENSOR_AXES), ("fsdp", FSDP_AXES)):
        size = mesh_sizes.get(mesh_axis, 1)
        for name in order if size > 1 else ():
            i = names.index(name) if name in names else -1
            if i >= 0 and spec[i] is None and shape[i] % size == 0:
                spec[i] = mesh_axis
                break
    return P(*spec)


def parameter_shardings(abstract: Any, axes: Any, mesh: jax.sharding.Mesh) -> Any:
    """Shardings for a tree of parameters and the tree of their logical axes."""
    sizes = dict(mesh.shape)
    return jax.tree.map(
        lambda leaf, names: NamedSharding(mesh, parameter_spec(leaf.shape, names, sizes)),
        abstract,
        axes,
        is_leaf=lambda node: isinstance(node, jax.ShapeDtypeStruct),
    )


def replicated_bytes(abstract: Any, shardings: Any) -> int:
    """Bytes of the leaves that every device holds whole although an axis could have cut them."""
    pairs = zip(jax.tree.leaves(abstract), jax.tree.leaves(shardings), strict=True)
    return sum(
        math.prod(leaf.shape) * leaf.dtype.itemsize
        for leaf, sharding in pairs
        if sharding.is_fully_replicated and sharding.num_devices > 1
    )


def batch_sharding(mesh: jax.sharding.Mesh) -> NamedSharding:
    """The sharding of every array whose first axis is the batch."""
    return NamedSharding(mesh, P(BATCH_AXES))


def replicated(mesh: jax.sharding.Mesh) -> NamedSharding:
    """The sharding of what every device holds whole."""
    return NamedSharding(mesh, P())


def pin_batch(x: jax.Array) -> jax.Array:
    """Pins an activation's first axis to the batch axes of the mesh in context; without a mesh, returns it as it is.

    Without this pin the compiler may replicate activations under fsdp, at many times the cost.
    """
    if jax.sharding.get_abstract_mesh().empty:
        return x
    return jax.lax.with_sharding_constraint(x, P(BATCH_AXES, *[None] * (x.ndim - 1)))


def mlp_axes(batch: int, d_ff: int) -> tuple[tuple[str, ...], str | None, int]:
    """Which axes of the mesh in context cut an MLP that is written out by device.

    Returns:
      The axes that cut the batch where they divide it, else none; the axis that cuts d_ff, None where it does not
      divide; the number of pieces that d_ff is in.
    """
    sizes = jax.sharding.get_abstract_mesh().shape
    shards = math.prod(sizes.get(axis, 1) for axis in BATCH_AXES)
    tensor = sizes.get("tensor", 1)
    cut = tensor > 1 and d_ff % tensor == 0
    return (BATCH_AXES if shards > 1 and batch % shards == 0 else ()), ("tensor" if cut else None), tensor if cut else 1


def gather_whole(x: jax.Array) -> jax.Array:
    """Brings a sharded array whole to every device, as a table must be that batch-sharded indices look up."""
    if jax.sharding.get_abstract_mesh().empty:
        return x
    return jax.lax.with_sharding_constraint(x, P())


def first_rows(w: jax.Array, count: int) -> jax.Array:
    """The first rows of a weight, brought whole along them first: what is cut over devices would be shifted."""
    if count == w.shape[0]:
        return w
    if not jax.sharding.get_abstract_mesh().empty:
        w = jax.lax.with_sharding_constraint(w, P(None, *[P.UNCONSTRAINED] * (w.ndim - 1)))
    return w[:count]


def spread(x: jax.Array) -> jax.Array:
    """Cuts the first axis over all devices, padded with zeros to a multiple of their number; without a mesh, x."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return x
    x = jnp.pad(x, [(0, -x.shape[0] % mesh.size), *[(0, 0)] * (x.ndim - 1)])
    return jax.lax.with_sharding_constraint(x, P(mesh.axis_names))
