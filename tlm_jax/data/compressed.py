"""Compressed inputs as streams of the bytes inside. What is damaged or cut short is always told, never passed over."""

from __future__ import annotations

import gzip
import io
import zlib
from typing import IO, Literal, cast

from tlm_jax.data.extras import optional_library

Compression = Literal["", "gzip", "zst"]
ENDINGS: dict[str, Compression] = {".gz": "gzip", ".zst": "zst"}
# A frame may ask for this much memory to look back into: `zstd --long=31`, as some large corpora are packed.
_MAX_WINDOW_BYTES = 1 << 31
# Compressed bytes taken at a time: little, since they may stand for thousands of times as much.
_CHUNK_BYTES = 1 << 15


class DamagedZst(Exception):
    """The file is no Zstandard data, or is damaged or cut short."""


DAMAGE = (EOFError, gzip.BadGzipFile, zlib.error, DamagedZst)


def compression_of(name: str) -> tuple[str, Compression]:
    """Returns a file name without the ending that says how it is compressed, and the compression."""
    for ending, compression in ENDINGS.items():
        if name.endswith(ending):
            return name.removesuffix(ending), compression
    return name, ""


def require_compression(path: str, compression: Compression) -> None:
    """Checks that what a file needs is installed.

    Raises:
      UserError: a library is missing.
    """
    if compression == "zst":
        optional_library("zstandard", path)


def open_input(path: str, compression: Compression) -> IO[bytes]:
    """Opens a file for reading what is inside; reading raises one of `DAMAGE` where that is not whole."""
    if compression == "gzip":
        return cast(IO[bytes], gzip.open(path, "rb"))
    if compression == "zst":
        return cast(IO[bytes], io.BufferedReader(_ZstFrames(path), 1 << 17))
    return open(path, "rb")


class _ZstFrames(io.RawIOBase):
    """The contents of one or more Zstandard frames; the library's own reader takes a cut file for a whole one."""

    def __init__(self, path: str) -> None:
        self._zstandard = optional_library("zstandard", path)
        self._file = open(path, "rb")  # noqa: SIM115 (closed by close)
        self._decompressor = self._zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES)
        self._frame = self._decompressor.decompressobj()
        self._frame_begun = False
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:  # type: ignore[no-untyped-def]
        target = memoryview(buffer)
        while not self._ready:
            left = self._frame.unused_data if self._frame.eof else b""
            if self._frame.eof:
                self._frame, self._frame_begun = self._decompressor.decompressobj(), False
            data = left or self._file.read(_CHUNK_BYTES)
            if not data:
                if self._frame_begun:
                    raise DamagedZst("the file ends within a frame")
                return 0
            self._frame_begun = True
            try:
                self._ready = memoryview(self._frame.decompress(data))
            except self._zstandard.ZstdError as error:
                raise DamagedZst(str(error)) from error
        count = min(len(target), len(self._ready))
        target[:count], self._ready = self._ready[:count], self._ready[count:]
        return count

    def close(self) -> None:
        self._file.close()
        super().close()
