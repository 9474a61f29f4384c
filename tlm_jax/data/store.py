"""The token store: documents tokenised once, in memory-mapped shards, described and sealed by a manifest.

    STORE/manifest.json              written last; without it the store is not complete
    STORE/tokenizer.model | .json    what `tokenizer_from_bytes` needs
    STORE/<split>/00000.tokens       little-endian ids: begin, text, end of each document in turn
    STORE/<split>/00000.offsets      little-endian uint64: where each document of the shard ends, in tokens

A shard holds whole documents. Splits are "train" and "validation".
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tlm_jax.data.documents import DocumentFormat, Problem, find_inputs, read_documents
from tlm_jax.data.tokenizer import Tokenizer, tokenizer_from_bytes
from tlm_jax.errors import UserError

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
SPLITS = ("train", "validation")
OFFSET_DTYPE = np.dtype("<u8")
TOKEN_DTYPES: dict[str, np.dtype] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
_PREPARE_AGAIN = "run `tlm prepare` again with another --output"


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

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_maps": {}}  # loader processes map the shards themselves

    def _shard(self, number: int) -> np.ndarray:
        if number not in self._maps:
            path = self._directory / f"{self._shards[number]['name']}.tokens"
            # A view without np.memmap's subclass, whose slices cost a microsecond more each.
            self._maps[number] = np.memmap(path, self._dtype, mode="r").view(np.ndarray)
        return self._maps[number]

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
        ends = [
            np.fromfile(self._directory / f"{shard['name']}.offsets", OFFSET_DTYPE).astype(np.int64) + start
            for shard, start in zip(self._shards, self._starts, strict=False)
        ]
        return np.concatenate([np.zeros(1, np.int64), *ends])


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
            store = TokenStore(path, json.loads(file.read_bytes()))
            version = store.manifest["format_version"]
            if version != FORMAT_VERSION:
                what = f"the store has format {version}, this version reads {FORMAT_VERSION}"
                raise UserError(what, where=str(file), mend=_PREPARE_AGAIN)
            files = [*store.files()]
            for name in SPLITS:
                store.split(name)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise UserError("the manifest cannot be read", where=str(file), mend=_PREPARE_AGAIN) from error
        for shard_file, size, checksum in files:
            _check_file(path / shard_file, size, checksum if verify else None)
        if verify:
            store.tokenizer()
        return store

    def files(self) -> Iterable[tuple[str, int, str]]:
        """Yields (name, size in bytes, sha256) of every shard file."""
        itemsize = TOKEN_DTYPES[self.manifest["dtype"]].itemsize
        for split in self.manifest["splits"].values():
            for shard in split["shards"]:
                yield f"{shard['name']}.tokens", shard["tokens"] * itemsize, shard["tokens_sha256"]
                yield f"{shard['name']}.offsets", shard["documents"] * OFFSET_DTYPE.itemsize, shard["offsets_sha256"]

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
    def fingerprint(self) -> str:
        """The sha256 (hex) of tokenizer, tokens and document borders of both splits, wherever the store lies."""
        identity = [
            FORMAT_VERSION,
            self.manifest["tokenizer"]["hash"],
            {
                name: [(shard["tokens_sha256"], shard["offsets_sha256"]) for shard in split["shards"]]
                for name, split in sorted(self.manifest["splits"].items())
            },
        ]
        return hashlib.sha256(json.dumps(identity).encode()).hexdigest()


def _check_file(path: Path, size: int, checksum: str | None) -> None:
    mend = _PREPARE_AGAIN
    if not path.is_file():
        raise UserError("the shard is missing", where=str(path), mend=mend)
    actual = path.stat().st_size
    if actual != size:
        raise UserError(f"the shard has {actual} bytes, the manifest says {size}", where=str(path), mend=mend)
    if checksum is not None:
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != checksum:
                raise UserError("the shard's checksum is not the manifest's", where=str(path), mend=mend)


class MemorySplit:
    """Documents tokenised in memory, with the interface of `Split`."""

    def __init__(self, texts: Iterable[str], tokenizer: Tokenizer) -> None:
        parts: list[np.ndarray] = []
        ends = [0]
        self.num_bytes = 0
        for text in texts:
            ids = document_tokens(text, tokenizer)
            parts.append(ids)
            ends.append(ends[-1] + len(ids))
            self.num_bytes += len(text.encode())
        self._tokens = np.concatenate(parts) if parts else np.empty(0, np.int32)
        self.documents = np.array(ends, np.int64)
        self.num_documents = len(ends) - 1
        self.num_tokens = len(self._tokens)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Returns tokens [start, stop), int32."""
        return self._tokens[start:stop]


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
    def fingerprint(self) -> str:
        """The sha256 (hex) of tokenizer and tokens."""
        tokens = self._split.read(0, self._split.num_tokens)
        return hashlib.sha256(self._tokenizer.hash.encode() + tokens.tobytes()).hexdigest()


def split_texts(split: Split | MemorySplit, tokenizer: Tokenizer) -> Iterator[str]:
    """Yields the text of each document of a split."""
    for start, stop in itertools.pairwise(split.documents):
        yield tokenizer.decode(split.read(int(start), int(stop)))


def document_tokens(text: str, tokenizer: Tokenizer) -> np.ndarray:
    """Returns a document as a store holds it: begin, text, end; int32 [num_tokens + 2]."""
    ids = tokenizer.encode_array(text)
    return np.concatenate([[tokenizer.bos_id], ids, [tokenizer.eos_id]], dtype=np.int32)


def tokenizer_file(tokenizer: Tokenizer) -> str:
    """The name of the tokenizer's file in a store."""
    return "tokenizer.model" if tokenizer.kind == "sentencepiece" else "tokenizer.json"


def shard_name(split: str, number: int) -> str:
    """The name of a split's shard, without its endings."""
    return f"{split}/{number:05d}"
