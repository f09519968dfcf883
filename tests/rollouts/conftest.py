"""What every test of rollouts begins with."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _patient_close(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a generator's thread end however crowded the machine is, where it would be left behind after seconds."""
    monkeypatch.setattr("verifiers.loop_thread._STOP_RECEIVED_S", 60.0)
    monkeypatch.setattr("verifiers.loop_thread._CLOSING_S", 60.0)
