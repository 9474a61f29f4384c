"""Worker: makes a token store of text files, from the files on disk to the finished store, once a step."""

from __future__ import annotations

import tempfile

from serving import Session

from tlm_jax.data.prepare import prepare
from tlm_jax.data.tokenizer import load_tokenizer


def main() -> None:
    session = Session()
    wanted = session.settings
    tokenizer = load_tokenizer(wanted["tokenizer"])
    for _ in session.steps(lambda: None):
        with tempfile.TemporaryDirectory(prefix="prepare") as directory:
            prepare(wanted["files"], tokenizer, f"{directory}/store", workers=wanted["workers"])


if __name__ == "__main__":
    main()
