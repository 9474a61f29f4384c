"""Mixtures: exact proportions, each store with epochs of its own, the same windows whoever reads them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from foreign_files import make_documents, separated, write_raw
from small_texts import make_texts, write_jsonl

from tlm_jax.data.adopt import Adoption, adopt
from tlm_jax.data.loader import Batch, train_loader, validation_batches
from tlm_jax.data.mixture import Mixture, open_data, with_absolute_paths
from tlm_jax.data.order import TrainOrder, check_identity
from tlm_jax.data.packing import packing_by_store
from tlm_jax.data.prepare import Settings, prepare
from tlm_jax.data.store import SPLITS, TokenStore, split_texts
from tlm_jax.data.tokenizer import ByteTokenizer
from tlm_jax.data.windows import Windows, cut
from tlm_jax.errors import UserError

T = 64
WEIGHTS = (0.5, 0.3, 0.2)


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> list[TokenStore]:
    """Three of different sizes; the last holds nothing out."""
    directory = tmp_path_factory.mktemp("mixture")
    found = []
    for name, count, holdout in (("web", 90, 0.2), ("books", 30, 0.3), ("code", 12, 0.0)):
        texts = write_jsonl(directory / f"{name}.jsonl", make_texts(count, seed=count))
        found.append(prepare([str(texts)], ByteTokenizer(), directory / name, Settings(holdout=holdout), workers=1))
    return found


@pytest.fixture(scope="module")
def mixture(stores: list[TokenStore]) -> Mixture:
    return Mixture(stores, WEIGHTS)


def _take(store: Any, count: int, **changes: Any) -> list[Batch]:
    with train_loader(store, **{"sequence_length": T, "global_batch_size": 8, "seed": 1, **changes}) as loader:
        return list(islice(loader, count))


def _sources(stores: Sequence[TokenStore], batches: list[Batch]) -> list[tuple[int, int]]:
    """(store, its window) of each row in order."""
    starts = np.cumsum([0] + [len(Windows(store, "train", T)) for store in stores])
    found = []
    for index in (int(i) for batch in batches for i in batch["window"]):
        source = int(np.searchsorted(starts, index, side="right")) - 1
        found.append((source, index - int(starts[source])))
    return found


def test_every_row_is_the_window_of_the_store_that_it_names(stores: list[TokenStore], mixture: Mixture) -> None:
    batches = _take(mixture, 6)
    rows = [{key: values[row] for key, values in batch.items()} for batch in batches for row in range(8)]
    for (source, index), row in zip(_sources(stores, batches), rows, strict=True):
        for key, values in Windows(stores[source], "train", T)[index].items():
            assert key == "window" or np.array_equal(values, row[key]), key


def test_proportions_hold_in_every_prefix_and_each_store_has_its_own_epochs(
    stores: list[TokenStore], mixture: Mixture
) -> None:
    order = _sources(stores, _take(mixture, 150))
    seen = Counter[int]()
    for number, (source, _) in enumerate(order, 1):
        seen[source] += 1
        assert all(abs(seen[c] - number * weight) < 1 for c, weight in enumerate(WEIGHTS))
    for source, store in enumerate(stores):
        own = [index for where, index in order if where == source]
        size = len(Windows(store, "train", T))
        epochs = [own[at : at + size] for at in range(0, len(own) - size + 1, size)]
        assert all(sorted(epoch) == list(range(size)) for epoch in epochs), "each window once an epoch"
        assert len({tuple(epoch) for epoch in epochs}) == len(epochs)
    sizes = [len(Windows(store, "train", T)) for store in stores]
    epochs_of = TrainOrder(mixture, T, 1).epochs(len(order))
    assert epochs_of == {n: seen[c] / sizes[c] for c, n in enumerate(("web", "books", "code"))}
    assert min(epochs_of.values()) > 1
    assert max(epochs_of.values()) > 3


def test_a_store_alone_and_a_mixture_of_one_are_the_same(stores: list[TokenStore]) -> None:
    alone, mixed = _take(stores[0], 30), _take(Mixture(stores[:1], [3]), 30)
    assert [b["window"].tolist() for b in alone] == [b["window"].tolist() for b in mixed]


@pytest.mark.parametrize(
    ("host_count", "num_workers"), [(1, 0), (2, 0), (4, 0), pytest.param(2, 2, marks=pytest.mark.slow)]
)
def test_the_same_windows_for_any_hosts_and_workers(mixture: Mixture, host_count: int, num_workers: int) -> None:
    alone = _take(mixture, 30)
    for host in range(host_count):
        shares = {"host_index": host, "host_count": host_count}
        batches = _take(mixture, 20, **shares, num_workers=num_workers, start_index=80)
        for batch, whole in zip(batches, alone[10:], strict=True):
            for key, values in batch.items():
                assert np.array_equal(values, whole[key][host::host_count]), key


@pytest.mark.parametrize("start", [1, 77, 1003, 10**9])
def test_it_goes_on_from_any_position_with_any_batch_size(mixture: Mixture, start: int) -> None:
    order = TrainOrder(mixture, T, 1)
    wanted = [order.stream[start + i] for i in range(24)]
    for size in (4, 6, 24):
        found = _take(mixture, 24 // size, start_index=start, global_batch_size=size)
        assert [int(i) for batch in found for i in batch["window"]] == wanted


@pytest.mark.parametrize("num_windows", [0, 7])
@pytest.mark.parametrize(("batch_size", "host_count"), [(1, 1), (8, 2)])
def test_validation_is_what_every_store_holds_out(
    stores: list[TokenStore], mixture: Mixture, num_windows: int, batch_size: int, host_count: int
) -> None:
    rows, tokens, num_bytes = Counter[int](), 0, 0
    for host in range(host_count):
        for batch in validation_batches(
            mixture, sequence_length=T, batch_size=batch_size, num_windows=num_windows,
            host_index=host, host_count=host_count,
        ):  # fmt: skip
            rows.update(batch["window"].tolist())
            tokens += int(batch["mask"].sum())
            num_bytes += int(batch["bytes"].sum())
    del rows[-1]
    total = sum(len(Windows(store, "validation", T)) for store in stores[:2])
    count = num_windows or total
    assert rows == Counter(i * total // count for i in range(count))
    if not num_windows:
        held = [store.split("validation") for store in stores]
        assert tokens == sum(split.num_tokens - split.num_documents for split in held)
        assert num_bytes == sum(split.num_bytes for split in held)


def test_counts_in_are_counts_out(stores: list[TokenStore], mixture: Mixture) -> None:
    packed = packing_by_store(mixture, T)
    windows = cut(mixture, "train", T)
    targets = sum(int(windows[i]["mask"].sum()) for i in range(len(windows)))
    assert targets + sum(part.unpredicted for part in packed) == sum(s.split("train").num_tokens for s in stores)
    with pytest.raises(IndexError):
        windows[len(windows)]


def test_splits_joined(stores: list[TokenStore], mixture: Mixture) -> None:
    for name in SPLITS:
        joined, parts = mixture.split(name), [store.split(name) for store in stores]
        ids = np.concatenate([part.read(0, part.num_tokens) for part in parts])
        assert joined.num_tokens == len(ids)
        assert np.array_equal(joined.read(0, len(ids)), ids)
        at = parts[0].num_tokens
        assert np.array_equal(joined.read(at - 3, at + 5), ids[at - 3 : at + 5])
        tokenizer = mixture.tokenizer()
        assert list(split_texts(joined, tokenizer)) == [t for part in parts for t in split_texts(part, tokenizer)]
        assert joined.num_documents == len(joined.documents) - 1


def _change(store: Any, **changes: Any) -> dict[str, Any]:
    """The identity as a checkpoint gives it back."""
    settings = {"sequence_length": T, "seed": 1, **changes}
    return json.loads(json.dumps(TrainOrder(store, **settings).identity))


def test_a_changed_mixture_under_a_saved_position_is_told(stores: list[TokenStore], mixture: Mixture) -> None:
    now = TrainOrder(mixture, T, 1).identity
    other = "another corpus or mixture: components was "
    check_identity(_change(Mixture(stores, [5, 3, 2])), now, "run")
    for saved, message in (
        (_change(Mixture(stores, [2, 1, 1])), rf"{other}1/2 web \(\w{{12}}\) \+ 1/4 books"),
        (_change(Mixture(stores[:2], [1, 1])), rf"{other}1/2 web \(\w{{12}}\) \+ 1/2 books"),
        (_change(stores[0]), rf"{other}1 web \(\w{{12}}\), now 1/2 web"),
        (_change(mixture, sequence_length=32), "another window length: sequence_length was 32, now 64"),
        (_change(mixture, seed=2), "another order: seed was 2, now 1"),
        ({**_change(mixture), "tokenizer": "abc"}, "another tokenizer: tokenizer was abc, now"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=f"run: the saved position is of {message}.*; go back to the old value"):
            check_identity(saved, now, "run")


def test_mixtures_that_cannot_be(stores: list[TokenStore], tmp_path: Path) -> None:
    file = write_raw(tmp_path / "f.bin", separated(make_documents(20), first=False))
    foreign = adopt([str(file)], [], tmp_path / "foreign", ByteTokenizer(), Adoption(257))
    with pytest.raises(UserError, match=r"mixture: .*foreign was made with another tokenizer than .*web; prepare all"):
        Mixture([stores[0], foreign], [1, 1])
    with pytest.raises(UserError, match=r"mixture: .*web and .*web hold the same; name each store once"):
        Mixture([stores[0], stores[0]], [1, 1])
    with pytest.raises(UserError, match=r"config.data.mixture: a weight must be a positive number, not 0"):
        Mixture(stores, [1, 0, 1])
    with pytest.raises(UserError, match=r"the split 'validation' holds no document"):
        validation_batches(Mixture(stores[2:], [1]), sequence_length=T, batch_size=1)


def test_opening_what_a_config_names(stores: list[TokenStore], tmp_path: Path) -> None:
    web, books = str(stores[0].path), str(stores[1].path)
    assert isinstance(open_data(web, ()), TokenStore)
    mixture = open_data("", [[web, 2], (books, 1)])
    assert isinstance(mixture, Mixture)
    assert mixture.name == f"{web} + {books}"
    for store, entries, message in (
        ("", (), "config.data.store: names no token store"),
        (web, ((books, 1),), "config.data.store: given beside config.data.mixture"),
        ("", (web, 1), f"2 problems: (1) config.data.mixture: '{web}' is no pair of store and weight; write (("),
        ("", (("a", 1), ("b", 1)), "2 problems: (1) a: no such token store"),
    ):
        with pytest.raises(UserError) as told:
            open_data(store, entries)
        assert message in str(told.value)


def test_paths_become_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert with_absolute_paths((("a", 1), ["/b", 2], "c")) == ((str(tmp_path / "a"), 1), ("/b", 2), "c")


def test_adopted_stores_mix(tmp_path: Path) -> None:
    made = []
    for seed in range(2):
        file = write_raw(tmp_path / f"{seed}.bin", separated(make_documents(40, seed=seed), first=False))
        made.append(adopt([str(file)], [], tmp_path / f"s{seed}", 300, Adoption(257)))
    mixture = Mixture(made, [1, 3])
    batches = _take(mixture, 4)
    assert Counter(source for source, _ in _sources(made, batches)) == {0: 8, 1: 24}
    assert mixture.borders == made[0].borders


def test_names_that_are_alike_are_told_apart(stores: list[TokenStore]) -> None:
    a, b = TokenStore(Path("x/store"), {}), TokenStore(Path("y/store"), {})
    from tlm_jax.data.mixture import store_names

    assert store_names([a, b]) == ["x/store", "y/store"]
    assert store_names(stores) == ["web", "books", "code"]
