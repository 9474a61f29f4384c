"""The device mesh: one set of named axes, sized from the config."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import jax
from jax.sharding import AxisType, Mesh

from tlm_jax.counts import counted
from tlm_jax.errors import UserError
from tlm_jax.parallel.devices import all_devices

# `data` holds replicas, `fsdp` shards weights and batch, `expert` experts, `tensor` heads, MLP widths and vocabulary.
AXES = ("data", "fsdp", "expert", "tensor")
BATCH_AXES = ("data", "fsdp")


def mesh_shape(sizes: Mapping[str, int], num_devices: int) -> dict[str, int]:
    """Fills in the axis given as -1 so that the product is `num_devices`.

    Raises:
      UserError: more than one -1, a size below 1, or a product that is not the number of devices.
    """
    shape = {axis: int(sizes[axis]) for axis in AXES}
    inferred = [axis for axis, size in shape.items() if size == -1]
    wrong = [axis for axis, size in shape.items() if size < 1 and size != -1]
    if wrong or len(inferred) > 1:
        raise UserError(
            f"mesh axis sizes are {shape}",
            where="config.mesh",
            mend="sizes are at least 1, and at most one of them is -1",
        )
    product = math.prod(size for size in shape.values() if size != -1)
    if (inferred and num_devices % product) or (not inferred and product != num_devices):
        raise UserError(
            f"axes {shape} do not fill {counted(num_devices, 'device')}",
            where="config.mesh",
            mend=f"the product of the sizes must {'divide' if inferred else 'be'} {num_devices}",
        )
    if inferred:
        shape[inferred[0]] = num_devices // product
    return shape


def make_mesh(sizes: Mapping[str, int], devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Builds the mesh over `devices` (default: all), axis types Auto.

    Raises:
      UserError: as `mesh_shape`.
    """
    devices = all_devices() if devices is None else devices
    shape = mesh_shape(sizes, len(devices))
    return jax.make_mesh(tuple(shape.values()), AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices)


def batch_shards() -> int:
    """Number of pieces the batch axis is cut into on the mesh in context; 1 without a mesh."""
    shape = jax.sharding.get_abstract_mesh().shape
    return math.prod(shape.get(axis, 1) for axis in BATCH_AXES)
