from __future__ import annotations

import os
import pty
import subprocess
import sys

import pytest

from tlm_jax import progress
from tlm_jax.progress import ProgressBar


def test_plain_lines_where_there_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "_SECONDS_BETWEEN_LINES", 0.0)
    with ProgressBar("reading", 4_000_000, unit="bytes") as shown:
        shown.advance(1_000_000)
        shown.advance(3_000_000)
    with ProgressBar("evaluating", unit="batches") as shown:
        shown.show(1, 1200)
    output = capsys.readouterr()
    assert output.err.splitlines() == [
        "reading: 25% of 4.0 MB",
        "reading: 100% of 4.0 MB",
        "evaluating: 1 of 1,200 batches",
    ]
    assert output.out == ""


def test_a_bar_on_a_terminal() -> None:
    ours, theirs = pty.openpty()
    code = "from tlm_jax.progress import ProgressBar\nwith ProgressBar('reading', 8, unit='bytes') as p: p.advance(8)"
    environment = {**os.environ, "TERM": "xterm"}
    result = subprocess.run([sys.executable, "-c", code], stderr=theirs, stdout=subprocess.PIPE, env=environment)
    os.close(theirs)
    shown = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert result.returncode == 0
    assert result.stdout == b""
    assert "reading" in shown
    assert "8/8 bytes" in shown
