"""Scriptable stand-ins for a rollout server and its client, for tests and benchmarks without a model.

    FakeOpenAIServer    an OpenAI-compatible server on a loopback port, with faults and weight routes
    FakeClient          an object shaped like `openai.AsyncOpenAI`, without network
    Fault               what can go wrong: error statuses, disconnects, hanging, malformed bodies

Names load when first used, so that importing this package costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verifiers.testing.fake_client import FakeClient
    from verifiers.testing.fake_server import FakeOpenAIServer
    from verifiers.testing.faults import Fault
    from verifiers.testing.script import RecordedRequest, decode_ids, encode_text

__all__ = ["FakeClient", "FakeOpenAIServer", "Fault", "RecordedRequest", "decode_ids", "encode_text"]

_HOMES = {
    "FakeClient": "fake_client",
    "FakeOpenAIServer": "fake_server",
    "Fault": "faults",
    "RecordedRequest": "script",
    "decode_ids": "script",
    "encode_text": "script",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
