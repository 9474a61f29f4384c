"""The decoder built from a Profile.

B batch, T time, D a layer's d_model and at the end that of the embedding, V vocabulary, S cached time, N layers of a
stacked run.

Runs of equal neighbouring layers are stored stacked and scanned, so that a model compiles in the number of distinct
runs; what is stored where is a pure function of the Profile (`layout`).
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from tlm_jax.capacity.profile import Profile
from tlm_jax.capacity.shape import LayerShape
from tlm_jax.model.attention import LayerCache, Positions, empty_cache
from tlm_jax.model.block import Block
from tlm_jax.model.initial import deviations, embedding_deviation
from tlm_jax.model.layers import RMSNorm, embed, multiplied, parameter, soft_capped
from tlm_jax.model.loss import LossSums, loss_sums
from tlm_jax.model.remat import remat
from tlm_jax.model.settings import ModelSettings, exact_products
from tlm_jax.model.stream import Projection, Stream, resized, zero_padded
from tlm_jax.parallel.rules import pin_batch

# Folded into the key in the place of a layer's number, so that it depends on no depth.
OUTSIDE_LAYERS = 2**31 - 1


class Run(NamedTuple):
    """Layers `start` … `start + length - 1`, all of one shape, kept under one name."""

    name: str
    start: int
    length: int
    shape: LayerShape

    @property
    def stacked(self) -> bool:
        """Whether its leaves carry a leading layer axis and it is scanned."""
        return self.length > 1


def layout(profile: Profile, layer_stacking: str) -> tuple[Run, ...]:
    """How a profile's layers are stored: `layer_3` alone, `layers_4_to_9` stacked.

    Args:
      layer_stacking: "auto" stacks runs of equal neighbours, "unrolled" none.
    """
    runs: list[Run] = []
    for start, length, shape in profile.runs():
        if layer_stacking == "unrolled" or length == 1:
            runs.extend(Run(f"layer_{i}", i, 1, shape) for i in range(start, start + length))
        else:
            runs.append(Run(f"layers_{start}_to_{start + length - 1}", start, length, shape))
    return tuple(runs)


def layers_of(name: str) -> range | None:
    """The layers that a run of this name holds, more than one when it is stacked; None: `layout` names no run so."""
    named = re.fullmatch(r"layer_(\d+)|layers_(\d+)_to_(\d+)", name)
    if named is None:
        return None
    if named[1]:
        return range(int(named[1]), int(named[1]) + 1)
    return range(int(named[2]), int(named[3]) + 1)


def _create(run: Run, key: jax.Array, settings: ModelSettings, profile: Profile) -> Block:
    """One run's block, its leaves stacked over layers when the run is."""
    of_matrices = deviations(run.shape, settings, profile)
    if not run.stacked:
        return Block(key, run.start, run.shape, settings, of_matrices, profile.unwritten()[run.start])

    def create(layer: jax.Array) -> Block:
        return Block(key, layer, run.shape, settings, of_matrices)

    build = nnx.vmap(create, in_axes=0, out_axes=0, transform_metadata={nnx.PARTITION_NAME: None})
    return build(jnp.arange(run.start, run.start + run.length))


class Decoder(nnx.Module):
    """Token embedding, the blocks of a Profile, final norm, output embedding (tied or not).

    Args:
      profile: the layers' sizes.
      settings: what the layers share.
      key: threefry key; layer l is drawn from `fold_in(key, l)`.
    """

    def __init__(self, profile: Profile, settings: ModelSettings, key: jax.Array) -> None:
        self.profile, self.settings = profile, settings
        self.runs = layout(profile, settings.layer_stacking)
        width, deviation = profile.d_embedding, embedding_deviation(settings, profile)
        outside = jax.random.fold_in(key, OUTSIDE_LAYERS)
        self.embedding = parameter(
            outside, "embedding", (profile.vocab_size, width), ("vocabulary", "embed"), deviation
        )
        for run in self.runs:
            setattr(self, run.name, _create(run, key, settings, profile))
        for reader, widths in profile.projections().items():
            of_reader = jax.random.fold_in(key, reader if reader < len(profile.layers) else OUTSIDE_LAYERS)
            setattr(self, f"resize_{reader}", Projection(of_reader, *widths, settings.init_scale))
        self.final_norm = RMSNorm(outside, profile.d_final_norm, settings.norm_epsilon)
        if not profile.tied_embeddings:
            self.head = parameter(outside, "head", (width, profile.vocab_size), ("embed", "vocabulary"), deviation)

    def _resized(self, stream: Stream, width: int, reader: int) -> Stream:
        """The stream as a layer of this width reads it; the final norm is the reader behind the last layer."""
        if self.profile.resize == "carry_forward":
            return resized(stream, width)
        if self.profile.resize == "zero_padding":
            return zero_padded(stream, width)
        project = getattr(self, f"resize_{reader}", None)
        return stream if project is None else Stream(project(stream.x_BTD))

    def hidden(
        self, tokens_BT: jax.Array, at: Positions, cache: dict[str, LayerCache] | None = None
    ) -> tuple[jax.Array, dict[str, LayerCache]]:
        """Final hidden states [B, T, D] in the compute dtype, normalised; and the updated cache (empty without one).

        D is the embedding's width. The final norm sees all of a wider last layer, before its columns are cut to that.
        """
        with exact_products(self.settings):
            x_BTD = embed(self.embedding[...], tokens_BT, self.settings.dtype)
            stream = Stream(pin_batch(multiplied(x_BTD, self.settings.embedding_multiplier)))
            updated: dict[str, LayerCache] = {}
            for run in self.runs:
                x_BTD, parked = self._resized(stream, run.shape.d_model, run.start)
                block_definition, weights = nnx.split(getattr(self, run.name))

                def apply(
                    x_BTD: jax.Array, layer: tuple[Any, LayerCache | None], definition: Any = block_definition
                ) -> tuple[jax.Array, LayerCache | None]:
                    layer_weights, layer_cache = layer
                    return nnx.merge(definition, layer_weights)(x_BTD, at, layer_cache)

                apply = remat(apply, self.settings.remat, scanned=run.stacked)
                run_cache = None if cache is None else cache[run.name]
                with jax.named_scope(run.name):
                    if run.stacked:
                        # Only activations are carried; weights enter as scanned inputs and are never returned.
                        x_BTD, run_cache = jax.lax.scan(apply, x_BTD, (weights, run_cache))
                    else:
                        x_BTD, run_cache = apply(x_BTD, (weights, run_cache))
                if run_cache is not None:
                    updated[run.name] = run_cache
                stream = Stream(x_BTD, parked)
            stream = self._resized(stream, self.profile.d_final_norm, len(self.profile.layers))
        normal = Stream(self.final_norm(stream.x_BTD))
        return pin_batch(resized(normal, self.profile.d_embedding).x_BTD), updated

    def output_table(self) -> jax.Array:
        """The output embedding [V, D], float32."""
        return self.embedding[...] if self.profile.tied_embeddings else self.head[...].T

    def logits(self, hidden_BTD: jax.Array) -> jax.Array:
        """float32 logits [B, T, V]: for sampling and tests; training uses `loss_sums`."""
        table_VD = self.output_table().astype(hidden_BTD.dtype)
        hidden_BTD = multiplied(hidden_BTD, self.settings.logits_multiplier)
        with exact_products(self.settings):
            logits_BTV = jnp.einsum("BTD,VD->BTV", hidden_BTD, table_VD, preferred_element_type=jnp.float32)
        return soft_capped(logits_BTV, self.settings.final_soft_cap)

    def loss_sums(
        self,
        inputs_BT: jax.Array,
        targets_BT: jax.Array,
        mask_BT: jax.Array,
        segment_ids_BT: jax.Array,
        positions_BT: jax.Array,
        *,
        z_loss: float = 0.0,
    ) -> LossSums:
        """The sums over unmasked targets of the cross-entropy and of `z_loss` times the z-loss, in nats, float32."""
        hidden_BTD, _ = self.hidden(inputs_BT, self.at(positions_BT, segment_ids_BT))
        with exact_products(self.settings):
            return loss_sums(
                multiplied(hidden_BTD, self.settings.logits_multiplier),
                self.output_table(),
                targets_BT,
                mask_BT,
                self.settings.loss_chunk_tokens,
                soft_cap=self.settings.final_soft_cap,
                z_loss=z_loss,
            )

    @staticmethod
    def at(positions_BT: jax.Array, segment_ids_BT: jax.Array) -> Positions:
        """Positions of whole sequences, without a cache."""
        return {
            "positions": positions_BT,
            "segment_ids": segment_ids_BT,
            "slots": None,
        }


def init_cache(profile: Profile, settings: ModelSettings, batch: int, length: int) -> dict[str, LayerCache]:
    """An empty key/value cache of `length` tokens, each layer at its own heads and head_dim."""
    return {
        run.name: empty_cache(run.shape, settings, batch, length, (run.length,) if run.stacked else ())
        for run in layout(profile, settings.layer_stacking)
    }
