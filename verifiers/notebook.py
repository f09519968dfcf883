"""Results and environments as a notebook shows them: small tables, with every text escaped and cut.

The tables have no colours of their own, so they are read in a light and in a dark notebook.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from verifiers.chat_messages import message_field, message_text

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
    tools = [str(_tool_name(tool)) for tool in getattr(env, "oai_tools", None) or []]
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


def _tool_name(tool: Any) -> Any:
    return message_field(message_field(tool, "function", tool), "name", "")


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
