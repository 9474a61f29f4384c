"""A small run on disk: documents, their token store, and a checkpoint with a model of random weights."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tlm_jax.capacity.from_config import profile_from_config
from tlm_jax.checkpoint.layout import Metadata
from tlm_jax.checkpoint.manager import CheckpointManager
from tlm_jax.config import default_config, to_json
from tlm_jax.data.prepare import Settings, prepare
from tlm_jax.data.store import TokenStore
from tlm_jax.data.tokenizer import ByteTokenizer
from tlm_jax.model.functional import FunctionalDecoder
from tlm_jax.model.settings import settings_from_config

STEP = 30


@dataclass(frozen=True)
class Run:
    workdir: Path
    store: TokenStore
    held_out_file: Path  # the held-out documents as JSON Lines
    model: FunctionalDecoder
    parameters: dict


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    directory = tmp_path_factory.mktemp("run")
    rng = np.random.default_rng(0)
    words = ["a", "be", "sea", "whale", "ship", "café", "\n", "東京", "of the"]
    texts = [" ".join(rng.choice(words, rng.integers(1, 30))) + f" {i}" for i in range(60)]
    documents = directory / "documents.jsonl"
    documents.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    tokenizer = ByteTokenizer()
    store = prepare([str(documents)], tokenizer, directory / "store", Settings(holdout=0.3), workers=1)
    split = store.split("validation")
    held_out = [
        tokenizer.decode(split.read(*borders)) for borders in np.stack([split.documents[:-1], split.documents[1:]], 1)
    ]
    held_out_file = directory / "held_out.jsonl"
    held_out_file.write_text("".join(json.dumps({"text": text}) + "\n" for text in held_out))

    config = default_config()
    config.profile.update(
        schedule="cosine", num_layers=3, d_model=32, d_ff=64, num_heads=4, num_kv_heads=2, multiple_of=16
    )
    config.model.vocab_size = 264
    config.model.init_scale = 2.0
    config.data.store = str(store.path)
    config.data.sequence_length = 48
    profile = profile_from_config(config)
    model = FunctionalDecoder(profile, settings_from_config(config, "cpu"))
    parameters = jax.jit(model.init)(jax.random.key(1))
    metadata = Metadata(to_json(config), profile.to_json(), tokenizer.kind, tokenizer.to_bytes())
    with CheckpointManager(
        directory / "work" / "checkpoints",
        every_steps=10,
        every_seconds=0,
        keep_last=2,
        timeout_seconds=60,
        metadata=metadata,
    ) as manager:
        for step in (STEP - 10, STEP):
            scaled = jax.tree.map(lambda leaf, step=step: leaf * (step / STEP), parameters)
            manager.save(step, {"params": scaled, "step": jnp.int32(step)}, {"next_index": step}, force=True)
    return Run(directory / "work", store, held_out_file, model, parameters)
