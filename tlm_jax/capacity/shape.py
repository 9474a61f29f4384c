"""One layer's static shape, its parameters and its matmul FLOPs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from tlm_jax.errors import UserError, raise_together

MIXERS = ("attention",)


@dataclasses.dataclass(frozen=True)
class LayerShape:
    """The static shape of one decoder layer: hashable, so that layers of equal shape can be found and stacked.

    Attributes:
      d_model: width of the residual stream.
      d_ff: width of the gated MLP.
      num_heads: query heads.
      num_kv_heads: key and value heads; fewer than `num_heads` is grouped-query attention.
      head_dim: width of one head; even, for rotary embeddings.
      mixer: the token mixer, one of `MIXERS`.
      num_experts, experts_per_token, expert_d_ff: 0 for a dense MLP, the only kind so far.

    Raises:
      UserError: every field that cannot be, together.
    """

    d_model: int
    d_ff: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mixer: str = "attention"
    num_experts: int = 0
    experts_per_token: int = 0
    expert_d_ff: int = 0

    def __post_init__(self) -> None:
        raise_together(shape_problems(dataclasses.asdict(self), "layer"))

    @property
    def matmul_parameters(self) -> int:
        """Weights that multiply every token: wq, wk, wv, wo, w_gate, w_up and w_down."""
        attention = 2 * self.d_model * (self.num_heads + self.num_kv_heads) * self.head_dim
        return attention + 3 * self.d_model * self.d_ff

    @property
    def parameters(self) -> int:
        """All weights of the layer: the matmuls and the scales of its two RMSNorms; there are no biases."""
        return self.matmul_parameters + 2 * self.d_model

    def forward_flops_per_token(self, sequence_length: int, causal: bool = True) -> int:
        """Matmul FLOPs of the forward pass per token, two per multiply-add.

        Scores and context cost 4 · T · H · K per token in full attention; `causal` counts half of that.
        """
        full_attention = 4 * sequence_length * self.num_heads * self.head_dim
        return 2 * self.matmul_parameters + (full_attention // 2 if causal else full_attention)

    def kv_cache_values_per_token(self) -> int:
        """Numbers the layer keeps per token of context when it decodes: one key and one value per KV head."""
        return 2 * self.num_kv_heads * self.head_dim


FIELDS = tuple(field.name for field in dataclasses.fields(LayerShape))
_POSITIVE = ("d_model", "d_ff", "num_heads", "num_kv_heads", "head_dim")
_EXPERTS = ("num_experts", "experts_per_token", "expert_d_ff")


def is_integer(value: Any) -> bool:
    """Whether `value` is an integer; True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool)


def shape_problems(fields: Mapping[str, Any], where: str) -> list[UserError]:
    """Everything that is wrong with the `LayerShape` fields given; a field that is not given is not judged.

    Args:
      fields: field name to value.
      where: put before the field's name in each problem.
    """
    problems = [
        UserError(f"must be a positive integer, not {fields[name]!r}", where=f"{where}.{name}")
        for name in _POSITIVE
        if name in fields and not (is_integer(fields[name]) and fields[name] > 0)
    ]
    sizes = {name: fields[name] for name in _POSITIVE if name in fields and is_integer(fields[name])}
    heads, kv_heads = sizes.get("num_heads", 0), sizes.get("num_kv_heads", 0)
    if heads > 0 and kv_heads > 0 and heads % kv_heads:
        divisors = [d for d in range(1, heads + 1) if heads % d == 0]
        nearest = min(divisors, key=lambda d: abs(d - kv_heads))
        problems.append(
            UserError(
                f"{kv_heads} does not divide num_heads={heads}",
                where=f"{where}.num_kv_heads",
                mend=f"the nearest that does is {nearest}",
            )
        )
    if sizes.get("head_dim", 0) > 0 and sizes["head_dim"] % 2:
        problems.append(
            UserError(f"must be even for rotary embeddings, not {sizes['head_dim']}", where=f"{where}.head_dim")
        )
    if fields.get("mixer", MIXERS[0]) not in MIXERS:
        problems.append(
            UserError(f"unknown mixer {fields['mixer']!r}", where=f"{where}.mixer", mend=f"one of {', '.join(MIXERS)}")
        )
    problems += [
        UserError(f"must be 0, not {fields[name]!r}: layers of experts are not supported", where=f"{where}.{name}")
        for name in _EXPERTS
        if fields.get(name, 0) != 0 or isinstance(fields.get(name, 0), bool)
    ]
    return problems
