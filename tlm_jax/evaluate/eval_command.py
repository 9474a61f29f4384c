"""`tlm eval`: loss, perplexity and bits per byte of a checkpoint, as JSON on standard output."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax

from tlm_jax.checkpoint.layout import EMA, WEIGHTS, step_argument
from tlm_jax.config import reject_overrides
from tlm_jax.counts import counted
from tlm_jax.data.documents import DocumentFormat
from tlm_jax.data.mixture import AnyStore, Mixture, open_data
from tlm_jax.data.store import MANIFEST, MemoryStore, TokenStore, split_texts
from tlm_jax.errors import EXIT_COMPLETE, UserError
from tlm_jax.evaluate.baselines import gzip_bits_per_byte, smoothed_bigram_bits_per_byte
from tlm_jax.evaluate.perplexity import held_out_metrics
from tlm_jax.evaluate.restored import DTYPES, Checkpointed, load_model, read_checkpoint
from tlm_jax.files import write_result
from tlm_jax.model.attention import check_kernels
from tlm_jax.parallel.devices import use_compilation_cache
from tlm_jax.parallel.memory import told_when_exhausted
from tlm_jax.progress import ProgressBar
from tlm_jax.train.setup import validation_batch_size

OnDisk = TypeVar("OnDisk", TokenStore, TokenStore | Mixture)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of `tlm eval`."""
    parser.add_argument(
        "--checkpoint", required=True, metavar="DIR", help="a workdir, its checkpoints folder, or one step's directory"
    )
    parser.add_argument(
        "--step", type=step_argument, metavar="N", help='which step, or "best" by validation (default: the latest)'
    )
    parser.add_argument(
        "--data",
        nargs="+",
        action="extend",
        metavar="PATH",
        help="a token store, of which the held-out split is read, or files as `tlm prepare` takes them "
        "(default: the token store of the run)",
    )
    parser.add_argument("--text-field", default="text", help="the key or column of a document's text")
    parser.add_argument("--batch-size", type=int, metavar="N", help="windows at a time (default: the run's)")
    parser.add_argument(
        "--weights",
        choices=WEIGHTS,
        help="those trained, or their moving average, which train.ema_decay keeps "
        "(default: params; of the best those by which it is the best)",
    )
    parser.add_argument("--dtype", choices=DTYPES, help="compute in it (default: as the run does)")
    parser.add_argument(
        "--baselines",
        action="store_true",
        help="also gzip -9, and a smoothed bigram model counted on the training split of the run's token store",
    )
    parser.add_argument("--output", metavar="FILE", help="also write the JSON to this file")


@told_when_exhausted("lower --batch-size, or use more or larger devices")
def run(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Prints the metrics; 0 when they are complete."""
    reject_overrides(overrides)
    source = read_checkpoint(args.checkpoint, args.step, args.dtype, args.weights)
    store = _open_data(args, source)
    batch_size = _batch_size(args.batch_size, source)
    sequence_length = source.config.data.sequence_length
    check_kernels(source.profile, source.settings, source.settings.document_mask, sequence_length)
    rounded = f", weights rounded to {source.parameters_dtype}" if source.parameters_dtype != "float32" else ""
    average = ", the moving average of its weights" if source.weights == EMA else ""
    print(f"evaluating {source.path}{average} on {store.name}{rounded}", file=sys.stderr)
    use_compilation_cache()
    model, parameters, mesh = load_model(source, axis="fsdp")
    with ProgressBar("evaluating", unit="batches") as progress:
        metrics = held_out_metrics(
            model,
            parameters,
            mesh,
            store,
            sequence_length=sequence_length,
            batch_size=batch_size,
            on_progress=progress.show,
        )
    if metrics["bytes"] is None:
        print("bytes of text: not known: the store has no byte counts, so no bits per byte", file=sys.stderr)
    result: dict[str, Any] = {
        **metrics,
        "checkpoint": str(source.path),
        "step": source.step,
        "weights": source.exported_weights or source.weights,
        "data": store.name,
        "data_fingerprint": store.fingerprint,  # what it holds, wherever it lies
        "sequence_length": sequence_length,
        "dtype": source.settings.compute_dtype,
        "parameters_dtype": source.parameters_dtype,
    }
    if args.baselines:
        result["baselines"] = _baselines(store, source)
    if jax.process_index() == 0:
        text = json.dumps(result, indent=1)
        if args.output:
            write_result(args.output, text + "\n")
        print(text)
    return EXIT_COMPLETE


def _open_data(args: argparse.Namespace, source: Checkpointed) -> AnyStore:
    if not args.data:
        return _run_store(source)
    stores = [path for path in args.data if (Path(path) / MANIFEST).is_file()]
    if not stores:
        return MemoryStore.from_files(args.data, source.tokenizer, DocumentFormat(args.text_field))
    if len(args.data) > 1:
        raise UserError("a token store cannot be read together with other data", where=stores[0], mend="give it alone")
    return _same_tokenizer(TokenStore.open(stores[0]), source)


def _run_store(source: Checkpointed) -> TokenStore | Mixture:
    """The token store that the run was trained on, or its mixture."""
    try:
        return _same_tokenizer(open_data(source.config.data.store, source.config.data.mixture), source)
    except UserError as error:
        raise UserError(
            f"the run's token store cannot be read: {error.what}",
            where=error.where,
            mend="give --data=STORE, or files of text",
        ) from error


def _same_tokenizer(store: OnDisk, source: Checkpointed) -> OnDisk:
    if store.tokenizer().hash != source.tokenizer.hash:
        raise UserError(
            "the store was made with another tokenizer than the checkpoint's",
            where=store.name,
            mend="give the text itself as --data, or a store made with the checkpoint's tokenizer",
        )
    return store


def _batch_size(requested: int | None, source: Checkpointed) -> int:
    """The batch size: as requested, or the run's, raised to a multiple of the devices."""
    devices = jax.device_count()
    if requested is None:
        return -(-validation_batch_size(source.config) // devices) * devices
    if requested < 1:
        raise UserError(f"must be at least 1, not {requested}", where="--batch-size")
    if requested % devices:
        raise UserError(
            f"{requested} does not divide over {counted(devices, 'device')}",
            where="--batch-size",
            mend=f"use a multiple of {devices}",
        )
    return requested


def _baselines(store: AnyStore, source: Checkpointed) -> dict[str, float]:
    held_out = store.split("validation")
    if not held_out.num_bytes:
        what = "the bytes of the text are not known"
        raise UserError(what, where=store.name, mend="leave out --baselines, or adopt the store with its tokenizer")
    counted = _run_store(source) if isinstance(store, MemoryStore) else store
    return {
        "gzip_bits_per_byte": gzip_bits_per_byte(split_texts(held_out, source.tokenizer)),
        "bigram_bits_per_byte": smoothed_bigram_bits_per_byte(counted, held_out),
    }
