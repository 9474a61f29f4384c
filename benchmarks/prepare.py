"""`tlm prepare` against SentencePiece's own `encode(num_threads=W)` on the same documents, interleaved.

    python benchmarks/prepare.py [--workers=2] [--rounds=10] [FILE.jsonl.gz …]

By default the documents are the shipped corpus, and the tokenizer is trained on them first. Ours goes from the
compressed files to a finished store: reading, JSON, tokenising, the check that no text is lost, checksums, writing.
SentencePiece encodes the same texts to Python lists from memory. Prints megabytes of text per second, CPU seconds, and
the ratio of each round; the bar is 0.9.
"""

from __future__ import annotations

import argparse
import functools
import gzip
import json
import sys
import tempfile
from pathlib import Path

from measuring import Worker, alternate, print_bar, spread

from tlm_jax.data.sentencepiece_training import train_sentencepiece
from tlm_jax.data.workers import available_cpus

BAR = 0.9
CORPUS = Path(__file__).resolve().parents[1] / "corpus"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", help="JSON Lines with gzip; by default those in corpus/")
    parser.add_argument("--tokenizer", help="a SentencePiece model; by default one of 8,192 ids is trained")
    parser.add_argument("--workers", type=int, default=available_cpus(), help="W, of both")
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args()

    files = args.files or [str(path) for path in sorted(CORPUS.glob("*.jsonl.gz"))]
    with tempfile.TemporaryDirectory(prefix="prepare") as directory:
        tokenizer = args.tokenizer or f"{directory}/tokenizer.model"
        if not args.tokenizer:
            train_sentencepiece(files, tokenizer, 8192)
        settings = {"files": files, "tokenizer": tokenizer, "workers": args.workers}
        start = {
            name: functools.partial(Worker, sys.executable, script, settings, Path(directory) / f"{name}.log")
            for name, script in (("tlm prepare", "tlm_prepare.py"), ("SentencePiece", "sentencepiece_encode.py"))
        }
        found = alternate(start, 1, args.rounds)
    size = 0
    for name in files:
        with gzip.open(name) as lines:
            size += sum(len(json.loads(line)["text"].encode()) for line in lines)

    print(f"prepare, {size / 1e6:.1f} MB of text, W = {args.workers}, {args.rounds} rounds")
    for name, measured in found.items():
        speed = spread([size / 1e6 / m.seconds for m in measured], 2)
        print(f"  {name:34} {speed} MB/s · {spread([m.cpu_seconds for m in measured], 2)} CPU s")
    pairs = list(zip(found["tlm prepare"], found["SentencePiece"], strict=True))
    print_bar("tlm prepare / SentencePiece", [b.seconds / a.seconds for a, b in pairs], bar=BAR)
    print_bar("CPU time of SentencePiece / ours", [b.cpu_seconds / a.cpu_seconds for a, b in pairs])


if __name__ == "__main__":
    main()
