"""What each remat policy keeps, what it computes again, and that gradients do not change."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from test_decoder import VOCABULARY, decoder, example, gradients, parameters

from tlm_jax.config import default_config
from tlm_jax.errors import UserError
from tlm_jax.model.functional import FunctionalDecoder
from tlm_jax.model.remat import POLICIES
from tlm_jax.model.settings import settings_from_config
from tlm_jax.train.step import loss_sum

ON_CPU = [name for name in POLICIES if name != "minimal_offloaded"]


def abstract_batch(B: int, T: int):
    return {key: jax.ShapeDtypeStruct((B, T), value.dtype) for key, value in example().items()}


def gradient_of(model: FunctionalDecoder):
    return jax.jit(jax.grad(lambda p, b: loss_sum(model, p, b)))


@pytest.mark.parametrize("remat", [name for name in ON_CPU if name != "none"])
def test_remat_changes_no_gradient(remat):
    options = {"qk_norm": True, "windows": (8, 0), "attention_soft_cap": 2.0}
    batch, plain = example(), decoder(**options)
    want = gradients(plain, parameters(plain), batch)
    got = gradients(decoder(remat=remat, **options), parameters(plain), batch)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, want)


@pytest.mark.slow
def test_memory_is_in_the_order_of_what_is_kept():
    def temporary_bytes(remat: str) -> int:
        model = decoder(remat=remat, schedule="uniform", plateaus=0, num_layers=8)
        step = gradient_of(model).lower(model.abstract_parameters, abstract_batch(8, 256))
        return step.compile().memory_analysis().temp_size_in_bytes

    order = ["full", "context", "context_mlp", "minimal", "none"]
    measured = [temporary_bytes(remat) for remat in order]
    assert measured == sorted(set(measured))
    assert measured[0] < temporary_bytes("dots") < measured[-1]


@pytest.mark.parametrize(
    ("remat", "again"),
    [
        ("full", 8),  # all but the MLP's last: queries, keys, values, logits, context, output, gate, up
        ("context", 6),
        ("context_mlp", 4),
        ("dots", 2),  # logits and context
        ("minimal", 0),
    ],
)
def test_products_computed_again(remat, again):
    def products(remat: str) -> int:
        model = decoder(remat=remat, schedule="uniform", plateaus=0)
        lowered = gradient_of(model).lower(model.abstract_parameters, abstract_batch(2, 64))
        return lowered.as_text().count("stablehlo.dot_general")

    assert products(remat) - products("none") == again


def lowered_for_tpu(remat: str) -> str:
    config = default_config()
    config.profile.update({"num_layers": 3, "d_model": 256, "d_ff": 256, "num_heads": 2, "num_kv_heads": 1})
    config.model.update(vocab_size=VOCABULARY, remat=remat, mlp_kernel="plain")
    like = decoder(num_layers=3, d_model=256, d_ff=256, num_heads=2, num_kv_heads=1, schedule="uniform", plateaus=0)
    model = FunctionalDecoder(like.profile, settings_from_config(config, "tpu"))
    traced = gradient_of(model).trace(model.abstract_parameters, abstract_batch(2, 128))
    return traced.lower(lowering_platforms=("tpu",)).as_text()


@pytest.mark.parametrize(
    ("remat", "kernels", "moved"), [("none", 3, 0), ("full", 4, 0), ("context", 3, 0), ("minimal_offloaded", 3, 6)]
)
def test_the_tpu_kernel_runs_again_only_where_nothing_of_it_is_kept(remat, kernels, moved):
    text = lowered_for_tpu(remat)
    assert text.count("tpu_custom_call") == kernels  # one forward, two backward
    assert text.count("pinned_host") == moved


def test_offloading_where_there_is_nowhere_to_is_an_error():
    config = default_config()
    config.model.remat = "minimal_offloaded"
    with pytest.raises(
        UserError, match=r"config.model.remat: minimal_offloaded has nowhere to offload to on cpu; take"
    ):
        settings_from_config(config, "cpu")
    assert settings_from_config(config, "gpu").remat == "minimal_offloaded"


def test_settings_out_of_range_are_told_together():
    config = default_config()
    config.model.update(remat="minimum", attention_soft_cap=-1.0, final_soft_cap=float("inf"))
    with pytest.raises(UserError, match=r"3 problems: .*'minimum' is not one of none, dots.*attention_soft_cap.*final"):
        settings_from_config(config, "cpu")
