"""A model's capacity: the shape of every layer, and what follows from it exactly."""

from __future__ import annotations

import dataclasses
import itertools
import json
import operator
from collections.abc import Sequence
from typing import Any

from tlm_jax.capacity.shape import FIELDS, LayerShape, integer_problems, shape_problems
from tlm_jax.capacity.table import layer_table
from tlm_jax.capacity.widths import RESIZES, out_of_reach
from tlm_jax.errors import UserError, raise_together
from tlm_jax.files import parse_json


@dataclasses.dataclass(frozen=True)
class Profile:
    """The layers of a decoder with its vocabulary: everything that fixes its parameters and FLOPs.

    Attributes:
      layers: the shape of each layer, first to last. Where d_model varies, the residual stream is one buffer as wide as
        the widest layer, of which each layer reads and writes the first d_model coordinates; what it does not reach
        passes by unchanged ("carry-forward", Variable-Width Transformers, arXiv 2606.18246). It has no weights, unless
        `resize` is projection.
      vocab_size: rows of the token embedding.
      d_embedding: width of the embedding and of the vocabulary projection, which read and write the first so many.
      tied_embeddings: whether the vocabulary projection is the embedding's transpose.
      resize: how the residual stream changes its width, one of `widths.RESIZES`.

    Raises:
      UserError: a field that cannot be.
    """

    layers: tuple[LayerShape, ...]
    vocab_size: int
    d_embedding: int
    tied_embeddings: bool = True
    resize: str = RESIZES[0]

    def __post_init__(self) -> None:
        problems = integer_problems({"vocab_size": self.vocab_size, "d_embedding": self.d_embedding}, "profile")
        if not self.layers:
            problems.append(UserError("there are no layers", where="profile.layers"))
        if self.resize not in RESIZES:
            what = f"{self.resize!r} is not one of {', '.join(RESIZES)}"
            problems.append(UserError(what, where="profile.resize"))
        raise_together(problems)

    @property
    def d_final_norm(self) -> int:
        """Width of the final norm: it acts before a last layer's coordinates are cut to the embedding's width."""
        return max(self.layers[-1].d_model, self.d_embedding)

    @property
    def non_embedding_parameters(self) -> int:
        """All parameters but the token embedding and an untied head: layers, the final norm's scale, projections."""
        return sum(layer.parameters for layer in self.layers) + self.d_final_norm + self._projection_parameters

    def projections(self) -> dict[int, tuple[int, int]]:
        """Where resize=projection has a matrix: the layer that reads its result, to the widths from and to.

        The final norm counts as the layer behind the last; it cuts what is too wide for the embedding without one.
        """
        if self.resize != "projection":
            return {}
        widths = [self.d_embedding, *(layer.d_model for layer in self.layers), self.d_final_norm]
        return {index: pair for index, pair in enumerate(itertools.pairwise(widths)) if pair[0] != pair[1]}

    @property
    def _projection_parameters(self) -> int:
        return sum(before * after for before, after in self.projections().values())

    @property
    def parameters(self) -> int:
        """All parameters, the token embedding and an untied head included, padded experts not: the raw count."""
        tables = 1 if self.tied_embeddings else 2
        return self.non_embedding_parameters + tables * self.vocab_size * self.d_embedding

    @property
    def effective_parameters(self) -> int:
        """Parameters less the matrices' weights without effect, the count that the paper matches (its appendix A).

        Those multiply coordinates that no earlier layer has written, or write some that nothing reads afterwards. They
        are there only where d_model varies. The final norm's statistics, which see all of the last layer's coordinates,
        are not taken for a use, nor norm scales for unused, as in the paper.
        """
        return self.parameters - self._without_effect([layer.num_experts for layer in self.layers])

    @property
    def active_parameters(self) -> int:
        """Effective parameters less the experts that a token is not routed to, and their part of what has no effect."""
        idle = sum(layer.idle_parameters for layer in self.layers)
        return self.parameters - idle - self._without_effect([layer.experts_per_token for layer in self.layers])

    @property
    def padded_parameters(self) -> int:
        """Weights of padded experts: held in memory, in no other count."""
        return sum(layer.padded_parameters for layer in self.layers)

    def unwritten(self) -> list[int]:
        """How many of each layer's coordinates come to it as zeros, since nothing before it is so wide."""
        return self._out_of_reach()[0]

    def _out_of_reach(self) -> list[list[int]]:
        found = out_of_reach([layer.d_model for layer in self.layers], self.d_embedding, self.resize)
        return [coordinates.tolist() for coordinates in found]

    def _without_effect(self, experts: Sequence[int]) -> int:
        """Weights in matrices without effect, counting as many experts of each layer."""
        fresh, unread = self._out_of_reach()
        reads = [(layer.num_heads + 2 * layer.num_kv_heads) * layer.head_dim for layer in self.layers]
        writes = [layer.d_ff + n * layer.expert_d_ff for layer, n in zip(self.layers, experts, strict=True)]
        return sum(map(operator.mul, fresh, reads)) + sum(map(operator.mul, unread, writes))

    def forward_flops_per_token(self, sequence_length: int, causal: bool = True) -> int:
        """Matmul FLOPs of the forward pass per token: the layers and the vocabulary projection, no embedding lookup.

        Of experts, those that a token is routed to count; weights without effect do not (see `effective_parameters`).

        Args:
          sequence_length: tokens of context, T.
          causal: count what a causal mask keeps of each layer's attention matrix, the half of it or the band of its
            window; otherwise all of it, or as many keys for every token as the window has.
        """
        layers = sum(layer.forward_flops_per_token(sequence_length, causal) for layer in self.layers)
        without_effect = self._without_effect([layer.experts_per_token for layer in self.layers])
        return layers + 2 * (self._projection_parameters + self.vocab_size * self.d_embedding - without_effect)

    def train_flops_per_token(self, sequence_length: int, causal: bool = True) -> int:
        """Matmul FLOPs of a training step per token: the backward pass costs two forward passes."""
        return 3 * self.forward_flops_per_token(sequence_length, causal)

    def kv_cache_bytes_per_token(self, bytes_per_value: int = 2) -> int:
        """Bytes of keys and values per token of a context that no window cuts; 2 bytes a value is bfloat16."""
        return self.kv_cache_bytes(1, bytes_per_value)

    def kv_cache_bytes(self, context_length: int, bytes_per_value: int = 2) -> int:
        """Bytes of keys and values kept of a whole context; a layer with a window keeps no more tokens than that."""
        return bytes_per_value * sum(layer.kv_cache_values(context_length) for layer in self.layers)

    def runs(self) -> tuple[tuple[int, int, LayerShape], ...]:
        """Runs of equal neighbours, each as (index of its first layer, number of layers, shape)."""
        found: list[tuple[int, int, LayerShape]] = []
        start = 0
        for shape, group in itertools.groupby(self.layers):
            length = len(list(group))
            found.append((start, length, shape))
            start += length
        return tuple(found)

    def describe(self) -> str:
        """The layers as a text table, widths drawn as bars."""
        return layer_table(self.layers)

    def to_dict(self) -> dict[str, Any]:
        """The profile as plain values, for JSON."""
        return {
            "layers": [dataclasses.asdict(layer) for layer in self.layers],
            "vocab_size": self.vocab_size,
            "d_embedding": self.d_embedding,
            "tied_embeddings": self.tied_embeddings,
            "resize": self.resize,
        }

    def to_json(self) -> str:
        """The profile as JSON text; `from_json` inverts it."""
        return json.dumps(self.to_dict(), indent=1)

    @classmethod
    def from_json(cls, text: str, where: str = "profile") -> Profile:
        """Reads `to_json`'s text, or that of `tlm profile --json`, whose totals are computed again.

        Args:
          text: the JSON.
          where: the file's name, put first in an error.

        Raises:
          UserError: not JSON, or not a profile; all faulty layers are told together.
        """
        try:
            values = parse_json(text)
        except ValueError as error:
            raise UserError(f"not JSON: {error}", where=where) from error
        if not isinstance(values, dict) or not isinstance(values.get("layers"), list):
            raise UserError(
                "not a profile: no list `layers`", where=where, mend="write one with `tlm profile --config=F --json`"
            )
        problems: list[UserError] = []
        for index, layer in enumerate(values["layers"]):
            problems += _layer_problems(layer, f"{where}: layers[{index}]")
        problems += [
            UserError("missing", where=f"{where}: {key}")
            for key in ("vocab_size", "d_embedding", "tied_embeddings")
            if key not in values
        ]
        if not isinstance(values.get("tied_embeddings", True), bool):
            problems.append(UserError("must be true or false", where=f"{where}: tied_embeddings"))
        raise_together(problems)
        try:
            return cls(
                tuple(LayerShape(**layer) for layer in values["layers"]),
                values["vocab_size"],
                values["d_embedding"],
                values["tied_embeddings"],
                values.get("resize", RESIZES[0]),
            )
        except UserError as error:
            raise UserError(str(error), where=where) from error


def _layer_problems(layer: Any, where: str) -> list[UserError]:
    """What is wrong with one element of a JSON's `layers`."""
    if not isinstance(layer, dict):
        return [UserError("not an object with a layer's fields", where=where)]
    required = [field.name for field in dataclasses.fields(LayerShape) if field.default is dataclasses.MISSING]
    problems = [UserError("missing", where=f"{where}.{name}") for name in required if name not in layer]
    problems += [UserError("unknown field", where=f"{where}.{name}") for name in layer if name not in FIELDS]
    return problems + shape_problems(layer, where)
