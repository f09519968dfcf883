"""Test modules are imported without a package (import mode importlib), so what they share is found by path."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def _patient_close(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a generator's thread end however crowded the machine is, where it would be left behind after seconds."""
    monkeypatch.setattr("verifiers.loop_thread._STOP_RECEIVED_S", 60.0)
    monkeypatch.setattr("verifiers.loop_thread._CLOSING_S", 60.0)
