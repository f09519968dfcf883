"""MCPEnv: the tools of MCP servers as a tool environment."""

from __future__ import annotations

import difflib
import importlib.util
import threading
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Literal

from verifiers.concurrency import gather_owned
from verifiers.envs.adapters.mcp_results import chat_names, parameters_of, result_text
from verifiers.envs.adapters.mcp_servers import MCPConnection, MCPServerConfig, MCPServers
from verifiers.envs.decorators import cleanup, teardown
from verifiers.envs.generation import run_to_completion
from verifiers.envs.tool_env import ToolEnv
from verifiers.envs.tools import Tool, tool_definition
from verifiers.errors import ConfigError, InfraError, ToolCallError
from verifiers.types import Messages, State

if TYPE_CHECKING:
    from mcp import types as mcp_types

__all__ = ["MCPEnv", "MCPServerConfig"]

if importlib.util.find_spec("mcp") is None:
    raise ImportError("MCPEnv needs mcp; install it by `pip install 'verifiers[mcp]'`.", name="mcp")

_Connections = Mapping[str, MCPConnection]

# which rollout's own servers a tool call goes to; tasks inherit it
_of_this_rollout: ContextVar[_Connections | None] = ContextVar("_of_this_rollout", default=None)


def _text_of(error: Exception) -> str:
    return f"{error}"


class MCPEnv(ToolEnv):
    """A ToolEnv whose tools are those of MCP servers, over stdio or streamable HTTP.

    Servers are started, or connected to, by the first rollout, in the event loop that runs it. Tools of one name
    from several servers become `server__tool`. What a tool answers, also that it failed, is the tool message. A
    server that cannot be reached is an `InfraError`, so the rollout ends as `environment_error`.

    Args:
        mcp_servers: the servers, as `MCPServerConfig`s or dicts of its fields.
        max_turns: answers of the policy in one rollout; -1 for no bound.
        error_formatter: the text of the tool message for an exception.
        scope: "process": all rollouts of an event loop share the servers; one that ends is started again, and the
            calls that it left unanswered are made once more. "rollout": each rollout starts servers of its own, for
            servers that keep state; they end with it.
        connect_timeout_s: for a server to start.
        max_result_chars: longer results are cut.
        **kwargs: of `ToolEnv`; `tools` are Python functions offered besides.

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
        self._shared = MCPServers(self.mcp_servers, connect_timeout_s)
        self._known = False
        self._learning = threading.Lock()

    def connect(self) -> list[str]:
        """Ask the servers for their tools now instead of in the first rollout; blocks, and disconnects again.

        Returns:
            The names of all tools, as the policy sees them.

        Raises:
            ConfigError: a command that does not exist, or a tool asked for that the server has not.
            InfraError: a server that cannot be reached.
        """
        run_to_completion(self._ask_for_tools)
        return list(self.tool_map)

    async def setup_state(self, state: State, **kwargs: Any) -> State:
        """Connect to the servers, and in the first rollout learn their tools."""
        if self.scope == "rollout":
            connections: dict[str, MCPConnection] = {}
            state["mcp_connections"] = connections
            self._start_all(connections)
            await gather_owned([connection.ready() for connection in connections.values()])
        else:
            found = await gather_owned([self._shared.connection(config.name) for config in self.mcp_servers])
            connections = {connection.config.name: connection for connection in found}
        if not self._known:
            await self._learn_tools(connections)
        if not (state.get("info") or {}).get("oai_tools"):
            # the state was made before the tools were known
            state["oai_tools"] = self.oai_tools
        return state

    async def env_response(self, messages: Messages, state: State, **kwargs: Any) -> Any:
        """One tool message for each tool call of the newest message."""
        token = _of_this_rollout.set(state.get("mcp_connections"))
        try:
            return await super().env_response(messages, state, **kwargs)
        finally:
            _of_this_rollout.reset(token)

    @cleanup
    async def close_rollout_servers(self, state: State) -> None:
        """End the rollout's own servers, however it ended."""
        await _close_all(state.pop("mcp_connections", {}))

    @teardown
    async def close_servers(self) -> None:
        """End the shared servers; they start again when they are next needed."""
        await self._shared.close()

    async def _ask_for_tools(self) -> None:
        connections: dict[str, MCPConnection] = {}
        try:
            self._start_all(connections)
            await gather_owned([connection.ready() for connection in connections.values()])
            await self._learn_tools(connections)
        finally:
            await _close_all(connections)

    def _start_all(self, connections: dict[str, MCPConnection]) -> None:
        for config in self.mcp_servers:
            connections[config.name] = MCPConnection(config, self.connect_timeout_s)

    async def _learn_tools(self, connections: _Connections) -> None:
        lists = await gather_owned([connections[config.name].list_tools() for config in self.mcp_servers])
        offered = {
            (config.name, tool.name): tool
            for config, tools in zip(self.mcp_servers, lists, strict=True)
            for tool in _offered(config, tools)
        }
        # several first rollouts, of several threads' loops, may have asked
        with self._learning:
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
        connection = await self._connection(server)
        result = await connection.call(tool, arguments)
        if result is None and self.scope == "process":
            connection = await self._shared.connection(server, instead_of=connection)
            result = await connection.call(tool, arguments)
        if result is None:
            await connection.close()  # then it is known how it ended
            raise InfraError(connection.why())
        text = result_text(result, self.max_result_chars)
        if result.is_error:
            raise ToolCallError(text or f"The tool {tool!r} failed.")
        return text

    async def _connection(self, server: str) -> MCPConnection:
        if self.scope == "process":
            return await self._shared.connection(server)
        own = _of_this_rollout.get()
        if own is None:
            raise ConfigError("scope is 'rollout', so the tools can be called in a rollout only.")
        return own[server]


def _offered(config: MCPServerConfig, tools: Sequence[mcp_types.Tool]) -> list[mcp_types.Tool]:
    """The tools that the configuration lets through.

    Raises:
        ConfigError: it names one that the server has not.
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


async def _close_all(connections: _Connections) -> None:
    await gather_owned([connection.close() for connection in connections.values()])
