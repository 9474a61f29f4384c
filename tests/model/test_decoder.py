"""The decoder: initialisation, layout, masks, dtypes."""

from __future__ import annotations

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from stacking import join_layers, split_layers

from tlm_jax.capacity.from_config import profile_from_config
from tlm_jax.config import default_config
from tlm_jax.model.decoder import layout
from tlm_jax.model.functional import FunctionalDecoder
from tlm_jax.model.layers import embed, parameter
from tlm_jax.model.settings import settings_from_config
from tlm_jax.parallel.mesh import make_mesh
from tlm_jax.parallel.rules import parameter_shardings
from tlm_jax.train.step import MODEL_KEYS, loss_sum

VOCABULARY = 96


@cache
def decoder(**keys) -> FunctionalDecoder:
    config = default_config()
    config.profile.update(
        {"num_layers": 4, "d_model": 32, "d_ff": 64, "num_heads": 4, "num_kv_heads": 2, "schedule": "cosine"}
    )
    config.model.vocab_size = VOCABULARY
    config.profile.plateaus = 2
    for key, value in keys.items():
        node = config.profile if key in config.profile else config.model
        node[key] = value
    return FunctionalDecoder(profile_from_config(config), settings_from_config(config))


@cache
def parameters(model: FunctionalDecoder):
    return jax.jit(model.init)(jax.random.key(7))


def example(B=2, T=24):
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, VOCABULARY, (B, T + 1)).astype(np.int32)
    segments = np.ones((B, T), np.int32)
    segments[:, T // 2 :] = 2
    segments[0, -4:] = 0
    positions = np.tile(np.concatenate([np.arange(T // 2), np.arange(T - T // 2)]), (B, 1)).astype(np.int32)
    return dict(zip(MODEL_KEYS, (tokens[:, :-1], tokens[:, 1:], segments > 0, segments, positions), strict=True))


def logits(model, params, batch):
    def run(params):
        bound = model.bind(params)
        hidden, _ = bound.hidden(batch["inputs"], bound.at(batch["positions"], batch["segment_ids"]))
        return bound.logits(hidden)

    return np.asarray(jax.jit(run)(params))


def gradients(model, params, batch):
    return jax.jit(jax.grad(lambda p: loss_sum(model, p, batch)))(params)


def assert_equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_layout_stacks_runs_of_equal_layers():
    names = [run.name for run in layout(decoder(num_layers=5, plateaus=0, schedule="list",
                                                layers=(64, 64, 48, 48, 48)).profile, "auto")]  # fmt: skip
    assert names == ["layers_0_to_1", "layers_2_to_4"]
    assert len(layout(decoder().profile, "unrolled")) == 4


def test_initialisation_is_bit_equal_stacked_or_unrolled():
    stacked, unrolled = decoder(), decoder(layer_stacking="unrolled")
    split = split_layers(parameters(stacked), stacked.profile, "auto")
    assert_equal(split, parameters(unrolled))
    assert_equal(join_layers(split, stacked.profile, "auto"), parameters(stacked))


def test_initial_weights_are_near_normal():
    weights = np.asarray(parameter(jax.random.key(3), "w", (512, 512), (None, None), 0.02)[...], np.float64)
    assert weights.mean() == pytest.approx(0, abs=4 * 0.02 / 512)
    assert weights.std() == pytest.approx(0.02, rel=5e-3)
    assert (weights**4).mean() / weights.var() ** 2 == pytest.approx(2.7, abs=0.03)
    neighbours = [np.corrcoef(a.ravel(), b.ravel())[0, 1] for a, b in ((weights[1:], weights[:-1]),
                                                                      (weights[:, 1:], weights[:, :-1]))]  # fmt: skip
    assert np.abs(neighbours).max() < 4 / 512


@pytest.mark.parametrize("shape", [(1, 8), (2, 4)])
def test_initialisation_is_bit_equal_on_any_mesh(shape):
    model = decoder()
    mesh = make_mesh({"data": shape[0], "fsdp": shape[1], "expert": 1, "tensor": 1})
    with jax.set_mesh(mesh):
        placed = parameter_shardings(model.abstract_parameters, model.logical_axes, mesh)
        sharded = jax.jit(model.init, out_shardings=placed)(jax.random.key(7))
    assert any(not leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(sharded))
    assert_equal(jax.device_get(sharded), jax.device_get(parameters(model)))


def test_twins_share_every_weight_that_is_not_the_mlps():
    tapered, uniform = decoder(plateaus=0), decoder(schedule="uniform", plateaus=0)
    a = split_layers(parameters(tapered), tapered.profile, "auto")
    b = split_layers(parameters(uniform), uniform.profile, "auto")
    different = [
        jax.tree_util.keystr(path)
        for (path, x), (_, y) in zip(
            jax.tree_util.tree_leaves_with_path(a), jax.tree_util.tree_leaves_with_path(b), strict=True
        )
        if x.shape != y.shape or not np.array_equal(x, y)
    ]
    assert different
    assert all("['mlp']" in path for path in different)


def test_every_layer_and_weight_is_drawn_apart_and_scaled_with_depth():
    model = decoder(schedule="uniform", num_layers=8, plateaus=0, d_model=64, d_ff=256, layer_stacking="unrolled")
    params = parameters(model)
    assert not np.array_equal(params["layer_0"]["mlp"]["w_up"], params["layer_1"]["mlp"]["w_up"])
    assert not np.array_equal(params["layer_0"]["mlp"]["w_up"], params["layer_0"]["mlp"]["w_gate"])
    up, down = (np.std(params["layer_3"]["mlp"][name]) for name in ("w_up", "w_down"))
    assert up == pytest.approx(1 / 8, rel=0.02)
    assert down == pytest.approx(1 / 16 / 4, rel=0.02)


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"tied_embeddings": False},
        {"num_kv_heads": 4},
        {"schedule": "uniform", "plateaus": 0},
        {"head_dim": 16},
        {"qk_norm": True, "windows": (8, 0)},
        {"mlp": "geglu"},
        {"mlp": "squared_relu"},
    ],
    ids=str,
)
def test_parameter_count_is_the_profiles(keys):
    model = decoder(**keys)
    assert sum(leaf.size for leaf in jax.tree.leaves(model.abstract_parameters)) == model.profile.parameters


def test_stacked_equals_unrolled():
    stacked, unrolled, batch = decoder(), decoder(layer_stacking="unrolled"), example()
    np.testing.assert_allclose(
        logits(stacked, parameters(stacked), batch), logits(unrolled, parameters(unrolled), batch), atol=1e-5
    )


def test_a_token_sees_its_document_up_to_itself_and_nothing_else():
    model, batch = decoder(), example()
    before = logits(model, parameters(model), batch)

    def after(where):
        changed = dict(batch, inputs=np.where(where, (batch["inputs"] + 1) % VOCABULARY, batch["inputs"]))
        return logits(model, parameters(model), changed)

    first, second, padding = (batch["segment_ids"] == i for i in (1, 2, 0))
    for where, untouched in ((first, second), (second, first), (padding, first | second)):
        np.testing.assert_array_equal(after(where)[untouched], before[untouched])
        assert not np.array_equal(after(where)[where], before[where])
    t = np.broadcast_to(np.arange(24) >= 6, (2, 24))
    np.testing.assert_array_equal(after(t)[:, :6], before[:, :6])


def test_a_token_sees_as_far_back_as_the_windows_of_all_layers_reach():
    model, batch = decoder(windows=(3,), document_mask=False), example()
    before = logits(model, parameters(model), batch)
    changed = dict(batch, inputs=batch["inputs"].copy())
    changed["inputs"][:, 5] = (changed["inputs"][:, 5] + 1) % VOCABULARY
    differs = np.any(logits(model, parameters(model), changed) != before, axis=(0, 2))
    # Four layers, each of which looks two tokens back.
    assert np.flatnonzero(differs).tolist() == list(range(5, 5 + 4 * 2 + 1))


def test_equal_neighbours_stay_stacked_under_a_pattern_of_windows():
    model = decoder(windows=(8, 8, 0), num_layers=6, schedule="uniform", plateaus=0)
    names = [run.name for run in layout(model.profile, "auto")]
    assert names == ["layers_0_to_1", "layer_2", "layers_3_to_4", "layer_5"]


def test_without_document_mask_documents_see_each_other():
    model, batch = decoder(document_mask=False), example()
    before = logits(model, parameters(model), batch)
    changed = dict(batch, inputs=batch["inputs"].copy())
    changed["inputs"][:, 0] = (changed["inputs"][:, 0] + 1) % VOCABULARY
    second = batch["segment_ids"] == 2
    assert not np.array_equal(logits(model, parameters(model), changed)[second], before[second])


def test_bfloat16_computes_over_float32_weights():
    full, half, batch = decoder(), decoder(compute_dtype="bfloat16"), example()
    params = parameters(half)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(params))
    assert jax.tree.all(jax.tree.map(lambda g: g.dtype == jnp.float32, gradients(half, params, batch)))
    a, b = logits(full, params, batch), logits(half, params, batch)
    assert not np.array_equal(a, b)
    np.testing.assert_allclose(a, b, atol=0.15)


def test_the_embeddings_gradient_counts_every_token_in_bfloat16():
    tokens = jnp.zeros((1, 1000), jnp.int32)
    gradient = jax.grad(lambda table: jnp.sum(embed(table, tokens, jnp.bfloat16).astype(jnp.float32)))(jnp.ones((3, 4)))
    np.testing.assert_array_equal(gradient, [[1000] * 4, [0] * 4, [0] * 4])


def compiled_dots(num_layers: int, **keys) -> int:
    model = decoder(num_layers=num_layers, **keys)
    batch = {key: jax.ShapeDtypeStruct(value.shape, value.dtype) for key, value in example().items()}
    text = jax.jit(jax.grad(lambda p, b: loss_sum(model, p, b))).lower(model.abstract_parameters, batch).as_text()
    return text.count("stablehlo.dot_general")


def test_program_size_follows_the_runs_and_not_the_layers():
    uniform = {"schedule": "uniform", "plateaus": 0}
    assert compiled_dots(4, **uniform) == compiled_dots(16, **uniform)
    assert compiled_dots(8, plateaus=2) == compiled_dots(16, plateaus=2)
    assert compiled_dots(8, plateaus=4) < 4.5 * compiled_dots(8, **uniform) < compiled_dots(8, plateaus=0)
