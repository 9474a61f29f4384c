"""What stores hold and how they fill windows: every number against one counted from the windows or texts themselves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from foreign_files import make_documents, separated, write_megatron, write_raw
from hypothesis import given, settings
from hypothesis import strategies as st

from tlm_jax.cli import main
from tlm_jax.data.adopt import Adoption, adopt
from tlm_jax.data.packing import Packing, packing
from tlm_jax.data.store import MemoryStore, TokenStore
from tlm_jax.data.tokenizer import ByteTokenizer
from tlm_jax.data.windows import Windows
from tlm_jax.errors import UserError


def _check(store: TokenStore | MemoryStore, sequence_length: int) -> Packing:
    """Compares the packing with what the windows are."""
    found, T = packing(store, "train", sequence_length), sequence_length
    windows = Windows(store, "train", T)
    every = [windows[i] for i in range(len(windows))]
    real = [int((window["segment_ids"] > 0).sum()) for window in every]
    parts = [int(window["segment_ids"].max()) for window in every]
    assert found.windows == len(every)
    assert found.targets == sum(int(window["mask"].sum()) for window in every)
    assert found.padding == len(every) * T - sum(real)
    assert found.fill == pytest.approx(sum(real) / (len(every) * T))
    assert found.tokens == found.targets + found.unpredicted == store.split("train").num_tokens
    assert found.windows * T == found.tokens - 1 + found.padding
    assert found.documents_per_window == pytest.approx(np.mean(parts))
    assert found.most_documents == max(parts)
    cut = continued = 0
    for start, stop in zip(store.split("train").documents, store.split("train").documents[1:], strict=False):
        inputs = range(int(start), min(int(stop), found.tokens - 1))
        cut += len({i // T for i in inputs}) > 1
        continued += sum(i // T != inputs[0] // T for i in inputs)
    assert (found.cut_documents, found.continued_tokens) == (cut, continued)
    return found


@settings(max_examples=200, deadline=None)
@given(lengths=st.lists(st.integers(0, 12), min_size=1, max_size=12), sequence_length=st.integers(1, 40))
def test_packing_is_what_the_windows_are(lengths: list[int], sequence_length: int) -> None:
    _check(MemoryStore(["x" * length for length in lengths], ByteTokenizer()), sequence_length)


@pytest.mark.parametrize("sequence_length", [4, 33, 5000])
def test_packing_of_adopted_stores(tmp_path: Path, sequence_length: int) -> None:
    ids = separated(make_documents(60), first=False)
    raw = adopt([str(write_raw(tmp_path / "f.bin", ids))], [], tmp_path / "raw", ByteTokenizer(), Adoption(257, 0.0))
    assert _check(raw, sequence_length).unpredicted == 1
    file = str(write_megatron(tmp_path / "m", make_documents(60)))
    megatron = adopt([file], [], tmp_path / "megatron", ByteTokenizer(), Adoption(holdout=0.0))
    assert _check(megatron, sequence_length).unpredicted == 60


def test_nothing_to_pack(store: TokenStore) -> None:
    with pytest.raises(UserError, match="the split 'train' holds no document"):
        packing(MemoryStore([], ByteTokenizer()), "train", 8)
    with pytest.raises(UserError, match="sequence_length must be at least 1, not 0"):
        packing(store, "train", 0)


def _json(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> list[dict]:
    capsys.readouterr()
    assert main(["inspect", "--json", *map(str, arguments)]) == 0
    return json.loads(capsys.readouterr().out)["stores"]


def test_json_of_a_prepared_store(store: TokenStore, texts: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    (found,) = _json(capsys, store.path, "--tokens=300", "--samples=1000", "--sequence-length=64", "--split=validation")
    assert found["fingerprint"] == store.fingerprint
    assert sum(split["documents"] for split in found["splits"].values()) == len(texts)
    assert sum(split["bytes"] for split in found["splits"].values()) == sum(len(text.encode()) for text in texts)
    split = store.split("validation")
    tokens = split.read(0, split.num_tokens)
    inspected = found["inspected"]
    assert inspected["tokens_counted"] == len(tokens)
    assert {entry["id"]: entry["count"] for entry in inspected["frequent_tokens"]} == Counter(tokens.tolist())
    counts = [entry["count"] for entry in inspected["frequent_tokens"]]
    assert counts == sorted(counts, reverse=True)
    shown = {entry["id"]: entry["shown"] for entry in inspected["frequent_tokens"]}
    assert (shown[97], shown[256], shown[257], shown[0xC3]) == ("'a'", "(begin)", "(end)", "b'\\xc3'")
    assert len(inspected["samples"]) == split.num_documents
    held_out = {text[:240] for text in texts}
    assert all(sample["text"].removesuffix("…") in held_out for sample in inspected["samples"])
    lengths = np.diff(split.documents)
    for entry in inspected["document_lengths"]:
        inside = (lengths >= entry["least"]) & (lengths <= entry["most"])
        assert entry["documents"] == inside.sum()
    assert sum(entry["documents"] for entry in inspected["document_lengths"]) == split.num_documents
    assert found["packing"]["train"]["windows"] == len(Windows(store, "train", 64))


def test_large_splits_are_counted_in_part(store: TokenStore, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr("tlm_jax.data.inspection._PIECE_TOKENS", 1000)
    monkeypatch.setattr("tlm_jax.data.inspection._COUNTED_TOKENS", 8000)
    (found,) = _json(capsys, store.path)
    assert store.split("train").num_tokens > 16_000
    assert 7000 < found["inspected"]["tokens_counted"] <= 8000


def test_the_lines(store: TokenStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(write_raw(tmp_path / "f.bin", separated(make_documents(60), first=False)))
    adopted = adopt([file], [], tmp_path / "adopted", 300, Adoption(257))
    assert main(["inspect", str(store.path), str(adopted.path), "--verify", "--sequence-length=64"]) == 0
    out, err = capsys.readouterr()
    first, second = out.split(f"\n\n{adopted.path}\n")
    split = store.manifest["splits"]["train"]
    assert f"train: {split['documents']:,} documents, {split['tokens']:,} tokens, {split['bytes']:,} bytes" in first
    assert f"train: {len(Windows(store, 'train', 64)):,} windows of 64, 9" in first
    assert "tokenizer: byte, 259 ids; begin 256 (added), end 257 (added), padding 258 (added); hash " in first
    assert "████████████████████████████████████████\n" in first
    assert "bytes of text not known" in second
    assert "(separator)" in second
    assert err == "every checksum is the manifest's\n"


def test_the_verdict_of_verify_comes_first(store: TokenStore) -> None:
    command = [sys.executable, "-u", "-m", "tlm_jax", "inspect", str(store.path), "--verify"]
    told = subprocess.check_output(command, stderr=subprocess.STDOUT, text=True)
    assert told.startswith(f"every checksum is the manifest's\n{store.path}\n")


def test_counts_of_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.txt").write_text("x")
    arguments = ["--tokenizer=byte", f"--output={tmp_path / 'store'}", "--holdout=0"]
    assert main(["prepare", str(tmp_path / "text.txt"), *arguments]) == 0
    assert main(["inspect", str(tmp_path / "store"), "--sequence-length=64"]) == 0
    out = capsys.readouterr().out
    assert "train: 1 document, 3 tokens, 1 byte of text" in out
    assert "validation: 0 documents, 0 tokens" in out
    assert "train: 1 window of 64" in out
    assert "1 token not predicted" in out


def test_verify_reads_every_byte(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_raw(tmp_path / "f.bin", separated(make_documents(60), first=False))
    adopt([str(file)], [], tmp_path / "store", 300, Adoption(257))
    data = bytearray(file.read_bytes())
    data[-4] ^= 1
    before = file.stat().st_mtime_ns
    file.write_bytes(data)
    os.utime(file, ns=(before, before))
    assert main(["inspect", str(tmp_path / "store")]) == 0
    assert main(["inspect", str(tmp_path / "store"), "--verify"]) == 2
    assert f"{file}: the shard's checksum is not the manifest's".split("/")[-1] in capsys.readouterr().err


def test_a_mixture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths, windows = [], []
    for count in (40, 70):
        ids = separated(make_documents(count, seed=count), first=False)
        file = str(write_raw(tmp_path / f"{count}.bin", ids))
        paths.append(str(adopt([file], [], tmp_path / f"s{count}", 300, Adoption(257, 0.0)).path))
        windows.append(-(-(len(ids) - 1) // 16))
    assert main(["inspect", *paths, "--json", "--sequence-length=16", "--weights", "3", "1"]) == 0
    found = json.loads(capsys.readouterr().out)["mixture"]
    assert [(part["name"], part["share"], part["windows"]) for part in found] == [
        ("s40", "3/4", windows[0]), ("s70", "1/4", windows[1]),
    ]  # fmt: skip
    assert [part["windows_to_epoch"] for part in found] == [-(-windows[0] * 4 // 3), windows[1] * 4]
    assert main(["inspect", *paths, "--sequence-length=16", "--weights", "3", "1"]) == 0
    once = f"read once after {windows[1] * 4:,} windows, {windows[1] * 64:,} tokens, of it"
    assert f"  s70: 1/4 of the windows, {windows[1]} windows; {once}\n" in capsys.readouterr().out
    assert main(["inspect", *paths, "--weights", "1"]) == 2
    assert "--weights: 1 weight for 2 stores" in capsys.readouterr().err


def test_bad_arguments(store: TokenStore, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (
        ((str(store.path), "--samples=-1"), "--samples: must be at least 0, not -1"),
        ((str(store.path), "--sequence-length=0"), "--sequence-length: must be at least 1, not 0"),
        (("nowhere",), "nowhere: no such token store"),
    ):
        assert main(["inspect", *arguments]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(("dtype", "damaged"), [("<u2", 300), ("<i4", -5)])
@pytest.mark.parametrize("shown", [[], ["--tokens=0", "--samples=9"]])
def test_ids_beyond_the_vocabulary_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], dtype: str, damaged: int, shown: list[str]
) -> None:
    code = {"<u2": 8, "<i4": 4}[dtype]
    index = write_megatron(tmp_path / "m", [[1, 2], [3]], code=code)
    adopt([str(index)], [], tmp_path / "store", ByteTokenizer(), Adoption(holdout=0.0))
    file = index.with_suffix(".bin")
    before = file.stat().st_mtime_ns
    write_raw(file, [1, damaged, 3], dtype)
    os.utime(file, ns=(before, before))
    assert main(["inspect", str(tmp_path / "store"), *shown]) == 2
    message = f"store: the split 'train' holds token {damaged}, beyond the tokenizer's vocabulary; a shard is damaged"
    assert message in capsys.readouterr().err
