"""A token store of made-up English, by the byte tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest
from whole_run import write_documents

from tlm_jax.data.documents import DocumentFormat
from tlm_jax.data.prepare import Settings, prepare
from tlm_jax.data.tokenizer import ByteTokenizer


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("train")
    inputs = write_documents(directory / "text.txt", 300)
    settings = Settings(DocumentFormat(split_text="line"), holdout=0.1)
    prepare([str(inputs)], ByteTokenizer(), directory / "store", settings, workers=1)
    return directory / "store"
