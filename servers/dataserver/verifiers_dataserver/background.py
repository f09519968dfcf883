"""A dataserver beside other work in one process: for scripts, notebooks and tests."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from verifiers.server_process import bind
from verifiers_dataserver.config import load_configuration
from verifiers_dataserver.serving import load, running

_START_S = 60.0


@contextmanager
def serve_in_background(config: str | Path, *, port: int = 0, token: str | None = None) -> Iterator[str]:
    """Serve a configuration file on a thread as long as the context lasts; gives the base URL.

    Args:
        config: the file; its host and port are not used.
        port: on 127.0.0.1; 0 takes a free one.
        token: what requests must bring; None asks for none.

    Raises:
        ConfigError: the file, a dataset or a grader cannot be used.
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
