"""inspect_ai opens what vf-export writes for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from verifiers.evals.export import export_run
from verifiers.evals.store import ResultStore, read_run
from verifiers.rollouts.rollout import Rollout
from verifiers.types import Failure, Outcome, RolloutKey

pytestmark = [pytest.mark.slow, pytest.mark.timeout(150)]

RULES = "Follow all of these rules. " * 100


def rollout(example: int, generation: int) -> Rollout:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    failed = (example, generation) == (2, 1)
    return Rollout(
        RolloutKey(0, example, generation),
        Outcome.PROVIDER_ERROR if failed else Outcome.COMPLETED,
        prompt=[{"role": "system", "content": RULES}, {"role": "user", "content": "1 + 0?"}],
        completion=[
            {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "1"},
            {"role": "assistant", "content": "1"},
        ],
        answer="1",
        reward=None if failed else (1.0 if generation else 0.5),
        failure=Failure("ProviderError", "no") if failed else None,
    )


def test_inspects_reader_and_viewer_open_an_exported_log(run: Any, scripts: Path, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    directory.mkdir()
    metadata = {"env": "sums", "model": "org/m", "started": "2026-01-02T03:04:05+0000", "base_url": "http://h/v1"}
    with ResultStore(directory, metadata) as store:
        for example in range(3):
            for generation in range(2):
                store.append(rollout(example, generation))
    path, count = export_run(read_run(directory), tmp_path / "logs" / "sums.eval", "inspect")
    assert count == 6
    assert run("python", str(scripts / "inspect_log.py"), str(path)).endswith("ok\n")
