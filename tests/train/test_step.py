"""The step: the same losses on any mesh, stacking and number of micro-batches; the non-finite guard."""

from __future__ import annotations

import re
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_run import BATCH, batches, build, losses, place, small_config

from tlm_jax.train.optimizer import OPTIMIZERS
from tlm_jax.train.step import loss_sum

# At this size matrices are factored only if asked to; Adafactor's steps are relative to the weights.
OWN_KEYS = {
    "adamw": {},
    "muon": {},
    "lion": {"learning_rate": 1e-3},
    "adafactor": {"learning_rate": 3e-2, "adafactor_min_factored": 16, "adafactor_momentum": 0.9},
}


def config_for(optimizer: str, **train):
    return small_config(optimizer=optimizer, **OWN_KEYS[optimizer], **train)


@cache
def reference(optimizer: str) -> np.ndarray:
    return losses(config_for(optimizer))


def test_the_reference_learns():
    assert set(OWN_KEYS) == set(OPTIMIZERS)
    for optimizer in OPTIMIZERS:
        assert reference(optimizer)[-1] < reference(optimizer)[0] - 0.5, optimizer


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("mesh", [(1, 8), (2, 4)], ids=["8 devices", "2x4 devices"])
def test_losses_do_not_depend_on_the_mesh(optimizer, mesh):
    np.testing.assert_allclose(losses(config_for(optimizer), mesh), reference(optimizer), atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_losses_do_not_depend_on_the_stacking(optimizer):
    config = config_for(optimizer)
    config.model.layer_stacking = "unrolled"
    np.testing.assert_allclose(losses(config), reference(optimizer), atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("count", "mesh"), [(4, (1, 1)), (2, (2, 4))], ids=["4 micro-batches", "2 on 2x4 devices"])
def test_losses_do_not_depend_on_the_number_of_micro_batches(optimizer, count, mesh):
    config = config_for(optimizer, gradient_accumulation=count)
    np.testing.assert_allclose(losses(config, mesh), reference(optimizer), atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("count", "mesh"), [(1, (1, 1)), (2, (2, 4))], ids=["at once", "2 on 2x4 devices"])
def test_the_z_loss_is_added_exactly_under_micro_batches_and_reported_apart(count, mesh):
    batch = batches(1)[0]
    first = []
    for config, sizes in ((small_config(gradient_accumulation=count, z_loss=0.05), mesh), (small_config(), (1, 1))):
        model, devices, state, step = build(config, sizes)
        params = jax.device_get(state["params"])
        with jax.set_mesh(devices):
            first.append(jax.device_get(step(state, place(batch, devices))[1]))
    got, without = first
    np.testing.assert_allclose(got["loss_sum"], without["loss_sum"], rtol=1e-6)
    assert without["z_loss_sum"] == 0

    @jax.jit
    @jax.value_and_grad
    def z_loss(params):  # of the last model built, which has one device
        bound = model.bind(params)
        hidden = bound.hidden(batch["inputs"], bound.at(batch["positions"], batch["segment_ids"]))[0]
        logsumexp = jnp.log(jnp.sum(jnp.exp(bound.logits(hidden)), axis=-1))
        return 0.05 * jnp.sum(jnp.square(logsumexp) * batch["mask"]) / batch["mask"].sum()

    value, gradient = z_loss(params)
    np.testing.assert_allclose(got["z_loss_sum"] / got["tokens"], value, rtol=1e-5)
    plain = jax.jit(jax.grad(lambda params: loss_sum(model, params, batch) / batch["mask"].sum()))(params)
    squares = jax.tree.map(lambda a, b: jnp.sum(jnp.square(a + b)), gradient, plain)
    assert got["gradient_norm"] == pytest.approx(float(np.sqrt(sum(jax.tree.leaves(squares)))), rel=1e-5)
    assert got["gradient_norm"] != pytest.approx(without["gradient_norm"], rel=1e-2)


def test_the_masks_of_micro_batches_are_very_unequal():
    counts = [batches(1)[0]["mask"][i::4].sum() for i in range(4)]
    assert max(counts) > 5 * min(counts)


def test_metrics_of_a_step_against_numpy():
    model, mesh, state, step = build(small_config())
    batch = batches(1)[0]
    before = jax.device_get(state["params"])
    with jax.set_mesh(mesh):
        state, metrics = step(state, place(batch, mesh))
    after, metrics = jax.device_get(state["params"]), jax.device_get(metrics)
    assert metrics["tokens"] == batch["mask"].sum()
    assert metrics["bytes"] == batch["bytes"].sum()
    norm = np.sqrt(sum(np.sum(np.square(x)) for x in jax.tree.leaves(before)))
    assert metrics["parameter_norm"] == pytest.approx(norm, rel=1e-5)
    change = np.sqrt(sum(np.sum(np.square(a - b)) for a, b in zip(*map(jax.tree.leaves, (after, before)), strict=True)))
    assert metrics["update_norm"] == pytest.approx(change, rel=1e-4)
    layer = jax.tree.map(lambda a, b: np.sum(np.square(a - b)), after["layers_0_to_1"], before["layers_0_to_1"])
    assert np.sum(np.square(metrics["norms"][1, :2])) == pytest.approx(sum(jax.tree.leaves(layer)), rel=1e-4)
    np.testing.assert_allclose(np.sqrt(np.sum(np.square(metrics["norms"][0]))), metrics["gradient_norm"], rtol=1e-5)
    assert metrics["norms"].shape == (3, len(model.profile.layers) + 1)


def poisoned(state, value):
    params = dict(state["params"], embedding=state["params"]["embedding"].at[5].set(value))
    return dict(state, params=params)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_step_that_is_not_finite_changes_nothing_and_is_counted(optimizer, value):
    _, mesh, state, step = build(config_for(optimizer))
    first, second, *_ = batches(2)
    with jax.set_mesh(mesh):
        state, _ = step(state, place(first, mesh))  # moments are not zero now
        state = poisoned(state, value)
        before = jax.device_get(state)
        state, metrics = step(state, place(second, mesh))
        after = jax.device_get(state)
        for key in ("params", "optimizer"):
            jax.tree.map(np.testing.assert_array_equal, after[key], before[key])
        assert (after["step"], after["skipped"], after["skipped_row"]) == (2, 1, 1)
        assert metrics["skipped_row"] == 1
        # A good step ends the row and goes on from the unchanged moments and schedule.
        state, metrics = step(poisoned(state, 0.01), place(second, mesh))
    assert (int(state["skipped"]), int(state["skipped_row"])) == (1, 0)
    assert not np.array_equal(state["params"]["final_norm"]["scale"], before["params"]["final_norm"]["scale"])
    peak = config_for(optimizer).train.learning_rate
    assert metrics["learning_rate"] == pytest.approx(peak * 2 / 4)  # the second of four warm-up steps


@pytest.mark.parametrize("optimizer", ["adamw", "adafactor"])
def test_gradients_and_state_keep_their_shardings(optimizer):
    _, mesh, state, step = build(config_for(optimizer), (2, 4))
    before = jax.tree.map(lambda leaf: leaf.sharding, state)
    assert any("fsdp" in str(s.spec) for s in jax.tree.leaves(before["optimizer"]))
    with jax.set_mesh(mesh):
        state, _ = step(state, place(batches(1)[0], mesh))
        state, _ = step(state, place(batches(1)[0], mesh))
    assert jax.tree.all(jax.tree.map(lambda leaf, s: leaf.sharding.is_equivalent_to(s, leaf.ndim), state, before))
    assert step._cache_size() == 1


def test_vectors_of_factored_moments_are_cut_where_they_divide():
    _, _, state, _ = build(config_for("adafactor"), (2, 4))
    wanted = {(2, 32): (None, "fsdp"), (2, 96): (None, "fsdp"), (264,): ("fsdp",), (2, 1): (None, None), (1,): (None,)}
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state["optimizer"]):
        names = [str(getattr(part, "name", "")) for part in path]
        if {"v_row", "v_col"} & set(names):
            found.setdefault(leaf.shape, set()).add(tuple(leaf.sharding.spec))
    assert {shape: found.get(shape) for shape in wanted} == {shape: {spec} for shape, spec in wanted.items()}


def test_no_collective_inside_muon_s_iterations():
    """Read from the compiled step of 2x4 devices: each device iterates on whole matrices, on its share of them."""
    _, mesh, state, step = build(config_for("muon"), (2, 4))
    with jax.set_mesh(mesh):
        text = step.lower(state, place(batches(1)[0], mesh)).compile().as_text()
    bodies = re.findall(r"= \(s32\[\], f32\[(\S+)\]\S* while\(.*body=%(\S+?),.*newton_schulz", text)
    # 14 square attention matrices on 8 devices are 2 each; the others are fewer than the devices.
    assert sorted(shape for shape, _ in bodies) == ["1,16,32", "1,32,96", "2,32,32"]
    for _, body in bodies:
        lines = text[text.index(f"%{body} ") :].split("\n}\n")[0]
        assert "NMK,NLK->NML/dot_general" in lines
        assert not re.search("all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter", lines)


def test_rows_of_a_micro_batch_come_from_every_device():
    assert BATCH % (4 * 2) == 0
    _, mesh, state, step = build(small_config(gradient_accumulation=2), (2, 2))
    with jax.set_mesh(mesh):
        text = step.lower(state, place(batches(1)[0], mesh)).compile().as_text()
    # Cutting the batch into micro-batches moves no token between devices.
    assert not any(
        "all-to-all" in line or ("s32[16,32]" in line and "all-gather" in line) for line in text.splitlines()
    )
