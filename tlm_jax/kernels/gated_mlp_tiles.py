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

# By TPU generation: VMEM a core, peak bfloat16 FLOP/s and HBM bytes/s a chip (cloud.google.com/tpu/docs, jax's own
# pltpu.get_tpu_info). v4's VMEM is too small for what follows; see `choose`.
VMEM_BYTES = {"v4": 16 << 20, "v5e": 128 << 20, "v5p": 64 << 20, "v6e": 128 << 20, "tpu7x": 64 << 20}
LARGEST_BALANCE = 560  # FLOPs a byte: v6e's 918e12 / 1.64e12, the most demanding; tiles that serve it serve the others
_STEP_FLOPS = 6e8  # what starting a grid step costs, as FLOPs of v6e: about 1,100 cycles of initialising and flushing

TOKENS = (2048, 1024, 512, 256, 128)
COLUMNS = (1024, 768, 640, 512, 384, 256, 128)


@dataclass(frozen=True)
class Tiles:
    """(bn, bf) of each kernel, and the VMEM that the compiler may use for one.

    A size is the whole axis, or a multiple of 128 columns and of 16 tokens.
    """

    forward: tuple[int, int]
    backward_tokens: tuple[int, int]
    backward_weights: tuple[int, int]
    vmem_bytes: int


def _whole(size: int, tile: int, multiple: int) -> int:
    """The columns or tokens that are computed, tails rounded up to what the matrix units take."""
    full, tail = divmod(size, tile)
    return full * math.ceil(tile / multiple) * multiple + math.ceil(tail / multiple) * multiple


def _forward_vmem(bn: int, bf: int, D: int, size: int) -> int:
    """x and y twice each for the pipeline, their float32 sum, three weights twice, hidden activations of some rows."""
    return bn * D * (4 * size + 4) + 6 * D * bf * size + 4 * bn * bf * size + 4 * min(bn, 256) * bf * 4


def _backward_tokens_vmem(bn: int, bf: int, D: int, size: int) -> int:
    hidden = 2 * 3 * bn * bf * size + 8 * min(bn, 256) * bf * 4
    return bn * D * (6 * size + 4) + 6 * D * bf * size + hidden


def _backward_weights_vmem(bn: int, bf: int, D: int, size: int) -> int:
    """Sums and outputs of three weights, tokens twice each, and the transposed ones."""
    return 3 * D * bf * (4 + 2 * size) + bn * D * 5 * size + 7 * bn * bf * size


def _cost(N: int, D: int, F: int, tile: tuple[int, int], size: int, passes: int, streamed: float) -> float:
    """Time in FLOPs of the most demanding generation: the longer of computing and moving, and the steps' own."""
    bn, bf = tile
    computed = passes * _whole(N, bn, 8) * D * _whole(F, bf, 128)
    return max(computed, streamed * size * LARGEST_BALANCE) + math.ceil(N / bn) * math.ceil(F / bf) * _STEP_FLOPS / 8


def _best(
    N: int, D: int, F: int, size: int, budget: int, passes: int,
    vmem: Callable[[int, int, int, int], int], streamed: Callable[[int, int], float],
) -> tuple[int, int] | None:  # fmt: skip
    tokens = [*[bn for bn in TOKENS if bn < N], *([N] if N <= 512 or N in TOKENS else [])]
    columns = [*[bf for bf in COLUMNS if bf < F], *([F] if max(COLUMNS) >= F else [])]
    fitting = [(bn, bf) for bn in tokens for bf in columns if vmem(bn, bf, D, size) <= budget]
    return min(fitting, key=lambda t: _cost(N, D, F, t, size, passes, streamed(*t)), default=None)


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
    budget = min(capacity, 64 << 20) * 7 // 8  # beyond it nothing is gained
    weights = 3 * D * F

    def tokens_streamed(bn: int, bf: int) -> float:
        return math.ceil(N / bn) * weights + 3 * N * D + 3 * N * F

    def weights_streamed(bn: int, bf: int) -> float:
        return math.ceil(F / bf) * 2 * N * D + 3 * N * F + weights

    found = (
        _best(N, D, F, itemsize, budget, 6, _forward_vmem, tokens_streamed),
        _best(N, D, F, itemsize, budget, 10, _backward_tokens_vmem, tokens_streamed),
        _best(N, D, F, itemsize, budget, 6, _backward_weights_vmem, weights_streamed),
    )
    if None in found:
        return None
    return Tiles(*found, vmem_bytes=capacity * 15 // 16)  # type: ignore[arg-type]
