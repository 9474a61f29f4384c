"""×-shaped 2B: d_model from 3040 down to 480 and up again in 40 layers, 104.9B tokens.

The 2B model of Variable-Width Transformers (arXiv 2606.18246) in the paper's widths. What its layers are and cost,
and that beside the uniform twin, which is one override away:

    tlm profile --config=configs/x_shaped/2b.py
    tlm profile --config=configs/x_shaped/2b.py --compare=:profile.width_schedule=uniform

`tlm train` takes either; the twin with --config.profile.width_schedule=uniform.

`2b.py:hardware` is the same shape at the same budget for accelerators: heads of 128, as many as a layer's width has,
every d_model and d_ff a multiple of 128, the weights of its matrices exactly the twin's. The embedding keeps its 1600
coordinates, no multiple of 128, and the twin 16 heads of 100. `2b.py:tiny` is the paper's shape in small.

Parameters: 1,986.8M stored, of which 1,956.2M have an effect (the end layers' matrices beyond the embedding's 1600
coordinates have none); the uniform twin has 1,959.4M. The key/value cache is 11.0 % smaller. Cost, reckoned and not
measured: 1.28e21 training FLOPs (causal attention), about 896 hours of one H100 at 40 % MFU; the twin 1.3e21.

Expect: the paper reports a training loss of 2.726, and 2.751 of the uniform model, one run each.

From the paper and its authors' code: depth, widths, heads, SwiGLU, untied embeddings, vocabulary, sequence length
4096, batches, steps, warm-up, AdamW with its betas, epsilon, decay and clipping, the power law min(1e-2, 4 · batch ·
tokens^-0.566), an eighth of that rate for the layers' matrices, no decay of norm scales, muP's multipliers (embedding
12, residual branches 0.22, logits 1/8, attention 1/head_dim), the initialisation. Ours: seeds, the corpus, attention
inside documents only, the hardware variant. `tlm prepare` gives cl100k_base 100,277 ids, the paper 100,263: with such
a store, --config.model.vocab_size=100277.
"""

from ml_collections import ConfigDict

from tlm_jax.config import default_config


def get_config(variant: str = "paper") -> ConfigDict:
    if variant not in ("paper", "hardware", "tiny"):
        raise ValueError(f"the variants are paper, hardware and tiny, not {variant!r}")
    c = default_config()
    c.name = "x-shaped-2b"

    c.profile.width_schedule = "x"
    c.profile.width_progression = "geometric"
    c.profile.bottleneck_ratio = 0.3
    c.profile.bottleneck_depth = 0.75  # layer 30 of 40
    c.profile.width_multiple_of = 32
    c.profile.round_widest = True
    c.profile.width_budget = "rounded"
    c.profile.num_layers = 40
    c.profile.d_model = 1600
    c.profile.d_ff = 6400  # 4 · d_model in every layer
    c.profile.num_heads = 16
    c.profile.num_kv_heads = 16

    c.model.vocab_size = 100263  # cl100k_base
    c.model.tied_embeddings = False
    c.model.init_deviation = 0.1 / 8**0.5  # in layers as wide as the embedding; the variance goes with 1 / d_model
    c.model.init_width_power = 0.5
    c.model.init_depth_scaling = True
    c.model.embedding_init_deviation = 0.1
    c.model.embedding_multiplier = 12.0
    c.model.residual_multiplier = 0.22
    c.model.logits_multiplier = 1 / 8
    c.model.attention_scale = "inverse"
    c.model.remat = "full"

    c.data.sequence_length = 4096
    c.data.num_workers = 2

    c.train.num_steps = 25000  # x 4,194,304 tokens = 104.9B tokens
    c.train.global_batch_size = 1024
    c.train.optimizer = "adamw"
    c.train.schedule = "power"
    c.train.learning_rate = 1e-2  # never reached
    c.train.power_amplitude = 4.0
    c.train.power_exponent = -0.566
    c.train.decay_steps = 1  # the law alone, without a decay at the end
    c.train.final_learning_rate_ratio = 1.0
    c.train.warmup_steps = 2000
    c.train.groups = ({"match": r"\.(attention|mlp)\.w", "learning_rate_multiplier": 0.125},)
    c.train.weight_decay = 0.1
    c.train.weight_decay_exclude = ("norm",)
    c.train.beta1 = 0.9
    c.train.beta2 = 0.95
    c.train.epsilon = 1e-10
    c.train.gradient_clip = 1.0

    c.validation.every_steps = 2000  # ours, as are the next
    c.validation.num_windows = 512

    c.checkpoint.every_steps = 5000
    c.checkpoint.every_seconds = 1800.0

    c.mesh.data = 1
    c.mesh.fsdp = -1  # all devices
    if variant == "hardware":
        _fit_to_tiles(c)
    if variant == "tiny":
        _shrink(c)
    return c.lock()


def _fit_to_tiles(c: ConfigDict) -> None:
    """Widths in multiples of 128 with heads of 128, at exactly the uniform twin's weights."""
    c.name += "-hardware"
    c.profile.width_multiple_of = 128
    c.profile.fixed_head_dim = 128
    c.profile.multiple_of = 128
    c.profile.width_budget = "exact"


def _shrink(c: ConfigDict) -> None:
    """The same shape and recipe at a size for a CPU."""
    c.name += "-tiny"
    c.profile.num_layers = 8
    c.profile.d_model = 128
    c.profile.d_ff = 512
    c.profile.num_heads = 4
    c.profile.num_kv_heads = 4
    c.profile.width_multiple_of = 16

    c.model.vocab_size = 1024
    c.model.remat = "none"

    c.data.sequence_length = 128
    c.data.num_workers = 0

    c.train.num_steps = 200
    c.train.global_batch_size = 8
    c.train.warmup_steps = 20

    c.validation.every_steps = 100
    c.validation.num_windows = 32
    c.checkpoint.every_steps = 100
    c.log.every_steps = 5
