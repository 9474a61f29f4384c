"""Loss over a fixed set of windows, each token once: in the training loop and for `tlm eval`."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping

import jax
import numpy as np
from jax.sharding import Mesh

from tlm_jax.model.functional import Parameters
from tlm_jax.parallel.devices import to_global
from tlm_jax.parallel.rules import batch_sharding
from tlm_jax.train.step import MODEL_KEYS, EvalStep

_AHEAD = 2  # batches dispatched before the oldest is read: enough to keep the device busy


def evaluate(
    eval_step: EvalStep,
    params: Parameters,
    batches: Iterable[Mapping[str, np.ndarray]],
    mesh: Mesh,
    on_batch: Callable[[int], None] = lambda done: None,
) -> dict[str, float | int]:
    """Runs `eval_step` over all batches.

    The sums are added in float64 and divided once, at the end: neither padding nor batch size changes the result.
    `on_batch` is told the number of batches done. Returns `loss` (nats per token), `perplexity`, `bits_per_byte`,
    `tokens`, `bytes`.
    """
    sharding = batch_sharding(mesh)
    running: deque[jax.Array] = deque()
    sums, done = np.zeros(3, np.float64), 0

    def read_oldest() -> None:
        nonlocal sums, done
        sums = sums + jax.device_get(running.popleft())
        done += 1
        on_batch(done)

    for batch in batches:
        running.append(eval_step(params, to_global({key: batch[key] for key in (*MODEL_KEYS, "bytes")}, sharding)))
        if len(running) > _AHEAD:
            read_oldest()
    while running:
        read_oldest()
    nats, tokens, num_bytes = (float(value) for value in sums)
    loss = nats / max(tokens, 1)
    return {
        "loss": loss,
        "perplexity": math.exp(min(loss, 700.0)),
        "bits_per_byte": nats / math.log(2) / max(num_bytes, 1),
        "tokens": int(tokens),
        "bytes": int(num_bytes),
    }
