from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tlm_jax.data.loader import Batch, TrainLoader, train_loader, validation_batches
from tlm_jax.data.order import check_identity
from tlm_jax.data.store import MemoryStore, TokenStore
from tlm_jax.data.tokenizer import ByteTokenizer
from tlm_jax.data.windows import Windows
from tlm_jax.errors import UserError

T = 128


def _loader(store: TokenStore, **settings: Any) -> TrainLoader:
    return train_loader(store, **{"sequence_length": T, "global_batch_size": 8, "seed": 1, **settings})


def _take(store: TokenStore, count: int, **settings: Any) -> list[Batch]:
    with _loader(store, **settings) as loader:
        return list(islice(loader, count))


def _stream(store: TokenStore, count: int, **settings: Any) -> list[int]:
    return [int(i) for batch in _take(store, count, **settings) for i in batch["window"]]


def _assert_equal(left: list[Batch], right: list[Batch]) -> None:
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        assert a.keys() == b.keys()
        for key in a:
            assert a[key].dtype == b[key].dtype
            assert np.array_equal(a[key], b[key]), key


def test_a_batch_holds_the_windows_it_names(store: TokenStore) -> None:
    windows = Windows(store, "train", T)
    (batch,) = _take(store, 1)
    assert {key: (value.shape, value.dtype.name) for key, value in batch.items()} == {
        "inputs": ((8, T), "int32"),
        "targets": ((8, T), "int32"),
        "mask": ((8, T), "bool"),
        "segment_ids": ((8, T), "int32"),
        "positions": ((8, T), "int32"),
        "bytes": ((8,), "int32"),
        "window": ((8,), "int64"),
    }
    for row, index in enumerate(batch["window"]):
        for key, value in windows[int(index)].items():
            assert np.array_equal(batch[key][row], value)


def test_an_epoch_is_every_window_once_and_each_in_another_order(store: TokenStore) -> None:
    count = len(Windows(store, "train", T))
    order = _stream(store, -(-3 * count // 8))
    epochs = [tuple(order[i * count : (i + 1) * count]) for i in range(3)]
    assert all(sorted(epoch) == list(range(count)) for epoch in epochs)
    assert len({*epochs, tuple(range(count))}) == 4
    # Neighbouring seeds do not share orders with later epochs.
    assert len({tuple(_stream(store, count // 8, seed=seed)) for seed in (0, 1, 2, -3, 2**40)}) == 5
    assert tuple(_stream(store, count // 8, seed=2)) != epochs[1][: count // 8 * 8]


def test_the_order_is_pinned() -> None:
    """Saved positions mean nothing if the permutation changes with a release of grain."""
    store = MemoryStore(["x" * 998], ByteTokenizer())
    with train_loader(store, sequence_length=10, global_batch_size=5, seed=7, start_index=98) as loader:
        assert [next(loader)["window"].tolist() for _ in range(2)] == [[94, 90, 6, 23, 41], [19, 81, 98, 63, 26]]


@pytest.mark.parametrize("start", [1, 5, 8, 1003])
def test_it_goes_on_from_any_position_with_any_batch_size(store: TokenStore, start: int) -> None:
    order = _stream(store, 140)
    assert _stream(store, 6, start_index=start) == order[start : start + 48]
    assert _stream(store, 4, start_index=start, global_batch_size=6) == order[start : start + 24]


def test_hosts_share_every_batch_and_may_change_their_number(store: TokenStore) -> None:
    order = _stream(store, 12)
    four = [_loader(store, host_index=h, host_count=4) for h in range(4)]
    seen = []
    for _ in range(5):
        batches = [next(loader) for loader in four]
        assert all(batch["inputs"].shape == (2, T) for batch in batches)
        seen += [int(batches[i % 4]["window"][i // 4]) for i in range(8)]
    (position,) = {loader.next_index for loader in four}
    for loader in four:
        loader.close()
    assert position == 40
    two = [_take(store, 7, host_index=h, host_count=2, start_index=position) for h in range(2)]
    for step in range(7):
        seen += [int(two[i % 2][step]["window"][i // 2]) for i in range(8)]
    assert seen == order


def test_next_index_counts_what_was_consumed_not_what_was_read_ahead(store: TokenStore) -> None:
    with _loader(store, start_index=16) as loader:
        assert loader.next_index == 16
        time.sleep(0.05)
        next(loader)
        assert loader.next_index == 24
    assert loader.next_index == 24
    with pytest.raises(ValueError, match="closed"):
        next(loader)
    loader.close()


@pytest.mark.slow
def test_batches_do_not_depend_on_workers_nor_does_going_on(store: TokenStore) -> None:
    alone = _take(store, 30)
    position, seen = 0, list[Batch]()
    for workers, count in ((1, 9), (4, 13), (0, 8)):
        with _loader(store, num_workers=workers, start_index=position) as loader:
            seen += islice(loader, count)
            position = loader.next_index
    _assert_equal(seen, alone)
    with _loader(store, num_workers=1, host_index=1, host_count=2, start_index=7 * 8) as loader:
        _assert_equal([{key: value[1::2] for key, value in alone[7].items()}], [next(loader)])


@pytest.mark.slow
def test_workers_survive_ctrl_c_and_stop_with_the_loader(store: TokenStore) -> None:
    alone = _take(store, 40)
    with _loader(store, num_workers=2) as loader:
        first = next(loader)
        workers = multiprocessing.active_children()
        assert len(workers) == 2
        for worker in workers:
            assert worker.pid is not None
            os.kill(worker.pid, signal.SIGINT)
            os.kill(worker.pid, signal.SIGTERM)
        _assert_equal([first, *islice(loader, 39)], alone)
    assert not multiprocessing.active_children()


_HOLDS_A_LOADER = """
import multiprocessing, sys, time
from tlm_jax.data.loader import train_loader
from tlm_jax.data.store import TokenStore
loader = train_loader(TokenStore.open(sys.argv[1]), sequence_length=64, global_batch_size=2, seed=0, num_workers=1)
next(loader)
print(*[child.pid for child in multiprocessing.active_children()], flush=True)
time.sleep(600)
"""


@pytest.mark.slow
def test_workers_do_not_outlive_a_killed_process(store: TokenStore) -> None:
    command = [sys.executable, "-c", _HOLDS_A_LOADER, str(store.path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    worker = Path("/proc") / process.stdout.readline().strip()
    assert worker.name.isdigit()
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 240
    while worker.exists() and "State:\tZ" not in _status(worker):
        assert time.monotonic() < deadline, "the worker is still there"
        time.sleep(0.05)


def _status(process: Path) -> str:
    try:
        return (process / "status").read_text()
    except OSError:
        return "State:\tZ"


@pytest.mark.parametrize("num_windows", [0, 13, 10**9])
@pytest.mark.parametrize(("batch_size", "host_count"), [(1, 1), (8, 1), (8, 4), (6, 2)])
def test_validation_counts_every_window_once_on_any_hosts(
    store: TokenStore, num_windows: int, batch_size: int, host_count: int
) -> None:
    windows = Windows(store, "validation", T)
    count = min(num_windows or len(windows), len(windows))
    assert len(windows) % 8
    assert len(windows) > 13
    hosts = [
        list(
            validation_batches(
                store,
                sequence_length=T,
                batch_size=batch_size,
                num_windows=num_windows,
                host_index=h,
                host_count=host_count,
            )
        )
        for h in range(host_count)
    ]
    assert {len(batches) for batches in hosts} == {-(-count // batch_size)}
    rows = Counter[int]()
    tokens = num_bytes = 0
    for batches in hosts:
        for batch in batches:
            assert batch["inputs"].shape == (batch_size // host_count, T)
            rows.update(batch["window"].tolist())
            tokens += int(batch["mask"].sum())
            num_bytes += int(batch["bytes"].sum())
            padded = batch["window"] == -1
            assert not batch["mask"][padded].any()
            assert not batch["segment_ids"][padded].any()
    del rows[-1]
    evenly = [i * len(windows) // count for i in range(count)]
    assert rows == Counter(evenly)
    assert max(evenly) >= len(windows) - 1 - len(windows) // count
    wanted = [windows[i] for i in evenly]
    assert tokens == sum(int(w["mask"].sum()) for w in wanted)
    assert num_bytes == sum(int(w["bytes"]) for w in wanted)
    if count == len(windows):
        split = store.split("validation")
        assert (tokens, num_bytes) == (split.num_tokens - split.num_documents, split.num_bytes)


def test_a_position_of_other_data_is_refused(store: TokenStore) -> None:
    with _loader(store) as loader:
        identity = loader.order.identity
    check_identity(identity, dict(identity), "checkpoint")
    for key, difference in (
        ("store", "corpus"), ("tokenizer", "tokenizer"), ("sequence_length", "window length"), ("seed", "order"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=f"checkpoint: the saved position is of another {difference}: {key} was 99"):
            check_identity({**identity, key: 99}, identity, "checkpoint")
    # What earlier versions saved.
    check_identity({key: identity[key] for key in ("store", "sequence_length", "seed")}, identity, "checkpoint")
    with pytest.raises(UserError, match="another corpus: store was None"):
        check_identity({"sequence_length": T, "seed": 1}, identity, "checkpoint")


def test_batches_that_cannot_be(store: TokenStore) -> None:
    with pytest.raises(UserError, match="global_batch_size 6 is not a positive multiple of the number of hosts, 4"):
        _loader(store, global_batch_size=6, host_count=4)
    with pytest.raises(UserError, match="batch_size 0"):
        validation_batches(store, sequence_length=T, batch_size=0)
    with pytest.raises(UserError, match="holds no document"):
        train_loader(MemoryStore([], ByteTokenizer()), sequence_length=T, global_batch_size=1, seed=0)
