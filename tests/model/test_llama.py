"""Logits, loss and gradients equal those of Hugging Face's Llama, Qwen 3 (QK-norm) and Gemma 2 (windows, soft-caps,
GeGLU), from committed golden values and live."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import llama_weights
import numpy as np
import pytest
from stacking import join_layers, split_layers

from tlm_jax.capacity.profile import Profile
from tlm_jax.capacity.shape import LayerShape
from tlm_jax.config import default_config
from tlm_jax.model.functional import FunctionalDecoder
from tlm_jax.model.settings import settings_from_config

GOLDEN = Path(__file__).parents[1] / "golden"
TOLERANCE = 1e-4  # max abs, float32
CASES = [(name, stacking) for name in llama_weights.NAMES for stacking in ("auto", "unrolled")]


def profile_of(name: str) -> Profile:
    c = llama_weights.llama_config(name)
    shape = LayerShape(
        d_model=c["hidden_size"],
        d_ff=c["intermediate_size"],
        num_heads=c["num_attention_heads"],
        num_kv_heads=c["num_key_value_heads"],
        head_dim=c["head_dim"],
        mlp="geglu" if c["family"] == "gemma2" else "swiglu",
        qk_norm=c["family"] == "qwen3",
    )
    windows = (c.get("sliding_window", 0), 0)
    layers = tuple(dataclasses.replace(shape, window=windows[i % 2]) for i in range(c["num_hidden_layers"]))
    return Profile(layers, c["vocab_size"], c["hidden_size"], c["tie_word_embeddings"])


def by_layer(weights: dict[str, np.ndarray], profile: Profile) -> dict:
    """Weights by Hugging Face name as `split_layers` would give them."""
    tree = llama_weights.to_tlm_parameters(weights, profile)
    return {f"layer_{i}": layer for i, layer in enumerate(tree.pop("layers"))} | tree


@functools.cache
def our_outputs(name: str, stacking: str) -> tuple[np.ndarray, float, dict]:
    """Logits, loss, and gradients layer by layer, of the decoder with the golden models' weights."""
    c, profile = llama_weights.llama_config(name), profile_of(name)
    config = default_config()
    config.model.rope_theta = c["rope_theta"]
    config.model.norm_epsilon = c["rms_norm_eps"]
    config.model.attention_soft_cap = c.get("attn_logit_softcapping", 0.0)
    config.model.final_soft_cap = c.get("final_logit_softcapping", 0.0)
    config.model.layer_stacking = stacking
    config.model.loss_chunk_tokens = 13  # chunks that do not divide the tokens
    decoder = FunctionalDecoder(profile, settings_from_config(config, "cpu"))
    parameters = jax.tree.map(
        jnp.asarray, join_layers(by_layer(llama_weights.llama_weights(name), profile), profile, stacking)
    )
    expected = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), decoder.abstract_parameters)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), parameters) == expected

    tokens_BT = jnp.asarray(llama_weights.tokens(name))
    inputs_BT, targets_BT = tokens_BT[:, :-1], tokens_BT[:, 1:]
    positions_BT = jnp.broadcast_to(jnp.arange(inputs_BT.shape[1]), inputs_BT.shape)
    segments_BT, mask_BT = jnp.ones_like(inputs_BT), jnp.ones(inputs_BT.shape, bool)

    @jax.jit
    def logits(parameters):
        model = decoder.bind(parameters)
        hidden_BTD, _ = model.hidden(inputs_BT, model.at(positions_BT, segments_BT))
        return model.logits(hidden_BTD)

    @jax.jit
    @jax.value_and_grad
    def loss_and_gradients(parameters):
        total = decoder.bind(parameters).loss_sums(inputs_BT, targets_BT, mask_BT, segments_BT, positions_BT).objective
        return total / targets_BT.size

    loss, gradients = loss_and_gradients(parameters)
    gradients = split_layers(gradients, profile, stacking)
    return np.asarray(logits(parameters)), float(loss), jax.tree.map(np.asarray, gradients)


def assert_equals_reference(name: str, stacking: str, reference: dict[str, np.ndarray]) -> None:
    logits_BTV, loss, gradients = our_outputs(name, stacking)
    assert np.abs(logits_BTV - reference["logits"]).max() < TOLERANCE
    assert abs(loss - float(reference["loss"])) < TOLERANCE
    reference_gradients = by_layer(
        {key.removeprefix("grad:"): value for key, value in reference.items() if key.startswith("grad:")},
        profile_of(name),
    )
    assert jax.tree.structure(gradients) == jax.tree.structure(reference_gradients)
    for path, ours in jax.tree_util.tree_leaves_with_path(gradients):
        theirs = functools.reduce(lambda node, part: node[part.key], path, reference_gradients)
        error = np.abs(ours - theirs).max()
        # The smallest leaf's largest gradient is 0.029: the relative bound is the stricter one for most leaves.
        assert error < TOLERANCE, f"{jax.tree_util.keystr(path)}: {error}"
        assert error < 1e-4 * np.abs(theirs).max(), f"{jax.tree_util.keystr(path)}: {error}"


def golden(name: str) -> dict[str, np.ndarray]:
    with np.load(GOLDEN / f"llama_{name}.npz") as file:
        return dict(file)


@pytest.mark.parametrize("name", llama_weights.NAMES)
def test_the_recipe_still_draws_the_weights_of_the_golden_values(name):
    drawn = llama_weights.checksum(llama_weights.llama_weights(name))
    np.testing.assert_allclose(drawn, golden(name)["weights_checksum"], rtol=1e-12)


@pytest.mark.parametrize(("name", "stacking"), CASES)
def test_golden(name, stacking):
    assert_equals_reference(name, stacking, golden(name))


@pytest.mark.parametrize("name", llama_weights.NAMES)
def test_live(name):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from llama_reference import reference_outputs

    assert_equals_reference(name, "auto", reference_outputs(name))
