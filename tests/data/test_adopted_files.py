"""Adopted files are counted once, are one adoption's, and stay what they were."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from foreign_files import SEPARATOR, make_documents, separated, write_llm_c, write_megatron, write_raw

import tlm_jax.data.adopt as adopt_module
from tlm_jax.data.adopt import Adoption, adopt
from tlm_jax.data.store import TokenStore
from tlm_jax.errors import UserError

ALL = Adoption(separator=SEPARATOR, holdout=0.0)


def _ids(store: TokenStore) -> list[int]:
    found = store.split("train")
    return found.read(0, found.num_tokens).tolist()


def test_a_file_that_changed_is_told(tmp_path: Path) -> None:
    file = write_raw(tmp_path / "f.bin", separated(make_documents(9), first=False))
    store = adopt([str(file)], [], tmp_path / "store", 300, ALL)
    data = bytearray(file.read_bytes())
    data[6] ^= 1
    before = file.stat().st_mtime_ns
    file.write_bytes(data)
    os.utime(file, ns=(before, before))
    TokenStore.open(store.path)  # nothing but the checksum could tell
    with pytest.raises(UserError, match=r"f.bin: the shard's checksum is not the manifest's"):
        TokenStore.open(store.path, verify=True)
    os.utime(file, ns=(before + 1, before + 1))
    with pytest.raises(UserError, match=r"f.bin: the shard's checksum is not the manifest's; put the file back"):
        TokenStore.open(store.path)
    file.write_bytes(data[:-2])
    with pytest.raises(UserError, match=r"f.bin: the shard has .* bytes, the manifest says"):
        TokenStore.open(store.path)


@pytest.mark.parametrize("layout", ["raw", "llm.c", "megatron"])
def test_a_copy_with_another_time_is_the_same_store(tmp_path: Path, layout: str) -> None:
    if layout == "megatron":
        file = write_megatron(tmp_path / "f", [[1, SEPARATOR]]).with_suffix(".bin")
    else:
        file = (write_llm_c if layout == "llm.c" else write_raw)(tmp_path / "f.bin", [1, SEPARATOR, 2])
    store = adopt([str(file)], [], tmp_path / "store", 300, ALL)
    (shard,) = store.manifest["splits"]["train"]["shards"]
    assert shard["modified"] == file.stat().st_mtime_ns
    os.utime(file, ns=(1, 1))
    assert TokenStore.open(store.path).fingerprint == store.fingerprint


def test_a_file_given_twice_is_refused(tmp_path: Path) -> None:
    file, other = (str(write_raw(tmp_path / name, [1, SEPARATOR, 2, 3])) for name in ("f.bin", "g.bin"))
    link = tmp_path / "link.bin"
    link.symlink_to(file)
    pair = write_megatron(tmp_path / "m", [[1, 2]])
    for train, held in (
        ([file], [file]),
        ([file, other, file], []),
        ([other], [file, str(link)]),
        ([str(pair)], [str(pair.with_suffix(".bin"))]),
    ):
        with pytest.raises(UserError, match=r"\.bin: the file is given twice; its tokens would count twice"):
            adopt(train, held, tmp_path / "store", 300, ALL)
    assert not (tmp_path / "store").exists()


def test_two_adoptions_into_one_output_do_not_mix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (str(write_raw(tmp_path / name, [1, SEPARATOR, n])) for n, name in enumerate(("f.bin", "g.bin")))
    write, told = adopt_module._write, []

    def adopts_another_meanwhile(*arguments: Any) -> TokenStore:
        monkeypatch.setattr(adopt_module, "_write", write)
        with pytest.raises(UserError) as caught:
            adopt([second], [], tmp_path / "store", 300, ALL)
        told.append(caught.value.what)
        return write(*arguments)

    monkeypatch.setattr(adopt_module, "_write", adopts_another_meanwhile)
    assert _ids(adopt([first], [], tmp_path / "store", 300, ALL)) == [1, SEPARATOR, 0]
    assert told == ["another process is writing this store"]

    scan = adopt_module._scan

    def is_late(*arguments: Any) -> Any:
        monkeypatch.setattr(adopt_module, "_scan", scan)
        adopt([second], [], tmp_path / "other", 300, ALL)
        return scan(*arguments)

    monkeypatch.setattr(adopt_module, "_scan", is_late)
    with pytest.raises(UserError, match="the output holds a store"):
        adopt([first], [], tmp_path / "other", 300, ALL)
    assert _ids(TokenStore.open(tmp_path / "other")) == [1, SEPARATOR, 1]
