from __future__ import annotations

import json

import openai
import pytest

import verifiers.testing
from verifiers.errors import ConfigError
from verifiers.testing import FakeClient, Fault, decode_ids

USER = [{"role": "user", "content": "2+2?"}]


async def test_answers_read_like_those_of_the_sdk() -> None:
    client = FakeClient(["four", {"tool_calls": [{"name": "add", "arguments": {"a": 1}}]}])
    first = await client.chat.completions.create(model="m", messages=USER)
    second = await client.chat.completions.create(model="m", messages=USER)
    assert first.choices[0].message.content == "four"
    assert first.choices[0].message.tool_calls is None
    assert second.choices[0].message.tool_calls[0].function.arguments == '{"a": 1}'
    assert second.choices[0].finish_reason == "tool_calls"
    assert openai.types.chat.ChatCompletion.model_validate(first.model_dump()).usage is not None


async def test_token_ids_come_where_they_are_asked_for() -> None:
    client = FakeClient("four", weight_version=2)
    plain = await client.completions.create(model="m", prompt="2+2=")
    asked = await client.completions.create(
        model="m", prompt="2+2=", logprobs=0, extra_body={"return_token_ids": True}
    )
    assert plain.choices[0].token_ids is None
    assert decode_ids(asked.choices[0].token_ids) == "four\x03"
    assert len(asked.choices[0].logprobs.token_logprobs) == 5
    assert asked.choices[0].weight_versions[0].version == "2"


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (Fault(429, retry_after=3), openai.RateLimitError),
        (Fault(400, body={"error": {"message": "too long", "code": "x"}}), openai.BadRequestError),
        (Fault(503), openai.InternalServerError),
        (Fault(418), openai.APIStatusError),
        (Fault.disconnect(), openai.APIConnectionError),
        (Fault.malformed(), json.JSONDecodeError),
    ],
)
async def test_faults_raise_what_the_sdk_raises(fault: Fault, error: type[Exception]) -> None:
    client = FakeClient("fine", faults=fault)
    with pytest.raises(error) as caught:
        await client.chat.completions.create(model="m", messages=USER)
    if isinstance(caught.value, openai.RateLimitError):
        assert caught.value.response.headers["retry-after"] == "3"
    if isinstance(caught.value, openai.BadRequestError):
        assert caught.value.code == "x"
    answer = await client.chat.completions.create(model="m", messages=USER)
    assert answer.choices[0].message.content == "fine"


async def test_a_hang_ends_at_the_timeout_of_the_call() -> None:
    client = FakeClient(faults=Fault.hang())
    with pytest.raises(openai.APITimeoutError):
        await client.chat.completions.create(model="m", messages=USER, timeout=0.01)
    assert client.in_flight == 0


async def test_a_scripted_answer_of_a_wrong_type_is_named() -> None:
    client = FakeClient(lambda body: 4)  # type: ignore[arg-type,return-value]
    with pytest.raises(ConfigError, match="answer is 4"):
        await client.chat.completions.create(model="m", messages=USER)


def test_every_public_name_of_the_package_loads() -> None:
    assert all(getattr(verifiers.testing, name) is not None for name in verifiers.testing.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = verifiers.testing.Nothing
