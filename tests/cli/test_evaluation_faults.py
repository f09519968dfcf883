"""A whole evaluation of a server that fails in every way: each rollout once, no fault a zero, the counts add up."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from verifiers.cli.evaluate import main
from verifiers.testing import FakeOpenAIServer, Fault

NULL = {"choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": None}}]}
PASSING = [
    Fault(503),
    Fault(429, retry_after=0.01),
    Fault(529),
    Fault.disconnect(),
    Fault.malformed(),
    Fault(200, body={"choices": []}),
    Fault(200, body=NULL),
]


class FailingServer:
    """Fails the first try of two thirds of the rollouts, and of each tenth prompt every one."""

    def __init__(self) -> None:
        self.tries: Counter[int] = Counter()
        self.mended = False

    def answer(self, body: Mapping[str, Any]) -> Any:
        number = int(body["messages"][-1]["content"].split()[-1])
        self.tries[number] += 1
        if number % 10 == 3 and not self.mended:
            return Fault(401)
        # the rollouts of a prompt are alike to a server, so what fails is every other request of it
        fails = number % 3 and self.tries[number] % 2 == 1
        if not fails:
            return "4"
        # one of all hangs, which takes a whole attempt's time
        return Fault.hang() if number == 17 and self.tries[17] == 1 else PASSING[number % len(PASSING)]


def test_every_rollout_of_an_evaluation_ends_once_and_no_fault_is_a_zero(
    env_name: str, results: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("random.random", lambda: 0.0)
    failing = FailingServer()
    with FakeOpenAIServer(failing.answer) as server:
        command = [env_name, "-a", '{"n": 30}', "-b", server.url, "-n", "-1", "-r", "4", "--json"]
        # more time than an answer takes on a busy machine, and not all rollouts in flight at once
        command += ["--attempt-timeout", "4", "-c", "8"]
        assert main(command) == 0
        summary = json.loads(capsys.readouterr().out)
        rows = results.rows
        assert summary["outcomes"] == {"completed": 108, "provider_error": 12}
        assert [summary[name] for name in ("rollouts", "scored", "unscored", "failed", "missing")] == [
            120, 108, 12, 12, 0,
        ]  # fmt: skip
        # the server is right whenever it answers
        assert summary["rewards"]["reward"]["mean"] == 1.0
        assert summary["rewards"]["reward"]["rollouts"] == 108
        assert sorted((row["example_id"], row["generation"]) for row in rows) == [
            (example, generation) for example in range(30) for generation in range(4)
        ]
        assert all((row["reward"] is None) == (row["outcome"] == "provider_error") for row in rows)
        assert {row["example_id"] for row in rows if row["reward"] is None} == {3, 13, 23}
        assert summary["retries"] == sum(row["attempts"] - 1 for row in rows) == server.request_count - 120 > 40
        failures = Path(results.directory / "failures.jsonl").read_text().splitlines()
        assert len(failures) == 12
        # what failed is done again, and nothing else
        failing.mended = True
        asked = sum(count for number, count in failing.tries.items() if number % 10 != 3)
        assert main(command) == 0
        assert json.loads(capsys.readouterr().out)["outcomes"] == {"completed": 120}
        assert sum(count for number, count in failing.tries.items() if number % 10 != 3) == asked
