"""Every benchmark, one after the other, with what the machine is; for docs/benchmarks.md.

    python benchmarks/everything.py --torch-python=PATH --maxtext-python=PATH [--rounds=10] [--output=FILE]

Run it on an otherwise idle machine, about an hour on two cores. Each benchmark says what it measures in its own file,
and can be run alone.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def commands(torch: str | None, maxtext: str | None, rounds: int) -> list[list[str]]:
    """The commands, without the interpreter."""
    torch_option = [f"--torch-python={torch}"] if torch else []
    peers = [*torch_option, *([f"--maxtext-python={maxtext}"] if maxtext else [])]
    few = f"--rounds={min(rounds, 3)}"
    often = f"--rounds={rounds}"
    return [
        ["training.py", *peers, often],
        ["training.py", *peers, often, "--dtype=bfloat16"],
        ["training.py", *torch_option, often, "--eager"],
        ["decoding.py", *torch_option, often],
        ["decoding.py", *torch_option, often, "--dtype=bfloat16"],
        ["loader.py", often],
        ["prepare.py", often],
        ["compile.py", few],
        ["dispatch.py", often],
        ["x_shaped_savings.py"],
        ["x_shaped_speed.py", often],
    ]


def machine() -> str:
    """The processor, its cores, what else runs on it, and the versions of what is measured."""
    model = platform.processor()
    if (information := Path("/proc/cpuinfo")).is_file():
        lines = information.read_text().splitlines()
        model = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), model)
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("jax", "flax", "sentencepiece"))
    load = os.getloadavg()[0]
    return f"{model}, {os.cpu_count()} CPUs, load {load:.1f} · Python {platform.python_version()}, {versions}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--torch-python", metavar="PATH", help="interpreter of an environment with PyTorch")
    parser.add_argument("--maxtext-python", metavar="PATH", help="interpreter of an environment with MaxText")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--output", type=Path, help="write the figures to this file too")
    args = parser.parse_args()

    told: list[str] = []

    def say(text: str) -> None:
        print(text, flush=True)
        told.append(text)
        if args.output:
            args.output.write_text("\n".join(told) + "\n")

    failed = 0
    for script, *options in commands(args.torch_python, args.maxtext_python, args.rounds):
        say(f"\n$ python benchmarks/{script} {' '.join(options)}\n{machine()}")
        ended = subprocess.run([sys.executable, str(HERE / script), *options], stdout=subprocess.PIPE, text=True)
        say(ended.stdout.rstrip() if ended.returncode == 0 else f"failed with code {ended.returncode}")
        failed += ended.returncode != 0
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
