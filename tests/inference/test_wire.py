"""Light response objects read like openai's, and request bodies are what the SDK would send."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from verifiers.inference.wire import WireObject, assistant_message, request_body

ANSWER = {
    "id": "1",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 3, "completion_tokens": 1},
}


def test_fields_are_attributes_all_the_way_down() -> None:
    response = WireObject(ANSWER)
    assert response.choices[0].message.content == "hi"
    assert response.usage.completion_tokens == 1
    assert response.choices[0].message is response.choices[0].message


def test_optional_fields_of_the_format_are_none_and_others_are_an_attribute_error() -> None:
    response = WireObject(ANSWER)
    assert response.choices[0].message.tool_calls is None
    assert response.choices[0].logprobs is None
    assert not hasattr(response, "error")
    with pytest.raises(AttributeError, match=r"no field 'error'; it has \['choices', 'id', 'usage'\]"):
        response.error  # noqa: B018


def test_model_dump_gives_plain_data_with_what_was_assigned() -> None:
    response = WireObject(ANSWER)
    assert response.model_dump() == ANSWER
    response.choices[0].message.content = "changed"
    assert response.model_dump()["choices"][0]["message"]["content"] == "changed"


def test_a_body_merges_extra_body_and_leaves_out_what_is_about_the_call() -> None:
    class NotGiven:
        pass

    body = request_body(
        {
            "model": "m",
            "messages": [WireObject({"role": "user", "content": "x"})],
            "stop": NotGiven(),
            "timeout": 3,
            "extra_headers": {"a": "b"},
            "extra_body": {"top_k": 5},
        }
    )
    assert body == {"model": "m", "messages": [{"role": "user", "content": "x"}], "top_k": 5}


def test_content_in_parts_of_a_client_that_is_called_as_it_is_becomes_the_text_that_rewards_read() -> None:
    thought = {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}
    said = SimpleNamespace(content=[thought, {"type": "text", "text": "4"}])
    assert assistant_message(said) == {"role": "assistant", "content": "4"}
