"""The process of a worker: its paths, its logs, and its end where one piece of code holds it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from verifiers.interrupt import exit_if_blocked
from verifiers.workers.worker import RolloutWorker

KEPT_LINES = 500
_LAST_LINES = 3

Message = Mapping[str, Any]


def set_up_process(worker: RolloutWorker, load: Message, *, keeps_path: bool = False) -> None:
    """Set up the process of a worker, as its first message says.

    Args:
        keeps_path: modules are found where this process finds them, and only then where rank 0 does.
    """
    own = sys.path if keeps_path else []
    sys.path[:] = [*own, *(path for path in load["sys_path"] if path not in own)]
    handler = _SendsLogs(asyncio.get_running_loop(), worker.connection.send)
    handler.setFormatter(logging.Formatter("%(message)s"))
    logging.basicConfig(handlers=[handler], level=load["levels"]["root"], force=True)
    logging.getLogger("verifiers").setLevel(load["levels"]["verifiers"])
    # what the environment does while it is loaded may take its time
    asyncio.get_running_loop().call_soon(_guard, worker.guards, load["blocked_s"])


def _guard(guards: contextlib.ExitStack, blocked_s: float) -> None:
    guard = asyncio.get_running_loop().create_task(exit_if_blocked(blocked_s))
    guards.callback(guard.cancel)


def last_words(lines: Sequence[str]) -> str:
    """Return the last lines of a process, or the innermost frames on its loop, where `exit_if_blocked` ended it."""
    begins = [number for number, line in enumerate(lines) if line.startswith("Timeout (")]
    if not begins:
        return " | ".join(lines[-_LAST_LINES:])
    stacks = "\n".join(lines[begins[-1] :]).split("(most recent call first):\n")
    stack = next((stack for stack in stacks if "in _run_once" in stack), stacks[-1])
    frames = " | ".join(line.strip() for line in stack.splitlines()[:_LAST_LINES])
    return f"one function has blocked the event loop or held the interpreter: {frames}"


class _SendsLogs(logging.Handler):
    """A handler that sends log records to rank 0, from any thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, send: Callable[[Message], None]) -> None:
        super().__init__()
        self._loop, self._send = loop, send

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = self.format(record)
        except Exception:
            # a mistake in the call that logs, which is printed and ends nothing
            self.handleError(record)
            return
        message = {"op": "log", "name": record.name, "level": record.levelno, "text": text}
        # the loop may have ended
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._send, message)
