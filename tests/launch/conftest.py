"""An environment that counts as installed, whose `tlm` is a stub."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

# What stand_ins.py holds is shared by the tests of this room only.
sys.path.insert(0, str(Path(__file__).parent))

from stand_ins import LAUNCH, executable


@pytest.fixture
def environment(tmp_path):
    """Variables under which an environment is ready whose `python` is this one and whose `tlm` is the stub."""
    venv = tmp_path / "venv"
    executable(venv / "bin" / "python", f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    executable(venv / "bin" / "tlm", f'#!/bin/sh\nexec {sys.executable} {Path(__file__).parent}/stub_tlm.py "$@"\n')
    script = f'. {LAUNCH}/environment.sh; fingerprint {venv}/bin/python > "$STAMP"'
    variables = os.environ | {"TLM_VENV": str(venv), "TLM_LOG": str(tmp_path / "log.jsonl")}
    subprocess.run(["bash", "-c", script], env=variables, check=True)
    return variables
