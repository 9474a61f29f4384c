"""A model of four layers in two plateaus on documents of mixed length, small enough to train many times over."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import numpy as np
from ml_collections import ConfigDict

from tlm_jax.capacity.from_config import profile_from_config
from tlm_jax.config import default_config
from tlm_jax.data.store import MemoryStore
from tlm_jax.data.tokenizer import load_tokenizer
from tlm_jax.data.windows import Windows
from tlm_jax.model.functional import FunctionalDecoder
from tlm_jax.model.settings import settings_from_config
from tlm_jax.parallel.devices import to_global
from tlm_jax.parallel.mesh import make_mesh
from tlm_jax.parallel.rules import batch_sharding
from tlm_jax.train.optimizer import build_optimizer
from tlm_jax.train.schedules import learning_rate_schedule
from tlm_jax.train.state import abstract_state, init_state
from tlm_jax.train.step import MODEL_KEYS, make_train_step

STEPS = 20
BATCH = 16
LENGTH = 32


def small_config(**train) -> ConfigDict:
    """The config; keyword arguments are keys of `config.train`."""
    config = default_config()
    config.profile.update(
        {
            "schedule": "cosine",
            "plateaus": 2,
            "num_layers": 4,
            "d_model": 32,
            "d_ff": 64,
            "num_heads": 4,
            "num_kv_heads": 2,
        }
    )
    config.model.vocab_size = 264
    config.data.sequence_length = LENGTH
    config.train.update({"num_steps": STEPS, "warmup_steps": 4, "global_batch_size": BATCH, "learning_rate": 3e-3})
    config.train.update(train)
    return config


def documents(count: int = 300) -> list[str]:
    """Texts of 1 to 120 characters, from a fixed seed."""
    rng = np.random.default_rng(0)
    words = ["the", "width", "of", "a", "layer", "falls", "with", "depth", "é", "\n", "early", "late"]
    return [" ".join(rng.choice(words, size=rng.integers(1, 24)))[:120] for _ in range(count)]


def batches(steps: int = STEPS) -> list[dict[str, np.ndarray]]:
    """The first batches of the documents' windows, with what the loop adds to them."""
    windows = Windows(MemoryStore(documents(), load_tokenizer("byte")), "validation", LENGTH)
    made = []
    for step in range(steps):
        rows = [windows[(step * BATCH + i) % len(windows)] for i in range(BATCH)]
        batch = {key: np.stack([row[key] for row in rows]) for key in rows[0]}
        # Very unequal masks: some rows count almost nothing.
        batch["mask"][::4, 2:] = False
        batch["requests"] = np.zeros((BATCH, 2), np.int32)
        made.append(batch)
    return made


def build(config: ConfigDict, mesh_sizes: tuple[int, int] = (1, 1)):
    """Model, mesh, state and jitted step of a config on a data × fsdp mesh."""
    sizes = {"data": mesh_sizes[0], "fsdp": mesh_sizes[1], "expert": 1, "tensor": 1}
    mesh = make_mesh(sizes, jax.devices()[: mesh_sizes[0] * mesh_sizes[1]])
    model = FunctionalDecoder(profile_from_config(config), settings_from_config(config))
    optimizer = build_optimizer(config)
    with jax.set_mesh(mesh):
        abstract = abstract_state(model, optimizer, mesh, ema=config.train.ema_decay > 0)
        state = init_state(model, optimizer, abstract, config.seed)
        step = make_train_step(
            model,
            optimizer,
            learning_rate_schedule(config),
            config.train.gradient_accumulation,
            abstract,
            config.train.z_loss,
            config.train.ema_decay,
        )
    return model, mesh, state, step


def place(batch: dict[str, np.ndarray], mesh: jax.sharding.Mesh):
    """The batch on the devices, as the loop puts it there."""
    return to_global({key: batch[key] for key in (*MODEL_KEYS, "bytes", "requests")}, batch_sharding(mesh))


def losses(config: ConfigDict, mesh_sizes: tuple[int, int] = (1, 1)) -> np.ndarray:
    """Mean loss of each step."""
    _, mesh, state, step = build(config, mesh_sizes)
    found = []
    with jax.set_mesh(mesh):
        for batch in batches():
            state, metrics = step(state, place(batch, mesh))
            found.append(metrics["loss_sum"] / metrics["tokens"])
    return np.array(jax.device_get(found))


def write_text(directory: Path) -> Path:
    """The documents as a JSON Lines file."""

    path = directory / "text.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents()))
    return path
