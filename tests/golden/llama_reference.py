"""Outputs of Hugging Face `LlamaForCausalLM` (float32, eager attention, CPU) on the tiny models of `llama_weights`.

Needs torch and transformers; imported by `make_llama_golden.py`, and by the live comparison where both are installed.
"""

from __future__ import annotations

import numpy as np
import torch
from llama_weights import llama_config, llama_weights, tokens
from transformers import LlamaConfig, LlamaForCausalLM


def reference_model(name: str) -> LlamaForCausalLM:
    """The Hugging Face model with this recipe's weights."""
    sizes = llama_config(name)
    del sizes["seed"]
    config = LlamaConfig(
        **sizes,
        max_position_embeddings=128,
        hidden_act="silu",
        attention_bias=False,
        mlp_bias=False,
        attention_dropout=0.0,
        attn_implementation="eager",
    )
    model = LlamaForCausalLM(config).to(torch.float32).eval()
    weights = {key: torch.from_numpy(value) for key, value in llama_weights(name).items()}
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
        outputs[f"grad:{parameter}"] = value.grad.numpy()
    return outputs
