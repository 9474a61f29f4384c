"""Token files of other programs: read where they lie, every id accounted for."""

from __future__ import annotations

import os
import shutil
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import pytest
from foreign_files import (
    SEPARATOR,
    Documents,
    make_documents,
    separated,
    write_llm_c,
    write_megatron,
    write_raw,
)

from tlm_jax.cli import main
from tlm_jax.data.adopt import Adoption, adopt
from tlm_jax.data.adopted_tokenizer import IdTokenizer, SeparatedTokenizer
from tlm_jax.data.loader import train_loader
from tlm_jax.data.packing import packing
from tlm_jax.data.store import SPLITS, Borders, MemoryStore, TokenStore, split_texts
from tlm_jax.data.tokenizer import ByteTokenizer, tokenizer_from_bytes
from tlm_jax.data.windows import Windows
from tlm_jax.errors import UserError

ALL = Adoption(separator=SEPARATOR, holdout=0.0)


def _ids(store: TokenStore, split: str = "train") -> list[int]:
    found = store.split(split)
    return found.read(0, found.num_tokens).tolist()


def _adopt_all(tmp_path: Path, layout: str, documents: Documents) -> tuple[TokenStore, list[int]]:
    """One store with all documents in its training split, and the ids that its files hold."""
    first = layout == "llm.c"
    ids = separated(documents, first=first)
    if layout == "megatron":
        file = write_megatron(tmp_path / "m", [[*d, SEPARATOR] for d in documents], sequences=3)
    else:
        file = (write_llm_c if first else write_raw)(tmp_path / "f.bin", ids)
    return adopt([str(file)], [], tmp_path / "store", ByteTokenizer(), ALL), ids


@pytest.mark.parametrize("sequence_length", [1, 7, 64, 10_000])
@pytest.mark.parametrize("layout", ["raw", "llm.c", "megatron"])
def test_windows_of_separated_documents_token_by_token(tmp_path: Path, layout: str, sequence_length: int) -> None:
    store, ids = _adopt_all(tmp_path, layout, make_documents(60))
    assert store.manifest["adopted"] == {"layout": layout, "separator": SEPARATOR}
    assert _ids(store) == ids
    windows = Windows(store, "train", sequence_length)
    predicted = num_bytes = 0
    for index in range(len(windows)):
        window, segment, position = windows[index], 0, 0
        for t in range(sequence_length):
            here = index * sequence_length + t
            row = {key: window[key][t].item() for key in ("inputs", "targets", "mask", "segment_ids", "positions")}
            if here + 1 >= len(ids):
                assert not row["mask"]
                assert not row["segment_ids"]
                continue
            begins = t == 0 or ids[here] == SEPARATOR
            segment, position = segment + begins, 0 if begins else position + 1
            wanted = {"inputs": ids[here], "targets": ids[here + 1], "mask": True}
            assert row == {**wanted, "segment_ids": segment, "positions": position}
            predicted += 1
        num_bytes += int(window["bytes"])
    assert predicted == len(ids) - 1
    assert num_bytes == sum(i < 256 for i in ids[1:])


@pytest.mark.parametrize("layout", ["raw", "llm.c", "megatron"])
def test_documents_and_texts_are_those_that_were_written(tmp_path: Path, layout: str) -> None:
    documents = [list(text.encode()) for text in ("a whale", "x", "the deep sea", "café")]
    store, ids = _adopt_all(tmp_path, layout, documents)
    split = store.split("train")
    assert list(split_texts(split, store.tokenizer())) == [bytes(ids).decode() for ids in documents]
    assert split.num_documents == 4
    assert split.num_tokens == len(ids)
    assert split.num_bytes == sum(map(len, documents))
    tokenizer = store.tokenizer()
    assert (tokenizer.bos_id, tokenizer.eos_id) == (SEPARATOR, SEPARATOR)


def test_no_token_is_copied(tmp_path: Path) -> None:
    store, _ = _adopt_all(tmp_path, "raw", make_documents(60))
    assert {path.name for path in store.path.rglob("*") if path.is_file()} == {
        "manifest.json", "tokenizer.json", "00000.offsets",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("host_count", "num_workers"), [(1, 0), (2, 0), (4, 0), pytest.param(2, 2, marks=pytest.mark.slow)]
)
def test_the_same_windows_for_any_hosts_and_workers(tmp_path: Path, host_count: int, num_workers: int) -> None:
    store, _ = _adopt_all(tmp_path, "megatron", make_documents(60))
    settings = {"sequence_length": 16, "global_batch_size": 8, "seed": 3}
    with train_loader(store, **settings) as loader:
        alone = list(islice(loader, 12))
    for host in range(host_count):
        with train_loader(
            store, **settings, host_index=host, host_count=host_count, num_workers=num_workers, start_index=16
        ) as loader:
            for batch, whole in zip(islice(loader, 10), alone[2:], strict=True):
                for key, values in batch.items():
                    assert np.array_equal(values, whole[key][host::host_count]), key


def test_documents_without_a_separator_are_as_the_index_says(tmp_path: Path) -> None:
    documents = [*make_documents(30), [], *make_documents(20, seed=1)]
    file = write_megatron(tmp_path / "m", documents, sequences=2, code=4)
    store = adopt([str(file)], [], tmp_path / "store", ByteTokenizer(), Adoption(holdout=0.0))
    assert store.manifest["adopted"]["separator"] is None
    assert store.manifest["skipped"] == {"empty document": 1}
    assert store.borders == Borders(None, start_is_target=False)
    full = [ids for ids in documents if ids]
    ids = [i for document in full for i in document]
    starts = np.cumsum([0, *map(len, full)])[:-1].tolist()
    assert _ids(store) == ids
    windows = Windows(store, "train", 16)
    found, predicted = [], []
    for index in range(len(windows)):
        window = windows[index]
        real = window["segment_ids"] > 0
        found += [index * 16 + t for t in range(16) if real[t] and window["positions"][t] == 0]
        predicted += [index * 16 + t + 1 for t in np.flatnonzero(window["mask"])]
        assert window["bytes"] == window["mask"].sum()
    assert found == sorted({*starts, *range(0, len(ids) - 1, 16)} - {len(ids) - 1})
    assert predicted == sorted({*range(len(ids))} - {*starts})
    assert len(predicted) == packing(store, "train", 16).targets
    # Text that is evaluated with this tokenizer is cut as the store is.
    tokenizer = store.tokenizer()
    memory = MemoryStore([bytes(i % 128 for i in document).decode() for document in full], tokenizer)
    assert memory.borders == store.borders
    assert np.array_equal(memory.split("train").documents, store.split("train").documents)


def test_documents_may_go_on_from_one_file_to_the_next(tmp_path: Path) -> None:
    documents = make_documents(60)
    ids = separated(documents, first=True)
    whole = adopt([str(write_llm_c(tmp_path / "w.bin", ids))], [], tmp_path / "whole", 300, ALL)
    # One cut stands just before a separator, one just after.
    third = ids.index(SEPARATOR, 300)
    cuts = [0, 101, 102, third, ids.index(SEPARATOR, 600) + 1, len(ids)]
    files = [write_llm_c(tmp_path / f"{i}.bin", ids[a:b]) for i, (a, b) in enumerate(pairwise(cuts))]
    several = adopt([str(file) for file in files], [], tmp_path / "several", 300, ALL)
    assert len(several.manifest["splits"]["train"]["shards"]) == 5
    a, b = whole.split("train"), several.split("train")
    assert np.array_equal(a.documents, b.documents)
    assert a.num_documents == b.num_documents == 60
    for start in range(0, len(ids), 13):
        for stop in (start, start + 1, start + 50):
            inside = [d for d in a.documents[:-1] if start <= d < stop]
            assert b.document_starts(start, min(stop, len(ids))).tolist() == inside
    left, right = Windows(whole, "train", 32), Windows(several, "train", 32)
    for i in range(len(left)):
        for key, values in left[i].items():
            assert np.array_equal(values, right[i][key])


@pytest.mark.parametrize("sequence_length", [31, 512])
def test_borders_found_by_id_and_by_bisection_are_the_same(
    store: TokenStore, sequence_length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_id = Windows(store, "train", sequence_length)
    monkeypatch.setattr(TokenStore, "borders", Borders(None, start_is_target=False))
    by_offsets = Windows(store, "train", sequence_length)
    for i in range(len(by_id)):
        for key, values in by_id[i].items():
            assert np.array_equal(values, by_offsets[i][key]), key


@pytest.mark.parametrize("share", [0.001, 0.1, 0.5])
def test_the_last_documents_are_held_out_and_none_is_lost(tmp_path: Path, share: float) -> None:
    documents = make_documents(60)
    ids = separated(documents, first=False)
    files = [str(write_raw(tmp_path / f"{i}.bin", part)) for i, part in enumerate((ids[:500], ids[500:700], ids[700:]))]
    store = adopt(files, [], tmp_path / "store", ByteTokenizer(), Adoption(SEPARATOR, share))
    assert _ids(store) + _ids(store, "validation") == ids
    held = store.split("validation")
    assert held.num_tokens >= share * len(ids)
    assert held.num_tokens <= share * len(ids) + 41
    assert _ids(store, "validation")[0] == SEPARATOR
    assert sum(store.split(name).num_documents for name in SPLITS) == 60
    assert sum(store.split(name).num_bytes for name in SPLITS) == sum(map(len, documents))
    TokenStore.open(store.path, verify=True)
    other = adopt(files, [], tmp_path / "other", ByteTokenizer(), Adoption(SEPARATOR, 0.3))
    assert other.fingerprint != store.fingerprint


def test_validation_files_and_one_document_a_split(tmp_path: Path) -> None:
    train, held = write_raw(tmp_path / "train.bin", [*range(50)]), write_raw(tmp_path / "val.bin", [*range(9)])
    store = adopt([str(train)], [str(held)], tmp_path / "store", 50, Adoption("none"))
    assert [store.split(name).num_documents for name in SPLITS] == [1, 1]
    assert (_ids(store), _ids(store, "validation")) == ([*range(50)], [*range(9)])
    window = Windows(store, "train", 49)[0]
    assert window["mask"].all()
    assert (window["segment_ids"] == 1).all()
    tokenizer = store.tokenizer()
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (51, 50, 50, 50)
    cut = adopt([str(train)], [], tmp_path / "cut", 50, Adoption("none", 0.1))
    assert (_ids(cut), _ids(cut, "validation")) == ([*range(45)], [*range(45, 50)])


def test_llama_3_files_of_llm_c(tmp_path: Path) -> None:
    ids = [128_000, 5, 70_000, 128_000, 9]
    file = write_llm_c(tmp_path / "f.bin", ids, magic=20240801, version=7, dtype="<u4")
    store = adopt([str(file)], [], tmp_path / "store", 128_256, Adoption(128_000, 0.0))
    assert _ids(store) == ids
    assert store.split("train").num_documents == 2


def test_a_store_moves_with_its_files_and_misses_them_alone(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    file = write_raw(tmp_path / "a" / "f.bin", separated(make_documents(9), first=False))
    store = adopt([str(file)], [], tmp_path / "a" / "store", 300, ALL)
    os.rename(tmp_path / "a", tmp_path / "b")
    moved = TokenStore.open(tmp_path / "b" / "store", verify=True)
    assert moved.fingerprint == store.fingerprint
    shutil.move(tmp_path / "b" / "store", tmp_path / "alone")
    with pytest.raises(
        UserError, match=r"f.bin: the shard is missing; put the file back as it was, or run `tlm adopt`"
    ):
        TokenStore.open(tmp_path / "alone")


def _spoil(path: Path, at: int, value: int) -> Path:
    data = bytearray(path.read_bytes())
    data[at] = value
    path.write_bytes(data)
    return path


def _index(tmp_path: Path) -> Path:
    return write_megatron(tmp_path / "m", [[1, 2], [3]])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda d: d / "nowhere.bin", "nowhere.bin: no such file"),
        (lambda d: write_raw(d / "f.bin", []), "f.bin: holds no token"),
        (lambda d: write_raw(d / "f.bin", [1, 2, 3], "u1"), "f.bin: 3 bytes are no whole number of uint16 ids"),
        (lambda d: write_raw(d / "f.bin", [1, 300]), "f.bin: the file holds the id 300, the vocabulary has 259"),
        (lambda d: write_raw(d / "f.bin", [1, 2]), "--separator: the id 257 does not occur"),
        (lambda d: write_llm_c(d / "f.bin", [1], version=2), "f.bin: the header has magic 20240520 and version 2; k"),
        (lambda d: _spoil(write_llm_c(d / "f.bin", [1]), 8, 9), "the file has 1026 bytes, its header makes it 1042"),
        (lambda d: write_megatron(d / "m", []), "m.bin: holds no token"),
        (lambda d: write_megatron(d / "m", [[1]], modes=True), "m.idx: the sequences have modes: not only text"),
        (lambda d: _spoil(_index(d), 9, 2), "m.idx: the index has version 2, known is 1"),
        (lambda d: _spoil(_index(d), 17, 5), "m.idx: ids of type int64 are not read"),
        (lambda d: _spoil(_index(d), 18, 3), "m.idx: the index has 82 bytes, its header makes it 94"),
        (lambda d: _spoil(_index(d), 34, 9), "m.idx: the sequences do not lie one after the other"),
        (lambda d: _spoil(_index(d), 74, 1), "m.idx: the document borders do not span the sequences"),
        (lambda d: _spoil(_index(d), 0, 1), "m.idx: not a Megatron index"),
    ],
)  # fmt: skip
def test_files_that_are_not_what_they_should_be(tmp_path: Path, make, message: str) -> None:
    file = make(tmp_path)
    layout = "megatron" if file.suffix == ".idx" else "auto"
    with pytest.raises(UserError) as told:
        adopt([str(file)], [], tmp_path / "store", ByteTokenizer(), Adoption(layout=layout))
    assert message in str(told.value)
    assert not (tmp_path / "store").exists()


def test_a_pair_that_does_not_fit_together(tmp_path: Path) -> None:
    file = _index(tmp_path)
    (tmp_path / "m.bin").write_bytes(b"1234")
    with pytest.raises(UserError, match=r"m.bin: the file has 4 bytes, its index makes it 6"):
        adopt([str(file)], [], tmp_path / "store", 9)
    (tmp_path / "m.bin").unlink()
    with pytest.raises(UserError, match=r"m.bin: no such file; a Megatron store is a .bin and an .idx file"):
        adopt([str(tmp_path / "m")], [], tmp_path / "store", 9)


def test_a_separator_that_is_not_one(tmp_path: Path) -> None:
    file = str(write_megatron(tmp_path / "m", [[1, 2, 7], [7, 7], [5, 7]]))
    with pytest.raises(UserError, match="the id 7 does not stand at the end of every document, and there alone"):
        adopt([file], [], tmp_path / "store", 9, Adoption(7))
    assert adopt([file], [], tmp_path / "store", 9).manifest["adopted"]["separator"] is None


def test_settings_that_cannot_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(write_raw(tmp_path / "f.bin", [1, 2, 0, 3]))
    other = str(write_llm_c(tmp_path / "g.bin", [1, 2, 0, 3]))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter").touch()
    for arguments, message in (
        ((file,), "one of the arguments --tokenizer --vocab-size is required"),
        ((file, "--vocab-size=9"), "--separator: the files do not say where documents end; give the id"),
        ((file, "--vocab-size=9", "--separator=x"), "--separator: 'x' is no id; give a number, none or auto"),
        ((file, "--vocab-size=9", f"--separator={'1' * 5000}"), "is no id; give a number, none or auto"),
        ((file, "--vocab-size=9", "--eos-token=x"), "--eos-token: there is no --tokenizer that it could be for"),
        ((file, "--vocab-size=0", "--separator=0"), "--vocab-size: must be from 1 to 16777216, not 0"),
        ((file, f"--vocab-size={10**15}", "--separator=0"), "--vocab-size: must be from 1 to 16777216, not 1"),
        (
            (file, "--vocab-size=3", "--separator=0"),
            "f.bin: the file holds the id 3, the vocabulary has 3; another --vo",
        ),
        ((file, other, "--vocab-size=9", "--separator=0"), "g.bin: llm.c file of uint16 beside"),
        ((file, "--vocab-size=9", "--separator=0", "--holdout=1"), "the held-out fraction must be in [0, 1), not 1.0"),
        (
            (file, "--vocab-size=9", "--separator=0", "--holdout=0.9"),
            "the first document is longer than what --holdout",
        ),
        ((file, "--vocab-size=9", f"--validation={file}", "--holdout=0.1"), "--holdout: given beside --validation"),
        ((file, "--vocab-size=9", "--separator=0", f"--output={tmp_path / 'full'}"), "the output holds something else"),
    ):
        try:
            code = main(["adopt", f"--output={tmp_path / 'store'}", *arguments])
        except SystemExit as error:
            code = int(error.code or 0)
        assert code == 2
        assert message in capsys.readouterr().err
        assert not (tmp_path / "store").exists()


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(write_raw(tmp_path / "f.bin", separated(make_documents(60), first=False)))
    command = ["adopt", file, "--tokenizer=byte", f"--output={tmp_path / 'store'}"]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "adopted from raw files, id 257 between documents; ids are uint16" in out
    assert f"--config.data.store={tmp_path / 'store'} --config.model.vocab_size=259" in out
    assert main(command) == 2
    assert "the output holds a store; choose another --output, or delete it" in capsys.readouterr().err


def test_tokenizers_of_adopted_stores_come_back_from_their_bytes() -> None:
    for tokenizer in (
        *(SeparatedTokenizer(ByteTokenizer(), i) for i in (10, None)),
        IdTokenizer(300, 7),
        IdTokenizer(300, None),
    ):
        again = tokenizer_from_bytes(tokenizer.kind, tokenizer.to_bytes())
        assert again.hash == tokenizer.hash
        for name in ("kind", "vocab_size", "bos_id", "eos_id", "pad_id", "marks_documents"):
            assert getattr(again, name) == getattr(tokenizer, name)
    for kind, data in (("ids", b"{}"), ("separated", b"x"), ("separated", b'{"kind":"byte","data":"=","separator":1}')):
        with pytest.raises(UserError, match=f"tokenizer: defines no tokenizer of kind '{kind}'"):
            tokenizer_from_bytes(kind, data)
    separate = SeparatedTokenizer(ByteTokenizer(), 10)
    assert separate.decode([104, 105, 10]) == "hi"
    assert separate.token_bytes()[10] == 0
    ids = IdTokenizer(300, 7)
    assert ids.encode(" 5 299 0") == [5, 299, 0]
    assert ids.decode([5, 299, 7, 0]) == "5 299 0"
    assert not ids.token_bytes().any()
    for text in ("5 x", "300", "-1", "1.5"):
        with pytest.raises(UserError, match="is no id below 300; the tokenizer is not known"):
            ids.encode(text)
