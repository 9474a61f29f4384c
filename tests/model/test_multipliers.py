"""The constants of muP and the initialisation of Variable-Width Transformers, each by what it means."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from test_decoder import decoder, example, logits, parameters
from test_stream import model_of

from tlm_jax.config import default_config
from tlm_jax.errors import UserError
from tlm_jax.model.settings import settings_from_config
from tlm_jax.train.step import loss_sum

WIDTHS = (32, 8, 24)


def changed(model, change):
    """The model's initial parameters, each leaf as `change(its names, leaf)` has it."""
    return jax.tree_util.tree_map_with_path(lambda path, x: change([str(p.key) for p in path], x), parameters(model))


def assert_same(model, params, other, other_params):
    batch = example()
    np.testing.assert_allclose(logits(model, params, batch), logits(other, other_params, batch), rtol=1e-4, atol=1e-5)


def test_the_embedding_multiplier_multiplies_embeddings():
    plain, with_it = model_of(WIDTHS), model_of(WIDTHS, embedding_multiplier=12.0)
    larger = changed(plain, lambda names, x: 12 * x if names == ["embedding"] else x)
    assert_same(with_it, parameters(plain), plain, larger)


def test_a_tied_embedding_is_multiplied_on_its_way_in_only():
    batch, with_it = example(), decoder(embedding_multiplier=3.0)
    params = parameters(with_it)
    bound = with_it.bind(params)
    np.testing.assert_array_equal(bound.output_table(), params["embedding"])
    assert not np.allclose(logits(with_it, params, batch), logits(decoder(), params, batch), atol=1e-3)


def test_the_residual_multiplier_multiplies_what_both_branches_add():
    plain, with_it = model_of(WIDTHS), model_of(WIDTHS, residual_multiplier=0.22)
    smaller = changed(plain, lambda names, x: 0.22 * x if names[-1] in ("wo", "w_down") else x)
    assert_same(with_it, parameters(plain), plain, smaller)


@pytest.mark.parametrize("cap", [0.0, 0.5])
def test_the_logits_multiplier_comes_before_the_soft_cap_in_logits_and_loss(cap):
    plain, with_it = model_of(WIDTHS, final_soft_cap=cap), model_of(WIDTHS, final_soft_cap=cap, logits_multiplier=0.3)
    smaller = changed(plain, lambda names, x: 0.3 * x if names == ["head"] else x)
    assert_same(with_it, parameters(plain), plain, smaller)
    losses = [float(loss_sum(*pair, example())) for pair in ((with_it, parameters(plain)), (plain, smaller))]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_the_attention_scale_follows_each_layers_own_head_dim():
    plain, with_it = model_of(WIDTHS), model_of(WIDTHS, attention_scale="inverse")
    head_dim = {f"layer_{i}": width // 2 for i, width in enumerate(WIDTHS)}
    weaker = changed(plain, lambda names, x: x * head_dim[names[0]] ** -0.5 if names[-1] == "wq" else x)
    assert_same(with_it, parameters(plain), plain, weaker)
    assert not np.allclose(*(logits(m, parameters(plain), example()) for m in (plain, with_it)), atol=1e-4)


def deviation_of(model, layer: int, name: str) -> float:
    room = "attention" if name in ("wq", "wk", "wv", "wo") else "mlp"
    return float(np.std(parameters(model)[f"layer_{layer}"][room][name]))


@pytest.mark.parametrize("name", ["wq", "wk", "wv", "w_gate", "w_up"])
def test_init_deviation_is_of_the_embeddings_width_and_adapted_to_others(name):
    """The paper: 0.1 / sqrt(8) times sqrt(d / d_l)."""
    widths = (256, 64)
    for power, ratios in ((0.5, (2**-0.5, 2**0.5)), (0.0, (1, 1)), (1.0, (0.5, 2))):
        model = model_of(widths, d_embedding=128, init_deviation=0.1 / 8**0.5, init_width_power=power)
        for layer, ratio in enumerate(ratios):
            assert deviation_of(model, layer, name) == pytest.approx(0.1 / 8**0.5 * ratio, rel=0.03)


@pytest.mark.parametrize("name", ["wo", "w_down"])
def test_what_is_added_to_the_stream_is_scaled_with_depth_unless_told_otherwise(name):
    widths, fixed = (64, 64, 128), {"d_embedding": 64, "init_deviation": 0.02, "layer_stacking": "unrolled"}
    scaled, unscaled = model_of(widths, **fixed), model_of(widths, init_depth_scaling=False, **fixed)
    assert deviation_of(scaled, 1, name) == pytest.approx(0.02 / 6**0.5, rel=0.03)
    assert deviation_of(unscaled, 1, name) == pytest.approx(0.02, rel=0.03)
    assert deviation_of(unscaled, 2, name) == pytest.approx(0.02 / 2**0.5, rel=0.03)
    of_inputs = model_of(widths, d_embedding=64, init_depth_scaling=False)
    assert deviation_of(of_inputs, 2, name) == pytest.approx({"wo": 128, "w_down": 384}[name] ** -0.5, rel=0.03)


def test_the_embeddings_deviation_is_that_of_both_tables_and_init_scale_multiplies_all():
    model = model_of((64,), d_embedding=64, embedding_init_deviation=0.1, init_deviation=0.3, init_scale=2.0)
    for name in ("embedding", "head"):
        assert float(np.std(parameters(model)[name])) == pytest.approx(0.2, rel=0.03)
    assert deviation_of(model, 0, "wq") == pytest.approx(0.6, rel=0.05)
    plain = model_of((64,), d_embedding=64)
    assert float(np.std(parameters(plain)["head"])) == pytest.approx(1 / 8, rel=0.03)


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"embedding_multiplier": 0.0}, "embedding_multiplier: must be above 0, not 0.0"),
        ({"residual_multiplier": float("nan")}, "residual_multiplier: must be above 0, not nan"),
        ({"logits_multiplier": float("inf")}, "logits_multiplier: must be above 0, not inf"),
        ({"attention_scale": "sqrt"}, "attention_scale: 'sqrt' is not one of inverse_sqrt, inverse"),
        ({"init_deviation": -0.1}, "init_deviation: must be 0 or above, not -0.1"),
        ({"embedding_init_deviation": -1.0}, "embedding_init_deviation: must be 0 or above, not -1.0"),
        ({"init_width_power": float("inf"), "init_deviation": 0.1}, "init_width_power: must be finite, not inf"),
        ({"init_width_power": 0.0}, "init_width_power: is read with init_deviation only, which is 0"),
    ],
    ids=str,
)
def test_what_cannot_be_is_told(keys, problem):
    config = default_config()
    config.model.update(keys)
    with pytest.raises(UserError) as raised:
        settings_from_config(config)
    assert f"config.model.{problem}" in str(raised.value)
