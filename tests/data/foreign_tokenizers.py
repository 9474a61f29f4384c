"""Tokenizers as other libraries train and write them, in the shapes of published ones."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import sentencepiece
from small_texts import make_texts

_SPECIALS = ["<unk>", "<s>", "</s>"]
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def _texts() -> list[str]:
    return make_texts(300)


def byte_level(prefix: bool = False, normalizer: str = "", specials: tuple[str, ...] = ("<|endoftext|>",)) -> Any:
    """Byte-level BPE, as GPT-2's; with NFC as GPT-NeoX's."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    if normalizer:
        tokenizer.normalizer = getattr(normalizers, normalizer)()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=list(specials),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(), trainer)
    return tokenizer


def _with_byte_fallback(tokenizer: Any, **changes: Any) -> Any:
    """Marks only the first specials as such: byte tokens were made through the trainer, which knows no others."""
    from tokenizers import Tokenizer

    spec = {**json.loads(tokenizer.to_str()), **changes}
    spec["added_tokens"] = [token for token in spec["added_tokens"] if token["content"] in _SPECIALS]
    return Tokenizer.from_str(json.dumps(spec))


def prepended() -> Any:
    """BPE with byte fallback and a normalizer that puts a space first, as Llama 2's."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split("\u2581", "merged_with_next")  # so that pieces keep to words
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=_SPECIALS + _BYTES, show_progress=False)
    tokenizer.train_from_iterator(_texts(), trainer)
    return _with_byte_fallback(tokenizer, pre_tokenizer=None)


def metaspace(scheme: str) -> Any:
    """BPE with byte fallback over Metaspace; with scheme "never" as Gemma's."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme=scheme), decoders.Fuse()]
    )
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=_SPECIALS + _BYTES, show_progress=False)
    tokenizer.train_from_iterator(_texts(), trainer)
    return _with_byte_fallback(tokenizer)


def unigram() -> Any:
    """A unigram model with byte fallback."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    words = sorted({f"\u2581{word}" for text in _texts() for word in text.split()})
    pieces = [("<unk>", 0.0), *((piece, -9.0) for piece in _BYTES), ("\u2581", -4.0)]
    pieces += [(word, -3.0 - len(word) / 10) for word in words] + [(chr(c), -8.0) for c in range(0x61, 0x7B)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="always")])
    return tokenizer


HUGGING_FACE: dict[str, Callable[[], Any]] = {
    "byte-level": byte_level,
    "byte-level with a prefix": lambda: byte_level(prefix=True),
    "byte-level in NFC": lambda: byte_level(normalizer="NFC"),
    "prepended": prepended,
    "metaspace first": lambda: metaspace("first"),
    "metaspace never": lambda: metaspace("never"),
    "unigram": unigram,
}


def save(tokenizer: Any, directory: Path) -> Path:
    directory.mkdir(exist_ok=True, parents=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory / "tokenizer.json"


def write_ranks(tokenizer: Any, path: Path) -> Path:
    """Writes a byte-level BPE without specials as a `.tiktoken` file, its pieces translated to bytes by tiktoken."""
    from tiktoken.load import data_gym_to_mergeable_bpe_ranks

    model = json.loads(tokenizer.to_str())["model"]
    merges, vocabulary = path.with_suffix(".bpe"), path.with_suffix(".vocabulary")
    merges.write_text("#version: 0.2\n" + "".join(" ".join(pair) + "\n" for pair in model["merges"]))
    vocabulary.write_text(json.dumps(model["vocab"]))
    ranks = data_gym_to_mergeable_bpe_ranks(str(merges), str(vocabulary))
    path.write_bytes(b"".join(base64.b64encode(piece) + b" %d\n" % rank for piece, rank in ranks.items()))
    return path


def sentencepiece_model(**settings: Any) -> bytes:
    """A model as `spm_train` makes it, but with byte fallback and all spaces, unless told otherwise."""
    model = io.BytesIO()
    choices = {"vocab_size": 400, "byte_fallback": True, "remove_extra_whitespaces": False, **settings}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(_texts()), model_writer=model, minloglevel=2, model_type="bpe", **choices
    )
    return model.getvalue()
