"""Stands in for `tlm` in the tests of the launch scripts: notes its arguments in $TLM_LOG and makes what `tlm` would.

`train` writes a record every 20 ms and, like `tlm train`, saves and exits with 75 on a signal, goes on from where it
was, and is complete at 100 steps. $TLM_FAIL names a subcommand that exits with $TLM_FAIL_CODE; "check" is
`train --check-config`, which makes nothing.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

NUM_STEPS = 100
RESULT = {"bits_per_byte": 1.5, "baselines": {"gzip_bits_per_byte": 2.9, "bigram_bits_per_byte": 1.75}}


def option(name: str) -> Path:
    return Path(next(a.split("=", 1)[1] for a in sys.argv if a.startswith(f"--{name}=")))


def train(workdir: Path) -> int:
    stopped: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: stopped.append(number))
    workdir.mkdir(parents=True, exist_ok=True)
    saved = workdir / "saved_step"
    step = int(saved.read_text()) if saved.exists() else 0
    if step == NUM_STEPS:
        return 0
    with (workdir / "metrics.jsonl").open("a") as metrics:
        while step < NUM_STEPS and not stopped:
            step += 1
            metrics.write(json.dumps({"step": step, "loss": 1.0}) + "\n")
            metrics.flush()
            time.sleep(0.02)
    saved.write_text(str(step))
    return 0 if step == NUM_STEPS else 75


def main() -> int:
    command = sys.argv[1]
    with Path(os.environ["TLM_LOG"]).open("a") as log:
        log.write(json.dumps(sys.argv[1:]) + "\n")
    if command == "train" and "--check-config" in sys.argv:
        command = "check"
    if os.environ.get("TLM_FAIL") == command:
        print(f"tlm {command}: error: asked to fail", file=sys.stderr)
        return int(os.environ["TLM_FAIL_CODE"])
    if command == "check":
        return 0
    if command == "train":
        return train(option("workdir"))
    if command == "prepare":
        option("output").mkdir(parents=True, exist_ok=True)
    else:
        option("output").write_text(json.dumps(RESULT if command == "eval" else {}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
