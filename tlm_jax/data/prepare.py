"""Text, JSON Lines and Parquet to a token store: many processes, resumable, atomic, the same for any worker count.

The inputs, in order, are cut into units; a unit's documents become one shard per split. Which unit holds what depends
on inputs and settings alone, and a unit's files appear by renaming, its result last. So work can stop at any instant
and go on later, and the store cannot tell how many processes made it. The manifest is written when every unit is done.

    STORE/plan.json            while unfinished: what the store is being made of
    STORE/units/00000.json     while unfinished: the results of finished units
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tlm_jax.data.documents import DocumentFormat, InputFile, Problem, find_inputs
from tlm_jax.data.store import (
    FORMAT_VERSION,
    MANIFEST,
    SPLITS,
    TOKEN_DTYPES,
    TokenStore,
    tokenizer_entry,
    tokenizer_file,
)
from tlm_jax.data.tokenizer import Tokenizer, tokenizer_from_bytes
from tlm_jax.data.units import (
    MAX_EXAMPLES,
    UNITS,
    Plan,
    finished_unit,
    plan_units,
    tokenize_unit,
)
from tlm_jax.data.workers import available_cpus, run_jobs
from tlm_jax.errors import UserError
from tlm_jax.files import PARTIAL, only_writer, parse_json, write_atomically, write_error
from tlm_jax.progress import ProgressBar

_PLAN = "plan.json"
# With fewer, some processes would end long before the others: large compressed files are units as they are. Instead,
# each process then has several threads.
_UNITS_PER_PROCESS = 4


@dataclass(frozen=True)
class Settings:
    """What, beside inputs and tokenizer, decides what a store holds.

    Attributes:
      layout: how documents lie in the inputs.
      holdout: fraction of documents that go to the split "validation".
      dtype: "auto", "uint16" or "uint32".
    """

    layout: DocumentFormat = field(default_factory=DocumentFormat)
    holdout: float = 0.01
    dtype: str = "auto"


def prepare(
    paths: Sequence[str],
    tokenizer: Tokenizer,
    output: str | Path,
    settings: Settings | None = None,
    *,
    workers: int = 0,
    on_error: str = "stop",
) -> TokenStore:
    """Makes a token store, or goes on with one that was interrupted.

    A document is held out when the first 8 bytes of its text's sha256, as a fraction of their range, are below
    `holdout`; so equal documents are always in the same split.

    Args:
      paths: files and directories, in the order in which their documents are stored.
      tokenizer: what turns text to ids.
      output: directory of the store.
      settings: what the store holds; None: the defaults.
      workers: how many tokenise at a time, in processes and threads; 0: one per CPU that this process may use.
      on_error: "stop" at the first document that cannot be read, or "skip" and count them.

    Returns:
      The store, opened.

    Raises:
      UserError: bad input, a full disk, or an output that holds something else. Finished units stay.
    """
    output, settings = Path(output), settings or Settings()
    inputs = find_inputs(paths)
    plan = _make_plan(inputs, tokenizer, output, settings, on_error)
    description = _describe(plan)
    try:
        output.mkdir(parents=True, exist_ok=True)
        with only_writer(output):
            if _is_complete(output, description):
                return TokenStore.open(output)
            _begin(output, description)
            results = _run_units(plan, workers or available_cpus())
            _finish(plan, description, results)
    except OSError as error:
        raise write_error(error, output) from error
    return TokenStore.open(output)


def _make_plan(inputs: list[InputFile], tokenizer: Tokenizer, output: Path, settings: Settings, on_error: str) -> Plan:
    dtype = settings.dtype
    if dtype == "auto":
        dtype = "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"
    if tokenizer.vocab_size > 1 << (8 * TOKEN_DTYPES[dtype].itemsize):
        what = f"a vocabulary of {tokenizer.vocab_size} does not fit in {dtype}"
        raise UserError(what, where="--dtype", mend="use uint32 or auto")
    if not 0.0 <= settings.holdout < 1.0:
        raise UserError(f"the held-out fraction must be in [0, 1), not {settings.holdout}", where="--holdout")
    return Plan(
        output=output,
        inputs=inputs,
        units=plan_units(inputs, settings.layout),
        layout=settings.layout,
        holdout=settings.holdout,
        dtype=dtype,
        tokenizer_kind=tokenizer.kind,
        tokenizer_data=tokenizer.to_bytes(),
        stop_on_error=on_error == "stop",
    )


def _describe(plan: Plan) -> dict[str, Any]:
    """What the store is made of: half-done work goes on only under an equal description."""
    return {
        "format_version": FORMAT_VERSION,
        "tokenizer": {"kind": plan.tokenizer_kind, "hash": hashlib.sha256(plan.tokenizer_data).hexdigest()},
        "dtype": plan.dtype,
        "holdout": plan.holdout,
        "layout": asdict(plan.layout),
        "inputs": [{"path": file.path, "size": file.size} for file in plan.inputs],
        "modified": [os.stat(file.path).st_mtime_ns for file in plan.inputs],
    }


def _is_complete(output: Path, description: dict[str, Any]) -> bool:
    """Whether the store is finished already. A manifest holds no file times, so inputs are told apart by size."""
    if not (output / MANIFEST).is_file():
        return False
    manifest = TokenStore.open(output).manifest
    made_of = manifest["made_of"]
    if any(made_of[key] != description[key] for key in made_of):
        raise _other_store(output, made_of, description)
    _remove_working_files(output)
    return True


# How messages call the parts of a description.
_CALLED = {
    "tokenizer": "--tokenizer",
    "dtype": "--dtype",
    "holdout": "--holdout",
    "layout": "--text-field, --split-text or --document-bytes",
    "inputs": "inputs",
    "modified": "contents of the inputs",
}


def _other_store(output: Path, before: dict[str, Any], now: dict[str, Any]) -> UserError:
    differs = ", ".join(name for key, name in _CALLED.items() if key in before and before[key] != now[key])
    return UserError(
        f"the output was begun with other {differs}",
        where=str(output),
        mend="go back to those, choose another --output, or delete it",
    )


def _begin(output: Path, description: dict[str, Any]) -> None:
    """Writes the plan, or checks that the one found is equal, and clears what killed processes left half-written."""
    file = output / _PLAN
    for leftover in output.glob(f"**/*{PARTIAL}*"):
        leftover.unlink(missing_ok=True)
    if file.is_file():
        try:
            before = parse_json(file.read_bytes())
        except ValueError as error:
            raise UserError("the plan cannot be read", where=str(file), mend="delete the output") from error
        finished = any((output / UNITS).glob("*"))
        if before != description and finished:
            raise _other_store(output, before, description)
    elif any(output.iterdir()):
        raise UserError("the directory is not empty and is no token store", where=str(output))
    write_atomically(file, json.dumps(description).encode())
    for directory in (UNITS, *SPLITS):
        (output / directory).mkdir(exist_ok=True)


def _run_units(plan: Plan, workers: int) -> list[dict[str, Any]]:
    """Does what is not done yet and returns every unit's result, in order."""
    results = {number: finished_unit(plan, number) for number in range(len(plan.units))}
    jobs = [number for number, result in results.items() if result is None]
    sizes = [sum(span.stop - span.start for span in unit) for unit in plan.units]
    failures: dict[int, Problem] = {}
    processes = min(workers, max(1, len(jobs) // _UNITS_PER_PROCESS))
    tokenize = functools.partial(tokenize_unit, threads=-(-workers // processes))
    with ProgressBar("tokenising", sum(sizes), unit="bytes") as progress:
        progress.advance(sum(sizes) - sum(sizes[number] for number in jobs))
        for number, outcome in run_jobs(tokenize, plan, jobs, processes):
            progress.advance(sizes[number])
            if isinstance(outcome, Problem):
                failures[number] = outcome
            else:
                results[number] = outcome
            # Units are begun in order: once all before the first failed one are done, it is the inputs' first problem.
            if failures and all(results[before] is not None for before in range(min(failures))):
                error = failures[min(failures)].error()
                raise UserError(error.what, where=error.where, mend="mend the input, or skip such with --on-error=skip")
    return [result for result in results.values() if result is not None]


def _finish(plan: Plan, description: dict[str, Any], results: list[dict[str, Any]]) -> None:
    """Writes tokenizer and manifest, then removes what only unfinished work needs."""
    splits: dict[str, Any] = {}
    for split in SPLITS:
        shards = [shard for result in results for shard in result["shards"][split]]
        totals = {key: sum(shard[key] for shard in shards) for key in ("documents", "tokens", "bytes")}
        splits[split] = {**totals, "shards": shards}
    skipped: Counter[str] = Counter()
    for result in results:
        skipped.update(result["skipped"])
    if not any(split["documents"] for split in splits.values()):
        raise UserError("the inputs hold no document", where=plan.inputs[0].path if plan.inputs else "INPUT")
    tokenizer = tokenizer_from_bytes(plan.tokenizer_kind, plan.tokenizer_data)
    write_atomically(plan.output / tokenizer_file(tokenizer), plan.tokenizer_data)
    manifest = {
        "format_version": FORMAT_VERSION,
        "tokenizer": tokenizer_entry(tokenizer),
        "dtype": plan.dtype,
        "holdout_rule": "validation if the first 8 bytes of sha256(text), big-endian, are below holdout * 2**64",
        "splits": splits,
        "normalized": {
            "form": tokenizer.unicode_form,
            "documents": sum(result.get("normalized", 0) for result in results),
        },
        "skipped": dict(sorted(skipped.items())),
        "skipped_examples": [text for result in results for text in result["examples"]][:MAX_EXAMPLES],
        "made_of": {key: value for key, value in description.items() if key != "modified"},
    }
    write_atomically(plan.output / MANIFEST, json.dumps(manifest, indent=1).encode())
    _remove_working_files(plan.output)


def _remove_working_files(output: Path) -> None:
    shutil.rmtree(output / UNITS, ignore_errors=True)
    (output / _PLAN).unlink(missing_ok=True)
