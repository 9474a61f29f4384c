"""The loader's tokens per second, one process, from a large token store of synthetic documents.

    python benchmarks/loader.py [--tokens=256000000] [--rounds=10]

Prepares the store first (random bytes, documents of 1,000 tokens on average, in a temporary directory), then takes
batches of `--batch-size` windows of `--sequence-length` tokens in random order, as training does, reading included.
Prints tokens per second of wall time and of CPU time (user and system, all threads of the process), medians and ranges
over rounds of `--batches`; the bar is 20 million tokens per second. The store is in the page cache: a disk that gives
40 MB a second keeps up.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import numpy as np
from measuring import print_bar, spread

from tlm_jax.data.loader import train_loader
from tlm_jax.data.prepare import prepare
from tlm_jax.data.store import TokenStore
from tlm_jax.data.tokenizer import ByteTokenizer

BAR = 20.0  # million tokens per second
MEAN_DOCUMENT = 1000


def synthetic_store(directory: Path, num_tokens: int) -> TokenStore:
    """A store of about so many tokens: printable bytes in documents of exponentially distributed length."""
    random = np.random.default_rng(0)
    texts = directory / "texts.jsonl"
    with texts.open("w") as file:
        left = num_tokens
        while left > 0:
            length = min(int(random.exponential(MEAN_DOCUMENT)) + 1, left)
            text = random.integers(97, 123, length, np.uint8).tobytes().decode()
            file.write(json.dumps({"text": text}) + "\n")
            left -= length
    return prepare([str(texts)], ByteTokenizer(), directory / "store")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=256_000_000, help="of the store")
    parser.add_argument("--sequence-length", type=int, default=4096)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--workers", type=int, default=0, help="data.num_workers")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--batches", type=int, default=1000, help="of a round")
    args = parser.parse_args()

    T, B = args.sequence_length, args.batch_size
    wall, cpu = [], []
    with tempfile.TemporaryDirectory(prefix="loader") as directory:
        store = synthetic_store(Path(directory), args.tokens)
        settings = {"sequence_length": T, "global_batch_size": B, "seed": 0, "num_workers": args.workers}
        with train_loader(store, **settings) as loader:
            for number in range(args.rounds + 1):
                start, cpu_start = time.perf_counter(), time.process_time()
                for _ in range(args.batches):
                    next(loader)
                if number:  # the first round maps the shards
                    tokens = args.batches * B * T / 1e6
                    wall.append(tokens / (time.perf_counter() - start))
                    cpu.append(tokens / (time.process_time() - cpu_start))
    print(f"loader, T = {T}, B = {B}, {args.tokens:,} tokens, {args.workers} workers, {args.rounds} rounds")
    print(f"  {'million tokens a CPU second':34} {spread(cpu, 1)}")
    print_bar("million tokens a second", wall, 1, BAR)


if __name__ == "__main__":
    main()
