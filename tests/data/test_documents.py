from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from itertools import accumulate, groupby, pairwise
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tlm_jax.data import documents
from tlm_jax.data.documents import SPLIT_TEXT, Document, DocumentFormat, Problem, find_inputs, read_documents
from tlm_jax.errors import UserError


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("documents")


def _read(path: Path, layout: DocumentFormat, cuts: list[int] | None = None) -> Iterator[Document | Problem]:
    (file,) = find_inputs([str(path)])
    for start, stop in pairwise(sorted({0, file.size, *(cuts or [])})):
        yield from read_documents(file, layout, start, stop)


_some_lines = st.lists(st.sampled_from(["a", "bc é", "d\ne", "", "", " ", "\t", "long " * 9]), max_size=12)


@settings(max_examples=400, deadline=None)
@given(
    lines=_some_lines,
    ending=st.sampled_from(["\n", "\r\n"]),
    last=st.booleans(),
    cuts=st.lists(st.integers(0, 200), max_size=8),
    split_text=st.sampled_from(["line", "paragraph"]),
)
def test_ranges_that_tile_a_text_yield_its_documents_once(
    directory: Path, lines: list[str], ending: str, last: bool, cuts: list[int], split_text: documents.SplitText
) -> None:
    text = ending.join(lines) + (ending if last else "")
    path = directory / "tiled.txt"
    path.write_bytes(text.encode())
    size = len(text.encode())
    if not size:
        return
    layout = DocumentFormat(split_text=split_text)
    found = [d.text for d in _read(path, layout, [c for c in cuts if c <= size]) if isinstance(d, Document)]
    split = text.split("\n")
    if split_text == "line":
        assert found == [line.rstrip("\r") for line in split if line.strip()]
    else:
        blocks: list[list[str]] = [[]]
        for line in split:
            blocks[-1].append(line) if line.strip() else blocks.append([])
        assert found == ["\n".join(block).rstrip("\r") for block in blocks if block]


@settings(max_examples=200, deadline=None)
@given(lines=_some_lines, cuts=st.lists(st.integers(0, 25), max_size=4), document_bytes=st.integers(1, 12))
def test_sized_documents_make_up_the_text(
    directory: Path, lines: list[str], cuts: list[int], document_bytes: int
) -> None:
    text = "".join(line.replace("\n", "") + "\n" for line in lines if line.strip())
    path = directory / "sized.txt"
    path.write_text(text)
    size = len(text.encode())
    if not size:
        return
    layout = DocumentFormat(split_text="size", document_bytes=document_bytes)
    cut_at = [c * document_bytes for c in cuts if c * document_bytes <= size]
    found = [d.text for d in _read(path, layout, cut_at) if isinstance(d, Document)]
    assert "".join(found) == text
    starts_of_lines = accumulate((len(line.encode()) for line in text.splitlines(True)), initial=0)
    by_start = groupby(
        zip(starts_of_lines, text.splitlines(True), strict=False), key=lambda line: line[0] // document_bytes
    )
    assert found == ["".join(line for _, line in group) for _, group in by_start]


@settings(max_examples=200, deadline=None)
@given(texts=st.lists(st.text(min_size=1, max_size=20), min_size=1, max_size=10), cuts=st.lists(st.integers(0, 400)))
@example(texts=["a", "b" * 400, "c"], cuts=list(range(0, 400, 7)))
def test_ranges_that_tile_jsonl_yield_its_documents_once(directory: Path, texts: list[str], cuts: list[int]) -> None:
    path = directory / "tiled.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n\n" for text in texts))
    whole = list(_read(path, DocumentFormat()))
    assert [d.text if isinstance(d, Document) else None for d in whole] == [t if t.strip() else None for t in texts]
    assert list(_read(path, DocumentFormat(), [c for c in cuts if c <= path.stat().st_size])) == whole


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": "caf\xe9"}', "invalid UTF-8"),
        (b'{"text": "x"', "malformed JSON"),
        (b"[" * 100_000, "malformed JSON"),
        (b'"text"', "not a JSON object"),
        (b'{"body": "x"}', "missing field"),
        (b'{"text": 3}', "field is not a string"),
        (b'{"text": null}', "field is not a string"),
        (b'{"text": "\\ud800"}', "lone surrogate"),
        (b'{"text": ""}', "empty document"),
        (b'{"text": " \\n"}', "empty document"),
    ],
)
@pytest.mark.parametrize("cut", [False, True])
def test_a_bad_jsonl_line_is_told_by_line_and_the_others_are_read(
    tmp_path: Path, line: bytes, reason: str, cut: bool
) -> None:
    good = b'{"text": "good"}\n'
    path = tmp_path / "a.jsonl"
    path.write_bytes(good * 2 + b"\n" + good + line + b"\n" + good)
    found = list(_read(path, DocumentFormat(), [5, len(good) * 2 + 3, len(good) * 3 + 1] if cut else []))
    assert [d.text for d in found if isinstance(d, Document)] == ["good"] * 4
    (problem,) = (d for d in found if isinstance(d, Problem))
    assert (problem.reason, problem.line) == (reason, 5)
    assert str(problem.error()).startswith(f"{path}:5: {reason}")


@pytest.mark.parametrize("split_text", SPLIT_TEXT)
@pytest.mark.parametrize("ending", [".txt", ".txt.gz"])
def test_invalid_utf8_in_text_is_told_by_line(tmp_path: Path, split_text: documents.SplitText, ending: str) -> None:
    data = b"one\ntwo\n\nthree\nfo\xffur\nfive\n"
    path = tmp_path / f"a{ending}"
    path.write_bytes(gzip.compress(data) if ending.endswith("gz") else data)
    found = list(_read(path, DocumentFormat(split_text=split_text, document_bytes=4)))
    assert [(d.reason, d.line) for d in found if isinstance(d, Problem)] == [("invalid UTF-8", 5)]


def test_truncated_and_false_gzip(tmp_path: Path) -> None:
    lines = b"".join(json.dumps({"text": f"document {i} {i * 7919}"}).encode() + b"\n" for i in range(5000))
    whole = gzip.compress(lines)
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(whole[: len(whole) // 2])
    found = list(_read(path, DocumentFormat()))
    assert all(isinstance(d, Document) for d in found[:-1])
    assert isinstance(found[-1], Problem)
    assert (found[-1].reason, found[-1].line) == ("damaged gzip", len(found) - 1)
    path.write_bytes(lines)
    assert [d.reason for d in _read(path, DocumentFormat()) if isinstance(d, Problem)] == ["damaged gzip"]
    middle = len(whole) // 2
    path.write_bytes(whole[:middle] + bytes(100) + whole[middle + 100 :])
    assert list(_read(path, DocumentFormat()))[-1].reason == "damaged gzip"  # type: ignore[union-attr]


def test_a_byte_order_mark_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\n")
    (tmp_path / "b.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "one"}\n')
    for split_text in SPLIT_TEXT:
        (document,) = _read(tmp_path / "a.txt", DocumentFormat(split_text=split_text))
        assert isinstance(document, Document)
        assert document.text.rstrip("\n") == "one"
    assert list(_read(tmp_path / "b.jsonl", DocumentFormat())) == [Document("one")]


def test_a_line_longer_than_many_ranges_is_passed_over_not_reread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": "x" * 100_000}) + "\n" + json.dumps({"text": "y"}) + "\n")
    monkeypatch.setattr(documents, "_READ_BYTES", 100)
    (file,) = find_inputs([str(path)])
    lines = documents._Lines(str(path), 1000, 2000)
    with open(path, "rb") as stream:
        assert list(lines.read(stream)) == []
        read = stream.tell()
    assert read <= 2200
    assert [d.text[:1] for d in read_documents(file, DocumentFormat(), 1000, file.size) if isinstance(d, Document)] == [
        "y"
    ]


def test_inputs_of_a_directory_come_by_name(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.jsonl.gz", "a/y.md", "c.png", "a.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    found = find_inputs([str(tmp_path)])
    assert [str(Path(f.path).relative_to(tmp_path)) for f in found] == ["a.jsonl", "a/y.md", "a/z.jsonl.gz", "b.txt"]
    kinds = [("jsonl", ""), ("text", ""), ("jsonl", "gzip"), ("text", "")]
    assert [(f.kind, f.compression) for f in found] == kinds


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["absent.txt"], "absent.txt: no such file"),
        (["a.txt", "./a.txt"], "given twice"),
        (["nothing"], "holds no text"),
        (["a.bz2"], "cannot be read; convert to text or JSON Lines, plain or .gz or .zst, or to Parquet"),
        (["a.parquet.gz"], "cannot be read"),
    ],
)
def test_inputs_that_cannot_be(tmp_path: Path, names: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nothing").mkdir()
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "a.bz2").write_text("x")
    (tmp_path / "a.parquet.gz").write_text("x")
    with pytest.raises(UserError, match=message):
        find_inputs(names)
