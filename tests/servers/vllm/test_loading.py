"""On the CPU, every core loads new weights; for sampling the server keeps its threads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from verifiers_vllm import loading
from verifiers_vllm.loading import load_with_every_core


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr(loading, "cores", lambda: 3)
    yield
    torch.set_num_threads(before)


def test_weights_are_loaded_by_every_core_and_the_threads_are_as_before_afterwards() -> None:
    loaded = load_with_every_core(lambda path, *, strict: (path, strict, torch.get_num_threads()))
    assert loaded("weights", strict=True) == ("weights", True, 3)
    assert torch.get_num_threads() == 1


def test_the_threads_are_as_before_where_loading_fails() -> None:
    def breaks() -> None:
        raise OSError("no such directory")

    with pytest.raises(OSError, match="no such directory"):
        load_with_every_core(breaks)()
    assert torch.get_num_threads() == 1


def test_a_worker_that_forbids_other_threads_to_be_set_is_no_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    # as vLLM's CPU worker does once its threads are bound
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    assert load_with_every_core(torch.get_num_threads)() == 3
