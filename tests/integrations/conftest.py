"""Processes of MCP servers, and other servers that integrations speak to."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from mcp_world import Pids, Servers
    from remote_world import RecordingServer


@pytest.fixture
def pids(tmp_path: Path) -> Iterator[Pids]:
    """Yield the processes of MCP servers, and kill those that are left."""
    from mcp_world import Pids

    started = Pids(tmp_path / "pids")
    yield started
    for pid in started.all:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def recorder() -> Iterator[RecordingServer]:
    """Yield a scripted dataserver that keeps every request."""
    from remote_world import RecordingServer

    with RecordingServer() as server:
        yield server


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Servers:
    """Return the MCP servers in this process, to which every connection then goes."""
    from mcp_world import Servers

    from verifiers.integrations.mcp import MCPConnection

    found = Servers()
    monkeypatch.setattr(MCPConnection, "_new_client", lambda *args: found.client(*args))
    return found
