"""Windows: fixed-length training examples cut from a split by arithmetic.

T: sequence_length. N: tokens of the split. Window i is tokens[i*T : i*T + T + 1]: T inputs and, one step on, T
targets. Every token but the first, which nothing predicts, is the target of exactly one window; the last window is
padded. What counts as a target, and where documents begin, is the store's to say (`Borders`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tlm_jax.data.mixture import AnyStore, Mixture
from tlm_jax.data.store import MemoryStore, TokenStore, beyond_vocabulary
from tlm_jax.errors import UserError


class Windows:
    """The windows of one split, by index.

    `windows[i]` is a dictionary:
      inputs [T] int32: ids; the padding id after the split's end.
      targets [T] int32: the id that follows each input.
      mask [T] bool: which targets count: not padding, and not the start of the next document, unless that also ends
        the document before.
      segment_ids [T] int32: 1, 2, … by document within the window; 0 is padding.
      positions [T] int32: restart at 0 with each document, and with the window.
      bytes, int32 scalar: UTF-8 bytes of text that the counted targets stand for.
      window, int64 scalar: i.

    Over all windows the counted targets are the split's tokens without document starts (`packing` counts them), and
    `bytes` sums to the bytes of the split, less the text of tokens that are no targets. Where an id begins documents,
    they are found in the window itself; else by bisection of the offsets.

    Args:
      store: a `TokenStore` or `MemoryStore`.
      split: "train" or "validation".
      sequence_length: T.

    Raises:
      UserError: the split holds nothing, or T < 1.
    """

    def __init__(self, store: TokenStore | MemoryStore, split: str, sequence_length: int) -> None:
        if sequence_length < 1:
            raise UserError(f"sequence_length must be at least 1, not {sequence_length}", where=store.name)
        self._name, self._split = store.name, store.split(split)
        if self._split.num_tokens < 2:
            raise UserError(f"the split {split!r} holds no document", where=store.name)
        self.sequence_length = sequence_length
        tokenizer = store.tokenizer()
        self._borders = store.borders
        self._token_bytes = tokenizer.token_bytes()
        self._arange_T = np.arange(sequence_length, dtype=np.int32)
        self._padding = {
            "inputs": np.full(sequence_length, tokenizer.pad_id, np.int32),
            "targets": np.full(sequence_length, tokenizer.pad_id, np.int32),
            "mask": np.zeros(sequence_length, bool),
            "segment_ids": np.zeros(sequence_length, np.int32),
            "positions": np.zeros(sequence_length, np.int32),
        }
        self.nothing: dict[str, Any] = {**self._padding, "bytes": np.int32(0), "window": np.int64(-1)}

    def __len__(self) -> int:
        return -(-(self._split.num_tokens - 1) // self.sequence_length)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        T = self.sequence_length
        start = index * T
        tokens = self._split.read(start, min(start + T + 1, self._split.num_tokens)).astype(np.int32)
        inputs, targets = tokens[:-1], tokens[1:]
        if self._borders.start_id is None:
            starts = self._split.document_starts(start, start + len(tokens)) - start
            mask = np.ones(len(inputs), bool)
            mask[starts[starts > 0] - 1] = False
            starts = starts[starts < len(inputs)]
        else:
            starts = np.flatnonzero(inputs == self._borders.start_id)
            always = self._borders.start_is_target
            mask = np.ones(len(inputs), bool) if always else targets != self._borders.start_id
        # Where the window's segments begin: at each document, and at 0 for what began before the window.
        if not len(starts) or starts[0]:
            starts = np.concatenate([[0], starts])
        lengths = np.diff(starts, append=len(inputs))
        window = {
            "inputs": inputs,
            "targets": targets,
            "mask": mask,
            "segment_ids": np.repeat(np.arange(1, len(starts) + 1, dtype=np.int32), lengths),
            "positions": self._arange_T[: len(inputs)] - np.repeat(starts.astype(np.int32), lengths),
        }
        if len(inputs) < T:
            window = {
                key: np.concatenate([values, self._padding[key][len(inputs) :]]) for key, values in window.items()
            }
        # An id that begins documents stands for no text, so only the offsets' documents need the mask.
        counted = targets if self._borders.start_id is not None else targets[mask]
        try:
            num_bytes = self._token_bytes[counted].sum(dtype=np.int32)
        except IndexError:
            raise beyond_vocabulary(f"window {index}", targets, self._name) from None
        return {**window, "bytes": num_bytes, "window": np.int64(index)}

    def batch(self, indices: Sequence[int] | np.ndarray) -> dict[str, np.ndarray]:
        """Returns windows stacked along a leading axis; index -1 stands for one in which nothing counts."""
        return _stack([self[int(i)] if i >= 0 else self.nothing for i in indices])


class JoinedWindows:
    """The windows of several stores end to end, by one index; `window` in each is that index.

    Args:
      parts: the windows of each store, of one length and tokenizer.
    """

    def __init__(self, parts: Sequence[Windows]) -> None:
        self._parts = list(parts)
        self.starts = np.cumsum([0] + [len(part) for part in parts])

    def __len__(self) -> int:
        return int(self.starts[-1])

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        number = int(np.searchsorted(self.starts, index, side="right")) - 1
        return {**self._parts[number][index - int(self.starts[number])], "window": np.int64(index)}

    def batch(self, indices: Sequence[int] | np.ndarray) -> dict[str, np.ndarray]:
        """Returns windows stacked along a leading axis; index -1 stands for one in which nothing counts."""
        return _stack([self[int(i)] if i >= 0 else self._parts[0].nothing for i in indices])


def _stack(rows: Sequence[dict[str, Any]]) -> dict[str, np.ndarray]:
    return {key: np.stack([row[key] for row in rows]) for key in rows[0]}


def cut(store: AnyStore, split: str, sequence_length: int) -> Windows | JoinedWindows:
    """Returns the windows of a split; of a mixture those of its stores one after the other, leaving out empty ones.

    Raises:
      UserError: the split holds nothing, or the length is below 1.
    """
    if not isinstance(store, Mixture):
        return Windows(store, split, sequence_length)
    filled = [part for part in store.stores if part.split(split).num_tokens > 1]
    if not filled:
        raise UserError(f"the split {split!r} holds no document", where=store.name)
    return JoinedWindows([Windows(part, split, sequence_length) for part in filled])
