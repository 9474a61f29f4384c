from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_texts import make_texts, write_jsonl

from tlm_jax.data.prepare import Settings, prepare
from tlm_jax.data.sentencepiece_tokenizer import SentencePieceTokenizer
from tlm_jax.data.store import SPLITS, MemoryStore, TokenStore, split_texts
from tlm_jax.data.tokenizer import ByteTokenizer
from tlm_jax.errors import UserError


@pytest.fixture
def copy(store: TokenStore, tmp_path: Path) -> Path:
    return Path(shutil.copytree(store.path, tmp_path / "copy"))


def _whole(store: TokenStore, split: str) -> np.ndarray:
    shards = store.manifest["splits"][split]["shards"]
    return np.concatenate([np.fromfile(store.path / f"{shard['name']}.tokens", "<u2") for shard in shards])


def test_documents_of_both_splits_are_the_inputs_in_order(store: TokenStore, texts: list[str]) -> None:
    tokenizer, found = store.tokenizer(), {}
    for name in ("train", "validation"):
        split = store.split(name)
        whole = _whole(store, name)
        assert len(whole) == split.num_tokens == split.documents[-1]
        assert len(split.documents) == split.num_documents + 1
        parts = [whole[a:b] for a, b in zip(split.documents[:-1], split.documents[1:], strict=True)]
        assert all(part[0] == tokenizer.bos_id and part[-1] == tokenizer.eos_id for part in parts)
        found[name] = [tokenizer.decode(part) for part in parts]
        assert split.num_bytes == sum(len(text.encode()) for text in found[name])
        order = [texts.index(text) for text in found[name]]
        assert order == sorted(order)
    assert sorted(found["train"] + found["validation"]) == sorted(texts)


@settings(deadline=None)
@given(data=st.data())
def test_reads_cross_shards(store: TokenStore, data: st.DataObject) -> None:
    split = store.split("train")
    assert len(store.manifest["splits"]["train"]["shards"]) > 4
    start = data.draw(st.integers(0, split.num_tokens))
    stop = data.draw(st.integers(start, split.num_tokens))
    assert np.array_equal(split.read(start, stop), _whole(store, "train")[start:stop])


def test_a_read_outside_is_an_error(store: TokenStore) -> None:
    split = store.split("train")
    for start, stop in ((-1, 2), (0, split.num_tokens + 1), (3, 2)):
        with pytest.raises(IndexError):
            split.read(start, stop)


def test_a_store_pickles_small_and_reads_on(store: TokenStore) -> None:
    store.split("train").read(0, 10)
    data = pickle.dumps(store)
    assert len(data) < 30_000
    assert np.array_equal(pickle.loads(data).split("train").read(0, 99), store.split("train").read(0, 99))


def test_fingerprint_is_of_the_content(store: TokenStore, copy: Path, tmp_path: Path, texts: list[str]) -> None:
    assert TokenStore.open(copy, verify=True).fingerprint == store.fingerprint
    changed = [*texts[:-1], texts[-1] + "!"]
    prints = set()
    for i, documents in enumerate((texts, changed)):
        path = str(write_jsonl(tmp_path / f"{i}.jsonl", documents))
        prints.add(prepare([path], ByteTokenizer(), tmp_path / f"store{i}", Settings(holdout=0.2)).fingerprint)
    assert len(prints) == 2


def test_a_shard_cut_short_is_named_with_both_sizes(copy: Path) -> None:
    shard = copy / "train" / "00001.tokens"
    size = shard.stat().st_size
    with shard.open("r+b") as file:
        file.truncate(size - 2)
    with pytest.raises(UserError, match=rf"00001\.tokens: the shard has {size - 2} bytes, the manifest says {size}"):
        TokenStore.open(copy)


def test_a_changed_shard_fails_verification_only(copy: Path) -> None:
    shard = copy / "train" / "00002.tokens"
    data = bytearray(shard.read_bytes())
    data[10] ^= 1
    shard.write_bytes(data)
    TokenStore.open(copy)
    with pytest.raises(UserError, match=r"00002\.tokens: the shard's checksum"):
        TokenStore.open(copy, verify=True)


def test_a_missing_shard(copy: Path) -> None:
    (copy / "validation" / "00000.offsets").unlink()
    with pytest.raises(UserError, match=r"00000\.offsets: the shard is missing"):
        TokenStore.open(copy)


def test_another_tokenizer_in_the_store(copy: Path, sentencepiece_model: Path) -> None:
    shutil.copy(sentencepiece_model, copy / "tokenizer.json")
    with pytest.raises(UserError, match="not the tokenizer that made this store"):
        TokenStore.open(copy).tokenizer()
    with pytest.raises(UserError, match="not the tokenizer that made this store"):
        TokenStore.open(copy, verify=True)
    (copy / "tokenizer.json").unlink()
    with pytest.raises(UserError, match="tokenizer is missing"):
        TokenStore.open(copy).tokenizer()


def test_what_is_no_store(copy: Path) -> None:
    with pytest.raises(UserError, match="no such token store"):
        TokenStore.open(copy / "absent")
    manifest = json.loads((copy / "manifest.json").read_bytes())
    (copy / "manifest.json").write_text(json.dumps({**manifest, "format_version": 99}))
    with pytest.raises(UserError, match="has format 99"):
        TokenStore.open(copy)
    for broken in ("{", "[]", "{}"):
        (copy / "manifest.json").write_text(broken)
        with pytest.raises(UserError, match="manifest cannot be read"):
            TokenStore.open(copy)
    (copy / "manifest.json").unlink()
    with pytest.raises(UserError, match="not complete; run `tlm prepare` again"):
        TokenStore.open(copy)


def test_documents_in_memory_read_as_a_store(
    store: TokenStore, tmp_path: Path, sentencepiece_tokenizer: SentencePieceTokenizer
) -> None:
    texts = make_texts(50, seed=1)
    path = str(write_jsonl(tmp_path / "a.jsonl", texts))
    stored = prepare([path], sentencepiece_tokenizer, tmp_path / "store", Settings(holdout=0.0)).split("train")
    memory = MemoryStore.from_files([path], sentencepiece_tokenizer).split("validation")
    assert np.array_equal(memory.read(0, memory.num_tokens), stored.read(0, stored.num_tokens))
    assert np.array_equal(memory.documents, stored.documents)
    assert (memory.num_bytes, memory.num_documents) == (stored.num_bytes, stored.num_documents)
    (tmp_path / "bad.jsonl").write_text('{"text": "x"}\n{"text": 1}\n')
    with pytest.raises(UserError, match=r"bad\.jsonl:2: field is not a string"):
        MemoryStore.from_files([str(tmp_path / "bad.jsonl")], sentencepiece_tokenizer)


def test_texts_of_a_split_come_back(store: TokenStore, texts: list[str]) -> None:
    found = [text for name in SPLITS for text in split_texts(store.split(name), store.tokenizer())]
    assert sorted(found) == sorted(texts)
    assert list(split_texts(MemoryStore(texts, store.tokenizer()).split("train"), store.tokenizer())) == texts


@pytest.mark.parametrize(
    "manifest", ["[]", "{}", '{"format_version": 1}', '{"format_version": 1, "dtype": "u", "splits": {}}']
)
def test_a_manifest_that_is_none_is_told(copy: Path, manifest: str) -> None:
    (copy / "manifest.json").write_text(manifest)
    with pytest.raises(UserError, match="the manifest cannot be read"):
        TokenStore.open(copy)
