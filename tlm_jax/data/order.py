"""The training order: an endless stream of windows of which any place is found by arithmetic.

Each store has epochs of its own, each a fresh seeded permutation of its windows, computed index by index (grain's O(1)
index shuffle). A mixture takes windows from its stores in turns (`Interleaving`), each store's next in that store's own
stream. So a place in the stream is one integer, whatever the batch size, the hosts or the workers.
"""

from __future__ import annotations

import hashlib
import sys
from typing import Any

import grain
import numpy as np

from tlm_jax.data.interleaving import Interleaving
from tlm_jax.data.mixture import AnyStore, Mixture, components
from tlm_jax.data.windows import JoinedWindows, Windows
from tlm_jax.errors import UserError

# grain's index shuffle works on 32-bit indices.
_MAX_WINDOWS = 2**32 - 1


class TrainOrder:
    """The windows that training reads, in order.

    Attributes:
      windows: of the split "train"; of a mixture those of its stores one after the other.
      stream: grain's data set of indices into `windows`, endless.
      identity: what the order depends on; a saved place means the same only under an equal identity.

    Raises:
      UserError: an empty split, or too many windows.
    """

    def __init__(self, store: AnyStore, sequence_length: int, seed: int) -> None:
        stores = store.stores if isinstance(store, Mixture) else [store]
        parts = [Windows(part, "train", sequence_length) for part in stores]
        for part, windows in zip(stores, parts, strict=True):
            if len(windows) > _MAX_WINDOWS:
                what = f"{len(windows)} windows are more than {_MAX_WINDOWS}"
                raise UserError(what, where=part.name, mend="raise data.sequence_length")
        streams = [
            grain.MapDataset.range(len(part)).shuffle(seed=_grain_seed(seed, number)).repeat()
            for number, part in enumerate(parts)
        ]
        self.windows: Windows | JoinedWindows = parts[0]
        self.stream: grain.MapDataset = streams[0]
        self._interleaving = Interleaving([1])
        if isinstance(store, Mixture):
            joined = JoinedWindows(parts)
            self.windows, self._interleaving = joined, store.interleaving
            self.stream = grain.MapDataset.source(_Turns(self._interleaving, streams, joined.starts))
        self._lengths = [len(part) for part in parts]
        self.identity: dict[str, Any] = {
            "store": store.fingerprint,
            "tokenizer": store.tokenizer().hash,
            "components": components(store),
            "sequence_length": sequence_length,
            "seed": seed,
        }

    def epochs(self, next_index: int) -> dict[str, float]:
        """How many epochs of each store, by name, the first `next_index` windows are."""
        counts = self._interleaving.counts(next_index)
        names = [part["name"] for part in self.identity["components"]]
        return {n: count / length for n, count, length in zip(names, counts, self._lengths, strict=True)}


class _Turns:
    """Indices into joined windows, from the stores' streams in turns."""

    def __init__(self, interleaving: Interleaving, streams: list[grain.MapDataset], starts: np.ndarray) -> None:
        self._interleaving, self._streams, self._starts = interleaving, streams, starts.tolist()

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, index: int) -> int:
        source, place = self._interleaving.locate(int(index))
        return self._starts[source] + self._streams[source][place]


def _grain_seed(seed: int, number: int) -> int:
    """Spreads a seed over grain's 32 bits: grain adds the epoch to it, so neighbouring seeds would share orders.

    The first store of a mixture is read in the order that it has alone, the others in orders of their own.
    """
    text = f"window order {seed}" + (f" store {number}" if number else "")
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little")


# What an identity's keys mean to the user, in the order in which differences are told.
_TOLD = {
    "tokenizer": "another tokenizer",
    "components": "another corpus or mixture",
    "store": "another corpus",
    "sequence_length": "another window length",
    "seed": "another order",
}


def check_identity(saved: dict[str, Any], current: dict[str, Any], where: str) -> None:
    """Checks that an index saved under one identity may be used under another.

    Args:
      saved, current: `TrainOrder.identity` then and now.
      where: what holds the saved index, for the message.

    Raises:
      UserError: they differ; says in what.
    """
    for key, difference in _TOLD.items():
        before, now = saved.get(key), current[key]
        if key == "components" and isinstance(before, list):
            if _of_order(before) == _of_order(now):
                continue
            before, now = _as_text(before), _as_text(now)
        # Positions saved by earlier versions know only what was in their identity.
        if before != now and (before is not None or key not in ("tokenizer", "components")):
            raise UserError(
                f"the saved position is of {difference}: {key} was {before}, now {now}",
                where=where,
                mend="go back to the old value, or start a new run",
            )


def _of_order(parts: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """What of the components the order depends on: not where a store lies."""
    return [(part["fingerprint"], part["share"]) for part in parts]


def _as_text(parts: list[dict[str, Any]]) -> str:
    return " + ".join(f"{part['share']} {part['name']} ({part['fingerprint'][:12]})" for part in parts)
