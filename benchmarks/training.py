"""Training on a CPU: tokens per second against compiled PyTorch and against MaxText's own loop, interleaved.

    python benchmarks/training.py --torch-python=PATH --maxtext-python=PATH [--dtype=bfloat16] [--rounds=10]

One uniform model, AdamW, clipping, random tokens, float32 master weights. Every framework runs in a process of its
own, in the environment whose interpreter is given (docs/benchmarks.md says what is in them), compiles, and then takes
`--steps` steps whenever it is its turn; meanwhile the others wait on a pipe. Prints tokens per second and CPU seconds
per step, medians and ranges over the rounds, and the ratio of each round; the bars, for float32, are 1.0 against
PyTorch and 1.2 against MaxText.
"""

from __future__ import annotations

import argparse
import functools
import sys
import tempfile
from pathlib import Path

from measuring import Worker, alternate, print_bar, spread

SIZES = {"num_layers": 8, "d_model": 256, "d_ff": 688, "num_heads": 4, "vocab_size": 8192}
TINY_SIZES = {"num_layers": 2, "d_model": 64, "d_ff": 176, "num_heads": 1, "vocab_size": 512}
BARS = {"PyTorch": 1.0, "MaxText": 1.2}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--torch-python", metavar="PATH", help="interpreter of an environment with PyTorch")
    parser.add_argument("--maxtext-python", metavar="PATH", help="interpreter of an environment with MaxText")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of activations")
    parser.add_argument("--eager", action="store_true", help="PyTorch without its compiler")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=2, help="of each framework in a round")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to try it out; the figures mean nothing")
    args = parser.parse_args()

    B, T = (2, 64) if args.tiny else (8, 512)
    settings = {
        "sizes": TINY_SIZES if args.tiny else SIZES,
        "batch_size": B,
        "sequence_length": T,
        "dtype": args.dtype,
        "eager": args.eager,
    }
    peers = {"tlm_jax": (sys.executable, "tlm_training.py")}
    if args.torch_python:
        peers["PyTorch"] = (args.torch_python, "torch_training.py")
    if args.maxtext_python:
        peers["MaxText"] = (args.maxtext_python, "maxtext_training.py")
    logs = Path(tempfile.mkdtemp(prefix="training"))
    start = {
        name: functools.partial(Worker, python, script, settings, logs / f"{name}.log")
        for name, (python, script) in peers.items()
    }
    found = alternate(start, args.steps, args.rounds)

    print(f"training, {args.dtype}, {settings['sizes']}, B = {B}, T = {T}, {args.rounds} rounds of {args.steps} steps")
    speed = {name: [B * T * args.steps / m.seconds for m in measured] for name, measured in found.items()}
    for name, measured in found.items():
        cpu = spread([m.cpu_seconds / args.steps for m in measured], 2)
        print(f"  {name:34} {spread(speed[name])} tokens/s · {cpu} CPU s/step")
    for name in list(found)[1:]:
        bar = BARS[name] if args.dtype == "float32" and not args.tiny else None
        print_bar(f"tlm_jax / {name}", [a / b for a, b in zip(speed["tlm_jax"], speed[name], strict=True)], bar=bar)
        cpu_ratios = [b.cpu_seconds / a.cpu_seconds for a, b in zip(found["tlm_jax"], found[name], strict=True)]
        print_bar(f"CPU time of {name} / tlm_jax", cpu_ratios)


if __name__ == "__main__":
    main()
