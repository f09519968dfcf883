"""Rubrics that measure rollouts and reward nothing, as environments of the late second generation add them.

Environments here do not add them by themselves: the results have `num_turns`, and `ToolRubric` counts calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from verifiers.rubrics.rubric import Rubric
from verifiers.rubrics.tool_rubric import ToolRubric
from verifiers.types import State

__all__ = ["MultiTurnMonitorRubric", "SandboxMonitorRubric", "ToolMonitorRubric"]


class MultiTurnMonitorRubric(Rubric):
    """The metric `num_turns`: answers of the policy."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_metric(self.num_turns)

    async def num_turns(self, state: State) -> float:
        """Count the policy's answers."""
        return float(len(state["trajectory"]))


class SandboxMonitorRubric(Rubric):
    """The metrics `sandbox_ready_wait_time` and `sandbox_command_execution_time` of a `SandboxEnv`, in seconds."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_metric(self.sandbox_ready_wait_time)
        self.add_metric(self.sandbox_command_execution_time)

    async def sandbox_ready_wait_time(self, state: State) -> float:
        """Return the seconds until the sandbox was open."""
        return float(state["sandbox_state"]["ready_wait_time"])

    async def sandbox_command_execution_time(self, state: State) -> float:
        """Return the mean seconds of a command, 0.0 without commands."""
        times = state["sandbox_state"]["command_execution_times"]
        return sum(times) / len(times) if times else 0.0


class ToolMonitorRubric(ToolRubric):
    """`ToolRubric` by the names of the tools, which may be added and removed.

    Args:
        tool_names: the tools whose calls are counted one by one.
        **kwargs: as `Rubric`.
    """

    def __init__(self, tool_names: Sequence[str] | None = None, **kwargs: Any) -> None:
        super().__init__(tool_names, **kwargs)

    def add_tool_metric(self, tool_name: str) -> None:
        """Count the calls of one more tool."""
        if tool_name not in self.tool_names:
            self.tool_names.append(tool_name)
            self.add_metric(self.get_tool_call_count_func(tool_name))

    def remove_tool_metric(self, tool_name: str) -> None:
        """Stop counting the calls of a tool."""
        if tool_name in self.tool_names:
            self.tool_names.remove(tool_name)
            place = self.get_reward_func_names().index(f"{tool_name}_calls")
            del self.reward_funcs[place], self.reward_weights[place]
