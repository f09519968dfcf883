"""Results and environments as a notebook shows them: small tables, with every text escaped and cut; and messages.

The tables have no colours of their own, so they are read in a light and in a dark notebook.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from verifiers.types import image_url_of, message_field, message_text

_MOST_ROWS = 5
_MOST_CHARACTERS = 240
_CELL = "padding: 2px 8px; text-align: left; vertical-align: top; white-space: pre-wrap; overflow-wrap: anywhere"


def results_html(results: Mapping[str, Any]) -> str:
    """Return the means of finished rollouts and a table of the first ones."""
    prompts, rewards = results.get("prompt") or [], results.get("reward") or []
    states, metrics = results.get("state") or [], results.get("metrics") or {}
    errors = [message_field(state, "error") for state in states] or [None] * len(prompts)
    scored = {name: [value for value in values if value is not None] for name, values in metrics.items()}
    means = {"reward": [reward for reward in rewards if reward is not None], **scored}
    facts = [
        f"{len(prompts):,} rollout{'s' * (len(prompts) != 1)}",
        *(f"{name} {sum(values) / len(values):.3f}" for name, values in means.items() if values),
    ]
    failed = sum(error is not None for error in errors)
    if failed:
        facts.append(f"{failed:,} failed")
    columns = (prompts, results.get("completion") or [], results.get("answer") or [])
    rows = []
    for place in range(min(len(prompts), _MOST_ROWS)):
        told = [_newest_text(column[place]) if place < len(column) else "" for column in columns]
        reward = f"{rewards[place]:.3f}" if place < len(rewards) and rewards[place] is not None else ""
        rows.append([*told, reward if errors[place] is None else f"{type(errors[place]).__name__}: {errors[place]}"])
    more = [f"{len(prompts) - _MOST_ROWS:,} more"] if len(prompts) > _MOST_ROWS else []
    return (
        _section("Results", facts) + _table(("prompt", "completion", "answer", "reward"), rows) + _section("", more)
    )


def environment_html(env: Any) -> str:
    """Return what an environment asks and rewards; a dataset that a function will make is not made for it."""
    rubric: Any = getattr(env, "rubric", None)
    rewards = []
    if hasattr(rubric, "get_reward_func_names"):
        names, weights = rubric.get_reward_func_names(), rubric.get_reward_weights()
        rewards = [f"{name} x {weight:g}" for name, weight in zip(names, weights, strict=False)]
    functions = (message_field(tool, "function", tool) for tool in getattr(env, "oai_tools", None) or [])
    tools = [str(message_field(function, "name", "")) for function in functions]
    turns = getattr(env, "max_turns", None)
    described = {
        "training rows": _row_count(env, "_dataset"),
        "eval rows": _row_count(env, "_eval_dataset"),
        "system prompt": getattr(env, "system_prompt", None),
        "first prompt": _first_prompt(env),
        "rewards": ", ".join(rewards),
        "tools": ", ".join(tools),
        "turns at most": "" if turns in (None, -1) else turns,
    }
    return _section(type(env).__name__, ()) + _table((), [[name, text] for name, text in described.items() if text])


def _row_count(env: Any, attribute: str) -> str:
    # reading the public attribute would call a function that makes the dataset
    dataset = vars(env).get(attribute)
    if dataset is None:
        return "none"
    return "made when first used" if callable(dataset) else f"{len(dataset):,}"


def _first_prompt(env: Any) -> str:
    for attribute in ("_dataset", "_eval_dataset"):
        dataset = vars(env).get(attribute)
        if dataset is not None and not callable(dataset) and len(dataset):
            return _newest_text(dataset[0]["prompt"])
    return ""


def _newest_text(messages: Any) -> str:
    if isinstance(messages, Sequence) and not isinstance(messages, str):
        return message_text(messages[-1]) if messages else ""
    return "" if messages is None else str(messages)


def _section(title: str, facts: Iterable[str]) -> str:
    name = f"<b>{html.escape(title)}</b> " if title else ""
    return f"<div>{name}{html.escape(', '.join(facts))}</div>"


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [_row("th", head)] if head else []
    lines += [_row("td", row) for row in rows]
    return f"<table>{''.join(lines)}</table>"


def _row(tag: str, cells: Sequence[Any]) -> str:
    return "<tr>" + "".join(f'<{tag} style="{_CELL}">{_cut(cell)}</{tag}>' for cell in cells) + "</tr>"


def _cut(cell: Any) -> str:
    text = str(cell)
    return html.escape(text if len(text) <= _MOST_CHARACTERS else text[:_MOST_CHARACTERS] + " ...")


# -- messages as pages show them -----------------------------------------------------------------------------------
#
# What a model or an environment wrote is untrusted: a message may be a number, a call may have no name. Nothing here
# raises for such data; it is shown as the JSON that it is.

MOST_CHARACTERS = 200_000
"""Characters of one text that the page holds; of longer ones the middle is left out, and that is said."""

_IMAGE_TYPES = (
    "data:image/png;base64,",
    "data:image/jpeg;base64,",
    "data:image/gif;base64,",
    "data:image/webp;base64,",
)
_MOST_IMAGE_CHARACTERS = 2_000_000


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
        return [_shown_message(message) for message in messages]
    return [{"role": role, "text": as_text(messages)}]


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
    return shortened(text, MOST_CHARACTERS)


def shortened(text: str, max_chars: int) -> str:
    """Return the text, or its beginning and its end with a mark between them that says how much is missing."""
    if len(text) <= max_chars:
        return text
    head = max_chars // 2
    tail = max_chars - head
    return f"{text[:head]}\n[... {len(text) - max_chars:,} characters left out ...]\n{text[len(text) - tail :]}"


def finite(value: Any) -> Any:
    """Return nested data without NaN and infinities, which JSON in a browser does not know."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    return [finite(item) for item in value] if isinstance(value, (list, tuple)) else value


def _shown_message(message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        return {"role": "?", "text": as_text(message)}
    text, images = _shown_content(message.get("content"))
    shown: dict[str, Any] = {"role": str(message.get("role", "?"))[:40], "text": as_text(text)}
    think = message.get("reasoning_content") or message.get("reasoning")
    if think:
        shown["think"] = as_text(think)
    if images:
        shown["images"] = images
    calls = message.get("tool_calls")
    if isinstance(calls, list) and calls:
        shown["calls"] = [_shown_call(call) for call in calls]
    if message.get("tool_call_id") is not None:
        shown["answers"] = str(message["tool_call_id"])
    return shown


def _shown_content(content: Any) -> tuple[str, list[str]]:
    if not isinstance(content, list):
        return as_text(content), []
    texts, images = [], []
    for part in content:
        kind = str(part.get("type", "text")) if isinstance(part, Mapping) else "text"
        if not isinstance(part, Mapping):
            texts.append(as_text(part))
        elif "image" in kind:
            url = image_url_of(part) or ""
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


def _shown_call(call: Any) -> dict[str, str]:
    if not isinstance(call, Mapping):
        return {"id": "", "name": "?", "arguments": as_text(call)}
    function = call.get("function")
    named = function if isinstance(function, Mapping) else call
    return {
        "id": str(call.get("id") or ""),
        "name": str(named.get("name") or "?")[:200],
        "arguments": as_text(named.get("arguments")),
    }
