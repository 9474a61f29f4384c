"""Result files."""

from __future__ import annotations

import os
from pathlib import Path

from tlm_jax.errors import UserError


def write_whole(path: str, text: str) -> None:
    """Writes a file under another name first, so that it is never seen in part.

    Raises:
      UserError: it cannot be written.
    """
    draft = Path(f"{path}.tmp")
    try:
        draft.write_text(text, encoding="utf-8")
        os.replace(draft, path)
    except OSError as error:
        raise UserError(f"cannot be written: {error.strerror}", where=path) from error
