"""A tapered model small enough for a laptop's every test: 4 layers in 2 plateaus, a byte tokenizer's vocabulary.

    python -m tlm_jax train --config=tests/train/configs/tiny.py --workdir=D --config.data.store=STORE

A step takes a few milliseconds; saves and validations are frequent.
"""

from ml_collections import ConfigDict

from tlm_jax.config import default_config


def get_config() -> ConfigDict:
    c = default_config()
    c.name = "tiny"

    c.profile.schedule = "cosine"
    c.profile.num_layers = 4
    c.profile.d_model = 32
    c.profile.d_ff = 64
    c.profile.num_heads = 4
    c.profile.num_kv_heads = 2
    c.profile.start_ratio = 1.5
    c.profile.end_ratio = 0.5
    c.profile.plateaus = 2

    c.model.vocab_size = 272
    c.model.loss_chunk_tokens = 64

    c.data.sequence_length = 32

    c.train.num_steps = 12
    c.train.global_batch_size = 8
    c.train.optimizer = "muon"
    c.train.learning_rate = 1e-2
    c.train.adam_learning_rate = 3e-3
    c.train.warmup_steps = 4

    c.validation.every_steps = 5
    c.validation.num_windows = 12

    c.checkpoint.every_steps = 3
    c.checkpoint.every_seconds = 0.0

    c.log.every_steps = 1
    c.log.norms_every_steps = 4
    c.log.tensorboard = False
    c.log.peak_flops = 1e12  # nothing to measure
    return c.lock()
