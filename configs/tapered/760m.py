"""Tapered 760M: cosine MLP widths from 6528 to 2176 in 24 layers, 757M parameters, 50.0B tokens.

The 760M model of Tapered Language Models (arXiv 2606.23670), as far as it is described. From text to a comparison:

    tlm tokenizer --input texts/*.jsonl.gz --vocab-size=32000 --output=32k.model
    tlm prepare texts/*.jsonl.gz --tokenizer=32k.model --output=store
    tlm train --config=configs/tapered/760m.py --workdir=runs/760m --config.data.store=store

and its uniform twin, equal in parameters and FLOPs, with another --workdir and one override:

    tlm train --config=configs/tapered/760m.py --workdir=runs/760m-uniform --config.data.store=store \\
        --config.profile.schedule=uniform

`--config=configs/tapered/760m.py:tiny` is the same in small, for a CPU: under a minute of training.

Cost, reckoned and not measured: 2.7e20 training FLOPs (causal attention), about 190 hours of one H100 at 40 % MFU.
Parameters, gradients and AdamW moments take 12.1 GB over all devices, cut by `mesh.fsdp`. With `profile.plateaus=6`
the 24 layers compile as 6 runs, at the same budget.

Expect: the paper reports WikiText perplexity 21.42 against 21.86 and LAMBADA perplexity 21.25 against 22.29 for the
uniform twin, one run each, on a corpus and tokenizer that it does not name. Compare twins on your own text, over seeds.

From the paper: cosine 1.5 -> 0.5, multiples of 16, 50.0B tokens, batches of 0.5M tokens, sequence length 4096, AdamW,
cosine learning rate with peak 4e-4, weight decay 0.1, a vocabulary of 32K. Ours, since the paper does not tell: depth,
widths and heads, SwiGLU, tied embeddings, warm-up, betas, epsilon, clipping, final learning rate, seeds, the corpus.
"""

from ml_collections import ConfigDict

from tlm_jax.config import default_config


def get_config(size: str = "full") -> ConfigDict:
    if size not in ("full", "tiny"):
        raise ValueError(f"the sizes are full and tiny, not {size!r}")
    c = default_config()
    c.name = "tapered-760m"

    c.profile.schedule = "cosine"
    c.profile.start_ratio = 1.5
    c.profile.end_ratio = 0.5
    c.profile.multiple_of = 16
    c.profile.num_layers = 24  # ours, as are the other sizes
    c.profile.d_model = 1536
    c.profile.d_ff = 4352  # 6528 ... 2176
    c.profile.num_heads = 16
    c.profile.num_kv_heads = 16

    c.model.vocab_size = 32000
    c.model.tied_embeddings = True  # ours
    c.model.remat = "full"

    c.data.sequence_length = 4096
    c.data.num_workers = 2

    c.train.num_steps = 95368  # x 524,288 tokens = 50.0B tokens
    c.train.global_batch_size = 128
    c.train.optimizer = "adamw"
    c.train.learning_rate = 4e-4
    c.train.weight_decay = 0.1
    c.train.warmup_steps = 2000  # ours, as are the next five
    c.train.final_learning_rate_ratio = 0.1
    c.train.beta1 = 0.9
    c.train.beta2 = 0.95
    c.train.epsilon = 1e-8
    c.train.gradient_clip = 1.0

    c.validation.every_steps = 2000
    c.validation.num_windows = 512

    c.checkpoint.every_steps = 10000
    c.checkpoint.every_seconds = 1800.0

    c.mesh.data = 1
    c.mesh.fsdp = -1  # all devices
    if size == "tiny":
        _shrink(c)
    return c.lock()


def _shrink(c: ConfigDict) -> None:
    """The same schedule and recipe at a size that a CPU trains in under a minute."""
    c.name += "-tiny"
    c.profile.num_layers = 6
    c.profile.d_model = 96
    c.profile.d_ff = 288
    c.profile.num_heads = 4
    c.profile.num_kv_heads = 4

    c.model.vocab_size = 1024
    c.model.remat = "none"

    c.data.sequence_length = 128
    c.data.num_workers = 0

    c.train.num_steps = 200
    c.train.global_batch_size = 8
    c.train.learning_rate = 4e-3
    c.train.warmup_steps = 20

    c.validation.every_steps = 100
    c.validation.num_windows = 32
    c.checkpoint.every_steps = 100
    c.log.every_steps = 5
