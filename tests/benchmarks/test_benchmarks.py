"""Benchmarks are launched by hand; here only that each starts, and that workers take turns and are told apart."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
COMMANDS = [path for path in sorted(BENCHMARKS.glob("*.py")) if "__main__" in path.read_text()]

WORKER = """
import sys
from serving import Session

session = Session()
print("loading")
for _ in session.steps(lambda: None):
    if session.settings["fails"]:
        sys.exit("out of memory")
    print("a step")
"""


@pytest.fixture(autouse=True)
def _import_path(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.syspath_prepend(str(BENCHMARKS / "peers"))


@pytest.mark.parametrize("path", COMMANDS, ids=lambda path: path.stem)
def test_every_benchmark_starts_and_says_what_it_measures(path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(path), "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(path), run_name="__main__")
    assert ended.value.code == 0
    assert runpy.run_path(str(path))["__doc__"].splitlines()[0] in " ".join(capsys.readouterr().out.split())


@pytest.fixture
def worker(tmp_path):
    from measuring import Worker

    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    return lambda fails=False: Worker(sys.executable, str(script), {"fails": fails}, tmp_path / "log")


def test_workers_take_the_steps_they_are_told(worker, tmp_path):
    from measuring import alternate

    found = alternate({"ours": worker, "theirs": worker}, steps=3, rounds=2)
    assert {name: len(measured) for name, measured in found.items()} == {"ours": 2, "theirs": 2}
    assert all(m.seconds > 0 for measured in found.values() for m in measured)
    assert (tmp_path / "log").read_text().count("a step") == 2 * (2 + 2 * 3)  # warm-up and two rounds of three, each


def test_a_worker_that_fails_shows_its_last_words(worker):
    with pytest.raises(SystemExit, match="out of memory"):
        worker(fails=True)


def test_the_savings_of_a_x_are_those_of_the_paper():
    """77.8 % of the FLOPs and 85.1 % of the width, to what the rounding of the printed losses allows."""
    import x_shaped_savings as script

    flops = [script.savings(costs) for costs in (script.PRINTED_FLOPS, script.counted_flops())]
    assert [round(found["fitted"], 3) for found in flops] == [0.780, 0.776]
    assert [round(found["actual"], 3) for found in flops] == [0.744, 0.744]
    assert [round(flops[1][f"{family} exponent"], 4) for family in ("uniform", "x")] == [0.0498, 0.0503]
    least, most = script.rounding(script.counted_flops())
    assert least < 0.778 < most
    width = script.savings(script.PRINTED_WIDTHS)
    assert round(width["fitted"], 3) == 0.851
    assert round(width["actual"], 3) == 0.863
    assert [round(width[f"{family} exponent"], 3) for family in ("uniform", "x")] == [0.246, 0.252]


@pytest.mark.slow
def test_our_own_side_of_the_training_benchmark_runs(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["training.py", "--tiny", "--rounds=1", "--steps=1"])
    runpy.run_path(str(BENCHMARKS / "training.py"), run_name="__main__")
    assert "tokens/s" in capsys.readouterr().out
