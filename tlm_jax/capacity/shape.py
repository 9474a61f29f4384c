"""One layer's static shape, its parameters and its matmul FLOPs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from tlm_jax.errors import UserError, raise_together

MIXERS = ("attention",)
GATED_MLPS = ("swiglu", "geglu", "reglu")
PLAIN_MLPS = ("gelu", "squared_relu")
MLPS = (*GATED_MLPS, *PLAIN_MLPS)


@dataclasses.dataclass(frozen=True)
class LayerShape:
    """The static shape of one decoder layer: hashable, so that layers of equal shape can be found and stacked.

    Attributes:
      d_model: width of the residual stream.
      d_ff: width of the MLP.
      num_heads: query heads.
      num_kv_heads: key and value heads; fewer than `num_heads` is grouped-query attention.
      head_dim: width of one head; even, for rotary embeddings.
      mixer: the token mixer, one of `MIXERS`.
      num_experts: experts that a token can be routed to; 0 for a dense MLP. With experts d_ff is 0.
      experts_per_token: experts that each token is routed to.
      expert_d_ff: width of one expert.
      padded_experts: experts stored beyond `num_experts` to which no token is routed, so that an axis divides them all.
      mlp: the MLP, one of `MLPS`: gated (three matrices) or plain (two).
      window: tokens that a token attends to, itself and those right before it; 0 for all before it.
      qk_norm: whether queries and keys are normalised, with one learned scale of head_dim values for each.

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
    padded_experts: int = 0
    mlp: str = "swiglu"
    window: int = 0
    qk_norm: bool = False

    def __post_init__(self) -> None:
        raise_together(shape_problems(dataclasses.asdict(self), "layer"))

    @property
    def attention_parameters(self) -> int:
        """Weights of wq, wk, wv and wo."""
        return 2 * self.d_model * (self.num_heads + self.num_kv_heads) * self.head_dim

    @property
    def mlp_matrices(self) -> int:
        """Matrices of an MLP: w_up and w_down, and w_gate if it is gated."""
        return 3 if self.mlp in GATED_MLPS else 2

    @property
    def matmul_parameters(self) -> int:
        """Weights in matrices: attention, and the MLP or the router with all experts but the padded ones."""
        expert_widths = self.num_experts * self.expert_d_ff
        mlp = self.mlp_matrices * self.d_model * (self.d_ff + expert_widths)
        return self.attention_parameters + mlp + self.num_experts * self.d_model

    @property
    def idle_parameters(self) -> int:
        """Those of `matmul_parameters` that do not multiply a token: the experts to which it is not routed."""
        idle_experts = self.num_experts - self.experts_per_token
        return self.mlp_matrices * self.d_model * self.expert_d_ff * idle_experts

    @property
    def padded_parameters(self) -> int:
        """Weights of the padded experts, which no other count includes."""
        return self.mlp_matrices * self.d_model * self.expert_d_ff * self.padded_experts

    @property
    def parameters(self) -> int:
        """All weights of the layer: the matrices and the scales of its RMSNorms; there are no biases."""
        return self.matmul_parameters + 2 * self.d_model + (2 * self.head_dim if self.qk_norm else 0)

    def context(self, sequence_length: int) -> int:
        """The most tokens that a token attends to: the window, or the sequence where that is shorter."""
        return min(self.window or sequence_length, sequence_length)

    def forward_flops_per_token(self, sequence_length: int, causal: bool = True) -> int:
        """Matmul FLOPs of the forward pass per token, two per multiply-add.

        Scores and context cost 4 · H · K for every token attended to. Full attention counts W = min(T, window) of them;
        `causal` counts what the mask keeps of the T × W band, T·W - W²/2 for the sequence (T²/2 without a window), and
        rounds the FLOPs per token down where T does not divide it.
        """
        T, W = sequence_length, self.context(sequence_length)
        heads = self.num_heads * self.head_dim
        products = 2 * (self.matmul_parameters - self.idle_parameters)
        return products + (2 * heads * W * (2 * T - W) // T if causal else 4 * heads * W)

    def kv_cache_values(self, context_length: int) -> int:
        """Numbers the layer keeps of a context when it decodes: a key and a value per KV head for each token in sight.

        Args:
          context_length: tokens of the context; no more than the window are kept.
        """
        return 2 * self.num_kv_heads * self.head_dim * self.context(context_length)


FIELDS = tuple(field.name for field in dataclasses.fields(LayerShape))
_POSITIVE = ("d_model", "num_heads", "num_kv_heads", "head_dim")
EXPERT_FIELDS = ("num_experts", "experts_per_token", "expert_d_ff", "padded_experts")


def is_integer(value: Any) -> bool:
    """Whether `value` is an integer; True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool)


def divisors(number: int) -> list[int]:
    """All of them, ascending."""
    small = [factor for factor in range(1, math.isqrt(number) + 1) if number % factor == 0]
    return sorted({*small, *(number // factor for factor in small)})


def integer_problems(values: Mapping[str, Any], where: str) -> list[UserError]:
    """The values, by name, that are no positive int32: ids, positions and axes are that."""
    problems = []
    for name, value in values.items():
        if not (is_integer(value) and value > 0):
            problems.append(UserError(f"must be a positive integer, not {value!r}", where=f"{where}.{name}"))
        elif value >= 2**31:
            problems.append(UserError(f"must be below 2^31, not {value}", where=f"{where}.{name}"))
    return problems


def shape_problems(fields: Mapping[str, Any], where: str) -> list[UserError]:
    """Everything that is wrong with the `LayerShape` fields given; a field that is not given is not judged.

    Args:
      fields: field name to value.
      where: put before the field's name in each problem.
    """
    given = {name: fields[name] for name in _POSITIVE if name in fields}
    if fields.get("num_experts", 0) == 0 and "d_ff" in fields:
        given["d_ff"] = fields["d_ff"]
    problems = integer_problems(given, where)
    sizes = {name: value for name, value in given.items() if not integer_problems({name: value}, where)}
    heads, kv_heads = sizes.get("num_heads", 0), sizes.get("num_kv_heads", 0)
    if heads and kv_heads and heads % kv_heads:
        nearest = min(divisors(heads), key=lambda d: abs(d - kv_heads))
        problems.append(
            UserError(
                f"{kv_heads} does not divide num_heads={heads}",
                where=f"{where}.num_kv_heads",
                mend=f"the nearest that does is {nearest}",
            )
        )
    if sizes.get("head_dim", 0) % 2:
        problems.append(
            UserError(f"must be even for rotary embeddings, not {sizes['head_dim']}", where=f"{where}.head_dim")
        )
    if fields.get("mixer", MIXERS[0]) not in MIXERS:
        problems.append(
            UserError(f"unknown mixer {fields['mixer']!r}", where=f"{where}.mixer", mend=f"one of {', '.join(MIXERS)}")
        )
    if fields.get("mlp", MLPS[0]) not in MLPS:
        problems.append(
            UserError(f"unknown MLP {fields['mlp']!r}", where=f"{where}.mlp", mend=f"one of {', '.join(MLPS)}")
        )
    window = fields.get("window", 0)
    if not is_integer(window) or window < 0:
        problems.append(UserError(f"must be 0 or a positive integer, not {window!r}", where=f"{where}.window"))
    if not isinstance(fields.get("qk_norm", False), bool):
        problems.append(UserError(f"must be true or false, not {fields['qk_norm']!r}", where=f"{where}.qk_norm"))
    return problems + _expert_problems(fields, where)


def _expert_problems(fields: Mapping[str, Any], where: str) -> list[UserError]:
    """What is wrong with the fields of experts."""
    given = {name: fields.get(name, 0) for name in EXPERT_FIELDS}
    counts = {name: value for name, value in given.items() if is_integer(value) and 0 <= value < 2**31}
    problems = [
        UserError(f"must be 0 or a positive int32, not {value!r}", where=f"{where}.{name}")
        for name, value in given.items()
        if name not in counts
    ]
    if problems:
        return problems
    experts, chosen = counts["num_experts"], counts["experts_per_token"]
    if not experts:
        return [
            UserError(f"must be 0 without experts, not {value}", where=f"{where}.{name}", mend="set num_experts")
            for name, value in counts.items()
            if value
        ]
    if not 1 <= chosen <= experts:
        what = f"{chosen} of num_experts={experts}"
        problems.append(UserError(what, where=f"{where}.experts_per_token", mend=f"from 1 to {experts} work"))
    if "expert_d_ff" in fields and not counts["expert_d_ff"]:
        problems.append(UserError("must be positive with experts, not 0", where=f"{where}.expert_d_ff"))
    if fields.get("d_ff", 0) != 0:
        what = f"must be 0 with experts, not {fields['d_ff']!r}"
        problems.append(UserError(what, where=f"{where}.d_ff", mend="expert_d_ff is the width of each"))
    return problems
