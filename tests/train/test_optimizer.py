"""Optimizers act on each layer alone, whatever the stacking; decay goes by name."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tlm_jax.config import default_config
from tlm_jax.errors import UserError
from tlm_jax.train.optimizer import build_optimizer, decay_mask, learning_rate_schedule

LAYERS = 3


def keys(**values):
    train = default_config().train
    train.update({"num_steps": 10, "warmup_steps": 1, "learning_rate": 0.1, "weight_decay": 0.0} | values)
    return train


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
    for gradient in gradients:
        updates, state = optimizer.update(gradient, state, params)
        params = optax.apply_updates(params, updates)
    return params


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_stack_is_treated_as_its_layers(name):
    optimizer = build_optimizer(keys(optimizer=name, weight_decay=0.1))
    gradients = [tree(i) for i in (1, 2, 3)]
    stacked = unstacked(run(optimizer, tree(0), gradients))
    alone = run(optimizer, unstacked(tree(0)), [unstacked(g) for g in gradients])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), stacked, alone)


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


@pytest.mark.parametrize("name", ["adamw", "muon"])
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
    assert decay_mask(params, ("mlp",))["layers_0_to_2"]["mlp"]["w_up"] is False


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_moments_are_float32_whatever_the_parameters_are(name):
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree(0))
    state = build_optimizer(keys(optimizer=name)).init(params)
    first = [leaf.dtype for leaf in jax.tree.leaves(state) if jnp.ndim(leaf) > 1]
    assert first.count(jnp.float32) >= len(jax.tree.leaves(params))


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_zero_gradients_move_nothing(name, clip):
    params = tree(0)
    optimizer = build_optimizer(keys(optimizer=name, gradient_clip=clip))
    updates, _ = optimizer.update(jax.tree.map(np.zeros_like, params), optimizer.init(params), params)
    assert all(np.all(leaf == 0) for leaf in jax.tree.leaves(updates))


def test_schedule_warms_up_and_ends_where_it_should():
    schedule = learning_rate_schedule(
        keys(num_steps=100, warmup_steps=10, learning_rate=1.0, final_learning_rate_ratio=0.1)
    )
    assert schedule(0) == pytest.approx(0.1)
    assert schedule(9) == pytest.approx(1.0)
    assert schedule(54) == pytest.approx(0.1 + 0.9 * 0.5, abs=0.01)  # half of the cosine
    assert schedule(99) == pytest.approx(0.1)


def test_all_problems_are_told_together():
    with pytest.raises(UserError, match=r"2 problems.*train\.optimizer.*train\.beta1"):
        build_optimizer(keys(optimizer="sgd", beta1=1.5))
