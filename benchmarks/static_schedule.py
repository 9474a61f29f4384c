"""Predicted time of a TPU program from what its compiler writes down; no TPU is needed.

Two sources. XLA gives each of its own fusions an estimate of cycles. For a Pallas kernel the compiler can be told to
dump the schedule: the very long instruction words ("bundles") of each loop, of which a core issues at most one a cycle,
and the matrix unit slots in each. Neither knows of waiting for memory; that is counted apart, from the bytes moved.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

NO_ESTIMATE = 9223372036854775807
RARE = 200  # bundles: a longer stretch without matrix unit work initialises or writes out a sum, once per tile


@dataclass(frozen=True)
class Stretch:
    """Bundles in a row at one depth of loops: their number, and the matrix unit slots that they fill."""

    depth: int
    bundles: int
    matrix_slots: int


def _only(folder: Path, kernel: str, ending: str) -> Path:
    found = [p for p in folder.glob(f"*{ending}") if kernel in p.name and "pre-delay" not in p.name]
    found = [p for p in found if "schedule-analysis" not in p.name]
    if len(found) != 1:
        raise SystemExit(f"{folder} holds {len(found)} dumps {ending} of {kernel}, not one")
    return found[0]


def stretches(folder: Path, kernel: str) -> list[Stretch]:
    """The schedule of a kernel in the folder of `--xla_jf_dump_to`, as its stretches in order."""
    text = _only(folder, kernel, "-final_hlo-static-per-bundle-utilization.txt").read_text()
    slots = [int(line.split()[0]) for line in text.partition("== UTILIZATION:\n")[2].splitlines() if line[:1].isdigit()]
    pattern = re.compile(r"\s*0x[0-9a-f]+\s*(LH|LB|LE|PB|PF)?\s*:\s*(>*)")
    bundles = []
    for line in _only(folder, kernel, "-final_bundles.txt").read_text().splitlines():
        if match := pattern.match(line):
            bundles.append((match[1], len(match[2])))
    found: list[list[int]] = []
    previous = -1
    for i, (tag, depth) in enumerate(bundles):
        if depth != previous or tag == "LB":
            found.append([depth, 0, 0])
        previous = depth
        found[-1][1] += 1
        found[-1][2] += slots[i] if i < len(slots) else 0
    return [Stretch(*each) for each in found]


def kernel_cycles(folder: Path, kernel: str, outer: int, inner: int, trips: Sequence[int], *, tail: bool) -> float:
    """Bundles that one core issues for a kernel of a grid of `outer` tiles with `inner` steps each.

    Args:
      folder: of the dumps.
      kernel: name in the dumps' names.
      outer: how often sums are initialised and written out.
      inner: steps between, of which the last has its own code if `tail`.
      trips: of each loop inside a step, one after the other.
      tail: whether there is such code.
    """
    found = stretches(folder, kernel)
    working = [s for s in found if s.matrix_slots > s.bundles // 4]
    loops = len(trips)
    if len(working) != loops * (1 + tail):
        raise SystemExit(f"{kernel}: {len(working)} stretches with matrix products, not {loops * (1 + tail)}")
    rest = [s for s in found if s not in working and s.depth]
    rare = sum(s.bundles for s in rest if s.bundles > RARE)
    often = sum(s.bundles for s in rest if s.bundles <= RARE)
    whole, last = (
        sum(n * s.bundles for n, s in zip(trips, part, strict=True)) for part in (working[:loops], working[-loops:])
    )
    return outer * ((inner - 1) * whole + last + inner * often + rare)


def estimated_cycles(compiled_text: str) -> int:
    """Sum of XLA's own estimates over a program without loops."""
    found = (int(n) for n in re.findall(r'"estimated_cycles":"(\d+)"', compiled_text))
    return sum(n for n in found if n != NO_ESTIMATE)
