"""`tlm generate`: continues prompts with a checkpoint's model."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from tlm_jax.checkpoint.layout import EMA, WEIGHTS, step_argument
from tlm_jax.config import reject_overrides
from tlm_jax.counts import counted
from tlm_jax.errors import EXIT_COMPLETE, UserError, raise_together
from tlm_jax.evaluate.completion import Completion
from tlm_jax.evaluate.generate import Generator, check_prefill, complete, encode_prompts, generation_settings
from tlm_jax.evaluate.restored import DTYPES, Checkpointed, load_model, read_checkpoint
from tlm_jax.evaluate.sampling import Sampling
from tlm_jax.files import parse_json, reason, write_result
from tlm_jax.parallel.devices import use_compilation_cache
from tlm_jax.parallel.memory import told_when_exhausted

_SEPARATOR = "-" * 80


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of `tlm generate`."""
    parser.add_argument(
        "--checkpoint", required=True, metavar="DIR", help="a workdir, its checkpoints folder, or one step's directory"
    )
    parser.add_argument(
        "--step", type=step_argument, metavar="N", help='which step, or "best" by validation (default: the latest)'
    )
    parser.add_argument(
        "--prompt",
        action="append",
        default=[],
        metavar="TEXT",
        help="text to continue; give it again for more; empty: a new document (the default)",
    )
    parser.add_argument(
        "--prompts-file",
        metavar="FILE",
        help='more prompts: .jsonl with one {"prompt": TEXT} a line, else one prompt a line',
    )
    parser.add_argument(
        "--max-new-tokens", type=int, metavar="N", help="(default: 64, or what the context leaves room for)"
    )
    parser.add_argument("--temperature", type=float, default=1.0, help="0: always the most likely token (default: 1)")
    parser.add_argument("--top-k", type=int, default=0, metavar="K", help="draw from the K most likely tokens (0: all)")
    parser.add_argument(
        "--top-p", type=float, default=1.0, metavar="P", help="draw from the most likely tokens that sum to P (1: all)"
    )
    parser.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end at this text, which is left out; may be repeated",
    )
    parser.add_argument("--seed", type=int, default=0, help="the same seed draws the same texts (default: 0)")
    parser.add_argument("--batch-size", type=int, default=16, metavar="N", help="prompts at a time (default: 16)")
    parser.add_argument(
        "--weights",
        choices=WEIGHTS,
        help="those trained, or their moving average, which train.ema_decay keeps "
        "(default: params; of the best those by which it is the best)",
    )
    parser.add_argument("--dtype", choices=DTYPES, help="compute in it (default: as the run does)")
    parser.add_argument(
        "--output",
        metavar="FILE",
        help="write JSON to this file, one object a line if it is a .jsonl, instead of text to the terminal",
    )


@told_when_exhausted("lower --batch-size or --max-new-tokens, or use a larger device")
def run(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Generates; 0 when every prompt has been continued."""
    reject_overrides(overrides)
    sampling = _check(args)
    prompts = _prompts(args)
    source = read_checkpoint(args.checkpoint, args.step, args.dtype, args.weights)
    source = dataclasses.replace(source, settings=generation_settings(source.settings))
    if source.weights == EMA and not args.weights:
        print(f"{source.path}: the moving average of the weights, by which it is the best", file=sys.stderr)
    context_length = source.config.data.sequence_length
    encoded = encode_prompts(prompts, source.tokenizer, args.max_new_tokens or 1, context_length)
    new_tokens = args.max_new_tokens or min(64, context_length - max(map(len, encoded)))
    check_prefill(source.profile, source.settings, max(map(len, encoded)))
    use_compilation_cache()
    model, parameters, mesh = load_model(source, axis="data")
    devices = mesh.size
    generator = Generator(
        model,
        parameters,
        source.tokenizer,
        sampling,
        batch_size=-(-min(args.batch_size, len(prompts)) // devices) * devices,
        prompt_tokens=max(map(len, encoded)),
        max_new_tokens=new_tokens,
    )
    shown = _Shown(prompts, live=not args.output and len(prompts) == 1)
    with jax.set_mesh(mesh):
        completions = complete(generator, encoded, source.tokenizer, seed=args.seed, stop=args.stop, on_text=shown.hear)
    if args.output:
        bytes_each = generator.cache_bytes // generator.batch_size
        records = [_record(*pair, source, args, bytes_each) for pair in zip(prompts, completions, strict=True)]
        write_result(args.output, _to_json(records, lines=_is_json_lines(args.output)))
        print(f"{counted(len(completions), 'completion')} in {args.output}", file=sys.stderr)
    else:
        shown.rest(completions)
    batch = f"{counted(generator.batch_size, 'prompt')} of up to {generator.cache_slots:,} tokens, new ones included"
    print(f"key/value cache: {generator.cache_bytes:,} bytes for {batch}", file=sys.stderr)
    return EXIT_COMPLETE


def _check(args: argparse.Namespace) -> Sampling:
    """Raises everything that is wrong with the numbers and stop strings, together."""
    problems = [
        UserError(f"must be at least 1, not {value}", where=name)
        for name, value in (("--max-new-tokens", args.max_new_tokens), ("--batch-size", args.batch_size))
        if value is not None and value < 1
    ]
    if not 0 <= args.seed < 2**32:
        problems.append(UserError(f"must be at least 0 and below 2^32, not {args.seed}", where="--seed"))
    if "" in args.stop:
        problems.append(UserError("a stop string is empty", where="--stop"))
    sampling = Sampling()
    try:
        sampling = Sampling(args.temperature, args.top_k, args.top_p)
    except UserError as problem:
        problems.append(problem)
    raise_together(problems)
    return sampling


def _prompts(args: argparse.Namespace) -> list[str]:
    """The prompts of the command line, then those of the file; one empty prompt if there are none at all."""
    if not args.prompts_file:
        return args.prompt or [""]
    try:
        text = Path(args.prompts_file).read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot be read: {reason(error)}", where=args.prompts_file) from error
    except UnicodeDecodeError as error:
        raise UserError("not valid UTF-8", where=args.prompts_file) from error
    lines = text.removesuffix("\n").split("\n")
    if not text:
        raise UserError("holds no prompt", where=args.prompts_file)
    if not _is_json_lines(args.prompts_file):
        return args.prompt + lines
    prompts = []
    for number, line in enumerate(lines, 1):
        try:
            prompt = parse_json(line)["prompt"]
        except (ValueError, KeyError, TypeError):
            prompt = None
        if not isinstance(prompt, str):
            raise UserError('no {"prompt": TEXT}', where=f"{args.prompts_file}:{number}")
        prompts.append(prompt)
    return args.prompt + prompts


def _is_json_lines(path: str) -> bool:
    return path.endswith((".jsonl", ".ndjson"))


def _to_json(records: Sequence[dict[str, Any]], lines: bool) -> str:
    if lines:
        return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    return json.dumps(records, ensure_ascii=False, indent=1) + "\n"


def _record(
    prompt: str, completion: Completion, source: Checkpointed, args: argparse.Namespace, kv_cache_bytes: int
) -> dict[str, Any]:
    return {
        "prompt": prompt,
        "completion": completion.text,
        "finish_reason": completion.finish_reason,
        "tokens": completion.num_tokens,
        "step": source.step,
        "weights": source.exported_weights or source.weights,
        "temperature": args.temperature,
        "top_k": args.top_k,
        "top_p": args.top_p,
        "seed": args.seed,
        "kv_cache_bytes": kv_cache_bytes,
    }


class _Shown:
    """Prompts and completions as text on standard output: a single one while it grows, several when all are done."""

    def __init__(self, prompts: Sequence[str], live: bool) -> None:
        self._prompts, self._live = prompts, live
        if live:
            print(prompts[0], end="", flush=True)

    def hear(self, index: int, text: str) -> None:
        """Takes a new piece of a completion."""
        if self._live:
            print(text, end="", flush=True)

    def rest(self, completions: Sequence[Completion]) -> None:
        """Prints what has not been printed."""
        if self._live:
            print()
            return
        texts = (prompt + completion.text for prompt, completion in zip(self._prompts, completions, strict=True))
        print(f"\n{_SEPARATOR}\n".join(texts))
