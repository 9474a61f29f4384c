"""How documents fill windows: what is predicted, padded, cut. Every token of a split is accounted for.

T: sequence_length. N: tokens of the split.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tlm_jax.counts import counted
from tlm_jax.data.mixture import AnyStore, Mixture
from tlm_jax.data.store import MemoryStore, TokenStore
from tlm_jax.errors import UserError


@dataclass(frozen=True)
class Packing:
    """What becomes of a split's tokens, over one epoch.

    tokens = targets + unpredicted, and windows · sequence_length = tokens - 1 + padding: nothing is dropped.

    Attributes:
      sequence_length: T.
      tokens, documents: of the split.
      windows: ceil((N - 1) / T).
      targets: tokens that are predicted once.
      unpredicted: tokens that are not: those that begin documents, unless they also end the one before.
      padding: positions of the last window that hold no token.
      cut_documents: documents that a window's border cuts, so that a part of them does not see their beginning.
      continued_tokens: tokens in such parts.
      documents_per_window: mean number of documents of which a window holds at least a part.
      most_documents: the largest such number.
    """

    sequence_length: int
    tokens: int
    documents: int
    windows: int
    targets: int
    unpredicted: int
    padding: int
    cut_documents: int
    continued_tokens: int
    documents_per_window: float
    most_documents: int

    @property
    def fill(self) -> float:
        """The share of positions that hold a token."""
        return 1 - self.padding / (self.windows * self.sequence_length)

    def summary(self) -> str:
        """One line of it."""
        unseen = f"{self.continued_tokens / self.tokens:.1%} of tokens do not see their document's beginning"
        windows = f"{counted(self.windows, 'window')} of {self.sequence_length}"
        return (
            f"{windows}, {self.fill:.2%} full ({self.padding:,} padded); "
            f"{counted(self.targets, 'target')}, {counted(self.unpredicted, 'token')} not predicted, none dropped; "
            f"{self.documents_per_window:.1f} documents a window, at most {self.most_documents}; "
            f"{counted(self.cut_documents, 'document')} cut ({unseen})"
        )


def packing(store: TokenStore | MemoryStore, split: str, sequence_length: int) -> Packing:
    """Counts, from the offsets alone, what `Windows` makes of a split.

    Raises:
      UserError: the split holds nothing, or T < 1.
    """
    T, tokens = sequence_length, store.split(split)
    if T < 1:
        raise UserError(f"sequence_length must be at least 1, not {T}", where=store.name)
    if tokens.num_tokens < 2:
        raise UserError(f"the split {split!r} holds no document", where=store.name)
    N = tokens.num_tokens
    windows = -(-(N - 1) // T)
    # The last token is no input, so it stands in no window.
    starts, ends = tokens.documents[:-1], np.minimum(tokens.documents[1:], N - 1)
    inside = starts < ends
    starts, ends = starts[inside], ends[inside]
    first, last = starts // T, (ends - 1) // T
    begun = np.bincount(first, minlength=windows)
    begun[np.unique(first[starts % T == 0])] -= 1  # these windows hold no document from before
    unpredicted = 1 if store.borders.start_is_target else tokens.num_documents
    return Packing(
        sequence_length=T,
        tokens=N,
        documents=tokens.num_documents,
        windows=windows,
        targets=N - unpredicted,
        unpredicted=unpredicted,
        padding=windows * T - (N - 1),
        cut_documents=int((first < last).sum()),
        continued_tokens=int(np.where(first < last, ends - (first + 1) * T, 0).sum()),
        documents_per_window=float((last - first + 1).sum() / windows),
        most_documents=int(begun.max()) + 1,
    )


def packing_by_store(store: AnyStore, sequence_length: int) -> list[Packing]:
    """The packing of the training split of a store, or of each store of a mixture."""
    parts = store.stores if isinstance(store, Mixture) else [store]
    return [packing(part, "train", sequence_length) for part in parts]
