"""Outputs of Hugging Face's models (float32, eager attention, CPU) on the tiny models of `llama_weights`.

Needs torch and transformers; imported by `make_llama_golden.py`, and by the live comparison where both are installed.
"""

from __future__ import annotations

import numpy as np
import torch
from llama_weights import llama_config, llama_weights, tokens
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM, {"hidden_act": "silu", "mlp_bias": False}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"hidden_act": "silu"}),
    "gemma2": (Gemma2Config, Gemma2ForCausalLM, {"hidden_activation": "gelu_pytorch_tanh", "pad_token_id": None}),
}


def _to_gemma2(weights: dict[str, torch.Tensor], width: int) -> dict[str, torch.Tensor]:
    """The weights with which Gemma 2 computes what the others do: its norms multiply by 1 + w, its embedding by √D."""
    renamed = {key.replace("post_attention_layernorm", "pre_feedforward_layernorm"): w for key, w in weights.items()}
    renamed = {key: w - 1 if key.endswith("norm.weight") else w for key, w in renamed.items()}
    return renamed | {"model.embed_tokens.weight": weights["model.embed_tokens.weight"] / width**0.5}


def reference_model(name: str) -> PreTrainedModel:
    """The Hugging Face model with this recipe's weights."""
    sizes = llama_config(name)
    del sizes["seed"]
    make_config, make_model, options = FAMILIES[sizes.pop("family")]
    if make_model is Gemma2ForCausalLM:
        options = options | {"query_pre_attn_scalar": sizes["head_dim"]}
    config = make_config(
        **sizes,
        **options,
        max_position_embeddings=128,
        attention_bias=False,
        attention_dropout=0.0,
        attn_implementation="eager",
    )
    model = make_model(config).to(torch.float32).eval()
    weights = {key: torch.from_numpy(value) for key, value in llama_weights(name).items()}
    if make_model is Gemma2ForCausalLM:
        weights = _to_gemma2(weights, sizes["hidden_size"])
        for layer in model.model.layers:
            layer.post_attention_layernorm = layer.post_feedforward_layernorm = torch.nn.Identity()
    missing, unexpected = model.load_state_dict(weights, strict=False)
    if unexpected or set(missing) - ({"lm_head.weight"} if sizes["tie_word_embeddings"] else set()):
        raise ValueError(f"{name}: weights do not fit the model: missing {missing}, unexpected {unexpected}")
    model.tie_weights()
    return model


def reference_outputs(name: str) -> dict[str, np.ndarray]:
    """float32 `logits` [B, T, V], `loss` (mean token cross-entropy, nats) and `grad:<name>` for every parameter."""
    model = reference_model(name)
    tokens_BT = torch.from_numpy(tokens(name).astype(np.int64))
    logits_BTV = model(tokens_BT[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits_BTV.flatten(0, 1), tokens_BT[:, 1:].flatten())
    loss.backward()
    outputs = {"logits": logits_BTV.detach().numpy(), "loss": loss.detach().numpy()}
    for parameter, value in model.named_parameters():
        assert value.grad is not None
        gradient = value.grad.numpy()
        if isinstance(model, Gemma2ForCausalLM):  # back to the recipe's weights
            parameter = parameter.replace("pre_feedforward_layernorm", "post_attention_layernorm")
            if parameter == "model.embed_tokens.weight":
                gradient = gradient / gradient.shape[1] ** 0.5
        outputs[f"grad:{parameter}"] = gradient
    return outputs
