"""Worker: PyTorch training steps, model and loss compiled by TorchInductor (or eager), fused AdamW, clipping."""

from __future__ import annotations

import contextlib

import torch
from serving import Session
from torch_llama import Llama


def main() -> None:
    session = Session()
    wanted = session.settings
    torch.manual_seed(0)
    model = Llama(wanted["sizes"], wanted["sequence_length"])
    matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if all(p is not m for m in matrices)]
    optimizer = torch.optim.AdamW(
        [{"params": matrices}, {"params": others, "weight_decay": 0.0}],
        lr=3e-4,
        betas=(0.9, 0.95),
        weight_decay=0.1,
        fused=True,
    )
    loss_of = model.loss if wanted["eager"] else torch.compile(model.loss)
    autocast = torch.autocast("cpu", torch.bfloat16) if wanted["dtype"] == "bfloat16" else contextlib.nullcontext()
    shape = (wanted["batch_size"], wanted["sequence_length"] + 1)
    tokens = torch.randint(wanted["sizes"]["vocab_size"], shape)

    for _ in session.steps(lambda: None):
        with autocast:
            loss = loss_of(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


if __name__ == "__main__":
    main()
