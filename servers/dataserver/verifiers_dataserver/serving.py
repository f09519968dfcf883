"""From a configuration to a listening server, and back to nothing."""

from __future__ import annotations

import asyncio
import socket
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web

from verifiers.errors import ConfigError
from verifiers.http_requests import app_runner, is_loopback_host
from verifiers.server_process import bind, end_by_signals, is_loopback_address, url_of, write_port_file
from verifiers_dataserver.app import Routes
from verifiers_dataserver.config import Configuration, load_configuration
from verifiers_dataserver.datasets import TaskRows, load_datasets
from verifiers_dataserver.grading.rewards import Rewards

_BACKLOG = 2048
_FINISH_S = 3.0
_START_S = 60.0


@dataclass(frozen=True, slots=True)
class Loaded:
    """A configuration with all that it names."""

    configuration: Configuration
    datasets: dict[str, TaskRows]
    rewards: Rewards


def load(configuration: Configuration) -> Loaded:
    """Load the datasets and make the graders. Raises ConfigError."""
    datasets = load_datasets(configuration)
    try:
        configuration.curriculum.check(
            {name: len(rows) for name, rows in datasets.items()}, configuration.total_steps
        )
        rewards = Rewards.build(configuration, datasets)
    except ConfigError as error:
        raise ConfigError(f"{configuration.path}: {error}") from None
    return Loaded(configuration, datasets, rewards)


@asynccontextmanager
async def running(loaded: Loaded, listener: socket.socket, token: str | None = None) -> AsyncIterator[str]:
    """Serve on this event loop as long as the context lasts; gives the base URL.

    At its end no new request is taken, those under way get a few seconds, and all processes end.
    """
    routes = Routes(loaded.configuration, loaded.datasets, loaded.rewards, token)
    is_open = token is None and is_loopback_address(listener.getsockname()[0])
    names = is_loopback_host if is_open else None
    runner = app_runner(routes.app(), names, handler_cancellation=True, shutdown_timeout=2 * _FINISH_S)
    await runner.setup()
    try:
        await web.SockSite(runner, listener, backlog=_BACKLOG).start()
        yield url_of(listener)
    finally:
        routes.begin_end()
        async with asyncio.TaskGroup() as tasks:
            # it waits for requests under way, which without graders are answered that they be sent again
            cleaning = tasks.create_task(runner.cleanup())
            await asyncio.wait([cleaning], timeout=_FINISH_S)
            await loaded.rewards.close()


async def serve(loaded: Loaded, listener: socket.socket, token: str | None, port_file: Path | None) -> int:
    """Serve until a signal comes; returns the exit code: 0 after SIGTERM, 130 after Ctrl-C."""
    ended = end_by_signals()
    async with running(loaded, listener, token) as url:
        _announce(loaded, listener, url, token)
        if port_file is not None:
            write_port_file(port_file, listener)
        return await ended


def _announce(loaded: Loaded, listener: socket.socket, url: str, token: str | None) -> None:
    """Print the one line that a parent process reads, and a warning where it is due."""
    if token is None and not is_loopback_address(listener.getsockname()[0]):
        print(
            f"vf-dataserver: {url} is not only for this machine, so anyone who reaches it gets prompts and "
            "grades; set server.token_var, or take --host 127.0.0.1 unless the network is trusted.",
            file=sys.stderr,
            flush=True,
        )
    rows = sum(map(len, loaded.datasets.values()))
    stages = len(loaded.configuration.curriculum.stages)
    print(
        f"vf-dataserver: {len(loaded.datasets)} datasets with {rows:,} rows, {stages} stages; listening on {url}",
        flush=True,
    )


@contextmanager
def serve_in_background(config: str | Path, *, port: int = 0, token: str | None = None) -> Iterator[str]:
    """Serve a configuration file on a thread as long as the context lasts; gives the base URL on 127.0.0.1.

    For scripts, notebooks and tests; the file's host and port are not used. Raises ConfigError where the file, a
    dataset or a grader cannot be used.
    """
    listener = bind("127.0.0.1", port)
    try:
        loaded = load(load_configuration(config))
    except BaseException:
        listener.close()
        raise
    ready = threading.Event()
    state: list[tuple[str, asyncio.AbstractEventLoop, asyncio.Event]] = []

    async def serve() -> None:
        stop = asyncio.Event()
        async with running(loaded, listener, token) as url:
            state.append((url, asyncio.get_running_loop(), stop))
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), name="vf-dataserver", daemon=True)
    thread.start()
    try:
        if not ready.wait(_START_S):
            raise RuntimeError("the dataserver did not start")
        yield state[0][0]
    finally:
        if state:
            _, loop, stop = state[0]
            loop.call_soon_threadsafe(stop.set)
        thread.join(_START_S)
        listener.close()
