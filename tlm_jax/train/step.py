"""One training step and one evaluation step: pure functions over plain pytrees, each jitted once.

B sequences of the global batch, K micro-batches, T time, L layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from tlm_jax.model.decoder import layout
from tlm_jax.model.functional import FunctionalDecoder, Parameters
from tlm_jax.model.loss import LossSums
from tlm_jax.parallel.rules import pin_batch
from tlm_jax.train.state import State

Batch = dict[str, jax.Array]
Metrics = dict[str, jax.Array]
TrainStep = Callable[[State, Batch], tuple[State, Metrics]]
EvalStep = Callable[[Parameters, Batch], dict[str, jax.Array]]

# What the model reads of a batch; "bytes" [B] and "requests" [B, 2] are only summed.
MODEL_KEYS = ("inputs", "targets", "mask", "segment_ids", "positions")


def loss_sum(model: FunctionalDecoder, params: Parameters, batch: Batch) -> jax.Array:
    """Summed cross-entropy of a batch in nats, float32."""
    return loss_sums(model, params, batch).objective


def loss_sums(model: FunctionalDecoder, params: Parameters, batch: Batch, z_loss: float = 0.0) -> LossSums:
    """What training minimises, summed over a batch, and its parts."""
    return model.bind(params).loss_sums(*(batch[key] for key in MODEL_KEYS), z_loss=z_loss)


def micro_batches(batch: Batch, count: int) -> Batch:
    """The model's part of a batch, [B, …] to [K, B/K, …], so that every micro-batch is spread over all devices.

    No row moves to another device.
    """
    return {
        key: jax.vmap(pin_batch)(batch[key].reshape(-1, count, *batch[key].shape[1:]).swapaxes(0, 1))
        for key in MODEL_KEYS
    }


def _gradients(
    model: FunctionalDecoder,
    params: Parameters,
    batch: Batch,
    count: int,
    z_loss: float,
    place: Callable[[Parameters], Parameters],
) -> tuple[LossSums, Parameters]:
    """Losses and their gradients, summed over `count` micro-batches; `place` keeps the running sum where it belongs."""

    def objective(params: Parameters, batch: Batch) -> tuple[jax.Array, LossSums]:
        sums = loss_sums(model, params, batch, z_loss)
        return sums.objective, sums

    def value_and_grad(batch: Batch) -> tuple[LossSums, Parameters]:
        (_, sums), grads = jax.value_and_grad(objective, has_aux=True)(params, batch)
        return sums, grads

    if count == 1:
        return value_and_grad({key: batch[key] for key in MODEL_KEYS})

    def add(carry: Any, micro: Batch) -> tuple[Any, None]:
        sums, grads = jax.tree.map(jnp.add, carry, value_and_grad(micro))
        return (sums, place(grads)), None

    zero = (LossSums(*jnp.zeros(3, jnp.float32)), place(jax.tree.map(jnp.zeros_like, params)))
    return jax.lax.scan(add, zero, micro_batches(batch, count))[0]


def layer_sums_of_squares(tree: Any, model: FunctionalDecoder) -> jax.Array:
    """[L + 1] float32: the sum of squares of each layer's leaves, and last of all others'."""
    depth = len(model.profile.layers)
    total = jnp.zeros(depth + 1, jnp.float32)
    runs = {run.name: run for run in layout(model.profile, model.settings.layer_stacking)}
    for name, subtree in tree.items():
        for leaf in jax.tree.leaves(subtree):
            squares = jnp.square(leaf.astype(jnp.float32))
            run = runs.get(name)
            if run is None:
                total = total.at[depth].add(jnp.sum(squares))
            elif run.stacked:
                total = total.at[run.start : run.start + run.length].add(jnp.sum(squares, axis=range(1, leaf.ndim)))
            else:
                total = total.at[run.start].add(jnp.sum(squares))
    return total


_SPREAD = 1.4826  # a normal distribution's standard deviation over its median absolute deviation


def spike_limit(losses_W: jax.Array, deviations: float) -> jax.Array:
    """The loss above which a step is a spike, float32: median + `deviations` robust standard deviations of the last W.

    Infinite until W losses are known: NaN stands for one that is not.
    """
    median = jnp.median(losses_W)
    spread = _SPREAD * jnp.median(jnp.abs(losses_W - median))
    return jnp.where(jnp.all(jnp.isfinite(losses_W)), median + deviations * spread, jnp.inf)


def _spikes(state: State, loss: jax.Array, finite: jax.Array, deviations: float) -> tuple[jax.Array, State]:
    """The limit for this step's loss, and what becomes of the last losses; infinity and nothing where none are kept."""
    if "losses" not in state:
        return jnp.asarray(jnp.inf, jnp.float32), {}
    losses_W = state["losses"]
    oldest = state["step"] % losses_W.shape[0]
    # A spike is kept too, so that a lasting change is no spike for long.
    kept_W = losses_W.at[oldest].set(jnp.where(finite, loss, losses_W[oldest]))
    return spike_limit(losses_W, deviations), {"losses": kept_W}


def make_train_step(
    model: FunctionalDecoder,
    optimizer: optax.GradientTransformation,
    learning_rate: optax.Schedule,
    gradient_accumulation: int,
    abstract: State,
    z_loss: float = 0.0,
    ema_decay: float = 0.0,
    spike_deviations: float = 0.0,
) -> TrainStep:
    """Returns the jitted step `(state, batch) -> (state, metrics)`; the state is donated.

    Losses (cross-entropy and z-loss) and token counts are summed over micro-batches and divided once, so that the
    number of micro-batches does not matter, whatever the masks. If loss or gradient is not finite, parameters and
    optimizer stay as they were and the step is counted as skipped; so too where the state has the last losses and this
    one lies above `spike_limit`. Where the state has a moving average of the parameters, it moves by 1 - `ema_decay` of
    its distance to the new ones. Metrics: scalars `loss_sum` and `z_loss_sum` (nats), `tokens`, `bytes`,
    `gradient_norm`, `update_norm`, `parameter_norm`, `learning_rate`, `skipped`, `skipped_row`, `finite`,
    `spike_limit`, `requests` [2], and `norms` [3, L + 1]: gradient, update and parameter norm by layer, last the
    parameters outside layers.
    """
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)

    def place(grads: Parameters) -> Parameters:
        """Left to the compiler, gradients may come back replicated."""
        return jax.lax.with_sharding_constraint(grads, shardings["params"])

    def step(state: State, batch: Batch) -> tuple[State, Metrics]:
        tokens = jnp.sum(batch["mask"], dtype=jnp.int32)
        sums, grads = _gradients(model, state["params"], batch, gradient_accumulation, z_loss, place)
        grads = jax.tree.map(lambda g: g / jnp.maximum(tokens, 1), grads)
        grads = place(grads)
        updates, opt_state = optimizer.update(grads, state["optimizer"], state["params"])
        squares = jnp.stack([layer_sums_of_squares(tree, model) for tree in (grads, updates, state["params"])])
        norms = jnp.sqrt(jnp.sum(squares, axis=1))
        finite = jnp.isfinite(sums.objective) & jnp.isfinite(norms[0])
        new = {"params": optax.apply_updates(state["params"], updates), "optimizer": opt_state}
        if "ema" in state:
            new["ema"] = jax.tree.map(lambda e, p: e + (1 - ema_decay) * (p - e), state["ema"], new["params"])
        loss = sums.cross_entropy / jnp.maximum(tokens, 1)
        limit, losses = _spikes(state, loss, finite, spike_deviations)
        sound = finite & (loss <= limit)
        new = jax.tree.map(lambda a, b: jnp.where(sound, a, b), new, {key: state[key] for key in new})
        new |= losses
        new["step"] = state["step"] + 1
        new["skipped"] = state["skipped"] + jnp.where(sound, 0, 1)
        new["skipped_row"] = jnp.where(sound, 0, state["skipped_row"] + 1)
        metrics = {
            "loss_sum": sums.cross_entropy,
            "z_loss_sum": sums.z_loss,
            "tokens": tokens,
            "bytes": jnp.sum(batch["bytes"], dtype=jnp.int32),
            "gradient_norm": norms[0],
            "update_norm": norms[1],
            "parameter_norm": norms[2],
            "learning_rate": learning_rate(state["step"] - state["skipped"]),
            "skipped": new["skipped"],
            "skipped_row": new["skipped_row"],
            "requests": jnp.max(batch["requests"], axis=0),
            "norms": jnp.sqrt(squares),
            "finite": finite,
            "spike_limit": limit,
        }
        return new, metrics

    return jax.jit(step, donate_argnums=0, out_shardings=(shardings, shardings["step"]))


def make_eval_step(model: FunctionalDecoder) -> EvalStep:
    """Returns the jitted `(params, batch) -> sums`: float32 `nats`, int32 `tokens` and `bytes`."""

    def step(params: Parameters, batch: Batch) -> dict[str, jax.Array]:
        return {
            "nats": loss_sum(model, params, batch),
            "tokens": jnp.sum(batch["mask"], dtype=jnp.int32),
            "bytes": jnp.sum(batch["bytes"], dtype=jnp.int32),
        }

    return jax.jit(step)
