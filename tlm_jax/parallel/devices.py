"""What the hardware can do: peak matmul rates, memory in use, and host arrays brought to it."""

from __future__ import annotations

import os
import re
import resource
import time
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from tlm_jax.errors import UserError

# Dense bfloat16 FLOP/s per jax device, from the vendors' data sheets; the first key that the device kind contains.
PEAK_FLOPS = {
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5": 459e12,
    "TPU v6": 918e12,
    "TPU7x": 2307e12 / 2,  # two devices a chip
    "TPU v4": 275e12,
    "A100": 312e12,
    "H100": 989e12,
    "H200": 989e12,
    "B200": 2250e12,
}


def peak_flops(device: jax.Device, dtype: jnp.dtype) -> tuple[float, str]:
    """Peak FLOP/s of a device and where the figure comes from.

    A device without a data sheet here (a CPU, say) is measured: the best of a few square matmuls of `dtype`, which is
    a fair ceiling for a model, and shifts with the load of the machine.
    """
    for kind, peak in PEAK_FLOPS.items():
        if kind in device.device_kind:
            return peak, "data sheet, dense bfloat16"
    size = 1024 if device.platform == "cpu" else 8192
    square = jax.device_put(np.ones((size, size), np.float32), device).astype(dtype)
    matmul = jax.jit(lambda a: a @ a)
    seconds = []
    with jax.set_mesh(jax.sharding.Mesh(np.array([device]), ("one",))):  # in place of the run's mesh of all devices
        jax.block_until_ready(matmul(square))
        for _ in range(5):
            start = time.perf_counter()
            jax.block_until_ready(matmul(square))
            seconds.append(time.perf_counter() - start)
    # Several forced host devices share the cores that one matmul just used alone.
    sharers = len(jax.local_devices()) if device.platform == "cpu" else 1
    return 2 * size**3 / min(seconds) / sharers, f"measured {size}^3 {dtype.name} matmul"


def memory_bytes() -> int | None:
    """Peak bytes in use on the fullest local device; on CPU the process's peak resident size."""
    stats = [device.memory_stats() for device in jax.local_devices()]
    peaks = [s["peak_bytes_in_use"] for s in stats if s and "peak_bytes_in_use" in s]
    if peaks:
        return max(peaks)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


_CPU_DEVICES_FLAG = re.compile(r"--xla_force_host_platform_device_count=(\d+)")


def _make_room_for_cpu_devices() -> None:
    """Gives XLA's CPU client threads enough for several devices, unless NPROC says how many; before jax starts.

    By default they are as many as the cores or devices: too few when a device waits in two collectives at a time, and
    such a program never ends.
    """
    forced = _CPU_DEVICES_FLAG.findall(os.environ.get("XLA_FLAGS", ""))
    count = max([jax.config.values["jax_num_cpu_devices"], *map(int, forced)])
    if count > 1:
        os.environ.setdefault("NPROC", str(max(4 * count, os.cpu_count() or 1)))


def all_devices() -> list[jax.Device]:
    """The devices of all hosts.

    Raises:
      UserError: jax cannot start on the platform that the environment asks for.
    """
    _make_room_for_cpu_devices()
    try:
        return jax.devices()
    except (RuntimeError, ValueError, AssertionError) as error:
        told = (str(error).splitlines() or ["no such device"])[0]
        raise UserError(
            f"jax finds no device ({told})",
            where="JAX_PLATFORMS" if os.environ.get("JAX_PLATFORMS") else "jax",
            mend="unset JAX_PLATFORMS, or install jax for the accelerator, such as jax[cuda12] or jax[tpu]",
        ) from error


def use_compilation_cache() -> None:
    """Keeps compiled programs across processes, where JAX_COMPILATION_CACHE_DIR or the user's cache directory says."""
    if not jax.config.values["jax_compilation_cache_dir"]:
        base = os.environ.get("XDG_CACHE_HOME", os.path.expanduser("~/.cache"))
        jax.config.update("jax_compilation_cache_dir", os.path.join(base, "tlm_jax", "xla"))


def to_global(batch: Mapping[str, np.ndarray], sharding: NamedSharding) -> dict[str, jax.Array]:
    """Global arrays from each host's rows of a batch."""
    return {key: jax.make_array_from_process_local_data(sharding, value) for key, value in batch.items()}
