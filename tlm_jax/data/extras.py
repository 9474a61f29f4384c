"""Libraries that only some inputs need, imported when such an input is met."""

from __future__ import annotations

import importlib
from typing import Any

from tlm_jax.errors import UserError


def optional_library(name: str, where: str) -> Any:
    """Imports a library of the extra `formats`.

    Args:
      name: the module, dotted.
      where: the input that needs it, for the message.

    Raises:
      UserError: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        what = f"reading this needs the library {name.partition('.')[0]}"
        raise UserError(what, where=where, mend='install it with: pip install "tlm_jax[formats]"') from error
