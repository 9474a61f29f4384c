"""Small inputs that several test files share."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_texts import make_texts, write_jsonl

from tlm_jax.data.prepare import Settings, prepare
from tlm_jax.data.sentencepiece_tokenizer import SentencePieceTokenizer
from tlm_jax.data.sentencepiece_training import train_sentencepiece
from tlm_jax.data.store import TokenStore
from tlm_jax.data.tokenizer import ByteTokenizer


@pytest.fixture(scope="session")
def texts() -> list[str]:
    return make_texts(400)


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> TokenStore:
    """A byte store of several shards, a fifth of its documents held out."""
    directory = tmp_path_factory.mktemp("store")
    inputs = [str(write_jsonl(directory / f"{i}.jsonl", texts[i * 100 : i * 100 + 100])) for i in range(4)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tlm_jax.data.units._MIN_UNIT_BYTES", 4096)
        return prepare(inputs, ByteTokenizer(), directory / "store", Settings(holdout=0.2), workers=1)


@pytest.fixture(scope="session")
def sentencepiece_model(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> Path:
    directory = tmp_path_factory.mktemp("tokenizer")
    write_jsonl(directory / "train.jsonl", texts)
    train_sentencepiece([str(directory / "train.jsonl")], directory / "t.model", 400)
    return directory / "t.model"


@pytest.fixture(scope="session")
def sentencepiece_tokenizer(sentencepiece_model: Path) -> SentencePieceTokenizer:
    return SentencePieceTokenizer(sentencepiece_model.read_bytes())
