"""Tokenizers that others made: the ids are their library's, and text and bytes are exact."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
from foreign_tokenizers import HUGGING_FACE, byte_level, prepended, save, sentencepiece_model, write_ranks
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from small_texts import make_texts, write_jsonl

from tlm_jax import cli
from tlm_jax.data import tiktoken_tokenizer
from tlm_jax.data.documents import Document, DocumentFormat, Problem, find_inputs, read_documents
from tlm_jax.data.prepare import Settings, prepare
from tlm_jax.data.sentencepiece_tokenizer import SentencePieceTokenizer
from tlm_jax.data.store import MemoryStore, TokenStore, document_tokens, split_texts
from tlm_jax.data.tokenizer import Tokenizer, UnfitText, load_tokenizer, tokenizer_from_bytes
from tlm_jax.data.windows import Windows
from tlm_jax.errors import UserError

tokenizers = pytest.importorskip("tokenizers")
tiktoken = pytest.importorskip("tiktoken")

_STRANGE = ["", " ", "  ", " a", "a ", "\n\n x", "\r\n", "\t", "\x00\x01", "\ufeffa", "a\u200bb", "\u2028", "\u3000a"]
_STRANGE += ["e\u0301 \u00e9 A\u030a \u212b", "\ufb01 \u2460 \uff21", "\u0645\u0631\u062d\u0628\u0627", "\u6771\u4eac"]
_STRANGE += ["\U0001f469\u200d\U0001f467 \U0010ffff", "\u1112\u1161\u11ab \ud55c", "<s></s><unk>", "<|endoftext|>"]
_STRANGE += ["\u2581", "\u2581a", "a\u2581b \u2581 c", " \u2581", "\u2581\u2581 a", "<0x41>", "\u0120a \u010a"]
_PIECES = [*_STRANGE, "the", " whale", "1851", "Oh!", "don't", "\n"]
any_text = st.lists(st.sampled_from(_PIECES) | st.text(max_size=4), max_size=8).map("".join)


def _sentencepiece(directory: Path, **choices: Any) -> Path:
    directory.mkdir(exist_ok=True, parents=True)
    (directory / "foreign.model").write_bytes(sentencepiece_model(normalization_rule_name="identity", **choices))
    return directory / "foreign.model"


@pytest.fixture(scope="module", params=[*HUGGING_FACE, "tiktoken", "sentencepiece", "sentencepiece without a prefix"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("foreign")
    if request.param == "tiktoken":
        path = write_ranks(byte_level(specials=()), directory / "own.tiktoken")
        return load_tokenizer(str(path), tiktoken_pattern="gpt2")
    if request.param.startswith("sentencepiece"):
        return load_tokenizer(str(_sentencepiece(directory, add_dummy_prefix="without" not in request.param)))
    return load_tokenizer(str(save(HUGGING_FACE[request.param](), directory)))


def _reads_names(tokenizer: Tokenizer, text: str) -> bool:
    """Whether this is a text in which a unigram model takes the name of a byte token for the token."""
    return "<0x" in text and b'"Unigram' in tokenizer.to_bytes().replace(b"\\", b"")


def _normal(tokenizer: Tokenizer, text: str) -> str:
    form: Any = tokenizer.unicode_form
    return unicodedata.normalize(form, text) if form else text


# The promises


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=any_text)
@example(text=" leading \u2581 and trailing ")
@example(text="\u2581")
@example(text="<0x41>don't")
def test_text_comes_back_and_every_byte_is_counted(tokenizer: Tokenizer, text: str) -> None:
    if _reads_names(tokenizer, text):
        with pytest.raises(UnfitText, match=r"would change .<0x41>"):
            tokenizer.encode(text)
        return
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == _normal(tokenizer, text)
    assert not {tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id} & set(ids)
    assert all(0 <= i < tokenizer.vocab_size for i in ids)
    if text:
        counted = tokenizer.token_bytes()[document_tokens(text, tokenizer)].sum()
        assert counted == len(_normal(tokenizer, text).encode())


def test_every_assigned_character_comes_back(tokenizer: Tokenizer) -> None:
    characters = [chr(c) for c in range(0, 0x30000, 7) if not 0xD800 <= c < 0xE000]
    for start in range(0, len(characters), 500):
        text = " ".join(characters[start : start + 500])
        assert tokenizer.decode(tokenizer.encode(text)) == _normal(tokenizer, text)


def test_specials_are_three_ids_that_stand_for_no_text(tokenizer: Tokenizer) -> None:
    specials = [tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id]
    assert len(set(specials)) == 3
    assert max(specials) < tokenizer.vocab_size
    assert [tokenizer.id_bytes(i) for i in specials] == [b"", b"", b""]
    assert tokenizer.decode([tokenizer.bos_id, *tokenizer.encode("a b"), tokenizer.eos_id, tokenizer.pad_id]) == "a b"
    with pytest.raises(UnicodeEncodeError):
        tokenizer.encode("a\ud800b")


def test_rebuilt_from_bytes_pickle_or_its_file_it_is_the_same(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(tokenizer.to_bytes())
    again = [tokenizer_from_bytes(tokenizer.kind, tokenizer.to_bytes()), pickle.loads(pickle.dumps(tokenizer))]
    if tokenizer.kind != "sentencepiece":
        again.append(load_tokenizer(str(tmp_path / "tokenizer.json")))
    for other in again:
        assert other.hash == tokenizer.hash
        for name in ("vocab_size", "bos_id", "eos_id", "pad_id", "prefix", "unicode_form"):
            assert getattr(other, name) == getattr(tokenizer, name)
        for text in [*_STRANGE[:-2], *make_texts(3)]:
            assert other.encode(text) == tokenizer.encode(text)


def test_long_texts_are_cut_and_runs_without_a_word_end_too(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "".join(make_texts(30, seed=5))
    whole = tokenizer.encode(text)
    monkeypatch.setattr(type(tokenizer), "_part_characters", 16)
    monkeypatch.setattr(type(tokenizer), "_longest_part", 64)
    assert tokenizer.encode(text) == whole
    for run in (" " * 500, "a" * 500, "\u2581" * 500, "\u6771" * 500, "x" + " \n" * 300):
        assert tokenizer.decode(tokenizer.encode(run)) == run


# The ids


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_ids_are_those_of_the_library_tokenizers(name: str, tmp_path: Path) -> None:
    path = save(HUGGING_FACE[name](), tmp_path)
    ours, theirs = load_tokenizer(str(path)), tokenizers.Tokenizer.from_file(str(path))
    theirs.encode_special_tokens = True
    for text in [*make_texts(200, seed=3), *_STRANGE]:
        if "\u2581" in text and "byte-level" not in name:
            continue  # the library takes it for a space
        if _reads_names(ours, text):
            continue
        if text.startswith(" ") and ours.prefix == b" " and name != "prepended":
            continue  # the library takes the text's own space for the prefix
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False).ids, repr(text)
        decoded = theirs.decode(ours.encode(text), skip_special_tokens=False)
        assert ours.decode(ours.encode(text)) == decoded.removeprefix(" " if name == "byte-level with a prefix" else "")


def test_ids_are_those_of_tiktoken_and_of_the_same_encoding_elsewhere(tmp_path: Path) -> None:
    bpe = byte_level(specials=())
    path = write_ranks(bpe, tmp_path / "own.tiktoken")
    ranks = tiktoken.load.load_tiktoken_bpe(str(path))
    for name, encoding in tiktoken_tokenizer.ENCODINGS.items():
        ours = load_tokenizer(str(path), tiktoken_pattern=name)
        theirs = tiktoken.Encoding("own", pat_str=encoding.pattern, mergeable_ranks=ranks, special_tokens={})
        assert (ours.bos_id, ours.eos_id, ours.pad_id) == (len(ranks), len(ranks) + 1, len(ranks) + 2)
        for text in [*make_texts(200, seed=3), *_STRANGE]:
            assert ours.encode(text) == theirs.encode_ordinary(text)
            if name == "r50k_base":  # the pattern that byte-level BPE has in the other library
                assert ours.encode(text) == bpe.encode(text).ids


def test_the_table_of_published_encodings_is_tiktokens(monkeypatch: pytest.MonkeyPatch) -> None:
    public = pytest.importorskip("tiktoken_ext.openai_public")
    checksums: list[str] = []
    monkeypatch.setattr(public, "load_tiktoken_bpe", lambda url, expected_hash: checksums.append(expected_hash) or {})
    for name, ours in tiktoken_tokenizer.ENCODINGS.items():
        theirs = getattr(public, name)()
        assert ours.ranks_sha256 == checksums[-1]
        assert ours.pattern == theirs["pat_str"]
        assert ours.eos_id == theirs["special_tokens"]["<|endoftext|>"]
        assert ours.vocab_size == theirs.get("explicit_n_vocab", max(theirs["special_tokens"].values()) + 1)


def test_a_published_file_needs_no_pattern_and_keeps_its_special_ids(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_ranks(byte_level(specials=()), tmp_path / "own.tiktoken")
    with pytest.raises(UserError, match=r"own.tiktoken: the file holds ranks only, .* give --tiktoken-pattern"):
        load_tokenizer(str(path))
    checksum = hashlib.sha256(path.read_bytes()).hexdigest()
    published = tiktoken_tokenizer.Encoding(checksum, tiktoken_tokenizer.ENCODINGS["cl100k_base"].pattern, 600, 620)
    monkeypatch.setitem(tiktoken_tokenizer.ENCODINGS, "cl100k_base", published)
    for tokenizer in (load_tokenizer(str(path)), load_tokenizer(str(path), tiktoken_pattern="cl100k_base")):
        assert (tokenizer.eos_id, tokenizer.bos_id, tokenizer.pad_id, tokenizer.vocab_size) == (600, 620, 621, 622)
        assert tokenizer.special_name(600) == "<|endoftext|>"
        assert tokenizer.special_name(620) == "added"
        assert tokenizer.encode("12345") == load_tokenizer(str(path), tiktoken_pattern="cl100k_base").encode("12345")
    other = load_tokenizer(str(path), tiktoken_pattern=r"\s+|\S+")
    assert other.eos_id == len(path.read_bytes().splitlines()) + 1


@pytest.mark.parametrize("prefix", [True, False])
def test_ids_are_those_of_sentencepiece(tmp_path: Path, prefix: bool) -> None:
    path = _sentencepiece(tmp_path, add_dummy_prefix=prefix)
    ours, theirs = load_tokenizer(str(path)), sentencepiece.SentencePieceProcessor(model_file=str(path))
    for text in [*make_texts(200, seed=3), *_STRANGE]:
        if "\u2581" not in text:  # which the library takes for a space
            assert ours.encode(text) == theirs.encode(text)
            assert ours.decode(ours.encode(text)) == theirs.decode(ours.encode(text)) == text


# Specials


def test_specials_that_a_model_lacks_come_after_its_ids(tmp_path: Path) -> None:
    whole = SentencePieceTokenizer(sentencepiece_model(normalization_rule_name="identity"))
    assert [whole.special_name(i) for i in (whole.bos_id, whole.eos_id, whole.pad_id)] == ["<s>", "</s>", "<unk>"]
    assert whole.vocab_size == 400
    lacking = SentencePieceTokenizer(sentencepiece_model(normalization_rule_name="identity", bos_id=-1, eos_id=-1))
    assert (lacking.bos_id, lacking.eos_id, lacking.pad_id, lacking.vocab_size) == (400, 401, 0, 402)
    theirs = byte_level()
    gpt2, size = load_tokenizer(str(save(theirs, tmp_path))), theirs.get_vocab_size()
    assert (gpt2.eos_id, gpt2.special_name(gpt2.eos_id)) == (0, "<|endoftext|>")
    assert (gpt2.bos_id, gpt2.pad_id, gpt2.vocab_size) == (size, size + 1, size + 2)
    assert gpt2.special_name(size) == "added"


def test_which_tokens_begin_and_end_a_document(tmp_path: Path) -> None:
    names = ("<s>", "</s>", "<|endoftext|>", "<pad>", "<|mask|>")
    theirs = byte_level(specials=names)
    path, size = str(save(theirs, tmp_path)), theirs.get_vocab_size()
    with pytest.raises(UserError, match=r"several tokens could be meant: </s>, <\|endoftext\|>; say which with --eos"):
        load_tokenizer(path)
    told = load_tokenizer(path, eos_token="<|endoftext|>")
    assert (told.bos_id, told.eos_id, told.pad_id) == (0, 2, 3)
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"bos_token": None, "eos_token": {"content": "</s>", "lstrip": False}}))
    configured = load_tokenizer(path)
    assert (configured.bos_id, configured.eos_id, configured.pad_id) == (size, 1, 3)
    assert load_tokenizer(path, bos_token="<|mask|>").bos_id == 4
    assert len({told.hash, configured.hash}) == 2
    config.write_text(json.dumps({"bos_token": "<s>", "eos_token": "<s>"}))  # one token for both ends a document
    assert (load_tokenizer(path).bos_id, load_tokenizer(path).eos_id) == (size, 0)
    with pytest.raises(UserError, match=r"no eos_token '<end>'; name one of its tokens with --eos-token"):
        load_tokenizer(path, eos_token="<end>")


def test_special_tokens_in_a_text_are_text(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(save(byte_level(specials=("<|endoftext|>", "<|im_start|>")), tmp_path)))
    text = "a <|endoftext|> b <|im_start|>"
    assert not {0, 1} & set(tokenizer.encode(text))
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.id_bytes(1) == b""


def test_truncation_and_padding_in_the_file_do_not_touch_documents(tmp_path: Path) -> None:
    theirs = byte_level()
    whole = load_tokenizer(str(save(theirs, tmp_path / "a")))
    theirs.enable_truncation(4)
    theirs.enable_padding(length=9)
    cut = load_tokenizer(str(save(theirs, tmp_path / "b")))
    for text in ("a", *make_texts(5)):
        assert cut.encode(text) == whole.encode(text)


# The token store and the whole path


def test_a_text_that_one_tokenizer_would_change_is_a_counted_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An added token that swallows the space before it: it loses text only where it occurs."""
    monkeypatch.chdir(tmp_path)
    theirs = byte_level()
    theirs.add_tokens([tokenizers.AddedToken("[X]", lstrip=True, special=False)])
    path = save(theirs, tmp_path)
    with pytest.raises(UnfitText, match=r"would change ' \[X\] b' to '\[X\] b'"):
        load_tokenizer(str(path)).encode("a [X] b")
    write_jsonl(tmp_path / "a.jsonl", [*make_texts(5), "a [X] b", "a[X]", *make_texts(5, seed=1)])
    command = ["prepare", "a.jsonl", f"--tokenizer={path}", "--output=store", "--holdout=0"]
    assert cli.main(command) == 2
    error = capsys.readouterr().err
    assert "a.jsonl:6: unfit for the tokenizer: the tokenizer would change ' [X] b' to '[X] b'; mend" in error
    assert error.count("\n") == 1
    assert cli.main([*command, "--on-error=skip"]) == 0
    out = capsys.readouterr().out
    assert "skipped: 1 × unfit for the tokenizer" in out
    assert "train: 11 documents" in out


@pytest.mark.parametrize("name", ["byte-level in NFC", "prepended", "byte-level with a prefix"])
def test_a_store_counts_bytes_exactly(name: str, tmp_path: Path) -> None:
    texts = [*make_texts(100), *(text for text in _STRANGE if text.strip())]
    path = str(write_jsonl(tmp_path / "a.jsonl", texts))
    tokenizer = load_tokenizer(str(save(HUGGING_FACE[name](), tmp_path)))
    chosen = Settings(holdout=0.3)
    stores = [prepare([path], tokenizer, tmp_path / str(workers), chosen, workers=workers) for workers in (1, 2)]
    store = stores[0]
    assert store.fingerprint == stores[1].fingerprint
    assert store.tokenizer().hash == tokenizer.hash
    normal = [_normal(tokenizer, text) for text in texts]
    splits = [store.split(split) for split in ("train", "validation")]
    kept = [text for split in splits for text in split_texts(split, store.tokenizer())]
    assert sorted(kept) == sorted(normal)
    assert sum(split.num_bytes for split in splits) == sum(len(text.encode()) for text in normal)
    changed = sum(a != b for a, b in zip(texts, normal, strict=True))
    assert store.manifest["normalized"] == {"form": tokenizer.unicode_form, "documents": changed}
    assert (changed > 1) == ("NFC" in name)
    for source in (store, MemoryStore(texts, tokenizer)):
        windows = Windows(source, "validation", 32)
        counted = sum(int(windows[i]["bytes"]) for i in range(len(windows)))
        assert counted == source.split("validation").num_bytes


def test_a_problem_names_its_line_in_any_range(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", make_texts(50))
    (file,) = find_inputs([str(path)])
    found = [*read_documents(file, DocumentFormat(), 0, 3000), *read_documents(file, DocumentFormat(), 3000)]
    problems = [document.problem("x", "") for document in found if isinstance(document, Document)]
    assert problems == [Problem("x", "", str(path), line) for line in range(1, 51)]


_TRAIN = ["--config.profile.num_layers=2", "--config.profile.d_model=32", "--config.profile.d_ff=64"]
_TRAIN += ["--config.profile.num_heads=2", "--config.profile.num_kv_heads=2", "--config.profile.multiple_of=16"]
_TRAIN += ["--config.data.sequence_length=32", "--config.train.num_steps=2", "--config.train.global_batch_size=8"]
_TRAIN += ["--config.train.warmup_steps=1", "--config.log.peak_flops=1e9", "--config.log.tensorboard=False"]


@pytest.mark.slow
def test_from_a_foreign_tokenizer_to_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prepare, train, and from the checkpoint alone evaluate and generate."""
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "a.jsonl", make_texts(200))
    path = save(prepended(), tmp_path)
    (tmp_path / "config.py").write_text("from tlm_jax.config import default_config as get_config\n")
    assert cli.main(["prepare", "a.jsonl", f"--tokenizer={path}", "--output=store", "--holdout=0.2"]) == 0
    keys = capsys.readouterr().out.split()
    (vocab_size,) = (key for key in keys if key.startswith("--config.model.vocab_size="))
    train = ["train", "--config=config.py", "--workdir=run", "--config.data.store=store", vocab_size, *_TRAIN]
    assert cli.main(train) == 0
    tokenizer = load_tokenizer("store/tokenizer.json")
    held_out = list(split_texts(TokenStore.open("store").split("validation"), tokenizer))
    for file in ("store", "tokenizer.json"):
        os.rename(file, f"{file}.gone")
    write_jsonl(tmp_path / "held_out.jsonl", held_out)
    capsys.readouterr()
    assert cli.main(["eval", "--checkpoint=run", "--data", "held_out.jsonl"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["bytes"] == sum(len(text.encode()) for text in held_out)
    assert result["bits_per_byte"] == pytest.approx(result["loss"] / np.log(2) * result["tokens"] / result["bytes"])
    generate = ["generate", "--checkpoint=run", "--prompt=the white", "--max-new-tokens=8", "--output=s.jsonl"]
    assert cli.main(generate) == 0
    sample = json.loads((tmp_path / "s.jsonl").read_text().splitlines()[0])
    assert sample["prompt"] == "the white"
