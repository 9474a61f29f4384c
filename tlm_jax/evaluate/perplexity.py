"""Loss, perplexity and bits per byte of a model on a whole held-out split, each token once.

B windows of a batch, T time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import jax
from jax.sharding import Mesh

from tlm_jax.data.loader import validation_batches
from tlm_jax.data.store import MemoryStore, TokenStore
from tlm_jax.data.windows import Windows
from tlm_jax.model.functional import FunctionalDecoder, Parameters
from tlm_jax.train.step import Batch, make_eval_step
from tlm_jax.train.validation import evaluate

_AHEAD = 2  # batches dispatched before the oldest is waited for: enough to keep the device busy


def held_out_metrics(
    model: FunctionalDecoder,
    parameters: Parameters,
    mesh: Mesh,
    store: TokenStore | MemoryStore,
    *,
    sequence_length: int,
    batch_size: int,
    on_progress: Callable[[int, int], None] | None = None,
) -> dict[str, float | int]:
    """Evaluates the split "validation", cut into windows of `sequence_length` as in training.

    Args:
      store: made with the model's tokenizer.
      sequence_length: T; a token sees at most the T - 1 before it in its window, of its own document.
      batch_size: B over all hosts, a multiple of the mesh's batch shards; the result does not depend on it.
      on_progress: called with the batches done and their number.

    Returns:
      `loss` (nats per token), `perplexity`, `bits_per_byte`, `tokens`, `bytes`. Predicted are all tokens of a document
      and its end; bytes are those of its text.

    Raises:
      UserError: the split is empty.
    """
    total = -(-len(Windows(store, "validation", sequence_length)) // batch_size)
    eval_step = make_eval_step(model)
    running: deque[jax.Array] = deque()
    done = 0

    def watched_step(parameters: Parameters, batch: Batch) -> jax.Array:
        nonlocal done
        running.append(eval_step(parameters, batch))
        if len(running) > _AHEAD:
            jax.block_until_ready(running.popleft())
            done += 1
            if on_progress:
                on_progress(done, total)
        return running[-1]

    batches = validation_batches(
        store,
        sequence_length=sequence_length,
        batch_size=batch_size,
        host_index=jax.process_index(),
        host_count=jax.process_count(),
    )
    with jax.set_mesh(mesh):
        metrics = evaluate(watched_step, parameters, batches, mesh)
    if on_progress:
        on_progress(total, total)
    return metrics
