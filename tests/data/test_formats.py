"""Parquet and Zstandard inputs: files written by pyarrow and zstandard, whole, damaged and cut."""

from __future__ import annotations

import hashlib
import json
import struct
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_texts import make_texts, write_jsonl

from tlm_jax import cli
from tlm_jax.data.documents import Document, DocumentFormat, Problem, find_inputs, read_documents
from tlm_jax.data.prepare import Settings, prepare
from tlm_jax.data.store import TokenStore, split_texts
from tlm_jax.data.tokenizer import ByteTokenizer
from tlm_jax.errors import UserError

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
zstandard = pytest.importorskip("zstandard")

_STRANGE = ["caf\u00e9", "e\u0301", "\U0001f9ea\U0010ffff", "\ufeffmark", "a\x00b", "line\u2028end", "\u2581", "\r\n x"]


def _read(path: Path, layout: DocumentFormat | None = None, cuts: list[int] | None = None) -> list[Document | Problem]:
    (file,) = find_inputs([str(path)])
    ranges = pairwise(sorted({0, file.size, *(cuts or [])}))
    return [found for a, b in ranges for found in read_documents(file, layout or DocumentFormat(), a, b)]


def _texts(found: list[Document | Problem]) -> list[str]:
    return [document.text for document in found if isinstance(document, Document)]


def _problems(found: list[Document | Problem]) -> list[tuple[str, int]]:
    return [(problem.reason, problem.line) for problem in found if isinstance(problem, Problem)]


def _write_parquet(path: Path, texts: object, *, name: str = "text", rows: int = 7, **options: object) -> Path:
    column = texts if isinstance(texts, pa.Array) else pa.array(texts, pa.string())
    table = pa.table({"id": pa.array(range(len(column))), name: column})
    pq.write_table(table, path, row_group_size=rows, **options)
    return path


# Zstandard


def test_zst_holds_what_the_plain_file_holds(tmp_path: Path) -> None:
    lines = write_jsonl(tmp_path / "a.jsonl", make_texts(300) + _STRANGE)
    (tmp_path / "a.txt").write_text("\n\n".join(make_texts(50)))
    for name in ("a.jsonl", "a.txt"):
        data = (tmp_path / name).read_bytes()
        (tmp_path / f"{name}.zst").write_bytes(zstandard.ZstdCompressor(write_checksum=True).compress(data))
        # Written by another library, which knows neither the size nor a checksum.
        with pa.CompressedOutputStream(str(tmp_path / f"stream.{name}.zst"), "zstd") as stream:
            stream.write(data)
    for split_text in ("file", "paragraph", "line"):
        layout = DocumentFormat(split_text=split_text)  # type: ignore[arg-type]
        for name in ("a.jsonl", "a.txt"):
            plain = _texts(_read(tmp_path / name, layout))
            assert len(plain) == len(_read(tmp_path / name, layout))
            assert _read(tmp_path / f"{name}.zst", layout) == [Document(text) for text in plain]
            assert _read(tmp_path / f"stream.{name}.zst", layout) == [Document(text) for text in plain]
    assert len(_texts(_read(tmp_path / "a.jsonl.zst"))) == 308
    assert lines.exists()


def test_zst_of_many_frames_skippable_ones_and_a_large_window(tmp_path: Path) -> None:
    data = (write_jsonl(tmp_path / "a", make_texts(300))).read_bytes()
    far = zstandard.ZstdCompressionParameters.from_level(3, window_log=28, enable_ldm=True)
    compressors = [zstandard.ZstdCompressor(), zstandard.ZstdCompressor(compression_params=far)]
    skippable = struct.pack("<II", 0x184D2A50, 5) + b"index"
    frames = [compressors[i % 2].compressobj() for i in range(10)]
    cut = [data[len(data) * i // 10 : len(data) * (i + 1) // 10] for i in range(10)]
    packed = [frame.compress(part) + frame.flush() for frame, part in zip(frames, cut, strict=True)]
    (tmp_path / "a.jsonl.zst").write_bytes(skippable + skippable.join(packed) + skippable)
    assert _texts(_read(tmp_path / "a.jsonl.zst")) == make_texts(300)


def test_every_cut_of_a_zst_is_told(tmp_path: Path) -> None:
    """At any byte but the end of a frame: the library's own reader takes a cut file for a whole one."""
    texts = make_texts(40)
    packer = zstandard.ZstdCompressor()
    lines = [json.dumps({"text": text}).encode() + b"\n" for text in texts]
    first = packer.compress(b"".join(lines[:20]))
    whole = first + packer.compress(b"".join(lines[20:]))
    path = tmp_path / "a.jsonl.zst"
    for size in sorted({*range(1, len(whole), 5), len(first), len(whole) - 1}):
        path.write_bytes(whole[:size])
        found = _read(path)
        if size == len(first):  # such a cut cannot be seen
            assert _texts(found) == texts[:20]
            continue
        assert [reason for reason, _ in _problems(found)] in (["damaged zst"], ["malformed JSON", "damaged zst"])
        assert _texts(found) == texts[: len(_texts(found))]


def test_damage_inside_a_zst_is_told_by_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.zst"
    lines = write_jsonl(tmp_path / "a", make_texts(20_000, longest=20)).read_bytes()
    whole = bytearray(zstandard.ZstdCompressor(write_checksum=True).compress(lines))
    whole[-1] ^= 1  # the checksum
    path.write_bytes(whole)
    ((reason, line),) = _problems(_read(path))  # of the chunk that the checksum ends, nothing is handed out
    assert reason == "damaged zst"
    assert 10_000 < line < 20_000
    middle = len(whole) // 2
    path.write_bytes(whole[:middle] + bytes(100) + whole[middle + 100 :])
    found = _read(path)
    ((reason, line),) = _problems(found)
    assert (reason, line) == ("damaged zst", len(found) - 1)
    assert line > 2000
    path.write_bytes(b"not Zstandard at all")
    (problem,) = _read(path)
    assert isinstance(problem, Problem)
    assert str(problem.error()).startswith(f"{path}:1: damaged zst")


# Parquet


@settings(max_examples=60, deadline=None)
@given(count=st.integers(1, 40), rows=st.integers(1, 12), cuts=st.lists(st.integers(0, 6000), max_size=6))
def test_ranges_that_tile_a_parquet_file_yield_its_rows_once(
    tmp_path_factory: pytest.TempPathFactory, count: int, rows: int, cuts: list[int]
) -> None:
    path = tmp_path_factory.mktemp("tiled") / "a.parquet"
    texts = make_texts(count, seed=count)
    _write_parquet(path, texts, rows=rows)
    assert _texts(_read(path, None, [cut for cut in cuts if cut < path.stat().st_size])) == texts


@pytest.mark.parametrize("compression", ["none", "snappy", "zstd", "gzip"])
@pytest.mark.parametrize(
    "column_type", ["string", "large_string", "binary", "large_binary", "dictionary<values=string, indices=int32>"]
)
def test_columns_of_text_of_any_type_are_read(tmp_path: Path, column_type: str, compression: str) -> None:
    texts = make_texts(30) + _STRANGE
    if column_type.startswith("dictionary"):
        column = pa.array(texts).dictionary_encode()
    else:
        column = pa.array([text.encode() for text in texts], pa.binary()).cast(getattr(pa, column_type)())
    path = _write_parquet(tmp_path / "a.parquet", column, name="my.body", compression=compression)
    assert str(pq.read_schema(path).field("my.body").type).startswith(column_type.split("<")[0])
    assert _texts(_read(path, DocumentFormat(text_field="my.body"))) == texts


def test_a_bad_row_is_told_by_its_number_in_the_file(tmp_path: Path) -> None:
    rows = [b"good"] * 20
    rows[3], rows[10], rows[11], rows[15] = None, b"caf\xe9", b" \n", b"\xed\xa0\x80"  # type: ignore[call-overload]
    column = pa.Array.from_buffers(pa.string(), 20, pa.array(rows, pa.binary()).buffers())  # unchecked, as some write
    path = _write_parquet(tmp_path / "a.parquet", column, rows=4)
    wanted = [("field is not a string", 4), ("invalid UTF-8", 11), ("empty document", 12), ("invalid UTF-8", 16)]
    for cuts in ([], [path.stat().st_size // 2]):
        found = _read(path, None, cuts)
        assert _problems(found) == wanted
        assert len(found) == 20
    problem = found[3]
    assert isinstance(problem, Problem)
    assert str(problem.error()) == f"{path}: row 4: field is not a string: 'text' is null"


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("body", "row 1: missing field: 'body' is not one of the columns 'id', 'text'"),
        ("id", "row 1: field is not a string: 'id' is a int64"),
    ],
)
def test_a_column_that_is_no_text_is_told_and_every_row_counted(tmp_path: Path, field: str, message: str) -> None:
    path = _write_parquet(tmp_path / "a.parquet", make_texts(30))
    found = _read(path, DocumentFormat(text_field=field), [100, 1000])
    assert [line for _, line in _problems(found)] == list(range(1, 31))
    assert isinstance(found[0], Problem)
    assert message in str(found[0].error())


def test_damaged_parquet_is_told_and_whole_row_groups_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    texts = make_texts(40, longest=200)
    _write_parquet(path, texts, rows=10, compression="snappy", use_dictionary=False, write_page_checksum=True)
    whole = path.read_bytes()
    column = pq.ParquetFile(path).metadata.row_group(2).column(1)
    at = column.data_page_offset + column.total_compressed_size // 2
    path.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
    found = _read(path, None, [len(whole) // 3])
    assert _texts(found) == texts[:20] + texts[30:]
    assert _problems(found) == [("damaged parquet", row) for row in range(21, 31)]
    for damaged in (whole[: len(whole) // 2], whole[:-1], b"PAR1", b"no parquet", whole[:-8] + b"\xff" * 4 + b"PAR1"):
        path.write_bytes(damaged)
        assert _problems(_read(path, None, [len(damaged) // 2])) == [("damaged parquet", 1)]
    _write_parquet(path, [])
    assert _problems(_read(path)) == [("empty file", 1)]


# The token store


@pytest.fixture
def inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Inputs of every kind, in the current directory, and units so small that there are many."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tlm_jax.data.units._MIN_UNIT_BYTES", 4096)
    _write_parquet(tmp_path / "a.parquet", make_texts(300, seed=1))
    data = write_jsonl(tmp_path / "b", make_texts(300, seed=2)).read_bytes()
    (tmp_path / "b.jsonl.zst").write_bytes(zstandard.ZstdCompressor().compress(data))
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "c.txt.zst").write_bytes(zstandard.ZstdCompressor().compress("\n\n".join(_STRANGE).encode()))
    _write_parquet(tmp_path / "d" / "d.parquet", make_texts(40, seed=3), rows=40)
    return ["a.parquet", "b.jsonl.zst", "d"]


def _hashes(directory: Path) -> dict[str, str]:
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_the_store_is_the_same_bytes_for_any_worker_count(inputs: list[str]) -> None:
    layout = DocumentFormat(split_text="paragraph")
    stores = [
        prepare(inputs, ByteTokenizer(), f"store{workers}", Settings(layout, holdout=0.1), workers=workers)
        for workers in (1, 2, 3)
    ]
    assert len(stores[0].manifest["splits"]["train"]["shards"]) > 5
    assert _hashes(stores[0].path) == _hashes(stores[1].path) == _hashes(stores[2].path)
    found = [text for name in ("train", "validation") for text in split_texts(stores[0].split(name), ByteTokenizer())]
    paragraphs = [document.text for document in _read(Path("d/c.txt.zst"), layout) if isinstance(document, Document)]
    wanted = [*make_texts(300, seed=1), *make_texts(300, seed=2), *paragraphs, *make_texts(40, seed=3)]
    assert sorted(found) == sorted(wanted)


def test_interrupted_it_goes_on_to_the_same_bytes(inputs: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    whole = prepare(inputs, ByteTokenizer(), "whole", workers=1)
    done: list[int] = []

    def until_killed(function, plan, jobs, workers):  # type: ignore[no-untyped-def]
        for job in jobs[:4]:
            done.append(job)
            yield function(plan, job)
        raise KeyboardInterrupt

    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr("tlm_jax.data.prepare.run_jobs", until_killed)
            with pytest.raises(KeyboardInterrupt):
                prepare(inputs, ByteTokenizer(), "resumed")
    assert done == list(range(8))
    assert _hashes(prepare(inputs, ByteTokenizer(), "resumed", workers=1).path) == _hashes(whole.path)


def test_counts_in_are_counts_out_and_counted_drops(inputs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    column = pa.array([*make_texts(30, seed=4), None, "", *make_texts(5, seed=5)], pa.string())
    _write_parquet(Path("e.parquet"), column)
    _write_parquet(Path("other.parquet"), make_texts(50), name="body")
    Path("cut.parquet").write_bytes(Path("a.parquet").read_bytes()[:-100])
    Path("cut.jsonl.zst").write_bytes(Path("b.jsonl.zst").read_bytes()[:-3])
    more = ["e.parquet", "other.parquet", "cut.parquet", "cut.jsonl.zst"]
    command = ["prepare", *inputs, *more, "--tokenizer=byte", "--output=store", "--workers=2"]
    assert cli.main(command) == 2
    error = capsys.readouterr().err
    assert "e.parquet: row 31: field is not a string: 'text' is null; mend the input, or skip such" in error
    assert error.count("\n") == 1
    assert cli.main([*command, "--on-error=skip"]) == 0
    out = capsys.readouterr().out
    assert "other.parquet: row 1: missing field: 'text' is not one of the columns 'id', 'body'" in out
    manifest = TokenStore.open("store").manifest
    skipped = manifest["skipped"]
    assert {key: skipped[key] for key in ("empty document", "field is not a string", "missing field")} == {
        "empty document": 1,
        "field is not a string": 1,
        "missing field": 50,
    }
    assert skipped["damaged parquet"] == skipped["damaged zst"] == 1
    read_from_cut = len(_texts(_read(Path("cut.jsonl.zst"))))
    documents = sum(split["documents"] for split in manifest["splits"].values())
    assert documents == 300 + 300 + 1 + 40 + 35 + read_from_cut


@pytest.mark.parametrize(("name", "library"), [("a.parquet", "pyarrow"), ("a.jsonl.zst", "zstandard")])
def test_a_missing_library_is_told_before_any_work(
    tmp_path: Path, name: str, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / name).write_bytes(b"x")
    for module in [module for module in sys.modules if module.partition(".")[0] == library]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(UserError, match=rf"{name}: .* needs the library {library}; .*pip install \"tlm_jax\[formats\]"):
        find_inputs([str(tmp_path)])
