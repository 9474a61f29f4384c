"""XLA's words for memory that does not suffice, as one line."""

from __future__ import annotations

import gzip

import jax
import jax.numpy as jnp
import pytest

from tlm_jax.errors import UserError
from tlm_jax.parallel import memory
from tlm_jax.parallel.memory import told_when_exhausted

Error = jax.errors.JaxRuntimeError


class Device:
    def __init__(self, number: int, in_use: int) -> None:
        self.id, self.platform, self.device_kind = number, "gpu", "NVIDIA H200"
        self._in_use = in_use

    def memory_stats(self) -> dict[str, int]:
        return {"bytes_limit": 100 << 30, "bytes_in_use": self._in_use}


def test_what_no_machine_has_is_told_with_its_size():
    with pytest.raises(UserError) as told, told_when_exhausted("ask for less"):
        jnp.zeros(1 << 50, jnp.float32)  # 4 PiB: beyond what an address can name
    line = str(told.value)
    assert line.startswith("cpu device ")
    assert ": memory does not suffice: Out of memory allocating " in line
    assert "4503599627370496 bytes (4,194,304.00 GiB); ask for less" in line
    assert "\n" not in line


def test_of_an_accelerator_the_fullest_device_and_its_memory_are_told(monkeypatch):
    monkeypatch.setattr(memory.jax, "local_devices", lambda: [Device(0, 1 << 30), Device(1, 99 << 30)])
    with pytest.raises(UserError) as told, told_when_exhausted("ask for less"):
        raise Error(
            "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 2147483648 bytes.\nBuffers:\n" + "x" * 999
        )
    line = str(told.value)
    assert line.startswith("gpu device 1, NVIDIA H200 with 100.00 GiB to allocate from, 99.00 GiB of it in use: ")
    assert "allocate 2147483648 bytes. Buffers: xxx" in line
    assert line.endswith("… (2.00 GiB); ask for less")
    assert len(line) < 600


def test_what_the_devices_hold_is_written_where_there_is_a_directory(tmp_path):
    kept = jnp.zeros(1 << 20, jnp.float32)
    with pytest.raises(UserError) as told, told_when_exhausted("less", tmp_path):
        raise Error("RESOURCE_EXHAUSTED: Out of memory")
    profile = tmp_path / "memory_0.pprof"
    assert f"Out of memory; what the devices hold is in {profile}; less" in str(told.value)
    assert b"buffer" in gzip.decompress(profile.read_bytes())
    assert kept.size
    profile.unlink()
    profile.mkdir()  # it cannot be written
    with pytest.raises(UserError, match="no memory profile could be written"), told_when_exhausted("less", tmp_path):
        raise Error("RESOURCE_EXHAUSTED: Out of memory")
    with pytest.raises(UserError, match="Out of memory; less"), told_when_exhausted("less", tmp_path / "none"):
        raise Error("RESOURCE_EXHAUSTED: Out of memory")


def test_other_errors_keep_their_traceback():
    with pytest.raises(Error), told_when_exhausted("ask for less"):
        raise Error("INTERNAL: a bug; RESOURCE_EXHAUSTED is only named")


@pytest.mark.parametrize("start", ["RESOURCE_EXHAUSTED: ", "INTERNAL: Error dispatching computation: "])
def test_a_compilers_words_and_those_of_a_program_begun_before(start):
    with pytest.raises(UserError, match="memory does not suffice: Out of memory; less"), told_when_exhausted("less"):
        raise Error(f"{start}Out of memory")
