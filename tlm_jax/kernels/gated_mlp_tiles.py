"""Tile sizes of the TPU kernels, by a static model of VMEM and of HBM bandwidth.

N tokens, D d_model, F d_ff; `bn` tokens and `bf` hidden columns a tile. A kernel holds `bn` tokens of D columns (and,
in `backward_weights`, `bf` columns of the weights' gradients) while the rest streams past. Larger tiles read the
streamed arrays fewer times, until VMEM is full.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

# By TPU generation: VMEM of a core (jax's own
# pltpu.get_tpu_info). v4's is too small for many shapes.
VMEM_BYTES = {"v4": 16 << 20, "v5e": 128 << 20, "v5p": 64 << 20, "v6e": 128 << 20, "tpu7x": 64 << 20}
DEVICE_KINDS = {
    "TPU v4": "v4", "TPU v5 lite": "v5e", "TPU v5e": "v5e", "TPU v5": "v5p", "TPU v5p": "v5p",
    "TPU v6 lite": "v6e", "TPU v6e": "v6e", "TPU7x": "tpu7x",
}  # fmt: skip
# The model is of v6e, the most demanding: tiles that serve it serve the others.
BALANCE = 560  # FLOPs in the time of a byte: 918e12 / 1.64e12
SUM_FLOPS = 333  # FLOPs in the time that adding to one float32 of a sum takes, by the static schedules of several tiles
MATRIX_UNIT = 256  # columns, of which a product with fewer takes as long

TOKENS = (2048, 1024, 512, 256, 128)
COLUMNS = (1024, 768, 512, 256)  # larger ones gain little, and take minutes to compile


@dataclass(frozen=True)
class Tiles:
    """(bn, bf) of each kernel, and the VMEM that the compiler may use for one.

    A size is the whole axis, or a multiple of 256 columns and of 128 tokens.
    """

    forward: tuple[int, int]
    backward_tokens: tuple[int, int]
    backward_weights: tuple[int, int]
    vmem_bytes: int


def _forward_vmem(bn: int, bf: int, D: int, size: int) -> int:
    """x and y twice each for the pipeline, their float32 sum, three weights twice, hidden activations of some rows."""
    return bn * D * (4 * size + 4) + 6 * D * bf * size + 4 * bn * bf * size + 4 * min(bn, 256) * bf * 4


def _backward_tokens_vmem(bn: int, bf: int, D: int, size: int) -> int:
    hidden = 2 * 3 * bn * bf * size + 8 * min(bn, 256) * bf * 4
    return bn * D * (6 * size + 4) + 6 * D * bf * size + hidden


def _backward_weights_vmem(bn: int, bf: int, D: int, size: int) -> int:
    """Sums and outputs of three weights, tokens twice each, and the transposed ones."""
    return 3 * D * bf * (4 + 2 * size) + bn * D * 5 * size + 7 * bn * bf * size


def _best(
    N: int, D: int, F: int, size: int, budget: int, products: int,
    vmem: Callable[[int, int, int, int], int], moved: Callable[[int, int], float], sums: Callable[[int, int], float],
) -> tuple[int, int] | None:  # fmt: skip
    """The tile of least time among those that fit: the longer of computing and moving, and a quarter of moving.

    The quarter stands for what moving takes from computing (the start and end of a tile, the memory's other users).
    """
    tokens = [*[bn for bn in TOKENS if bn < N], *([N] if N <= 512 or N in TOKENS else [])]
    columns = [*[bf for bf in COLUMNS if bf < F], *([F] if max(COLUMNS) >= F else [])]
    computed = products * N * D * math.ceil(F / MATRIX_UNIT) * MATRIX_UNIT

    def time(tile: tuple[int, int]) -> float:
        moving = BALANCE * size * moved(*tile)
        return max(computed + SUM_FLOPS * sums(*tile), moving) + moving / 4

    fitting = [(bn, bf) for bn in tokens for bf in columns if vmem(bn, bf, D, size) <= budget]
    return min(fitting, key=time, default=None)


@lru_cache(maxsize=1024)
def choose(tokens: int, d_model: int, d_ff: int, itemsize: int, generation: str | None = None) -> Tiles | None:
    """The tiles of the three kernels for a shape; None: no tile fits, as of a very wide layer on v4.

    Args:
      tokens: N, on one device.
      d_model: D.
      d_ff: F, on one device.
      itemsize: bytes of an element: 2 or 4.
      generation: a key of `VMEM_BYTES`; None: tiles that fit all of them but v4.
    """
    N, D, F = tokens, d_model, d_ff
    capacity = VMEM_BYTES[generation] if generation else min(v for k, v in VMEM_BYTES.items() if k != "v4")
    budget = capacity * 13 // 16
    weights = 3 * D * F

    def tokens_moved(bn: int, bf: int) -> float:
        return math.ceil(N / bn) * weights + 3 * N * D + 3 * N * F

    def weights_moved(bn: int, bf: int) -> float:
        return math.ceil(F / bf) * 2 * N * D + 3 * N * F + weights

    def tokens_summed(bn: int, bf: int) -> float:
        return math.ceil(F / bf) * N * D

    def weights_summed(bn: int, bf: int) -> float:
        return math.ceil(N / bn) * weights

    found = (
        _best(N, D, F, itemsize, budget, 6, _forward_vmem, tokens_moved, tokens_summed),
        _best(N, D, F, itemsize, budget, 10, _backward_tokens_vmem, tokens_moved, tokens_summed),
        _best(N, D, F, itemsize, budget, 6, _backward_weights_vmem, weights_moved, weights_summed),
    )
    if None in found:
        return None
    return Tiles(*found, vmem_bytes=capacity * 15 // 16)  # type: ignore[arg-type]
