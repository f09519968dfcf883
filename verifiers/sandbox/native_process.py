"""Long-lived processes of the process and namespaces tiers."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable
from typing import Any

from verifiers.errors import SandboxError
from verifiers.sandbox.closing import PipedProcess
from verifiers.sandbox.pipes import Drain, Feed, LineReader

__all__ = ["NativeProcess", "Pipes", "close_all"]

KILL_S = 15.0


class NativeProcess(PipedProcess):
    """A long-lived process of a NativeSandbox; as in `SandboxProcess`.

    Args:
        answer: becomes what the sandbox's agent says of its end.
        kill: asks the agent to kill it.
    """

    def __init__(
        self, answer: asyncio.Future[dict[str, Any]], pipes: Pipes, keep_bytes: int, kill: Callable[[], None]
    ) -> None:
        self._answer = answer
        self._kill = kill
        self._feed = Feed(pipes.stdin, close_after=False)
        self._out = LineReader(pipes.stdout, keep_bytes)
        self._err = Drain(pipes.stderr, keep_bytes, kill)
        answer.add_done_callback(lambda answer: self.release())

    def release(self) -> None:
        """Close the pipes, after taking what is still in them."""
        self._release_pipes()

    async def wait(self, *, timeout_s: float | None = None) -> int | None:
        async with asyncio.timeout(timeout_s):
            message = await asyncio.shield(self._answer)
        exit_code: int | None = message.get("exit")
        return exit_code

    async def kill(self) -> None:
        if not self._answer.done():
            self._kill()
        try:
            await self.wait(timeout_s=KILL_S)
        except TimeoutError:
            raise SandboxError(f"The sandbox did not kill a process within {KILL_S:g} s.") from None


class Pipes:
    """Three pipes of a process: one end to pass on, `stdin`, `stdout` and `stderr` to keep; -1 for no stdin."""

    def __init__(self, with_stdin: bool) -> None:
        self._theirs: list[int] = []
        mine: list[int] = []
        try:
            if with_stdin:
                reading, writing = os.pipe()
                self._theirs.append(reading)
                mine.append(writing)
            else:
                self._theirs.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
                mine.append(-1)
            for _ in range(2):
                reading, writing = os.pipe()
                self._theirs.append(writing)
                mine.append(reading)
        except OSError as error:
            close_all([*self._theirs, *mine])
            raise SandboxError(f"No pipes could be made for a sandbox: {error}.") from error
        self.stdin, self.stdout, self.stderr = mine

    def take_theirs(self) -> list[int]:
        """The ends to pass on, which the caller closes."""
        theirs, self._theirs = self._theirs, []
        return theirs

    def close(self) -> None:
        """Close what was not taken; for a process that could not be asked for."""
        close_all([*self.take_theirs(), self.stdin, self.stdout, self.stderr])


def close_all(fds: Iterable[int]) -> None:
    """Close descriptors; -1 stands for none."""
    for fd in fds:
        if fd >= 0:
            os.close(fd)
