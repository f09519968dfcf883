"""The key-value cache stays within its memory: requests wait, and no answer depends on it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from verifiers_embedded.engine.engine import Engine
from verifiers_embedded.engine.generation import Generation, GenerationRequest, Sequence
from verifiers_embedded.engine.loading import available_bytes, cgroup_bytes, load_model
from verifiers_embedded.engine.sampling import SamplingParameters
from verifiers_embedded.errors import StartError

LENGTHS = ((10, 40), (30, 5), (3, 60), (10, 40), (55, 20), (1, 30))
"""Prompt and completion of each request."""


class Running:
    """A watcher of how many sequences have a slot at once, and of the longest."""

    def __init__(self) -> None:
        self.engine: Engine | None = None
        self.cells: list[int] = []
        self._longest = 0

    def advance(self, sequence: Sequence) -> None:
        assert self.engine is not None
        assert threading.current_thread().name == "vf-engine"
        self.cells.append(self.engine.counts["running"] * len(sequence.tokens[:-1]))


def generate(model: Any, cache_tokens: int | None) -> tuple[list[Generation], int]:
    """Return the answers to all requests, and the most slots times tokens that a step had."""
    seen = Running()
    engine = Engine(model, decode=lambda ids: "", slots=6, max_model_len=100, threads=1, cache_tokens=cache_tokens)
    seen.engine = engine
    requests = [
        GenerationRequest(tuple((7 * place + seed) % 90 for place in range(prompt)), most, SamplingParameters(seed))
        for seed, (prompt, most) in enumerate(LENGTHS)
    ]
    answers = engine.submit_all([(request, seen.advance) for request in requests])
    engine.start()
    try:
        return [answer.result(60) for answer in answers], max(seen.cells)
    finally:
        engine.stop()


def test_sequences_that_outgrow_the_cache_wait_and_are_answered_as_with_room(model_dir: Path) -> None:
    model = load_model(model_dir, device="cpu", dtype="float32", max_model_len=100).model
    wide, needed = generate(model, None)
    assert needed > 160
    # 100: no two of the longest at once; 75: no more than one request fits beside another
    for cache_tokens in (160, 100, 76):
        narrow, most = generate(model, cache_tokens)
        assert most <= cache_tokens
        for one, other in zip(wide, narrow, strict=True):
            assert one.token_ids == other.token_ids
            assert one.log_probs == pytest.approx(other.log_probs, abs=1e-4)
            assert one.finish_reason == other.finish_reason == "length"


def test_the_context_is_what_the_memory_holds_unless_one_is_asked_for(model_dir: Path) -> None:
    whole = load_model(model_dir, device="cpu", dtype="float32", max_model_len=None)
    room = 40 * whole.cache_bytes_per_token
    assert whole.cache_tokens * whole.cache_bytes_per_token <= available_bytes(torch.device("cpu"))
    fitted = load_model(model_dir, device="cpu", dtype="float32", max_model_len=None, cache_bytes=room)
    assert (fitted.max_model_len, fitted.cache_tokens) == (40, 40)
    for asked in (41, whole.max_model_len):
        with pytest.raises(StartError, match=f"{asked} tokens.*--kv-cache-mib"):
            load_model(model_dir, device="cpu", dtype="float32", max_model_len=asked, cache_bytes=room)


@pytest.mark.parametrize(
    ("entries", "files", "left"),
    [
        pytest.param("0::/job/step\n", {"job": ("memory.max", "900", "anon 300")}, 600, id="limit of a parent"),
        pytest.param("0::/a/b\n", {"": ("memory.max", "900", "file 8\nanon 300")}, 600, id="root of a container"),
        pytest.param("0::/job\n", {"job": ("memory.max", "max", "anon 300")}, None, id="no limit"),
        pytest.param("0::/job\n", {"job": ("memory.max", "200", "anon 300")}, 0, id="all in use"),
        pytest.param(
            "3:cpu:/x\n4:memory:/x\n0::/\n",
            {"memory/x": ("memory.limit_in_bytes", "900", "total_rss 100")},
            800,
            id="version 1",
        ),
        pytest.param("", {}, None, id="no groups"),
    ],
)
def test_a_limit_of_control_groups_counts(
    tmp_path: Path, entries: str, files: dict[str, tuple[str, str, str]], left: int | None
) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(entries)
    for group, (limit, size, counts) in files.items():
        folder = tmp_path / "groups" / group
        folder.mkdir(parents=True)
        (folder / limit).write_text(size + "\n")
        (folder / "memory.stat").write_text(counts + "\n")
    found = cgroup_bytes(tmp_path / "proc", tmp_path / "groups")
    assert found == left if left is not None else found > 2**60
    if not entries:
        assert cgroup_bytes(tmp_path / "nothing", tmp_path) > 2**60
