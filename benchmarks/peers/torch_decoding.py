"""Worker: PyTorch generates, eager, with a key/value cache of its own; a step as in `tlm_decoding.py`."""

from __future__ import annotations

import torch
from serving import Session
from torch_llama import Llama


@torch.inference_mode()
def main() -> None:
    session = Session()
    wanted = session.settings
    torch.manual_seed(0)
    B, P, new_tokens = wanted["batch_size"], wanted["prompt_tokens"], wanted["new_tokens"]
    model = Llama(wanted["sizes"], P + new_tokens).to(getattr(torch, wanted["dtype"])).eval()
    prompts_BP = torch.randint(wanted["sizes"]["vocab_size"], (B, P))
    for _ in session.steps(lambda: None):
        cache = model.empty_cache(B, P + new_tokens)
        tokens_BT = prompts_BP
        generated = []
        for number in range(new_tokens):
            start = 0 if number == 0 else P + number - 1
            hidden_BTD = model.hidden(tokens_BT, cache, start)
            tokens_BT = model.logits(hidden_BTD[:, -1:]).argmax(-1)
            generated.append(tokens_BT[:, 0].tolist())  # as a user would read them, token by token


if __name__ == "__main__":
    main()
