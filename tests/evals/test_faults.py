"""Whole runs against servers that fail: each rollout ends once, and a fault of the server is never a zero.

`docs/concepts/outcomes.md` has the table of what is measured here: `pytest tests/evals/test_faults.py -s` prints it.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import pytest
from aiohttp import web

import verifiers as vf
from verifiers.inference.endpoint import Backend, Endpoint, HttpBackend
from verifiers.inference.limiter import AdaptiveLimiter, Limiter
from verifiers.inference.retry import RetryPolicy
from verifiers.inference.server_pool import ServerPool
from verifiers.rollouts.rollout import Rollout, RolloutRequest
from verifiers.rollouts.run import Run
from verifiers.testing import FakeOpenAIServer, Fault
from verifiers.types import Outcome, RolloutKey

PROMPTS, ROLLOUTS = 100, 4
PLANNED = PROMPTS * ROLLOUTS
QUICK = RetryPolicy(max_attempts=9, base_s=0.02)


@dataclass(frozen=True)
class Result:
    """The result of a run."""

    outcomes: Counter[Outcome]
    retries: int
    rewards: list[float]


async def run(backend: Backend, retry: RetryPolicy = QUICK, limiter: Limiter | None = None, **options: Any) -> Result:
    """Run all rollouts, and check what must hold whatever happens."""

    def correct(completion: vf.Messages, answer: str) -> float:
        return float(completion[-1]["content"] == answer)

    env = vf.SingleTurnEnv(
        eval_dataset=[{"question": "2+2?", "answer": "4"}],
        rubric=vf.Rubric(funcs=[correct]),
    )
    ended: list[Rollout] = []
    runner = Run(env, backend, "m", limiter=limiter or Limiter(32), retry=retry, on_rollout=ended.append, **options)
    groups = [
        [
            RolloutRequest(RolloutKey(0, example, generation), [{"role": "user", "content": f"{example}: 2+2?"}], "4")
            for generation in range(ROLLOUTS)
        ]
        for example in range(PROMPTS)
    ]
    scored = await runner.run_groups(groups)
    await backend.close()
    rollouts = [rollout for group in scored for rollout in group.rollouts]
    # every rollout that was planned ends in exactly one outcome, and the counts add up
    assert sorted(rollout.key for rollout in rollouts) == [request.key for group in groups for request in group]
    assert sorted(rollout.key for rollout in ended) == sorted(rollout.key for rollout in rollouts)
    outcomes = Counter(rollout.outcome for rollout in rollouts)
    assert outcomes.total() == PLANNED
    for rollout in rollouts:
        # a fault gives no reward, and says what it was; the server is always right when it answers
        assert rollout.is_scored is not rollout.outcome.is_failure
        assert (rollout.failure is None) is rollout.is_scored
        assert rollout.reward == 1.0 or not rollout.is_scored or rollout.outcome is Outcome.TRUNCATED
    return Result(outcomes, sum(r.attempts - 1 for r in rollouts), [r.reward for r in rollouts if r.is_scored])


def share_of(fault: Fault, share: float) -> Callable[[int], Fault | None]:
    """Schedule the fault for that share of requests, the same ones in each run."""
    return lambda number: fault if random.Random(number).random() < share else None


def show(name: str, result: Result) -> None:
    counts = ", ".join(f"{count} {outcome}" for outcome, count in result.outcomes.most_common())
    print(f"| {name} | {counts} | {result.retries} |")


NO_CHOICE = {"id": "x", "object": "chat.completion", "choices": []}
NULL = {"choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": None}}]}
FAULTS = {
    "20 % 503": Fault(503),
    "20 % 429 with Retry-After": Fault(429, retry_after=0.05),
    "20 % 529": Fault(529),
    "20 % of the connections cut before the answer": Fault.disconnect(),
    "20 % malformed JSON": Fault.malformed(),
    "20 % without choices": Fault(200, body=NO_CHOICE),
    "20 % with content null": Fault(200, body=NULL),
}


@pytest.mark.parametrize("name", FAULTS)
async def test_a_fault_that_passes_is_retried_until_every_rollout_is_completed(name: str) -> None:
    async with FakeOpenAIServer("4", faults=share_of(FAULTS[name], 0.2)) as server:
        result = await run(HttpBackend(Endpoint(server.url)))
        show(name, result)
        assert result.outcomes == {Outcome.COMPLETED: PLANNED}
        assert result.retries == server.request_count - PLANNED > 50
    assert result.rewards == [1.0] * PLANNED


@pytest.mark.slow
async def test_a_request_that_hangs_is_given_up_at_the_deadline_of_an_attempt_and_made_again() -> None:
    async with FakeOpenAIServer("4", faults=share_of(Fault.hang(), 0.05)) as server:
        result = await run(HttpBackend(Endpoint(server.url, timeout_s=2.0)))
        show("5 % hang", result)
    assert result.outcomes == {Outcome.COMPLETED: PLANNED}
    assert result.retries >= 10


async def test_a_server_that_always_hangs_ends_rollouts_at_their_own_deadline() -> None:
    async with FakeOpenAIServer("4", faults=lambda _: Fault.hang()) as server:
        result = await run(HttpBackend(Endpoint(server.url)), limiter=Limiter(), rollout_timeout_s=0.5)
        show("every request hangs", result)
    assert result.outcomes == {Outcome.TIMED_OUT: PLANNED}
    assert result.rewards == []


@contextlib.asynccontextmanager
async def server_that_breaks_off(share: float) -> AsyncIterator[str]:
    """Answers, but sends only half of the body to that share of requests, and resets the connection."""
    body = b'{"choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "4"}}]}'
    asked = 0

    async def answer(request: web.Request) -> web.StreamResponse:
        nonlocal asked
        number, asked = asked, asked + 1
        await request.read()
        if random.Random(number).random() >= share:
            return web.Response(body=body, content_type="application/json")
        response = web.StreamResponse(headers={"Content-Length": str(len(body))})
        await response.prepare(request)
        await response.write(body[: len(body) // 2])
        assert request.transport is not None
        request.transport.abort()
        return response

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    finally:
        await runner.cleanup()


async def test_an_answer_that_breaks_off_in_its_middle_is_asked_for_again() -> None:
    async with server_that_breaks_off(0.2) as url:
        result = await run(HttpBackend(Endpoint(url)))
        show("20 % reset in mid-body", result)
    assert result.outcomes == {Outcome.COMPLETED: PLANNED}
    assert result.retries > 50


@pytest.mark.parametrize("fault", [Fault(503), Fault.malformed(), Fault(200, body=NO_CHOICE), Fault(200, body=NULL)])
async def test_a_fault_that_stays_for_some_prompts_costs_those_alone(fault: Fault) -> None:
    def answer(body: dict[str, Any]) -> Any:
        return fault if int(body["messages"][-1]["content"].partition(":")[0]) % 10 == 0 else "4"

    async with FakeOpenAIServer(answer) as server:
        result = await run(HttpBackend(Endpoint(server.url)), RetryPolicy(max_attempts=3, base_s=0.01))
        show(f"10 % of prompts always {fault.status} {fault.kind}", result)
    assert result.outcomes == {Outcome.COMPLETED: PLANNED * 9 // 10, Outcome.PROVIDER_ERROR: PLANNED // 10}
    assert result.retries == 2 * PLANNED // 10


@pytest.mark.parametrize("status", [400, 401])
async def test_a_refusal_is_asked_once(status: int) -> None:
    async with FakeOpenAIServer("4", faults=lambda _: Fault(status)) as server:
        result = await run(HttpBackend(Endpoint(server.url)))
        show(f"always {status}", result)
        assert server.request_count == PLANNED
    assert result.outcomes == {Outcome.PROVIDER_ERROR: PLANNED}
    assert result.rewards == []


async def test_a_prompt_that_outgrew_the_context_ends_as_truncated() -> None:
    text = "This model's maximum context length is 8192 tokens. However, your messages resulted in 9031 tokens."

    def answer(body: dict[str, Any]) -> Any:
        too_long = body["messages"][-1]["content"].startswith("1")
        return Fault(400, body={"error": {"message": text}}) if too_long else "4"

    async with FakeOpenAIServer(answer) as server:
        result = await run(HttpBackend(Endpoint(server.url)))
        show("prompt too long for 11 % of prompts", result)
        assert server.request_count == PLANNED
    assert result.outcomes == {Outcome.COMPLETED: PLANNED - 44, Outcome.TRUNCATED: 44}


async def test_a_server_that_is_killed_and_restarted_is_found_again() -> None:
    async with FakeOpenAIServer("4", latency_s=0.02) as server:

        async def kill_and_restart() -> None:
            await asyncio.to_thread(server.wait_until, lambda s: s.request_count >= 100, 60.0)
            await asyncio.to_thread(server.stop)
            await asyncio.sleep(0.4)
            await asyncio.to_thread(server.start)

        async with asyncio.TaskGroup() as tasks:
            killing = tasks.create_task(kill_and_restart())
            running = tasks.create_task(
                run(HttpBackend(Endpoint(server.url)), RetryPolicy(max_attempts=9, base_s=0.1))
            )
        assert killing.done()
        result = running.result()
    show("server killed, restarted after 0.4 s", result)
    assert result.outcomes[Outcome.COMPLETED] >= 0.95 * PLANNED
    assert result.outcomes.keys() <= {Outcome.COMPLETED, Outcome.PROVIDER_ERROR}
    assert result.retries >= 16


async def test_of_two_servers_one_may_die_for_good() -> None:
    async with FakeOpenAIServer("4", latency_s=0.02) as one, FakeOpenAIServer("4", latency_s=0.02) as two:

        async def kill() -> None:
            await asyncio.to_thread(one.wait_until, lambda s: s.request_count >= 50, 60.0)
            await asyncio.to_thread(one.stop)

        backend = ServerPool([HttpBackend(Endpoint(server.url)) for server in (one, two)])
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(kill())
            running = tasks.create_task(run(backend))
        show("one of two servers killed", running.result())
        assert one.request_count + two.request_count >= PLANNED
    assert running.result().outcomes == {Outcome.COMPLETED: PLANNED}


async def test_a_provider_with_a_limit_is_met_by_an_adaptive_one(bears_at_once: Any) -> None:
    limiter = AdaptiveLimiter()
    async with FakeOpenAIServer(bears_at_once(10, limiter, retry_after=0.1)) as server:
        result = await run(HttpBackend(Endpoint(server.url)), RetryPolicy(max_attempts=100, base_s=0.02), limiter)
        show("429 above 10 at once, adaptive limit", result)
    assert result.outcomes == {Outcome.COMPLETED: PLANNED}
    assert (limiter.max_concurrent or 0) < 20
