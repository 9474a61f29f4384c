"""Work directories as `tlm train` leaves them, made of arithmetic."""

import json
import math
import random

from tlm_jax.capacity import profile_from_config
from tlm_jax.config import default_config, to_json


def make_run(root, name, *, schedule="cosine", seed=0, steps=500, final_loss=3.2, evaluation=True, **keys):
    """Writes a run under `root / name` and returns its path.

    Args:
      final_loss: where the loss settles; validation lies 0.1 above.
      evaluation: whether evaluation.json and samples.json exist.
      keys: overrides of the config, double underscores for dots.
    """
    config = default_config()
    config.name, config.seed = name, seed
    config.profile.schedule, config.profile.num_layers, config.profile.d_model, config.profile.d_ff = (
        schedule,
        6,
        256,
        640,
    )
    config.profile.num_heads = config.profile.num_kv_heads = 4
    config.model.vocab_size, config.data.sequence_length, config.train.num_steps = 4096, 256, steps
    for key, value in keys.items():
        room, leaf = key.split("__")
        config[room][leaf] = value
    profile = profile_from_config(config)
    directory = root / name
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(to_json(config))
    (directory / "profile.json").write_text(profile.to_json())
    noise = random.Random(f"{name} {seed}")
    flops = profile.train_flops_per_token(256)
    with (directory / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            loss = final_loss + 5.1 * math.exp(-step / 60) + 0.05 * noise.gauss(0, 1)
            file.write(json.dumps(record(step, loss, flops, noise, validate=step % max(1, steps // 10) == 0)) + "\n")
    if evaluation:
        baselines = {"gzip_bits_per_byte": 2.82, "bigram_bits_per_byte": 1.61}
        final = held_out(final_loss + 0.1) | {"baselines": baselines, "checkpoint": "checkpoints/500", "step": steps}
        (directory / "evaluation.json").write_text(json.dumps(final))
        completion = " was a fine day, and <b>nobody</b> in the village\nhad seen the like of it & of the sea before."
        samples = [{"prompt": "It", "completion": completion, "seed": s, "temperature": 0.8} for s in (0, 1)]
        (directory / "samples.json").write_text(json.dumps(samples))
    return directory


def held_out(loss):
    bits = loss / math.log(2) / 3.4
    return {"loss": loss, "perplexity": math.exp(loss), "bits_per_byte": bits, "tokens": 120_000, "bytes": 408_000}


def record(step, loss, flops, noise, *, validate):
    tokens = 2048 * step
    logged = step % 10 == 0
    values = {
        "step": step,
        "tokens": tokens,
        "loss": loss,
        "bits_per_byte": loss / math.log(2) / 3.4,
        "learning_rate": 3e-4,
        "gradient_norm": 0.6 + 2 * math.exp(-step / 30) + 0.1 * noise.random(),
        "update_norm": 0.1,
        "parameter_norm": 50.0,
        "tokens_per_second": 5200 + 100 * noise.random() if logged else None,
        "step_seconds": 0.39 if logged else None,
        "mfu_causal": 0.41 if logged else None,
        "mfu_full": 0.437 if logged else None,
        "data_wait_seconds": 0.0039 if logged else None,
        "memory_bytes": None,
        "skipped_steps": 0,
        "train_flops": tokens * flops,
        "time": 1.8e9 + step,
    }
    return values | ({"validation": held_out(loss + 0.1)} if validate else {})
