"""Damaged files are reported in one line that names the checkpoint and the one to fall back to."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_state import abstract, assert_equal, in_bfloat16, make_mesh, make_params, make_state, place

from tlm_jax.checkpoint.checksum import checksums
from tlm_jax.checkpoint.manager import CheckpointManager
from tlm_jax.checkpoint.restore import read_metadata, restore_parameters
from tlm_jax.errors import UserError


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def remove(path: Path) -> None:
    path.unlink()


def change_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)


def overwrite(path: Path) -> None:
    path.write_text("{}")


def change_a_digit(path: Path) -> None:
    """JSON as before, but not the same."""
    text = path.read_text()
    place = next(i for i, character in enumerate(text) if character.isdecimal() and text[i - 1] in " :[")
    path.write_text(text[:place] + str((int(text[place]) + 1) % 10) + text[place + 1 :])


CASES = [
    (truncate, "params/d/*"),
    (remove, "params/d/*"),
    (change_a_byte, "params/d/*"),
    (truncate, "params/manifest.ocdbt"),
    (remove, "params/manifest.ocdbt"),
    (truncate, "params/_METADATA"),
    (remove, "params/_METADATA"),
    (truncate, "state/d/*"),
    (remove, "state/_METADATA"),
    (truncate, "data/data.json"),
    (remove, "data/data.json"),
    (change_a_digit, "data/data.json"),
    (overwrite, "data/data.json"),
    (truncate, "metadata/data.json"),
    (remove, "metadata/data.json"),
    (overwrite, "metadata/data.json"),
    (change_a_digit, "metadata/data.json"),
    (truncate, "_CHECKPOINT_METADATA"),
]


@pytest.mark.parametrize(("harm", "files"), CASES, ids=[f"{harm.__name__}-{files}" for harm, files in CASES])
def test_damage_is_told_and_the_older_checkpoint_works(
    saved: Path, manager_at: Callable[..., CheckpointManager], harm: Callable[[Path], None], files: str
):
    mesh = make_mesh(2, 4)
    latest = saved / "checkpoints" / "2"
    found = list(latest.glob(files))
    assert found
    for file in found:
        harm(file)
    with manager_at(saved / "checkpoints") as manager:
        with pytest.raises(UserError) as caught:
            manager.restore(abstract(make_state(mesh), mesh))
        message = str(caught.value)
        assert message.startswith(f"{latest}: the checkpoint is damaged: ")
        assert message.endswith(
            f"the newest complete checkpoint before it is step 1: remove {latest} to go on from there"
        )
        assert "\n" not in message
        shutil.rmtree(latest)
        state, _, _ = manager.restore(abstract(make_state(mesh), mesh))
    assert_equal(state, make_state(mesh, 1))


def test_large_arrays_that_lost_their_data(tmp_path: Path, manager_at: Callable[..., CheckpointManager]):
    """Arrays beyond a few kilobytes lie in files of their own."""
    params = {"w": np.random.default_rng(0).standard_normal((512, 512)).astype(np.float32)}
    with manager_at(tmp_path) as manager:
        manager.save(1, {"params": params, "step": np.zeros((), np.int32)}, {}, force=True)
    largest = max((tmp_path / "1" / "params").rglob("*"), key=lambda path: path.stat().st_size)
    assert largest.stat().st_size > 512 * 512
    truncate(largest)
    with pytest.raises(UserError, match=r"1: the checkpoint is damaged: .*; there is no older complete checkpoint$"):
        restore_parameters(tmp_path, abstract(params))


def test_every_changed_bit_of_the_data_is_noticed(tmp_path: Path, manager_at: Callable[..., CheckpointManager]):
    """Random numbers are stored as they are, so a changed bit makes no decoding error."""
    params = {"w": np.random.default_rng(0).standard_normal((256, 256)).astype(np.float32)}
    with manager_at(tmp_path) as manager:
        manager.save(1, {"params": params, "step": np.zeros((), np.int32)}, {}, force=True)
    largest = max((tmp_path / "1" / "params").rglob("*"), key=lambda path: path.stat().st_size)
    content, rng = largest.read_bytes(), np.random.default_rng(1)
    for cast in [False] * 10 + [True] * 5:
        changed = bytearray(content)
        changed[rng.integers(len(content))] ^= 1 << rng.integers(8)
        largest.write_bytes(changed)
        with pytest.raises(UserError, match=r"1: the checkpoint is damaged: "):
            restore_parameters(tmp_path, abstract(in_bfloat16(params) if cast else params), cast_floats=cast)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "uint8", "bool", "float16", "uint32"])
def test_checksum_depends_on_each_element_and_its_place_but_not_on_the_mesh(dtype: str):
    whole = jnp.asarray(np.random.default_rng(0).integers(0, 2, (4, 6, 8)), dtype)
    known = checksums({"x": whole})["x"]
    bits = np.asarray(whole).reshape(-1).astype(np.uint64)
    one = int(np.asarray(jnp.ones((), dtype)).view(f"u{whole.dtype.itemsize}"))
    assert known == int(sum(int(b) * one * (2 * i + 1) for i, b in enumerate(bits)) % 2**32)
    assert checksums({"x": place(whole, make_mesh(2, 4))})["x"] == known
    assert checksums({"x": whole[::-1]})["x"] != known
    assert checksums({"x": whole.at[3, 5, 7].set(whole[3, 5, 7] == 0)})["x"] != known


def test_a_copy_that_was_interrupted_does_not_count(saved: Path, manager_at: Callable[..., CheckpointManager]):
    (saved / "checkpoints" / "2" / "_CHECKPOINT_METADATA").unlink()
    with manager_at(saved / "checkpoints") as manager:
        assert manager.latest_step() == 1


def test_metadata_that_is_damaged(saved: Path):
    truncate(saved / "checkpoints" / "2" / "metadata" / "data.json")
    with pytest.raises(UserError, match=r"damaged: metadata/data\.json cannot be read"):
        read_metadata(saved)


@pytest.mark.parametrize("files", ["params/d/*", "params/_METADATA", "_CHECKPOINT_METADATA"])
def test_nothing_but_the_error_is_printed(saved: Path, files: str):
    for file in (saved / "checkpoints" / "2").glob(files):
        truncate(file)
    shapes = {name: list(leaf.shape) for name, leaf in make_params().items() if not isinstance(leaf, dict)}
    assert shapes == {"embedding": [32, 16]}
    program = """
import sys
import jax
from tlm_jax.checkpoint.restore import restore_parameters
from tlm_jax.errors import UserError
sys.path.insert(0, sys.argv[2])
from small_state import abstract, in_bfloat16, make_params
try:
    restore_parameters(sys.argv[1], abstract(make_params()))
except UserError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-W", "always", "-c", program, str(saved), str(Path(__file__).parent)],
        capture_output=True, text=True, check=False, env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "is damaged" in done.stdout
    assert done.stderr == ""
    assert jax.device_count() == 8
