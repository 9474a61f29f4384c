"""Small inputs that the tests of this room make for themselves."""

from __future__ import annotations

import json
import random
from pathlib import Path

_WORDS = ["the", "a", "whale", "sea", "ship", "captain", "said", "to", "and", "of", "in", "was", "it", "his", "old"]
_WORDS += ["white", "great", "deep", "1851", "na\u00efve,", "end.", "Oh!", "caf\u00e9"]


def make_texts(count: int, seed: int = 0, longest: int = 60) -> list[str]:
    """Documents of 1 to `longest` words, with line breaks and runs of spaces."""
    chance = random.Random(seed)
    gaps = [" "] * 20 + ["\n", "\n\n", "  ", "\t"]
    return [
        "".join(chance.choice(_WORDS) + chance.choice(gaps) for _ in range(chance.randint(1, longest)))
        for _ in range(count)
    ]


def write_jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text, "n": i}) + "\n" for i, text in enumerate(texts)))
    return path
