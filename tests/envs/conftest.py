"""A client that answers from a script, and rows to ask about."""

from __future__ import annotations

from typing import Any

import pytest

from verifiers.testing import FakeClient

ROWS = [{"question": f"q{number}", "answer": f"a{number}"} for number in range(3)]


def echo(body: dict[str, Any]) -> str:
    """Answers "re: " and the last thing that was said."""
    said = body["messages"][-1]["content"] if "messages" in body else body["prompt"]
    return f"re: {said}"


@pytest.fixture
def rows() -> list[dict[str, Any]]:
    return [dict(row) for row in ROWS]


@pytest.fixture
def client() -> FakeClient:
    return FakeClient(echo)
