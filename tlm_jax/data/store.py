"""The token store: documents tokenised once, in memory-mapped shards, described and sealed by a manifest.

    STORE/manifest.json              written last; without it the store is not complete
    STORE/tokenizer.model | .json    what `tokenizer_from_bytes` needs
    STORE/<split>/00000.tokens       little-endian ids: begin, text, end of each document in turn
    STORE/<split>/00000.offsets      little-endian uint64: where each document of the shard ends, in tokens

A shard holds whole documents. Splits are "train" and "validation".

An adopted store (`tlm adopt`) has no `.tokens` files: its shards name files of another program, read where they lie,
and documents may go on from one shard to the next. Its documents do not begin and end with ids of their own; `Borders`
says how they are told apart.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from tlm_jax.data.documents import DocumentFormat, Problem, find_inputs, read_documents
from tlm_jax.data.stored_file import StoredFile
from tlm_jax.data.tokenizer import Tokenizer, tokenizer_from_bytes
from tlm_jax.errors import UserError
from tlm_jax.files import parse_json

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
SPLITS = ("train", "validation")
OFFSET_DTYPE = np.dtype("<u8")
# uint16 and uint32 are what `tlm prepare` writes.
TOKEN_DTYPES: dict[str, np.dtype] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4"), "int32": np.dtype("<i4")}
_PREPARE_AGAIN = "run `tlm prepare` again with another --output"
_ADOPT_AGAIN = "put the file back as it was, or run `tlm adopt` again with another --output"


@dataclass(frozen=True)
class Borders:
    """How the documents of a split are told apart.

    Attributes:
      start_id: the id that every document begins with (the first one may lack it); None: the offsets say where.
      start_is_target: whether a document's first id is predicted, as the end of the document before.
    """

    start_id: int | None
    start_is_target: bool


class Split:
    """The tokens of one split, read across shards through memory maps.

    Attributes:
      num_tokens, num_documents: counts, document starts and ends included in the tokens.
      num_bytes: UTF-8 bytes of the documents' text.
    """

    def __init__(self, directory: Path, entry: dict[str, Any], dtype: np.dtype) -> None:
        self.num_tokens: int = entry["tokens"]
        self.num_documents: int = entry["documents"]
        self.num_bytes: int = entry["bytes"]
        self._shards: list[dict[str, Any]] = entry["shards"]
        self._directory = directory
        self._dtype = dtype
        self._starts = np.cumsum([0] + [shard["tokens"] for shard in self._shards])
        self._maps: dict[int, np.ndarray] = {}
        self._offset_maps: dict[int, np.ndarray] = {}

    def __getstate__(self) -> dict[str, Any]:
        state = {**self.__dict__, "_maps": {}, "_offset_maps": {}}  # loader processes map the shards themselves
        state.pop("documents", None)
        return state

    def _shard(self, number: int) -> np.ndarray:
        if number not in self._maps:
            shard = self._shards[number]
            # A view without np.memmap's subclass, whose slices cost a microsecond more each.
            self._maps[number] = np.memmap(
                self._directory / tokens_file(shard), self._dtype, "r", shard.get("offset", 0), shard["tokens"]
            ).view(np.ndarray)
        return self._maps[number]

    def _ends(self, number: int) -> np.ndarray:
        """Where the documents that end in a shard do so, in its tokens."""
        if number not in self._offset_maps:
            shard = self._shards[number]
            empty = np.empty(0, OFFSET_DTYPE)  # which cannot be mapped
            path = self._directory / f"{shard['name']}.offsets"
            self._offset_maps[number] = (
                np.memmap(path, OFFSET_DTYPE, "r").view(np.ndarray) if shard["documents"] else empty
            )
        return self._offset_maps[number]

    def read(self, start: int, stop: int) -> np.ndarray:
        """Returns tokens [start, stop), uint16 or uint32 [stop - start]; read-only where one shard holds them all.

        Raises:
          IndexError: not 0 <= start <= stop <= num_tokens.
        """
        if not 0 <= start <= stop <= self.num_tokens:
            raise IndexError(f"tokens {start}:{stop} of {self.num_tokens}")
        if start == stop:
            return np.empty(0, self._dtype)
        number = int(np.searchsorted(self._starts, start, side="right")) - 1
        parts = []
        while start < stop:
            origin, end = int(self._starts[number]), int(self._starts[number + 1])
            parts.append(self._shard(number)[start - origin : min(stop, end) - origin])
            start, number = min(stop, end), number + 1
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    @functools.cached_property
    def documents(self) -> np.ndarray:
        """int64 [num_documents + 1]: document d is tokens [documents[d], documents[d + 1])."""
        ends = [self._ends(number).astype(np.int64) + self._starts[number] for number in range(len(self._shards))]
        return np.concatenate([np.zeros(1, np.int64), *ends])

    def document_starts(self, start: int, stop: int) -> np.ndarray:
        """Returns which of the tokens [start, stop) begin a document, int64, found by bisection of the offsets."""
        found = [np.zeros(1 if start == 0 < stop else 0, np.int64)]
        # A document that ends with a shard is followed by one that begins in the next.
        number = max(int(np.searchsorted(self._starts, start, side="left")) - 1, 0)
        while number < len(self._shards) and self._starts[number] < stop:
            ends, origin = self._ends(number), int(self._starts[number])
            first, last = np.searchsorted(ends, np.array([max(start - origin, 0), stop - origin], OFFSET_DTYPE))
            found.append(ends[first:last].astype(np.int64) + origin)
            number += 1
        return np.unique(np.concatenate(found))


class TokenStore:
    """A complete token store on disk. Open it with `TokenStore.open`.

    Attributes:
      path: its directory.
      manifest: the manifest as a dictionary.
      name: how messages call it.
    """

    def __init__(self, path: Path, manifest: dict[str, Any]) -> None:
        self.path = path
        self.manifest = manifest
        self.name = str(path)

    @staticmethod
    def open(path: str | Path, verify: bool = False) -> TokenStore:
        """Opens a store and checks it against its manifest: every file's size, and with `verify` every checksum.

        The checksum of an adopted file is also compared where the file's time is not the one at which it was adopted:
        it may have been changed, or copied.

        Raises:
          UserError: no store, an incomplete or unreadable one, or a file that is missing, cut short or changed.
        """
        path = Path(path)
        if not path.is_dir():
            raise UserError("no such token store", where=str(path), mend="make it with `tlm prepare`")
        file = path / MANIFEST
        if not file.is_file():
            raise UserError("the token store is not complete", where=str(path), mend="run `tlm prepare` again")
        try:
            store = TokenStore(path, parse_json(file.read_bytes()))
            version = store.manifest["format_version"]
            if version != FORMAT_VERSION:
                what = f"the store has format {version}, this version reads {FORMAT_VERSION}"
                raise UserError(what, where=str(file), mend=_PREPARE_AGAIN)
            files = [*store.files()]
            for name in SPLITS:
                store.split(name)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise UserError("the manifest cannot be read", where=str(file), mend=_PREPARE_AGAIN) from error
        mend = _ADOPT_AGAIN if "adopted" in store.manifest else _PREPARE_AGAIN
        for shard_file in files:
            shard_file.check(path, verify, mend)
        if verify:
            store.tokenizer()
        return store

    def files(self) -> Iterable[StoredFile]:
        """Returns every shard file, each once."""
        itemsize = TOKEN_DTYPES[self.manifest["dtype"]].itemsize
        found: dict[StoredFile, None] = {}
        for split in self.manifest["splits"].values():
            for shard in split["shards"]:
                size = shard.get("size", shard["tokens"] * itemsize)
                found[StoredFile(tokens_file(shard), size, shard["tokens_sha256"], shard.get("modified"))] = None
                size = shard["documents"] * OFFSET_DTYPE.itemsize
                found[StoredFile(f"{shard['name']}.offsets", size, shard["offsets_sha256"])] = None
        return found

    def tokenizer(self) -> Tokenizer:
        """Returns the tokenizer that made the store.

        Raises:
          UserError: its file is missing, or is not the one the manifest names.
        """
        return self._tokenizer

    @functools.cached_property
    def _tokenizer(self) -> Tokenizer:
        entry = self.manifest["tokenizer"]
        file = self.path / entry["file"]
        if not file.is_file():
            raise UserError("the store's tokenizer is missing", where=str(file), mend=_PREPARE_AGAIN)
        data = file.read_bytes()
        if hashlib.sha256(data).hexdigest() != entry["hash"]:
            raise UserError("not the tokenizer that made this store", where=str(file), mend=_PREPARE_AGAIN)
        return tokenizer_from_bytes(entry["kind"], data, where=str(file))

    def split(self, name: str) -> Split:
        """Returns the split "train" or "validation"; both exist, either may be empty."""
        return self._splits[name]

    @functools.cached_property
    def _splits(self) -> dict[str, Split]:
        dtype = TOKEN_DTYPES[self.manifest["dtype"]]
        return {name: Split(self.path, entry, dtype) for name, entry in self.manifest["splits"].items()}

    @property
    def borders(self) -> Borders:
        """How documents are told apart."""
        return borders_of(self.tokenizer())

    @property
    def fingerprint(self) -> str:
        """The sha256 (hex) of tokenizer, tokens and document borders of both splits, wherever the store lies."""
        identity: list[Any] = [
            FORMAT_VERSION,
            self.manifest["tokenizer"]["hash"],
            {
                name: [(shard["tokens_sha256"], shard["offsets_sha256"]) for shard in split["shards"]]
                for name, split in sorted(self.manifest["splits"].items())
            },
        ]
        if "adopted" in self.manifest:  # where a file that two splits share is cut, the offsets say
            identity.append(self.manifest["adopted"]["separator"])
        return hashlib.sha256(json.dumps(identity).encode()).hexdigest()


class MemorySplit:
    """Documents tokenised in memory, with the interface of `Split`."""

    def __init__(self, texts: Iterable[str], tokenizer: Tokenizer) -> None:
        parts: list[np.ndarray] = []
        ends = [0]
        self.num_bytes = 0
        token_bytes = tokenizer.token_bytes()
        for text in texts:
            ids = document_tokens(text, tokenizer)
            parts.append(ids)
            self.num_bytes += int(token_bytes[ids].sum())
            ends.append(ends[-1] + len(ids))
        self._tokens = np.concatenate(parts) if parts else np.empty(0, np.int32)
        self.documents = np.array(ends, np.int64)
        self.num_documents = len(ends) - 1
        self.num_tokens = len(self._tokens)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Returns tokens [start, stop), int32."""
        return self._tokens[start:stop]

    def document_starts(self, start: int, stop: int) -> np.ndarray:
        """Returns which of the tokens [start, stop) begin a document, int64."""
        starts = self.documents[:-1]
        return starts[(start <= starts) & (starts < stop)]


class MemoryStore:
    """A store of documents held in memory, for evaluation of raw text: every split is all of them."""

    def __init__(self, texts: Iterable[str], tokenizer: Tokenizer, name: str = "documents") -> None:
        self.name = name
        self._tokenizer = tokenizer
        self._split = MemorySplit(texts, tokenizer)

    @staticmethod
    def from_files(paths: Sequence[str], tokenizer: Tokenizer, layout: DocumentFormat | None = None) -> MemoryStore:
        """Reads and tokenises files and directories as `tlm prepare` would, holding nothing out.

        Raises:
          UserError: an input that cannot be read, or the first document that cannot, by file and line.
        """

        def texts() -> Iterator[str]:
            for file in find_inputs(paths):
                for document in read_documents(file, layout or DocumentFormat()):
                    if isinstance(document, Problem):
                        raise document.error()
                    yield document.text

        return MemoryStore(texts(), tokenizer, name=" ".join(paths))

    def tokenizer(self) -> Tokenizer:
        """Returns the tokenizer of the documents."""
        return self._tokenizer

    def split(self, name: str) -> MemorySplit:
        """Returns all documents, whatever the name."""
        return self._split

    @property
    def borders(self) -> Borders:
        """How documents are told apart."""
        return borders_of(self._tokenizer)

    @property
    def fingerprint(self) -> str:
        """The sha256 (hex) of tokenizer and tokens, and of the documents' borders where no token tells them."""
        tokens = self._split.read(0, self._split.num_tokens).tobytes()
        borders = b"" if self._tokenizer.marks_documents else self._split.documents.tobytes()
        return hashlib.sha256(self._tokenizer.hash.encode() + tokens + borders).hexdigest()


class Documents(Protocol):
    """Tokens cut into documents: a split, of whatever store."""

    @property
    def documents(self) -> np.ndarray:
        """int64 [documents + 1]: document d is tokens [documents[d], documents[d + 1])."""

    def read(self, start: int, stop: int) -> np.ndarray:
        """Returns tokens [start, stop)."""


def split_texts(split: Documents, tokenizer: Tokenizer) -> Iterator[str]:
    """Yields the text of each document of a split."""
    for start, stop in itertools.pairwise(split.documents):
        yield tokenizer.decode(split.read(int(start), int(stop)))


def document_tokens(text: str, tokenizer: Tokenizer) -> np.ndarray:
    """Returns a document as a store holds it, int32: begin, text, end.

    Where one id is both begin and end it stands between documents once, as the next one's begin: [begin, text]. Where
    the tokenizer marks no documents: [text].
    """
    ids = tokenizer.encode_array(text)
    if not tokenizer.marks_documents:
        return ids
    end = [] if tokenizer.eos_id == tokenizer.bos_id else [tokenizer.eos_id]
    return np.concatenate([np.array([tokenizer.bos_id], np.int32), ids, np.array(end, np.int32)])


def borders_of(tokenizer: Tokenizer) -> Borders:
    """How documents that `document_tokens` made are told apart."""
    if not tokenizer.marks_documents:
        return Borders(None, start_is_target=False)
    return Borders(tokenizer.bos_id, start_is_target=tokenizer.bos_id == tokenizer.eos_id)


def beyond_vocabulary(place: str, ids: np.ndarray, store: str) -> UserError:
    """The error to tell of ids some of which the tokenizer does not know; `place` is where in the store they are."""
    token = ids.min() if ids.min() < 0 else ids.max()
    what = f"{place} holds token {token}, beyond the tokenizer's vocabulary"
    return UserError(what, where=store, mend="a shard is damaged: prepare the store again")


def tokens_file(shard: dict[str, Any]) -> str:
    """Where a shard's tokens lie, relative to the store; of an adopted store's, what its manifest says."""
    return shard.get("file", f"{shard['name']}.tokens")


def tokenizer_file(tokenizer: Tokenizer) -> str:
    """The name of the tokenizer's file in a store."""
    return "tokenizer.model" if tokenizer.kind == "sentencepiece" else "tokenizer.json"


def tokenizer_entry(tokenizer: Tokenizer) -> dict[str, Any]:
    """What a manifest says of the tokenizer."""
    return {
        "kind": tokenizer.kind,
        "hash": tokenizer.hash,
        "vocab_size": tokenizer.vocab_size,
        "bos_id": tokenizer.bos_id,
        "eos_id": tokenizer.eos_id,
        "pad_id": tokenizer.pad_id,
        "file": tokenizer_file(tokenizer),
    }


def shard_name(split: str, number: int) -> str:
    """The name of a split's shard, without its endings."""
    return f"{split}/{number:05d}"
