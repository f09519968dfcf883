"""StatefulToolEnv: tools with arguments that the environment supplies, such as the rollout's own sandbox."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from verifiers.envs.calling import maybe_await
from verifiers.envs.tool_env import ToolEnv
from verifiers.envs.tools import RequestedCall, parse_arguments
from verifiers.errors import ConfigError, ToolParseError
from verifiers.types import Messages, State

__all__ = ["StatefulToolEnv"]


class StatefulToolEnv(ToolEnv):
    """A ToolEnv whose tools may have arguments that the policy neither sees nor sets.

    Name them when you add a tool, `add_tool(tool, args_to_skip=[...])`, and supply them in `update_tool_args`.

    Attributes:
        skipped_args: from a tool's name to its hidden arguments.
    """

    def __init__(self, tools: Sequence[Callable[..., Any]] | None = None, max_turns: int = 10, **kwargs: Any) -> None:
        self.skipped_args: dict[str, list[str]] = {}
        super().__init__(tools, max_turns, **kwargs)

    def add_tool(self, tool: Callable[..., Any], args_to_skip: Sequence[str] = ()) -> None:
        """Offer one more tool, without the arguments in `args_to_skip`.

        Raises:
            ConfigError: the tool has no such argument.
        """
        self._add(tool, args_to_skip)

    def remove_tool(self, tool: Callable[..., Any]) -> None:
        super().remove_tool(tool)
        self.skipped_args = {name: args for name, args in self.skipped_args.items() if name in self.tool_map}

    def _add(self, tool: Callable[..., Any], hidden: Sequence[str] = ()) -> None:
        super()._add(tool, hidden)
        prepared = self._prepared[next(reversed(self.tool_map))][1]
        self.skipped_args[prepared.name] = sorted(prepared.hidden)

    async def update_tool_args(
        self, tool_name: str, tool_args: dict[str, Any], messages: Messages, state: State, **kwargs: Any
    ) -> dict[str, Any]:
        """The arguments to call the tool with: the policy's, and the hidden ones. Override it, sync or async."""
        if self.skipped_args.get(tool_name):
            raise NotImplementedError(
                f"{type(self).__name__} must override update_tool_args to supply {self.skipped_args[tool_name]} "
                f"to the tool {tool_name!r}."
            )
        return tool_args

    async def _arguments(
        self, call: RequestedCall, messages: Messages, state: State, kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        arguments = parse_arguments(call)
        tool = self._tool(call.name)
        if taken := sorted(tool.hidden & arguments.keys()):
            raise ToolParseError(
                f"Wrong arguments for the tool {call.name!r}: {', '.join(taken)} is not a parameter."
            )
        updated = await maybe_await(self.update_tool_args, call.name, arguments, messages, state, **kwargs)
        if not isinstance(updated, dict):
            raise ConfigError(
                f"update_tool_args of {type(self).__name__} returned {updated!r:.80}; return the arguments as a dict."
            )
        return updated
