"""ToolRubric: counts of tool calls as metrics."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from verifiers.concurrency import without_partials
from verifiers.rubrics.rubric import Rubric
from verifiers.types import Messages, message_field


class ToolRubric(Rubric):
    """Counts of a rollout's tool calls: `total_tool_calls`, and `{tool}_calls` for each tool. All weights are 0.

    Calls are counted as the policy asked for them, whether they succeeded or not; calls of tools that do not exist
    are part of the total.

    The tools are given as `ToolEnv` takes them, or by their names.
    """

    def __init__(self, tools: Sequence[Callable[..., Any] | str] | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.tools = list(tools or ())
        self.tool_names = [_name(tool) for tool in self.tools]
        self.add_metric(self.total_tool_calls)
        for name in self.tool_names:
            self.add_metric(self.get_tool_call_count_func(name))

    async def total_tool_calls(self, completion: Messages) -> float:
        """Count the tools that the rollout called."""
        return float(len(_called(completion)))

    def get_tool_call_count_func(self, tool_name: str) -> Callable[..., Awaitable[float]]:
        """Return a reward function, named `{tool_name}_calls`, that counts the calls of one tool."""

        async def count(completion: Messages) -> float:
            return float(_called(completion).count(tool_name))

        count.__name__ = count.__qualname__ = f"{tool_name}_calls"
        return count


def _name(tool: Any) -> str:
    tool = without_partials(tool)
    if isinstance(tool, str):
        return tool
    return getattr(tool, "__name__", None) or getattr(tool, "name", None) or type(tool).__name__


def _called(completion: Messages) -> list[str]:
    """Return the names of the tools called in a completion, in order."""
    messages = [] if isinstance(completion, str) else completion
    said = [message for message in messages if message_field(message, "role") == "assistant"]
    return [_called_name(call) for message in said for call in message_field(message, "tool_calls") or ()]


def _called_name(call: Any) -> str:
    if isinstance(call, str):
        try:
            call = json.loads(call)
        except (ValueError, RecursionError):
            return ""
    function = message_field(call, "function") or call
    return str(message_field(function, "name") or "") if not isinstance(function, (str, list)) else ""
