from __future__ import annotations

import gzip
import io
import json
import pickle
from pathlib import Path

import pytest
import sentencepiece
from hypothesis import example, given, settings
from hypothesis import strategies as st
from small_texts import make_texts, write_jsonl

from tlm_jax import cli
from tlm_jax.data.pieces import parts
from tlm_jax.data.sentencepiece_tokenizer import SentencePieceTokenizer
from tlm_jax.data.sentencepiece_training import train_sentencepiece
from tlm_jax.data.tokenizer import (
    ByteTokenizer,
    Tokenizer,
    load_tokenizer,
    tokenizer_from_bytes,
)
from tlm_jax.errors import UserError

_TRICKY = [
    " ",
    "  ",
    "\n",
    "\r\n",
    "\t",
    "\x00",
    "\u2581",
    "\u2585",
    "<s>",
    "</s>",
    "<unk>",
    "<pad>",
    "<0x41>",
    "\u00e9",
]
_TRICKY += [
    "e\u0301",
    "\ufb01",
    "\u2460",
    "\U0001f9ea",
    "\u200b",
    "\ufeff",
    "\U0010ffff",
    "the",
    " whale",
    "1851",
    "the old ship",
]
any_text = st.lists(st.sampled_from(_TRICKY) | st.text(max_size=5), max_size=12).map("".join)


@pytest.fixture(scope="module", params=["byte", "sentencepiece"])
def tokenizer(request: pytest.FixtureRequest, sentencepiece_tokenizer: SentencePieceTokenizer) -> Tokenizer:
    return ByteTokenizer() if request.param == "byte" else sentencepiece_tokenizer


@settings(max_examples=300, deadline=None)
@given(text=any_text)
@example(text="\u2581 \u2581\u2581a \u2581")
@example(text=" leading and trailing ")
def test_decode_inverts_encode_and_every_byte_is_counted(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.token_bytes()[ids].sum() == len(text.encode())
    assert not {tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id} & set(ids)
    assert all(0 <= i < tokenizer.vocab_size for i in ids)


def test_specials_are_three_ids_that_stand_for_no_text(tokenizer: Tokenizer) -> None:
    specials = [tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id]
    assert len(set(specials)) == 3
    assert tokenizer.token_bytes()[specials].tolist() == [0, 0, 0]
    assert tokenizer.decode([tokenizer.bos_id, *tokenizer.encode("a b"), tokenizer.eos_id, tokenizer.pad_id]) == "a b"


def test_a_lone_surrogate_is_refused_not_replaced(tokenizer: Tokenizer) -> None:
    with pytest.raises(UnicodeEncodeError):
        tokenizer.encode("a\ud800b")


def test_rebuilt_from_bytes_or_pickle_it_is_the_same(tokenizer: Tokenizer) -> None:
    for again in (tokenizer_from_bytes(tokenizer.kind, tokenizer.to_bytes()), pickle.loads(pickle.dumps(tokenizer))):
        assert again.hash == tokenizer.hash
        assert again.encode("the white whale\n") == tokenizer.encode("the white whale\n")
    with pytest.raises(UserError, match="unknown tokenizer kind"):
        tokenizer_from_bytes("words", b"")


def test_pieces_are_learnt_and_keep_to_words(sentencepiece_tokenizer: SentencePieceTokenizer) -> None:
    assert len(sentencepiece_tokenizer.encode(" captain")) == 1
    pieces = [sentencepiece_tokenizer.id_bytes(i).decode("utf-8", "replace") for i in range(260, 400)]
    assert all(" " not in piece.lstrip(" ") for piece in pieces)
    assert not any(len(piece) > 1 and any(c.isdigit() for c in piece) for piece in pieces)


def test_a_long_text_is_cut_where_it_changes_nothing(
    sentencepiece_tokenizer: SentencePieceTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "".join(make_texts(30, seed=5))
    whole = sentencepiece_tokenizer.encode(text)
    monkeypatch.setattr(SentencePieceTokenizer, "_part_characters", 16)
    assert len(list(parts(text, 16))) > 50
    assert sentencepiece_tokenizer.encode(text) == whole


def test_training_is_deterministic_and_reads_text_jsonl_and_gzip_alike(tmp_path: Path, texts: list[str]) -> None:
    write_jsonl(tmp_path / "a.jsonl", texts[:200])
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress((tmp_path / "a.jsonl").read_bytes()))
    (tmp_path / "docs").mkdir()
    for i, text in enumerate(texts[:200]):
        (tmp_path / "docs" / f"{i:03d}.txt").write_text(text)
    hashes = {
        train_sentencepiece([str(tmp_path / n)], tmp_path / "m.model", 300).hash
        for n in ("a.jsonl", "a.jsonl.gz", "docs")
    }
    assert len(hashes) == 1
    assert load_tokenizer(str(tmp_path / "m.model")).hash in hashes


def test_text_of_special_names_and_reserved_characters_trains(tmp_path: Path) -> None:
    text = "</s> <s> <unk> <0x41> \u2581word\u2585 word\x00\t word\u2581" * 500
    (tmp_path / "a.txt").write_text(text)
    tokenizer = train_sentencepiece([str(tmp_path / "a.txt")], tmp_path / "m.model", 272)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode(" word")) == 1  # seen although its sentences hold reserved characters


def test_a_sample_of_large_inputs_is_used(tmp_path: Path, texts: list[str]) -> None:
    path = str(write_jsonl(tmp_path / "a.jsonl", texts))
    full, part, again = (
        train_sentencepiece([path], tmp_path / "m.model", 300, sample_bytes=size) for size in (1 << 30, 20_000, 20_000)
    )
    assert full.hash != part.hash == again.hash


def _foreign_model(**settings: object) -> bytes:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(make_texts(200)), model_writer=model, minloglevel=2, model_type="bpe", **settings
    )
    return model.getvalue()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"vocab_size": 100}, "no byte fallback"),
        ({"vocab_size": 330, "byte_fallback": True}, "does not give back"),
        ({"vocab_size": 330, "byte_fallback": True, "normalization_rule_name": "identity"}, "does not give back"),
    ],
)
def test_a_model_that_loses_text_is_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        SentencePieceTokenizer(_foreign_model(**settings))


def test_loading_what_is_no_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "x.model").write_bytes(b"not a model")
    with pytest.raises(UserError, match=r"x\.model: not a SentencePiece model"):
        load_tokenizer(str(tmp_path / "x.model"))
    with pytest.raises(UserError, match="no such tokenizer"):
        load_tokenizer(str(tmp_path / "absent.model"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--input", "absent.txt"], "absent.txt: no such file"),
        (["--input", "a.jsonl", "--vocab-size=90000"], "the largest that works is"),
        (["--input", "a.jsonl", "--vocab-size=100"], "the smallest that works is"),
        (["--input", "bad.jsonl"], "bad.jsonl:2: missing field: 'text'"),
        (["--input", "a.jsonl", "--vocab-size=-5"], "--vocab-size: must be at least 1, not -5"),
        (["--input", "a.jsonl", "--output=."], ".: is a directory; give the name of a file"),
        (["--input", "empty.txt"], "empty.txt:1: empty file"),
        (["--input", "empty.txt", "--on-error=skip"], "hold no document"),
        (["--input", "a.jsonl", "--sample-megabytes=0"], "--sample-megabytes: must be at least 1"),
        (["--input", "a.jsonl", "--config.seed=1"], "unknown argument"),
        (["--input", "a.jsonl", "--output=a.jsonl/m.model"], "a.jsonl"),
    ],
)
def test_command_errors_are_one_line(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    texts: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "a.jsonl", texts)
    (tmp_path / "bad.jsonl").write_text(json.dumps({"text": "x"}) + "\n{}\n")
    (tmp_path / "empty.txt").touch()
    command = ["tokenizer", "--vocab-size=300", "--output=m.model", *arguments]
    assert cli.main(command) == 2
    error = capfd.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "m.model").exists()


def test_command_trains(tmp_path: Path, texts: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    path = write_jsonl(tmp_path / "a b.jsonl", texts)
    assert cli.main(["tokenizer", "--input", str(path), "--vocab-size=300", f"--output={tmp_path / 'm.model'}"]) == 0
    assert f"tlm prepare '{path}' --tokenizer={tmp_path / 'm.model'}" in capsys.readouterr().out
    assert load_tokenizer(str(tmp_path / "m.model")).vocab_size == 300
