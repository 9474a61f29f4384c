"""Weights and tokens of tiny Llama-like models, reproducible from NumPy alone, and their layout in tlm_jax.

The recipe, shared by `make_llama_golden.py` and the tests, so that only outputs need to be stored: one generator
`numpy.random.default_rng(seed)`; parameters in the order of `parameter_shapes`, each one draw of
`standard_normal(shape, dtype=float32)`, then

    norm scales        1 + 0.2 z
    embedding          0.5 z
    other matrices     z / sqrt(fan_in)         (Hugging Face stores them as [fan_out, fan_in])

so that attention is far from uniform and no norm is the identity. Tokens are drawn by a second generator. `family` says
whose model is the reference: Llama's; Qwen 3's, for QK-norm; Gemma 2's, for the windows, both soft-caps and GeGLU (its
embedding scale, its norms' offset of one and its norms behind attention and MLP are taken out in `llama_reference`).

Shapes: B batch, T time, V vocabulary, D d_model, F d_ff, H heads, G key/value heads, K head_dim.
"""

from __future__ import annotations

from typing import Any

import numpy as np

# Keys are those of `transformers`' config of the family, except `family` and `seed`.
_CONFIGS: dict[str, dict[str, Any]] = {
    "gqa_tied": {
        "family": "llama",
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 56,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "seed": 11,
    },
    "mha_untied": {
        "family": "llama",
        "vocab_size": 101,
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 12,  # not hidden_size / num_attention_heads
        "rope_theta": 500000.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "seed": 12,
    },
    "qwen3": {
        "family": "qwen3",
        "vocab_size": 89,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 10,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "seed": 13,
    },
    "gemma2": {
        "family": "gemma2",
        "vocab_size": 83,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "sliding_window": 7,  # in the first and third layer
        "attn_logit_softcapping": 2.0,  # low enough to matter
        "final_logit_softcapping": 3.0,
        "seed": 14,
    },
}

NAMES = tuple(_CONFIGS)
BATCH, TIME = 2, 24


def llama_config(name: str) -> dict[str, Any]:
    """The sizes of one tiny model, keyed as in its family's `transformers` config, plus `family` and `seed`."""
    return dict(_CONFIGS[name])


def parameter_shapes(name: str) -> dict[str, tuple[int, ...]]:
    """Shape by Hugging Face parameter name, in the order of the draws. A tied model has no `lm_head.weight`."""
    c = _CONFIGS[name]
    d_model, d_ff, head_dim = c["hidden_size"], c["intermediate_size"], c["head_dim"]
    query_width, key_width = c["num_attention_heads"] * head_dim, c["num_key_value_heads"] * head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (c["vocab_size"], d_model)}
    for layer in range(c["num_hidden_layers"]):
        if c["family"] == "qwen3":
            shapes |= {f"model.layers.{layer}.self_attn.{x}_norm.weight": (head_dim,) for x in "qk"}
        shapes |= {
            f"model.layers.{layer}.{suffix}": shape
            for suffix, shape in (
                ("input_layernorm.weight", (d_model,)),
                ("self_attn.q_proj.weight", (query_width, d_model)),
                ("self_attn.k_proj.weight", (key_width, d_model)),
                ("self_attn.v_proj.weight", (key_width, d_model)),
                ("self_attn.o_proj.weight", (d_model, query_width)),
                ("post_attention_layernorm.weight", (d_model,)),
                ("mlp.gate_proj.weight", (d_ff, d_model)),
                ("mlp.up_proj.weight", (d_ff, d_model)),
                ("mlp.down_proj.weight", (d_model, d_ff)),
            )
        }
    shapes["model.norm.weight"] = (d_model,)
    if not c["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (c["vocab_size"], d_model)
    return shapes


def llama_weights(name: str) -> dict[str, np.ndarray]:
    """float32 weights by Hugging Face parameter name, by the recipe above."""
    rng = np.random.default_rng(_CONFIGS[name]["seed"])
    weights = {}
    for parameter, shape in parameter_shapes(name).items():
        z = rng.standard_normal(shape, dtype=np.float32)
        if len(shape) == 1:
            weights[parameter] = np.float32(1) + np.float32(0.2) * z
        elif parameter == "model.embed_tokens.weight":
            weights[parameter] = np.float32(0.5) * z
        else:
            weights[parameter] = z / np.sqrt(np.float32(shape[1]))
    return weights


def checksum(weights: dict[str, np.ndarray]) -> np.ndarray:
    """Sum of |w| over all weights in float64: tells a changed generator from a changed model."""
    return np.float64(sum(np.abs(w, dtype=np.float64).sum() for w in weights.values()))


def tokens(name: str) -> np.ndarray:
    """int32 [B, T + 1]: inputs are `[:, :-1]`, targets `[:, 1:]`."""
    rng = np.random.default_rng(_CONFIGS[name]["seed"] + 1000)
    return rng.integers(0, _CONFIGS[name]["vocab_size"], (BATCH, TIME + 1), dtype=np.int32)


def to_tlm_parameters(weights: dict[str, np.ndarray], profile: Any) -> dict[str, Any]:
    """Rearranges weights (or gradients) by Hugging Face name into tlm_jax's layout, one dictionary per layer.

    Matrices become [in, out]; attention's are split into heads; a head keeps the order of its features, because both
    rotate the first half of a head against the second.

    Args:
      weights: arrays by Hugging Face parameter name; without `lm_head.weight` for a tied model.
      profile: has `layers`, each with `num_heads`, `num_kv_heads` and `head_dim`.

    Returns:
      `embedding` [V, D]; `layers`, a list of `attention_norm.scale` [D], `attention.{wq [D, H, K], wk, wv [D, G, K],
      wo [H, K, D]}`, in Qwen 3 `attention.{q_norm, k_norm}.scale` [K], `mlp_norm.scale` [D], `mlp.{w_gate, w_up [D, F],
      w_down [F, D]}`; `final_norm.scale` [D]; untied, `head` [D, V].
    """
    layers = []
    for index, shape in enumerate(profile.layers):
        prefix = f"model.layers.{index}."

        def weight(suffix: str, prefix: str = prefix) -> np.ndarray:
            return np.asarray(weights[f"{prefix}{suffix}.weight"])

        def heads_last(suffix: str, num_heads: int, shape: Any = shape, weight: Any = weight) -> np.ndarray:
            w_DHK = weight(suffix).T
            return w_DHK.reshape(w_DHK.shape[0], num_heads, shape.head_dim)

        w_o = weight("self_attn.o_proj").T
        layers.append(
            {
                "attention_norm": {"scale": weight("input_layernorm")},
                "attention": {
                    "wq": heads_last("self_attn.q_proj", shape.num_heads),
                    "wk": heads_last("self_attn.k_proj", shape.num_kv_heads),
                    "wv": heads_last("self_attn.v_proj", shape.num_kv_heads),
                    "wo": w_o.reshape(shape.num_heads, shape.head_dim, w_o.shape[1]),
                },
                "mlp_norm": {"scale": weight("post_attention_layernorm")},
                "mlp": {
                    "w_gate": weight("mlp.gate_proj").T,
                    "w_up": weight("mlp.up_proj").T,
                    "w_down": weight("mlp.down_proj").T,
                },
            }
        )
        for name in ("q_norm", "k_norm"):
            if f"{prefix}self_attn.{name}.weight" in weights:
                layers[-1]["attention"][name] = {"scale": weight(f"self_attn.{name}")}
    parameters = {
        "embedding": np.asarray(weights["model.embed_tokens.weight"]),
        "layers": layers,
        "final_norm": {"scale": np.asarray(weights["model.norm.weight"])},
    }
    if "lm_head.weight" in weights:
        parameters["head"] = np.asarray(weights["lm_head.weight"]).T
    return parameters
