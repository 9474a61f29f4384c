"""A token store of made-up English, by the byte tokenizer."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tlm_jax.data.documents import DocumentFormat
from tlm_jax.data.prepare import Settings, prepare
from tlm_jax.data.tokenizer import ByteTokenizer

WORDS = "the a whale sea ship captain said to and of in was it his old white great deep naïve, end. Oh! café"


def write_documents(path: Path, count: int, seed: int = 0) -> Path:
    """Lines of 1 to 30 words, each to be a document of its own."""
    chance = random.Random(seed)
    path.write_text(
        "".join(" ".join(chance.choices(WORDS.split(), k=chance.randint(1, 30))) + "\n" for _ in range(count))
    )
    return path


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("train")
    inputs = write_documents(directory / "text.txt", 300)
    settings = Settings(DocumentFormat(split_text="line"), holdout=0.1)
    prepare([str(inputs)], ByteTokenizer(), directory / "store", settings, workers=1)
    return directory / "store"
