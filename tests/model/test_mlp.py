"""The MLPs against their definitions in float64 NumPy; counts; what each holds."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from tlm_jax.capacity.shape import MLPS, LayerShape
from tlm_jax.config import default_config
from tlm_jax.errors import UserError
from tlm_jax.model.initial import Deviations
from tlm_jax.model.layers import MATRICES
from tlm_jax.model.mlp import MLP
from tlm_jax.model.settings import settings_from_config

D, F = 16, 40


def gelu(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


DEFINITIONS = {
    "swiglu": lambda gate, up: gate / (1 + np.exp(-gate)) * up,
    "geglu": lambda gate, up: gelu(gate) * up,
    "reglu": lambda gate, up: np.maximum(gate, 0) * up,
    "gelu": lambda gate, up: gelu(up),
    "squared_relu": lambda gate, up: np.maximum(up, 0) ** 2,
}


def weights_and_output(mlp: str):
    shape = LayerShape(d_model=D, d_ff=F, num_heads=2, num_kv_heads=2, head_dim=8, mlp=mlp)
    module = MLP(jax.random.key(3), shape, settings_from_config(default_config(), "cpu"), Deviations(0.2, 0.1, 0.1))
    names = [name for name in ("w_gate", "w_up", "w_down") if hasattr(module, name)]
    x = np.random.default_rng(0).normal(size=(2, 5, D)).astype(np.float32) * 2
    return shape, {name: np.asarray(getattr(module, name)[...]) for name in names}, x, np.asarray(module(x))


@pytest.mark.parametrize("mlp", MLPS)
def test_values_against_the_definition(mlp):
    _, weights, x, got = weights_and_output(mlp)
    w = {name: value.astype(np.float64) for name, value in weights.items()}
    want = DEFINITIONS[mlp](x @ w.get("w_gate", w["w_up"]), x @ w["w_up"]) @ w["w_down"]
    np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.parametrize("mlp", MLPS)
def test_a_plain_mlp_has_no_gate_and_the_budget_knows(mlp):
    shape, weights, _, _ = weights_and_output(mlp)
    attention = 2 * D * (2 + 2) * 8
    assert sum(value.size for value in weights.values()) == shape.matmul_parameters - attention
    assert ("w_gate" in weights) == mlp.endswith("glu")
    assert set(weights) <= set(MATRICES)  # every weight is told to Muon as a matrix


def test_the_kernel_of_a_tpu_is_for_tpus_and_interpreted_on_a_cpu():
    config = default_config()
    config.model.mlp_kernel = "pallas_tpu"
    assert settings_from_config(config, "tpu").mlp_kernel == settings_from_config(config, "cpu").mlp_kernel
    with pytest.raises(UserError, match=r"config.model.mlp_kernel: pallas_tpu does not run on gpu; set it to auto"):
        settings_from_config(config, "gpu")
    config.model.mlp_kernel = "fused"
    with pytest.raises(UserError, match="'fused' is not one of auto, plain, pallas_tpu"):
        settings_from_config(config, "tpu")
