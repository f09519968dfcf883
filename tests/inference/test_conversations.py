"""A call continues an answer only where it repeats it and everything before it."""

from __future__ import annotations

from typing import Any, cast

import pytest

from verifiers.inference.token_in import ChatCall, TokenTurns, read_chat_call
from verifiers.inference.wire import request_body

USER = {"role": "user", "content": "a"}
ANSWER = {"role": "assistant", "content": "b", "reasoning_content": "hm"}
NEXT = {"role": "user", "content": "c"}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def call(messages: list[Any], **fields: Any) -> ChatCall:
    read = read_chat_call(request_body({"model": "m", "messages": messages, **fields}))
    assert isinstance(read, ChatCall), read
    return read


def held(answer: Any = ANSWER, **fields: Any) -> TokenTurns:
    conversations = TokenTurns(cast(Any, None))
    conversations.hold(call([USER], **fields), answer, [1, 2], [3])
    return conversations


@pytest.mark.parametrize(
    "repeated",
    [
        ANSWER,
        {"role": "assistant", "content": "b"},
        {"role": "assistant", "content": "b", "reasoning_content": None, "tool_calls": None, "refusal": None},
    ],
)
def test_an_answer_is_found_again_with_and_without_its_reasoning(repeated: Any) -> None:
    found = held().find(call([USER, repeated, NEXT], temperature=0.5, seed=3))
    assert found is not None
    assert (found.prompt_ids, found.completion_ids, len(found.keys)) == ([1, 2], [3], 2)


def test_an_answer_with_calls_and_no_content_is_found_again() -> None:
    answer = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    repeated = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    assert held(answer).find(call([USER, repeated, {"role": "tool", "tool_call_id": "1", "content": "x"}]))


@pytest.mark.parametrize(
    "messages",
    [
        [USER, ANSWER],
        [USER, NEXT],
        [NEXT],
        [{**USER, "content": "A"}, ANSWER, NEXT],
        [{**USER, "role": "system"}, ANSWER, NEXT],
        [{**USER, "name": "you"}, ANSWER, NEXT],
        [USER, {**ANSWER, "content": "B"}, NEXT],
        [USER, {**ANSWER, "tool_calls": [CALL]}, NEXT],
    ],
)
def test_what_differs_in_anything_that_was_said_is_another_conversation(messages: list[Any]) -> None:
    assert held().find(call(messages)) is None


@pytest.mark.parametrize(
    "fields", [{"tools": [CALL]}, {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}]
)
def test_what_is_rendered_otherwise_is_another_conversation(fields: dict[str, Any]) -> None:
    assert held().find(call([USER, ANSWER, NEXT], **fields)) is None
    assert held(**fields).find(call([USER, ANSWER, NEXT], **fields)) is not None


def test_a_message_that_is_changed_afterwards_is_not_what_was_held() -> None:
    message = dict(USER)
    conversations = TokenTurns(cast(Any, None))
    conversations.hold(call([message]), ANSWER, [1], [2])
    message["content"] = "other"
    assert conversations.find(call([message, ANSWER, NEXT])) is None
    assert conversations.find(call([USER, ANSWER, NEXT])) is not None


def test_of_several_answers_the_one_that_is_repeated_counts() -> None:
    conversations = TokenTurns(cast(Any, None))
    for number, said in enumerate("xyz"):
        conversations.hold(call([USER]), {"role": "assistant", "content": said}, [1], [number])
    found = conversations.find(call([USER, {"role": "assistant", "content": "y"}, NEXT]))
    assert found is not None
    assert found.completion_ids == [1]


def test_arguments_become_sampling_parameters_and_the_rest_stays_where_it_belongs() -> None:
    read = call(
        [USER],
        temperature=0.5,
        max_tokens=4,
        max_completion_tokens=5,
        stop=["x"],
        seed=7,
        n=1,
        logprobs=True,
        user="me",
        parallel_tool_calls=False,
        reasoning_effort="low",
        extra_body={"top_k": 3, "return_token_ids": True, "cache_salt": "s", "chat_template_kwargs": {"k": 1}},
    )
    assert read.sampling == {
        "logprobs": 0, "temperature": 0.5, "max_tokens": 5, "stop": ["x"], "seed": 7, "top_k": 3
    }  # fmt: skip
    assert read.request_options == {"cache_salt": "s"}
    options = {"reasoning_effort": "low", "k": 1}
    assert read.template_options == options
    assert read.chat_options == {"parallel_tool_calls": False, "stop": ["x"], "chat_template_kwargs": options}


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"n": 2}, "n=2"),
        ({"top_logprobs": 3}, "top_logprobs=3"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"extra_body": {"guided_json": "{}"}}, "guided_json"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "not text"),
        ({"messages": [{**USER, "audio": {"id": "1"}}]}, "not text"),
        ({"messages": None}, "not a list"),
    ],
)
def test_what_has_no_counterpart_is_named(fields: dict[str, Any], word: str) -> None:
    read = read_chat_call(request_body({"model": "m", "messages": [USER], **fields}))
    assert isinstance(read, str)
    assert word in read
