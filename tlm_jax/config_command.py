"""`tlm config`: every key of the config with its default and what it means, from the comments in `default_config`.

`tlm config --markdown` is docs/config.md.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import inspect
import io
import textwrap
import tokenize
from collections.abc import Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from tlm_jax.config import default_config, keys, load_config, reject_overrides
from tlm_jax.errors import EXIT_COMPLETE, UserError

_HEAD = """\
# Config keys

Made from the comments in [`tlm_jax/config.py`](../tlm_jax/config.py) by `tlm config --markdown > docs/config.md`.

A config file's `get_config()` starts from these defaults; on the command line any key is set with `--config.KEY=VALUE`.
`tlm config WORD` prints the keys that have WORD in their name or meaning, `tlm config --config=F` those of a config
file.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of `tlm config`."""
    parser.add_argument("word", nargs="?", default="", help="only the keys with this in their name or meaning")
    parser.add_argument("--config", metavar="FILE", help="show this config's values, with --config.KEY=VALUE applied")
    parser.add_argument("--markdown", action="store_true", help="print docs/config.md")


def run(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Prints the keys and returns the exit code."""
    words = [args.word] if args.word else []
    words += [text for text in overrides if not text.startswith("-")]  # those after an option
    overrides = [text for text in overrides if text.startswith("-")]
    if args.markdown:
        reject_overrides([*overrides, *words, *(["--config"] if args.config else [])])
        print(markdown(), end="")
        return EXIT_COMPLETE
    if not args.config:
        reject_overrides(overrides)
    reject_overrides(words[1:])
    word = words[0] if words else ""
    print(_text(load_config(args.config, overrides) if args.config else default_config(), word))
    return EXIT_COMPLETE


def comments() -> dict[str, str]:
    """What `default_config` says of each key and group, in the order in which it defines them."""
    source = textwrap.dedent(inspect.getsource(default_config))
    said: dict[int, str] = {}
    alone: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            said[token.start[0]] = token.string.lstrip("# ").strip()
            if token.line.lstrip().startswith("#"):
                alone.add(token.start[0])
    found = {}
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Attribute):
            continue
        first = node.lineno
        while first - 1 in alone:
            first -= 1
        lines = [said[line] for line in range(first, (node.end_lineno or node.lineno) + 1) if line in said]
        found[ast.unparse(node.targets[0]).partition(".")[2]] = " ".join(lines)
    return found


def markdown() -> str:
    """The whole of docs/config.md."""
    said, config = comments(), default_config()
    parts, group = [_HEAD], None
    for key in _in_order(config):
        room = key.rpartition(".")[0]
        if room != group:
            group = room
            title = f"\n## config.{room}\n" if room else "\n## config\n"
            parts.append(title + (f"\n{_sentence(said[room])}\n" if said.get(room) else ""))
            parts.append("\n| key | default | meaning |\n|---|---|---|\n")
        parts.append(f"| `{key}` | `{_shown(config, key)}` | {_cell(said.get(key, ''))} |\n")
    return "".join(parts)


def _in_order(config: ConfigDict) -> list[str]:
    """The keys as `default_config` defines them; iterating over a ConfigDict goes by the alphabet."""
    order = list(comments())
    return sorted(keys(config), key=order.index)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + ("" if text.endswith(".") else ".")


def _text(config: ConfigDict, word: str) -> str:
    """The keys with `word` in name or meaning, one a line; a value that is not the default is told with the default."""
    said, defaults = comments(), default_config()
    wanted = word.removeprefix("config.").casefold()
    chosen = [key for key in _in_order(config) if wanted in key or wanted in said.get(key, "").casefold()]
    if not chosen:
        near = difflib.get_close_matches(word, list(keys(config)), n=1, cutoff=0.0)[0]
        raise UserError(f"no key and no meaning contains {word!r}", mend=f"the nearest key is {near}")
    values = {key: _shown(config, key) for key in chosen}
    width, value_width = max(map(len, chosen)), min(24, max(map(len, values.values())))
    lines = []
    for key, value in values.items():
        default = _shown(defaults, key)
        changed = "" if value == default else f"[default {default}] "
        lines.append(f"{key:<{width}}  {value:<{value_width}}  {changed}{said.get(key, '')}".rstrip())
    return "\n".join(lines)


def _shown(config: Mapping[str, Any], key: str) -> str:
    """A key's value as Python writes it."""
    value: Any = config
    for part in key.split("."):
        value = value[part]
    return repr(value)
