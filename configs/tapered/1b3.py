"""Tapered 1.3B: cosine MLP widths from 8448 to 2816 in 24 layers, 1,299M parameters, 100.0B tokens.

The 1.3B model of Tapered Language Models (arXiv 2606.23670), as far as it is described. From text to a comparison:

    tlm tokenizer --input texts/*.jsonl.gz --vocab-size=32000 --output=32k.model
    tlm prepare texts/*.jsonl.gz --tokenizer=32k.model --output=store
    tlm train --config=configs/tapered/1b3.py --workdir=runs/1b3 --config.data.store=store

and its uniform twin, equal in parameters and FLOPs, with another --workdir and one override:

    tlm train --config=configs/tapered/1b3.py --workdir=runs/1b3-uniform --config.data.store=store \\
        --config.profile.schedule=uniform

`--config=configs/tapered/1b3.py:tiny` is the same in small, for a CPU: under a minute of training.

Cost, reckoned and not measured: 9.0e20 training FLOPs (causal attention), about 630 hours of one H100 at 40 % MFU.
Parameters, gradients and AdamW moments take 20.8 GB over all devices, cut by `mesh.fsdp`. With `profile.plateaus=6`
the 24 layers compile as 6 runs, at the same budget.

Expect: the paper reports WikiText perplexity 17.17 against 17.39 and LAMBADA perplexity 16.93 against 17.62 for the
uniform twin, one run each, on a corpus and tokenizer that it does not name. Compare twins on your own text, over seeds.

From the paper: cosine 1.5 -> 0.5, multiples of 16, 100.0B tokens, batches of 0.5M tokens, sequence length 4096, AdamW,
cosine learning rate with peak 4e-4, weight decay 0.1, a vocabulary of 32K. Ours, since the paper does not tell: depth,
widths and heads, SwiGLU, tied embeddings, warm-up, betas, epsilon, clipping, final learning rate, seeds, the corpus.
"""

from ml_collections import ConfigDict

from tlm_jax.config import default_config


def get_config(size: str = "full") -> ConfigDict:
    if size not in ("full", "tiny"):
        raise ValueError(f"the sizes are full and tiny, not {size!r}")
    c = default_config()
    c.name = "tapered-1b3"

    c.profile.schedule = "cosine"
    c.profile.start_ratio = 1.5
    c.profile.end_ratio = 0.5
    c.profile.multiple_of = 16
    c.profile.num_layers = 24  # ours, as are the other sizes
    c.profile.d_model = 2048
    c.profile.d_ff = 5632  # 8448 ... 2816, multiples of 256 too: every width is one with profile.multiple_of=256
    c.profile.num_heads = 16
    c.profile.num_kv_heads = 16

    c.model.vocab_size = 32000
    c.model.tied_embeddings = True  # ours
    c.model.remat = "full"

    c.data.sequence_length = 4096
    c.data.num_workers = 2

    c.train.num_steps = 190735  # x 524,288 tokens = 100.0B tokens
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
    c.profile.d_model = 128
    c.profile.d_ff = 352
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
