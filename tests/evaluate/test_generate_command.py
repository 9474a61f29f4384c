"""`tlm generate`: what it prints and writes, and what it says of bad input."""

from __future__ import annotations

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tlm_jax import cli
from tlm_jax.data.tokenizer import ByteTokenizer
from tlm_jax.evaluate import eval_command, generate_command


def generate(*arguments):
    return cli.main(["generate", *map(str, arguments)])


@pytest.fixture(scope="module")
def greedy(run):
    """The greedy continuation of "a whale" by 8 tokens, by the uncached forward."""
    tokenizer = ByteTokenizer()
    tokens = [tokenizer.bos_id, *b"a whale"]

    @jax.jit
    def logits(tokens_T, length):
        model = run.model.bind(run.parameters)
        positions = jnp.arange(tokens_T.size)[None]
        hidden, _ = model.hidden(tokens_T[None], model.at(positions, jnp.ones_like(positions)))
        return model.logits(hidden)[0, length - 1, : tokenizer.vocab_size].at[jnp.array([256, 258])].set(-jnp.inf)

    for _ in range(8):
        tokens.append(int(logits(np.pad(tokens, (0, 16 - len(tokens))), len(tokens)).argmax()))
    return tokenizer.decode(tokens[8:])


def test_text_on_standard_output(run, greedy, capsys):
    asked = (f"--checkpoint={run.workdir}", "--temperature=0", "--max-new-tokens=8")
    assert generate(*asked, "--prompt=a whale") == 0
    assert capsys.readouterr().out == f"a whale{greedy}\n"
    assert generate(*asked, "--prompt=a whale", "--prompt=a whale") == 0
    assert capsys.readouterr().out == f"a whale{greedy}\n{'-' * 80}\na whale{greedy}\n"


def test_json_lines_in_a_file(run, greedy, capsys, tmp_path):
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    prompts.write_text('{"prompt": "two\\nlines"}\n{"prompt": ""}\n')
    asked = (f"--checkpoint={run.workdir}", "--prompt=a whale", f"--prompts-file={prompts}", f"--output={output}")
    assert generate(*asked, "--temperature=0", "--max-new-tokens=8") == 0
    captured = capsys.readouterr()
    assert captured.out == ""
    records = [json.loads(line) for line in output.read_text().splitlines()]
    assert [record["prompt"] for record in records] == ["a whale", "two\nlines", ""]
    assert records[0]["completion"] == greedy
    assert {record["step"] for record in records} == {30}
    (each,) = {record["kv_cache_bytes"] for record in records}
    assert each == run.model.profile.kv_cache_bytes(16 + 8, bytes_per_value=4)  # prompts take a block of 16
    told = r"key/value cache: ([\d,]+) bytes for (\d+) prompts of up to 24 tokens, new ones included"
    total, rows = re.search(told, captured.err).groups()
    assert int(total.replace(",", "")) == int(rows) * each
    assert all(record["finish_reason"] in ("length", "end") for record in records)

    def draw(seed):
        assert generate(*asked, "--max-new-tokens=8", "--top-k=50", "--top-p=0.9", f"--seed={seed}") == 0
        return output.read_text()

    first = draw(1)
    assert draw(1) == first
    assert draw(2) != first.replace('"seed": 1', '"seed": 2')


def test_plain_prompts_one_a_line_and_a_json_list(run, capsys, tmp_path):
    prompts, output = tmp_path / "prompts.txt", tmp_path / "out.json"
    prompts.write_text("one\ntwo\n")
    assert (
        generate(f"--checkpoint={run.workdir}", f"--prompts-file={prompts}", f"--output={output}", "--max-new-tokens=1")
        == 0
    )
    assert [record["prompt"] for record in json.loads(output.read_text())] == ["one", "two"]


@pytest.mark.parametrize("command", [generate_command, eval_command])
def test_no_kernel_is_told_before_weights_are_loaded(run, capsys, monkeypatch, command):
    read = command.read_checkpoint

    def on_a_gpu(*arguments):
        source = read(*arguments)
        settings = dataclasses.replace(source.settings, platform="gpu", attention_soft_cap=5.0)
        return dataclasses.replace(source, settings=settings)

    monkeypatch.setattr(command, "read_checkpoint", on_a_gpu)
    monkeypatch.setattr(command, "load_model", lambda *_, **__: pytest.fail("weights were loaded"))
    name = command.__name__.split(".")[-1].removesuffix("_command")
    assert cli.main([name, f"--checkpoint={run.workdir}"]) == 2
    assert "pallas has no soft_cap" in capsys.readouterr().err


def test_bad_input_is_one_line(run, capsys, tmp_path):
    def complaint(*arguments):
        assert generate(*arguments) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        (line,) = captured.err.splitlines()
        assert line.startswith("tlm generate: error: ")
        return line

    checkpoint = f"--checkpoint={run.workdir}"
    assert "no such directory" in complaint(f"--checkpoint={tmp_path / 'none'}")
    assert "unknown argument" in complaint(checkpoint, "--config.seed=1")
    together = complaint(
        checkpoint, "--top-p=1.5", "--temperature=-1", "--top-k=-2", "--stop=", "--max-new-tokens=0", "--seed=-1"
    )
    for part in ("top-p: must be above 0", "temperature", "top-k", "--stop", "--max-new-tokens", "--seed"):
        assert part in together
    assert "prompt 1: 47 tokens and 2 new ones do not fit the context of 48; at most --max-new-tokens=1 fit" in (
        complaint(checkpoint, "--prompt=" + "x" * 46, "--max-new-tokens=2")
    )
    assert "none.txt: cannot be read" in complaint(checkpoint, f"--prompts-file={tmp_path / 'none.txt'}")
    (tmp_path / "empty.txt").write_text("")
    assert "holds no prompt" in complaint(checkpoint, f"--prompts-file={tmp_path / 'empty.txt'}")
    (tmp_path / "bad.jsonl").write_text('{"prompt": "x"}\n{"text": "y"}\n')
    assert "bad.jsonl:2" in complaint(checkpoint, f"--prompts-file={tmp_path / 'bad.jsonl'}")


@pytest.mark.parametrize(("command", "module"), [("eval", eval_command), ("generate", generate_command)])
def test_memory_that_does_not_suffice_is_told_in_one_line(command, module, run, capsys, monkeypatch):
    def exhausted(*arguments, **options):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 4096 bytes.")

    monkeypatch.setattr(module, "load_model", exhausted)
    assert cli.main([command, f"--checkpoint={run.workdir}"]) == 2
    told = capsys.readouterr().err.splitlines()[-1]
    assert told.startswith(f"tlm {command}: error: cpu device ")
    assert "memory does not suffice: Out of memory allocating 4096 bytes (0.00 GiB); lower --batch-size" in told
