"""What every kind of sandbox does alike: end once, and speak to a process over its pipes."""

from __future__ import annotations

import abc
import asyncio
import subprocess
from types import TracebackType
from typing import Self

from verifiers.errors import SandboxError
from verifiers.sandbox.pipes import Drain, Feed, LineReader

__all__ = ["ClosesOnce", "PipedProcess", "ended"]


class ClosesOnce(abc.ABC):
    """Something whose end runs once, to its end, however many ask for it and whoever of them is cancelled."""

    _closing: asyncio.Task[None] | None = None

    @abc.abstractmethod
    async def _close(self) -> None: ...

    async def close(self) -> None:
        """As in `Sandbox`. Cancelling it does not keep it from finishing."""
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._close())
        cancelled = False
        while not self._closing.done():
            try:
                await asyncio.shield(self._closing)
            except asyncio.CancelledError:
                cancelled = True
        if cancelled:
            raise asyncio.CancelledError
        self._closing.result()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()


class PipedProcess(abc.ABC):
    """The pipes of a long-lived process in a sandbox; as in `SandboxProcess`."""

    _feed: Feed
    _out: LineReader
    _err: Drain

    @abc.abstractmethod
    async def kill(self) -> None: ...

    async def write(self, data: bytes | str) -> None:
        await self._feed.send(data.encode() if isinstance(data, str) else data)

    async def read_line(self, *, timeout_s: float | None = None) -> bytes:
        try:
            async with asyncio.timeout(timeout_s):
                return await self._out.read_line()
        except SandboxError:
            await self.kill()
            raise

    def stderr(self) -> str:
        return self._err.kept.decode(errors="replace")

    def _release_pipes(self) -> None:
        """Close the pipes, after taking what is still in them."""
        self._feed.close()
        self._out.finish()
        self._err.finish()


async def ended(process: subprocess.Popen[bytes], limit_s: float | None) -> bool:
    """Wait for the end of a process and collect it; False when it did not come within `limit_s` seconds.

    It polls, as a child watcher would bind the process to one event loop.
    """
    loop = asyncio.get_running_loop()
    end, pause_s = None if limit_s is None else loop.time() + limit_s, 0.001
    while process.poll() is None:
        if end is not None and loop.time() > end:
            return False
        await asyncio.sleep(pause_s)
        pause_s = min(pause_s * 1.5, 0.05)
    return True
