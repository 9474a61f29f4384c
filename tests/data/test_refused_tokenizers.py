"""Tokenizers that would lose text, and choices that cannot be honoured: each refused with a line that says why."""

from __future__ import annotations

import base64
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from foreign_tokenizers import byte_level, prepended, save, sentencepiece_model, write_ranks
from small_texts import make_texts

from tlm_jax.data.sentencepiece_tokenizer import SentencePieceTokenizer
from tlm_jax.data.tokenizer import MOST_IDS, load_tokenizer
from tlm_jax.errors import UserError

tokenizers = pytest.importorskip("tokenizers")
tiktoken = pytest.importorskip("tiktoken")


def _changed(tokenizer: Any, change: Any) -> Any:
    spec = json.loads(tokenizer.to_str())
    change(spec)
    return spec


def _word_level() -> Any:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return tokenizer


def _few_bytes() -> Any:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.train_from_iterator(make_texts(50), tokenizers.trainers.BpeTrainer(vocab_size=200, show_progress=False))
    return tokenizer


def _tiktoken(**changes: int) -> dict[str, Any]:
    """A definition of kind "tiktoken" whose pieces are the bytes."""
    ranks = "\n".join(f"{base64.b64encode(bytes([byte])).decode()} {byte}" for byte in range(256))
    pattern = r"[\s\S]+"
    return {"kind": "tiktoken", "pattern": pattern, "eos_id": None, "vocab_size": None, "ranks": ranks, **changes}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (_word_level, "neither byte-level nor has it byte fallback"),
        (_few_bytes, "does not give back"),
        (lambda: byte_level(normalizer="Lowercase"), r"does not give back .A\u0130"),
        (lambda: byte_level(normalizer="Strip"), "does not give back"),
        (lambda: byte_level(normalizer="StripAccents"), "does not give back"),
        (lambda: _changed(byte_level(), lambda spec: spec["model"].update(dropout=0.1)), "at random"),
        (lambda: _changed(byte_level(), lambda spec: spec.pop("model")), "not a tokenizer of this library"),
        (lambda: _changed(prepended(), lambda spec: spec["model"]["vocab"].pop("<0x41>")), "<0x41>"),
        (
            lambda: _changed(byte_level(), lambda spec: spec["model"]["vocab"].update({"unheard of": MOST_IDS})),
            f"an id is {MOST_IDS}; there are at most {MOST_IDS}",
        ),
        (lambda: {"kind": "huggingface"}, "not a tokenizer that this version wrote"),
        (
            lambda: {"kind": "huggingface", "bos_token": 1, "eos_token": "", "pad_token": "", "tokenizer.json": ""},
            "not a tokenizer that this version wrote",
        ),
        (
            lambda: {"kind": "tiktoken", "pattern": "a", "eos_id": None, "vocab_size": None, "ranks": 5},
            "not a tokenizer that this version wrote",
        ),
        (lambda: _tiktoken(vocab_size=10**12), f"vocab_size {10**12} is not from 256, by the ranks, to {MOST_IDS}"),
        (lambda: _tiktoken(vocab_size=0), "vocab_size 0 is not from 256"),
        (lambda: _tiktoken(eos_id=256), "eos_id 256 is no id of 256"),
        (lambda: _tiktoken(eos_id=-1), "eos_id -1 is no id of 256"),
        (lambda: {"kind": "ids", "num_ids": 10**12, "separator": 1}, "defines no tokenizer of kind 'ids'"),
        (lambda: {"kind": "words"}, "unknown tokenizer kind 'words'"),
        (lambda: ["a"], "not a JSON object"),
        (lambda: {"added_tokens": [{}]}, "not a tokenizer of this library"),
        (lambda: {"added_tokens": [{"special": True, "content": [1]}]}, "not a tokenizer of this library"),
        (lambda: {"added_tokens": [1]}, "`added_tokens` is not a list of objects"),
        (lambda: {"added_tokens": 5, "model": {}}, "`added_tokens` is not a list of objects"),
        (lambda: "[" * 100_000, "malformed JSON: nested too deeply"),
    ],
)
def test_a_tokenizer_json_that_would_lose_text_is_refused(make: Any, message: str, tmp_path: Path) -> None:
    made = make()
    path = tmp_path / "tokenizer.json"
    text = made if isinstance(made, str) else json.dumps(made) if isinstance(made, (dict, list)) else made.to_str()
    path.write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        load_tokenizer(str(path))
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "pattern", "message"),
    [
        (lambda lines: lines[:200], "gpt2", "the ranks lack the byte 0x"),
        (lambda lines: [*lines, b"YWFh"], "gpt2", r"own.tiktoken:339: not a base64 piece and its rank"),
        (lambda lines: [*lines, b"YWFh x"], "gpt2", r"own.tiktoken:339: not a base64"),
        (lambda lines: [*lines, b"YW\xc3h 338"], "gpt2", r"own.tiktoken:339: not a base64"),
        (lambda lines: [*lines, b"YWFhYWFhYWFh 3"], "gpt2", "two pieces have the same rank"),
        (lambda lines: [*lines, b"YWFhYWFhYWFh 1000000000000"], "gpt2", "a rank is 1000000000000; there are at most"),
        (lambda lines: lines, r"(\S", "--tiktoken-pattern: not a regular expression"),
        (lambda lines: lines, r"\S+", "does not give back .* give a --tiktoken-pattern that matches every character"),
    ],
)
def test_ranks_and_patterns_that_cannot_be(change: Any, pattern: str, message: str, tmp_path: Path) -> None:
    path = write_ranks(byte_level(specials=()), tmp_path / "own.tiktoken")
    path.write_bytes(b"\n".join(change(path.read_bytes().splitlines())))
    with pytest.raises(UserError, match=message):
        load_tokenizer(str(path), tiktoken_pattern=pattern)


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"byte_fallback": False, "vocab_size": 100}, "no byte fallback and would lose characters"),
        ({"remove_extra_whitespaces": True}, "does not give back"),
        ({"normalization_rule_name": "nmt_nfkc_cf"}, "does not give back"),
        ({"treat_whitespace_as_suffix": True}, "does not give back"),
    ],
)
def test_sentencepiece_models_that_lose_text_are_refused(choices: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        SentencePieceTokenizer(sentencepiece_model(**{"normalization_rule_name": "identity", **choices}))


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        ("byte", {"bos_token": "<s>"}, "--bos-token: byte has no use for it"),
        ("json", {"tiktoken_pattern": "gpt2"}, "--tiktoken-pattern: .* has no use for it"),
        ("json", {"eos_token": "\ud800"}, r"the tokenizer has no eos_token '\\ud800'"),
        ("tiktoken", {"tiktoken_pattern": "gpt2", "eos_token": "x"}, "--eos-token: .* has no use for it"),
        ("directory", {}, "no such tokenizer; name the file in it"),
        ("bad.json", {}, "malformed JSON"),
    ],
)
def test_choices_that_cannot_be_honoured(make: str, arguments: dict[str, str], message: str, tmp_path: Path) -> None:
    spec = {"byte": "byte", "directory": str(tmp_path), "bad.json": str(tmp_path / "bad.json")}.get(make, "")
    (tmp_path / "bad.json").write_text("{")
    if make == "json":
        spec = str(save(byte_level(), tmp_path))
    if make == "tiktoken":  # told by its contents: Llama 3's is called tokenizer.model
        spec = str(write_ranks(byte_level(specials=()), tmp_path / "tokenizer.model"))
    with pytest.raises(UserError, match=message):
        load_tokenizer(spec, **arguments)


@pytest.mark.parametrize("library", ["tokenizers", "tiktoken"])
def test_a_missing_library_is_told(library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = save(byte_level(), tmp_path)
    spec = write_ranks(byte_level(specials=()), tmp_path / "own.tiktoken") if library == "tiktoken" else spec
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(UserError, match=rf"needs the library {library}; install it with: pip install"):
        load_tokenizer(str(spec), tiktoken_pattern="gpt2" if library == "tiktoken" else "")
