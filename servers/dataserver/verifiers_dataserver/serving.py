"""From a configuration to a listening server, and back to nothing."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web
from verifiers.errors import ConfigError

from verifiers_dataserver.app import Routes
from verifiers_dataserver.config import Configuration
from verifiers_dataserver.datasets import TaskRows, load_datasets
from verifiers_dataserver.rewards import Rewards

__all__ = ["Loaded", "bind", "load", "running", "serve"]

_BACKLOG = 2048
_FINISH_S = 3.0
_SHUTDOWN_S = 1.0


@dataclass(frozen=True, slots=True)
class Loaded:
    """A configuration with all that it names."""

    configuration: Configuration
    datasets: dict[str, TaskRows]
    rewards: Rewards


def load(configuration: Configuration) -> Loaded:
    """Load the datasets and make the graders.

    Raises:
        ConfigError: one of them cannot be.
    """
    datasets = load_datasets(configuration)
    try:
        configuration.curriculum.check(
            {name: len(rows) for name, rows in datasets.items()}, configuration.total_steps
        )
        rewards = Rewards.build(configuration, datasets)
    except ConfigError as error:
        raise ConfigError(f"{configuration.path}: {error}") from None
    return Loaded(configuration, datasets, rewards)


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet.

    Raises:
        ConfigError: the address is not one of this machine, or the port is in use or not allowed.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"host {host!r} is no address of this machine ({error}); try 127.0.0.1.") from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {port} on {host} is in use; end what listens there, or take --port 0 for a free one."
            ) from error
        raise ConfigError(
            f"cannot listen on {host} port {port}: {error.strerror or error}; take another."
        ) from error
    return listener


@asynccontextmanager
async def running(loaded: Loaded, listener: socket.socket, token: str | None = None) -> AsyncIterator[str]:
    """Serve on this event loop as long as the context lasts; gives the base URL.

    At its end no new request is taken, those under way get a few seconds, and all processes end.
    """
    routes = Routes(loaded.configuration, loaded.datasets, loaded.rewards, token)
    runner = web.AppRunner(
        routes.app(), handler_cancellation=True, access_log=None, shutdown_timeout=_SHUTDOWN_S
    )
    await runner.setup()
    site = web.SockSite(runner, listener, backlog=_BACKLOG)
    try:
        await site.start()
        address, port = listener.getsockname()[:2]
        shown = f"[{address}]" if ":" in address else address
        yield f"http://{shown}:{port}"
    finally:
        routes.begin_end()
        await site.stop()
        await routes.until_idle(_FINISH_S)
        # what is still being graded is to be asked for again
        await loaded.rewards.close()
        await routes.until_idle(_FINISH_S)
        await runner.cleanup()


def serve(loaded: Loaded, listener: socket.socket, token: str | None, port_file: Path | None) -> int:
    """Serve until a signal comes; returns the exit code: 0 after SIGTERM, 130 after Ctrl-C."""
    return asyncio.run(_serve(loaded, listener, token, port_file))


async def _serve(loaded: Loaded, listener: socket.socket, token: str | None, port_file: Path | None) -> int:
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[int] = loop.create_future()

    def end(code: int) -> None:
        if not ended.done():
            ended.set_result(code)

    loop.add_signal_handler(signal.SIGTERM, end, 0)
    loop.add_signal_handler(signal.SIGINT, end, 130)
    async with running(loaded, listener, token) as url:
        _announce(loaded, listener, url, token)
        if port_file is not None:
            write_atomically(port_file, f"{listener.getsockname()[1]}\n")
        return await ended


def _announce(loaded: Loaded, listener: socket.socket, url: str, token: str | None) -> None:
    """Print the one line that a parent process reads, and a warning where it is due."""
    if token is None and not _is_loopback(listener.getsockname()[0]):
        print(
            f"vf-dataserver: {url} is not only for this machine, so whoever reaches it gets prompts and "
            "grades; set server.token_var, or take --host 127.0.0.1 unless the network is trusted.",
            file=sys.stderr,
            flush=True,
        )
    rows = sum(map(len, loaded.datasets.values()))
    stages = len(loaded.configuration.curriculum.stages)
    print(
        f"vf-dataserver: {len(loaded.datasets)} datasets with {rows:,} rows, {stages} stages; "
        f"listening on {url}",
        flush=True,
    )


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def write_atomically(path: Path, content: str) -> None:
    """Write a file so that a reader sees the whole content or no file.

    Raises:
        ConfigError: the path cannot be written.
    """
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(content)
        partial.replace(path)
    except OSError as error:
        raise ConfigError(
            f"--port-file {str(path)!r} cannot be written ({error}); give another path."
        ) from error
