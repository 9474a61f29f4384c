"""CPU seconds to compile the training step of 24 layers: uniform, cosine in 6 plateaus, cosine in 24 widths.

    python benchmarks/compile.py [--rounds=3]

Each compilation has a fresh process and no compilation cache; user and system time from the model's description to the
compiled step, of which tracing and lowering are told apart. Layers of equal width are compiled once, so the time should
grow with the number of different widths, not of layers: uniform models of 12 and 48 layers are compiled too. Prints
medians, ranges and the ratio to the uniform model. CPU time of one process, so a busy machine is no great matter.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from typing import Any

from measuring import PEERS, spread

SIZES = {"d_model": 1024, "d_ff": 4096, "num_heads": 16, "num_kv_heads": 16}
PROFILES: dict[str, dict[str, Any]] = {
    "24 layers, uniform": {"num_layers": 24, "schedule": "uniform"},
    "24 layers, cosine in 6 plateaus": {"num_layers": 24, "schedule": "cosine", "plateaus": 6},
    "24 layers, cosine in 24 widths": {"num_layers": 24, "schedule": "cosine"},
    "12 layers, uniform": {"num_layers": 12, "schedule": "uniform"},
    "48 layers, uniform": {"num_layers": 48, "schedule": "uniform"},
}


def compile_once(profile: dict[str, Any]) -> dict[str, Any]:
    """What a fresh process needed."""
    settings = {"profile": SIZES | profile, "vocab_size": 32000, "batch_size": 8, "sequence_length": 512}
    ended = subprocess.run(
        [sys.executable, str(PEERS / "tlm_compile.py"), json.dumps(settings)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "false"},
    )
    return json.loads(ended.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()

    found: dict[str, list[dict[str, Any]]] = {name: [] for name in PROFILES}
    for _ in range(args.rounds):
        for name, profile in PROFILES.items():
            found[name].append(compile_once(profile))
    print(f"compilation of the training step, CPU seconds, {args.rounds} rounds")
    first = statistics.median(each["all"]["cpu_seconds"] for each in next(iter(found.values())))
    for name, measured in found.items():
        seconds = [each["all"]["cpu_seconds"] for each in measured]
        traced = statistics.median(each["trace"]["cpu_seconds"] for each in measured)
        ratio = statistics.median(seconds) / first
        print(f"  {name:34} {spread(seconds, 1)}, of them {traced:.1f} to trace · {ratio:.2f} of uniform")


if __name__ == "__main__":
    main()
