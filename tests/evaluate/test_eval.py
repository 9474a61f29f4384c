"""`tlm eval`: its numbers against a slow reference, from the checkpoint alone, and what it says of bad input."""

from __future__ import annotations

import itertools
import json
import math
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tlm_jax import cli
from tlm_jax.data.store import TokenStore
from tlm_jax.data.tokenizer import ByteTokenizer
from tlm_jax.evaluate.baselines import gzip_bits_per_byte, smoothed_bigram_bits_per_byte
from tlm_jax.evaluate.perplexity import held_out_metrics
from tlm_jax.evaluate.restored import load_model, read_checkpoint

T = 48


def evaluate(capsys, *arguments):
    assert cli.main(["eval", *map(str, arguments)]) == 0
    return json.loads(capsys.readouterr().out)


def complaint(capsys, *arguments):
    assert cli.main(["eval", *map(str, arguments)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    *progress, error = captured.err.splitlines()
    assert all(line.startswith("evaluating") for line in progress)
    assert error.startswith("tlm eval: error: ")
    return error


@pytest.fixture(scope="module")
def reference(run):
    """Summed nats and tokens: each piece of a document in each window by itself, its logits whole."""

    @jax.jit
    def nats(inputs_T, targets_T, length):
        model = run.model.bind(run.parameters)
        positions = jnp.arange(T)[None]
        hidden, _ = model.hidden(inputs_T[None], model.at(positions, jnp.ones_like(positions)))
        log_probabilities = jax.nn.log_softmax(model.logits(hidden)[0])
        picked = jnp.take_along_axis(log_probabilities, targets_T[:, None], 1)[:, 0]
        return -jnp.sum(jnp.where(jnp.arange(T) < length, picked, 0))

    split, bos = run.store.split("validation"), run.store.tokenizer().bos_id
    tokens = split.read(0, split.num_tokens).astype(np.int32)
    total = count = 0
    for start in range(0, len(tokens) - 1, T):
        window = tokens[start : start + T + 1]
        borders = [0, *[i for i in range(1, len(window)) if window[i] == bos], len(window)]
        for first, stop in itertools.pairwise(borders):
            piece = window[first:stop]
            length = len(piece) - 1
            pad = (0, T - length)
            total += float(nats(np.pad(piece[:-1], pad), np.pad(piece[1:], pad), length))
            count += length
    return total, count


def test_metrics_equal_the_reference_on_any_batch_size(run, reference, capsys):
    split = run.store.split("validation")
    nats, count = reference
    assert count == split.num_tokens - split.num_documents
    results = [evaluate(capsys, f"--checkpoint={run.workdir}", f"--batch-size={size}") for size in (8, 24)]
    for result in results:
        assert result["tokens"] == count
        assert result["bytes"] == split.num_bytes
        assert result["loss"] == pytest.approx(nats / count, rel=1e-5)
        assert result["perplexity"] == pytest.approx(math.exp(nats / count), rel=1e-5)
        assert result["bits_per_byte"] == pytest.approx(nats / math.log(2) / split.num_bytes, rel=1e-5)
        assert (result["step"], result["data"], result["dtype"]) == (30, str(run.store.path), "float32")
        assert (result["weights"], result["data_fingerprint"]) == ("params", run.store.fingerprint)


def test_the_checkpoint_directory_and_files_of_text_suffice(run, reference, capsys, tmp_path, monkeypatch):
    moved, elsewhere = tmp_path / "30", tmp_path / "elsewhere"
    shutil.copytree(run.workdir / "checkpoints" / "30", moved)
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    # The run's store does not open any more.
    monkeypatch.setattr(TokenStore, "open", staticmethod(lambda *_, **__: pytest.fail("opened a store")))
    output = tmp_path / "result.json"
    result = evaluate(capsys, f"--checkpoint={moved}", f"--data={run.held_out_file}", f"--output={output}")
    nats, count = reference
    assert result["tokens"] == count
    assert result["loss"] == pytest.approx(nats / count, rel=1e-5)
    assert json.loads(output.read_text()) == result


def test_several_files_and_another_step(run, capsys, tmp_path):
    (tmp_path / "a.txt").write_text("one whale")
    (tmp_path / "b.txt").write_text("東京 ship")
    files = [tmp_path / "a.txt", tmp_path / "b.txt"]
    result = evaluate(capsys, "--checkpoint", run.workdir, "--step=20", "--data", *files)
    assert (result["bytes"], result["tokens"], result["step"]) == (9 + 11, 9 + 11 + 2, 20)
    again = evaluate(capsys, "--checkpoint", run.workdir, f"--data={files[0]}", f"--data={files[1]}")
    assert again["tokens"] == result["tokens"]
    assert again["loss"] != result["loss"]


def test_baselines_are_of_the_same_text(run, capsys):
    texts = [json.loads(line)["text"] for line in run.held_out_file.read_text().splitlines()]
    expected = {
        "gzip_bits_per_byte": gzip_bits_per_byte(texts),
        "bigram_bits_per_byte": smoothed_bigram_bits_per_byte(run.store),
    }
    for data in ([], [f"--data={run.store.path}"], [f"--data={run.held_out_file}"]):
        result = evaluate(capsys, f"--checkpoint={run.workdir}", "--baselines", *data)
        assert result["baselines"] == pytest.approx(expected, rel=1e-12)


def test_bfloat16_rounds_the_weights_but_not_the_norms(run, capsys):
    exact = evaluate(capsys, f"--checkpoint={run.workdir}")
    rounded = evaluate(capsys, f"--checkpoint={run.workdir}", "--dtype=bfloat16")
    assert rounded["dtype"] == "bfloat16"
    assert rounded["loss"] == pytest.approx(exact["loss"], rel=0.02)
    assert rounded["loss"] != exact["loss"]
    _, parameters, _ = load_model(read_checkpoint(run.workdir, dtype="bfloat16"), axis="fsdp")
    dtypes = {
        jax.tree_util.keystr(path).split("'")[-2]: leaf.dtype
        for path, leaf in jax.tree_util.tree_leaves_with_path(parameters)
    }
    assert dtypes.pop("scale") == jnp.float32
    assert set(dtypes.values()) == {jnp.dtype(jnp.bfloat16)}


def test_progress_counts_up_to_all_batches(run):
    source = read_checkpoint(run.workdir)
    model, parameters, mesh = load_model(source, axis="data")
    seen = []
    held_out_metrics(
        model,
        parameters,
        mesh,
        run.store,
        sequence_length=T,
        batch_size=8,
        on_progress=lambda done, total: seen.append((done, total)),
    )
    windows = -(-(run.store.split("validation").num_tokens - 1) // T)
    total = -(-windows // 8)
    assert total > 3
    assert seen == [(done, total) for done in range(1, total + 1)]


def test_bad_input_is_one_line(run, capsys, tmp_path, monkeypatch):
    checkpoint = f"--checkpoint={run.workdir}"
    assert "no such directory" in complaint(capsys, f"--checkpoint={tmp_path / 'none'}")
    assert "no complete checkpoint" in complaint(capsys, f"--checkpoint={tmp_path}")
    assert "the complete ones are 20, 30" in complaint(capsys, checkpoint, "--step=25")
    assert "unknown argument '--config.seed=1'" in complaint(capsys, checkpoint, "--config.seed=1")
    assert "none.txt: no such file" in complaint(capsys, checkpoint, f"--data={tmp_path / 'none.txt'}")
    assert "use a multiple of 8" in complaint(capsys, checkpoint, "--batch-size=12")
    for size in (-8, 0):
        assert f"--batch-size: must be at least 1, not {size}" in complaint(capsys, checkpoint, f"--batch-size={size}")
    assert "the checkpoint's path is empty" in complaint(capsys, "--checkpoint=")
    assert "no checkpoint has a finite validation/loss" in complaint(capsys, checkpoint, "--step=best")
    both = complaint(capsys, checkpoint, "--data", run.store.path, run.held_out_file)
    assert "give it alone" in both
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"text": "x"}\n{"title": "y"}\n')
    assert "broken.jsonl:2: missing field" in complaint(capsys, checkpoint, f"--data={broken}")
    assert "cannot be written" in complaint(
        capsys, checkpoint, f"--data={run.held_out_file}", f"--output={tmp_path / 'no' / 'x.json'}"
    )


def test_a_store_that_is_gone_or_of_another_tokenizer(run, capsys, tmp_path, monkeypatch):
    checkpoint = f"--checkpoint={run.workdir}"
    hidden = run.store.path.with_name("hidden")
    run.store.path.rename(hidden)
    try:
        assert "give --data=STORE, or files" in complaint(capsys, checkpoint)
    finally:
        hidden.rename(run.store.path)

    class Other(ByteTokenizer):
        def to_bytes(self):
            return b"another"

    monkeypatch.setattr(TokenStore, "tokenizer", lambda self: Other())
    assert "another tokenizer" in complaint(capsys, checkpoint, f"--data={run.store.path}")
