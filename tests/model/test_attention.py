"""The rows of the attention table against a definition in float64 NumPy, and the choice among them."""

from __future__ import annotations

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tlm_jax.capacity.shape import LayerShape
from tlm_jax.config import default_config
from tlm_jax.errors import UserError
from tlm_jax.model import attention_kernels
from tlm_jax.model.attention import Attention, empty_cache
from tlm_jax.model.attention_kernels import KERNELS, choose
from tlm_jax.model.initial import Deviations
from tlm_jax.model.settings import settings_from_config


def by_definition(q, k, v, segments, window=0, soft_cap=0.0):
    """Loops over query heads and rows: [B, H, T, K] in float64."""
    B, H, T, _ = q.shape
    out = np.zeros(q.shape, np.float64)
    for b, h, t in itertools.product(range(B), range(H), range(T)):
        first = max(0, t - window + 1) if window else 0
        seen = [s for s in range(first, t + 1) if segments is None or segments[b, s] == segments[b, t]]
        g = h * k.shape[1] // H
        logits = k[b, g, seen].astype(np.float64) @ q[b, h, t].astype(np.float64)
        logits = soft_cap * np.tanh(logits / soft_cap) if soft_cap else logits
        weights = np.exp(logits - logits.max())
        out[b, h, t] = weights / weights.sum() @ v[b, g, seen].astype(np.float64)
    return out


def inputs(T=128, H=4, G=2, K=16, B=2):
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(B, n, T, K)).astype(np.float32) for n in (H, G, G))
    segments = np.cumsum(rng.random((B, T)) < 0.05, axis=1).astype(np.int32) + 1
    return q * K**-0.5, k, v, segments


@pytest.mark.parametrize("head_dim", [12, 128])
@pytest.mark.parametrize("with_segments", [False, True])
@pytest.mark.parametrize(
    "function",
    [
        attention_kernels.reference,
        attention_kernels.blocked,
        partial(attention_kernels.splash, interpret=True),
        partial(attention_kernels.pallas_gpu, interpret=True),
    ],
    ids=["reference", "blocked", "splash", "pallas"],
)
def test_values_against_the_definition(function, with_segments, head_dim):
    q, k, v, segments = inputs(K=head_dim)
    segments = segments if with_segments else None
    got = jax.jit(function)(q, k, v, segments)
    np.testing.assert_allclose(got, by_definition(q, k, v, segments), atol=2e-5)


@pytest.mark.parametrize("T", [100, 128, 300, 1100])
@pytest.mark.parametrize("with_segments", [False, True])
@pytest.mark.parametrize("options", [{}, {"window": 50, "soft_cap": 1.5}], ids=str)
def test_blocked_gradients_against_reference(T, with_segments, options):
    q, k, v, segments = inputs(T=T, K=8)
    segments = segments if with_segments else None
    weight = np.random.default_rng(1).normal(size=q.shape).astype(np.float32)

    def value_and_gradients(function):
        return jax.jit(
            jax.value_and_grad(lambda *qkv: jnp.sum(function(*qkv, segments, **options) * weight), (0, 1, 2))
        )(q, k, v)

    got, want = (value_and_gradients(f) for f in (attention_kernels.blocked, attention_kernels.reference))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4), got, want)


def test_blocked_keeps_no_weights_for_the_backward_pass():
    def temporary_bytes(function):
        def layers(q):
            return jnp.sum(jax.lax.scan(lambda x, _: (function(x, x, x, None), None), q, length=8)[0])

        q = jax.ShapeDtypeStruct((1, 4, 512, 8), jnp.float32)
        return jax.jit(jax.grad(layers)).lower(q).compile().memory_analysis().temp_size_in_bytes

    assert temporary_bytes(attention_kernels.blocked) < temporary_bytes(attention_kernels.reference) / 3


@pytest.mark.parametrize(("window", "soft_cap"), [(1, 0.0), (37, 0.0), (0, 1.5), (37, 1.5), (127, 0.0)])
@pytest.mark.parametrize(
    "function",
    [attention_kernels.reference, attention_kernels.blocked, partial(attention_kernels.splash, interpret=True)],
    ids=["reference", "blocked", "splash"],
)
def test_windows_and_soft_caps_against_the_definition(function, window, soft_cap):
    # Three of splash's blocks, so that the band leaves some out.
    q, k, v, segments = inputs(
        T=384 if soft_cap and window else 128, B=1, K=128 if isinstance(function, partial) else 16
    )
    segments = segments if window < 100 else None
    q = 3 * q  # logits beyond the cap
    got = jax.jit(partial(function, window=window, soft_cap=soft_cap))(q, k, v, segments)
    want = by_definition(q, k, v, segments, window, soft_cap)
    np.testing.assert_allclose(got, want, atol=2e-5)
    assert np.abs(want - by_definition(q, k, v, segments)).max() > 1e-3


@pytest.mark.parametrize(
    ("function", "options"),
    [
        (attention_kernels.splash, {}),
        (attention_kernels.splash, {"window": 37, "soft_cap": 1.5}),
        (attention_kernels.pallas_gpu, {}),
    ],
    ids=["splash", "splash with window and soft-cap", "pallas"],
)
def test_kernel_gradients_against_reference(function, options):
    q, k, v, segments = inputs(T=128, K=128, B=1)
    function, plain = partial(function, **options), partial(attention_kernels.reference, **options)
    weight = np.random.default_rng(1).normal(size=q.shape).astype(np.float32)

    def loss(f, q, k, v):
        return jnp.sum(f(q, k, v, segments) * weight)

    want = jax.jit(jax.grad(partial(loss, plain), argnums=(0, 1, 2)))(q, k, v)
    got = jax.jit(jax.grad(partial(loss, partial(function, interpret=True)), argnums=(0, 1, 2)))(q, k, v)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-4)


@pytest.mark.parametrize(
    ("platform", "features", "name"),
    [
        ("tpu", {"segments", "gqa"}, "splash"),
        ("gpu", {"segments"}, "pallas"),
        ("gpu", {"gqa"}, "cudnn"),
        ("gpu", {"gqa", "float32"}, "pallas"),
        ("cuda", {"segments"}, "pallas"),
        ("cpu", {"segments", "gqa", "float32"}, "blocked"),
        ("tpu", {"segments", "gqa", "window", "soft_cap"}, "splash"),
        ("gpu", {"gqa", "window"}, "cudnn"),
        ("gpu", {"odd_head_dim"}, "pallas"),
        ("tpu", {"odd_head_dim", "segments"}, "splash"),
        ("cpu", {"segments", "window", "soft_cap"}, "blocked"),
    ],
)
def test_choice(platform, features, name):
    assert choose(platform, features, 1024).name == name


@pytest.mark.parametrize("soft_cap", [0.0, 1.5])
def test_one_token_against_the_definition_whatever_the_caches_axes(soft_cap):
    q, k, v, segments = inputs(T=40)
    want = by_definition(q, k, v, segments, soft_cap=soft_cap)[:, :, -1:]
    mask_B1S = segments[:, None, :] == segments[:, -1:, None]
    for axes in (k.shape[:2], (-1,)):
        cache = (x.reshape(*axes, *x.shape[2:]) for x in (k, v))
        got = jax.jit(attention_kernels.one_token_attention, static_argnums=4)(q[:, :, -1:], *cache, mask_B1S, soft_cap)
        np.testing.assert_allclose(got, want, atol=2e-5)


@pytest.mark.parametrize("window", [0, 3])
def test_tokens_one_by_one_are_the_same_with_every_platforms_cache(window):
    shape = LayerShape(d_model=16, d_ff=16, num_heads=4, num_kv_heads=2, head_dim=8, window=window)
    x_BTD = np.random.default_rng(0).normal(size=(3, 7, 16)).astype(np.float32)
    config = default_config()
    config.model.compute_dtype = "float32"
    outputs = {}
    for platform in ("cpu", "tpu"):
        settings = settings_from_config(config, platform)
        layer = Attention(jax.random.key(0), shape, settings, Deviations(0.2, 0.1, 0.1))
        cache = empty_cache(shape, settings, 3, 7)
        outputs[platform] = []
        for i in range(7):
            at = {
                "positions": jnp.full((3, 1), i),
                "segment_ids": jnp.ones((3, 1), jnp.int32),
                "slots": {"write_index": jnp.int32(i), "segment_ids": jnp.tile(jnp.arange(7) <= i, (3, 1)).astype(int)},
            }
            y_B1D, cache = layer(x_BTD[:, i : i + 1], at, cache)
            outputs[platform].append(y_B1D)
    assert cache["k"].shape == (3, 2, window or 7, 8)
    np.testing.assert_allclose(outputs["tpu"], outputs["cpu"], atol=1e-6)


def test_no_accelerator_row_is_quadratic():
    assert all(not row.quadratic for row in KERNELS if row.platforms - {"cpu"})


@pytest.mark.parametrize(
    ("platform", "features", "length", "requested", "text"),
    [
        ("gpu", {"segments"}, 1000, "auto", "multiples of 128, not 1000"),
        ("gpu", {"segments"}, 1024, "cudnn", "cudnn has no segments"),
        ("gpu", {"segments", "window"}, 1024, "auto", "cudnn has no segments; pallas has no window"),
        ("gpu", {"soft_cap"}, 1024, "auto", "cudnn has no soft_cap; pallas has no soft_cap"),
        ("cpu", set(), 64, "splash", "splash does not run on cpu"),
        ("tpu", set(), 1024, "flash", "not one of auto, splash"),
    ],
)
def test_what_no_row_serves_is_an_error(platform, features, length, requested, text):
    with pytest.raises(UserError, match=text):
        choose(platform, features, length, requested)


def test_cudnns_window_leaves_out_the_token_itself(monkeypatch):
    calls = []

    def record(query, key, value, **options):
        calls.append(options["local_window_size"])
        return query

    shapes = [jax.ShapeDtypeStruct((1, n, 256, 64), jnp.bfloat16) for n in (4, 2, 2)]
    with monkeypatch.context() as patch:
        patch.setattr(jax.nn, "dot_product_attention", record)
        jax.eval_shape(lambda q, k, v: attention_kernels.cudnn(q, k, v, None, window=7), *shapes)
        jax.eval_shape(lambda q, k, v: attention_kernels.cudnn(q, k, v, None), *shapes)
    assert calls == [(6, 0), None]
    # What that means, by the plain implementation behind the same arguments.
    q, k, v, _ = inputs(T=32)
    turned = (x.swapaxes(1, 2) for x in (q, k, v))
    got = jax.nn.dot_product_attention(*turned, scale=1.0, is_causal=True, local_window_size=(6, 0))
    np.testing.assert_allclose(got.swapaxes(1, 2), by_definition(q, k, v, None, window=7), atol=2e-5)


def test_splash_lowers_for_tpu_with_window_and_soft_cap():
    shapes = [jax.ShapeDtypeStruct((1, n, 1024, 128), jnp.bfloat16) for n in (4, 2, 2)]
    segments = jax.ShapeDtypeStruct((1, 1024), jnp.int32)
    function = jax.jit(partial(attention_kernels.splash, window=200, soft_cap=50.0))
    text = function.trace(*shapes, segments).lower(lowering_platforms=("tpu",)).as_text()
    assert "tpu_custom_call" in text
    assert "1024x1024" not in text


@pytest.mark.parametrize("segmented", [False, True])
def test_splash_lowers_for_tpu_without_quadratic_memory(segmented):
    shapes = [jax.ShapeDtypeStruct((1, n, 1024, 128), jnp.bfloat16) for n in (4, 2, 2)]
    segments = jax.ShapeDtypeStruct((1, 1024), jnp.int32) if segmented else None
    text = jax.jit(attention_kernels.splash).trace(*shapes, segments).lower(lowering_platforms=("tpu",)).as_text()
    assert "tpu_custom_call" in text
    assert "1024x1024" not in text
