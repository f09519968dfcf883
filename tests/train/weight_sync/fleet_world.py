"""What the tests of pushes to servers share."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from verifiers.testing import FakeOpenAIServer

SOME = {"w": torch.ones(2, 2)}
NEVER_PUSHED = "default"


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def restarted(server: FakeOpenAIServer) -> None:
    """What a restart leaves: weights that nobody pushed, and no pause."""
    server.weight_version = NEVER_PUSHED
    server.paused = False


def loads(server: FakeOpenAIServer) -> int:
    return sum(call.path == "/collective_rpc" for call in server.weight_calls)
