"""MCPEnv: the tools of MCP servers as a tool environment."""

from __future__ import annotations

import asyncio
import difflib
import importlib.util
import json
import re
import threading
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Literal

from verifiers.concurrency import gather_owned
from verifiers.envs.lifecycle import cleanup, teardown
from verifiers.envs.tool_env import ToolEnv
from verifiers.envs.tools import Tool, tool_definition
from verifiers.errors import ConfigError, ToolCallError
from verifiers.installation import install_hint
from verifiers.integrations.mcp_servers import MCPConnection, MCPServerConfig
from verifiers.loop_thread import run_blocking
from verifiers.types import Messages, State

if TYPE_CHECKING:
    from mcp import types as mcp_types

if importlib.util.find_spec("mcp") is None:
    raise ImportError(f"MCPEnv needs mcp; {install_hint('mcp')}.", name="mcp")

_LONGEST_NAME = 64  # of a function in OpenAI's API

_Connections = Mapping[str, MCPConnection]

# the own servers of the rollout that calls a tool; tasks inherit it
_of_this_rollout: ContextVar[_Connections | None] = ContextVar("_of_this_rollout", default=None)


def _text_of(error: Exception) -> str:
    return f"{error}"


class MCPEnv(ToolEnv):
    """A ToolEnv with the tools of MCP servers, over stdio or streamable HTTP.

    Servers are started, or connected to, by the first rollout, in the event loop that runs it. Tools of one name
    from several servers become `server__tool`. A tool's result or error is the tool message. A
    server that cannot be reached is an `InfraError`, so the rollout ends as `environment_error`.

    Args:
        mcp_servers: the servers, as `MCPServerConfig`s or dicts of its fields.
        max_turns: answers of the policy in one rollout; -1 for no bound.
        error_formatter: the text of the tool message for an exception.
        scope: "process": all rollouts of an event loop share the servers; one that ends is started again, and its
            unanswered calls are made once more. "rollout": each rollout starts servers of its own, for
            servers that keep state; they end with it.
        connect_timeout_s: for a server to start.
        max_result_chars: longer results are cut.
        **kwargs: of `ToolEnv`; `tools` are further tools, Python functions.

    Raises:
        ConfigError: no server, two of one name, or a configuration that cannot work.
    """

    def __init__(
        self,
        mcp_servers: Sequence[MCPServerConfig | Mapping[str, Any]],
        max_turns: int = 10,
        error_formatter: Callable[[Exception], str] = _text_of,
        *,
        scope: Literal["process", "rollout"] = "process",
        connect_timeout_s: float = 60.0,
        max_result_chars: int = 50_000,
        **kwargs: Any,
    ) -> None:
        super().__init__(max_turns=max_turns, error_formatter=error_formatter, **kwargs)
        self.mcp_servers = [MCPServerConfig.of(server) for server in mcp_servers]
        names = [config.name for config in self.mcp_servers]
        if not names:
            raise ConfigError("MCPEnv has no servers; give at least one in mcp_servers.")
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ConfigError(f"Two MCP servers are named {twice[0]!r}; rename one of them.")
        if scope not in ("process", "rollout"):
            raise ConfigError(f"scope is {scope!r}; give 'process' or 'rollout'.")
        self.scope = scope
        self.connect_timeout_s = connect_timeout_s
        self.max_result_chars = max_result_chars
        self._shared: weakref.WeakKeyDictionary[Any, dict[str, MCPConnection]] = weakref.WeakKeyDictionary()
        self._known = False
        # several threads' loops may use one environment
        self._lock = threading.Lock()

    def connect(self) -> list[str]:
        """Ask the servers for their tools now, not in the first rollout; blocks, and disconnects at the end.

        Returns:
            The names of all tools, as the policy sees them.

        Raises:
            ConfigError: a command that does not exist, or a selected tool that the server lacks.
            InfraError: a server that cannot be reached.
        """
        run_blocking(self._ask_for_tools)
        return list(self.tool_map)

    async def setup_state(self, state: State, **kwargs: Any) -> State:
        """Connect to the servers, and in the first rollout learn their tools."""
        if self.scope == "rollout":
            connections = state["mcp_connections"] = self._new_connections()
            await gather_owned([connection.ready() for connection in connections.values()])
        else:
            found = await gather_owned([self._shared_connection(config) for config in self.mcp_servers])
            connections = {connection.config.name: connection for connection in found}
        if not self._known:
            await self._learn_tools(connections)
        if not (state.get("info") or {}).get("oai_tools"):
            # the state was made before the tools were known
            state["oai_tools"] = self.oai_tools
        return state

    async def env_response(self, messages: Messages, state: State, **kwargs: Any) -> Any:
        """Answer each tool call of the newest message with one tool message."""
        token = _of_this_rollout.set(state.get("mcp_connections"))
        try:
            return await super().env_response(messages, state, **kwargs)
        finally:
            _of_this_rollout.reset(token)

    @cleanup
    async def close_rollout_servers(self, state: State) -> None:
        """End the rollout's own servers, also after a failure."""
        await _close_all(state.pop("mcp_connections", {}))

    @teardown
    async def close_servers(self) -> None:
        """End the shared servers; the next rollout starts them again."""
        with self._lock:
            every = [connection for shared in self._shared.values() for connection in shared.values()]
        await gather_owned([connection.close() for connection in every])

    async def _ask_for_tools(self) -> None:
        connections = self._new_connections()
        try:
            await gather_owned([connection.ready() for connection in connections.values()])
            await self._learn_tools(connections)
        finally:
            await _close_all(connections)

    def _new_connections(self) -> dict[str, MCPConnection]:
        return {config.name: MCPConnection(config, self.connect_timeout_s) for config in self.mcp_servers}

    async def _shared_connection(
        self, config: MCPServerConfig, instead_of: MCPConnection | None = None
    ) -> MCPConnection:
        """Return the running loop's connection to a server; a new one where the last was lost."""
        with self._lock:
            shared = self._shared.setdefault(asyncio.get_running_loop(), {})
            connection = shared.get(config.name)
            if connection is None or connection is instead_of or connection.owner.done():
                connection = shared[config.name] = MCPConnection(config, self.connect_timeout_s)
        await connection.ready()
        return connection

    async def _learn_tools(self, connections: _Connections) -> None:
        lists = await gather_owned([connections[config.name].list_tools() for config in self.mcp_servers])
        offered = {
            (config.name, tool.name): tool
            for config, tools in zip(self.mcp_servers, lists, strict=True)
            for tool in _offered(config, tools)
        }
        # several first rollouts may have asked
        with self._lock:
            if self._known:
                return
            names = chat_names(list(offered), self.tool_map)
            for (server, own_name), tool in offered.items():
                name = names[server, own_name]
                schema = tool_definition(name, tool.description or "", parameters_of(tool.input_schema))
                self._add(Tool(name, schema, self._caller(server, own_name)))
            self._known = True

    def _caller(self, server: str, tool: str) -> Callable[..., Any]:
        async def call(**arguments: Any) -> str:
            return await self._call(server, tool, arguments)

        return call

    async def _call(self, server: str, tool: str, arguments: Mapping[str, Any]) -> str:
        (config,) = (config for config in self.mcp_servers if config.name == server)
        if self.scope == "process":
            connection = await self._shared_connection(config)
        elif (own := _of_this_rollout.get()) is not None:
            connection = own[server]
        else:
            raise ConfigError("scope is 'rollout', so the tools can be called in a rollout only.")
        result = await connection.call(tool, arguments)
        if result is None and self.scope == "process":
            connection = await self._shared_connection(config, instead_of=connection)
            result = await connection.call(tool, arguments)
        if result is None:
            await connection.close()  # then its end has a reason
            raise connection.failure()
        text = result_text(result, self.max_result_chars)
        if result.is_error:
            raise ToolCallError(text or f"The tool {tool!r} failed.")
        return text


async def _close_all(connections: _Connections) -> None:
    await gather_owned([connection.close() for connection in connections.values()])


# -- names and results -----------------------------------------------------------------------------------------


def chat_names(tools: Sequence[tuple[str, str]], taken: Collection[str] = ()) -> dict[tuple[str, str], str]:
    """Return names for the policy, by (server, tool): the tool's own, or `server__tool` where that is not unique.

    Args:
        tools: (server, tool) pairs.
        taken: names of other tools.
    """
    own = {pair: _allowed(pair[1]) for pair in tools}
    names = [*own.values(), *taken]
    return {pair: name if names.count(name) == 1 else _allowed(f"{pair[0]}__{pair[1]}") for pair, name in own.items()}


def _allowed(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]", "_", name)[:_LONGEST_NAME]


def parameters_of(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool's input schema as an OpenAI definition's parameters."""
    lean = {key: value for key, value in schema.items() if key not in ("$schema", "title")}
    return {**lean, "type": "object", "properties": schema.get("properties") or {}}


def result_text(result: mcp_types.CallToolResult, max_chars: int) -> str:
    """Return a result as text: text parts, a line for each other part, or else the structured content as JSON."""
    parts = [_part_text(part) for part in result.content]
    if not parts and result.structured_content is not None:
        parts = [json.dumps(result.structured_content, ensure_ascii=False)]
    text = "\n".join(parts)
    left_out = len(text) - max_chars
    return text if left_out <= 0 else f"{text[:max_chars]}\n[{left_out} characters left out]"


def _part_text(part: Any) -> str:
    if part.type == "text":
        return str(part.text)
    if part.type == "resource":
        text = getattr(part.resource, "text", None)
        return str(text) if text is not None else f"[resource {part.resource.uri}, not text]"
    if part.type == "resource_link":
        return f"[resource {part.uri}: {part.description or part.name}]"
    return f"[{part.type} of type {getattr(part, 'mime_type', 'unknown')}, not shown]"


def _offered(config: MCPServerConfig, tools: Sequence[mcp_types.Tool]) -> list[mcp_types.Tool]:
    """Return the tools that the configuration selects.

    Raises:
        ConfigError: the configuration names a tool that the server lacks.
    """
    names = [tool.name for tool in tools]
    for name in (*(config.tools or ()), *config.exclude_tools):
        if name not in names:
            near = difflib.get_close_matches(name, names)
            raise ConfigError(
                f"The MCP server {config.name!r} has no tool {name!r}; "
                f"{'did you mean' if near else 'it has'} {', '.join(near or names) or 'none'}?"
            )
    wanted = names if config.tools is None else config.tools
    return [tool for tool in tools if tool.name in wanted and tool.name not in config.exclude_tools]
