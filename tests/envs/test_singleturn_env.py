"""SingleTurnEnv: one prompt, one answer, in chats and in completions, called in either generation's way."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest

import verifiers as vf
from verifiers.testing import FakeClient, Fault

Rows = list[dict[str, Any]]
ASK = [{"role": "user", "content": "2+2?"}]
ROW = {"prompt": ASK, "example_id": 7, "answer": "4", "task": "sums", "info": {"x": 1}}


async def test_the_first_way_of_calling_gives_completion_and_state(client: FakeClient, rows: Rows) -> None:
    env = vf.SingleTurnEnv(dataset=rows)
    completion, state = await env.rollout(client, "m", ASK, answer="4", task="sums", info={"x": 1})
    assert completion == [{"role": "assistant", "content": "re: 2+2?"}]
    assert (state["prompt"], state["answer"], state["task"], state["info"]) == (ASK, "4", "sums", {"x": 1})
    assert (state["turn"], len(state["responses"]), len(state["trajectory"])) == (1, 1, 1)
    assert len(client.requests) == 1


async def test_the_second_way_of_calling_gives_the_state(client: FakeClient, rows: Rows) -> None:
    env = vf.SingleTurnEnv(dataset=rows)
    for state in (await env.rollout(ROW, client, "m"), await env.rollout(input=ROW, client=client, model="m")):
        assert state["completion"] == [{"role": "assistant", "content": "re: 2+2?"}]
        assert state["input"] == ROW
        assert (state["id"], state["example_id"], state["is_completed"]) == (7, 7, True)
        assert state["stop_condition"] == "max_turns_reached"


async def test_every_promised_key_is_in_the_state(client: FakeClient, rows: Rows) -> None:
    _, state = await vf.SingleTurnEnv(dataset=rows).rollout(client, "m", ASK)
    first = {"id", "prompt", "completion", "answer", "task", "info", "responses", "turn", "timing"}
    second = {"input", "trajectory", "is_completed", "stop_condition", "reward", "metrics", "error"}
    assert (first | second) <= set(state)
    assert set(state["timing"]) == {"generation_ms", "scoring_ms", "total_ms"}
    assert state["timing"]["generation_ms"] > 0
    assert state["timing"]["total_ms"] == state["timing"]["generation_ms"]
    assert (state["reward"], state["metrics"], state["error"]) == (None, None, None)


async def test_a_step_of_the_trajectory_has_what_was_seen_and_said(client: FakeClient, rows: Rows) -> None:
    state = await vf.SingleTurnEnv(dataset=rows).rollout(ROW, client, "m")
    step = state["trajectory"][0]
    assert (step["prompt"], step["completion"]) == (ASK, state["completion"])
    assert step["response"] is state["responses"][0]
    assert (step["is_truncated"], step["tokens"], step["reward"], step["advantage"]) == (False, None, None, None)
    assert step["extras"] == {}


async def test_completion_mode_is_text_in_and_text_out(client: FakeClient, rows: Rows) -> None:
    env = vf.SingleTurnEnv(dataset=rows, message_type="completion")
    completion, state = await env.rollout(client, "m", "2+2=")
    assert (completion, state["completion"]) == ("re: 2+2=", "")
    assert state["trajectory"][0]["completion"] == "re: 2+2="
    assert client.requests[0].body["prompt"] == "2+2="


async def test_sampling_arguments_and_a_rows_own_tools_reach_the_policy(client: FakeClient, rows: Rows) -> None:
    common, own = [{"function": {"name": "common"}}], [{"function": {"name": "own"}}]
    env = vf.SingleTurnEnv(dataset=rows, oai_tools=common)
    await env.rollout(client, "m", ASK, sampling_args={"temperature": 0.5})
    await env.rollout(client, "m", ASK, info={"oai_tools": own})
    assert [request.body["tools"] for request in client.requests] == [common, own]
    assert client.requests[0].body["temperature"] == 0.5


async def test_tool_calls_and_reasoning_are_kept_as_plain_data(rows: Rows) -> None:
    answer = {"reasoning_content": "hm", "tool_calls": [{"id": "c1", "name": "add", "arguments": {"a": 1}}]}
    completion, _ = await vf.SingleTurnEnv(dataset=rows).rollout(FakeClient(answer), "m", ASK)
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    assert completion == [
        {"role": "assistant", "content": "", "tool_calls": [call], "reasoning_content": "hm"},
    ]


async def test_an_overlong_prompt_ends_the_rollout_as_truncated(rows: Rows) -> None:
    client = FakeClient(faults=Fault(400, body={"error": {"message": "prompt is too long"}}))
    completion, state = await vf.SingleTurnEnv(dataset=rows).rollout(client, "m", ASK)
    assert completion == [{"role": "assistant", "content": ""}]
    assert state["trajectory"][0]["is_truncated"]
    assert state["stop_condition"] == "prompt_too_long"


async def test_the_prompt_that_was_given_is_left_alone(client: FakeClient, rows: Rows) -> None:
    prompt = [dict(message) for message in ASK]
    await vf.SingleTurnEnv(dataset=rows).rollout(client, "m", prompt)
    assert prompt == ASK


async def test_a_response_may_be_a_test_double(rows: Rows) -> None:
    message = SimpleNamespace(content="4", tool_calls=None)
    client = AsyncMock()
    client.chat.completions.create.return_value = SimpleNamespace(choices=[SimpleNamespace(message=message)])
    completion, state = await vf.SingleTurnEnv(dataset=rows).rollout(client, "m", ASK)
    assert completion == [{"role": "assistant", "content": "4"}]
    assert not state["trajectory"][0]["is_truncated"]


async def test_its_reply_is_the_classic_empty_one(rows: Rows) -> None:
    env = vf.SingleTurnEnv(dataset=rows)
    state = vf.State(responses=[])
    assert await env.env_response([], state) == ([{"role": "user", "content": ""}], state)
    assert not await env.is_completed([], state)
    assert await env.is_completed([], vf.State(responses=["r"]))


async def test_an_error_of_the_client_passes(rows: Rows) -> None:
    with pytest.raises(Exception, match="scripted fault 500"):
        await vf.SingleTurnEnv(dataset=rows).rollout(FakeClient(faults=Fault(500)), "m", ASK)
