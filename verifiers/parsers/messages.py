"""Conversations as packages print, clean and send them; `verifiers.types` has the messages themselves."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from verifiers.types import ChatMessage, Messages, drop_none, message_field


def messages_to_printable(messages: Messages) -> Messages:
    """Return messages whose content is text alone: images and audio become "[image]" and "[audio]".

    Parts are set apart by an empty line. A string is returned as it is.
    """
    return messages if isinstance(messages, str) else [message_to_printable(message) for message in messages]


def message_to_printable(message: ChatMessage) -> ChatMessage:
    content = message_field(message, "content")
    parts = [content] if isinstance(content, str) else content or []
    shown = {"role": message_field(message, "role"), "content": "\n\n".join(map(_printable_part, parts))}
    calls = message_field(message, "tool_calls")
    return shown if calls is None else {**shown, "tool_calls": calls}


def cleanup_messages(messages: Messages) -> Messages:
    """Return messages as plain dicts without fields that are None, which strict servers refuse.

    `content` stays, also as None: servers expect it beside tool calls. Nested fields that are None go too: a table's
    schema adds them where content parts differ in kind. A string is returned as it is.
    """
    return messages if isinstance(messages, str) else [cleanup_message(message) for message in messages]


def cleanup_message(message: ChatMessage) -> ChatMessage:
    fields = plain(message)
    lean: ChatMessage = drop_none(fields)
    if "content" in fields:
        content = drop_none(fields["content"])
        lean["content"] = [_lean_part(part) for part in content] if isinstance(content, list) else content
    return lean


def sanitize_tool_calls(messages: Messages) -> Messages:
    """Return messages whose tool calls are plain data that JSON can hold.

    Messages without tool calls, and strings, are returned as they are.
    """
    if isinstance(messages, str):
        return messages
    sanitized: list[Any] = []
    for message in messages:
        calls = message_field(message, "tool_calls")
        if calls:
            as_dict = message if isinstance(message, Mapping) else plain(message)
            message = {**as_dict, "tool_calls": [plain(call) for call in calls]}
        sanitized.append(message)
    return sanitized


def plain(value: Any) -> Any:
    """Return nested dicts, lists and scalars out of pydantic objects, namespaces and the like."""
    return json.loads(json.dumps(value, default=_fields))


def _fields(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    if hasattr(value, "model_dump"):
        return drop_none(value.model_dump())
    if hasattr(value, "__dict__"):
        return {name: item for name, item in vars(value).items() if not name.startswith("_")}
    return str(value)


def _printable_part(part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = str(message_field(part, "type") or "text")
    if "image" in kind:
        return "[image]"
    if "audio" in kind:
        return "[audio]"
    text = message_field(part, "text")
    return str(text) if text is not None else f"[{kind}]"


def _lean_part(part: Any) -> Any:
    """Return a content part; one of sound without the fields of other kinds, which a table's schema adds."""
    if not isinstance(part, dict) or part.get("type") != "input_audio":
        return part
    return {name: part[name] for name in ("type", "input_audio") if name in part}


def print_prompt_completions_sample(
    prompts: Sequence[Messages],
    completions: Sequence[Messages],
    *scores: Any,
    rewards: Any = None,
    step: int | None = None,
    num_samples: int = 1,
    errors: Sequence[Any] | None = None,
) -> None:
    """Print some rollouts as a table: prompt, completion, reward.

    Called as `print_prompt_completions_sample(prompts, completions, rewards, step, num_samples=1)`, or as in the
    newest releases of the classic API with the rollouts' errors, or None for those without, before the rewards.

    The rewards may be a dict of lists, of which "reward" is shown, or else the first.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    # (rewards, step, num_samples), and errors first where the second of them is not a step
    given = list(scores)
    if len(given) > 1 and not isinstance(given[1], int):
        errors = given.pop(0)
    rewards = given[0] if given else rewards
    step = given[1] if len(given) > 1 else step
    num_samples = given[2] if len(given) > 2 else num_samples
    if isinstance(rewards, Mapping):
        rewards = rewards.get("reward", next(iter(rewards.values()), []))
    table = Table(title=None if step is None else f"Step {step}", show_lines=True, expand=True)
    table.add_column("prompt", style="bright_yellow")
    table.add_column("completion", style="bright_green")
    table.add_column("reward", justify="right")
    for place in range(min(num_samples, len(prompts), len(completions))):
        reward = f"{float(rewards[place]):.2f}" if rewards is not None and place < len(rewards) else ""
        failure = errors[place] if errors is not None and place < len(errors) else None
        shown = _conversation(completions[place]) + (f"\n\n{failure!r}" if failure else "")
        # as text: what a model writes may look like markup
        table.add_row(Text(_conversation(prompts[place])), Text(shown), reward)
    Console().print(table)


def _conversation(messages: Messages) -> str:
    printable = messages_to_printable(messages)
    if isinstance(printable, str):
        return printable
    turns = []
    for message in printable:
        calls = [json.dumps(plain(call), ensure_ascii=False) for call in message.get("tool_calls") or []]
        turns.append("\n".join([f"{message['role']}: {message['content']}", *calls]))
    return "\n\n".join(turns)
