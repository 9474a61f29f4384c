"""`tlm train` and `tlm eval` by arithmetic, for `tlm compare`: no model, but every file that it reads.

The held-out loss is 3 + the seed / 10, and 0.05 less where d_ff falls. STUB_LOG: a file that gets each command.
STUB_SLOW=TEXT: a training in a directory with TEXT in its path goes on until a signal, for half a minute at most, and
tells how many came. STUB_FAIL=TEXT: it fails as for bad input.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import time
from pathlib import Path

from tlm_jax.capacity import profile_from_config
from tlm_jax.config import from_json, load_config, to_json
from tlm_jax.data.mixture import open_data


def main(argv: list[str]) -> int:
    if log := os.environ.get("STUB_LOG"):
        with open(log, "a") as file:
            file.write(json.dumps(argv) + "\n")
    return train(argv) if argv[0] == "train" else evaluate(argv)


def train(argv: list[str]) -> int:
    stopped: list[int] = []
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))
    signal.signal(signal.SIGINT, lambda *_: stopped.append(1))
    config = load_config(argv[1].removeprefix("--config="), argv[3:])
    workdir = Path(argv[2].removeprefix("--workdir="))
    workdir.mkdir(parents=True, exist_ok=True)
    if os.environ.get("STUB_FAIL", "\0") in str(workdir):
        print("tlm train: error: the disk is full", file=sys.stderr)
        return 2
    (workdir / "config.json").write_text(to_json(config))
    (workdir / "profile.json").write_text(profile_from_config(config).to_json())
    slow = os.environ.get("STUB_SLOW", "\0") in str(workdir)
    with (workdir / "metrics.jsonl").open("w") as file:
        for step in range(1, config.train.num_steps + 1):
            loss = 2.9 + 3 * math.exp(-step) + config.seed / 10
            record = {"step": step, "tokens": 256 * step, "loss": loss, "train_flops": 1e6 * step, "step_seconds": 0.1}
            record |= {"gradient_norm": 1.0, "tokens_per_second": 2560.0, "skipped_steps": 0}
            if step % 4 == 0:
                record["validation"] = {"loss": held_out(config), "bits_per_byte": 1.0, "tokens": 100, "bytes": 400}
            file.write(json.dumps(record) + "\n")
            file.flush()
            begun = time.monotonic()
            while slow and step == 3 and not stopped and time.monotonic() - begun < 30:
                time.sleep(0.02)
            if stopped:
                time.sleep(0.3)
                print(f"stopped at step {step}, signals: {len(stopped)}", file=sys.stderr)
                return 75
    return 0


def held_out(config) -> float:
    falls = config.profile.schedule != "uniform" and config.profile.start_ratio > config.profile.end_ratio
    return 3 + config.seed / 10 - 0.05 * falls


def evaluate(argv: list[str]) -> int:
    workdir = Path(argv[1].removeprefix("--checkpoint="))
    config = from_json((workdir / "config.json").read_text())
    loss = held_out(config)
    measured = {"loss": loss, "perplexity": math.exp(loss), "bits_per_byte": loss / math.log(2) / 4}
    measured |= {"tokens": 100, "bytes": 400, "step": config.train.num_steps}
    measured |= {"weights": argv[3].removeprefix("--weights="), "data": config.data.store}
    measured["data_fingerprint"] = open_data(config.data.store, config.data.mixture).fingerprint
    Path(argv[2].removeprefix("--output=")).write_text(json.dumps(measured))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
