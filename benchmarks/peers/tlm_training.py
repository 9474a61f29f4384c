"""Worker: tlm_jax's training step as the loop calls it, batches brought to the device one by one."""

from __future__ import annotations

import jax
import numpy as np
from serving import Session

from tlm_jax.capacity.from_config import profile_from_config
from tlm_jax.config import default_config
from tlm_jax.model.functional import FunctionalDecoder
from tlm_jax.model.settings import settings_from_config
from tlm_jax.parallel.devices import to_global
from tlm_jax.parallel.mesh import make_mesh
from tlm_jax.parallel.rules import batch_sharding
from tlm_jax.train.optimizer import build_optimizer
from tlm_jax.train.schedules import learning_rate_schedule
from tlm_jax.train.state import abstract_state, init_state
from tlm_jax.train.step import make_train_step


def main() -> None:
    session = Session()
    wanted = session.settings
    sizes = dict(wanted["sizes"])
    config = default_config()
    config.model.vocab_size = sizes.pop("vocab_size")
    config.model.compute_dtype = wanted["dtype"]
    config.profile.update({**sizes, "num_kv_heads": sizes["num_heads"], "schedule": "uniform"})
    B, T = wanted["batch_size"], wanted["sequence_length"]
    tokens = np.random.default_rng(0).integers(config.model.vocab_size, size=(B, T + 1), dtype=np.int32)
    ones = np.ones((B, T), np.int32)
    host = {
        "inputs": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "mask": ones.astype(bool),
        "segment_ids": ones,
        "positions": np.tile(np.arange(T, dtype=np.int32), (B, 1)),
        "bytes": np.full(B, T, np.int32),
        "requests": np.zeros((B, 2), np.int32),
    }
    mesh = make_mesh({"data": 1, "fsdp": 1, "expert": 1, "tensor": 1}, jax.devices()[:1])
    model = FunctionalDecoder(profile_from_config(config), settings_from_config(config))
    optimizer = build_optimizer(config)
    with jax.set_mesh(mesh):
        abstract = abstract_state(model, optimizer, mesh)
        state = init_state(model, optimizer, abstract, 0)
        step = make_train_step(model, optimizer, learning_rate_schedule(config), 1, abstract)

        def wait() -> None:
            jax.block_until_ready(state)

        for _ in session.steps(wait):
            state, _ = step(state, to_global(host, batch_sharding(mesh)))


if __name__ == "__main__":
    main()
