"""The TPU kernels, interpreted on the CPU, against the definition in float64: values, gradients, tails, meshes."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec as P

from tlm_jax.kernels.gated_mlp import Placement, gated_mlp, implementation_for
from tlm_jax.kernels.gated_mlp_tiles import TOKENS, VMEM_BYTES, Tiles, choose
from tlm_jax.parallel.mesh import make_mesh

gelu = partial(jax.nn.gelu, approximate=True)
ACTIVATIONS = {"silu": jax.nn.silu, "gelu": gelu, "relu": jax.nn.relu}
SMALL = Tiles((32, 128), (32, 128), (32, 128), 64 << 20)  # several steps, and tails, at the sizes of a test
# Uninitialised memory is NaN there, so that what the kernel did not write, or reads beyond an array, shows.
POISONED = pltpu.InterpretParams(uninitialized_memory="nan")
TOLERANCE = {jnp.dtype(jnp.float32): 1e-5, jnp.dtype(jnp.bfloat16): 3e-2}


def by_definition(activation, x, w_gate, w_up, w_down, d_y):
    """Value and gradients in float64, by hand."""
    x, w_gate, w_up, w_down, d_y = (np.asarray(a, np.float64) for a in (x, w_gate, w_up, w_down, d_y))
    gate, up = x @ w_gate, x @ w_up
    if activation == "relu":
        act, slope = np.maximum(gate, 0), (gate > 0).astype(float)
    elif activation == "silu":
        sigmoid = 1 / (1 + np.exp(-gate))
        act, slope = gate * sigmoid, sigmoid * (1 + gate * (1 - sigmoid))
    else:
        c = np.sqrt(2 / np.pi)
        t = np.tanh(c * (gate + 0.044715 * gate**3))
        act = 0.5 * gate * (1 + t)
        slope = 0.5 * (1 + t) + 0.5 * gate * (1 - t**2) * c * (1 + 3 * 0.044715 * gate**2)
    h, d_h = act * up, d_y @ w_down.T
    d_gate, d_up = d_h * up * slope, d_h * act
    return h @ w_down, (d_gate @ w_gate.T + d_up @ w_up.T, x.T @ d_gate, x.T @ d_up, h.T @ d_y)


def drawn(rng, N, D, F, dtype):
    shapes = ((N, D), (D, F), (D, F), (F, D), (N, D))
    scales = (1, D**-0.5, D**-0.5, F**-0.5, 1)
    return [jnp.asarray(rng.normal(size=s) * scale, dtype) for s, scale in zip(shapes, scales, strict=True)]


def computed(arguments, **keywords):
    *inputs, d_y = arguments
    keywords = {"implementation": "pallas_tpu", "interpret": True} | keywords

    @jax.jit
    def run(inputs, d_y):
        y, pull_back = jax.vjp(lambda *a: gated_mlp(*a, **keywords), *inputs)
        return y, pull_back(d_y)

    return run(inputs, d_y)


def assert_close(got, want, dtype):
    assert got.dtype == dtype
    scale = np.abs(want).max() + 1e-30
    np.testing.assert_allclose(np.asarray(got, np.float64) / scale, want / scale, atol=TOLERANCE[jnp.dtype(dtype)])


def check(seed, *, keeps, interpret, activation=None, largest=(100, 80, 300)):
    rng = np.random.default_rng(seed)
    N, D, F = (int(rng.integers(1, limit)) for limit in largest)
    F = max(16, F // 16 * 16)  # what a schedule can produce: multiples of 16, of 128 by chance only
    dtype = jnp.dtype((jnp.float32, jnp.bfloat16)[seed % 2])
    activation = activation or tuple(ACTIVATIONS)[seed % 3]
    arguments = drawn(rng, N, D, F, dtype)
    tiles = SMALL if N > 32 and F > 128 else None
    got = computed(arguments, activation=ACTIVATIONS[activation], keeps=keeps, tiles=tiles, interpret=interpret)
    want = by_definition(activation, *arguments)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert_close(g, w, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("start", range(0, 200, 20))
def test_two_hundred_shapes(start):
    for seed in range(start, start + 20):
        check(seed, keeps=seed % 4 > 1, interpret=True)


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_poisoned_memory(activation, keeps):
    for seed in (4, 7):
        check(seed, keeps=keeps, interpret=POISONED, activation=activation)


@pytest.mark.parametrize("keeps", [False, True])
def test_no_races(keeps):
    arguments = drawn(np.random.default_rng(0), 80, 24, 272, jnp.float32)
    interpret = dataclasses.replace(POISONED, detect_races=True)
    computed(arguments, keeps=keeps, tiles=SMALL, interpret=interpret)
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call  # the only place that tells

    assert not interpret_pallas_call.races.races_found


@pytest.mark.parametrize(
    ("sizes", "tensor"), [((8, 1), None), ((2, 4), "tensor"), ((4, 2), "tensor")], ids=["8", "2x4", "4x2"]
)
@pytest.mark.parametrize("keeps", [False, True])
def test_a_mesh_changes_nothing(sizes, tensor, keeps):
    arguments = drawn(np.random.default_rng(1), 64, 32, 128, jnp.float32)
    want = computed(arguments, keeps=keeps)
    mesh = make_mesh({"data": 1, "fsdp": sizes[0], "expert": 1, "tensor": sizes[1]})
    tokens, into, out = P(("data", "fsdp")), P("fsdp", tensor), P(tensor, "fsdp")
    specs = (tokens, into, into, out, tokens)
    with jax.set_mesh(mesh):
        placed = [jax.device_put(a, jax.NamedSharding(mesh, s)) for a, s in zip(arguments, specs, strict=True)]
        got = computed(placed, keeps=keeps, placement=Placement(("data", "fsdp"), tensor))
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-5)


def residual_bytes(**keywords):
    """What is kept between the passes, the weights aside."""
    N, D, F = 256, 64, 192
    shapes = ((N, D), (D, F), (D, F), (F, D))
    arguments = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in shapes]
    _, kept = jax.eval_shape(lambda *a: jax.vjp(lambda *b: gated_mlp(*b, **keywords), *a), *arguments)
    weights = 3 * D * F * 2
    return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(kept)) - weights, N * D * 2, N * F * 2


def test_what_is_kept_between_the_passes():
    plain, tokens, hidden = residual_bytes()
    assert plain == tokens + 2 * hidden
    fused, _, _ = residual_bytes(implementation="pallas_tpu", interpret=True)
    assert fused == tokens
    keeping, _, _ = residual_bytes(implementation="pallas_tpu", interpret=True, keeps=True)
    assert keeping == tokens + 2 * hidden


def test_tiles_are_aligned_and_fit():
    for D in (64, 640, 1024, 1536, 2048, 2560, 4096):
        for F in (48, 128, 768, 1328, 2736, 5632, 8448, 16384):
            for N in (1, 37, 777, 4096, 8192, 65536):
                for itemsize in (2, 4):
                    tiles = choose(N, D, F, itemsize)
                    assert tiles is not None, (N, D, F)
                    assert tiles.vmem_bytes < min(v for k, v in VMEM_BYTES.items() if k != "v4")
                    for bn, bf in (tiles.forward, tiles.backward_tokens, tiles.backward_weights):
                        assert bn == N or bn in TOKENS
                        assert bf == F or (bf % 128 == 0 and bf < F)


def test_larger_tiles_read_weights_less_often():
    assert choose(8192, 2048, 5632, 2).forward[0] >= 1024  # v6e moves one byte in the time of 560 FLOPs
    assert choose(8192, 2048, 5632, 2, "v4") is None or choose(8192, 2048, 5632, 2, "v4").forward[0] < 1024


def test_who_computes_what():
    assert implementation_for("cpu", "auto", 8192, 2048, 5632, 2) == "plain"
    assert implementation_for("gpu", "auto", 8192, 2048, 5632, 2) == "plain"
    assert implementation_for("tpu", "auto", 8192, 2048, 5632, 2) == "pallas_tpu"
    assert implementation_for("tpu", "auto", 8, 2048, 5632, 2) == "plain"  # decoding
    assert implementation_for("tpu", "plain", 8192, 2048, 5632, 2) == "plain"
    with pytest.raises(ValueError, match="no gated MLP is called 'fast': plain, pallas_tpu"):
        gated_mlp(*drawn(np.random.default_rng(0), 8, 8, 16, jnp.float32)[:4], implementation="fast")
