"""AgentEnv: what an agent's end makes of its rollout."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import aiohttp
import openai
import pytest

import verifiers as vf
from verifiers.inference.endpoint import Endpoint, HttpBackend
from verifiers.rollouts.rollout import RolloutRequest
from verifiers.rollouts.run import Run
from verifiers.testing import FakeOpenAIServer, Fault
from verifiers.types import Outcome, RolloutKey

ROWS = [{"question": "6 times 7?", "answer": "42"}]


async def two_calls(row: Any, *, base_url: str, api_key: str, model: str) -> str:
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        messages = list(row["prompt"])
        for text in ("really?", "sure?"):
            answer = await client.chat.completions.create(model=model, messages=messages, temperature=0.1)
            messages += [
                {"role": "assistant", "content": answer.choices[0].message.content},
                {"role": "user", "content": text},
            ]
    return answer.choices[0].message.content or ""


def env_of(run: Any, **arguments: Any) -> vf.AgentEnv:
    def correct(completion: Any, answer: str) -> float:
        return float(completion[-1]["content"] == answer)

    return vf.AgentEnv(run, dataset=ROWS, eval_dataset=ROWS, rubric=vf.Rubric(funcs=[correct]), **arguments)


class WithoutStops(HttpBackend):
    """An endpoint whose API has no stop sequences."""

    async def call(self, path: str, arguments: Any) -> Any:
        if "stop" in arguments:
            raise vf.ConfigError("the Responses API has no argument 'stop'")
        return await super().call(path, arguments)


async def played(env: vf.AgentEnv, server: FakeOpenAIServer, **limits: Any) -> Any:
    backend = WithoutStops(Endpoint(server.url))
    runner = Run(env, backend, "fake", {"temperature": 0.7}, require_tokens=True, **limits)
    prompt = [{"role": "user", "content": "6 times 7?"}]
    group = await runner.run_group([RolloutRequest(RolloutKey(0, 0, 0), prompt, "42", seed=3)])
    await backend.close()
    return group.rollouts[0]


async def test_an_agents_calls_are_one_trained_row() -> None:
    async with FakeOpenAIServer(["41", "42"]) as server:
        rollout = await played(env_of(two_calls), server)
    assert (rollout.outcome, rollout.reward, rollout.turns) == (Outcome.COMPLETED, 1.0, 2)
    assert len(rollout.rows) == 1
    assert {request.body["temperature"] for request in server.requests} == {0.7}
    assert [step["completion"][0]["content"] for step in rollout.state["trajectory"]] == ["41", "42"]


async def raises(row: Any, **_: Any) -> str:
    raise KeyError("lost")


async def never_calls(row: Any, **_: Any) -> str:
    return "42"


async def hangs(row: Any, **_: Any) -> str:
    await asyncio.sleep(600)
    return ""


async def swallows(row: Any, *, base_url: str, api_key: str, model: str) -> str:
    try:
        return await two_calls(row, base_url=base_url, api_key=api_key, model=model)
    except openai.APIStatusError:
        return "42"


@pytest.mark.parametrize(
    ("run", "faults", "outcome", "text"),
    [
        (raises, None, Outcome.ENVIRONMENT_ERROR, "the agent failed: KeyError('lost')"),
        (never_calls, None, Outcome.ENVIRONMENT_ERROR, "without an answer of the policy"),
        (hangs, None, Outcome.TIMED_OUT, "rollout_timeout_s"),
        (two_calls, [Fault(400)], Outcome.PROVIDER_ERROR, "400"),
        (swallows, [Fault(400)], Outcome.PROVIDER_ERROR, "answer"),
    ],
)
async def test_an_agent_that_fails_has_no_reward(run: Any, faults: Any, outcome: Outcome, text: str) -> None:
    async with FakeOpenAIServer("42", faults=faults) as server:
        rollout = await played(env_of(run), server, rollout_timeout_s=0.5 if run is hangs else 30.0)
    assert (rollout.outcome, rollout.reward) == (outcome, None)
    assert text in rollout.failure.text


@pytest.mark.parametrize(("then", "outcome"), [(raises, Outcome.ENVIRONMENT_ERROR), (hangs, Outcome.TIMED_OUT)])
async def test_a_rollout_that_fails_or_is_timed_out_keeps_what_was_said(
    then: Any, outcome: Outcome, pass_time: Callable[[float], None]
) -> None:
    async def run(row: Any, **given: Any) -> str:
        await two_calls(row, **given)
        pass_time(61 if then is hangs else 0)
        return await then(row)

    async with FakeOpenAIServer(["41", "42"]) as server:
        rollout = await played(env_of(run), server, rollout_timeout_s=60.0)
    assert (rollout.outcome, rollout.reward, rollout.turns) == (outcome, None, 2)
    assert rollout.completion == [{"role": "assistant", "content": "42"}]
    assert [step["completion"][0]["content"] for step in rollout.state["trajectory"]] == ["41", "42"]


@pytest.mark.parametrize("limits", [{"max_turns": 1}, {"max_total_completion_tokens": 2}])
async def test_a_budget_truncates_and_scores_what_there_is(limits: dict[str, int]) -> None:
    async with FakeOpenAIServer("42") as server:
        rollout = await played(env_of(two_calls, **limits), server)
    assert (rollout.outcome, rollout.reward) == (Outcome.TRUNCATED, 1.0)
    assert sum(row.sampled_tokens for row in rollout.rows) > 0


async def test_a_budget_that_is_used_up_before_the_first_answer_gives_no_reward() -> None:
    async def run(row: Any, *, base_url: str, api_key: str, model: str) -> str:
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
            ask = client.chat.completions.create
            await asyncio.gather(*(ask(model=model, messages=[{"role": "user", "content": c}]) for c in "ab"))
        return ""

    async with FakeOpenAIServer("42", latency_s=60.0) as server:
        rollout = await played(env_of(run, max_turns=1), server)
    assert (rollout.outcome, rollout.reward) == (Outcome.ENVIRONMENT_ERROR, None)
    assert "no answer of the policy before its time or its budget" in rollout.failure.text


async def test_the_time_of_a_rollout_truncates_it(pass_time: Callable[[float], None]) -> None:
    async def run(row: Any, **given: Any) -> str:
        await two_calls(row, **given)
        pass_time(61)
        return await hangs(row)

    async with FakeOpenAIServer("42") as server:
        rollout = await played(env_of(run, timeout_seconds=60), server)
    assert (rollout.outcome, rollout.reward) == (Outcome.TRUNCATED, 1.0)


async def calls_after_an_overlong_one(row: Any, *, base_url: str, api_key: str, model: str) -> str:
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        with pytest.raises(openai.BadRequestError, match="context length"):
            await client.chat.completions.create(model=model, messages=[{"role": "user", "content": "much"}])
        answer = await client.chat.completions.create(model=model, messages=[{"role": "user", "content": "summary"}])
    if row["answer"] == "fail":
        raise KeyError("lost")
    return answer.choices[0].message.content or ""


OVERLONG = Fault(400, body={"error": {"message": "This model's maximum context length is 8 tokens", "code": 400}})


async def test_an_agent_that_compacts_after_an_overlong_prompt_is_whole() -> None:
    async with FakeOpenAIServer("42", faults=[OVERLONG]) as server:
        rollout = await played(env_of(calls_after_an_overlong_one), server)
    assert (rollout.outcome, rollout.reward) == (Outcome.COMPLETED, 1.0)

    async def fails(row: Any, **given: Any) -> str:
        return await calls_after_an_overlong_one({**row, "answer": "fail"}, **given)

    async with FakeOpenAIServer("42", faults=[OVERLONG]) as server:
        rollout = await played(env_of(fails), server)
    assert (rollout.outcome, rollout.reward) == (Outcome.ENVIRONMENT_ERROR, None)


@pytest.mark.parametrize("run", [two_calls, swallows])
async def test_what_every_rollout_would_repeat_ends_the_run(run: Any) -> None:
    def refuse(_: Any) -> None:
        raise vf.ConfigError("samples otherwise")

    async with FakeOpenAIServer("42") as server:
        with pytest.raises(vf.ConfigError, match="samples otherwise"):
            await played(env_of(run), server, check_call=refuse)


def refuse_forced_calls(sent: Any) -> None:
    if sent.get("tool_choice") == "required":
        raise vf.ConfigError("tool_choice is 'required'")


AN_IMAGE = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}


@pytest.mark.parametrize(
    ("asked", "text", "then"),
    [
        ({"messages": [AN_IMAGE]}, "image", "fails"),
        ({"tool_choice": "required"}, "tool_choice", "ends"),
        ({"tool_choice": "required"}, "", "goes on"),
        ({"max_tokens": 0}, "max_tokens is 0", "fails"),
        ({"stop": ["."]}, "has no argument", "fails"),
        ({"stop": ["."]}, "", "goes on"),
    ],
)
async def test_what_one_agent_asks_does_not_end_the_run(asked: dict[str, Any], text: str, then: str) -> None:
    async def run(row: Any, *, base_url: str, api_key: str, model: str) -> str:
        body = {"model": model, "messages": row["prompt"], **asked}
        url, headers = f"{base_url}/chat/completions", {"x-api-key": api_key}
        async with aiohttp.request("POST", url, json=body, headers=headers) as response:
            assert response.status == 400
            refusal = await response.text()
        if then == "fails":
            raise RuntimeError(refusal)
        if then == "ends":
            return "42"
        return await two_calls(row, base_url=base_url, api_key=api_key, model=model)

    async with FakeOpenAIServer("42") as server:
        rollout = await played(env_of(run), server, check_call=refuse_forced_calls)
    if then == "goes on":
        assert (rollout.outcome, rollout.reward, rollout.turns) == (Outcome.COMPLETED, 1.0, 2)
    else:
        assert (rollout.outcome, rollout.reward) == (Outcome.ENVIRONMENT_ERROR, None)
        assert text in rollout.failure.text


async def test_a_call_that_the_agent_gave_up_does_not_decide_the_outcome() -> None:
    has_gone_on = threading.Event()

    async def answer(body: dict[str, Any]) -> Any:
        if body["messages"][-1]["content"] != "slow":
            return "42"
        await asyncio.to_thread(has_gone_on.wait, 60)
        return Fault(400)

    async def run(row: Any, *, base_url: str, api_key: str, model: str) -> str:
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0, timeout=0.2) as client:
            with pytest.raises(openai.APITimeoutError):
                await client.chat.completions.create(model=model, messages=[{"role": "user", "content": "slow"}])
        said = await two_calls(row, base_url=base_url, api_key=api_key, model=model)
        has_gone_on.set()
        await asyncio.to_thread(server.wait_until, lambda seen: seen.in_flight == 0, 60)
        await asyncio.sleep(0.1)
        return said

    async with FakeOpenAIServer(answer) as server:
        rollout = await played(env_of(run), server)
    assert (rollout.outcome, rollout.reward, rollout.turns) == (Outcome.COMPLETED, 1.0, 2)


async def test_an_agent_that_swallows_its_cancellation_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verifiers.envs.agent_env.CANCELLED_S", 0.2)
    over = asyncio.Event()

    async def run(row: Any, **given: Any) -> str:
        while not over.is_set():
            try:
                await over.wait()
            except asyncio.CancelledError:
                continue
        return ""

    async with FakeOpenAIServer("42") as server:
        rollout = await asyncio.wait_for(played(env_of(run), server, rollout_timeout_s=0.3), 30)
    over.set()
    assert rollout.outcome is Outcome.TIMED_OUT


async def test_a_parallel_call_that_failed_is_the_providers_failure_also_where_a_later_one_was_answered() -> None:
    async def run(row: Any, *, base_url: str, api_key: str, model: str) -> str:
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:

            async def ask(text: str) -> Any:
                return await client.chat.completions.create(model=model, messages=[{"role": "user", "content": text}])

            results = await asyncio.gather(ask("a"), ask("b"), return_exceptions=True)
            await ask("c")
        raise next(result for result in results if isinstance(result, Exception))

    async with FakeOpenAIServer("42", faults=[Fault(400)]) as server:
        rollout = await played(env_of(run), server)
    assert (rollout.outcome, rollout.reward) == (Outcome.PROVIDER_ERROR, None)
