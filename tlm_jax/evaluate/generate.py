"""Generation: one compiled prefill, one compiled decode step, a key/value cache of each layer's own size.

B prompts of a batch, P prompt slots, S cache slots (P and the new tokens), D d_model, V vocabulary.

Prompts are padded on the left, so that all rows write the same cache slot at the same time; positions and segment ids
make a row's result independent of its padding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tlm_jax.capacity.profile import Profile
from tlm_jax.data.tokenizer import Tokenizer
from tlm_jax.errors import UserError, raise_together
from tlm_jax.evaluate.completion import Completion
from tlm_jax.evaluate.sampling import Sampling, sample
from tlm_jax.model.attention import check_kernels
from tlm_jax.model.decoder import init_cache
from tlm_jax.model.functional import FunctionalDecoder, Parameters
from tlm_jax.model.settings import ModelSettings

# Prompt slots come in steps of this: few shapes to compile, and lengths that the accelerators' attention kernels take.
PROMPT_BLOCK = {"cpu": 16}
ACCELERATOR_PROMPT_BLOCK = 128

State = dict[str, Any]


def prompt_slots(prompt_tokens: int, platform: str) -> int:
    """P for prompts of up to so many tokens."""
    block = PROMPT_BLOCK.get(platform, ACCELERATOR_PROMPT_BLOCK)
    return -(-prompt_tokens // block) * block


def check_prefill(profile: Profile, settings: ModelSettings, prompt_tokens: int) -> None:
    """Finds out before weights are loaded whether prompts can be attended to: padding makes segments of them.

    Raises:
      UserError: no attention kernel of the platform serves a layer.
    """
    slots = prompt_slots(prompt_tokens, settings.platform)
    try:
        check_kernels(profile, settings, with_segments=True, length=slots)
    except UserError as error:
        mend = "give prompts no longer than the layers' windows, or generate on the CPU (JAX_PLATFORMS=cpu)"
        raise UserError(error.what, where=f"prompts of up to {slots} tokens, padding included", mend=mend) from error


def generation_settings(settings: ModelSettings) -> ModelSettings:
    """The settings with which a model is best read for generation.

    On CPU no layers are stacked: a scan takes a copy of every layer's weights and cache, in each step anew, which costs
    more than all the products of a step.
    """
    return dataclasses.replace(settings, layer_stacking="unrolled") if settings.platform == "cpu" else settings


class Generator:
    """Generates tokens for batches of up to `batch_size` prompts; compiles once for all of them.

    Args:
      model: the decoder.
      parameters: its parameters.
      tokenizer: its begin-of-document and padding ids, and ids beyond its vocabulary, are never drawn.
      sampling: how tokens are drawn.
      batch_size: B; smaller batches are filled up.
      prompt_tokens: length of the longest prompt, begin-of-document included.
      max_new_tokens: how far a batch can be continued.
    """

    def __init__(
        self,
        model: FunctionalDecoder,
        parameters: Parameters,
        tokenizer: Tokenizer,
        sampling: Sampling,
        *,
        batch_size: int,
        prompt_tokens: int,
        max_new_tokens: int,
    ) -> None:
        self._model, self._parameters, self._sampling = model, parameters, sampling
        self._tokenizer = tokenizer
        self.batch_size, self._max_new_tokens = batch_size, max_new_tokens
        self._prompt_slots = prompt_slots(prompt_tokens, model.settings.platform)
        drawable_V = np.arange(model.profile.vocab_size) < tokenizer.vocab_size
        ends = {tokenizer.eos_id} if tokenizer.marks_documents else set()
        drawable_V[sorted({tokenizer.bos_id, tokenizer.pad_id} - ends)] = False
        self._drawable_V = drawable_V
        self.cache_slots = self._prompt_slots + max_new_tokens
        self.prefill = jax.jit(self._prefill)
        self.decode = jax.jit(self._decode, donate_argnums=1)

    @property
    def cache_bytes(self) -> int:
        """Bytes of the keys and values of a whole batch, each layer's at its own width."""
        settings, length = self._model.settings, self.cache_slots
        per_row = self._model.profile.kv_cache_bytes(length, bytes_per_value=settings.dtype.itemsize)
        return self.batch_size * per_row

    def stream(self, prompts: Sequence[Sequence[int]], keys: jax.Array) -> Iterator[np.ndarray]:
        """Yields the next token of every prompt, int32 [len(prompts)], up to `max_new_tokens` times.

        The device already works on a step while the caller looks at the step before.

        Args:
          prompts: token ids, begin-of-document included; at most `batch_size` prompts of at most `prompt_tokens`.
          keys: [len(prompts)], one key a prompt. What is drawn depends on the prompt and its key alone.
        """
        rows, slots = self.batch_size, self._prompt_slots
        tokens_BP = np.full((rows, slots), self._tokenizer.pad_id, np.int32)
        lengths_B = np.ones(rows, np.int32)
        tokens_BP[:, -1] = self._tokenizer.bos_id  # rows that only fill the batch
        for row, prompt in enumerate(prompts):
            tokens_BP[row, slots - len(prompt) :] = prompt
            lengths_B[row] = len(prompt)
        keys_B = keys[np.minimum(np.arange(rows), len(prompts) - 1)]
        state, tokens_B = self.prefill(self._parameters, tokens_BP, lengths_B, keys_B)
        for _ in range(self._max_new_tokens - 1):
            # Dispatched before the tokens it starts from are fetched.
            state, next_B = self.decode(self._parameters, state, tokens_B)
            yield np.asarray(tokens_B)[: len(prompts)]
            tokens_B = next_B
        yield np.asarray(tokens_B)[: len(prompts)]

    def _prefill(
        self, parameters: Parameters, tokens_BP: jax.Array, lengths_B: jax.Array, keys_B: jax.Array
    ) -> tuple[State, jax.Array]:
        """Fills the cache with the prompts and draws the first token."""
        model = self._model.bind(parameters)
        B, P = tokens_BP.shape
        padding_B1 = P - lengths_B[:, None]
        positions_BP = jnp.maximum(jnp.arange(P) - padding_B1, 0)
        segment_ids_BP = (jnp.arange(P) >= padding_B1).astype(jnp.int32)
        segment_ids_BS = jnp.pad(segment_ids_BP, ((0, 0), (0, self._max_new_tokens)))
        cache = init_cache(self._model.profile, self._model.settings, B, self.cache_slots)
        hidden_BPD, cache = model.hidden(
            tokens_BP,
            {
                "positions": positions_BP,
                "segment_ids": segment_ids_BP,
                "slots": {"write_index": jnp.int32(0), "segment_ids": segment_ids_BS},
            },
            cache,
        )
        drawn = jnp.int32(0)
        tokens_B = self._draw(model.logits(hidden_BPD[:, -1:])[:, 0], keys_B, drawn)
        state = {
            "cache": cache,
            "segment_ids_BS": segment_ids_BS,
            "lengths_B": lengths_B,
            "keys_B": keys_B,
            "drawn": drawn + 1,
        }
        return state, tokens_B

    def _decode(self, parameters: Parameters, state: State, tokens_B: jax.Array) -> tuple[State, jax.Array]:
        """Writes one token a row into the cache and draws the next. `drawn` counts the tokens drawn so far."""
        model, drawn = self._model.bind(parameters), state["drawn"]
        slot = self._prompt_slots + drawn - 1
        segment_ids_BS = state["segment_ids_BS"].at[:, slot].set(1)
        hidden_B1D, cache = model.hidden(
            tokens_B[:, None],
            {
                "positions": (state["lengths_B"] + drawn - 1)[:, None],
                "segment_ids": jnp.ones_like(tokens_B)[:, None],
                "slots": {"write_index": slot, "segment_ids": segment_ids_BS},
            },
            state["cache"],
        )
        next_B = self._draw(model.logits(hidden_B1D)[:, 0], state["keys_B"], drawn)
        return {**state, "cache": cache, "segment_ids_BS": segment_ids_BS, "drawn": drawn + 1}, next_B

    def _draw(self, logits_BV: jax.Array, keys_B: jax.Array, drawn: jax.Array) -> jax.Array:
        logits_BV = jnp.where(self._drawable_V, logits_BV, -jnp.inf)
        return sample(logits_BV, jax.vmap(jax.random.fold_in, (0, None))(keys_B, drawn), self._sampling)


def encode_prompts(
    prompts: Sequence[str], tokenizer: Tokenizer, max_new_tokens: int, context_length: int
) -> list[list[int]]:
    """The tokens of each prompt, after begin-of-document if documents have one. An empty prompt begins a document.

    Args:
      context_length: tokens the model was trained to see, T.

    Raises:
      UserError: a prompt and its new tokens are longer than the context, a prompt is no UTF-8, or it is empty and no id
        begins documents; every such prompt.
    """
    encoded, problems = [], []
    for number, prompt in enumerate(prompts, 1):
        try:
            tokens = [*([tokenizer.bos_id] if tokenizer.marks_documents else []), *tokenizer.encode(prompt)]
        except UnicodeEncodeError:
            problems.append(UserError("not valid UTF-8", where=f"prompt {number}"))
            continue
        if not tokens:
            what, mend = "empty, and no id begins a document in the run's data", "give text to go on from"
            problems.append(UserError(what, where=f"prompt {number}", mend=mend))
        if len(tokens) + max_new_tokens > context_length:
            problems.append(
                UserError(
                    f"{len(tokens)} tokens and {max_new_tokens} new ones do not fit the context of {context_length}",
                    where=f"prompt {number}",
                    mend="shorten it"
                    if len(tokens) >= context_length
                    else f"at most --max-new-tokens={context_length - len(tokens)} fit",
                )
            )
        encoded.append(tokens)
    raise_together(problems)
    return encoded


def complete(
    generator: Generator,
    prompts: Sequence[Sequence[int]],
    tokenizer: Tokenizer,
    *,
    seed: int,
    stop: Sequence[str] = (),
    on_text: Callable[[int, str], None] | None = None,
) -> list[Completion]:
    """Continues every prompt until its end, a stop string or the generator's length, batch by batch.

    Prompt i draws from `fold_in(key(seed), i)`, whatever the batch size.

    Args:
      prompts: token ids, begin-of-document included, none longer than the generator's `prompt_tokens`.
      on_text: called with a prompt's index and each new piece of its text as soon as that is certain.
    """
    completions = [
        Completion(tokenizer, stop, at_start=tokenizer.marks_documents and len(prompt) == 1) for prompt in prompts
    ]
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed, impl="threefry2x32"), np.arange(len(prompts)))

    def say(index: int, text: str) -> None:
        if text and on_text:
            on_text(index, text)

    for first in range(0, len(prompts), generator.batch_size):
        batch = range(first, min(first + generator.batch_size, len(prompts)))
        for tokens_B in generator.stream(prompts[batch.start : batch.stop], keys[batch.start : batch.stop]):
            for index, token in zip(batch, tokens_B, strict=True):
                say(index, completions[index].push(int(token)))
            if all(completions[index].finish_reason for index in batch):
                break
        for index in batch:
            say(index, completions[index].finish())
    return completions
