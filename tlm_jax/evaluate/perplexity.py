"""Loss, perplexity and bits per byte of a model on a whole held-out split, each token once.

B windows of a batch, T time.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
from jax.sharding import Mesh

from tlm_jax.data.loader import validation_batches
from tlm_jax.data.mixture import AnyStore
from tlm_jax.data.windows import cut
from tlm_jax.model.functional import FunctionalDecoder, Parameters
from tlm_jax.train.step import make_eval_step
from tlm_jax.train.validation import evaluate


def held_out_metrics(
    model: FunctionalDecoder,
    parameters: Parameters,
    mesh: Mesh,
    store: AnyStore,
    *,
    sequence_length: int,
    batch_size: int,
    on_progress: Callable[[int, int], None] | None = None,
) -> dict[str, float | int | None]:
    """Evaluates the split "validation", cut into windows of `sequence_length` as in training.

    Args:
      store: made with the model's tokenizer.
      sequence_length: T; a token sees at most the T - 1 before it in its window, of its own document.
      batch_size: B over all hosts, a multiple of the mesh's batch shards; the result does not depend on it.
      on_progress: called with the batches done and their number.

    Returns:
      `loss` (nats per token), `perplexity`, `bits_per_byte`, `tokens`, `bytes`; None where bytes are not known.
      Predicted are all tokens of a document and its end; bytes are those of its text.

    Raises:
      UserError: the split is empty.
    """
    total = -(-len(cut(store, "validation", sequence_length)) // batch_size)
    batches = validation_batches(
        store,
        sequence_length=sequence_length,
        batch_size=batch_size,
        host_index=jax.process_index(),
        host_count=jax.process_count(),
    )
    progress = (lambda done: on_progress(done, total)) if on_progress else (lambda done: None)
    with jax.set_mesh(mesh):
        return evaluate(make_eval_step(model), parameters, batches, mesh, progress)
