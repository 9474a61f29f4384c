"""One number for each array, by which a restored array is known to be the saved one.

TensorStore checks its indices but not the array data, so a changed bit there would come back as a wrong number. The
checksum is computed where the array lies, in one pass, and does not depend on how it is sharded.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}  # by bytes; 8 become two of 4


@jax.jit
def _checksum(x: jax.Array) -> jax.Array:
    """Sum over elements of bits * (2 * position + 1), modulo 2**32: odd factors, so no single change cancels out.

    Args:
      x: an array of any shape and dtype.

    Returns:
      uint32 scalar.
    """
    bits = x if x.dtype == jnp.bool_ else jax.lax.bitcast_convert_type(x, _UNSIGNED[x.dtype.itemsize])
    factor, stride = jnp.ones(bits.shape, jnp.uint32), 1
    for axis in reversed(range(bits.ndim)):
        factor += np.uint32(2 * stride % 2**32) * jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis)
        stride *= bits.shape[axis]
    return jnp.sum(bits.astype(jnp.uint32) * factor, dtype=jnp.uint32)


def checksums(leaves: dict[str, Any]) -> dict[str, int]:
    """The checksum of each array, on the host; waits for the arrays.

    One after the other: many programs with a collective each, begun at once, can block each other on CPUs.

    Args:
      leaves: arrays by name.
    """
    return {name: int(_checksum(x)) for name, x in leaves.items()}
