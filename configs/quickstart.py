"""A first run: 5.6M parameters, one million tokens of the shipped corpus, six to eight minutes on two CPU cores.

    launch/local.sh configs/quickstart.py

prepares the text, trains this tapered model and its uniform twin of the same budget, and writes a report. By hand:

    tlm tokenizer --input corpus/*.jsonl.gz --vocab-size=4096 --output=runs/quickstart/tokenizer.model
    tlm prepare corpus/*.jsonl.gz --tokenizer=runs/quickstart/tokenizer.model \\
        --output=runs/quickstart/store --holdout=0.02
    tlm train --config=configs/quickstart.py --workdir=runs/quickstart/run --config.data.store=runs/quickstart/store

and the twin with another --workdir and --config.profile.schedule=uniform. Expect 1.69 to 1.71 held-out
bits per byte from both (gzip -9: 2.91, a bigram model: 1.78).
"""

from ml_collections import ConfigDict

from tlm_jax.config import default_config


def get_config() -> ConfigDict:
    c = default_config()
    c.name = "quickstart"

    c.profile.schedule = "cosine"  # MLP widths fall from 960 to 320, 640 on average
    c.profile.num_layers = 6
    c.profile.d_model = 256
    c.profile.d_ff = 640
    c.profile.num_heads = 4
    c.profile.num_kv_heads = 4
    c.profile.start_ratio = 1.5
    c.profile.end_ratio = 0.5

    c.model.vocab_size = 4096

    c.data.sequence_length = 256

    c.train.num_steps = 488  # 8 x 256 x 488 = 999,424 tokens
    c.train.global_batch_size = 8
    c.train.optimizer = "muon"
    c.train.learning_rate = 6e-3
    c.train.adam_learning_rate = 2e-2
    c.train.warmup_steps = 24

    c.validation.every_steps = 122
    c.validation.num_windows = 64

    c.checkpoint.every_steps = 244
    c.checkpoint.every_seconds = 120.0

    c.log.every_steps = 4
    c.log.norms_every_steps = 61
    return c.lock()
