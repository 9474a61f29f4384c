"""`tlm compare`: variants of a config at equal budget, each over the same seeds, and what their differences say."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from tlm_jax.compare import execute, summary
from tlm_jax.compare.page import build_page
from tlm_jax.compare.plan import Run, Variant, budget_differences, make_runs, make_variants, named_changes, same_models
from tlm_jax.counts import counted
from tlm_jax.errors import EXIT_COMPLETE, EXIT_RESUMABLE, UserError
from tlm_jax.files import only_one, write_result

_EPILOG = """\
examples:
  tlm compare --config=configs/quickstart.py --config.data.store=STORE --workdir=runs/curves \\
      --vary=profile.schedule=uniform,cosine,linear --seeds=3
  tlm compare --config=configs/quickstart.py --config.data.store=STORE --workdir=runs/ends \\
      --vary=profile.schedule=uniform,cosine \\
      --variant=reversed:profile.schedule=cosine,profile.start_ratio=0.5,profile.end_ratio=1.5

Seed i of every variant has config.seed + i and config.data.seed + i: within a seed all variants begin with the same
bits in every weight whose shape they share and see the same text in the same order; between seeds both change. The
first variant is the one that the others are compared with. Budgets (parameters, training FLOPs per token, training
tokens) must be equal, unless --unequal-budgets is given.

Each run is a `tlm train` in DIR/VARIANT/seed-I, evaluated on the whole held-out split. The same command again makes
only what is not complete; more seeds or variants may be asked for then. DIR gets results.txt, .json, .csv and
report.html. Exit code 75: stopped by Ctrl-C or SIGTERM, the same command goes on.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of `tlm compare`."""
    parser.epilog, parser.formatter_class = _EPILOG, argparse.RawDescriptionHelpFormatter
    parser.add_argument("--config", required=True, metavar="FILE", help="the config that all variants start from")
    parser.add_argument("--workdir", required=True, metavar="DIR", help="where the runs and results go")
    parser.add_argument(
        "--vary",
        action="append",
        default=[],
        metavar="KEY=VALUE,VALUE",
        help="a variant for each value; repeated, for each combination",
    )
    parser.add_argument(
        "--variant",
        action="append",
        default=[],
        metavar="NAME:KEY=VALUE,...",
        help="a variant with several changes; may be repeated; `NAME:` is the config as it is",
    )
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="runs of each variant (default: 3)")
    parser.add_argument("--confidence", type=float, default=0.95, metavar="P", help="of the intervals (default: 0.95)")
    parser.add_argument("--unequal-budgets", action="store_true", help="compare although the budgets differ")
    parser.add_argument("--dry-run", action="store_true", help="check the data, show budgets and commands, run nothing")


def run(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Makes the runs that are missing, writes and prints the results; 0 when all are complete."""
    variants, runs = _plan(args, overrides)
    if args.dry_run:
        execute.check_data(runs)
        print(summary.budget_table(variants), "", *(shlex.join(["tlm", "train", *r.arguments]) for r in runs), sep="\n")
        return EXIT_COMPLETE
    workdir = Path(args.workdir)
    with only_one(workdir), execute.Processes() as processes:
        try:
            execute.check(runs, processes, workdir / execute.LOG)
            failed = execute.make(runs, processes, lambda: _write(workdir, _summary(args, variants, runs), runs))
        except execute.Stopped:
            command = shlex.join(["tlm", "compare", *_typed(args), *overrides])
            reason = processes.signal_name or "a signal to the run"
            print(f"stopped on {reason}; go on with:\n  {command}", file=sys.stderr)
            return EXIT_RESUMABLE
        found = _summary(args, variants, runs)
        _write(workdir, found, runs)
        _write_page(workdir, found, runs)
    print(summary.as_text(found), end="")
    if failed:
        more = f"; and {len(failed) - 1} more, told above" if len(failed) > 1 else ""
        raise UserError(
            f"{len(failed)} of {counted(len(runs), 'run')} failed: {failed[0]}{more}",
            where=args.workdir,
            mend="the same command tries them again",
        )
    return EXIT_COMPLETE


def _plan(args: argparse.Namespace, overrides: Sequence[str]) -> tuple[list[Variant], list[Run]]:
    if args.seeds < 1:
        raise UserError(f"must be at least 1, not {args.seeds}", where="--seeds")
    if not 0 < args.confidence < 1:
        raise UserError(f"must lie between 0 and 1, not {args.confidence:g}", where="--confidence")
    variants = make_variants(args.config, overrides, named_changes(args.vary, args.variant))
    differences = budget_differences(variants)
    if differences and not args.unequal_budgets:
        raise UserError(
            f"the budgets are not equal: {'; '.join(differences)}",
            mend="make them equal, or give --unequal-budgets to compare all the same",
        )
    if differences:
        print(f"WARNING: the budgets are not equal: {'; '.join(differences)}", file=sys.stderr)
    for text in same_models(variants):
        print(f"WARNING: {text}: their runs differ in nothing", file=sys.stderr)
    return variants, make_runs(args.config, overrides, variants, args.seeds, Path(args.workdir))


def _summary(args: argparse.Namespace, variants: Sequence[Variant], runs: Sequence[Run]) -> summary.Summary:
    return summary.summarise(variants, execute.evaluations(runs), args.seeds, args.confidence)


def _write(workdir: Path, found: summary.Summary, runs: Sequence[Run]) -> None:
    write_result(str(workdir / "results.txt"), summary.as_text(found))
    write_result(str(workdir / "results.json"), summary.as_json(found, execute.evaluations(runs)))
    write_result(str(workdir / "results.csv"), summary.as_csv(found))


def _write_page(workdir: Path, found: summary.Summary, runs: Sequence[Run]) -> None:
    """Writes report.html; without matplotlib it says so, since the numbers are safe."""
    complete = [run for run in runs if execute.evaluation(run) is not None]
    path = os.path.join(workdir, "report.html")
    try:
        write_result(path, build_page(found, complete))
    except UserError as error:
        print(f"no {path}: {error}", file=sys.stderr)


def _typed(args: argparse.Namespace) -> list[str]:
    """The arguments of this command, as one would type them."""
    typed = [f"--config={args.config}", f"--workdir={args.workdir}"]
    typed += [f"--vary={text}" for text in args.vary] + [f"--variant={text}" for text in args.variant]
    typed += [f"--seeds={args.seeds}"]
    typed += [f"--confidence={args.confidence:g}"] if args.confidence != 0.95 else []
    return typed + (["--unequal-budgets"] if args.unequal_budgets else [])
