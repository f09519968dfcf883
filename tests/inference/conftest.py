"""Servers without the seconds between checks."""

from __future__ import annotations

import pytest

from verifiers import loop_thread
from verifiers.inference import server_pool
from verifiers.inference.retry import RetryPolicy


@pytest.fixture
def in_fast_motion(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers are checked, and asked again, without the seconds in between; the end waits on a crowded machine."""
    monkeypatch.setattr(server_pool, "CHECK_INTERVAL_S", 0.02)
    monkeypatch.setattr(server_pool, "CONTROL_RETRIES", RetryPolicy(max_attempts=4, base_s=0.02))
    monkeypatch.setattr(server_pool, "SHUTDOWN_S", 30.0)
    monkeypatch.setattr(loop_thread, "_STOP_RECEIVED_S", 60.0)
    monkeypatch.setattr(loop_thread, "_CLOSING_S", 60.0)
