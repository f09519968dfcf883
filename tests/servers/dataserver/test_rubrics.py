"""An installed environment as a dataset: its rows are served, its rubric grades in a process of its own."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

ENVIRONMENT = """
import os, time
import verifiers as vf

ROWS = [{"question": f"q{i}", "answer": str(i), "info": {"shown": i, "hidden": "secret"}} for i in range(4)]


def load_environment(kind="plain"):
    if kind == "broken":
        rows = [{"question": "q", "answer": "a", "info": info} for info in ("{}", "the answer is a")]
        return vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric(funcs=[right]))
    if kind == "group":
        rubric = vf.Rubric(funcs=[best])
    else:
        rubric = vf.Rubric(funcs=[right, length], weights=[1.0, 0.0])
    return vf.SingleTurnEnv(dataset=ROWS, system_prompt="Be brief.", rubric=rubric)


async def right(completion, answer):
    said = completion[-1]["content"]
    if said == "hang":
        time.sleep(1e6)
    if said == "spin":
        while True:
            pass
    if said == "die":
        os._exit(3)
    if said == "raise":
        raise ValueError("the answer is " + answer)
    print("not an answer")
    return float(said == answer)


def length(state):
    return float(state["responses"][0]["usage"]["completion_tokens"])


def best(completions, answers):
    longest = max(len(completion[-1]["content"]) for completion in completions)
    return [float(len(completion[-1]["content"]) == longest) for completion in completions]
"""


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    name = f"served_{abs(hash(str(tmp_path))) % 10**9}"
    (tmp_path / f"{name}.py").write_text(ENVIRONMENT)
    monkeypatch.syspath_prepend(str(tmp_path))

    def table(kind: str = "plain", **fields: Any) -> dict[str, Any]:
        return {"environment": {"id": name, "args": {"kind": kind}, **fields}, "metadata": ["shown"]}

    return table


async def test_its_rows_are_served_and_its_rubric_grades(serve: Any, environment: Any) -> None:
    server = await serve({"datasets": {"env": environment()}})
    _, answer = await server.post("/v2/rows", {"dataset": "env", "offset": 2, "limit": 1})
    (sample,) = answer["samples"]
    assert (sample["system_prompt"], sample["prompt"], sample["metadata"]) == ("Be brief.", "q2", {"shown": 2})
    right, wrong = await server.grade(("env:2", "2"), ("env:2", "3"))
    assert right["metrics"] == {"right": 1.0, "length": 1.0, "rubric": 1.0}
    assert [right["reward"], wrong["reward"]] == [1.0, 0.0]
    failed, after = await server.grade(("env:1", "raise"), ("env:1", "1"))
    assert (failed["reward"], after["reward"]) == (None, 1.0)
    assert "the answer is" not in failed["error"]


async def test_a_row_that_cannot_be_served_is_refused_and_only_the_log_quotes_it(
    serve: Any, environment: Any, caplog: pytest.LogCaptureFixture
) -> None:
    server = await serve({"datasets": {"env": environment("broken")}})
    for path, body in (
        ("/v2/rows", {"dataset": "env"}),
        ("/v2/grade", {"items": [{"sample_id": "env:1", "completion": "a", "completion_index": 0}]}),
    ):
        status, answer = await server.post(path, body)
        assert (status, answer["error"]["code"]) == (400, "broken_row")
        assert "the answer is" not in answer["error"]["message"]
    assert "row 1 of dataset 'env'" in caplog.text
    assert (await server.post("/v2/rows", {"dataset": "env", "limit": 1}))[0] == 200


async def test_completions_of_one_sample_in_a_request_are_a_group(serve: Any, environment: Any) -> None:
    server = await serve({"datasets": {"env": environment("group")}})
    results = await server.grade(("env:0", "a"), ("env:1", "a"), ("env:0", "abc"), ("env:1", "abcd"))
    assert [result["reward"] for result in results] == [0.0, 0.0, 1.0, 1.0]


@pytest.mark.slow
async def test_what_others_wait_for_survives_a_neighbour_that_brings_the_process_down(
    serve: Any, environment: Any
) -> None:
    server = await serve({"datasets": {"env": environment(timeout_s=20.0)}})
    await server.grade(("env:1", "1"))
    results = await asyncio.gather(server.grade(("env:1", "die")), *(server.grade(("env:1", "1")) for _ in range(8)))
    assert [result["reward"] for (result,) in results] == [None] + [1.0] * 8
