"""Two rollout servers and a sync that pushes to both."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

# test modules are imported without a package (import mode importlib), so what they share is found by path
sys.path.insert(0, str(Path(__file__).parent))

from fleet_world import NEVER_PUSHED

from verifiers.testing import FakeOpenAIServer
from verifiers.train.weight_sync import DirectorySync
from verifiers.train.weight_sync import members as members_module
from verifiers.train.weight_sync import watch as watch_module


@pytest.fixture
def in_fast_motion(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers are looked after, and asked again, without the seconds in between."""
    monkeypatch.setattr(watch_module, "WATCH_INTERVAL_S", 0.02)
    monkeypatch.setattr(members_module, "_WAITS_S", (0.01, 0.02, 0.03))


@pytest.fixture
def servers() -> Iterator[list[FakeOpenAIServer]]:
    with ExitStack() as stack:
        yield [stack.enter_context(FakeOpenAIServer(weight_version=NEVER_PUSHED)) for _ in range(2)]


@pytest.fixture
def sync(servers: list[FakeOpenAIServer], tmp_path: Path) -> Iterator[DirectorySync]:
    made = DirectorySync([server.url for server in servers], str(tmp_path), timeout_s=5.0)
    made.connect(5.0)
    yield made
    made.close()
