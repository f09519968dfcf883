"""What a save took is given back to the system."""

from __future__ import annotations

import ctypes
from typing import Any

import psutil
import pytest

from verifiers.train.heap import GivesMemoryBack


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="only glibc can be asked to")
def test_pages_that_are_free_are_given_back_after_a_save() -> None:
    nothing: Any = None
    before = psutil.Process().memory_info().rss
    # too small for pages of their own, and the last one keeps what is below it
    blocks = [bytearray(20_000) for _ in range(5_000)]
    last = bytearray(20_000)
    grown = psutil.Process().memory_info().rss - before
    assert grown > 50e6
    blocks.clear()
    GivesMemoryBack().on_save(nothing, nothing, nothing)
    assert psutil.Process().memory_info().rss - before < grown / 2
    del last


def test_where_there_is_nothing_to_ask_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    from verifiers.train import heap

    monkeypatch.setattr(heap.ctypes, "CDLL", lambda name: object())
    assert heap._trim.__wrapped__()(0) is None
