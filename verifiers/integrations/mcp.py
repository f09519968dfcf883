"""MCPEnv: the tools of MCP servers as a tool environment."""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import functools
import importlib.util
import itertools
import json
import os
import re
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, TextIO

from verifiers.concurrency import gather_owned
from verifiers.envs.lifecycle import cleanup, teardown
from verifiers.envs.tool_env import ToolEnv, state_of_call
from verifiers.envs.tools import Tool, tool_definition
from verifiers.errors import ConfigError, InfraError, ToolCallError
from verifiers.inference.wire import whole_characters
from verifiers.installation import install_hint
from verifiers.loop_thread import run_blocking
from verifiers.notebook import shortened
from verifiers.types import State

if TYPE_CHECKING:
    from mcp import types as mcp_types

if importlib.util.find_spec("mcp") is None:
    raise ImportError(f"MCPEnv needs mcp; {install_hint('mcp')}.", name="mcp")

_CLOSE_TIMEOUT_S = 10.0
_STDERR_TAIL_BYTES = 4096


@dataclass(frozen=True, slots=True)
class MCPServerConfig:
    """One MCP server: a command that speaks over its stdin and stdout, or the URL of a streamable HTTP server.

    Attributes:
        name: distinguishes servers in messages, and tools of one name.
        command: program of a stdio server, looked up in PATH.
        env: its environment, besides HOME, LOGNAME, PATH, SHELL, TERM and USER. Nothing else of this process's own
            is passed on, so keys have to be given here.
        description: for readers; not sent.
        url: of an HTTP server, e.g. "http://127.0.0.1:8000/mcp".
        headers: sent to an HTTP server, e.g. {"Authorization": "Bearer ..."}.
        tools: names of the tools to offer; None for all.
        protocol: "auto", or "legacy" for the handshake that gives each connection a session of its own, which
            some HTTP servers keep state by.
    """

    name: str
    command: str | None = None
    args: Sequence[str] | None = None
    env: Mapping[str, str] | None = field(default=None, repr=False)
    description: str = ""
    url: str | None = None
    headers: Mapping[str, str] | None = field(default=None, repr=False)
    cwd: str | None = None
    tools: Sequence[str] | None = None
    exclude_tools: Sequence[str] = ()
    protocol: str = "auto"

    def __post_init__(self) -> None:
        if not self.name:
            raise ConfigError("An MCP server has no name; give it one, e.g. MCPServerConfig('files', 'my-server').")
        if (self.command is None) == (self.url is None):
            raise ConfigError(f"The MCP server {self.name!r} needs either a command or a url, and not both.")
        if isinstance(self.args, str):
            raise ConfigError(f"args of the MCP server {self.name!r} is the string {self.args!r}; give a list.")
        given: dict[str, Mapping[str, Any]] = {"env": self.env or {}, "headers": self.headers or {}}
        for what, values in given.items():
            for name, value in values.items():
                if not isinstance(value, str):
                    # which may be a key
                    kind = type(value).__name__
                    raise ConfigError(
                        f"{what}[{name!r}] of the MCP server {self.name!r} is of type {kind}; give text."
                    )

    @classmethod
    def of(cls, value: MCPServerConfig | Mapping[str, Any]) -> MCPServerConfig:
        """Return the configuration in a dict of its fields. Raises ConfigError for unknown ones."""
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise ConfigError(f"An MCP server is {value!r:.100}; give an MCPServerConfig or a dict of its fields.")
        known = [item.name for item in fields(cls)]
        if unknown := sorted(set(value) - set(known)):
            raise ConfigError(f"An MCP server has no field {unknown[0]!r}; the fields are {', '.join(known)}.")
        return cls(**{"name": "", **value})


class MCPConnection:
    """One connection of the mcp package's client to one server, for the event loop that it is made in.

    The client must be entered and left in one task, so a task owns it, while any task of the loop calls it. The end
    of that task, by `close` or with the loop, ends a stdio server's process.
    """

    def __init__(self, config: MCPServerConfig, connect_timeout_s: float) -> None:
        self.config = config
        self._connect_timeout_s = connect_timeout_s
        self._end = ""
        self._stop = asyncio.Event()
        self._calls, self._lost = 0, False
        self._opened: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.owner = asyncio.create_task(self._own(), name=f"mcp-{config.name}")
        # `ready` raises the owner's error, if anything waits
        self.owner.add_done_callback(lambda owner: owner.cancelled() or owner.exception())

    @property
    def is_lost(self) -> bool:
        """Whether new calls need another connection."""
        return self._lost or self.owner.done()

    async def ready(self) -> None:
        """Wait until the server is connected; for any number of tasks.

        Raises:
            ConfigError: the command does not exist.
            InfraError: the server did not start, or ended.
        """
        if not self._opened.done():
            either = [self.owner, self._opened]
            await asyncio.wait(either, timeout=self._connect_timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if not self.owner.done() and not self._opened.done():
            self._end = self._end or f"it did not start within connect_timeout_s={self._connect_timeout_s:g}"
            self.owner.cancel()
            await asyncio.wait([self.owner])
        if self.owner.done():
            if not self.owner.cancelled() and (error := self.owner.exception()) is not None:
                raise error
            raise self.failure()

    def failure(self) -> InfraError:
        return InfraError(f"The MCP server {self.config.name!r} failed: {self._end or 'the connection was closed'}.")

    async def list_tools(self) -> list[mcp_types.Tool]:
        """Return the server's tools, of all pages. Raises InfraError where it does not list them."""
        from mcp import MCPError

        tools: list[mcp_types.Tool] = []
        cursor: str | None = None
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                while True:
                    page = await self._client().list_tools(cursor=cursor)
                    tools += page.tools
                    cursor = page.next_cursor
                    if cursor is None:
                        return tools
        except (MCPError, TimeoutError, ValueError) as error:
            raise InfraError(
                f"The MCP server {self.config.name!r} could not list its tools: {str(error) or 'no answer in time'}."
            ) from error

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> mcp_types.CallToolResult | None:
        """Call a tool; None where the connection is lost, and perhaps the call with it.

        Raises:
            ToolCallError: the server refused the call.
            InfraError: the server's answer is not a result.
        """
        from mcp import MCPError

        if self.owner.done():
            return None
        self._calls += 1
        try:
            # half of a surrogate pair would end the package's writer, and the server with it
            sent = json.loads(whole_characters(json.dumps(arguments, ensure_ascii=False)))
            return await self._client().call_tool(tool, sent)
        except MCPError as error:
            if not _is_lost(error, over_http=self.config.url is not None):
                raise ToolCallError(f"{error}") from error
            self._end = self._end or f"the connection was lost ({error})"
            self._lost = True
            return None
        except ValueError as error:  # pydantic's ValidationError is one
            raise InfraError(f"The MCP server {self.config.name!r} broke the protocol: {error!s:.300}") from error
        except RuntimeError as error:
            # the package checks results against the schema that the server gave for them
            raise ToolCallError(f"{error}") from error
        finally:
            self._calls -= 1
            if self._lost and not self._calls:
                # not before: over HTTP, other calls may still be answered
                self._stop.set()

    async def close(self) -> None:
        """Disconnect, from any loop; a stdio server's process has ended when this returns.

        A connection of a loop that stopped without being closed stays.
        """
        loop = self.owner.get_loop()
        if loop is not asyncio.get_running_loop():
            if loop.is_running():
                closing = asyncio.run_coroutine_threadsafe(self.close(), loop)
                await asyncio.wait([asyncio.wrap_future(closing)], timeout=_CLOSE_TIMEOUT_S)
            return
        self._stop.set()
        if not self._opened.done():
            self.owner.cancel()
        # the package closes the server's input, then sends two signals, each with a grace period; cutting that short
        # would leave the process behind
        ended, _ = await asyncio.wait([self.owner], timeout=_CLOSE_TIMEOUT_S)
        if not ended:
            self.owner.cancel()

    def _client(self) -> Any:
        if self.owner.done() or not self._opened.done():
            raise self.failure()
        return self._opened.result()

    async def _own(self) -> None:
        stderr = bytearray()
        try:
            async with contextlib.AsyncExitStack() as stack:
                stream = stack.enter_context(_kept_tail(stderr))
                client = await stack.enter_async_context(await self._new_client(stack, stream))
                # the pipe ends with the server when this process's end is closed
                stream.close()
                self._opened.set_result(client)
                await self._stop.wait()
        except FileNotFoundError as error:
            raise ConfigError(
                f"The command {self.config.command!r} of the MCP server {self.config.name!r} was not found "
                f"({error}); install it, or give its full path."
            ) from error
        except ImportError:
            raise
        except Exception as error:  # of the package, its HTTP client or the operating system
            # a call that found the connection lost has set a better reason
            self._end = self._end or _reason(error)
        finally:
            if self._end and (tail := stderr.decode(errors="replace").strip()[-500:]):
                self._end = f"{self._end}; its stderr: {tail}"

    async def _new_client(self, stack: contextlib.AsyncExitStack, stderr: TextIO) -> Any:
        config = self.config
        try:
            from mcp import Client, StdioServerParameters, stdio_client
            from mcp.client.streamable_http import streamable_http_client
        except ImportError as error:
            raise ConfigError(f"The installed mcp does not fit ({error}); {install_hint('mcp')}.") from error
        if config.url is not None:
            import httpx2

            # calls have their own deadline, and one that waits 30 s for one of 100 connections would end them all
            timeout = httpx2.Timeout(30.0, read=None)
            # uvicorn closes a connection that was idle for 5 s; a request that crosses that would be lost
            limits = httpx2.Limits(max_connections=None, max_keepalive_connections=20, keepalive_expiry=4.0)
            http = httpx2.AsyncClient(headers=dict(config.headers or {}), timeout=timeout, limits=limits)
            await stack.enter_async_context(http)
            # by default a result of 1 MiB breaks the stream
            transport = streamable_http_client(config.url, http_client=http, max_sse_event_size=None)
            return Client(transport, mode=config.protocol)
        parameters = StdioServerParameters(
            command=str(config.command),
            args=list(config.args or ()),
            env=dict(config.env or {}),
            cwd=config.cwd,
            # by default the first wrong byte ends the reading, and the connection stays
            encoding_error_handler="replace",
        )
        return Client(stdio_client(parameters, errlog=stderr), mode=config.protocol)


@contextlib.contextmanager
def _kept_tail(tail: bytearray) -> Iterator[TextIO]:
    """Yield a stream whose last bytes are kept in `tail`."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    loop = asyncio.get_running_loop()

    def read() -> None:
        with contextlib.suppress(BlockingIOError):
            tail.extend(data := os.read(reader, 1 << 16))
            del tail[:-_STDERR_TAIL_BYTES]
            if not data:
                loop.remove_reader(reader)

    loop.add_reader(reader, read)
    with os.fdopen(writer, "w") as stream:
        try:
            yield stream
        finally:
            loop.remove_reader(reader)
            read()
            os.close(reader)


# the package's texts for a session unknown to a restarted server, and for what is no answer of an MCP server
_NO_ANSWERS = (
    "Session not found", "Session terminated", "Server returned an error response",
    "Unexpected content type", "Failed to parse JSON response", "Failed to parse SSE message",
    "server answered a request with 202",
)  # fmt: skip


def _is_lost(error: Any, *, over_http: bool) -> bool:
    """Return whether the connection cannot answer any more; servers use the same codes for their own errors."""
    from mcp_types import CONNECTION_CLOSED

    text = str(error)
    if error.code == CONNECTION_CLOSED and (text == "Connection closed" or text.startswith("SSE stream")):
        return True
    # tools say of their own what they did "Not Found: ..."
    return over_http and (text == "Not Found" or text.startswith(_NO_ANSWERS))


def _reason(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error) or type(error).__name__


_LONGEST_NAME = 64  # of a function in OpenAI's API

_Connections = Mapping[str, MCPConnection]


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
        max_result_chars: of a result, shown to the policy; the middle is left out.
        **kwargs: of `ToolEnv`; `tools` are further tools, Python functions.
    """

    def __init__(
        self,
        mcp_servers: Sequence[MCPServerConfig | Mapping[str, Any]],
        max_turns: int = 10,
        error_formatter: Callable[[Exception], str] = str,
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
        """Ask the servers for their tools now, not in the first rollout; return all names as the policy sees them.

        It blocks, and disconnects at the end.

        Raises:
            ConfigError: a command that does not exist, or a selected tool that the server lacks.
            InfraError: a server that cannot be reached.
        """
        run_blocking(self._ask_for_tools)
        return list(self.tool_map)

    async def setup_state(self, state: State, **kwargs: Any) -> State:
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

    @cleanup
    async def close_rollout_servers(self, state: State) -> None:
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

    async def _shared_connection(self, config: MCPServerConfig) -> MCPConnection:
        """Return the running loop's connection to a server; a new one where the last was lost."""
        with self._lock:
            shared = self._shared.setdefault(asyncio.get_running_loop(), {})
            connection = shared.get(config.name)
            if connection is None or connection.is_lost:
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
                call = functools.partial(self._call, server, own_name)
                # the time in which a server starts again is not the tool's
                self._add(Tool(name, schema, call, has_own_deadline=True))
            self._known = True

    async def _call(self, server: str, tool: str, /, **arguments: Any) -> str:
        (config,) = (config for config in self.mcp_servers if config.name == server)
        if self.scope == "process":
            connection = await self._shared_connection(config)
        elif (own := (state_of_call.get() or State()).get("mcp_connections")) is not None:
            connection = own[server]
        else:
            raise ConfigError("scope is 'rollout', so the tools can be called in a rollout only.")
        result = await self._called(connection, tool, arguments)
        if result is None and self.scope == "process":
            connection = await self._shared_connection(config)
            result = await self._called(connection, tool, arguments)
        if result is None:
            if config.url is None:
                await connection.close()  # then its end has the server's stderr
            raise connection.failure()
        text = result_text(result, self.max_result_chars)
        if result.is_error:
            raise ToolCallError(text or f"The tool {tool!r} failed.")
        return text

    async def _called(self, connection: MCPConnection, tool: str, arguments: Mapping[str, Any]) -> Any:
        deadline = asyncio.timeout(self.tool_timeout_s)
        try:
            async with deadline:
                return await connection.call(tool, arguments)
        except TimeoutError:
            if not deadline.expired():
                raise
            text = f"The tool {tool!r} did not finish within {self.tool_timeout_s:g} s."
            raise ToolCallError(text) from None


async def _close_all(connections: _Connections) -> None:
    await gather_owned([connection.close() for connection in connections.values()])


# -- names and results -----------------------------------------------------------------------------------------


def chat_names(tools: Sequence[tuple[str, str]], taken: Collection[str] = ()) -> dict[tuple[str, str], str]:
    """Return names for the policy, by (server, tool): the tool's own, or `server__tool` where that is not unique.

    Those that are alike nevertheless, in what endpoints take of them, are numbered in alphabetical order.
    """
    own = [_allowed(tool) for _, tool in tools]
    names: dict[tuple[str, str], str] = {}
    for pair, name in sorted(zip(tools, own, strict=True)):
        full = name if [*own, *taken].count(name) == 1 else f"{pair[0]}__{pair[1]}"
        candidates = (_allowed(full, f"_{number}" if number > 1 else "") for number in itertools.count(1))
        names[pair] = next(one for one in candidates if one not in {*names.values(), *taken})
    return names


def _allowed(name: str, ending: str = "") -> str:
    return re.sub(r"[^A-Za-z0-9_-]", "_", name)[: _LONGEST_NAME - len(ending)] + ending


def parameters_of(schema: Mapping[str, Any]) -> dict[str, Any]:
    lean = {key: value for key, value in schema.items() if key not in ("$schema", "title")}
    return {**lean, "type": "object", "properties": schema.get("properties") or {}}


def result_text(result: mcp_types.CallToolResult, max_chars: int) -> str:
    """Return a result as text: text parts, a line for each other part, or else the structured content as JSON."""
    parts = [_part_text(part) for part in result.content]
    if not parts and result.structured_content is not None:
        parts = [json.dumps(result.structured_content, ensure_ascii=False)]
    return shortened("\n".join(parts), max_chars)


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
    """Return the tools that the configuration selects. Raises ConfigError for one that the server lacks."""
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
