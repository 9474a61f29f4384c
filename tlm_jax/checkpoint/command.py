"""`tlm checkpoint`: list, verify, prune, export and convert the checkpoints of a run."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tlm_jax.capacity.table import aligned
from tlm_jax.checkpoint import layout, retention
from tlm_jax.checkpoint.inventory import (
    COMPLETE,
    DAMAGED,
    INCOMPLETE,
    WEIGHTS_ONLY,
    Entry,
    guarded_by,
    inventory,
    run_directory,
    to_remove,
)
from tlm_jax.config import reject_overrides
from tlm_jax.errors import EXIT_COMPLETE, UserError, raise_together
from tlm_jax.files import only_one, write_error

_DTYPES, _STACKINGS = ("float32", "bfloat16"), ("auto", "unrolled")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of `tlm checkpoint`."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")

    def add(name: str, text: str, run: str = "a workdir or its checkpoints folder") -> argparse.ArgumentParser:
        action = actions.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        action.add_argument("run", metavar="RUN", help=run)
        return action

    one = "a workdir, its checkpoints folder, or one step's directory"
    listing = add("list", "show all checkpoints: step, time, size, whether complete, metric, which is the best")
    verifying = add("verify", "read every array and compare its checksum; exit code 2 names what is damaged", one)
    pruning = add(
        "prune",
        "remove all complete checkpoints that no --keep option names; one is needed, the newest always stays",
    )
    exporting = add("export", "write the weights alone into a new directory that eval and generate take", one)
    converting = add("convert", "write all of a checkpoint into a new workdir, from which training goes on", one)
    for action in (listing, verifying):
        action.add_argument("--json", action="store_true", help="print JSON instead of text")
    verifying.add_argument(
        "--step", type=layout.step_argument, metavar="N", help='which step, or "best" by validation (default: all)'
    )
    pruning.add_argument("--keep-last", type=int, metavar="N", help="keep the newest N (1 where only another is given)")
    pruning.add_argument("--keep-every", type=int, metavar="STEPS", help="keep those of steps that STEPS divides")
    pruning.add_argument("--keep-best", type=int, metavar="N", help="keep the N best by checkpoint.best_metric")
    pruning.add_argument("--dry-run", action="store_true", help="only say what would be removed")
    for action in (exporting, converting):
        action.add_argument("--output", required=True, metavar="DIR", help="a new directory")
        action.add_argument(
            "--step", type=layout.step_argument, metavar="N", help='which step, or "best" (default: the latest)'
        )
    exporting.add_argument(
        "--weights",
        choices=(layout.PARAMS, layout.EMA),
        help="those trained, or their moving average (default: params; of the best those by which it is the best)",
    )
    exporting.add_argument("--dtype", choices=_DTYPES, help="round the weights to it (default: as they are)")
    converting.add_argument("--layer-stacking", choices=_STACKINGS, help="of the new checkpoint (default: as it is)")


def run(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Runs the action; 0 when it is complete."""
    reject_overrides(overrides)
    if args.action in ("verify", "export", "convert"):
        import jax

        jax.config.update("jax_platforms", "cpu")  # accelerators may belong to the run itself
    actions = {"list": _list, "verify": _verify, "prune": _prune, "export": _export, "convert": _convert}
    actions[args.action](args)
    return EXIT_COMPLETE


def _size(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"


def _list(args: argparse.Namespace) -> None:
    directory = run_directory(args.run)
    entries, metric = inventory(directory), retention.best_metric(directory)
    whole = {entry.step: entry.value(metric) for entry in entries if entry.state in (COMPLETE, WEIGHTS_ONLY)}
    compared = retention.comparable(whole)
    best = retention.best(compared, 1)
    if args.json:
        values = [entry.to_json() | {"best": [entry.step] == best and entry.step in whole} for entry in entries]
        print(json.dumps({"directory": str(directory), "best_metric": metric, "checkpoints": values}, indent=1))
        return
    if not entries:
        raise UserError("holds no checkpoints", where=str(directory), mend="give the workdir of a run")
    rows = [["step", "time", "size", "state", metric, ""]]
    for entry in entries:
        value = entry.metrics.get(metric)
        marks = ["permanent"] * entry.permanent + ["best"] * (entry.state != INCOMPLETE and [entry.step] == best)
        marks += ["measured otherwise"] * (value is not None and entry.step not in compared)
        time, shown = f"{entry.time:%Y-%m-%d %H:%M:%S}", "" if value is None else f"{value:.4f}"
        rows.append([str(entry.step), time, _size(entry.size), entry.state, shown, ", ".join(marks)])
    print(aligned(rows, left=(3, 5)))


def _verify(args: argparse.Namespace) -> None:
    from tlm_jax.checkpoint.restore import damaged_arrays, find_checkpoint

    latest = find_checkpoint(args.run, args.step)
    single = args.step is not None or latest == Path(args.run).absolute()
    paths = [latest] if single else [latest.with_name(str(step)) for step in layout.complete_steps(latest.parent)]
    results: list[dict[str, Any]] = []
    for path in paths:
        try:
            found = damaged_arrays(path)
        except UserError as error:
            found = [error.what.removeprefix("the checkpoint is damaged: ")]
        if found and not path.exists():  # by the training that made it: no damage
            print(f"step {path.name}: removed while it was being read", file=sys.stderr)
            continue
        results.append({"step": int(path.name), "path": str(path), "damaged": found})
        if not args.json:
            print(f"step {path.name}: {'damaged: ' + ', '.join(found) if found else 'as it was saved'}", flush=True)
    if not results:
        raise layout.damaged(latest, "nothing could be read")
    if args.json:
        print(json.dumps(results, indent=1))
    damaged = [result for result in results if result["damaged"]]
    if damaged:
        told = "; ".join(f"step {result['step']}: {', '.join(result['damaged'])}" for result in damaged)
        mend = "remove their directories, and training goes on from the newest that is left"
        raise UserError(f"{len(damaged)} of {len(results)} damaged: {told}", where=str(latest.parent), mend=mend)


def _prune(args: argparse.Namespace) -> None:
    _check_keeps(args)
    directory = run_directory(args.run)
    with ExitStack() as locks:
        for workdir in [] if args.dry_run else guarded_by(directory):
            locks.enter_context(only_one(workdir, required=True))
        entries = inventory(directory)
        doomed = to_remove(
            entries,
            keep_last=1 if args.keep_last is None else args.keep_last,
            keep_every=args.keep_every or 0,
            keep_best=args.keep_best or 0,
            metric=retention.best_metric(directory),
        )
        _remove(doomed, directory, args.dry_run)
    for entry in entries:
        if entry.state == DAMAGED:
            print(f"step {entry.step} is damaged and stays: {entry.path}", file=sys.stderr)
    stay = len([entry for entry in entries if entry.state in (COMPLETE, WEIGHTS_ONLY)]) - len(doomed)
    verb = "would be removed" if args.dry_run else "removed"
    print(f"{len(doomed)} {verb}, {_size(sum(entry.size for entry in doomed))}; {stay} complete ones stay")


def _check_keeps(args: argparse.Namespace) -> None:
    keeps = {"--keep-last": args.keep_last, "--keep-every": args.keep_every, "--keep-best": args.keep_best}
    if all(value is None for value in keeps.values()):
        raise UserError("say what stays", where="command line", mend=f"give one or more of {', '.join(keeps)}")
    problems = [
        UserError(f"must be at least 1, not {value}", where=name)
        for name, value in keeps.items()
        if value is not None and value < 1
    ]
    raise_together(problems)


def _remove(doomed: Sequence[Entry], directory: Path, dry_run: bool) -> None:
    try:
        for entry in doomed:
            if not dry_run:
                layout.remove_checkpoint(entry.path)
            print(f"{'would remove' if dry_run else 'removed'} step {entry.step}, {_size(entry.size)}", flush=True)
        if not dry_run:
            layout.remove_leftovers(directory)
    except OSError as error:
        raise write_error(error, directory) from error


def _export(args: argparse.Namespace) -> None:
    from tlm_jax.checkpoint.export import export_weights
    from tlm_jax.checkpoint.restore import find_checkpoint

    path = find_checkpoint(args.run, args.step)
    weights = retention.weights_to_read(path, args.step, args.weights)
    what = " (moving average of the weights)" if weights == layout.EMA else ""
    _tell_written(export_weights(path, Path(args.output), args.dtype, weights), args.output, what)


def _convert(args: argparse.Namespace) -> None:
    from tlm_jax.checkpoint.export import convert
    from tlm_jax.checkpoint.restore import find_checkpoint

    _tell_written(convert(find_checkpoint(args.run, args.step), Path(args.output), args.layer_stacking), args.output)


def _tell_written(path: Path, output: str, what: str = "") -> None:
    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    print(f"step {path.name}{what} in {output}, {_size(size)}")
