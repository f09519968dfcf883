"""Connections to MCP servers, through the `mcp` package: each owned by one task, in the event loop that uses it.

The package's cancel scopes must be entered and left in the same task, hence the owner: it connects, waits, and
disconnects, while calls are made from any task of its loop. Ending the owner, by `close` or by the end of the loop,
ends a stdio server's process.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

from verifiers.concurrency import gather_owned
from verifiers.errors import ConfigError, InfraError, ToolCallError

if TYPE_CHECKING:
    from mcp import types as mcp_types

__all__ = ["MCPConnection", "MCPServerConfig", "MCPServers"]

_CLOSE_TIMEOUT_S = 10.0
_STDERR_TAIL_BYTES = 4096
_MAX_PAGES = 100


@dataclass(frozen=True, slots=True)
class MCPServerConfig:
    """One MCP server: a command that speaks over its stdin and stdout, or the URL of a streamable HTTP server.

    Attributes:
        name: what messages, and tools of one name, tell it apart by.
        command: program of a stdio server, looked up in PATH.
        args: its arguments.
        env: its environment, besides HOME, LOGNAME, PATH, SHELL, TERM and USER. Nothing else of this process's own
            is passed on, so keys have to be given here.
        description: for readers; not sent.
        url: of an HTTP server, e.g. "http://127.0.0.1:8000/mcp".
        headers: sent to an HTTP server, e.g. {"Authorization": "Bearer ..."}.
        cwd: working directory of a stdio server.
        tools: names of the tools to offer; None for all.
        exclude_tools: names of tools not to offer.
        protocol: "auto", or "legacy" for the handshake that gives each connection a session of its own, which
            some HTTP servers keep state by.

    Raises:
        ConfigError: no name; neither a command nor a URL, or both.
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

    @classmethod
    def of(cls, value: MCPServerConfig | Mapping[str, Any]) -> MCPServerConfig:
        """The configuration in a dict of its fields.

        Raises:
            ConfigError: unknown fields.
        """
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise ConfigError(f"An MCP server is {value!r:.100}; give an MCPServerConfig or a dict of its fields.")
        known = [item.name for item in fields(cls)]
        if unknown := sorted(set(value) - set(known)):
            raise ConfigError(f"An MCP server has no field {unknown[0]!r}; the fields are {', '.join(known)}.")
        return cls(**{"name": "", **value})


class MCPConnection:
    """One connection to one server, for the event loop that it is made in.

    Args:
        config: of the server.
        connect_timeout_s: for the process to start and the handshake to end.
    """

    def __init__(self, config: MCPServerConfig, connect_timeout_s: float = 60.0) -> None:
        self.config = config
        self.end = ""
        self._connect_timeout_s = connect_timeout_s
        self._stop = asyncio.Event()
        self._opened: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.owner = asyncio.create_task(self._own(), name=f"mcp-{config.name}")
        # what it raises is told by `ready`, to whoever still waits
        self.owner.add_done_callback(lambda owner: owner.cancelled() or owner.exception())

    async def ready(self) -> None:
        """Wait until it is connected. Any number of tasks may wait.

        Raises:
            ConfigError: the command does not exist.
            InfraError: the server did not start, or ended.
        """
        if not self._opened.done():
            await asyncio.wait(
                [self.owner, self._opened],
                timeout=self._connect_timeout_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
        if not self.owner.done() and not self._opened.done():
            self.end = self.end or f"it did not start within connect_timeout_s={self._connect_timeout_s:g}"
            self.owner.cancel()
            await asyncio.wait([self.owner])
        if self.owner.done():
            if not self.owner.cancelled() and (error := self.owner.exception()) is not None:
                raise error
            raise InfraError(self.why())

    def why(self) -> str:
        """One sentence on how the connection ended."""
        return f"The MCP server {self.config.name!r} failed: {self.end or 'the connection was closed'}."

    async def list_tools(self) -> list[mcp_types.Tool]:
        """The server's tools, of all pages.

        Raises:
            InfraError: it could not tell.
        """
        from mcp import MCPError

        tools: list[mcp_types.Tool] = []
        cursor: str | None = None
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                for _ in range(_MAX_PAGES):
                    page = await self._client().list_tools(cursor=cursor)
                    tools += page.tools
                    cursor = page.next_cursor
                    if cursor is None:
                        return tools
        except (MCPError, TimeoutError, ValueError) as error:
            raise InfraError(
                f"The MCP server {self.config.name!r} could not list its tools: {str(error) or 'no answer in time'}."
            ) from error
        raise InfraError(f"The MCP server {self.config.name!r} lists its tools on more than {_MAX_PAGES} pages.")

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> mcp_types.CallToolResult | None:
        """Call a tool; None where the connection is gone, and perhaps the call with it.

        Raises:
            ToolCallError: the server refused the call.
            InfraError: it answered with what is no result.
        """
        from mcp import MCPError

        if self.owner.done():
            return None
        try:
            return await self._client().call_tool(tool, dict(arguments))
        except MCPError as error:
            if not _is_lost(error, over_http=self.config.url is not None):
                raise ToolCallError(f"{error}") from error
            self.end = self.end or "the connection was lost"
            self._stop.set()
            return None
        except ValueError as error:  # pydantic's ValidationError is one
            raise InfraError(f"The MCP server {self.config.name!r} broke the protocol: {error!s:.300}") from error
        except RuntimeError as error:
            # the package checks results against the schema that the server gave for them
            raise ToolCallError(f"{error}") from error

    async def close(self) -> None:
        """Disconnect; a stdio server's process has ended when this returns."""
        self._stop.set()
        if not self._opened.done():
            self.owner.cancel()
        # the package closes its input, then sends two signals, each with a grace period; cutting that short
        # would leave the process behind
        ended, _ = await asyncio.wait([self.owner], timeout=_CLOSE_TIMEOUT_S)
        if not ended:
            self.owner.cancel()

    def _client(self) -> Any:
        if self.owner.done() or not self._opened.done():
            raise InfraError(self.why())
        return self._opened.result()

    async def _own(self) -> None:
        stderr = _StderrTail()
        try:
            with stderr:
                async with contextlib.AsyncExitStack() as stack:
                    client = await stack.enter_async_context(await self._new_client(stack, stderr))
                    stderr.child_has_started()
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
            # a loss found by a call is known better there
            self.end = self.end or _reason(error)
        finally:
            if said := stderr.text():
                self.end = f"{self.end or 'the connection was closed'}; it wrote: {said}" if self.end else ""

    async def _new_client(self, stack: contextlib.AsyncExitStack, stderr: _StderrTail) -> Any:
        config = self.config
        try:
            from mcp import Client, StdioServerParameters, stdio_client
            from mcp.client.streamable_http import streamable_http_client
        except ImportError as error:
            raise ConfigError(
                f"The installed mcp does not fit ({error}); install it by `pip install 'mcp>=2,<3'`."
            ) from error
        if config.url is not None:
            import httpx2

            timeout = httpx2.Timeout(30.0, read=None)  # calls have a deadline of their own
            http = await stack.enter_async_context(
                httpx2.AsyncClient(headers=dict(config.headers or {}), timeout=timeout)
            )
            return Client(streamable_http_client(config.url, http_client=http), mode=config.protocol)
        parameters = StdioServerParameters(
            command=str(config.command), args=list(config.args or ()), env=dict(config.env or {}), cwd=config.cwd
        )
        return Client(stdio_client(parameters, errlog=stderr.stream), mode=config.protocol)


class MCPServers:
    """The connections that all rollouts share: one a server and event loop, made when first asked for.

    Args:
        configs: of the servers.
        connect_timeout_s: as `MCPConnection`.
    """

    def __init__(self, configs: Sequence[MCPServerConfig], connect_timeout_s: float = 60.0) -> None:
        self._configs = {config.name: config for config in configs}
        self._connect_timeout_s = connect_timeout_s
        self._lock = threading.Lock()
        self._loops: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, MCPConnection]] = (
            weakref.WeakKeyDictionary()
        )

    async def connection(self, name: str, instead_of: MCPConnection | None = None) -> MCPConnection:
        """The running loop's connection to a server.

        Args:
            name: of the server.
            instead_of: a connection that is gone; the first to say so makes a new one.

        Raises:
            ConfigError, InfraError: as `MCPConnection.ready`.
        """
        with self._lock:
            here = self._loops.setdefault(asyncio.get_running_loop(), {})
            connection = here.get(name)
            if connection is None or connection is instead_of or connection.owner.done():
                connection = here[name] = MCPConnection(self._configs[name], self._connect_timeout_s)
                connection.owner.add_done_callback(lambda _: self._forget(here, name))
        await connection.ready()
        return connection

    async def close(self) -> None:
        """Close the connections of all loops; those of a loop that has stopped without being closed stay."""
        with self._lock:
            every = [(loop, held) for loop, here in self._loops.items() for held in here.values()]
        await gather_owned([_close_in(loop, held) for loop, held in every if not loop.is_closed()])

    def _forget(self, here: dict[str, MCPConnection], name: str) -> None:
        with self._lock:
            # a new one may have taken its place
            if name in here and here[name].owner.done():
                del here[name]


async def _close_in(loop: asyncio.AbstractEventLoop, connection: MCPConnection) -> None:
    if loop is asyncio.get_running_loop():
        await connection.close()
    elif loop.is_running():
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(connection.close(), loop))


def _is_lost(error: Any, *, over_http: bool) -> bool:
    """True where the connection cannot answer any more; servers use the same codes for errors of their own."""
    from mcp_types import CONNECTION_CLOSED

    text = str(error)
    if error.code == CONNECTION_CLOSED and (text == "Connection closed" or text.startswith("SSE stream")):
        return True
    # a session that a restarted server does not know, and what the package makes of a bare HTTP error
    return over_http and text in ("Session not found", "Session terminated", "Server returned an error response")


def _reason(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error) or type(error).__name__


class _StderrTail:
    """A pipe for a server's stderr, of which the last lines are kept for error messages."""

    def __init__(self) -> None:
        self._tail = b""
        self._read_fd = -1
        self.stream: TextIO

    def __enter__(self) -> _StderrTail:
        self._read_fd, write_fd = os.pipe()
        os.set_blocking(self._read_fd, False)
        self.stream = os.fdopen(write_fd, "w")
        asyncio.get_running_loop().add_reader(self._read_fd, self._read)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        asyncio.get_running_loop().remove_reader(self._read_fd)
        self._read()
        self.stream.close()
        os.close(self._read_fd)

    def child_has_started(self) -> None:
        """Drop this process's end, so that the pipe ends with the server."""
        self.stream.close()

    def text(self) -> str:
        """The last lines."""
        return self._tail.decode(errors="replace").strip()[-500:]

    def _read(self) -> None:
        try:
            data = os.read(self._read_fd, 1 << 16)
        except BlockingIOError:
            return
        if not data:
            asyncio.get_running_loop().remove_reader(self._read_fd)
        self._tail = (self._tail + data)[-_STDERR_TAIL_BYTES:]
