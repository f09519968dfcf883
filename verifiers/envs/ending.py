"""The end of an environment: methods marked `@vf.teardown`, run once."""

from __future__ import annotations

import asyncio
import atexit
import logging
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from verifiers.envs.calling import maybe_await
from verifiers.envs.decorators import marked_methods

__all__ = ["TEARDOWN_WITHIN_S", "run_teardown", "tear_down", "teardown_at_exit"]

logger = logging.getLogger("verifiers.envs")

TEARDOWN_WITHIN_S = 5.0

_ended: weakref.WeakSet[Any] = weakref.WeakSet()
_awaiting_exit: weakref.WeakSet[Any] = weakref.WeakSet()
_exit_begins = threading.Event()
_starting = threading.Lock()
_at_exit: list[threading.Thread] = []


async def run_teardown(env: Any) -> None:
    """Run an environment's methods marked `@vf.teardown`, sync or async, unless that was done before.

    Those of a group's environments come first. Every one runs, whatever the others raise; what they raise is
    logged, since the results that the environment was used for are already there. Cancellation passes.
    """
    if env in _ended:
        return
    _ended.add(env)
    for member in getattr(env, "envs", None) or ():
        await run_teardown(member)
    for method in marked_methods(env, "teardown"):
        try:
            await maybe_await(method)
        except Exception as error:
            name = f"{type(env).__name__}.{method.__name__}"
            logger.error("The teardown method %s failed: %s: %s", name, type(error).__name__, error, exc_info=error)


def tear_down(envs: Iterable[Any], within_s: float = TEARDOWN_WITHIN_S) -> None:
    """Run the teardown of environments at once, and wait for all of them.

    Args:
        within_s: seconds for all together; what has not ended by then is left behind, with a warning.
    """
    # in threads: the deadline of an event loop does not bound a method that never awaits
    threads = [
        threading.Thread(target=_run_teardowns, args=([env],), name="verifiers-teardown", daemon=True)
        for env in {id(env): env for env in envs}.values()
        if env not in _ended
    ]
    for thread in threads:
        thread.start()
    _wait_for(threads, within_s)


def teardown_at_exit(env: Any) -> None:
    """See to it that the environment's teardown runs when the interpreter ends, which waits 5 seconds for it.

    For the classic calls, which nobody tells when they were the last. It does nothing for an environment without
    marked methods.
    """
    for member in getattr(env, "envs", None) or ():
        teardown_at_exit(member)
    if not marked_methods(env, "teardown"):
        return
    _awaiting_exit.add(env)
    with _starting:
        # one of a process that was forked does not run in it
        if not any(thread.is_alive() for thread in _at_exit):
            # from Python 3.12 on an interpreter that ends starts no thread
            thread = threading.Thread(target=_teardown_all, name="verifiers-teardown", daemon=True)
            _at_exit[:] = [thread]
            thread.start()
            atexit.register(_begin_exit)


def _teardown_all() -> None:
    _exit_begins.wait()
    _run_teardowns([env for env in _awaiting_exit if env not in _ended])


def _begin_exit() -> None:
    _exit_begins.set()
    _wait_for(_at_exit, TEARDOWN_WITHIN_S)


def _run_teardowns(envs: Sequence[Any]) -> None:
    async def all_of_them() -> None:
        for env in envs:
            await env.teardown()

    asyncio.run(all_of_them())


def _wait_for(threads: Sequence[threading.Thread], within_s: float) -> None:
    deadline = time.monotonic() + within_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    if any(thread.is_alive() for thread in threads):
        logger.warning(
            "A method marked @vf.teardown did not end within %g s and is left behind; give what it waits for a "
            "deadline.",
            within_s,
        )
