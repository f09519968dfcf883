"""Fixtures of the conformance tests of the classic API: a client that answers from a script, rows, and packages."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from verifiers.testing import FakeClient

PACKAGES = Path(__file__).parent / "packages"


def echo(body: dict[str, Any]) -> str:
    """Answers "re: " and the last thing that was said."""
    said = body["messages"][-1]["content"] if "messages" in body else body["prompt"]
    return f"re: {said}"


@pytest.fixture
def rows() -> list[dict[str, Any]]:
    return [{"question": f"q{number}", "answer": f"a{number}"} for number in range(3)]


@pytest.fixture
def client() -> FakeClient:
    return FakeClient(echo)


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make the packages word_hunt (first generation) and unit_quiz (second) importable."""
    for folder in PACKAGES.iterdir():
        monkeypatch.syspath_prepend(str(folder))
    yield
    for name in ("word_hunt", "unit_quiz"):
        sys.modules.pop(name, None)
