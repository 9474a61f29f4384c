"""A ×-shaped model's speed on a CPU, training and decoding, against its uniform twin of the same weights, interleaved.

    python benchmarks/x_shaped_speed.py [--rounds=10]

Three models: the uniform one; the ×, d_model falling to 0.3 of it and rising again, with as many heads in every layer
(the paper's); and the × in multiples of 64 with heads of 64 (as on accelerators, where tiles are wider). Weights in
matrices that have an effect are equal in all. Each model trains, and decodes one prompt and then a batch of 8, in a
process of its own; the processes take turns, and a ratio is of one round. Prints what the profile says of FLOPs and
cache beside what is measured; no bar.
"""

from __future__ import annotations

import argparse
import functools
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from decoding import PROMPT_TOKENS
from measuring import Measurement, Worker, alternate, print_bar, spread

from tlm_jax.capacity.from_config import profile_from_config
from tlm_jax.capacity.profile import Profile
from tlm_jax.config import default_config

SIZES = {"num_layers": 12, "d_model": 256, "d_ff": 1024, "num_heads": 4, "vocab_size": 4096}
TINY_SIZES = {"num_layers": 4, "d_model": 128, "d_ff": 256, "num_heads": 2, "vocab_size": 512}
SHAPES: dict[str, dict[str, Any]] = {
    "uniform": {},
    "×": {"width_schedule": "x", "width_multiple_of": 32, "width_budget": "exact"},
    "× of tiles": {
        "width_schedule": "x",
        "width_multiple_of": 64,
        "fixed_head_dim": 64,
        "multiple_of": 64,
        "width_budget": "nearest",
    },
}


def profile_of(sizes: Mapping[str, Any]) -> Profile:
    """As the workers make it."""
    config = default_config()
    config.model.vocab_size = sizes["vocab_size"]
    config.profile.update({key: value for key, value in sizes.items() if key != "vocab_size"})
    config.profile.update(num_kv_heads=sizes["num_heads"], schedule="uniform")
    return profile_from_config(config)


def compare(what: str, found: Mapping[str, Sequence[Measurement]], tokens: int) -> None:
    """Prints tokens per second of each, and the ratios to the uniform model."""
    print(what)
    for name, measured in found.items():
        speed = spread([tokens / m.seconds for m in measured])
        cpu = spread([m.cpu_seconds / tokens * 1000 for m in measured], 2)
        print(f"  {name:34} {speed} tokens/s · {cpu} CPU s per 1000 tokens")
    for name in list(found)[1:]:
        pairs = list(zip(found["uniform"], found[name], strict=True))
        print_bar(f"time of {name} / uniform", [b.seconds / a.seconds for a, b in pairs], 3)
        print_bar(f"CPU time of {name} / uniform", [b.cpu_seconds / a.cpu_seconds for a, b in pairs], 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of activations")
    parser.add_argument("--batch-sizes", type=int, nargs="*", default=[1, 8], help="of decoding")
    parser.add_argument("--new-tokens", type=int, default=240)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=2, help="of training, of each model in a round")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to try it out; the figures mean nothing")
    args = parser.parse_args()

    base, B, T = (TINY_SIZES, 2, 64) if args.tiny else (SIZES, 8, 512)
    sizes = {name: {**base, **keys} for name, keys in SHAPES.items()}
    profiles = {name: profile_of(keys) for name, keys in sizes.items()}
    uniform = profiles["uniform"]
    print(f"{base}, {args.dtype}, {args.rounds} rounds")
    for name, profile in profiles.items():
        flops = profile.train_flops_per_token(T) / uniform.train_flops_per_token(T)
        cache = profile.kv_cache_bytes_per_token() / uniform.kv_cache_bytes_per_token()
        widths = " ".join(str(layer.d_model) for layer in profile.layers)
        effective = f"{profile.effective_parameters:,} parameters with an effect"
        print(f"  {name:12} d_model {widths} · {effective} · FLOPs × {flops:.3f} · cache × {cache:.3f}")

    logs = Path(tempfile.mkdtemp(prefix="x_shaped_speed"))

    def measure(script: str, steps: int, **settings: Any) -> dict[str, list[Measurement]]:
        settings["dtype"] = args.dtype
        start = {
            name: functools.partial(Worker, sys.executable, script, {**settings, "sizes": keys}, logs / f"{index}.log")
            for index, (name, keys) in enumerate(sizes.items())
        }
        return alternate(start, steps, args.rounds)

    trained = measure("tlm_training.py", args.steps, batch_size=B, sequence_length=T)
    compare(f"training, B = {B}, T = {T}", trained, B * T * args.steps)
    for rows in args.batch_sizes:
        prompt = {"prompt_tokens": PROMPT_TOKENS, "new_tokens": args.new_tokens}
        decoded = measure("tlm_decoding.py", 1, batch_size=rows, **prompt)
        compare(f"decoding, B = {rows}, {args.new_tokens} tokens a prompt", decoded, rows * args.new_tokens)


if __name__ == "__main__":
    main()
