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
from collections.abc import Callable

from verifiers.envs.lifecycle import TEARDOWN_WITHIN_S
from verifiers.workers.link import WorkerLink
from verifiers.workers.worker import RolloutWorker
from verifiers.workers.worker_setup import set_up_process

__all__ = ["ProcessEngine", "main"]

logger = logging.getLogger("verifiers.workers")

_PROGRAM = "import sys; sys.path[:] = {path!r}; from verifiers.workers.processes import main; main({fd})"
_LAST_LINES = 3
_POLL_S = 0.02


class ProcessEngine:
    """Starts workers as processes.

    Args:
        count: of workers.
    """

    def __init__(self, count: int) -> None:
        self._count = count

    async def open(self) -> int:
        """Return the number of workers."""
        return self._count

    async def start(self, link: WorkerLink) -> _Process:
        """Start a process and connect it to its link."""
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
        """Nothing is shared."""


class _Process:
    def __init__(self, process: subprocess.Popen[bytes], number: int) -> None:
        self._process, self._number = process, number
        self._lines: deque[str] = deque(maxlen=_LAST_LINES)
        self._logging = threading.Thread(target=self._log, name=f"verifiers-worker-{number}", daemon=True)
        self._logging.start()

    def kill(self) -> None:
        # the processes that it has started are of its group
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)

    async def wait(self) -> str:
        while (code := self._process.poll()) is None:  # noqa: ASYNC110 - a process tells nobody
            await asyncio.sleep(_POLL_S)
        # a process of its own that lives on may hold the pipe open
        await asyncio.to_thread(self._logging.join, 1.0)
        assert self._process.stdin is not None
        self._process.stdin.close()
        if code == -signal.SIGKILL:
            return "was killed by SIGKILL (by hand, or because the machine is out of memory)"
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        last = f"; its last output: {' | '.join(self._lines)}" if code and self._lines else ""
        return f"ended {how}{last}"

    def _log(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as stdout:
            for line in stdout:
                text = line.decode(errors="replace").rstrip()
                self._lines.append(text)
                logger.info("worker %d: %s", self._number, text)


# -- in the worker ------------------------------------------------------------------------------------------------


def main(fd: int) -> None:
    """Be a worker: serve rank 0 at the other end of a socket until rank 0 says so, or is gone."""
    sock = socket.socket(fileno=fd)
    sock.setblocking(False)
    asyncio.run(_serve(sock))


async def _serve(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    worker = RolloutWorker(set_up_process)
    _end_with_parent(lambda: loop.call_soon_threadsafe(worker.ended.set))
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
        os._exit(1)

    threading.Thread(target=watch, name="verifiers-parent-watch", daemon=True).start()
