"""Token files as other programs write them, from their published formats and nothing of ours."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

SEPARATOR = 257
Documents = list[list[int]]


def make_documents(count: int, seed: int = 0, longest: int = 40) -> Documents:
    """Documents of 1 to `longest` ids below 256."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, rng.integers(1, longest + 1)).tolist() for _ in range(count)]


def separated(documents: Documents, *, first: bool) -> list[int]:
    """The ids of documents with the separator before each (llm.c) or after each (nanoGPT)."""
    between = [SEPARATOR]
    return [i for ids in documents for i in (between + ids if first else ids + between)]


def write_raw(path: Path, ids: list[int], dtype: str = "<u2") -> Path:
    np.array(ids, dtype).tofile(path)
    return path


def write_llm_c(path: Path, ids: list[int], magic: int = 20240520, version: int = 1, dtype: str = "<u2") -> Path:
    header = struct.pack("<256i", magic, version, len(ids), *[0] * 253)
    path.write_bytes(header + np.array(ids, dtype).tobytes())
    return path


def write_megatron(path: Path, documents: Documents, *, sequences: int = 1, code: int = 8, modes: bool = False) -> Path:
    """A pair `path`.bin and `path`.idx, each document in up to `sequences` sequences; returns the `.idx`."""
    dtype = {4: "<i4", 8: "<u2"}[code]
    pieces, borders = [], [0]
    for ids in documents:
        size = -(-len(ids) // sequences) or 1
        pieces += [ids[at : at + size] for at in range(0, max(len(ids), 1), size)]
        borders.append(len(pieces))
    lengths = [len(piece) for piece in pieces]
    places = (np.cumsum([0, *lengths])[:-1] * np.dtype(dtype).itemsize).tolist()
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(pieces), len(borders))
    index += struct.pack(f"<{len(pieces)}i", *lengths) + struct.pack(f"<{len(pieces)}q", *places)
    index += struct.pack(f"<{len(borders)}q", *borders)
    path.with_suffix(".idx").write_bytes(index + bytes(len(pieces) if modes else 0))
    path.with_suffix(".bin").write_bytes(b"".join(np.array(piece, dtype).tobytes() for piece in pieces))
    return path.with_suffix(".idx")
