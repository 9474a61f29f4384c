"""Optimizers act on each layer alone, whatever the stacking; decay goes by name."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tlm_jax.config import default_config
from tlm_jax.errors import UserError
from tlm_jax.model.layers import MATRICES
from tlm_jax.train.muon import UPDATE_RMS, muon, orthogonalise
from tlm_jax.train.optimizer import OPTIMIZERS, build_optimizer

LAYERS = 3
STEPS = 20
# Adafactor with everything on, and matrices of this size factored.
FULL = {"adafactor": {"adafactor_momentum": 0.9, "adafactor_min_factored": 8}}


def keys(**values):
    """A config; keyword arguments are keys of `config.train`."""
    config = default_config()
    config.train.update({"num_steps": 40, "warmup_steps": 1, "learning_rate": 0.1, "weight_decay": 0.0})
    config.train.update(FULL.get(values.get("optimizer"), {}) | values)
    return config


def tree(seed: int):
    """A stacked run and a table."""
    rng = np.random.default_rng(seed)

    def draw(*shape):
        return rng.normal(size=shape).astype(np.float32)

    return {
        "embedding": draw(11, 8),
        "layers_0_to_2": {
            "attention": {"wq": draw(LAYERS, 8, 2, 4), "wo": draw(LAYERS, 2, 4, 8)},
            "attention_norm": {"scale": draw(LAYERS, 8)},
            "mlp": {"w_up": draw(LAYERS, 8, 16), "w_down": draw(LAYERS, 16, 8)},
        },
    }


def unstacked(stack):
    split = {f"layer_{i}": jax.tree.map(lambda x, i=i: x[i], stack["layers_0_to_2"]) for i in range(LAYERS)}
    return {"embedding": stack["embedding"], **split}


def run(optimizer, params, gradients):
    state = optimizer.init(params)

    @jax.jit
    def step(params, state, gradient):
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    for gradient in gradients:
        params, state = step(params, state, gradient)
    return params


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_stack_is_treated_as_its_layers(name):
    optimizer = build_optimizer(keys(optimizer=name, weight_decay=0.1, learning_rate=0.01))
    gradients = [tree(i) for i in range(1, STEPS + 1)]
    for gradient in gradients:  # layers of very different size: whatever spans a run would show
        for i in range(LAYERS):
            for leaf in jax.tree.leaves(gradient["layers_0_to_2"]):
                leaf[i] *= 10.0 ** (2 * i - 3)
    stacked = unstacked(run(optimizer, tree(0), gradients))
    alone = run(optimizer, unstacked(tree(0)), [unstacked(g) for g in gradients])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), stacked, alone)


def as_plain_matrices(params):
    """The unrolled tree with attention weights as two-dimensional matrices, which is all that optax can factor."""
    shapes = {"wq": (8, 8), "wo": (8, 8)}
    return jax.tree_util.tree_map_with_path(lambda p, x: x.reshape(shapes.get(p[-1].key, x.shape)), unstacked(params))


@pytest.mark.parametrize(
    ("name", "peer"),
    [
        ("adamw", optax.adamw(0.01, b1=0.9, b2=0.95, weight_decay=0.1)),
        ("lion", optax.lion(0.01, b1=0.9, b2=0.99, weight_decay=0.1)),
        (
            "adafactor",
            optax.adafactor(0.01, min_dim_size_to_factor=8, momentum=0.9, weight_decay_rate=0.1 * 0.01),
        ),
    ],
)
def test_the_same_as_optax_on_the_unrolled_tree(name, peer):
    settings = {"warmup_steps": 0, "schedule": "constant", "learning_rate": 0.01, "gradient_clip": 0.0}
    ours = build_optimizer(keys(optimizer=name, weight_decay=0.1, weight_decay_exclude=(), **settings))
    gradients = [tree(i) for i in range(1, STEPS + 1)]
    found = as_plain_matrices(run(ours, tree(0), gradients))
    wanted = run(peer, as_plain_matrices(tree(0)), [as_plain_matrices(g) for g in gradients])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), found, wanted)


def test_adafactor_factors_matrices_and_nothing_else():
    state = build_optimizer(keys(optimizer="adafactor", adafactor_momentum=0.0)).init(tree(0))
    shapes = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        kind = next((part.name for part in path if getattr(part, "name", "").startswith("v")), None)
        if kind:
            shapes.setdefault(path[-1].key, {})[kind] = leaf.shape
    assert shapes["w_up"] == {"v_row": (LAYERS, 8), "v_col": (LAYERS, 16), "v": (LAYERS, 1)}
    assert shapes["wo"] == {"v_row": (LAYERS, 8), "v_col": (LAYERS, 8), "v": (LAYERS, 1)}
    assert shapes["scale"] == {"v_row": (LAYERS, 1), "v_col": (LAYERS, 1), "v": (LAYERS, 8)}
    assert shapes["embedding"] == {"v_row": (8,), "v_col": (11,), "v": (1,)}


def test_muon_orthogonalises_each_matrix_and_leaves_the_rest_to_adam():
    optimizer = build_optimizer(keys(optimizer="muon", gradient_clip=0.0))
    params, gradient = tree(0), tree(1)
    updates, _ = optimizer.update(gradient, optimizer.init(params), params)
    run_updates = updates["layers_0_to_2"]
    # Five Newton-Schulz steps bring the singular values of an orthogonal factor into about [0.7, 1.2].
    for matrix, longer in (
        (run_updates["mlp"]["w_up"][1], 16),
        (run_updates["attention"]["wq"][2].reshape(8, 8), 8),
        (run_updates["attention"]["wo"][0].reshape(8, 8), 8),
    ):
        singular = np.linalg.svd(matrix, compute_uv=False) / (0.1 * 0.2 * np.sqrt(longer))
        assert 0.5 < singular.min() <= singular.max() < 1.3
    # Adam's first update is the sign of the gradient times the learning rate.
    for update, g in (
        (updates["embedding"], gradient["embedding"]),
        (run_updates["attention_norm"]["scale"], gradient["layers_0_to_2"]["attention_norm"]["scale"]),
    ):
        np.testing.assert_allclose(update, -0.1 * np.sign(g), rtol=1e-3)


def test_muon_follows_an_independent_newton_schulz():
    gradient = tree(1)
    optimizer = build_optimizer(keys(optimizer="muon", gradient_clip=0.0))
    updates, _ = optimizer.update(gradient, optimizer.init(tree(0)), tree(0))
    x = gradient["layers_0_to_2"]["mlp"]["w_down"][1].astype(np.float64).T
    x = x / np.linalg.norm(x)  # [8, 16]: the iteration wants the short side first
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    want = -0.1 * 0.2 * np.sqrt(16) * x.T
    np.testing.assert_allclose(updates["layers_0_to_2"]["mlp"]["w_down"][1], want, atol=1e-4)


def only_matrices(params):
    return {"layers_0_to_2": {key: params["layers_0_to_2"][key] for key in ("attention", "mlp")}}


def test_muon_is_optax_s_on_every_matrix():
    """Twenty steps of directions, against optax told the axes of each leaf."""

    def dimensions(tree):
        def axes(path, leaf):
            summed, kept = ([1 + i for i in axes] for axes in MATRICES[path[-1].key])
            return optax.contrib.MuonDimensionNumbers(tuple(summed), tuple(kept))

        return jax.tree_util.tree_map_with_path(axes, tree)

    peer = optax.chain(
        optax.contrib.scale_by_muon(beta=0.95, weight_dimension_numbers=dimensions),
        optax.contrib._muon.scale_by_shape(dimensions, consistent_rms=UPDATE_RMS),
    )
    ours, params = muon(keys(optimizer="muon").train), only_matrices(tree(0))
    our_state, peer_state = ours.init(params), peer.init(params)
    ours, peer = jax.jit(ours.update), jax.jit(peer.update)
    for i in range(1, STEPS + 1):
        found, our_state = ours(only_matrices(tree(i)), our_state)
        wanted, peer_state = peer(only_matrices(tree(i)), peer_state)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), found, wanted)


def test_muon_in_bfloat16_differs_by_its_rounding_only():
    gradient = only_matrices(tree(1))
    exact, short = orthogonalise(gradient, jnp.float32), orthogonalise(gradient, jnp.bfloat16)
    differ = jax.tree.map(lambda a, b: np.linalg.norm(a - b) / np.linalg.norm(a), exact, short)
    assert 0.01 < min(jax.tree.leaves(differ)) <= max(jax.tree.leaves(differ)) < 0.1
    assert {leaf.dtype for leaf in jax.tree.leaves(short)} == {jnp.dtype(jnp.float32)}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_decay_goes_by_name(name):
    params = tree(0)
    zero = jax.tree.map(np.zeros_like, params)
    optimizer = build_optimizer(keys(optimizer=name, weight_decay=0.5))
    updates, _ = optimizer.update(zero, optimizer.init(params), params)
    run_updates = updates["layers_0_to_2"]
    np.testing.assert_allclose(
        run_updates["mlp"]["w_up"], -0.1 * 0.5 * params["layers_0_to_2"]["mlp"]["w_up"], rtol=1e-5
    )
    assert not np.any(run_updates["attention_norm"]["scale"])
    assert not np.any(updates["embedding"])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_moments_are_float32_whatever_the_parameters_are(name):
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree(0))
    optimizer = build_optimizer(keys(optimizer=name))
    state = optimizer.init(params)
    wide = jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree(1))
    for _ in range(2):
        dtypes = {leaf.dtype for leaf in jax.tree.leaves(state) if jnp.ndim(leaf) > 0}
        assert dtypes == {jnp.dtype(jnp.float32)}
        assert {leaf.dtype for leaf in jax.tree.leaves(state)} <= {jnp.dtype(jnp.float32), jnp.dtype(jnp.int32)}
        updates, state = optimizer.update(wide, state, params)
    assert {leaf.dtype for leaf in jax.tree.leaves(updates)} == {jnp.dtype(jnp.float32)}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_zero_gradients_move_nothing(name, clip):
    params = tree(0)
    optimizer = build_optimizer(keys(optimizer=name, gradient_clip=clip))
    state = optimizer.init(params)
    for _ in range(3):
        updates, state = optimizer.update(jax.tree.map(np.zeros_like, params), state, params)
        assert all(np.all(leaf == 0) for leaf in jax.tree.leaves(updates))
        assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(state))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_layer_whose_gradients_are_zero_stands_still_and_the_others_move(name):
    params, gradient = tree(0), tree(1)
    for leaf in jax.tree.leaves(gradient["layers_0_to_2"]):
        leaf[1] = 0
    optimizer = build_optimizer(keys(optimizer=name))
    updates, _ = optimizer.update(gradient, optimizer.init(params), params)
    for leaf in jax.tree.leaves(updates["layers_0_to_2"]):
        assert not np.any(leaf[1])
        assert np.all(np.isfinite(leaf))
        assert np.any(leaf[0])
        assert np.any(leaf[2])


def test_all_problems_are_told_together():
    with pytest.raises(UserError, match=r"2 problems.*train\.optimizer.*train\.beta1"):
        build_optimizer(keys(optimizer="sgd", beta1=1.5))


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"optimizer": "lion", "beta1": 0.8}, "config.train.beta1: lion does not read it; leave it at 0.9"),
        ({"optimizer": "adafactor", "epsilon": 1e-7}, "config.train.epsilon: adafactor does not read it"),
        ({"optimizer": "adamw", "muon_momentum": 0.9}, "config.train.muon_momentum: adamw does not read it"),
        ({"optimizer": "adamw", "muon_dtype": "bfloat16"}, "config.train.muon_dtype: adamw does not read it"),
        ({"optimizer": "muon", "lion_beta2": 0.9}, "leave it at 0.99, or take the optimizer lion"),
        ({"optimizer": "muon", "adafactor_parameter_scale": False}, "muon does not read it; leave it at True"),
        ({"schedule": "constant", "final_learning_rate_ratio": 0.0}, "constant does not read it; leave it at 0.1"),
        ({"schedule": "cosine", "decay_steps": 3}, "config.train.decay_steps: cosine does not read it"),
        ({"schedule": "wsd", "decay_steps": 3, "power_exponent": -1.0}, "wsd does not read it"),
    ],
)
def test_a_key_that_the_choice_does_not_read_is_an_error(values, told):
    with pytest.raises(UserError) as error:
        build_optimizer(keys(**values))
    assert told in str(error.value)
    assert "problems" not in str(error.value)
