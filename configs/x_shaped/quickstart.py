"""A first × and its uniform twin: 3.1M parameters each, one million tokens of the shipped corpus, on two CPU cores.

    launch/local.sh configs/x_shaped/quickstart.py --output=runs/x_shaped

prepares the text, trains a model whose d_model falls from 208 to 32 and rises again in 8 layers, and its uniform twin
of 128, and writes a report of both. By hand, with the store that makes:

    tlm profile --config=configs/x_shaped/quickstart.py --compare=:profile.width_schedule=uniform
    tlm train --config=configs/x_shaped/quickstart.py --workdir=runs/x --config.data.store=runs/x_shaped/store

and the twin with another --workdir and --config.profile.width_schedule=uniform. Weights in matrices that have an effect
are exactly as many in both; the × takes 0.9 % fewer FLOPs and its key/value cache is 9.4 % smaller.

The shape and the recipe are those of Variable-Width Transformers (arXiv 2606.18246) in small: narrowest at three
quarters of the depth at 0.3 times the width, muP's multipliers, the initialisation, an eighth of the learning rate for
the layers' matrices. Ours: the cosine schedule and its peak, the better of 1e-2 and 3e-2 for the uniform twin.
"""

from ml_collections import ConfigDict

from tlm_jax.config import default_config


def get_config() -> ConfigDict:
    c = default_config()
    c.name = "x-shaped-quickstart"

    c.profile.width_schedule = "x"
    c.profile.bottleneck_ratio = 0.3
    c.profile.bottleneck_depth = 0.75  # layer 6 of 8
    c.profile.width_multiple_of = 16
    c.profile.width_budget = "exact"
    c.profile.num_layers = 8
    c.profile.d_model = 128
    c.profile.d_ff = 512  # 4 · d_model in every layer
    c.profile.num_heads = 4
    c.profile.num_kv_heads = 4

    c.model.vocab_size = 4096
    c.model.tied_embeddings = False
    c.model.init_deviation = 0.1 / 8**0.5
    c.model.embedding_init_deviation = 0.1
    c.model.embedding_multiplier = 12.0
    c.model.residual_multiplier = 0.22
    c.model.logits_multiplier = 1 / 8
    c.model.attention_scale = "inverse"

    c.data.sequence_length = 256

    c.train.num_steps = 488  # 8 x 256 x 488 = 999,424 tokens
    c.train.global_batch_size = 8
    c.train.optimizer = "adamw"
    c.train.learning_rate = 3e-2
    c.train.groups = ({"match": r"\.(attention|mlp)\.w", "learning_rate_multiplier": 0.125},)
    c.train.weight_decay_exclude = ("norm",)
    c.train.warmup_steps = 40
    c.train.epsilon = 1e-10

    c.validation.every_steps = 122
    c.validation.num_windows = 64

    c.checkpoint.every_steps = 244
    c.checkpoint.every_seconds = 120.0

    c.log.every_steps = 4
    c.log.norms_every_steps = 61
    return c.lock()
