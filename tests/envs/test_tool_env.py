"""ToolEnv: every call is answered once, whatever goes wrong with it, and the rollout continues."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from typing import Any

import pytest

import verifiers as vf
from verifiers.envs.tools import Tool, requested_calls, tool_definition, tool_message
from verifiers.inference.endpoint import ClientBackend
from verifiers.rollouts.rollout import Rollout, RolloutRequest
from verifiers.rollouts.run import Run
from verifiers.testing import FakeClient, FakeOpenAIServer
from verifiers.types import Outcome, RolloutKey

ROWS = [{"question": "q", "answer": "a"}]
ASK = [{"role": "user", "content": "q"}]


def add(a: int, b: int = 1) -> int:
    """Add two numbers."""
    return a + b


async def shout(text: str) -> str:
    """Say it louder."""
    return text.upper()


def fail(text: str) -> str:
    raise LookupError(f"no {text}")


def env_with(*tools: Any, **kwargs: Any) -> vf.ToolEnv:
    return vf.ToolEnv(tools=list(tools), eval_dataset=ROWS, **kwargs)


def called(*calls: Any, **message: Any) -> dict[str, Any]:
    """Return an answer of the policy that calls tools, each given as (name, arguments)."""
    return {"tool_calls": [{"name": name, "arguments": arguments} for name, arguments in calls], **message}


async def replies(env: vf.ToolEnv, *calls: Any) -> list[str]:
    """Return what the tools said to one turn of calls."""
    completion, _ = await env.rollout(FakeClient([called(*calls), "done"]), "m", ASK)
    tool_messages = completion[1:-1]
    assert [message["tool_call_id"] for message in tool_messages] == [f"call_{n}" for n in range(len(calls))]
    assert all(message["role"] == "tool" for message in tool_messages)
    return [message["content"] for message in tool_messages]


async def run_one(env: vf.ToolEnv, *answers: Any) -> Rollout:
    runner = Run(env, ClientBackend(FakeClient(list(answers))), "m")
    return (await runner.play([RolloutRequest(RolloutKey(0, 0, 0), ASK)]))[0]


async def test_a_rollout_calls_tools_until_an_answer_calls_none() -> None:
    client = FakeClient([called(("add", {"a": 1, "b": 2})), called(("shout", {"text": "x"})), "3"])
    completion, state = await env_with(add, shout).rollout(client, "m", ASK)
    assert [(message["role"], message["content"]) for message in completion] == [
        ("assistant", ""), ("tool", "3"), ("assistant", ""), ("tool", "X"), ("assistant", "3"),
    ]  # fmt: skip
    assert (state["turn"], state["stop_condition"]) == (3, "no_tools_called")
    assert [tool["function"]["name"] for tool in client.requests[0].body["tools"]] == ["add", "shout"]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (("add", "{"), "arguments of the tool 'add' are not valid JSON"),
        (("add", "[1]"), r"must be a JSON object, not [1]"),
        (("add", '"1"'), "must be a JSON object"),
        (("add", "null"), "must be a JSON object, not null"),
        (("add", "[" * 100_000), "not valid JSON"),
        (("add", {}), "a is missing"),
        (("add", ""), "a is missing"),
        (("add", {"a": 1, "c": 2}), "c is not a parameter (they are: a, b)"),
        (("add", {"a": "many"}), "a: Input should be a valid integer"),
        (("substract", {"a": 1}), "There is no tool 'substract'; the tools are: add, fail."),
        (("fail", {"text": "luck"}), "no luck"),
    ],
)
async def test_what_is_wrong_with_a_call_is_told_in_its_tool_message(call: Any, said: str) -> None:
    good, bad, also_good = await replies(env_with(add, fail), ("add", {"a": 1}), call, ("add", '{"a": 5}'))
    assert (good, also_good) == ("2", "6")
    assert said in bad


async def test_the_error_formatter_has_the_word_and_an_error_without_text_is_named() -> None:
    def silent() -> None:
        raise ValueError

    env = env_with(fail, silent, error_formatter=lambda error: f"<{type(error).__name__}> {error}")
    assert await replies(env, ("fail", {"text": "x"})) == ["<LookupError> no x"]
    assert await replies(env_with(silent), ("silent", {})) == ["ValueError()"]


async def test_calls_of_one_turn_run_side_by_side_and_are_answered_in_their_order() -> None:
    both = threading.Barrier(2, timeout=60)
    last = asyncio.Event()

    def meet(name: str) -> str:
        both.wait()
        return name

    async def wait_for_the_other() -> str:
        await last.wait()
        return "first"

    async def release() -> str:
        last.set()
        return "second"

    env = env_with(meet, wait_for_the_other, release)
    assert await replies(env, ("meet", {"name": "a"}), ("meet", {"name": "b"})) == ["a", "b"]
    assert await replies(env, ("wait_for_the_other", {}), ("release", {})) == ["first", "second"]


async def test_a_tool_that_hangs_is_told_of_and_keeps_no_other_tool_from_running() -> None:
    release = threading.Event()

    def hang() -> None:
        release.wait(timeout=60)

    async def hang_too() -> None:
        await asyncio.get_running_loop().create_future()

    env = env_with(hang, hang_too, add, tool_timeout_s=1.0)
    try:
        calls = [("hang", {})] * 100 + [("hang_too", {})] * 3 + [("add", {"a": 1})]
        said = await replies(env, *calls)
    finally:
        release.set()
    assert said[0] == "The tool 'hang' did not finish within 1 s."
    assert said[:100] == [said[0]] * 100
    assert said[100:] == ["The tool 'hang_too' did not finish within 1 s."] * 3 + ["2"]


async def test_a_tool_that_exits_or_pretends_to_be_cancelled_ends_nothing_but_itself() -> None:
    def leave() -> None:
        raise SystemExit(3)

    async def leave_too() -> None:
        sys.exit(4)

    def pretend() -> None:
        raise asyncio.CancelledError("not really")

    env = env_with(leave, leave_too, pretend)
    assert await replies(env, ("leave", {}), ("leave_too", {}), ("pretend", {})) == [
        "The tool 'leave' tried to exit the interpreter.",
        "The tool 'leave_too' tried to exit the interpreter.",
        "CancelledError: not really",
    ]


async def test_a_cancelled_rollout_cancels_its_tools() -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def hang() -> None:
        begun.set()
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            ended.set()

    work = asyncio.create_task(env_with(hang).rollout(FakeClient([called(("hang", {}))]), "m", ASK))
    await begun.wait()
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    assert ended.is_set()


@pytest.mark.parametrize(
    "error",
    [
        vf.SandboxError("the sandbox died"),
        vf.WorkerError("it died"),
        ExceptionGroup("of a task group", [ValueError("no"), vf.SandboxError("the sandbox died")]),
    ],
)
async def test_broken_machinery_ends_the_rollout_and_is_never_shown_to_the_policy(error: Exception) -> None:
    others = asyncio.Event()

    async def break_down() -> None:
        raise error

    async def wait() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            others.set()

    rollout = await run_one(env_with(break_down, wait), called(("wait", {}), ("break_down", {})), "done")
    assert (rollout.outcome, rollout.reward) == (Outcome.ENVIRONMENT_ERROR, None)
    assert str(error) in str(rollout.failure)
    assert others.is_set()


async def test_stop_errors_end_the_rollout_and_others_do_not() -> None:
    answers = (called(("fail", {"text": "x"})), "done")
    assert (await run_one(env_with(fail), *answers)).outcome is Outcome.COMPLETED
    assert (await run_one(env_with(fail, stop_errors=[OSError]), *answers)).outcome is Outcome.COMPLETED
    for kinds in ([LookupError], [vf.ToolError], [vf.ToolCallError]):
        rollout = await run_one(env_with(fail, stop_errors=kinds), *answers)
        assert (rollout.outcome, rollout.failure and rollout.failure.kind) == (
            Outcome.ENVIRONMENT_ERROR,
            "ToolCallError",
        )
    answers = (called(("fail", "{")), "done")
    assert (await run_one(env_with(fail, stop_errors=[LookupError]), *answers)).outcome is Outcome.COMPLETED
    for kind in (json.JSONDecodeError, vf.ToolParseError):
        rollout = await run_one(env_with(fail, stop_errors=[kind]), *answers)
        assert rollout.failure is not None
        assert rollout.failure.kind == "ToolParseError"


async def test_stop_errors_end_the_rollout_out_of_a_group_of_a_tools_tasks_too() -> None:
    async def fail_in_a_task() -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(asyncio.to_thread(fail, "x"))

    answers = (called(("fail_in_a_task", {})), "done")
    for kind, outcome in (
        (LookupError, Outcome.ENVIRONMENT_ERROR),
        (ExceptionGroup, Outcome.ENVIRONMENT_ERROR),
        (OSError, Outcome.COMPLETED),
    ):
        assert (await run_one(env_with(fail_in_a_task, stop_errors=[kind]), *answers)).outcome is outcome
    alone = called(("fail", {"text": "x"})), "done"
    assert (await run_one(env_with(fail, stop_errors=[ExceptionGroup]), *alone)).outcome is Outcome.COMPLETED


async def test_results_are_text_unless_they_are_content_parts() -> None:
    parts = [{"type": "text", "text": "look"}, {"type": "image_url", "image_url": {"url": "data:,"}}]
    own = [[{"type": "book", "title": "Dune"}], [{"type": "text", "lines": 3}], [{"type": "file", "file": "a.txt"}]]
    results: list[Any] = ["text", parts, [1, 2], [], {"a": 1}, None, 3.5, [{"type": 3}], *own]

    async def give(number: int) -> Any:
        return results[number]

    said = await replies(env_with(give), *[("give", {"number": number}) for number in range(len(results))])
    assert said == ["text", parts, *map(str, results[2:])]


async def test_what_the_policy_thought_and_called_is_sent_back_to_it_in_the_next_turn() -> None:
    thought = called(("add", {"a": 1}), content="let me see", reasoning_content="one and one")
    with FakeOpenAIServer([thought, called(("add", {"a": 2}), reasoning_content="once more"), "4"]) as server:
        await asyncio.to_thread(env_with(add).evaluate_sync, server.url, "m")
        _, first, reply, second, _ = server.requests[2].messages
    assert (first["content"], first["reasoning_content"]) == ("let me see", "one and one")
    assert second["reasoning_content"] == "once more"
    function = {"name": "add", "arguments": '{"a": 1}'}
    assert first["tool_calls"] == [{"id": "call_0", "type": "function", "function": function}]
    assert reply == {"role": "tool", "content": "2", "tool_call_id": "call_0"}


async def test_calls_with_missing_or_repeated_ids_are_told_apart() -> None:
    def call(call_id: str | None, a: int) -> dict[str, Any]:
        return {"id": call_id, "type": "function", "function": {"name": "add", "arguments": json.dumps({"a": a})}}

    message = {"role": "assistant", "content": ""}
    message["tool_calls"] = [call("x", 1), call("x", 2), call("", 3), call(None, 4), call("x_1", 5)]  # type: ignore[assignment]
    state = vf.State(trajectory=[])
    said = await env_with(add).env_response([message], state)
    ids = [reply["tool_call_id"] for reply in said]
    assert [reply["content"] for reply in said] == ["2", "3", "4", "5", "6"]
    assert len(set(ids)) == 5
    assert (ids[0], ids[4]) == ("x", "x_1")
    assert [item["id"] for item in message["tool_calls"]] == ids  # type: ignore[index]


def test_calls_are_read_in_every_shape_they_come_in() -> None:
    class Flat:
        id, name, arguments = "1", "add", "{}"

    class Nested:
        id = "2"
        function = Flat

    shapes = [
        Flat(), Nested(), {"id": "3", "name": "add", "arguments": {}}, '{"id": "4", "function": {"name": "add"}}', "{"
    ]  # fmt: skip
    calls = requested_calls({"role": "assistant", "tool_calls": shapes})
    assert [call.name for call in calls] == ["add", "add", "add", "add", ""]
    assert [call.id for call in calls] == ["1", "2", "3", "4", "call_4"]


async def test_a_tool_may_bring_its_own_schema() -> None:
    seen: list[Any] = []

    async def call(**arguments: Any) -> str:
        seen.append(arguments)
        return "there"

    definition = tool_definition("look-up", "Look it up.", {"type": "object", "properties": {"from": {}}})
    tool = Tool("look-up", definition, call)
    env = env_with(tool, add)
    assert (env.oai_tools or ())[0] == definition
    assert await replies(env, ("look-up", {"from": 3}), ("add", {"a": 1})) == ["there", "2"]
    assert seen == [{"from": 3}]
    with pytest.raises(vf.ConfigError, match="it must be a function"):
        env_with(definition)


async def test_what_stands_in_the_tool_map_is_what_is_called() -> None:
    env = env_with(add)
    env.tool_map["add"] = lambda_like = lambda a: f"mock {a}"
    lambda_like.__name__ = "add"
    assert await replies(env, ("add", {"a": 1})) == ["mock 1"]


async def test_subclasses_of_either_generation_wrap_the_tools_messages() -> None:
    class First(vf.ToolEnv):
        async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> tuple[vf.Messages, vf.State]:
            tool_messages, state = await super().env_response(messages, state, **kwargs)
            state["seen"] = len(tool_messages)
            return tool_messages, state

    class Second(vf.ToolEnv):
        async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> vf.Messages:
            tool_messages = await super().env_response(messages, state, **kwargs)
            state["seen"] = len(tool_messages)
            return tool_messages  # type: ignore[no-any-return]

    class Typed(First):
        async def env_response(self, messages, state, **kwargs) -> "tuple[list, dict]":  # type: ignore[no-untyped-def]  # noqa: UP037
            return await super().env_response(messages, state, **kwargs)

    class Bare(First):
        async def env_response(self, messages, state, **kwargs):  # type: ignore[no-untyped-def]
            return await super().env_response(messages, state, **kwargs)

    calls = called(("add", {"a": 1}), ("add", {"a": 2}), ("add", {"a": 3}))
    for kind in (First, Second, Typed, Bare):
        env = kind(tools=[add], eval_dataset=ROWS)
        completion, state = await env.rollout(FakeClient([calls, "done"]), "m", ASK)
        assert [message["content"] for message in completion] == ["", "2", "3", "4", "done"]
        assert state["seen"] == 3


async def test_calls_that_fail_are_noted_in_the_state_of_their_rollout_also_where_call_tool_is_overridden() -> None:
    class Own(vf.ToolEnv):
        async def call_tool(self, *args: Any, **kwargs: Any) -> Any:
            return {**await super().call_tool(*args, **kwargs), "content": "own"}

    wrong = called(("fail", {"text": "luck"}), ("ad", {"a": 1}), ("add", {"b": 1}), ("add", "{"), ("add", {"a": 1}))
    for env in (env_with(add, fail), Own(tools=[add, fail], eval_dataset=ROWS, error_formatter=lambda _: "hm")):
        clients = [FakeClient([answer, "done"]) for answer in (wrong, called(("add", {"a": 1})))]
        (_, failing), (_, right) = await asyncio.gather(*(env.rollout(client, "m", ASK) for client in clients))
        kinds = ["LookupError: no luck", "ToolCallError", "ToolParseError", "ToolParseError"]
        noted = failing["tool_call_errors"]
        assert len(noted) == 4
        assert all(any(text.startswith(kind) for text in noted) for kind in kinds)
        assert "tool_call_errors" not in right


async def test_call_tool_may_be_overridden_and_may_raise() -> None:
    class Own(vf.ToolEnv):
        async def call_tool(self, tool_name: str, tool_args: dict[str, Any], tool_call_id: str, **kwargs: Any) -> Any:
            if tool_args["a"] == 1:
                return "text alone"
            if tool_args["a"] == 2:
                raise LookupError("not two")
            message = await super().call_tool(tool_name, tool_args, tool_call_id)
            return {**message, "content": f"own {message['content']}"}

    env = Own(tools=[add], eval_dataset=ROWS)
    said = await replies(env, *[("add", {"a": a}) for a in (1, 2, 3)])
    assert said == ["text alone", "not two", "own 4"]


async def test_a_subclass_may_go_on_after_an_answer_without_calls() -> None:
    class Asks(vf.ToolEnv):
        async def no_tools_called(self, state: vf.State) -> bool:
            return await super().no_tools_called(state) and state["turn"] > 1

        async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
            said = await super().env_response(messages, state, **kwargs)
            return said or [{"role": "user", "content": "sure?"}]

    completion, state = await Asks(tools=[add], eval_dataset=ROWS).rollout(FakeClient(["2", "yes"]), "m", ASK)
    assert [message["content"] for message in completion] == ["2", "sure?", "yes"]
    assert state["turn"] == 2


def test_images_of_tools_are_parts_alone_and_beside_texts() -> None:
    image = pytest.importorskip("PIL.Image").new("RGB", (2, 2), "red")
    part = vf.image_part(image)
    words = {"type": "text", "text": "red"}
    for result, expected in (
        (image, [part]),
        (part, [part]),
        ((part, part), [part, part]),
        ([image, "red"], [part, words]),
        (words, [words]),
    ):
        assert tool_message(result, "call_0")["content"] == expected
    for result in ("red", ["red", "blue"], ("red",), [part, 3], {"type": "book"}, None):
        assert tool_message(result, "call_0")["content"] == str(result)


def test_an_image_of_no_known_kind_is_named() -> None:
    with pytest.raises(TypeError, match=r"given as list; give an image of PIL"):
        vf.image_part([1, 2])
