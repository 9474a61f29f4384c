"""Mesh inference and placement rules."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from tlm_jax.errors import UserError
from tlm_jax.parallel.devices import PEAK_FLOPS, peak_flops
from tlm_jax.parallel.mesh import batch_shards, make_mesh, mesh_shape
from tlm_jax.parallel.rules import parameter_spec, pin_batch, replicated_bytes


def sizes(data=1, fsdp=1, expert=1, tensor=1):
    return {"data": data, "fsdp": fsdp, "expert": expert, "tensor": tensor}


def test_one_axis_is_inferred():
    assert mesh_shape(sizes(data=-1, fsdp=2), 8) == sizes(data=4, fsdp=2)
    assert mesh_shape(sizes(data=2, fsdp=4), 8) == sizes(data=2, fsdp=4)


@pytest.mark.parametrize("wrong", [sizes(data=-1, fsdp=-1), sizes(data=0), sizes(data=3), sizes(data=-1, fsdp=3)])
def test_a_mesh_that_does_not_fit_is_an_error(wrong):
    with pytest.raises(UserError, match=r"config\.mesh"):
        mesh_shape(wrong, 8)


def test_batch_shards_counts_data_and_fsdp():
    assert batch_shards() == 1
    with jax.set_mesh(make_mesh(sizes(data=2, fsdp=2, tensor=2))):
        assert batch_shards() == 4


@pytest.mark.parametrize(
    ("shape", "axes", "mesh", "spec"),
    [
        ((64, 160), ("embed", "mlp"), sizes(fsdp=8), P("fsdp", None)),
        ((60, 160), ("embed", "mlp"), sizes(fsdp=8), P(None, "fsdp")),  # the width does not divide: the next axis
        ((60, 150), ("embed", "mlp"), sizes(fsdp=8), P(None, None)),  # nothing divides: replicated
        ((3, 64, 160), ("embed", "mlp"), sizes(fsdp=8), P(None, "fsdp", None)),  # a stack's layer axis is never cut
        ((8, 63, 161), ("embed", "mlp"), sizes(fsdp=8), P(None, None, None)),
        ((64, 160), ("embed", "mlp"), sizes(fsdp=2, tensor=4), P("fsdp", "tensor")),
        ((304, 64), ("vocabulary", "embed"), sizes(fsdp=4, tensor=2), P("tensor", "fsdp")),
        ((64, 4, 16), ("embed", "heads", None), sizes(fsdp=2, tensor=4), P("fsdp", "tensor", None)),
    ],
)
def test_placement(shape, axes, mesh, spec):
    assert parameter_spec(shape, axes, mesh) == spec


def test_replicated_bytes_are_counted():
    mesh = make_mesh(sizes(fsdp=8))
    leaves = [jax.ShapeDtypeStruct((64, 8), np.float32), jax.ShapeDtypeStruct((7,), np.float32)]
    shardings = [jax.sharding.NamedSharding(mesh, P("fsdp")), jax.sharding.NamedSharding(mesh, P())]
    assert replicated_bytes(leaves, shardings) == 28


def test_pins_are_no_constraint_without_a_mesh():
    x = np.ones((3, 2), np.float32)
    assert pin_batch(x) is x


def test_a_platform_that_does_not_start_is_told_in_one_line(monkeypatch):
    def devices():
        raise RuntimeError("Unable to initialize backend 'tpu'")

    monkeypatch.setattr(jax, "devices", devices)
    with pytest.raises(UserError, match="jax finds no device"):
        make_mesh(sizes())


def test_a_cpu_is_measured_and_an_accelerator_looked_up():
    value, source = peak_flops(jax.devices()[0], np.dtype("float32"))
    assert value > 1e8
    assert "measured" in source
    with jax.set_mesh(make_mesh(sizes(data=2, fsdp=4))):  # as the loop calls it
        assert peak_flops(jax.devices()[0], np.dtype("float32"))[1] == source

    class Device:
        device_kind = "NVIDIA H100 80GB HBM3"

    assert peak_flops(Device(), np.dtype("float32"))[0] == PEAK_FLOPS["H100"]
