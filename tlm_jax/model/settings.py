"""What every layer of a model shares: static, hashable, resolved once from the config."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from tlm_jax.config import default_config
from tlm_jax.errors import UserError, raise_together
from tlm_jax.kernels.gated_mlp import IMPLEMENTATIONS
from tlm_jax.kernels.gated_mlp_tiles import DEVICE_KINDS
from tlm_jax.model.remat import NAMED_POLICIES, OFFLOADING_PLATFORMS, POLICIES, keeps_mlp_products
from tlm_jax.parallel.devices import all_devices

MLP_KEEPS = ("input", "products")  # of the fused MLP, for its backward pass
LAYER_STACKING = ("auto", "unrolled")
# What queries are multiplied by: head_dim to this power. `inverse` is muP's (Yang et al. 2022, arXiv 2203.03466).
ATTENTION_SCALES = {"inverse_sqrt": -0.5, "inverse": -1.0}
COMPUTE_DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


@dataclass(frozen=True)
class ModelSettings:
    """Settings of a `Decoder` that are not per layer; fields as in `config.model`, with nothing left at auto."""

    platform: str  # compiled for: cpu | gpu | tpu
    tpu_generation: str | None  # of the TPUs, where they are known ones
    compute_dtype: str
    rope_theta: float
    norm_epsilon: float
    document_mask: bool
    attention: str
    mlp_kernel: str
    mlp_keeps: str
    layer_stacking: str
    remat: str
    loss_chunk_tokens: int
    init_scale: float
    init_deviation: float
    init_width_power: float
    init_depth_scaling: bool
    embedding_init_deviation: float
    embedding_multiplier: float
    residual_multiplier: float
    logits_multiplier: float
    attention_scale: str
    attention_soft_cap: float
    final_soft_cap: float

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of activations and of the weights where they are used."""
        return jnp.dtype(COMPUTE_DTYPES[self.compute_dtype])


def exact_products(settings: ModelSettings) -> AbstractContextManager[None]:
    """Inside, float32 products are float32: by default TPUs and GPUs make them of shorter floats."""
    return jax.default_matmul_precision("float32") if settings.compute_dtype == "float32" else nullcontext()


def settings_from_config(
    config: ConfigDict, platform: str | None = None, device_kind: str | None = None
) -> ModelSettings:
    """Resolves `config.model` for a platform ("cpu", "gpu", "tpu") and kind of device (default: the first device's).

    Raises:
      UserError: every value outside its choices or range, together.
    """
    m = config.model
    platform = all_devices()[0].platform if platform is None else platform
    dtype = m.compute_dtype
    if dtype == "auto":
        dtype = "float32" if platform == "cpu" else "bfloat16"
    problems = []
    for key, value, choices in (
        ("compute_dtype", dtype, ("auto", *COMPUTE_DTYPES)),
        ("remat", m.remat, POLICIES),
        ("layer_stacking", m.layer_stacking, LAYER_STACKING),
        ("mlp_kernel", m.mlp_kernel, ("auto", *IMPLEMENTATIONS)),
        ("mlp_keeps", m.mlp_keeps, ("auto", *MLP_KEEPS)),
        ("attention_scale", m.attention_scale, tuple(ATTENTION_SCALES)),
    ):
        if value not in choices:
            problems.append(UserError(f"{value!r} is not one of {', '.join(choices)}", where=f"config.model.{key}"))
    multipliers = ("embedding_multiplier", "residual_multiplier", "logits_multiplier")
    for key in ("rope_theta", "norm_epsilon", "loss_chunk_tokens", "init_scale", *multipliers):
        if not 0 < m[key] < math.inf:
            problems.append(UserError(f"must be above 0, not {m[key]}", where=f"config.model.{key}"))
    for key in ("attention_soft_cap", "final_soft_cap", "init_deviation", "embedding_init_deviation"):
        if not 0 <= m[key] < math.inf:
            problems.append(UserError(f"must be 0 or above, not {m[key]}", where=f"config.model.{key}"))
    if not math.isfinite(m.init_width_power):
        problems.append(UserError(f"must be finite, not {m.init_width_power}", where="config.model.init_width_power"))
    elif not m.init_deviation and m.init_width_power != default_config().model.init_width_power:
        what, mend = "is read with init_deviation only, which is 0", "set config.model.init_deviation, such as 0.02"
        problems.append(UserError(what, where="config.model.init_width_power", mend=mend))
    if m.mlp_kernel == "pallas_tpu" and platform not in ("cpu", "tpu"):  # on CPU interpreted, for tests
        problems.append(
            UserError(f"pallas_tpu does not run on {platform}", where="config.model.mlp_kernel", mend="set it to auto")
        )
    offloads = m.remat in NAMED_POLICIES and NAMED_POLICIES[m.remat].offloaded
    if offloads and platform not in OFFLOADING_PLATFORMS:
        where, mend = "config.model.remat", "take minimal, which keeps the same values on the device"
        problems.append(UserError(f"{m.remat} has nowhere to offload to on {platform}", where=where, mend=mend))
    raise_together(problems)
    mlp_keeps = m.mlp_keeps
    if mlp_keeps == "auto":
        mlp_keeps = "products" if keeps_mlp_products(m.remat) else "input"
    return ModelSettings(
        platform=platform,
        tpu_generation=DEVICE_KINDS.get(device_kind or all_devices()[0].device_kind) if platform == "tpu" else None,
        compute_dtype=dtype,
        rope_theta=m.rope_theta,
        norm_epsilon=m.norm_epsilon,
        document_mask=m.document_mask,
        attention=m.attention,
        mlp_kernel=m.mlp_kernel,
        mlp_keeps=mlp_keeps,
        layer_stacking=m.layer_stacking,
        remat=m.remat,
        loss_chunk_tokens=m.loss_chunk_tokens,
        init_scale=m.init_scale,
        init_deviation=m.init_deviation,
        init_width_power=m.init_width_power,
        init_depth_scaling=m.init_depth_scaling,
        embedding_init_deviation=m.embedding_init_deviation,
        embedding_multiplier=m.embedding_multiplier,
        residual_multiplier=m.residual_multiplier,
        logits_multiplier=m.logits_multiplier,
        attention_scale=m.attention_scale,
        attention_soft_cap=m.attention_soft_cap,
        final_soft_cap=m.final_soft_cap,
    )
