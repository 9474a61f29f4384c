"""Training with the fused MLP, interpreted, against training with plain products."""

from __future__ import annotations

import numpy as np
import pytest
from small_run import losses, small_config


def config_for(kernel: str, remat: str = "none", keeps: str = "auto"):
    config = small_config()
    config.model.mlp_kernel = kernel
    config.model.remat = remat
    config.model.mlp_keeps = keeps
    return config


@pytest.mark.slow
@pytest.mark.parametrize(
    ("remat", "keeps", "mesh"), [("none", "input", (1, 1)), ("minimal", "auto", (2, 4))], ids=["alone", "2x4 devices"]
)
def test_the_loss_curve_is_the_plain_products(remat, keeps, mesh):
    plain = losses(config_for("plain"))
    np.testing.assert_allclose(losses(config_for("pallas_tpu", remat, keeps), mesh), plain, atol=1e-5)
