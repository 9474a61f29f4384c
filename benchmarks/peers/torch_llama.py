"""The peer's model: a Llama-shaped decoder in plain PyTorch, with a key/value cache of its own.

The same sizes and parameters as a uniform `tlm_jax` model with tied embeddings. B batch, T time, S cached time, D
d_model, H heads, K head_dim, V vocabulary.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Cache = list[tuple[Tensor, Tensor]]  # keys and values [B, H, S, K] of each layer


def rotate(x_BHTK: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
    """Rotary embedding, the first half of K paired with the second."""
    first, second = x_BHTK.chunk(2, dim=-1)
    return x_BHTK * cos_TK + torch.cat((-second, first), dim=-1) * sin_TK


class Block(nn.Module):
    """Attention and gated MLP, each after an RMSNorm."""

    def __init__(self, sizes: dict[str, Any]) -> None:
        super().__init__()
        D, F_, self.heads = sizes["d_model"], sizes["d_ff"], sizes["num_heads"]
        self.attention_norm, self.mlp_norm = nn.RMSNorm(D, 1e-5), nn.RMSNorm(D, 1e-5)
        self.qkv, self.out = nn.Linear(D, 3 * D, bias=False), nn.Linear(D, D, bias=False)
        self.gate_up, self.down = nn.Linear(D, 2 * F_, bias=False), nn.Linear(F_, D, bias=False)

    def forward(self, x_BTD: Tensor, cos_TK: Tensor, sin_TK: Tensor, cache: Any, start: int) -> Tensor:
        B, T, D = x_BTD.shape
        qkv = self.qkv(self.attention_norm(x_BTD)).view(B, T, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q_BHTK, k_BHTK, v_BHTK = rotate(qkv[0], cos_TK, sin_TK), rotate(qkv[1], cos_TK, sin_TK), qkv[2]
        if cache is not None:
            keys_BHSK, values_BHSK = cache
            keys_BHSK[:, :, start : start + T] = k_BHTK
            values_BHSK[:, :, start : start + T] = v_BHTK
            k_BHTK, v_BHTK = keys_BHSK[:, :, : start + T], values_BHSK[:, :, : start + T]
        y_BHTK = F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, is_causal=T > 1)
        x_BTD = x_BTD + self.out(y_BHTK.transpose(1, 2).reshape(B, T, D))
        gate, up = self.gate_up(self.mlp_norm(x_BTD)).chunk(2, dim=-1)
        return x_BTD + self.down(F.silu(gate) * up)


class Llama(nn.Module):
    """The decoder; `forward` gives logits, `loss` the mean cross-entropy."""

    def __init__(self, sizes: dict[str, Any], length: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sizes["vocab_size"], sizes["d_model"])
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes["num_layers"]))
        self.norm = nn.RMSNorm(sizes["d_model"], 1e-5)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=1 / math.sqrt(sizes["d_model"]))
        half = sizes["d_model"] // sizes["num_heads"] // 2
        angles = torch.outer(torch.arange(length), 10000.0 ** (-torch.arange(half) / half)).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def hidden(self, tokens_BT: Tensor, cache: Cache | None = None, start: int = 0) -> Tensor:
        x_BTD = self.embedding(tokens_BT)
        stop = start + tokens_BT.shape[1]
        cos_TK, sin_TK = self.cos[start:stop].to(x_BTD.dtype), self.sin[start:stop].to(x_BTD.dtype)
        for i, block in enumerate(self.blocks):
            x_BTD = block(x_BTD, cos_TK, sin_TK, None if cache is None else cache[i], start)
        return self.norm(x_BTD)

    def logits(self, hidden_BTD: Tensor) -> Tensor:
        return F.linear(hidden_BTD, self.embedding.weight)

    def loss(self, inputs_BT: Tensor, targets_BT: Tensor) -> Tensor:
        logits_BTV = self.logits(self.hidden(inputs_BT))
        return F.cross_entropy(logits_BTV.flatten(0, 1).float(), targets_BT.flatten())

    def empty_cache(self, batch: int, length: int) -> Cache:
        heads, weight = self.blocks[0].heads, self.embedding.weight
        shape = (batch, heads, length, weight.shape[1] // heads)
        return [(weight.new_zeros(shape), weight.new_zeros(shape)) for _ in self.blocks]
