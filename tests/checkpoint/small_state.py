"""A small train state, sharded over the test's eight devices."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tlm_jax.checkpoint.manager import Metadata

METADATA = Metadata(
    config='{"name": "tëst"}',
    profile='{"layers": []}',
    tokenizer_kind="sentencepiece",
    tokenizer=bytes(range(256)),
    extra={"layer_stacking": [[0], [1, 2, 3]]},
)


def make_mesh(*shape: int) -> Mesh:
    devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    return Mesh(devices, ("data", "fsdp")[-len(shape) :])


def place(tree: Any, mesh: Mesh) -> Any:
    """Shards the last axis of every matrix over fsdp and replicates the rest."""
    return jax.tree.map(lambda x: jax.device_put(x, sharding_of(x, mesh)), tree)


def sharding_of(leaf: Any, mesh: Mesh) -> NamedSharding:
    spec = [None] * (leaf.ndim - 1) + ["fsdp"] if leaf.ndim > 1 else []
    return NamedSharding(mesh, PartitionSpec(*spec))


def abstract(tree: Any, mesh: Mesh | None = None) -> Any:
    def leaf(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=None if mesh is None else sharding_of(x, mesh))

    return jax.tree.map(leaf, tree)


def in_bfloat16(tree: Any) -> Any:
    """The tree with every leaf cast."""
    return jax.tree.map(lambda x: x.astype(jax.numpy.bfloat16), tree)


def make_params(seed: int = 0) -> dict[str, Any]:
    """One layer alone and a run of three, as NumPy arrays."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    return {
        "embedding": normal(32, 16),
        "layers_0": {"attention": {"wq": normal(16, 16)}, "mlp": {"wi": normal(16, 24)}, "norm": normal(16)},
        "run_1": {"attention": {"wq": normal(3, 16, 16)}, "mlp": {"wi": normal(3, 16, 8)}, "norm": normal(3, 16)},
    }


def make_state(mesh: Mesh, seed: int = 0) -> dict[str, Any]:
    params = make_params(seed)
    state = {
        "params": params,
        "optimizer": {"mu": make_params(seed + 1), "nu": make_params(seed + 2), "count": np.int32(16_777_217)},
        "step": np.int32(seed),
        "key": jax.random.key_data(jax.random.key(seed)),
    }
    return place(jax.tree.map(jnp.asarray, state), mesh)


def assert_equal(left: Any, right: Any) -> None:
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
