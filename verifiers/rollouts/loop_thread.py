"""LoopThread: an event loop in a thread of its own, that tells when it ends and closes what it opened."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from verifiers.errors import GenerationError

__all__ = ["LoopThread"]

logger = logging.getLogger("verifiers.rollouts")

# a loop on which code stands still does not hear that it is to end, and waiting longer changes nothing
_HEARING_S = 1.0
_CLOSING_S = 3.0


class LoopThread:
    """An event loop in a daemon thread, from `start` to `close`. Thread-safe.

    Args:
        name: of the thread, as debuggers show it.
        close_last: awaited on the loop once all its tasks have ended.
        failed: called in the thread with the error, where the loop ends though nobody closed it, or cannot end well.
    """

    def __init__(
        self,
        name: str,
        *,
        close_last: Callable[[], Coroutine[Any, Any, None]],
        failed: Callable[[BaseException], None],
    ) -> None:
        self._close_last, self._failed = close_last, failed
        self._is_closed = self._is_serving = False
        self._heard = threading.Event()
        self._ready = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread. To be called once."""
        self._thread.start()
        self._ready.wait()

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop of a thread that was started."""
        assert self._loop is not None
        return self._loop

    def close(self) -> None:
        """Cancel every task and end the thread; what does not end within seconds is left behind, with a warning.

        May be called twice, and by several threads at once.
        """
        self._is_closed = True
        if not self._thread.is_alive():
            return
        with contextlib.suppress(RuntimeError):  # the loop has just ended by itself
            self.loop.call_soon_threadsafe(self._stop)
        if self._heard.wait(_HEARING_S):
            self._thread.join(_CLOSING_S)
        if self._thread.is_alive():
            waited_s = _HEARING_S + _CLOSING_S * self._heard.is_set()
            logger.warning("something blocks the generator's loop: its thread did not end in %g s", waited_s)

    def _stop(self) -> None:
        self._heard.set()
        # a stop that came while the loop is being ended would leave its connections open
        if self._is_serving:
            self.loop.stop()

    def _serve(self) -> None:
        loop = self._loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        self._ready.set()
        try:
            try:
                self._is_serving = True
                loop.run_forever()
                self._note_end(None)
            except (Exception, SystemExit, KeyboardInterrupt) as error:
                # the last two, in a task of the environment's own, end the loop
                self._note_end(error)
            finally:
                self._is_serving = False
                self._heard.set()
            while tasks := asyncio.all_tasks(loop):
                for task in tasks:
                    task.cancel()
                with contextlib.suppress(SystemExit, KeyboardInterrupt):
                    loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            loop.run_until_complete(self._close_last())
            loop.run_until_complete(loop.shutdown_asyncgens())
        except Exception as error:
            self._failed(error)
        finally:
            asyncio.set_event_loop(None)
            loop.close()

    def _note_end(self, cause: BaseException | None) -> None:
        if not self._is_closed:
            how = repr(cause) if cause is not None else "a stop of its event loop"
            error = GenerationError(f"{how} ended the generator's thread; does code of the environment do that?")
            error.__cause__ = cause
            self._failed(error)
