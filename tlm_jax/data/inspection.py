"""What a token store holds, in numbers and in lines of text."""

from __future__ import annotations

import shlex
from typing import Any

import numpy as np

from tlm_jax.counts import counted
from tlm_jax.data.store import SPLITS, TokenStore, beyond_vocabulary
from tlm_jax.data.tokenizer import Tokenizer

_COUNTED_TOKENS = 1 << 26  # of larger splits, about as many are counted, evenly spread
_PIECE_TOKENS = 1 << 20
_BAR = 40  # characters of the longest bar
_SAMPLE_CHARACTERS = 240
_TOKENS_PER_SAMPLE = 512


def summary(store: TokenStore) -> list[str]:
    """What the manifest says, in lines."""
    manifest, tokenizer = store.manifest, store.manifest["tokenizer"]
    adopted = manifest.get("adopted")
    if adopted is None:
        origin = "prepared from text"
    elif adopted["separator"] is not None:
        origin = f"adopted from {adopted['layout']} files, id {adopted['separator']} between documents"
    elif adopted["layout"] == "megatron":
        origin = "adopted from megatron files, documents as their index says, no id between them"
    else:
        origin = f"adopted from {adopted['layout']} files, each split one document"
    special = store.tokenizer().special_name
    specials = ", ".join(
        f"{role} {i} ({special(i)})"
        for role, i in (("begin", tokenizer["bos_id"]), ("end", tokenizer["eos_id"]), ("padding", tokenizer["pad_id"]))
    )
    lines = [
        f"{origin}; ids are {manifest['dtype']}",
        f"tokenizer: {tokenizer['kind']}, {tokenizer['vocab_size']:,} ids; {specials}; hash {tokenizer['hash'][:16]}",
    ]
    for name in SPLITS:
        split = manifest["splits"][name]
        text = f"{name}: {counted(split['documents'], 'document')}, {counted(split['tokens'], 'token')}"
        if split["bytes"]:
            text += (
                f", {counted(split['bytes'], 'byte')} of text ({split['bytes'] / split['tokens']:.2f} bytes a token)"
            )
        elif split["tokens"]:
            text += ", bytes of text not known"
        lines.append(f"{text}, {counted(len(split['shards']), 'shard')}")
    if normalized := manifest.get("normalized", {}).get("documents"):
        form = manifest["normalized"]["form"]
        what = f"the tokenizer brought {counted(normalized, 'document')} into Unicode form {form}"
        lines.append(f"{what}; bytes are counted in that form")
    if manifest["skipped"]:
        lines.append("skipped: " + ", ".join(f"{count:,} × {why}" for why, count in manifest["skipped"].items()))
        lines += [f"  {example}" for example in manifest.get("skipped_examples", [])]
    return lines


def next_lines(store: TokenStore) -> list[str]:
    """What the store can do next, in lines: be trained on alone, in a mixture, or be evaluated on."""
    held_out, trained = (store.split(name).num_documents > 0 for name in ("validation", "train"))
    if not trained:
        command = ["tlm", "eval", "--checkpoint=DIR", f"--data={store.name}"]
        return ["next, as nothing is there to train on:", f"  {shlex.join(command)}"] if held_out else []
    data = f"--config.data.store={store.name}"
    if not held_out:  # a mixture needs held-out text in one of its stores
        data = f"--config.data.mixture=(({store.name!r}, 0.5), ('OTHER', 0.5))"
    vocab_size = store.manifest["tokenizer"]["vocab_size"]
    command = ["tlm", "train", "--config=CONFIG", "--workdir=DIR", data, f"--config.model.vocab_size={vocab_size}"]
    why = "" if held_out else ", beside a store OTHER with held-out text, or after the mend above"
    return [f"next{why}:", f"  {shlex.join(command)}"]


def document_lengths(store: TokenStore, split: str) -> list[tuple[int, int, int]]:
    """Histogram of document lengths in tokens: (least, most, documents) of bins that double, none left out between."""
    lengths = np.diff(store.split(split).documents)
    if not len(lengths):
        return []
    bins = np.frexp(np.maximum(lengths, 1))[1] - 1  # floor of the binary logarithm
    counts = np.bincount(bins)
    first = int(bins.min())
    return [(1 << i, (2 << i) - 1, int(counts[i])) for i in range(first, len(counts))]


def bars(histogram: list[tuple[int, int, int]]) -> list[str]:
    """The histogram as lines with a bar each."""
    most = max((count for _, _, count in histogram), default=0)
    width = max((len(f"{high:,}") for _, high, _ in histogram), default=0)
    return [
        f"{low:>{width},} … {high:>{width},}  {count:>12,}  {'█' * -(-count * _BAR // most) if most else ''}".rstrip()
        for low, high, count in histogram
    ]


def _read(store: TokenStore, split: str, start: int, stop: int) -> np.ndarray:
    ids = store.split(split).read(start, stop)
    if len(ids) and (ids.min() < 0 or ids.max() >= store.tokenizer().vocab_size):
        raise beyond_vocabulary(f"the split {split!r}", ids, store.name)
    return ids


def frequent_tokens(store: TokenStore, split: str, number: int) -> tuple[int, list[tuple[int, int]]]:
    """Counts tokens of a split, of a large one in pieces that are spread evenly over it.

    Returns:
      How many tokens were counted, and (id, count) of the `number` most frequent, most frequent first.

    Raises:
      UserError: the split holds ids that the tokenizer does not know.
    """
    tokens = store.split(split)
    pieces = -(-tokens.num_tokens // _PIECE_TOKENS)
    wanted = min(pieces, _COUNTED_TOKENS // _PIECE_TOKENS)
    counts_V = np.zeros(store.tokenizer().vocab_size, np.int64)
    for i in range(wanted):
        start = i * pieces // wanted * _PIECE_TOKENS
        piece = _read(store, split, start, min(start + _PIECE_TOKENS, tokens.num_tokens))
        counts_V += np.bincount(piece, minlength=len(counts_V))
    order = np.lexsort((np.arange(len(counts_V)), -counts_V))[:number]
    return int(counts_V.sum()), [(int(i), int(counts_V[i])) for i in order if counts_V[i]]


def shown_token(tokenizer: Tokenizer, token_id: int) -> str:
    """How a token is shown: its text in quotes, or what it is for."""
    roles = {tokenizer.pad_id: "padding", tokenizer.eos_id: "end", tokenizer.bos_id: "begin"}
    if tokenizer.bos_id == tokenizer.eos_id:
        roles[tokenizer.bos_id] = "separator"
    piece = tokenizer.id_bytes(token_id)
    if not piece:
        return f"({roles.get(token_id, 'special')})"
    try:
        return repr(piece.decode())
    except UnicodeDecodeError:
        return repr(piece)


def samples(store: TokenStore, split: str, number: int) -> list[tuple[int, str]]:
    """(document, the beginning of its text) of documents spread evenly over a split; raises as `frequent_tokens`."""
    tokens, tokenizer = store.split(split), store.tokenizer()
    picks = sorted({i * tokens.num_documents // number for i in range(number)} if tokens.num_documents else ())
    found = []
    for pick in picks:
        start, stop = (int(border) for border in tokens.documents[pick : pick + 2])
        text = tokenizer.decode(_read(store, split, start, min(stop, start + _TOKENS_PER_SAMPLE)))
        cut = len(text) > _SAMPLE_CHARACTERS or stop > start + _TOKENS_PER_SAMPLE
        found.append((pick, text[:_SAMPLE_CHARACTERS] + ("…" if cut else "")))
    return found


def as_json(store: TokenStore) -> dict[str, Any]:
    """What the manifest says, without its lists of shards."""
    manifest = store.manifest
    return {
        "store": store.name,
        "fingerprint": store.fingerprint,
        "dtype": manifest["dtype"],
        "tokenizer": manifest["tokenizer"],
        "adopted": manifest.get("adopted"),
        "skipped": manifest["skipped"],
        "splits": {
            name: {**{k: v for k, v in split.items() if k != "shards"}, "shards": len(split["shards"])}
            for name, split in manifest["splits"].items()
        },
    }
