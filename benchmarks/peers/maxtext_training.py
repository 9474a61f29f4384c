"""Worker: MaxText's own training loop on synthetic data, paused between its iterations.

The loop calls `training_loop_iteration` by its module's name; in its place stands a function that waits for its turn
and then calls it. Everything else, the loading of batches and its metrics included, is MaxText's.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from serving import Session

# What is not named is at its default, which here is also the fastest: layers scanned, and recomputed in the backward
# pass (remat_policy=none and scan_layers=false each took longer).
KEYS = {
    "run_name": "benchmark",
    "hardware": "cpu",
    "skip_jax_distributed_system": True,
    "dataset_type": "synthetic",
    "attention": "dot_product",
    "logits_via_embedding": True,
    "weight_dtype": "float32",
    "learning_rate": 3e-4,
    "steps": 1_000_000,
    "enable_checkpointing": False,
    "enable_tensorboard": False,
    "log_config": False,
}


def main() -> None:
    session = Session()
    # MaxText reads both when it is imported; the first is its own switch for running without Google Cloud's libraries.
    os.environ |= {"DECOUPLE_GCLOUD": "TRUE", "JAX_PLATFORMS": "cpu"}
    import jax
    import maxtext
    from maxtext.trainers.pre_train import train

    wanted, sizes = session.settings, session.settings["sizes"]
    current: dict[str, Any] = {}
    steps = session.steps(lambda: jax.block_until_ready(current["state"]))
    iterate = train.training_loop_iteration

    def take_turn(jax_device_state: dict[str, Any], *rest: Any) -> Any:
        current["state"] = jax_device_state["state"]
        if next(steps, "over") == "over":
            raise SystemExit
        return iterate(jax_device_state, *rest)

    train.training_loop_iteration = take_turn
    keys = KEYS | {
        "base_output_directory": tempfile.mkdtemp(prefix="maxtext"),
        "base_emb_dim": sizes["d_model"],
        "base_num_decoder_layers": sizes["num_layers"],
        "base_mlp_dim": sizes["d_ff"],
        "base_num_query_heads": sizes["num_heads"],
        "base_num_kv_heads": sizes["num_heads"],
        "head_dim": sizes["d_model"] // sizes["num_heads"],
        "vocab_size": sizes["vocab_size"],
        "max_target_length": wanted["sequence_length"],
        "per_device_batch_size": wanted["batch_size"],
        "dtype": wanted["dtype"],
    }
    base = Path(maxtext.__file__).parent / "configs" / "base.yml"
    train.main(["train", str(base), *(f"{key}={value}" for key, value in keys.items())])


if __name__ == "__main__":
    main()
