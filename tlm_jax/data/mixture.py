"""Mixtures: several token stores trained on side by side, in fixed proportions."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tlm_jax.data.interleaving import Interleaving
from tlm_jax.data.store import Borders, MemoryStore, Split, TokenStore
from tlm_jax.data.tokenizer import Tokenizer
from tlm_jax.errors import UserError, raise_together

_KEY = "config.data.mixture"


class JoinedSplit:
    """The same split of several stores end to end, with the interface of `Split` but for the borders' bisection."""

    def __init__(self, splits: Sequence[Split]) -> None:
        self._splits = splits
        self._starts = np.cumsum([0] + [split.num_tokens for split in splits])
        self.num_tokens = int(self._starts[-1])
        self.num_documents = sum(split.num_documents for split in splits)
        self.num_bytes = sum(split.num_bytes for split in splits)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Returns tokens [start, stop)."""
        parts = [
            split.read(max(start - origin, 0), min(stop - origin, split.num_tokens))
            for split, origin in zip(self._splits, self._starts[:-1].tolist(), strict=True)
            if start < origin + split.num_tokens and stop > origin
        ]
        return np.concatenate(parts) if parts else np.empty(0, np.int32)

    @property
    def documents(self) -> np.ndarray:
        """int64 [num_documents + 1]: document d is tokens [documents[d], documents[d + 1])."""
        ends = [split.documents[1:] + start for split, start in zip(self._splits, self._starts[:-1], strict=True)]
        return np.concatenate([np.zeros(1, np.int64), *ends])


class Mixture:
    """Token stores and the proportions in which training reads their windows.

    Attributes:
      name: how messages call it.
      stores: the stores, in order.
      names: a short name of each, the same wherever they lie, where that tells them apart.
      interleaving: which store each window comes from.

    Args:
      stores: one or more, all of one tokenizer.
      weights: of each, positive.

    Raises:
      UserError: other tokenizers, the same store twice, or weights that cannot be.
    """

    def __init__(self, stores: Sequence[TokenStore], weights: Sequence[float]) -> None:
        self.stores = list(stores)
        self.name = " + ".join(store.name for store in stores)
        self.names = store_names(stores)
        first = stores[0]
        seen: dict[str, str] = {}
        for store in stores:
            if store.manifest["tokenizer"]["hash"] != first.manifest["tokenizer"]["hash"]:
                what = f"{store.name} was made with another tokenizer than {first.name}"
                raise UserError(what, where=_KEY, mend="prepare all stores of a mixture with one tokenizer")
            if store.fingerprint in seen:
                mend = "name each store once; its weight says how often it is read"
                raise UserError(f"{seen[store.fingerprint]} and {store.name} hold the same", where=_KEY, mend=mend)
            seen[store.fingerprint] = store.name
        try:
            self.interleaving = Interleaving(weights)
        except UserError as error:
            raise UserError(error.what, where=_KEY, mend=error.mend) from None

    def tokenizer(self) -> Tokenizer:
        """Returns the tokenizer that made all of them."""
        return self.stores[0].tokenizer()

    def split(self, name: str) -> JoinedSplit:
        """Returns the split of all stores, one after the other."""
        return JoinedSplit([store.split(name) for store in self.stores])

    @property
    def borders(self) -> Borders:
        """How documents are told apart: the tokenizer that the stores share says so."""
        return self.stores[0].borders

    @property
    def fingerprint(self) -> str:
        """The sha256 (hex) of the stores' fingerprints and shares."""
        parts = [(part["fingerprint"], part["share"]) for part in components(self)]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


AnyStore = TokenStore | MemoryStore | Mixture


def components(store: AnyStore) -> list[dict[str, Any]]:
    """What a saved position depends on, store by store: name, fingerprint, share of the windows as "7/10"."""
    if not isinstance(store, Mixture):
        return [{"name": Path(store.name).name, "fingerprint": store.fingerprint, "share": "1"}]
    return [
        {"name": name, "fingerprint": part.fingerprint, "share": str(share)}
        for name, part, share in zip(store.names, store.stores, store.interleaving.shares, strict=True)
    ]


def store_names(stores: Sequence[TokenStore]) -> list[str]:
    """The stores' last path components, or their whole paths if two of those are equal."""
    short = [store.path.name or store.name for store in stores]
    return short if len(set(short)) == len(short) else [store.name for store in stores]


def open_data(store: str, mixture: Sequence[Any]) -> TokenStore | Mixture:
    """Opens what `config.data` names: one store, or a mixture.

    Args:
      store: `config.data.store`.
      mixture: `config.data.mixture`: pairs of store and weight.

    Raises:
      UserError: neither or both are given, or a store or the mixture cannot be opened; all problems together.
    """
    if store and mixture:
        mend = "give a mixture's stores in config.data.mixture alone"
        raise UserError("given beside config.data.mixture", where="config.data.store", mend=mend)
    if store:
        return TokenStore.open(store)
    if not mixture:
        raise UserError(
            "names no token store",
            where="config.data.store",
            mend="make one with `tlm prepare` and pass --config.data.store=DIR",
        )
    stores, weights, problems = [], [], list[UserError]()
    for entry in mixture:
        try:
            path, weight = read_entry(entry)
            weights.append(weight)
            stores.append(TokenStore.open(path))
        except UserError as problem:
            problems.append(problem)
    raise_together(problems)
    return Mixture(stores, weights)


def with_absolute_paths(mixture: Sequence[Any]) -> tuple[Any, ...]:
    """Returns `config.data.mixture` with the stores' paths absolute; what is no pair stays, for `open_data` to tell."""

    def absolute(entry: Any) -> Any:
        try:
            path, weight = read_entry(entry)
        except UserError:
            return entry
        return os.path.abspath(path), weight

    return tuple(absolute(entry) for entry in mixture)


def read_entry(entry: Any) -> tuple[str, float]:
    """Reads an entry of `config.data.mixture` as store and weight.

    Raises:
      UserError: it is no such pair.
    """
    if not isinstance(entry, (list, tuple)) or len(entry) != 2 or not isinstance(entry[0], str) or not entry[0]:
        mend = "write (('stores/web', 0.7), ('stores/books', 0.3))"
        raise UserError(f"{entry!r} is no pair of store and weight", where=_KEY, mend=mend)
    return entry[0], entry[1]
