"""The compute and width that a × saves at equal loss, recomputed from the table of Variable-Width Transformers.

    python benchmarks/x_shaped_savings.py

Nothing is trained. To the four dense models of each family a line is fitted, log loss against log cost, and both lines
are read at the loss of the uniform 2B model: the quotient is what the × needs of the uniform model's cost (arXiv
2606.18246, table 2 and the text beside it: 77.8 % of the FLOPs, 85.1 % of the mean width). Cost is training FLOPs, as
printed, to two decimals, and as `tlm profile` counts them for configs/x_shaped; or the mean width. The paper's figures
come out against the uniform family's line; against the 2B model itself, which lies off that line, they are others, and
both are printed. "rounding" is the range that the losses allow, which are printed to three decimals.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path

import numpy as np

from tlm_jax.capacity import Profile, profile_from_config
from tlm_jax.capacity.table import aligned
from tlm_jax.config import load_config

CONFIGS = Path(__file__).resolve().parents[1] / "configs" / "x_shaped"
SIZES = ("200m", "500m", "1b", "2b")
# Table 2: uniform and ×.
LOSSES = np.array([[3.452, 3.138, 2.926, 2.751], [3.430, 3.099, 2.890, 2.726]])
PRINTED_FLOPS = np.array([[0.18, 1.11, 4.52, 16.92], [0.17, 1.07, 4.41, 16.49]])  # PFLOP/s-days
PRINTED_WIDTHS = np.array([[640, 960, 1280, 1600], [576, 855, 1145, 1426]])  # means
PAPER = {"FLOPs": 0.778, "mean width": 0.851}


def counted_flops() -> np.ndarray:
    """PFLOP/s-days of the eight trainings [family, size], without causal halving, as the paper counts."""
    overrides = (["--config.profile.width_schedule=uniform"], ["--config.profile.round_widest=False"])
    found = []
    for changes in overrides:
        configs = [load_config(str(CONFIGS / f"{size}.py"), changes) for size in SIZES]
        found.append([_train_flops(config, profile_from_config(config)) / (1e15 * 86400) for config in configs])
    return np.array(found)


def _train_flops(config, profile: Profile) -> float:
    tokens = config.train.num_steps * config.train.global_batch_size * config.data.sequence_length
    return profile.train_flops_per_token(config.data.sequence_length, causal=False) * tokens


def cost_at(loss: float, costs: np.ndarray, losses: np.ndarray) -> tuple[float, float]:
    """The cost at which the line fitted to the family has this loss, and the exponent b of loss = A · cost^-b."""
    slope, intercept = np.polyfit(np.log(costs), np.log(losses), 1)
    return float(np.exp((np.log(loss) - intercept) / slope)), float(-slope)


def savings(costs: np.ndarray, losses: np.ndarray = LOSSES) -> dict[str, float]:
    """What the × needs of the uniform model's cost at the loss of the largest uniform model.

    Args:
      costs: [family, size], uniform first.
      losses: likewise.

    Returns:
      "fitted": against the uniform family's line; "actual": against the largest uniform model; the two exponents.
    """
    target = losses[0, -1]
    (uniform, b_uniform), (x, b_x) = (cost_at(target, *family) for family in zip(costs, losses, strict=True))
    return {"fitted": x / uniform, "actual": x / costs[0, -1], "uniform exponent": b_uniform, "x exponent": b_x}


def rounding(costs: np.ndarray) -> tuple[float, float]:
    """The least and the most that `savings` says of the line with losses anywhere within their rounding."""
    corners = np.array(list(itertools.product((-0.0005, 0.0005), repeat=LOSSES.size))).reshape(-1, *LOSSES.shape)
    found = [savings(costs, LOSSES + corner)["fitted"] for corner in corners]
    return min(found), max(found)


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__.splitlines()[0], epilog=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    costs = {
        ("FLOPs", "printed"): PRINTED_FLOPS,
        ("FLOPs", "counted"): counted_flops(),
        ("mean width", "printed"): PRINTED_WIDTHS,
    }
    exponents = ("exponent", "of the ×")
    rows = [["cost of the × at equal loss", "", "paper", "of the line", "rounding", "of the 2B model", *exponents]]
    for (kind, source), values in costs.items():
        found = savings(values)
        least, most = rounding(values)
        spread = f"{least:.1%} ... {most:.1%}"
        numbers = [f"{PAPER[kind]:.1%}", f"{found['fitted']:.1%}", spread, f"{found['actual']:.1%}"]
        rows.append([kind, source, *numbers, f"{found['uniform exponent']:.4f}", f"{found['x exponent']:.4f}"])
    print(aligned(rows, left=(0, 1)))


if __name__ == "__main__":
    main()
