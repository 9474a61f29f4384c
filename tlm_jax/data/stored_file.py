"""What a store's manifest says of its files, and whether they are still so."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from tlm_jax.errors import UserError
from tlm_jax.progress import ProgressBar

_READ_BYTES = 1 << 20


@dataclass(frozen=True)
class StoredFile:
    """A file as a manifest describes it.

    Attributes:
      name: its path, relative to the store or absolute.
      size: bytes.
      checksum: sha256, hex.
      modified: of an adopted file, when it was last changed, in ns; None: the store's own, which nothing changes.
    """

    name: str
    size: int
    checksum: str
    modified: int | None = None

    def check(self, store: Path, verify: bool, mend: str) -> None:
        """Compares the file's size; with `verify`, and where its time is another than that, also its checksum.

        Raises:
          UserError: the file is missing, or is not what the manifest says; with `mend`.
        """
        path = store / self.name
        if not path.is_file():
            raise UserError("the shard is missing", where=str(path), mend=mend)
        status = path.stat()
        if status.st_size != self.size:
            what = f"the shard has {status.st_size} bytes, the manifest says {self.size}"
            raise UserError(what, where=str(path), mend=mend)
        if (verify or self.modified not in (None, status.st_mtime_ns)) and _checksum(path, self.size) != self.checksum:
            raise UserError("the shard's checksum is not the manifest's", where=str(path), mend=mend)


def _checksum(path: Path, size: int) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file, ProgressBar(f"verifying {path.name}", size, unit="bytes") as progress:
        while block := file.read(_READ_BYTES):
            digest.update(block)
            progress.advance(len(block))
    return digest.hexdigest()
