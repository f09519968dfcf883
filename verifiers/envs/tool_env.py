"""ToolEnv: the policy calls tools until it answers without calling one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

from verifiers.classic.hooks import by_state
from verifiers.concurrency import gather_owned, own_cancels_fail
from verifiers.envs.lifecycle import maybe_await
from verifiers.envs.multiturn_env import MultiTurnEnv
from verifiers.envs.tools import (
    NOT_FOR_THE_MODEL,
    RequestedCall,
    Tool,
    as_tool,
    parse_arguments,
    requested_calls,
    tool_message,
    tool_name,
)
from verifiers.errors import ConfigError, ToolCallError, ToolError, ToolParseError
from verifiers.notebook import shortened
from verifiers.sandbox.spec import RunResult
from verifiers.types import ChatMessage, Messages, State, names_of_classic

state_of_call: ContextVar[State | None] = ContextVar("state_of_call", default=None)
"""The state of the rollout whose tool call runs: `call_tool` and tools are not given it."""


class ToolEnv(MultiTurnEnv):
    """An environment whose policy may call tools, by native tool calls.

    The rollout ends with an answer that calls no tool. Every call gets exactly one tool message, in the order of the
    calls, which run concurrently. What goes wrong with a call (arguments that do not parse or fit, an unknown
    tool, a tool that raises or hangs) is told to the policy in that message, and noted in
    `state["tool_call_errors"]`, which evaluations count. Failures of the machinery, such as
    `vf.SandboxError`, end the rollout instead.

    Args:
        tools: functions with annotations and docstrings, sync (run in threads) or async, or `Tool`s.
        max_turns: answers of the policy in one rollout; -1 for no bound.
        error_formatter: the text of the tool message for an exception.
        stop_errors: exceptions that end the rollout with an error instead.
        tool_timeout_s: seconds that one call may take; None for no bound.
        **kwargs: as `MultiTurnEnv`.

    Attributes:
        oai_tools: the definitions that the policy is given.
        tool_map: from name to tool; what stands here is what is called.
        replies_with_state: `env_response` returns the state, too, for a subclass that unpacks both.

    Raises:
        ConfigError: a function that cannot be a tool, or two tools with one name.
    """

    replies_with_state = False

    def __init__(
        self,
        tools: Sequence[Callable[..., Any]] | None = None,
        max_turns: int = 10,
        error_formatter: Callable[[Exception], str] = str,
        stop_errors: Sequence[type[Exception]] | None = None,
        tool_timeout_s: float | None = 60.0,
        **kwargs: Any,
    ) -> None:
        self.tools: list[Callable[..., Any]] = []
        self.tool_map: dict[str, Callable[..., Any]] = {}
        self._prepared: dict[str, tuple[Any, Tool]] = {}
        self.error_formatter = error_formatter
        self.stop_errors: list[type[Exception]] = list(stop_errors or ())
        self.tool_timeout_s = tool_timeout_s
        super().__init__(max_turns=max_turns, **{"oai_tools": [], **kwargs})
        if callable(tools):
            raise ConfigError(f"tools is {tools!r}; give a list of functions.")
        for tool in tools or ():
            self._add(tool)

    def add_tool(self, tool: Callable[..., Any]) -> None:
        """Offer one more tool."""
        self._add(tool)

    def remove_tool(self, tool: Callable[..., Any]) -> None:
        """Take a tool away again; a ValueError where it was never added."""
        self.tools.remove(tool)
        name = tool_name(tool)
        del self.tool_map[name]
        self._prepared.pop(name, None)
        self.oai_tools = [item for item in self.oai_tools or () if item["function"]["name"] != name]

    def _add(self, tool: Callable[..., Any], hidden: Sequence[str] = ()) -> None:
        prepared = as_tool(tool, hidden)
        if prepared.name in self.tool_map:
            raise ConfigError(f"Two tools are named {prepared.name!r}; rename one of them.")
        self.tools.append(tool)
        self.tool_map[prepared.name] = tool
        self._prepared[prepared.name] = (tool, prepared)
        self.oai_tools = [*(self.oai_tools or ()), prepared.schema]

    def _tool(self, name: str) -> Tool:
        tool = self.tool_map.get(name)
        if tool is None:
            known = ", ".join(sorted(self.tool_map)) or "none"
            raise ToolCallError(f"There is no tool {name!r}; the tools are: {known}.")
        source, prepared = self._prepared.get(name, (None, None))
        if prepared is None or source is not tool:
            # put into the map directly, as subclasses and tests do
            prepared = as_tool(tool)
            self._prepared[name] = (tool, prepared)
        return prepared

    @by_state
    async def is_completed(self, state: State) -> bool:
        """Return True too when the newest message is an answer of the policy that calls no tool."""
        if await super().is_completed(state):
            return True
        said: Messages = state["completion"]
        if isinstance(said, str) or (said and said[-1].get("role") != "assistant"):
            return False
        if not await maybe_await(self.no_tools_called, state):
            return False
        state["stop_condition"] = state.get("stop_condition") or "no_tools_called"
        return True

    async def no_tools_called(self, state: State) -> bool:
        """Return whether the policy's newest answer calls no tool; override it to continue nevertheless."""
        steps = state.get("trajectory")
        said: Messages = steps[-1]["completion"] if steps else state["completion"]
        return bool(said) and not isinstance(said, str) and not said[-1].get("tool_calls")

    async def env_response(self, messages: Messages, state: State, **kwargs: Any) -> Any:
        """Answer each tool call of the newest message with one; return (messages, state) if `replies_with_state`."""
        calls = requested_calls(messages[-1]) if messages and not isinstance(messages, str) else []
        replies = await gather_owned([self._answer(call, messages, state, kwargs) for call in calls])
        return (replies, state) if self.replies_with_state else replies

    async def call_tool(
        self, tool_name: str, tool_args: dict[str, Any], tool_call_id: str, **kwargs: Any
    ) -> ChatMessage:
        """Call a tool and put its answer, or what went wrong, into a tool message.

        Raises:
            ToolError: of the kinds in `stop_errors`.
            InfraError, ModelError, ConfigError: the tool did not fail, but what it stands on.
        """
        try:
            tool = self._tool(tool_name)
            with own_cancels_fail():
                result = await tool.run(tool_args, timeout_s=None if tool.has_own_deadline else self.tool_timeout_s)
        except Exception as error:
            return self._failure(error, tool_call_id)
        return tool_message(result, tool_call_id)

    async def _arguments(
        self, call: RequestedCall, messages: Messages, state: State, kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        """Return the arguments to call the tool with; what a subclass adds to the model's own."""
        return parse_arguments(call)

    async def _answer(
        self, call: RequestedCall, messages: Messages, state: State, kwargs: dict[str, Any]
    ) -> ChatMessage:
        state_of_call.set(state)  # in a task of its own
        try:
            arguments = await self._arguments(call, messages, state, kwargs)
        except ToolError as error:
            return self._failure(error, call.id)
        try:
            # an override may raise, and may answer with text alone
            with own_cancels_fail():
                message = await maybe_await(self.call_tool, call.name, arguments, call.id)
        except Exception as error:
            return self._failure(error, call.id)
        if not isinstance(message, dict):
            return tool_message(message, call.id)
        return message if message.get("tool_call_id") == call.id else {**message, "tool_call_id": call.id}

    def _failure(self, error: Exception, call_id: str) -> ChatMessage:
        """Return the tool message that tells of an error; raise one that is not for the policy to see."""
        # also where it stands in the group of a tool's own tasks
        if ExceptionGroup("", [error]).subgroup(NOT_FOR_THE_MODEL):
            raise error
        wrapped = error if isinstance(error, ToolError) else ToolCallError(f"{type(error).__name__}: {error}")
        # what was wrapped, here or in call_tool, is asked for by its own class too
        cause = error.__cause__ if isinstance(error, ToolError) else None
        asked = BaseExceptionGroup("", [kind for kind in (error, wrapped, cause) if kind is not None])
        stops = tuple(self.stop_errors)
        if asked.subgroup(lambda one: one is not asked and isinstance(one, stops)):
            if wrapped is error:
                raise error
            raise wrapped from error
        self.logger.debug("a tool call failed: %r", error)
        if (state := state_of_call.get()) is not None:
            state.setdefault("tool_call_errors", []).append(f"{type(error).__name__}: {error}")
        return {"role": "tool", "content": self.error_formatter(error) or repr(error), "tool_call_id": call_id}


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
        """Offer one more tool, without the arguments in `args_to_skip`."""
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
        """Return the arguments to call the tool with: the policy's, and the hidden ones. Override, sync or async."""
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


def result_text(result: RunResult, max_chars: int, timeout_s: float) -> str:
    """Return a command's output and its errors, and a line each for: output lost, time over, exit code not 0."""
    parts = [result.stdout.rstrip("\n")]
    if result.stderr.strip():
        parts.append(f"stderr:\n{result.stderr.rstrip()}")
    text = shortened("\n".join(part for part in parts if part), max_chars)
    notes = []
    if result.dropped_bytes:
        notes.append(f"[{result.dropped_bytes:,} bytes of output were too many and are lost]")
    if result.timed_out:
        notes.append(f"[the command ran longer than {timeout_s:g} s and was killed]")
    elif result.exit_code:
        notes.append(f"[exit code {result.exit_code}]")
    return "\n".join(part for part in (text, *notes) if part) or "[no output]"


__getattr__ = names_of_classic(__name__)
