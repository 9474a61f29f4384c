"""Decoding on a CPU: tokens per second with the key/value cache, against eager PyTorch with a cache of its own.

    python benchmarks/decoding.py --torch-python=PATH [--dtype=bfloat16] [--rounds=10]

The same sizes, greedy, short prompts and `--new-tokens` tokens after them, one prompt and then a batch of 8; the host
reads every token. The two take turns, each in a process of its own; ours also checks that nothing is compiled after the
first generation. Prints tokens per second, CPU seconds per thousand tokens, and the ratio of each round; no bar.
"""

from __future__ import annotations

import argparse
import functools
import sys
import tempfile
from pathlib import Path

from measuring import Worker, alternate, print_bar, spread
from training import SIZES, TINY_SIZES

PROMPT_TOKENS = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--torch-python", metavar="PATH", help="interpreter of an environment with PyTorch")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of activations")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--new-tokens", type=int, default=240)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--tiny", action="store_true", help="small sizes, to try it out; the figures mean nothing")
    args = parser.parse_args()

    peers = {"tlm_jax": (sys.executable, "tlm_decoding.py")}
    if args.torch_python:
        peers["PyTorch"] = (args.torch_python, "torch_decoding.py")
    logs = Path(tempfile.mkdtemp(prefix="decoding"))
    for batch_size in args.batch_sizes:
        settings = {
            "sizes": TINY_SIZES if args.tiny else SIZES,
            "batch_size": batch_size,
            "prompt_tokens": PROMPT_TOKENS,
            "new_tokens": args.new_tokens,
            "dtype": args.dtype,
        }
        start = {
            name: functools.partial(Worker, python, script, settings, logs / f"{name}.log")
            for name, (python, script) in peers.items()
        }
        found = alternate(start, 1, args.rounds)
        tokens = batch_size * args.new_tokens
        print(f"decoding, {args.dtype}, {settings['sizes']}, B = {batch_size}, {args.new_tokens} tokens a prompt")
        speed = {name: [tokens / m.seconds for m in measured] for name, measured in found.items()}
        for name, measured in found.items():
            cpu = spread([m.cpu_seconds / tokens * 1000 for m in measured], 2)
            print(f"  {name:34} {spread(speed[name])} tokens/s · {cpu} CPU s per 1000 tokens")
        if "PyTorch" in found:
            print_bar("tlm_jax / PyTorch", [a / b for a, b in zip(speed["tlm_jax"], speed["PyTorch"], strict=True)])
            pairs = zip(found["tlm_jax"], found["PyTorch"], strict=True)
            print_bar("CPU time of PyTorch / tlm_jax", [b.cpu_seconds / a.cpu_seconds for a, b in pairs])


if __name__ == "__main__":
    main()
