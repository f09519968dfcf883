"""Workers as processes of this machine.

A worker is spawned, so that it has no more in it than its environment imports. Its standard input is a pipe that
nothing is written to: its end is the end of the parent, whatever ended that.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from verifiers.envs.lifecycle import TEARDOWN_WITHIN_S
from verifiers.workers.pool import WorkerLink
from verifiers.workers.worker import RolloutWorker, set_up_process

logger = logging.getLogger("verifiers.workers")

_PROGRAM = "import sys; sys.path[:] = {path!r}; from verifiers.workers.processes import main; main({fd})"
_POLL_S = 0.02
_KEPT_LINES, _LAST_LINES = 500, 3


class ProcessEngine:
    def __init__(self, count: int) -> None:
        self._count = count

    async def open(self) -> int:
        return self._count

    async def start(self, link: WorkerLink) -> _Process:
        path = [each for each in sys.path if isinstance(each, str)]
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with theirs:
            await asyncio.get_running_loop().create_unix_connection(lambda: link.connection, sock=ours)
            # by asyncio's own subprocesses a cancellation during the start would wait forever
            process = subprocess.Popen(  # noqa: ASYNC220
                [sys.executable, "-u", "-c", _PROGRAM.format(path=path, fd=theirs.fileno())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                # Ctrl-C is for rank 0, which lets rollouts in flight end
                process_group=0,
            )
        return _Process(process, link.number)

    async def close(self) -> None:
        """Do nothing: the workers share no resource."""


class _Process:
    def __init__(self, process: subprocess.Popen[bytes], number: int) -> None:
        self._process, self._number = process, number
        self._is_killed = False
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._logging = threading.Thread(target=self._log, name=f"verifiers-worker-{number}", daemon=True)
        self._logging.start()

    def kill(self) -> None:
        if self._process.poll() is None:
            self._is_killed = True
            self._kill_group()

    async def wait(self) -> str:
        while (code := self._process.poll()) is None:  # noqa: ASYNC110 - no event is portable
            await asyncio.sleep(_POLL_S)
        self._kill_group()
        # a process of its own that lives on may hold the pipe open
        await asyncio.to_thread(self._logging.join, 1.0)
        assert self._process.stdin is not None
        self._process.stdin.close()
        last = f"; its last output: {_last_words([*self._lines])}" if code and self._lines else ""
        if code == -signal.SIGKILL:
            by = "" if self._is_killed else " by SIGKILL (by hand, or because the machine is out of memory)"
            return f"was killed{by}{last}"
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        return f"ended {how}{last}"

    def _kill_group(self) -> None:
        # the processes that it has started are of its group, and may live on without it
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _log(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as stdout:
            for line in stdout:
                text = line.decode(errors="replace").rstrip()
                self._lines.append(text)
                logger.info("worker %d: %s", self._number, text)


def _last_words(lines: Sequence[str]) -> str:
    """Return the last lines of a process, or the innermost frames on its loop, where `exit_if_blocked` ended it."""
    begins = [number for number, line in enumerate(lines) if line.startswith("Timeout (")]
    if not begins:
        return " | ".join(lines[-_LAST_LINES:])
    stacks = "\n".join(lines[begins[-1] :]).split("(most recent call first):\n")
    stack = next((stack for stack in stacks if "in _run_once" in stack), stacks[-1])
    frames = " | ".join(line.strip() for line in stack.splitlines()[:_LAST_LINES])
    return f"one function has blocked the event loop or held the interpreter: {frames}"


# -- in the worker ------------------------------------------------------------------------------------------------


def main(fd: int) -> None:
    """Run a worker: serve rank 0 at the other end of a socket until a `close` message, or until it is lost."""
    sock = socket.socket(fileno=fd)
    sock.setblocking(False)
    parent_is_gone = threading.Event()
    asyncio.run(_serve(sock, parent_is_gone))
    if parent_is_gone.is_set():
        _kill_own_group()


async def _serve(sock: socket.socket, parent_is_gone: threading.Event) -> None:
    loop = asyncio.get_running_loop()
    worker = RolloutWorker(set_up_process)

    def end() -> None:
        parent_is_gone.set()
        loop.call_soon_threadsafe(worker.ended.set)

    _end_with_parent(end)
    await loop.create_unix_connection(lambda: worker.connection, sock=sock)
    await worker.serve()


def _end_with_parent(end: Callable[[], object]) -> None:
    """Call `end` in a thread when standard input ends, and end the process for good some seconds later."""

    def watch() -> None:
        while os.read(0, 4096):
            pass
        # the loop may have ended already
        with contextlib.suppress(RuntimeError):
            end()
        time.sleep(TEARDOWN_WITHIN_S)
        _kill_own_group()

    threading.Thread(target=watch, name="verifiers-parent-watch", daemon=True).start()


def _kill_own_group() -> None:
    """End this process and all that it has started."""
    os.killpg(0, signal.SIGKILL)
