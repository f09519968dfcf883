"""Connections to MCP servers, by the client of the `mcp` package."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, TextIO

from verifiers.errors import ConfigError, InfraError, ToolCallError
from verifiers.installation import install_hint

if TYPE_CHECKING:
    from mcp import types as mcp_types

_CLOSE_TIMEOUT_S = 10.0
_STDERR_TAIL_BYTES = 4096


@dataclass(frozen=True, slots=True)
class MCPServerConfig:
    """One MCP server: a command that speaks over its stdin and stdout, or the URL of a streamable HTTP server.

    Attributes:
        name: distinguishes servers in messages, and tools of one name.
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
        """Return the configuration in a dict of its fields.

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
    """One connection of the mcp package's client to one server, for the event loop that it is made in.

    The client must be entered and left in one task, so a task owns it, while any task of the loop calls it. The end
    of that task, by `close` or with the loop, ends a stdio server's process.

    Args:
        connect_timeout_s: for the process to start and the handshake to end.
    """

    def __init__(self, config: MCPServerConfig, connect_timeout_s: float) -> None:
        self.config = config
        self._connect_timeout_s = connect_timeout_s
        self._end = ""
        self._stop = asyncio.Event()
        self._opened: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.owner = asyncio.create_task(self._own(), name=f"mcp-{config.name}")
        # `ready` raises the owner's error, if anything waits
        self.owner.add_done_callback(lambda owner: owner.cancelled() or owner.exception())

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
        """Return the error that names the connection's end."""
        return InfraError(f"The MCP server {self.config.name!r} failed: {self._end or 'the connection was closed'}.")

    async def list_tools(self) -> list[mcp_types.Tool]:
        """Return the server's tools, of all pages.

        Raises:
            InfraError: the server did not list them.
        """
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
        try:
            return await self._client().call_tool(tool, dict(arguments))
        except MCPError as error:
            if not _is_lost(error, over_http=self.config.url is not None):
                raise ToolCallError(f"{error}") from error
            self._end = self._end or "the connection was lost"
            self._stop.set()
            return None
        except ValueError as error:  # pydantic's ValidationError is one
            raise InfraError(f"The MCP server {self.config.name!r} broke the protocol: {error!s:.300}") from error
        except RuntimeError as error:
            # the package checks results against the schema that the server gave for them
            raise ToolCallError(f"{error}") from error

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

            timeout = httpx2.Timeout(30.0, read=None)  # calls have a deadline of their own
            http = httpx2.AsyncClient(headers=dict(config.headers or {}), timeout=timeout)
            await stack.enter_async_context(http)
            return Client(streamable_http_client(config.url, http_client=http), mode=config.protocol)
        parameters = StdioServerParameters(
            command=str(config.command), args=list(config.args or ()), env=dict(config.env or {}), cwd=config.cwd
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


def _is_lost(error: Any, *, over_http: bool) -> bool:
    """Return whether the connection cannot answer any more; servers use the same codes for their own errors."""
    from mcp_types import CONNECTION_CLOSED

    text = str(error)
    if error.code == CONNECTION_CLOSED and (text == "Connection closed" or text.startswith("SSE stream")):
        return True
    # a session unknown to a restarted server, and the package's text for a bare HTTP error
    return over_http and text in ("Session not found", "Session terminated", "Server returned an error response")


def _reason(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error) or type(error).__name__
