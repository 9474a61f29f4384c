"""`tlm profile`: what the layers of a config are, what they cost, and how two configs differ."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable

from tlm_jax.capacity.budget import as_json, budget, difference, shown_labels
from tlm_jax.capacity.from_config import profile_from_config, sequence_length
from tlm_jax.capacity.picture import draw
from tlm_jax.capacity.profile import Profile
from tlm_jax.capacity.table import comparison_table, layer_table, totals_table
from tlm_jax.config import load_config
from tlm_jax.counts import counted
from tlm_jax.errors import EXIT_COMPLETE, UserError

_EPILOG = """\
examples:
  tlm profile --config=configs/quickstart.py
  tlm profile --config=configs/quickstart.py --config.profile.plateaus=3
  tlm profile --config=configs/quickstart.py --compare=:profile.schedule=uniform
  tlm profile --config=configs/x_shaped/200m.py --compare=:profile.width_schedule=uniform
  tlm profile --config=configs/quickstart.py --json > profile.json

Overrides read --config.key=value. FLOPs count matmuls, two per multiply-add, the vocabulary projection included, at
config.data.sequence_length. Of attention, "causal" counts what the causal mask keeps, the half of a layer's matrix or
the band of its window; "full attention" counts every key, or as many as the window has, for every token. Where d_model
varies, weights that multiply zeros or write what nothing reads have no effect and no FLOPs; of experts, those count
that a token is sent to. The JSON can be a config's layers again, with --config.profile.schedule=file
--config.profile.layers=profile.json.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of `tlm profile`."""
    parser.epilog, parser.formatter_class = _EPILOG, argparse.RawDescriptionHelpFormatter
    parser.add_argument("--config", required=True, metavar="FILE", help="the config file")
    parser.add_argument(
        "--compare",
        metavar="[FILE][:key=value...]",
        help="a second config, shown beside the first as B: a file, overrides of it after colons "
        "(B.py:profile.schedule=uniform:profile.d_ff=512), or overrides alone, which apply to the first config "
        "(:profile.schedule=uniform)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON only; with --compare: a, b and difference")
    parser.add_argument("--plot", metavar="FILE", help="draw the widths into a .png, .svg or .pdf (needs matplotlib)")


def run(args: argparse.Namespace, overrides: list[str]) -> int:
    """Shows one profile, or two side by side, and returns the exit code."""
    profiles, lengths = {}, []
    described = [(args.config, args.config, overrides)]
    if args.compare is not None:
        described.append(_second(args, overrides))
    for name, path, changes in described:
        config = load_config(path, changes)
        try:
            profile, length = profile_from_config(config), sequence_length(config)
        except UserError as error:
            raise error if name == args.config else UserError(str(error), where=f"--compare={args.compare}") from error
        label = name if name not in profiles else f"{name} (B)"
        profiles[label] = profile
        lengths.append(length)
    if args.plot:
        draw(profiles, args.plot)
    text = _json(profiles, lengths) if args.json else _text(profiles, lengths)
    print(text if _prints(text) else text.translate({ord("█"): "#", ord("▌"): "+"}))
    return EXIT_COMPLETE


def _second(args: argparse.Namespace, overrides: Iterable[str]) -> tuple[str, str, list[str]]:
    """The name, file and overrides of `--compare`."""
    path, *changes = args.compare.split(":")
    if path and changes and "=" not in changes[0]:  # what get_config takes
        path = f"{path}:{changes.pop(0)}"
    given = [f"--config.{change}" for change in changes]
    if path:
        return args.compare, path, given
    return f"{args.config}{args.compare}", args.config, [*overrides, *given]


def _prints(text: str) -> bool:
    """Whether standard output's encoding has the characters of `text`."""
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _json(profiles: dict[str, Profile], lengths: list[int]) -> str:
    described = [as_json(profile, length) for profile, length in zip(profiles.values(), lengths, strict=True)]
    if len(described) == 1:
        return json.dumps(described[0], indent=1)
    a, b = profiles.values()
    both = {"a": described[0], "b": described[1], "difference": difference(a, b, (lengths[0], lengths[1]))}
    return json.dumps(both, indent=1)


def _text(profiles: dict[str, Profile], lengths: list[int]) -> str:
    budgets = [budget(profile, length) for profile, length in zip(profiles.values(), lengths, strict=True)]
    heads = []
    for side, (name, profile), length in zip("AB", profiles.items(), lengths, strict=False):
        runs = counted(len(profile.runs()), "run")
        layers = f"{counted(len(profile.layers), 'layer')} in {runs} of equal shape"
        tied = "tied" if profile.tied_embeddings else "untied"
        line = f"{name}: {layers}, vocabulary {profile.vocab_size:,} ({tied}), sequence length {length:,}"
        heads.append(line if len(profiles) == 1 else f"{side} = {line}")
    tables = [profile.layers for profile in profiles.values()]
    table = layer_table(tables[0]) if len(tables) == 1 else comparison_table(*tables)
    return "\n".join([*heads, "", table, "", totals_table(shown_labels(*budgets), *budgets)])
