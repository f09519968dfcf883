"""A grader that fails is an error of its own items: never a reward of 0, and nobody else's trouble."""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web
from verifiers_dataserver import serving
from verifiers_dataserver.config import load_configuration
from verifiers_dataserver.grading import graders, rewards
from verifiers_dataserver.grading.rewards import DatasetReward, Part
from verifiers_dataserver.scores import Score

from verifiers.sandbox.worker_pool import WorkerPool
from verifiers.server_process import bind


@pytest.fixture
def rows(tmp_path: Path) -> str:
    lines = [json.dumps({"prompt": f"q{i}", "answer": f"{i}"}) for i in range(4)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    return "rows.jsonl"


def datasets(rows: str, *graders: str) -> dict[str, Any]:
    return {"fine": {"jsonl": rows, "graders": ["exact"]}} | {
        name: {"jsonl": rows, "graders": ["exact", name]} for name in graders
    }


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("hang", "did not answer in time"),
        ("spin", "did not answer in time"),
        ("die", "ended without an answer"),
        ("quote", "raised ValueError"),
        ("nothing", "no finite number"),
    ],
)
async def test_a_failing_grader_is_an_error_of_its_items_and_the_others_have_their_rewards(
    serve: Any, python: Any, rows: str, name: str, words: str
) -> None:
    grader = python(name, **({"timeout_s": 0.5} if name in ("hang", "spin") else {}))
    server = await serve({"datasets": datasets(rows, name), "graders": {name: grader}})
    failed, right, wrong = await server.grade((f"{name}:1", "1"), ("fine:1", "1"), ("fine:1", "2"))
    assert failed["reward"] is None
    assert words in failed["error"]
    assert failed["metrics"] == {"exact": 1.0}
    assert [(result["reward"], result["error"]) for result in (right, wrong)] == [(1.0, None), (0.0, None)]
    metrics = await server.text("/metrics")
    assert f'vf_dataserver_failures_total{{dataset="{name}",grader="{name}"}} 1.0' in metrics
    assert 'vf_dataserver_graded_total{dataset="fine"} 2.0' in metrics


async def test_one_completion_that_makes_a_grader_hang_costs_the_others_of_its_group_nothing(
    serve: Any, python: Any, rows: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = WorkerPool.call

    async def impatient(pool: WorkerPool, function: str, target: str, given: Any, options: Any) -> Any:
        timeout_s = 0.5 if given["text"] == "slow" else 30.0
        return await call(pool, function, target, given, options, timeout_s=timeout_s)

    monkeypatch.setattr(WorkerPool, "call", impatient)
    server = await serve({"datasets": datasets(rows, "slow_if"), "graders": {"slow_if": python("slow_if")}})
    results = await server.grade(("slow_if:1", "1"), ("slow_if:1", "slow"), ("slow_if:1", "1"))
    assert [result["reward"] for result in results] == [1.0, None, 1.0]


async def test_while_a_grader_hangs_other_requests_are_answered_at_once(serve: Any, python: Any, rows: str) -> None:
    server = await serve({"datasets": datasets(rows, "hang"), "graders": {"hang": python("hang", timeout_s=30.0)}})
    hanging = asyncio.create_task(server.grade(*[("hang:1", "1")] * 16))
    await asyncio.sleep(0.05)
    started = time.perf_counter()
    for _ in range(20):
        assert (await server.grade(("fine:1", "1")))[0]["reward"] == 1.0
        assert (await server.post("/sample", {"iteration": 0, "batch_size": 1}))[0] == 200
    assert time.perf_counter() - started < 25.0
    assert not hanging.done()
    hanging.cancel()
    await asyncio.gather(hanging, return_exceptions=True)


async def test_what_no_worker_takes_in_time_is_an_error_too(
    serve: Any, python: Any, rows: str, pass_time: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what was graded by then keeps its reward, also where the same grader did it."""
    graded: list[Any] = []
    score_of = graders.score_of
    monkeypatch.setattr(graders, "score_of", lambda *result: (graded.append(result), score_of(*result))[1])
    # what ends a grader that keeps to no time must not come in between
    monkeypatch.setattr(rewards, "_GRACE_S", 1000.0)
    grader = python("slow_if", timeout_s=600.0, workers=1)
    server = await serve(
        {"datasets": datasets(rows, "slow_if"), "graders": {"slow_if": grader}, "server": {"grade_timeout_s": 100.0}}
    )
    items = [("slow_if:1", "1"), ("slow_if:1", "slow"), ("slow_if:1", "slow"), ("fine:1", "1")]
    asked = asyncio.create_task(server.grade(*items))
    while not graded:  # noqa: ASYNC110 - it sets no events
        await asyncio.sleep(0.01)
    pass_time(100.0)
    assert [result["reward"] for result in await asked] == [1.0, None, None, 1.0]


async def test_version_1_answers_503_which_its_clients_repeat_and_no_0(serve: Any, python: Any, rows: str) -> None:
    server = await serve({"datasets": datasets(rows, "quote"), "graders": {"quote": python("quote")}})
    items = [
        {"sample_id": "quote:1", "completion": "1", "completion_index": 0},
        {"sample_id": "fine:1", "completion": "1", "completion_index": 1},
    ]
    status, answer = await server.post("/grade", {"iteration": 0, "items": items})
    assert (status, answer["error"]["code"]) == (503, "grading_failed")
    assert [result["reward"] for result in answer["results"]] == [None, 1.0]


async def test_a_grader_leaves_scarce_cores_to_the_server(serve: Any, python: Any, rows: str) -> None:
    grader = {"niceness": python("niceness")}
    server = await serve({"datasets": {"d": {"jsonl": rows, "graders": ["niceness"]}}, "graders": grader})
    # 19 is the most there is
    assert (await server.grade(("d:1", "1")))[0]["reward"] >= min(os.nice(0) + 1, 19)


# -- graders behind a URL ---------------------------------------------------------------------------------------


class FarGrader:
    """A grader of somebody else's; `answer` says what it does with the samples."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[str | None] = []
        self.answer: Any = None
        self.url = ""

    async def grade(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.json())
        self.headers.append(request.headers.get("Authorization"))
        answer = self.answer(self.bodies[-1]["samples"])
        if inspect.isawaitable(answer):
            answer = await answer
        return answer if isinstance(answer, web.StreamResponse) else web.json_response({"results": answer})


@pytest_asyncio.fixture
async def far() -> AsyncIterator[FarGrader]:
    grader = FarGrader()
    app = web.Application()
    app.router.add_post("/grade", grader.grade)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    grader.url = f"http://127.0.0.1:{runner.addresses[0][1]}/grade"
    yield grader
    await runner.cleanup()


async def test_a_grader_behind_a_url_gets_the_row_and_is_joined_on_completion_index(
    serve: Any, far: FarGrader, rows: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAR_TOKEN", "secret")
    table = {"http": far.url, "token_var": "FAR_TOKEN"}
    server = await serve({"datasets": {"far": {"jsonl": rows, "graders": ["far"]}}, "graders": {"far": table}})
    far.answer = lambda samples: [
        {"completion_index": sample["completion_index"], "reward": len(sample["completion"])}
        for sample in reversed(samples)
    ]
    results = await server.grade(("far:1", "a"), ("far:2", "bb"), ("far:1", "ccc"))
    assert [result["reward"] for result in results] == [1.0, 2.0, 3.0]
    assert far.headers == ["Bearer secret"]
    sample = far.bodies[0]["samples"][1]
    assert (sample["sample_id"], sample["prompt"], sample["answer"]) == ("far:2", "q2", "2")


SECOND_ONLY = [{"completion_index": 1, "reward": 0.5}]


@pytest.mark.parametrize(
    ("answer", "rewards"),
    [
        (lambda samples: [{"sample_id": s["sample_id"], "reward": 1} for s in samples], [None, 1.0, None]),
        (lambda samples: [], [None, None, None]),
        (lambda samples: [{"completion_index": 1, "reward": "nan"}], [None, None, None]),
        (lambda samples: ["x", None, {"completion_index": 2, "reward": 0}], [None, None, 0.0]),
        (lambda samples: [{"completion_index": i, "reward": i} for i in (0.0, True, 2.0)], [0.0, None, 2.0]),
        (lambda samples: web.json_response({"results": SECOND_ONLY}, status=201), [None, 0.5, None]),
        (lambda samples: web.Response(status=500), [None, None, None]),
        (lambda samples: web.Response(text="no json"), [None, None, None]),
        (lambda samples: web.json_response([]), [None, None, None]),
    ],
)
async def test_what_a_grader_behind_a_url_leaves_out_or_gets_wrong_is_an_error(
    serve: Any, far: FarGrader, rows: str, answer: Any, rewards: Any
) -> None:
    """Results without completion_index count only where no two samples share an id."""
    far.answer = answer
    server = await serve(
        {"datasets": {"far": {"jsonl": rows, "graders": ["far"]}}, "graders": {"far": {"http": far.url}}}
    )
    results = await server.grade(("far:1", "a"), ("far:2", "b"), ("far:1", "c"))
    assert [result["reward"] for result in results] == rewards
    assert all(bool(result["error"]) == (result["reward"] is None) for result in results)


async def test_a_redirection_gets_neither_the_token_nor_the_rows(
    serve: Any, far: FarGrader, rows: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAR_TOKEN", "secret")
    elsewhere = far.url.replace("127.0.0.1", "localhost")
    far.answer = lambda samples: web.Response(status=307, headers={"Location": elsewhere})
    table = {"http": far.url, "token_var": "FAR_TOKEN"}
    server = await serve({"datasets": {"far": {"jsonl": rows, "graders": ["far"]}}, "graders": {"far": table}})
    (failed,) = await server.grade(("far:1", "a"))
    assert failed["reward"] is None
    assert len(far.bodies) == 1


# -- numbers that are none --------------------------------------------------------------------------------------


async def test_scores_that_are_too_large_together_are_an_error_and_no_infinite_reward(
    serve: Any, python: Any, rows: str
) -> None:
    server = await serve(
        {
            "datasets": {
                "high": {"jsonl": rows, "graders": [{"use": "given", "weight": 1e300}]},
                "heavy": {
                    "jsonl": rows,
                    "graders": [{"use": "exact", "weight": 1e308}, {"use": "given", "weight": 1e308}],
                },
            },
            "graders": {"given": python("given")},
        }
    )
    high, heavy = await server.grade(("high:1", "3e38"), ("heavy:1", "0.5"))
    for result in (high, heavy):
        assert result["reward"] is None
        assert "no finite number" in result["error"]
    assert high["metrics"] == {"given": 3e38}


def test_metrics_that_are_no_finite_numbers_are_left_out() -> None:
    metrics = {"a": math.nan, "b": math.inf, "c": 2.0}
    reward = DatasetReward([Part("rubric", cast(Any, None), 1.0, False)], 1.0)
    assert reward._combined([Score(1.0, metrics=metrics)]).metrics == {"c": 2.0, "rubric": 1.0}


# -- the end of the server --------------------------------------------------------------------------------------


async def test_what_the_end_of_the_server_breaks_off_is_to_be_sent_again(
    configure: Any, far: FarGrader, rows: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no final error: the server that comes after it can grade it."""
    monkeypatch.setattr(serving, "_FINISH_S", 1.0)
    never = asyncio.Event()
    far.answer = lambda samples: never.wait()
    path = configure({"datasets": datasets(rows, "far"), "graders": {"far": {"http": far.url}}})
    loaded = serving.load(load_configuration(path))
    items = [{"sample_id": "far:1", "completion": "1", "completion_index": 0}]
    async with aiohttp.ClientSession() as session:
        with bind("127.0.0.1", 0) as listener:
            async with serving.running(loaded, listener) as url:
                asked = asyncio.create_task(session.post(f"{url}/v2/grade", json={"items": items}))
                while not far.bodies:  # noqa: ASYNC110 - it sets no events
                    await asyncio.sleep(0.01)
            async with await asked as response:
                assert response.status == 503
                assert (await response.json())["error"]["code"] == "ending"
    never.set()
