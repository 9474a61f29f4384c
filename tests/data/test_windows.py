from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tlm_jax.data.store import MemoryStore, TokenStore
from tlm_jax.data.tokenizer import ByteTokenizer
from tlm_jax.data.windows import Windows
from tlm_jax.errors import UserError

B = ByteTokenizer()


@settings(max_examples=300, deadline=None)
@given(texts=st.lists(st.text(max_size=9), min_size=1, max_size=8), sequence_length=st.integers(1, 14))
def test_windows_against_a_token_by_token_account(texts: list[str], sequence_length: int) -> None:
    stream = [i for text in texts for i in (B.bos_id, *text.encode(), B.eos_id)]
    windows = Windows(MemoryStore(texts, B), "validation", sequence_length)
    assert len(windows) == -(-(len(stream) - 1) // sequence_length)
    for index in range(len(windows)):
        window = windows[index]
        segment, position, counted_bytes = 0, 0, 0
        for t in range(sequence_length):
            here = index * sequence_length + t
            row = {key: window[key][t].item() for key in ("inputs", "targets", "mask", "segment_ids", "positions")}
            if here + 1 >= len(stream):
                assert row == {"inputs": B.pad_id, "targets": B.pad_id, "mask": False, "segment_ids": 0, "positions": 0}
                continue
            starts = t == 0 or stream[here] == B.bos_id
            segment, position = segment + starts, 0 if starts else position + 1
            assert row == {
                "inputs": stream[here],
                "targets": stream[here + 1],
                "mask": stream[here + 1] != B.bos_id,
                "segment_ids": segment,
                "positions": position,
            }
            counted_bytes += stream[here + 1] < 256
        assert window["bytes"] == counted_bytes
        assert window["window"] == index


@pytest.mark.parametrize("split", ["train", "validation"])
@pytest.mark.parametrize("sequence_length", [7, 64, 1 << 20])
def test_every_token_but_document_starts_is_a_target_once(store: TokenStore, split: str, sequence_length: int) -> None:
    tokens = store.split(split)
    windows = Windows(store, split, sequence_length)
    all_windows = [windows[i] for i in range(len(windows))]
    counted = np.concatenate([w["targets"][w["mask"]] for w in all_windows])
    stream = tokens.read(0, tokens.num_tokens)
    assert np.array_equal(counted, stream[stream != store.tokenizer().bos_id])
    assert len(counted) == tokens.num_tokens - tokens.num_documents
    assert sum(int(w["bytes"]) for w in all_windows) == tokens.num_bytes


def test_shapes_and_dtypes(store: TokenStore) -> None:
    windows = Windows(store, "train", 33)
    for window in (windows[0], windows[len(windows) - 1]):
        assert {key: (np.shape(value), np.asarray(value).dtype.name) for key, value in window.items()} == {
            "inputs": ((33,), "int32"),
            "targets": ((33,), "int32"),
            "mask": ((33,), "bool"),
            "segment_ids": ((33,), "int32"),
            "positions": ((33,), "int32"),
            "bytes": ((), "int32"),
            "window": ((), "int64"),
        }
    batch = windows.batch([2, -1])
    for key, value in windows[2].items():
        assert batch[key].dtype == value.dtype
        assert np.array_equal(batch[key][0], value)
    assert batch["window"].tolist() == [2, -1]
    assert not batch["mask"][1].any()
    assert not batch["segment_ids"][1].any()
    assert batch["bytes"][1] == 0
    for outside in (-1, len(windows)):
        with pytest.raises(IndexError):
            windows[outside]


def test_nothing_to_cut() -> None:
    with pytest.raises(UserError, match="holds no document"):
        Windows(MemoryStore([], B), "train", 8)
    with pytest.raises(UserError, match="sequence_length must be at least 1"):
        Windows(MemoryStore(["x"], B), "train", 0)


def test_a_token_beyond_the_vocabulary_is_told() -> None:
    windows = Windows(MemoryStore(["abc"], B), "validation", 8)
    windows._split._tokens[2] = 1000
    with pytest.raises(UserError, match="window 0 holds token 1000"):
        windows[0]
