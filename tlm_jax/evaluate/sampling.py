"""Sampling the next token from logits: greedy, temperature, top-k, top-p.

B batch, V vocabulary, C candidates left by top-k.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from tlm_jax.errors import UserError, raise_together


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn; static in a compiled step.

    Attributes:
      temperature: divides the logits; 0 takes the most likely token and ignores the rest.
      top_k: only the k most likely tokens can be drawn (Fan et al. 2018, arXiv 1805.04833); 0: all.
      top_p: of those, only the smallest set of most likely tokens whose probabilities sum to at least p (Holtzman et
        al. 2019, arXiv 1904.09751); 1: all.

    Raises:
      UserError: every value out of range, together.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        problems = []
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            problems.append(UserError(f"must be at least 0, not {self.temperature}", where="temperature"))
        if self.top_k < 0:
            problems.append(UserError(f"must be at least 0 (0: all tokens), not {self.top_k}", where="top-k"))
        if not 0 < self.top_p <= 1:
            problems.append(UserError(f"must be above 0 and at most 1, not {self.top_p}", where="top-p"))
        raise_together(problems)


def sample(logits_BV: jax.Array, keys_B: jax.Array, sampling: Sampling) -> jax.Array:
    """Draws one token a row.

    Args:
      logits_BV: float32; -inf for tokens that cannot be drawn.
      keys_B: one key a row, so that a row's draw does not depend on the others.
      sampling: static.

    Returns:
      int32 [B].
    """
    if sampling.temperature == 0:
        return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
    logits_BV = logits_BV / sampling.temperature
    if sampling.top_k == 0 and sampling.top_p == 1:
        return jax.vmap(jax.random.categorical)(keys_B, logits_BV).astype(jnp.int32)
    vocab_size = logits_BV.shape[-1]
    logits_BC, tokens_BC = jax.lax.top_k(logits_BV, min(sampling.top_k or vocab_size, vocab_size))
    if sampling.top_p < 1:
        probabilities_BC = jax.nn.softmax(logits_BC, axis=-1)
        # What is more likely than a token does not reach p yet: so the token that crosses p, and the first, stay.
        before_BC = jnp.cumsum(probabilities_BC, axis=-1) - probabilities_BC
        logits_BC = jnp.where(before_BC < sampling.top_p, logits_BC, -jnp.inf)
    choice_B = jax.vmap(jax.random.categorical)(keys_B, logits_BC)
    return jnp.take_along_axis(tokens_BC, choice_B[:, None], axis=-1)[:, 0].astype(jnp.int32)
