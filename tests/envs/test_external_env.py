"""ExternalEnv: programs take the rollouts that a run has planned."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import openai
import pytest

import verifiers as vf
from verifiers.inference.endpoint import Endpoint, HttpBackend
from verifiers.rollouts.rollout import Rollout, RolloutRequest
from verifiers.rollouts.run import Run
from verifiers.testing import FakeOpenAIServer
from verifiers.types import Outcome, RolloutKey

KEY = "0123456789abcdef-of-the-gateway"
ROWS = [{"question": "6 times 7?", "answer": "42"}]


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VF_GATEWAY_KEY", KEY)


@asynccontextmanager
async def planned(
    env: vf.ExternalEnv, rollouts: int, **settings: Any
) -> AsyncIterator[tuple[str, asyncio.Task[list[Rollout]]]]:
    """Run a group of rollouts, and give the address at which programs take them."""
    async with FakeOpenAIServer("42") as server:
        backend = HttpBackend(Endpoint(server.url))
        runner = Run(env, backend, "fake", require_tokens=True, **settings)
        prompt = [{"role": "user", "content": "6 times 7?"}]
        requests = [RolloutRequest(RolloutKey(0, 0, g), prompt, "42", seed=g) for g in range(rollouts)]
        running = asyncio.create_task(runner.play(requests))
        gateway = await env.start()
        yield gateway.url, running
        await gateway.close()
        await backend.close()


async def post(url: str, **body: Any) -> tuple[int, dict[str, Any]]:
    headers = {"Authorization": f"Bearer {KEY}"}
    async with aiohttp.ClientSession() as http, http.post(url, json=body, headers=headers) as response:
        return response.status, await response.json()


async def program(url: str, reward: float | None = None) -> str:
    """Take a rollout, answer it, and end it; returns its session's id."""
    status, session = await post(f"{url}/sessions", wait_s=60.0)
    assert status == 200, session
    assert session["answer"] == "42"
    async with openai.AsyncOpenAI(base_url=session["base_url"], api_key=session["key"]) as client:
        await client.chat.completions.create(model=session["model"], messages=session["prompt"])
    given = {} if reward is None else {"reward": reward}
    status, result = await post(f"{url}/sessions/{session['id']}/end", **given)
    assert (status, result["calls"]) == (200, 1)
    return str(session["id"])


async def test_programs_take_each_planned_rollout_once_and_it_is_trained_as_sampled() -> None:
    env = vf.ExternalEnv(port=0, dataset=ROWS)
    async with planned(env, 3) as (url, running):
        await asyncio.gather(*(program(url, reward) for reward in (0.0, 0.5, 1.0)))
        rollouts = await running
        assert (await post(f"{url}/sessions", wait_s=0.01))[0] == 503
        scores = await env.rubric.score_group([rollout.state for rollout in rollouts])
    assert sorted(score["reward"] for score in scores) == [0.0, 0.5, 1.0]
    assert [rollout.outcome for rollout in rollouts] == [Outcome.COMPLETED] * 3
    assert [len(rollout.rows) for rollout in rollouts] == [1, 1, 1]


async def test_a_rubric_scores_in_place_of_posted_rewards() -> None:
    def correct(completion: Any, answer: str) -> float:
        return float(completion[-1]["content"] == answer)

    env = vf.ExternalEnv(port=0, dataset=ROWS, rubric=vf.Rubric(funcs=[correct]))
    async with planned(env, 1) as (url, running):
        await program(url)
        (rollout,) = await running
        (score,) = await env.rubric.score_group([rollout.state])
    assert score["reward"] == 1.0


async def test_a_rollout_that_no_program_takes_is_timed_out_and_given_to_none() -> None:
    env = vf.ExternalEnv(port=0, dataset=ROWS)
    async with planned(env, 1, rollout_timeout_s=0.2) as (url, running):
        (rollout,) = await running
        assert (await post(f"{url}/sessions", wait_s=0.01))[0] == 503
    assert rollout.outcome is Outcome.TIMED_OUT


class LosesItsFirstCaller(vf.ExternalEnv):
    """An environment whose first caller hangs up when it gets a rollout."""

    lost = ""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.is_asked = asyncio.Event()

    async def _take(self, body: dict[str, Any]) -> Any:
        self.is_asked.set()
        return await super()._take(body)

    def _offer(self, external: Any) -> None:
        super()._offer(external)
        if not self.lost:
            self.lost = external.id
            assert self._starting is not None
            runner = self._starting.result()._listener._runner
            assert runner is not None
            assert runner.server is not None
            for connection in runner.server.connections:
                assert connection.transport is not None
                connection.transport.close()


async def test_a_rollout_whose_caller_hung_up_is_given_to_the_next() -> None:
    env = LosesItsFirstCaller(port=0, dataset=ROWS)
    gateway = await env.start()
    caller = asyncio.create_task(post(f"{gateway.url}/sessions", wait_s=60.0))
    await env.is_asked.wait()
    async with planned(env, 2) as (url, running):
        with pytest.raises(aiohttp.ClientError):
            await caller
        async with asyncio.timeout(60):
            taken = [await program(url, 1.0) for _ in range(2)]
            rollouts = await running
    # before the one that has waited less
    assert taken[0] == env.lost != taken[1]
    assert [rollout.outcome for rollout in rollouts] == [Outcome.COMPLETED] * 2
