"""ToolRubric: counts of tool calls that never change a reward."""

from __future__ import annotations

import functools
from typing import Any

import verifiers as vf


def search(query: str) -> str:
    return query


def add(a: int, b: int) -> int:
    return a + b


def assistant(*names: str) -> dict[str, Any]:
    calls = [{"id": name, "type": "function", "function": {"name": name, "arguments": "{}"}} for name in names]
    return {"role": "assistant", "content": "", "tool_calls": calls}


COMPLETION = [
    assistant("search", "add"),
    {"role": "tool", "content": "x", "tool_call_id": "search"},
    assistant("search", "nope"),
    {"role": "assistant", "content": "done", "tool_calls": ['{"function": {"name": "add"}}', {"name": "add"}]},
    {"role": "assistant", "content": "done"},
]


async def test_calls_are_counted_in_all_and_by_tool_and_weigh_nothing() -> None:
    rubric = vf.ToolRubric(tools=[search, functools.partial(add, b=1)])
    assert rubric.get_reward_func_names() == ["total_tool_calls", "search_calls", "add_calls"]
    assert rubric.get_reward_weights() == [0.0, 0.0, 0.0]
    score = await rubric.score_rollout("q", COMPLETION, "a", vf.State())
    assert score.reward == 0.0
    assert score.metrics == {"total_tool_calls": 6.0, "search_calls": 2.0, "add_calls": 3.0}


async def test_a_text_and_an_odd_call_count_nothing_and_break_nothing() -> None:
    rubric = vf.ToolRubric(tools=["search"])
    assert (await rubric.score_rollout("q", "text", "a", vf.State())).metrics["total_tool_calls"] == 0.0
    odd = [{"role": "assistant", "content": None, "tool_calls": ["{", 3, None, {"function": None}]}]
    assert (await rubric.score_rollout("q", odd, "a", vf.State())).metrics["search_calls"] == 0.0


async def test_other_functions_may_stand_beside_the_counts() -> None:
    def right() -> float:
        return 1.0

    rubric = vf.ToolRubric(tools=[search], funcs=[right], weights=[0.5])
    score = await rubric.score_rollout("q", COMPLETION, "a", vf.State())
    assert (score.reward, score.metrics["right"], score.metrics["search_calls"]) == (0.5, 1.0, 2.0)
