"""`tlm report`: runs, profiles and samples as one HTML page."""

from __future__ import annotations

import argparse

from tlm_jax.config import reject_overrides
from tlm_jax.errors import EXIT_COMPLETE
from tlm_jax.files import write_result
from tlm_jax.report.page import build
from tlm_jax.report.runs import load_runs

_EPILOG = """\
A run is a work directory of `tlm train`: config.json, profile.json and metrics.jsonl, and where they exist
evaluation.json (the JSON of `tlm eval`) and samples.json (a list of prompt, completion and seed). Differences are
shown against the first run. The page is one file that opens without a network. Charts need matplotlib.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of `tlm report`."""
    parser.epilog, parser.formatter_class = _EPILOG, argparse.RawDescriptionHelpFormatter
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a work directory of `tlm train`")
    parser.add_argument("--output", default="report.html", metavar="FILE", help="the page (default: report.html)")


def run(args: argparse.Namespace, overrides: list[str]) -> int:
    """Writes the page, whole or not at all, and returns the exit code."""
    reject_overrides(overrides)
    page = build(load_runs(args.runs))
    write_result(args.output, page)
    print(f"wrote {args.output} ({len(page.encode()) / 1e3:,.0f} kB)")
    return EXIT_COMPLETE
