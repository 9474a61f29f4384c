import sys
from pathlib import Path

import pytest

from tlm_jax.data.documents import DocumentFormat
from tlm_jax.data.prepare import Settings, prepare
from tlm_jax.data.tokenizer import ByteTokenizer

# What this file and stub_tlm.py hold is shared by the tests of this room only.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def make_store(tmp_path_factory):
    """Makes a token store of 200 lines of numbers, which begin at the one given."""

    def make(first=0):
        directory = tmp_path_factory.mktemp("stores")
        lines = [" ".join(str(n * n % 97) for n in range(i, i + 3 + i % 20)) for i in range(first, first + 200)]
        (directory / "text.txt").write_text("\n".join(lines))
        settings = Settings(DocumentFormat(split_text="line"), holdout=0.1)
        prepare([str(directory / "text.txt")], ByteTokenizer(), directory / "store", settings, workers=1)
        return directory / "store"

    return make


@pytest.fixture(scope="session")
def store(make_store):
    return make_store()
