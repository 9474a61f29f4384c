"""The shipped corpus is what its README says: size, checksums, document lengths, no near-duplicates."""

from __future__ import annotations

import collections
import gzip
import hashlib
import itertools
import json
import re
import unicodedata
import zlib
from pathlib import Path

import pytest

CORPUS = Path(__file__).resolve().parents[2] / "corpus"
FILES = sorted(CORPUS.glob("*.jsonl.gz"))


@pytest.fixture(scope="module")
def documents() -> list[dict[str, str]]:
    return [json.loads(line) for path in FILES for line in gzip.decompress(path.read_bytes()).splitlines()]


def test_sizes(documents):
    assert 10e6 <= sum(len(d["text"].encode()) for d in documents) <= 20e6
    assert sum(path.stat().st_size for path in FILES) <= 7 * 2**20


def test_documents_are_clean_text_of_sensible_length(documents):
    assert len(documents) > 1000
    for document in documents:
        assert set(document) == {"source", "title", "text"}
        text = document["text"]
        assert 1_000 <= len(text) <= 60_500, document["title"]
        assert text == unicodedata.normalize("NFC", text)
        assert not re.search(r"[^\S\n ]|[\x00-\x09\x0b-\x1f\x7f\ufffd]", text), document["title"]
        assert not re.search(r"https?:|www\.|gutenberg|&\w+;|\((?:applause|laughter)", text, re.IGNORECASE), document[
            "title"
        ]
    titles = collections.Counter(d["title"] for d in documents)
    assert max(titles.values()) == 1, titles.most_common(3)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_readme_states_the_figures(path):
    lines = gzip.decompress(path.read_bytes())
    texts = [json.loads(line)["text"].encode() for line in lines.splitlines()]
    row = next(row for row in (CORPUS / "README.md").read_text().splitlines() if row.startswith(f"| `{path.name}` |"))
    cells = [cell.strip(" `").replace(",", "") for cell in row.split("|")[2:-1]]
    sizes = sorted(map(len, texts))
    figures = [len(sizes), sum(sizes), sizes[0], sizes[len(sizes) // 2], sizes[-1], path.stat().st_size]
    assert cells == [*map(str, figures), hashlib.sha256(lines).hexdigest()]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_compressed_without_time_or_name(path):
    header = path.read_bytes()[:10]
    assert header[:4] == b"\x1f\x8b\x08\x00"  # gzip, deflate, no flags: no name
    assert header[4:8] == bytes(4)  # no modification time


def test_no_near_duplicates(documents):
    """The Jaccard index of five-word shingles, sampled 1 in 16 by hash, stays below 0.2 for every pair."""
    holders: dict[int, list[int]] = {}
    sizes = []
    for index, document in enumerate(documents):
        words = re.findall(r"\w+", document["text"].casefold())
        hashes = {zlib.crc32(" ".join(words[i : i + 5]).encode()) for i in range(len(words) - 4)}
        sampled = {h for h in hashes if h % 16 == 0}
        sizes.append(len(sampled))
        for h in sampled:
            holders.setdefault(h, []).append(index)
    shared: collections.Counter[tuple[int, int]] = collections.Counter()
    for indices in holders.values():
        shared.update(itertools.combinations(indices, 2))
    worst, (a, b) = max((n / (sizes[a] + sizes[b] - n), (a, b)) for (a, b), n in shared.items())
    assert worst < 0.2, (worst, documents[a]["title"], documents[b]["title"])
