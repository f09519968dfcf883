"""Pipes to processes, served by callbacks of the event loop: no task, no thread, no child watcher."""

from __future__ import annotations

import abc
import asyncio
import contextlib
import os
import subprocess
from collections.abc import Callable, Iterable, Iterator

from verifiers.errors import SandboxError

_CHUNK = 1 << 18
# bytes that a process may write while nobody reads them, before it is killed: its reader has other work too
FLOOD_BYTES = 64 << 20
# a pipe holds no more than this, so what an ended process has left is read by then
_PIPE_BYTES = 1 << 20


class _Reader(abc.ABC):
    """A reader of a pipe whenever there is something in it; subclasses decide what becomes of the data."""

    def __init__(self, fd: int) -> None:
        self._fd: int | None = fd
        self._loop = asyncio.get_running_loop()
        os.set_blocking(fd, False)
        self._loop.add_reader(fd, self._read)

    @abc.abstractmethod
    def _take(self, data: bytes) -> None: ...

    def _read(self) -> int:
        assert self._fd is not None
        try:
            data = os.read(self._fd, _CHUNK)
        except BlockingIOError:
            return 0
        if data:
            self._take(data)
        else:
            self.close()
        return len(data)

    def finish(self) -> None:
        """Take what an ended process has left in the pipe, and close it. Others may still be writing to it."""
        taken = 0
        while self._fd is not None and taken < _PIPE_BYTES:
            count = self._read()
            taken += count
            if count == 0:
                break
        self.close()

    def close(self) -> None:
        """Stop reading. The writers get a broken pipe."""
        if self._fd is not None:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = None


class Drain(_Reader):
    """A reader that keeps the first bytes of a pipe and counts the others; after `FLOOD_BYTES` it calls `flooded`."""

    def __init__(self, fd: int, keep_bytes: int, flooded: Callable[[], None]) -> None:
        self.kept = bytearray()
        self.dropped = 0
        self._keep = keep_bytes
        self._flooded: Callable[[], None] | None = flooded
        super().__init__(fd)

    @property
    def text(self) -> str:
        return self.kept.decode(errors="replace")

    def _take(self, data: bytes) -> None:
        room = self._keep - len(self.kept)
        self.kept += data[:room]
        self.dropped += max(0, len(data) - room)
        if self.dropped > FLOOD_BYTES and self._flooded is not None:
            flooded, self._flooded = self._flooded, None
            flooded()


class Feed:
    """A writer to a pipe, as fast as its reader takes it; with `close_after` it is closed at the end of the data."""

    def __init__(self, fd: int, data: bytes = b"", *, close_after: bool) -> None:
        self._fd: int | None = fd
        self._left = bytearray(data)
        self._close_after = close_after
        self._drained = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        os.set_blocking(fd, False)
        self._write()

    def _write(self) -> None:
        assert self._fd is not None
        try:
            while self._left:
                del self._left[: os.write(self._fd, self._left[:_CHUNK])]
        except BlockingIOError:
            self._loop.add_writer(self._fd, self._write)
            return
        except OSError:
            # it no longer reads
            self.close()
            return
        self._loop.remove_writer(self._fd)
        self._drained.set()
        if self._close_after:
            self.close()

    async def send(self, data: bytes) -> None:
        """Write and wait until the pipe has taken it. Raises SandboxError when its reader is gone."""
        if self._fd is not None:
            self._left += data
            self._drained.clear()
            self._write()
            await self._drained.wait()
        if self._fd is None:
            raise SandboxError("The process in the sandbox no longer reads its stdin: it ended or closed it.")

    def close(self) -> None:
        """Give its reader the end of the file."""
        if self._fd is not None:
            self._loop.remove_writer(self._fd)
            os.close(self._fd)
            self._fd = None
            self._left.clear()
            self._drained.set()


class LineReader(_Reader):
    """Lines of a pipe; it reads no further ahead than one line may be long."""

    def __init__(self, fd: int, line_bytes: int) -> None:
        self._limit = line_bytes
        self._buffer = bytearray()
        self._news = asyncio.Event()
        self._paused = False
        super().__init__(fd)

    def _take(self, data: bytes) -> None:
        self._buffer += data
        if len(self._buffer) > self._limit and not self._paused and self._fd is not None:
            self._paused = True
            self._loop.remove_reader(self._fd)
        self._news.set()

    async def read_line(self) -> bytes:
        """Return the next line; b"" at the end. Raises SandboxError when a line is longer than allowed."""
        searched = 0
        while True:
            end = self._buffer.find(b"\n", searched) + 1
            if end or self._fd is None:
                line = bytes(self._buffer[:end] if end else self._buffer)
                del self._buffer[: len(line)]
                self._resume()
                return line
            searched = len(self._buffer)
            if searched > self._limit:
                raise SandboxError(f"A line of the process in the sandbox is longer than {self._limit} bytes.")
            self._news.clear()
            await self._news.wait()

    def _resume(self) -> None:
        if self._paused and self._fd is not None and len(self._buffer) <= self._limit:
            self._paused = False
            self._loop.add_reader(self._fd, self._read)

    def close(self) -> None:
        super().close()
        self._news.set()


class SandboxProcess(abc.ABC):
    """A long-lived process in a sandbox that reads and writes lines. It ends with the sandbox at the latest."""

    def __init__(self, pipes: tuple[int, int, int], most_bytes: int, flooded: Callable[[], None]) -> None:
        to_stdin, from_stdout, from_stderr = pipes
        self._feed = Feed(to_stdin, close_after=False)
        self._out = LineReader(from_stdout, most_bytes)
        self._err = Drain(from_stderr, most_bytes, flooded)

    @abc.abstractmethod
    async def wait(self, *, timeout_s: float | None = None) -> int | None:
        """Return its exit code once it ended, as in RunResult; None when it ended with its sandbox.

        Raises:
            TimeoutError: it still runs.
        """

    @abc.abstractmethod
    async def kill(self) -> None:
        """Kill it with all that it started, and wait until it is gone."""

    async def write(self, data: bytes | str) -> None:
        """Send to its stdin. Raises SandboxError when it no longer reads."""
        await self._feed.send(data.encode() if isinstance(data, str) else data)

    async def read_line(self, *, timeout_s: float | None = None) -> bytes:
        """Return the next line of its stdout with its newline; what is left at the end; b"" after that.

        Raises:
            TimeoutError: no whole line came in time. What came stays for the next call.
            SandboxError: a line longer than the sandbox's `output_bytes`; the process is killed.
        """
        try:
            async with asyncio.timeout(timeout_s):
                return await self._out.read_line()
        except SandboxError:
            await self.kill()
            raise

    def stderr(self) -> str:
        """Return its stderr so far, at most `output_bytes` from its beginning."""
        return self._err.text

    def release(self) -> None:
        """Close the pipes, after taking what is still in them."""
        self._feed.close()
        self._out.finish()
        self._err.finish()


def open_pipes(with_stdin: bool) -> tuple[list[int], tuple[int, int, int]]:
    """Return the ends of stdin, stdout and stderr for a process, and ours; -1 where it reads an empty stdin."""
    theirs: list[int] = []
    ours: list[int] = []
    try:
        if with_stdin:
            reading, writing = os.pipe()
            theirs.append(reading)
            ours.append(writing)
        else:
            theirs.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
            ours.append(-1)
        for _ in range(2):
            reading, writing = os.pipe()
            theirs.append(writing)
            ours.append(reading)
    except OSError as error:
        close_all([*theirs, *ours])
        raise SandboxError(f"No pipes could be made for a sandbox: {error}.") from error
    return theirs, (ours[0], ours[1], ours[2])


@contextlib.contextmanager
def drained(
    pipes: tuple[int, int, int], stdin: bytes | None, out_bytes: int, err_bytes: int, flooded: Callable[[], None]
) -> Iterator[tuple[Drain, Drain]]:
    """Feed a process and drain its stdout and stderr; at the end what is left in the pipes is taken, too."""
    to_stdin, from_stdout, from_stderr = pipes
    feed = Feed(to_stdin, stdin, close_after=True) if stdin is not None else None
    out, err = Drain(from_stdout, out_bytes, flooded), Drain(from_stderr, err_bytes, flooded)
    try:
        yield out, err
        out.finish()
        err.finish()
    finally:
        if feed is not None:
            feed.close()
        out.close()
        err.close()


def close_all(fds: Iterable[int]) -> None:
    """Close descriptors; -1 stands for none."""
    for fd in fds:
        if fd >= 0:
            os.close(fd)


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
