"""Child of `compile.py`: compiles one training step and prints what that took, JSON on one line."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp

from tlm_jax.capacity.from_config import profile_from_config
from tlm_jax.config import default_config
from tlm_jax.model.functional import FunctionalDecoder
from tlm_jax.model.settings import settings_from_config
from tlm_jax.parallel.mesh import make_mesh
from tlm_jax.parallel.rules import batch_sharding
from tlm_jax.train.optimizer import build_optimizer
from tlm_jax.train.schedules import learning_rate_schedule
from tlm_jax.train.state import abstract_state
from tlm_jax.train.step import make_train_step


def main() -> None:
    wanted = json.loads(sys.argv[1])
    config = default_config()
    config.profile.update(wanted["profile"])
    config.model.vocab_size = wanted["vocab_size"]
    B, T = wanted["batch_size"], wanted["sequence_length"]
    mesh = make_mesh({"data": 1, "fsdp": 1, "expert": 1, "tensor": 1}, jax.devices()[:1])
    profile = profile_from_config(config)
    jax.jit(jnp.sin).lower(1.0).compile()  # what the first compilation of a process costs is not the step's

    wall, cpu = time.perf_counter(), time.process_time()
    model = FunctionalDecoder(profile, settings_from_config(config))
    optimizer = build_optimizer(config)
    with jax.set_mesh(mesh):
        abstract = abstract_state(model, optimizer, mesh)
        step: Any = make_train_step(model, optimizer, learning_rate_schedule(config), 1, abstract)
        shapes: dict[str, tuple[tuple[int, ...], Any]] = {
            **dict.fromkeys(("inputs", "targets", "segment_ids", "positions"), ((B, T), jnp.int32)),
            "mask": ((B, T), jnp.bool_),
            "bytes": ((B,), jnp.int32),
            "requests": ((B, 2), jnp.int32),
        }
        batch = {
            key: jax.ShapeDtypeStruct(shape, dtype, sharding=batch_sharding(mesh))
            for key, (shape, dtype) in shapes.items()
        }
        lowered = step.lower(abstract, batch)
        traced_wall, traced_cpu = time.perf_counter(), time.process_time()
        lowered.compile()
    print(
        json.dumps(
            {
                "widths": len(profile.runs()),
                "trace": {"seconds": traced_wall - wall, "cpu_seconds": traced_cpu - cpu},
                "all": {"seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu},
            }
        )
    )


if __name__ == "__main__":
    main()
