"""Token files of other programs, read where they lie.

raw         ids from the first byte to the last (nanoGPT's `train.bin` and `val.bin`: uint16)
llm.c       1,024 bytes of header, 256 little-endian int32: magic, version, number of ids; then the ids. Magic 20240520,
            version 1: uint16 (also modded-nanogpt); magic 20240801, version 7: uint32
megatron    `.bin`: ids from the first byte to the last; `.idx`, little-endian: "MMIDIDX" and two zeros, version 1
            (uint64), code of the dtype (uint8), number of sequences S and of document borders D + 1 (uint64 each),
            then S lengths in ids (int32), S places in bytes (int64), and D + 1 sequence numbers (int64), between which
            the documents lie. Where sequences have modes (images beside text), S more bytes

Formats as in public documentation: github.com/karpathy/llm.c, dev/data; github.com/NVIDIA/Megatron-LM,
megatron/core/datasets.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tlm_jax.data.store import TOKEN_DTYPES
from tlm_jax.errors import UserError

LAYOUTS = ("auto", "raw", "llm.c", "megatron")
_HEADER_BYTES = 1024
_HEADERS = {20240520: (1, "uint16"), 20240801: (7, "uint32")}  # magic: version, dtype
_MAGIC = b"MMIDIDX\0\0"
_INDEX_HEADER = struct.Struct("<QBQQ")
_DTYPE_CODES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float64", 7: "float32", 8: "uint16"}


@dataclass(frozen=True)
class ForeignFile:
    """One file of ids.

    Attributes:
      path: the file.
      layout: "raw", "llm.c" or "megatron".
      dtype: a key of `TOKEN_DTYPES`.
      offset: bytes before the first id.
      size: bytes of the file.
      modified: when it was last changed, in ns, as it was before anything was read.
      document_ends: int64 [documents], where each document ends, in ids; None: the file does not say.
    """

    path: Path
    layout: str
    dtype: str
    offset: int
    size: int
    modified: int
    document_ends: np.ndarray | None = None

    @property
    def num_tokens(self) -> int:
        """How many ids it holds."""
        return (self.size - self.offset) // TOKEN_DTYPES[self.dtype].itemsize

    def tokens(self) -> np.ndarray:
        """The ids, mapped."""
        return np.memmap(self.path, TOKEN_DTYPES[self.dtype], "r", self.offset, self.num_tokens).view(np.ndarray)


def open_foreign(path: str, layout: str = "auto", raw_dtype: str = "uint16") -> ForeignFile:
    """Reads what a file says of itself.

    Args:
      path: a `.bin` file; of a Megatron pair also the `.idx` file, or the name without ending.
      layout: one of `LAYOUTS`; "auto": megatron if there is an `.idx` file beside, llm.c if it begins with its magic.
      raw_dtype: of the ids of a raw file.

    Raises:
      UserError: no such file, or it is not what it should be.
    """
    tokens_path, index_path = _pair(path)
    if layout == "megatron" or (layout == "auto" and _begins_with(index_path, _MAGIC)):
        return _open_megatron(tokens_path, index_path)
    if not tokens_path.is_file():
        raise UserError("no such file", where=path)
    status = tokens_path.stat()
    size, modified = status.st_size, status.st_mtime_ns
    with tokens_path.open("rb") as file:
        header = np.frombuffer(file.read(12), "<i4") if size >= _HEADER_BYTES else np.zeros(3, "<i4")
    if layout == "llm.c" or (layout == "auto" and int(header[0]) in _HEADERS):
        version, dtype = _HEADERS.get(int(header[0]), (0, "uint16"))
        if header[1] != version:
            known = ", ".join(f"{magic} with {version}" for magic, (version, _) in _HEADERS.items())
            what = f"the header has magic {header[0]} and version {header[1]}"
            raise UserError(what, where=path, mend=f"known are {known}")
        expected = _HEADER_BYTES + int(header[2]) * TOKEN_DTYPES[dtype].itemsize
        if size != expected:
            raise UserError(f"the file has {size} bytes, its header makes it {expected}", where=path)
        found = ForeignFile(tokens_path, "llm.c", dtype, _HEADER_BYTES, size, modified)
    else:
        if size % TOKEN_DTYPES[raw_dtype].itemsize:
            raise UserError(f"{size} bytes are no whole number of {raw_dtype} ids", where=path, mend="is it cut short?")
        found = ForeignFile(tokens_path, "raw", raw_dtype, 0, size, modified)
    if not found.num_tokens:
        raise UserError("holds no token", where=path)
    return found


def _pair(path: str) -> tuple[Path, Path]:
    """The `.bin` and the `.idx` file that a name stands for."""
    given = Path(path)
    stem = path[:-4] if given.suffix in (".bin", ".idx") else path
    if given.is_file() and given.suffix != ".idx":
        return given, Path(f"{stem}.idx")
    return Path(f"{stem}.bin"), Path(f"{stem}.idx")


def _begins_with(path: Path, magic: bytes) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(magic)) == magic


def _open_megatron(path: Path, index: Path) -> ForeignFile:
    for file in (index, path):
        if not file.is_file():
            raise UserError("no such file", where=str(file), mend="a Megatron store is a .bin and an .idx file")
    dtype, lengths, places, borders = _read_index(index)
    itemsize = TOKEN_DTYPES[dtype].itemsize
    ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    if (lengths < 0).any() or not np.array_equal(places, ends[:-1] * itemsize):
        raise UserError("the sequences do not lie one after the other", where=str(index), mend="write the pair anew")
    if borders[0] or borders[-1] != len(lengths) or (np.diff(borders) < 0).any():
        raise UserError("the document borders do not span the sequences", where=str(index), mend="write the pair anew")
    status = path.stat()
    size = status.st_size
    if size != ends[-1] * itemsize:
        raise UserError(f"the file has {size} bytes, its index makes it {ends[-1] * itemsize}", where=str(path))
    if not size:
        raise UserError("holds no token", where=str(path))
    return ForeignFile(path, "megatron", dtype, 0, size, status.st_mtime_ns, ends[borders[1:]])


def _read_index(index: Path) -> tuple[str, np.ndarray, np.ndarray, np.ndarray]:
    """Dtype, lengths, places and document borders."""
    data = np.memmap(index, np.uint8, "r") if index.stat().st_size else np.empty(0, np.uint8)
    start = len(_MAGIC) + _INDEX_HEADER.size
    if data[: len(_MAGIC)].tobytes() != _MAGIC or len(data) < start:
        raise UserError("not a Megatron index", where=str(index))
    version, code, sequences, borders = _INDEX_HEADER.unpack(data[len(_MAGIC) : start].tobytes())
    if version != 1:
        raise UserError(f"the index has version {version}, known is 1", where=str(index))
    dtype = _DTYPE_CODES.get(code, f"code {code}")
    if dtype not in TOKEN_DTYPES:
        what = f"ids of type {dtype} are not read"
        raise UserError(what, where=str(index), mend="write the pair as uint16 or int32")
    expected = start + 12 * sequences + 8 * borders
    if sequences and len(data) == expected + sequences:
        raise UserError("the sequences have modes: not only text", where=str(index))
    if len(data) != expected or borders < 1:
        raise UserError(f"the index has {len(data)} bytes, its header makes it {expected}", where=str(index))
    found = []
    for count, kind in ((sequences, "<i4"), (sequences, "<i8"), (borders, "<i8")):
        stop = start + count * np.dtype(kind).itemsize
        found.append(np.frombuffer(data[start:stop].tobytes(), kind))
        start = stop
    return dtype, found[0], found[1], found[2]
