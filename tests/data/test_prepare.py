from __future__ import annotations

import gzip
import hashlib
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from small_texts import make_texts, write_jsonl

from tlm_jax import cli
from tlm_jax.data.documents import DocumentFormat
from tlm_jax.data.prepare import Settings, prepare
from tlm_jax.data.sentencepiece_tokenizer import SentencePieceTokenizer
from tlm_jax.data.store import TokenStore
from tlm_jax.data.tokenizer import ByteTokenizer, Tokenizer
from tlm_jax.errors import UserError

# The command with units so small that little text makes many.
_COMMAND = (
    "import sys; from tlm_jax.data import units; units._MIN_UNIT_BYTES = 4096;"
    "from tlm_jax.cli import main; sys.exit(main(sys.argv[1:]))"
)


def _files(directory: Path) -> dict[str, bytes]:
    """Every path below a directory, with the bytes of files."""
    below = sorted(directory.rglob("*"))
    return {str(p.relative_to(directory)): p.read_bytes() if p.is_file() else b"" for p in below}


@pytest.fixture
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tlm_jax.data.units._MIN_UNIT_BYTES", 4096)


@pytest.fixture
def mixed_inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Inputs of every kind, in the current directory."""
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "a.jsonl", make_texts(300, seed=1))
    (tmp_path / "b.txt").write_text("".join(make_texts(200, seed=2)))
    (tmp_path / "c.jsonl.gz").write_bytes(
        gzip.compress(write_jsonl(tmp_path / "c", make_texts(100, seed=3)).read_bytes())
    )
    (tmp_path / "d").mkdir()
    for i, text in enumerate(make_texts(30, seed=4)):
        (tmp_path / "d" / f"{i}.txt").write_text(text)
    return ["a.jsonl", "b.txt", "c.jsonl.gz", "d"]


@pytest.mark.usefixtures("small_units")
@pytest.mark.parametrize("split_text", ["file", "paragraph", "size"])
def test_the_store_is_the_same_bytes_for_any_worker_count(
    mixed_inputs: list[str], sentencepiece_tokenizer: SentencePieceTokenizer, split_text: str
) -> None:
    settings = Settings(DocumentFormat(split_text=split_text, document_bytes=500), holdout=0.1)  # type: ignore[arg-type]
    stores = [
        prepare(mixed_inputs, sentencepiece_tokenizer, f"store{workers}", settings, workers=workers)
        for workers in (1, 2, 3)
    ]
    assert len(stores[0].manifest["splits"]["train"]["shards"]) > 8
    first, *others = (_files(store.path) for store in stores)
    assert all(other == first for other in others)
    assert not any(".partial" in name or name.startswith(("units", "plan")) for name in first)
    TokenStore.open("store2", verify=True)


def test_threads_of_one_unit_keep_the_order_of_documents_and_problems(
    tmp_path: Path, sentencepiece_tokenizer: SentencePieceTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tlm_jax.data.units._BATCH_CHARACTERS", 200)
    monkeypatch.setattr("tlm_jax.data.units._AHEAD_CHARACTERS", 800)
    lines = write_jsonl(tmp_path / "a.jsonl", make_texts(300, seed=1)).read_text().splitlines()
    lines[100], lines[200] = "{", '{"text": 1}'
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    inputs, threads = [str(tmp_path / "a.jsonl")], []
    tokenize = SentencePieceTokenizer.encode_array

    def watched(self: Tokenizer, text: str) -> np.ndarray:
        threads.append(threading.get_ident())
        return tokenize(self, text)

    alone = prepare(inputs, sentencepiece_tokenizer, tmp_path / "alone", workers=1, on_error="skip")
    monkeypatch.setattr(SentencePieceTokenizer, "encode_array", watched)
    several = prepare(inputs, sentencepiece_tokenizer, tmp_path / "several", workers=3, on_error="skip")
    assert len(set(threads)) == 3
    assert _files(several.path) == _files(alone.path)
    assert [text.split(":")[1] for text in several.manifest["skipped_examples"]] == ["101", "201"]
    with pytest.raises(UserError, match="malformed JSON"):
        prepare(inputs, sentencepiece_tokenizer, tmp_path / "stopped", workers=3)


def _arguments(output: str, *more: str) -> list[str]:
    return ["prepare", "a.jsonl", "--tokenizer=byte", f"--output={output}", "--workers=2", "--holdout=0.1", *more]


def _start(directory: Path, output: str, limit: Callable[[], None] | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _COMMAND, *_arguments(output)],
        cwd=directory,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=limit,
    )


def _wait_for_units(process: subprocess.Popen[str], output: Path, count: int) -> None:
    while process.poll() is None and len(list(output.glob("units/*.json"))) < count:
        time.sleep(0.002)


@pytest.fixture(scope="module")
def many_units(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with an input of a hundred units and the store of a run that nothing disturbed."""
    directory = tmp_path_factory.mktemp("many")
    write_jsonl(directory / "a.jsonl", make_texts(3000, seed=9))
    process = _start(directory, "undisturbed")
    assert process.wait() == 0, process.communicate()
    return directory


def test_killed_again_and_again_it_ends_with_the_same_bytes(many_units: Path) -> None:
    output = many_units / "killed"
    kills = 0
    for count in (1, 15, 35, 60):
        process = _start(many_units, "killed")
        _wait_for_units(process, output, count)
        os.killpg(process.pid, signal.SIGKILL) if count != 35 else process.kill()  # at 35 the workers are left behind
        kills += process.wait() == -signal.SIGKILL
        process.communicate()
        with pytest.raises(UserError, match="not complete"):
            TokenStore.open(output)
    assert kills == 4
    process = _start(many_units, "killed")
    process.communicate()
    assert process.returncode == 0
    assert _files(output) == _files(many_units / "undisturbed")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_it_says_so_and_goes_on(many_units: Path, number: signal.Signals) -> None:
    output = many_units / number.name
    process = _start(many_units, number.name)
    _wait_for_units(process, output, 10)
    os.killpg(process.pid, number) if number == signal.SIGINT else process.send_signal(number)
    _, error = process.communicate()
    assert process.returncode == 75, error
    assert error == "tlm prepare: interrupted; the same command goes on from here\n"
    units = [path.stem for path in output.glob("units/*.json")]
    assert len(units) >= 10
    done = {path: path.stat().st_mtime_ns for unit in units for path in output.glob(f"*/{unit}.tokens")}
    process = _start(many_units, number.name)
    process.communicate()
    assert {path: path.stat().st_mtime_ns for path in done} == done
    assert _files(output) == _files(many_units / "undisturbed")


def test_a_full_disk_is_one_line_and_loses_nothing(many_units: Path) -> None:
    """The limit on file size stands for the disk: writes past it fail in the same way."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))

    output = many_units / "full"
    process = _start(many_units, "full", limit)
    _, error = process.communicate()
    assert process.returncode == 2
    assert error.startswith("tlm prepare: error: full: cannot be written: a file would be larger")
    assert "(EFBIG); finished work is kept" in error
    assert error.count("\n") == 1
    process = _start(many_units, "full")
    process.communicate()
    assert process.returncode == 0
    assert _files(output) == _files(many_units / "undisturbed")


def test_a_second_writer_is_refused(many_units: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process = _start(many_units, "busy")
    _wait_for_units(process, many_units / "busy", 1)
    monkeypatch.chdir(many_units)
    with pytest.raises(UserError, match="another process is writing"):
        prepare(["a.jsonl"], ByteTokenizer(), "busy")
    process.kill()
    process.communicate()


def test_the_split_is_by_hash_of_the_text_and_never_overlaps(tmp_path: Path) -> None:
    texts = make_texts(500, seed=6)
    path = str(write_jsonl(tmp_path / "a.jsonl", texts + texts[::-1]))
    store = prepare([path], ByteTokenizer(), tmp_path / "store", Settings(holdout=0.25))
    tokenizer, found = store.tokenizer(), {}
    for name in ("train", "validation"):
        split = store.split(name)
        stops = zip(split.documents[:-1], split.documents[1:], strict=True)
        found[name] = [tokenizer.decode(split.read(int(a), int(b))) for a, b in stops]
    assert not set(found["train"]) & set(found["validation"])
    held_out = [t for t in texts if int(hashlib.sha256(t.encode()).hexdigest()[:16], 16) / 2**64 < 0.25]
    assert sorted(found["validation"]) == sorted(held_out * 2)
    assert 60 < len(held_out) < 190


def test_a_finished_store_is_left_alone(mixed_inputs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        assert cli.main(_arguments("store")) == 0
        assert "tlm train" in capsys.readouterr().out
    before = Path("store/manifest.json").stat().st_mtime_ns
    assert cli.main([*_arguments("store"), "--holdout=0.3"]) == 2
    assert "begun with other --holdout;" in capsys.readouterr().err
    assert Path("store/manifest.json").stat().st_mtime_ns == before


def _stop_halfway(monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> None:
    """Runs a command that is interrupted before it finishes."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("tlm_jax.data.prepare._finish", interrupted)
        assert cli.main(arguments) == 75


@pytest.mark.parametrize(
    ("change", "differs"),
    [
        (lambda: ["--tokenizer=t.model"], "--tokenizer;"),
        (lambda: ["--holdout=0.2"], "--holdout;"),
        (lambda: ["--text-field=body"], "--text-field, "),
        (lambda: ["--dtype=uint32"], "--dtype;"),
        (lambda: ["b.txt"], "inputs, "),
        (lambda: os.utime("a.jsonl", ns=(5, 5)) or [], "other contents of the inputs;"),
    ],
)
def test_half_done_work_goes_on_only_as_it_was_begun(
    mixed_inputs: list[str],
    sentencepiece_model: Path,
    change: Callable[[], list[str]],
    differs: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("t.model").write_bytes(sentencepiece_model.read_bytes())
    _stop_halfway(monkeypatch, _arguments("store"))
    assert cli.main([*_arguments("store"), *change()]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "was begun with other " in error
    assert differs in error


def test_where_nothing_is_finished_the_input_may_be_mended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.jsonl").write_text('{"text": "x"}\n{"text": \n')
    assert cli.main(_arguments("store")) == 2
    assert "a.jsonl:2: malformed JSON: Expecting value at column 10;" in capsys.readouterr().err
    Path("a.jsonl").write_text('{"text": "x"}\n{"text": "y"}\n')
    assert cli.main(_arguments("store")) == 0
    assert "2 documents" in capsys.readouterr().out


@pytest.mark.usefixtures("small_units")
def test_skipped_documents_are_counted_and_told(tmp_path: Path, monkeypatch, capsys) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.chdir(tmp_path)
    lines = [json.dumps({"text": text}).encode() for text in make_texts(200, seed=7)]
    lines[150:150] = [b"{", b"{}", b'{"text": "\xff"}']
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    (tmp_path / "empty.txt").touch()
    whole = gzip.compress(lines[0] * 50)
    (tmp_path / "cut.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    command = [*_arguments("store"), "empty.txt", "cut.jsonl.gz"]
    assert cli.main(command) == 2
    assert "a.jsonl:151: malformed JSON" in capsys.readouterr().err
    assert cli.main([*command, "--on-error=skip"]) == 0  # and keeps what the first run had done
    out = capsys.readouterr().out
    manifest = TokenStore.open("store").manifest
    wanted = {"damaged gzip": 1, "empty file": 1, "invalid UTF-8": 1, "malformed JSON": 1, "missing field": 1}
    assert manifest["skipped"] == wanted
    assert sum(split["documents"] for split in manifest["splits"].values()) == 200
    for place in ("a.jsonl:151", "a.jsonl:152", "a.jsonl:153", "empty.txt:1", "cut.jsonl.gz:1"):
        assert f"{place}: " in out
    _stop_halfway(monkeypatch, [*_arguments("other"), "--on-error=skip"])
    assert cli.main(_arguments("other")) == 2  # a unit that skipped is done again where nothing may be
    assert "a.jsonl:151: malformed JSON" in capsys.readouterr().err


@pytest.mark.usefixtures("small_units")
@pytest.mark.parametrize("order", ["begun", "backwards"])
def test_the_first_problem_in_the_inputs_is_told_whichever_is_found_first(
    tmp_path: Path, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    lines = [json.dumps({"text": text}) for text in make_texts(400, seed=8)]
    for number in (90, 100, 200, 300):
        lines[number] = "{"
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    if order == "backwards":
        monkeypatch.setattr(
            "tlm_jax.data.prepare.run_jobs",
            lambda function, plan, jobs, workers: (function(plan, job) for job in reversed(jobs)),
        )
    with pytest.raises(UserError, match=r"a\.jsonl:91: malformed JSON"):
        prepare(["a.jsonl"], ByteTokenizer(), "store", workers=2)


class _WideTokenizer(ByteTokenizer):
    vocab_size = 70_000


def test_ids_are_stored_in_the_narrowest_type_that_holds_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tlm_jax.data.units._tokenizer", lambda *_: _WideTokenizer())
    monkeypatch.setattr("tlm_jax.data.prepare.tokenizer_from_bytes", lambda *_: _WideTokenizer())
    path = str(write_jsonl(tmp_path / "a.jsonl", ["ab"]))
    stores: dict[str, Tokenizer] = {"uint16": ByteTokenizer(), "uint32": _WideTokenizer()}
    for dtype, tokenizer in stores.items():
        store = prepare([path], tokenizer, tmp_path / dtype, Settings(holdout=0.0), workers=1)
        assert store.split("train").read(0, 4).dtype.name == dtype
        assert store.split("train").read(0, 4).tolist() == [256, 97, 98, 257]
    with pytest.raises(UserError, match="a vocabulary of 70000 does not fit in uint16"):
        prepare([path], _WideTokenizer(), tmp_path / "narrow", Settings(dtype="uint16"))


def test_a_tokenizer_that_loses_text_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Lossy(ByteTokenizer):
        def encode_array(self, text):  # type: ignore[no-untyped-def]
            return super().encode_array(text)[1:]

    monkeypatch.setattr("tlm_jax.data.units._tokenizer", lambda *_: Lossy())
    with pytest.raises(UserError, match="does not stand for all"):
        prepare([str(write_jsonl(tmp_path / "a.jsonl", ["ab"]))], Lossy(), tmp_path / "store", workers=1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["absent.jsonl"], "absent.jsonl: no such file"),
        (["bad.jsonl"], "bad.jsonl:2: malformed JSON"),
        (["field.jsonl"], "field.jsonl:1: missing field: 'text'"),
        (["type.jsonl"], "type.jsonl:1: field is not a string: 'text' is a int"),
        (["latin.txt"], "latin.txt:2: invalid UTF-8"),
        (["empty.txt"], "empty.txt:1: empty file; mend the input, or skip such with --on-error=skip"),
        (["blank.txt"], "blank.txt:1: empty document"),
        (["empty.txt", "--on-error=skip"], "the inputs hold no document"),
        (["cut.txt.gz"], "cut.txt.gz:1: damaged gzip"),
        (["a.jsonl", "a.jsonl"], "given twice"),
        (["a.jsonl", "--holdout=1.0"], "--holdout"),
        (["a.jsonl", "--tokenizer=absent.model"], "absent.model: no such tokenizer"),
        (["a.jsonl", "--tokenizer=a.jsonl"], "a.jsonl: not a SentencePiece model"),
        (["a.jsonl", "--output=full"], "full: the directory is not empty"),
        (["a.jsonl", "--output=a.jsonl"], "a.jsonl: cannot be written: File exists"),
        (["a.jsonl", "--workers=-1"], "--workers"),
        (["a.jsonl", "--document-bytes=0"], "--document-bytes"),
        (["a.jsonl", "--config.seed=1"], "unknown argument '--config.seed=1'"),
    ],
)
def test_command_errors_are_one_line(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "a.jsonl", make_texts(5))
    Path("bad.jsonl").write_text('{"text": "x"}\n{"text": \n')
    Path("field.jsonl").write_text('{"body": "x"}\n')
    Path("type.jsonl").write_text('{"text": 5}\n')
    Path("latin.txt").write_bytes(b"ok\ncaf\xe9\n")
    Path("empty.txt").touch()
    Path("blank.txt").write_text("\n \n")
    Path("cut.txt.gz").write_bytes(gzip.compress(b"x" * 1000)[:-4])
    Path("full").mkdir()
    Path("full/other").touch()
    assert cli.main(["prepare", "--tokenizer=byte", "--output=store", *arguments]) == 2
    error = capfd.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not Path("store/manifest.json").exists()


@pytest.mark.parametrize(
    ("name", "arguments", "says", "then"),
    [
        ("a.txt", ["--holdout=0"], "a larger --holdout, or with --split-text=line", "--config.data.mixture=(("),
        ("a.txt", ["--holdout=0", "--split-text=line"], "a larger --holdout, or with more documents", "OTHER"),
        ("a.jsonl", ["--holdout=0"], "a larger --holdout, or with more documents", "after the mend above"),
        ("a.jsonl", ["--holdout=0.9999999"], "a smaller --holdout", "tlm eval --checkpoint=DIR --data=s"),
        ("a.jsonl", ["--holdout=0.5"], "", "next:\n  tlm train --config=CONFIG --workdir=DIR --config.data.store=s"),
    ],
)
def test_the_next_command_is_one_that_the_store_can_serve(name, arguments, says, then, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text = "".join(json.dumps({"text": f"document {i}"}) + "\n" for i in range(20))
    (tmp_path / name).write_text(text)
    assert cli.main(["prepare", name, "--tokenizer=byte", "--output=s", "--workers=1", *arguments]) == 0
    out = capsys.readouterr().out
    assert says in out
    assert then in out
    assert ("for validation: prepare again" in out) == bool(says)
