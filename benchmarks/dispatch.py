"""Host time to dispatch a training step, against a jit of the same program over a plain dictionary of its leaves.

    python benchmarks/dispatch.py [--rounds=20]

The model is tiny, so that the host's part is what is timed: from the call to its return, the device idle before each
call. The two alternate. Prints the medians, their ranges and their ratio; the bar is 1.5.
"""

from __future__ import annotations

import argparse
import statistics
import time

import jax
import numpy as np

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

CALLS_A_ROUND = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds

    config = default_config()
    config.profile.update({"schedule": "cosine", "num_layers": 12, "d_model": 16, "d_ff": 64, "num_heads": 2})
    config.profile.num_kv_heads = 2
    config.model.vocab_size = 64
    mesh = make_mesh({"data": 1, "fsdp": 1, "expert": 1, "tensor": 1}, jax.devices()[:1])
    model = FunctionalDecoder(profile_from_config(config), settings_from_config(config))
    optimizer = build_optimizer(config)
    B, T = 1, 8
    ones = np.ones((B, T), np.int32)
    host: dict[str, np.ndarray] = dict.fromkeys(("inputs", "targets", "segment_ids", "positions"), ones)
    host.update(mask=ones.astype(bool), bytes=np.ones(B, np.int32), requests=np.zeros((B, 2), np.int32))
    with jax.set_mesh(mesh):
        abstract = abstract_state(model, optimizer, mesh)
        state = init_state(model, optimizer, abstract, 0)
        step = make_train_step(model, optimizer, learning_rate_schedule(config), 1, abstract)
        batch = to_global(host, batch_sharding(mesh))
        leaves, structure = jax.tree.flatten(state)
        count = len(leaves) + len(batch)
        plain = {f"leaf_{i}": leaf + 0 for i, leaf in enumerate(leaves)}

        def plain_step(tree, batch):
            new, metrics = step(jax.tree.unflatten(structure, [tree[f"leaf_{i}"] for i in range(len(leaves))]), batch)
            return {f"leaf_{i}": leaf for i, leaf in enumerate(jax.tree.leaves(new))}, metrics

        plain_step = jax.jit(plain_step, donate_argnums=0)

        def timed(call, argument):
            times = []
            for _ in range(CALLS_A_ROUND):
                jax.block_until_ready(argument)
                start = time.perf_counter()
                argument = call(argument)
                times.append(time.perf_counter() - start)
            return statistics.median(times), argument

        ours, theirs = [], []
        for i in range(rounds + 1):
            seconds, state = timed(lambda s: step(s, batch)[0], state)
            reference, plain = timed(lambda s: plain_step(s, batch)[0], plain)
            if i:  # the first round compiles
                ours.append(seconds * 1e6)
                theirs.append(reference * 1e6)
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    for name, values in (("training step", ours), ("plain dictionary", theirs)):
        print(f"{name:17} {statistics.median(values):8.0f} µs  ({min(values):.0f} … {max(values):.0f}), {count} leaves")
    print(f"{'ratio':17} {statistics.median(ratios):8.2f}     ({min(ratios):.2f} … {max(ratios):.2f})")


if __name__ == "__main__":
    main()
