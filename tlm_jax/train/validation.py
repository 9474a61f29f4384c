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
) -> dict[str, float | int | None]:
    """Runs `eval_step` over all batches.

    The sums are added in float64 and divided once, at the end: neither padding nor batch size changes the result.
    `on_batch` is told the number of batches done. Returns `loss` (nats per token), `perplexity`, `bits_per_byte`,
    `tokens`, `bytes`; where the text's bytes are not known, None for them and for `bits_per_byte`.
    """
    sharding = batch_sharding(mesh)
    running: deque[dict[str, jax.Array]] = deque()
    sums, done = {"nats": 0.0, "tokens": 0, "bytes": 0}, 0

    def read_oldest() -> None:
        nonlocal done
        for key, value in jax.device_get(running.popleft()).items():
            sums[key] += value.item()
        done += 1
        on_batch(done)

    for batch in batches:
        running.append(eval_step(params, to_global({key: batch[key] for key in (*MODEL_KEYS, "bytes")}, sharding)))
        if len(running) > _AHEAD:
            read_oldest()
    while running:
        read_oldest()
    loss = sums["nats"] / max(sums["tokens"], 1)
    return {
        "loss": loss,
        "perplexity": math.exp(min(loss, 700.0)),
        "bits_per_byte": sums["nats"] / math.log(2) / sums["bytes"] if sums["bytes"] else None,
        "tokens": int(sums["tokens"]),
        "bytes": int(sums["bytes"]) or None,
    }
