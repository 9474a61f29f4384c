"""Reading the dumps of a TPU compiler: texts of their form, written by hand, with sums that can be checked by eye."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from static_schedule import Stretch, estimated_cycles, kernel_cycles, stretches


def write_dumps(folder: Path, kernel: str = "gated") -> None:
    """A grid step of 10 bundles that starts, 300 that initialise, and a loop of 40, 30 of them with products."""
    depths = [("", 1, 0)] * 10 + [("LB", 2, 2)] * 1 + [("", 2, 2)] * 29 + [("", 2, 0)] * 10 + [("", 1, 0)] * 300
    lines = [f"  {i:#x} {tag}: {'>' * depth} {{ %{i} = vnop }}" for i, (tag, depth, _) in enumerate(depths)]
    (folder / f"1-{kernel}-72-final_bundles.txt").write_text("LB: loop body\n" + "\n".join(lines) + "\n")
    (folder / f"1-{kernel}-71-schedule-analysis_final_bundles.txt").write_text("unread")
    units = "== CAPACITY:\nMXU, XLU, VALU, SALU\n 2 2 4 2\n== UTILIZATION:\n"
    rows = "\n".join(f"{slots} 0 0 0" for *_, slots in depths)
    (folder / f"1-{kernel}-70-final_hlo-static-per-bundle-utilization.txt").write_text(units + rows + "\n")


def test_stretches_and_cycles(tmp_path: Path):
    write_dumps(tmp_path)
    assert stretches(tmp_path, "gated") == [Stretch(1, 10, 0), Stretch(2, 40, 60), Stretch(1, 300, 0)]
    # 3 tiles of 5 steps of 4 trips; what starts a step counts each time, what initialises once a tile.
    assert kernel_cycles(tmp_path, "gated", 3, 5, [4], tail=False) == 3 * (5 * 4 * 40 + 5 * 10 + 300)


def test_a_schedule_of_another_form_is_refused(tmp_path: Path):
    write_dumps(tmp_path)
    with pytest.raises(SystemExit, match="gated: 1 stretches with matrix products, not 2"):
        kernel_cycles(tmp_path, "gated", 3, 5, [4], tail=True)
    with pytest.raises(SystemExit, match="holds 0 dumps"):
        stretches(tmp_path, "other")


def test_estimates_are_added_up_and_no_estimate_is_dropped():
    text = '{"estimated_cycles":"12"} {"estimated_cycles":"9223372036854775807"} {"estimated_cycles":"30"}'
    assert estimated_cycles(text) == 42
