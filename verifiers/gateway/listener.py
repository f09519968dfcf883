"""The sockets of the gateway: limits of headers and bodies, and a bound on open connections."""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
import tempfile
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from verifiers.errors import ConfigError
from verifiers.http_requests import app_runner
from verifiers.server_process import url_of

if TYPE_CHECKING:
    from aiohttp import web

    from verifiers.http_requests import Handler

MAX_BODY = 64 * 2**20
MAX_HEADER = 2**16
"""Bytes of one line of headers, of which aiohttp takes 128."""

FEWEST_CONNECTIONS = 32
LONGEST_BACKLOG = 4096


def past_proxies(environ: Mapping[str, str]) -> dict[str, str]:
    """Return NO_PROXY, in both spellings, with this machine in it: an agent's client asks a gateway here directly."""
    given = environ.get("no_proxy") or environ.get("NO_PROXY") or ""
    hosts = ",".join(dict.fromkeys([*filter(None, given.split(",")), "127.0.0.1", "localhost", "::1"]))
    return {"no_proxy": hosts, "NO_PROXY": hosts}


class Listener:
    """The listening sockets of an aiohttp application.

    Every connection takes a file descriptor, and so do the calls to the rollout server. At the bound a new connection
    replaces the oldest one that is not being answered; where all are being answered, the new one is closed.

    Args:
        max_connections: open at once; None for half of the file descriptors that this process may open.
    """

    def __init__(self, max_connections: int | None = None) -> None:
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if descriptors == resource.RLIM_INFINITY:
            descriptors = 2**20
        self._most = max_connections or max(descriptors // 2, FEWEST_CONNECTIONS)
        # asyncio takes as many off the queue at once, each with its descriptor, before the bound is looked at
        self._backlog = max(min(self._most // 4, LONGEST_BACKLOG), 4)
        self._answered: set[Any] = set()
        self._closed: set[Any] = set()
        self._accepted = 0
        self._runner: web.AppRunner | None = None
        self._servers: list[asyncio.Server] = []
        self._unix_socket: asyncio.Task[str] | None = None
        self._socket_directory: str | None = None

    async def start(self, app: web.Application, host: str, port: int) -> str:
        """Listen on the running event loop.

        Args:
            port: 0 for a free one.

        Raises:
            ConfigError: the address cannot be had.
        """
        from aiohttp import web

        @web.middleware
        async def note(request: web.Request, handler: Handler) -> web.StreamResponse:
            self._answered.add(request.protocol)
            try:
                return await handler(request)
            finally:
                self._answered.discard(request.protocol)

        app.middlewares.append(note)
        lines: dict[str, Any] = {"max_line_size": MAX_HEADER, "max_field_size": MAX_HEADER}
        options: dict[str, Any] = {"shutdown_timeout": 2.0, "keepalive_timeout": 75.0, **lines}
        # a handler whose connection is gone is cancelled, so that a repeated call finds its answer unread
        self._runner = app_runner(app, None, handler_cancellation=True, **options)
        await self._runner.setup()
        loop = asyncio.get_running_loop()
        try:
            server = await loop.create_server(self._accept, host, port, backlog=self._backlog)
        except OSError as error:
            await self._runner.cleanup()
            text = f"the gateway cannot listen on {host}:{port}: {error}; give another host or port."
            raise ConfigError(text) from error
        self._servers.append(server)
        return url_of(server.sockets[0])

    async def unix_socket(self) -> str:
        """Return the path of a Unix socket of the same application, made at the first call.

        Raises:
            ConfigError: there is no place for it.
        """
        if self._unix_socket is None:
            self._unix_socket = asyncio.create_task(self._listen_on_unix_socket())
        return await asyncio.shield(self._unix_socket)

    async def _listen_on_unix_socket(self) -> str:
        # the directory keeps other users out; inside a sandbox any user may connect
        self._socket_directory = tempfile.mkdtemp(prefix="vf-gateway-")
        path = os.path.join(self._socket_directory, "socket")
        loop = asyncio.get_running_loop()
        try:
            self._servers.append(await loop.create_unix_server(self._accept, path, backlog=self._backlog))
        except OSError as error:
            raise ConfigError(f"the gateway cannot listen on {path}: {error}; give another TMPDIR.") from error
        os.chmod(path, 0o666)
        return path

    async def close(self) -> None:
        for server in self._servers:
            server.close()
        if self._runner is not None:
            await self._runner.cleanup()
        if self._socket_directory is not None:
            shutil.rmtree(self._socket_directory, ignore_errors=True)

    def _accept(self) -> asyncio.Protocol:
        server = self._runner.server if self._runner is not None else None
        if server is None:
            return _Refusal()
        # closed ones are among the connections until the loop's next turn, and those that it accepted with this one
        # are not yet
        connections = server.connections
        self._closed.intersection_update(connections)
        if len(connections) - len(self._closed) + self._accepted >= self._most:
            idle = (each for each in connections if each not in self._answered and each not in self._closed)
            given_up = next(idle, None)
            if given_up is None:
                return _Refusal()
            given_up.force_close()
            self._closed.add(given_up)
        self._accepted += 1
        asyncio.get_running_loop().call_soon(self._count_connected)
        return server()

    def _count_connected(self) -> None:
        # asyncio calls connection_made right after
        self._accepted -= 1


class _Refusal(asyncio.Protocol):
    """A connection that is closed at once; SDKs try again."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        transport.abort()
