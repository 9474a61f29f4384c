"""What a profile costs, as named numbers: the totals of `tlm profile`, its JSON and the report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tlm_jax.capacity.profile import Profile

# Key -> how people read it. FLOPs are of matmuls, per token, at the config's sequence length.
LABELS = {
    "d_model_sum": "sum of d_model",
    "d_ff_sum": "sum of d_ff",
    "parameters": "parameters",
    "effective_parameters": "parameters with an effect",
    "active_parameters": "parameters active for a token",
    "padded_parameters": "parameters of padded experts, beside these",
    "non_embedding_parameters": "parameters without embeddings",
    "forward_flops_per_token": "forward FLOPs per token, causal",
    "forward_flops_per_token_full_attention": "forward FLOPs per token, full attention",
    "train_flops_per_token": "training FLOPs per token, causal",
    "train_flops_per_token_full_attention": "training FLOPs per token, full attention",
    "kv_cache_bytes_per_token": "KV cache bytes per token, bfloat16",
    "kv_cache_bytes": "KV cache bytes of a whole sequence, bfloat16",
}

# Shown where they say something: key -> the key whose value it has in most models; None: it is 0 there.
_UNUSUAL = {
    "effective_parameters": "parameters",
    "active_parameters": "effective_parameters",
    "padded_parameters": None,
}

WIDTHS = ("d_model", "d_ff", "expert_d_ff")  # a layer's, compared one by one
TRAIN_TOKENS = "train_tokens"  # beside the totals of a profile: those that a run is trained on
# What two runs must have the same of for a difference between them to be one of kind, not of size.
EQUAL = {
    "parameters": "parameters",
    "train_flops_per_token": "training FLOPs per token",
    TRAIN_TOKENS: "training tokens",
}


def unequal(a: Mapping[str, int | None], b: Mapping[str, int | None]) -> list[str]:
    """The keys of `EQUAL` by which two budgets differ; None: not known."""
    return [key for key in EQUAL if a[key] != b[key]]


def budget(profile: Profile, sequence_length: int) -> dict[str, int]:
    """The totals of a profile, by the keys of `LABELS`, at a context of `sequence_length` tokens."""
    return {
        "d_model_sum": sum(layer.d_model for layer in profile.layers),
        "d_ff_sum": sum(layer.d_ff + layer.num_experts * layer.expert_d_ff for layer in profile.layers),
        "parameters": profile.parameters,
        "effective_parameters": profile.effective_parameters,
        "active_parameters": profile.active_parameters,
        "padded_parameters": profile.padded_parameters,
        "non_embedding_parameters": profile.non_embedding_parameters,
        "forward_flops_per_token": profile.forward_flops_per_token(sequence_length),
        "forward_flops_per_token_full_attention": profile.forward_flops_per_token(sequence_length, causal=False),
        "train_flops_per_token": profile.train_flops_per_token(sequence_length),
        "train_flops_per_token_full_attention": profile.train_flops_per_token(sequence_length, causal=False),
        "kv_cache_bytes_per_token": profile.kv_cache_bytes_per_token(),
        "kv_cache_bytes": profile.kv_cache_bytes(sequence_length),
    }


def shown_labels(*budgets: Mapping[str, int | None]) -> dict[str, str]:
    """`LABELS` without the keys that say nothing in any of the budgets, such as the parameters of padded experts.

    The sum of d_model is shown where it is not the same in all: beside another it tells the key/value cache.
    """
    shown = dict(LABELS)
    for key, usual in _UNUSUAL.items():
        if all(budget[key] == (budget[usual] if usual else 0) for budget in budgets):
            del shown[key]
    if len({budget["d_model_sum"] for budget in budgets}) == 1 and "effective_parameters" not in shown:
        del shown["d_model_sum"]
    return shown


def as_json(profile: Profile, sequence_length: int) -> dict[str, Any]:
    """The profile and its totals as plain values; `Profile.from_json` reads their JSON."""
    return {**profile.to_dict(), "sequence_length": sequence_length, **budget(profile, sequence_length)}


def difference(a: Profile, b: Profile, sequence_lengths: tuple[int, int]) -> dict[str, Any]:
    """Totals of `b` less those of `a`, and the widths by layer likewise where both have as many layers."""
    before, after = budget(a, sequence_lengths[0]), budget(b, sequence_lengths[1])
    totals: dict[str, Any] = {key: after[key] - before[key] for key in LABELS}
    same = len(a.layers) == len(b.layers)
    for name in WIDTHS:
        pairs = zip(a.layers, b.layers, strict=True) if same else ()
        totals[name] = [getattr(y, name) - getattr(x, name) for x, y in pairs] if same else None
    return totals
