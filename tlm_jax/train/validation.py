"""Loss over a fixed set of windows, each token once: in the training loop and for `tlm eval`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

import jax
import numpy as np
from jax.sharding import Mesh

from tlm_jax.model.functional import Parameters
from tlm_jax.parallel.devices import to_global
from tlm_jax.parallel.rules import batch_sharding
from tlm_jax.train.step import MODEL_KEYS, Batch


def evaluate(
    eval_step: Callable[[Parameters, Batch], jax.Array],
    params: Parameters,
    batches: Iterable[Mapping[str, np.ndarray]],
    mesh: Mesh,
) -> dict[str, float | int]:
    """Runs `eval_step` over all batches.

    The sums are divided once, at the end: neither padding nor batch size changes the result. Returns `loss` (nats per
    token), `perplexity`, `bits_per_byte`, `tokens`, `bytes`.
    """
    sharding = batch_sharding(mesh)
    pending = [
        eval_step(params, to_global({key: batch[key] for key in (*MODEL_KEYS, "bytes")}, sharding)) for batch in batches
    ]
    sums = np.sum(np.asarray(jax.device_get(pending), np.float64), axis=0)
    nats, tokens, num_bytes = (float(value) for value in sums)
    loss = nats / max(tokens, 1)
    return {
        "loss": loss,
        "perplexity": math.exp(min(loss, 700.0)),
        "bits_per_byte": nats / math.log(2) / max(num_bytes, 1),
        "tokens": int(tokens),
        "bytes": int(num_bytes),
    }
