"""Messages made printable, lean or storable."""

from __future__ import annotations

import json
from types import SimpleNamespace

from openai.types.chat import ChatCompletionMessage

from verifiers.parsers.messages import sanitize_tool_calls
from verifiers.utils.async_utils import maybe_await
from verifiers.utils.message_utils import cleanup_message, cleanup_messages, messages_to_printable
from verifiers.utils.message_utils import sanitize_tool_calls as to_json_text

CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}


async def test_sync_and_async_functions_are_called_alike() -> None:
    async def later(x: int, y: int = 0) -> int:
        return x + y

    assert await maybe_await(later, 1, y=2) == 3
    assert await maybe_await(lambda x, y=0: x + y, 1, y=2) == 3


def test_images_and_audio_are_printed_as_their_kind() -> None:
    parts = [
        {"type": "text", "text": "look"},
        {"type": "image_url", "image_url": {"url": "data:..."}},
        {"type": "input_audio", "input_audio": {}},
    ]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": None, "tool_calls": [CALL]}]
    assert messages_to_printable(messages) == [
        {"role": "user", "content": "look\n\n[image]\n\n[audio]"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
    ]
    assert messages_to_printable("text") == "text"


def test_cleaned_messages_have_no_none_but_their_content() -> None:
    part = {"type": "text", "text": "hi", "image_url": None}
    message = {"role": "user", "content": [part], "tool_calls": None}
    assert cleanup_messages([message]) == [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    assert part["image_url"] is None, "the messages given stay as they are"
    call = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    assert cleanup_messages([call]) == [call]
    assert cleanup_messages("text") == "text"


def test_openai_objects_become_plain_dicts() -> None:
    message = ChatCompletionMessage(role="assistant", content="x")
    assert cleanup_messages([message]) == [{"role": "assistant", "content": "x"}]  # type: ignore[list-item]


def test_tool_calls_become_data_that_json_holds() -> None:
    function = SimpleNamespace(name="add", arguments="{}")
    message = {"role": "assistant", "content": "", "tool_calls": [SimpleNamespace(id="c1", function=function)]}
    answered = ChatCompletionMessage.model_validate({"role": "assistant", "content": None, "tool_calls": [CALL]})
    plain = {"role": "user", "content": "hi"}
    sanitized = sanitize_tool_calls([message, answered, plain])  # type: ignore[list-item]
    assert json.loads(json.dumps(sanitized)) == [
        {"role": "assistant", "content": "", "tool_calls": [{"id": "c1", "function": vars(function)}]},
        {"role": "assistant", "tool_calls": [CALL]},
        plain,
    ]
    assert to_json_text("text") == "text"
    texts = to_json_text([message, plain])
    assert [type(call) for call in texts[0]["tool_calls"]] == [str]
    assert json.loads(texts[0]["tool_calls"][0]) == {"id": "c1", "function": vars(function)}
    assert texts[1] == plain


def test_a_part_of_sound_loses_the_fields_of_other_parts() -> None:
    sound = {"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}}
    mixed = {**sound, "text": "of a neighbour", "image_url": {"url": "of a neighbour"}}
    cleaned = cleanup_message({"role": "user", "content": [{"type": "text", "text": "t"}, mixed]})
    assert cleaned["content"] == [{"type": "text", "text": "t"}, sound]
