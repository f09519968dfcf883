"""On the CPU, every core loads new weights; for sampling the server keeps its threads.

What a load leaves behind, and what it packs again, is tried with a real vLLM in tests/vllm.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from verifiers_vllm import loading
from verifiers_vllm.loading import load_with_every_core


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before, set_threads = torch.get_num_threads(), torch.set_num_threads
    set_threads(1)
    monkeypatch.setattr(loading, "cores", lambda: 3)
    yield
    set_threads(before)


def test_every_core_loads_and_the_threads_are_as_before_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    # as vLLM's CPU worker does once its threads are bound
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    loaded = load_with_every_core(lambda path, *, strict: (path, strict, torch.get_num_threads()))
    assert loaded("weights", strict=True) == ("weights", True, 3)
    assert torch.get_num_threads() == 1


def test_the_threads_are_as_before_where_loading_fails() -> None:
    def breaks() -> None:
        raise OSError("no such directory")

    with pytest.raises(OSError, match="no such directory"):
        load_with_every_core(breaks)()
    assert torch.get_num_threads() == 1
