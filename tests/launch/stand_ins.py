"""What the tests of the launch scripts share: stand-ins for programs, and what they noted."""

from __future__ import annotations

import json
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = ROOT / "launch"
CONFIG = str(ROOT / "configs" / "quickstart.py")


def executable(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def commands(log: Path) -> list[list[str]]:
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 240
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.01)


def names(calls: list[list[str]]) -> list[str]:
    return [call[0] for call in calls]
