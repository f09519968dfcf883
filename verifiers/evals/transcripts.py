"""Messages of any shape, as stored by anyone, in the one shape that the page draws.

What a model or an environment wrote is untrusted: a message may be a number, a call may have no name. Nothing here
raises for such data; it is shown as the JSON that it is.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["MOST_CHARACTERS", "as_text", "last_words", "messages_of", "newest_first", "transcript_of"]

MOST_CHARACTERS = 200_000
"""Characters of one text that the page holds; of longer ones the middle is left out, and that is said."""

_IMAGE_TYPES = (
    "data:image/png;base64,",
    "data:image/jpeg;base64,",
    "data:image/gif;base64,",
    "data:image/webp;base64,",
)
_MOST_IMAGE_CHARACTERS = 2_000_000
_LAST_WORDS = 160
"""Characters of a rollout's last words."""


def transcript_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the texts that the page shows of one row.

    Returns:
        "prompt" and "completion" (lists of messages as in `messages_of`), "answer" as text, "task", "info" as JSON
        text or "", and "error" or None.
    """
    info, error = row.get("info"), row.get("error")
    return {
        "prompt": messages_of(row.get("prompt"), "prompt"),
        "completion": messages_of(row.get("completion"), "completion"),
        "answer": as_text(row.get("answer")),
        "task": as_text(row.get("task")),
        "info": as_text(info) if info else "",
        "error": as_text(error) if error else None,
    }


def messages_of(messages: Any, role: str) -> list[dict[str, Any]]:
    """Return messages as the page draws them; fields without content are left out.

    Args:
        messages: a list of chat messages, or a string in completion mode.
        role: given to a string.

    Returns:
        One dict a message: "role"; "text"; "think", the reasoning that a server reported beside it; "images", data
        URLs; "calls", a list of {"id", "name", "arguments"}; "answers", the id of the call that a tool answers.
    """
    if messages is None or messages == "":
        return []
    if isinstance(messages, list):
        return [_message(message) for message in messages]
    return [{"role": role, "text": as_text(messages)}]


def newest_first(messages: Any, role: str) -> Iterator[dict[str, Any]]:
    """Yield messages like `messages_of`, the last one first, so that the end of a long conversation is cheap."""
    if isinstance(messages, list):
        return map(_message, reversed(messages))
    return iter(messages_of(messages, role))


def last_words(row: Mapping[str, Any]) -> str:
    """Return the end of a rollout on one line: why it failed, or else the last thing that was said."""
    if row.get("error"):
        return _one_line(as_text(row["error"]), _LAST_WORDS)
    for message in newest_first(row.get("completion"), "completion"):
        calls = ", ".join(call["name"] for call in message.get("calls", ()))
        words = _one_line(_after_thinking(message.get("text", "")), _LAST_WORDS) or (
            f"calls {calls}" if calls else ""
        )
        if words:
            return words
    return ""


def as_text(value: Any) -> str:
    """Return a string as it is, None as "", anything else as JSON; cut in the middle where it is huge."""
    if isinstance(value, str):
        text = value
    elif value is None:
        text = ""
    elif type(value) is int:
        # example ids, in every row
        text = str(value)
    else:
        try:
            text = json.dumps(finite(value), ensure_ascii=False, indent=1, default=str)
        except RecursionError:
            text = "[nested too deeply to be shown]"
    if len(text) <= MOST_CHARACTERS:
        return text
    half = MOST_CHARACTERS // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half:,} characters are left out here ...]\n{text[-half:]}"


def _message(message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        return {"role": "?", "text": as_text(message)}
    text, images = _content(message.get("content"))
    shown: dict[str, Any] = {"role": str(message.get("role", "?"))[:40], "text": as_text(text)}
    think = message.get("reasoning_content") or message.get("reasoning")
    if think:
        shown["think"] = as_text(think)
    if images:
        shown["images"] = images
    calls = message.get("tool_calls")
    if isinstance(calls, list) and calls:
        shown["calls"] = [_call(call) for call in calls]
    if message.get("tool_call_id") is not None:
        shown["answers"] = str(message["tool_call_id"])
    return shown


def _content(content: Any) -> tuple[str, list[str]]:
    if not isinstance(content, list):
        return as_text(content), []
    texts, images = [], []
    for part in content:
        kind = str(part.get("type", "text")) if isinstance(part, Mapping) else "text"
        if not isinstance(part, Mapping):
            texts.append(as_text(part))
        elif "image" in kind:
            url = _image_url(part)
            if url.startswith(_IMAGE_TYPES) and len(url) <= _MOST_IMAGE_CHARACTERS:
                images.append(url)
            else:
                # a page that loads nothing cannot show a picture from elsewhere, but can say where it is
                texts.append(f"[image {url[:200]}]" if url else "[image]")
        elif part.get("text") is not None:
            texts.append(as_text(part["text"]))
        elif "audio" in kind:
            texts.append("[audio]")
        else:
            texts.append(as_text(dict(part)))
    return "\n\n".join(texts), images


def _image_url(part: Mapping[str, Any]) -> str:
    url = part.get("image_url")
    if isinstance(url, Mapping):
        url = url.get("url")
    return url if isinstance(url, str) else ""


def _call(call: Any) -> dict[str, str]:
    if not isinstance(call, Mapping):
        return {"id": "", "name": "?", "arguments": as_text(call)}
    function = call.get("function")
    named = function if isinstance(function, Mapping) else call
    return {
        "id": str(call.get("id") or ""),
        "name": str(named.get("name") or "?")[:200],
        "arguments": as_text(named.get("arguments")),
    }


def _one_line(text: str, characters: int) -> str:
    # only the end is looked at: splitting a text of megabytes for a line of it takes seconds over many rows
    return " ".join(text[-4 * characters :].split())[-characters:]


def _after_thinking(text: str) -> str:
    """Return the text after the reasoning; the reasoning itself where nothing follows."""
    head, end, rest = text.rpartition("</think>")
    return rest if end and rest.strip() else head or rest


def finite(value: Any) -> Any:
    """Return nested data without NaN and infinities, which JSON in a browser does not know."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    return [finite(item) for item in value] if isinstance(value, (list, tuple)) else value
