"""What a comparison consists of: variants of one config, each over the same seeds, and their budgets.

Seed i of every variant has config.seed + i and config.data.seed + i. So within a seed all variants begin with the same
bits in every weight whose shape they share, and see the same windows in the same order: a difference between them is a
paired one. Between seeds both initial weights and data order change, so the spread covers both.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from tlm_jax.capacity.budget import EQUAL, TRAIN_TOKENS, budget, unequal
from tlm_jax.capacity.from_config import profile_from_config, sequence_length
from tlm_jax.capacity.profile import Profile
from tlm_jax.config import load_config
from tlm_jax.errors import UserError, raise_together
from tlm_jax.report.comparison import SEEDS


@dataclasses.dataclass(frozen=True)
class Variant:
    """One of the models compared.

    Attributes:
      name: as shown.
      changes: its overrides, each `key=value`.
      config: resolved, for the first seed.
      profile: its layers.
    """

    name: str
    changes: tuple[str, ...]
    config: ConfigDict
    profile: Profile

    @property
    def budget(self) -> dict[str, int]:
        """The profile's totals, and the tokens of one run."""
        train, length = self.config.train, self.config.data.sequence_length
        return {
            **budget(self.profile, length),
            TRAIN_TOKENS: train.num_steps * train.global_batch_size * length,
        }


@dataclasses.dataclass(frozen=True)
class Run:
    """One training of one variant.

    Attributes:
      variant: what is trained.
      index: number of the seed, from 0.
      workdir: its directory.
      arguments: what `tlm train` takes.
      config: as those arguments resolve.
    """

    variant: Variant
    index: int
    workdir: Path
    arguments: tuple[str, ...]
    config: ConfigDict

    @property
    def label(self) -> str:
        """How progress and errors call it."""
        return f"{self.variant.name}, seed {self.index}"


def split_commas(text: str) -> list[str]:
    """Splits at commas outside brackets: `(1.5,1),2` has two parts."""
    parts, depth = [""], 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def named_changes(vary: Sequence[str], variants: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """The names of all variants with their changes, in order: the grid of `--vary`, then each `--variant`.

    Args:
      vary: `key=value,value,...`, one for each axis of the grid.
      variants: `name:key=value,key=value,...`; `name:` changes nothing.

    Raises:
      UserError: what cannot be read, names given twice, keys that the comparison sets, fewer than two variants.
    """
    problems: list[UserError] = []
    axes = []
    for text in vary:
        key, equals, values = text.partition("=")
        axes.append([f"{key}={value}" for value in split_commas(values)])
        if not equals or "" in split_commas(values):
            mend = "such as --vary=profile.schedule=uniform,cosine"
            problems.append(UserError(f"not a key and its values: {text!r}", where="--vary", mend=mend))
    found: list[tuple[str, tuple[str, ...]]] = []
    for point in itertools.product(*axes) if axes else ():
        parts = [change.rpartition("=")[2] if len(axes) == 1 else _leaf(change) for change in point]
        found.append((",".join(parts), point))
    for text in variants:
        name, colon, changes = text.partition(":")
        listed = tuple(split_commas(changes)) if changes else ()
        if not name or not colon or not all("=" in change for change in listed):
            mend = "such as --variant=reversed:profile.start_ratio=0.5,profile.end_ratio=1.5"
            problems.append(UserError(f"not a name and its changes: {text!r}", where="--variant", mend=mend))
        found.append((name, listed))
    for name in dict.fromkeys(name for name, _ in found):
        if sum(_folder(other) == _folder(name) for other, _ in found) > 1:
            problems.append(UserError(f"two variants are named {name!r}", where="--vary and --variant"))
    for key in SEEDS:  # which `make_runs` sets
        if any(change.partition("=")[0] == key for _, changes in found for change in changes):
            problems.append(UserError(f"config.{key} is set by the comparison", where="--vary and --variant"))
    if len(found) < 2 and not problems:
        mend = "give --vary=KEY=VALUE,VALUE or --variant=NAME:KEY=VALUE, which may be repeated"
        problems.append(UserError("a comparison needs at least two variants", mend=mend))
    raise_together(problems)
    return dict(found)


def _leaf(change: str) -> str:
    """`profile.d_ff=640` as `d_ff=640`."""
    key, _, value = change.partition("=")
    return f"{key.rpartition('.')[2]}={value}"


def _folder(name: str) -> str:
    """A directory's name for a variant."""
    return re.sub(r"[^A-Za-z0-9_.=+-]+", "_", name).lstrip(".") or "_"


def make_variants(path: str, overrides: Sequence[str], changes: dict[str, tuple[str, ...]]) -> list[Variant]:
    """Resolves the config and profile of each variant.

    Args:
      path: the config file.
      overrides: `--config.key=value` for all variants.
      changes: from `named_changes`.

    Raises:
      UserError: what is wrong with any of them, together.
    """
    problems, found = [], []
    load_config(path, overrides)  # what is wrong with all variants is told once
    for name, own in changes.items():
        try:
            config = load_config(path, [*overrides, *(f"--config.{change}" for change in own)])
            found.append(Variant(name, own, config, profile_from_config(config)))
            sequence_length(config)  # without it there is no budget
        except UserError as problem:
            problems.append(UserError(str(problem), where=f"variant {name}"))
    raise_together(problems)
    return found


def budget_differences(variants: Sequence[Variant]) -> list[str]:
    """How the variants' budgets differ from the first's, as text; none when all are equal."""
    first = variants[0]
    return [
        f"{variant.name} has {variant.budget[key]:,} {EQUAL[key]}, {first.name} {first.budget[key]:,}"
        for variant in variants[1:]
        for key in unequal(first.budget, variant.budget)
    ]


def same_models(variants: Sequence[Variant]) -> list[str]:
    """Pairs of variants whose runs would be the same, as text: equal layers, and every key outside `profile`."""
    return [
        f"{a.name} and {b.name} have the same layers and settings"
        for a, b in itertools.combinations(variants, 2)
        if a.profile == b.profile and _without_profile(a.config) == _without_profile(b.config)
    ]


def _without_profile(config: ConfigDict) -> dict[str, Any]:
    return {room: values for room, values in config.to_dict().items() if room != "profile"}


def make_runs(path: str, overrides: Sequence[str], variants: Sequence[Variant], seeds: int, workdir: Path) -> list[Run]:
    """The runs in the order in which they are made: all variants of a seed, then the next seed.

    Args:
      path: the config file.
      overrides: `--config.key=value` for all variants.
      variants: from `make_variants`.
      seeds: how many.
      workdir: the comparison's directory; a run's is below it.
    """
    runs = []
    for index in range(seeds):
        for variant in variants:
            folder = workdir / _folder(variant.name) / f"seed-{index}"
            own = {
                "seed": variant.config.seed + index,
                "data.seed": variant.config.data.seed + index,
                "name": f"{variant.config.name} {variant.name} {index}",
            }
            changes = [*overrides, *(f"--config.{change}" for change in variant.changes)]
            changes += [f"--config.{key}={value}" for key, value in own.items()]
            arguments = (f"--config={path}", f"--workdir={folder}", *changes)
            runs.append(Run(variant, index, folder, arguments, load_config(path, changes)))
    return runs
