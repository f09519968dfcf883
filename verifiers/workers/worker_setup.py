"""The process of a worker: its paths, its logs, and its end where one piece of code holds it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from verifiers.loop_thread import BLOCKING_ADVICE, LoopWatchdog
from verifiers.signals import exit_if_interpreter_is_held
from verifiers.workers.worker import RolloutWorker

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
    """End the process where one piece of code keeps all others from running for so many seconds."""

    def end(function: str) -> None:
        print(f"{function} has blocked the event loop for {blocked_s:.3g} s; {BLOCKING_ADVICE}.", flush=True)
        os._exit(1)

    watchdog = LoopWatchdog(asyncio.get_running_loop(), blocked_s, end)
    watchdog.start()
    guards.callback(watchdog.stop)
    held = f"a function of one of these threads has kept all others from running for {blocked_s:.3g} s"
    guards.enter_context(exit_if_interpreter_is_held(blocked_s, held))


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
