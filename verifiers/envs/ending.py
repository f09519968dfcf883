"""The end of an environment: methods marked `@vf.teardown`, run once."""

from __future__ import annotations

import asyncio
import atexit
import logging
import queue
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from verifiers.envs.calling import maybe_await
from verifiers.envs.decorators import marked_methods

__all__ = ["TEARDOWN_WITHIN_S", "run_teardown", "tear_down", "teardown_at_exit"]

logger = logging.getLogger("verifiers.envs")

TEARDOWN_WITHIN_S = 5.0

_ended: weakref.WeakSet[Any] = weakref.WeakSet()
# those that have a thread of their own, which their group need not wait for
_in_threads: weakref.WeakSet[Any] = weakref.WeakSet()
_at_exit: weakref.WeakKeyDictionary[Any, _AtExit] = weakref.WeakKeyDictionary()
_starting = threading.Lock()


async def run_teardown(env: Any) -> None:
    """Run an environment's methods marked `@vf.teardown`, sync or async, unless that was done before.

    Those of a group's environments come first. Every one runs, whatever the others raise; what they raise is
    logged, since the results that the environment was used for are already there. Cancellation passes.
    """
    if env in _ended:
        return
    _ended.add(env)
    for member in getattr(env, "envs", None) or ():
        if member not in _in_threads:
            await run_teardown(member)
    for method in marked_methods(env, "teardown"):
        try:
            await maybe_await(method)
        except Exception as error:
            name = f"{type(env).__name__}.{method.__name__}"
            logger.error("The teardown method %s failed: %s: %s", name, type(error).__name__, error, exc_info=error)


def tear_down(envs: Iterable[Any], within_s: float = TEARDOWN_WITHIN_S) -> None:
    """Run the teardown of environments, and of those in groups, at once, and wait for all of them.

    Args:
        within_s: seconds for all together; what has not ended by then is left behind, with a warning.
    """
    # in threads: the deadline of an event loop does not bound a method that never awaits
    waiting = [env for env in {id(env): env for env in _with_members(envs)}.values() if env not in _ended]
    _in_threads.update(waiting)
    threads = [
        threading.Thread(target=_run_teardown, args=(env,), name="verifiers-teardown", daemon=True) for env in waiting
    ]
    for thread in threads:
        thread.start()
    _wait_for(threads, within_s)


def teardown_at_exit(env: Any) -> None:
    """See to it that the environment's teardown runs when the interpreter ends, which waits 5 seconds for it.

    For the classic calls, which nobody tells when they were the last. It does nothing for an environment without
    marked methods.
    """
    for each in _with_members([env]):
        if not marked_methods(each, "teardown"):
            continue
        with _starting:
            waiting = _at_exit.get(each)
            # one of a process that was forked does not run in it
            if waiting is None or not waiting.thread.is_alive():
                _at_exit[each] = _AtExit(each)
    # the same again has no effect
    atexit.unregister(_begin_exit)
    atexit.register(_begin_exit)


class _AtExit:
    """A thread that runs one environment's teardown when it is told; it ends with the environment, too.

    It is there before: from Python 3.12 on an interpreter that ends starts no thread.
    """

    def __init__(self, env: Any) -> None:
        # unlike an event's, its put may interrupt itself: a weak reference can be called at any moment
        self.begin: queue.SimpleQueue[None] = queue.SimpleQueue()
        begin = self.begin
        ref = weakref.ref(env, lambda _: begin.put(None))
        self.thread = threading.Thread(target=_await_exit, args=(ref, begin), name="verifiers-at-exit", daemon=True)
        self.thread.start()


def _await_exit(ref: weakref.ref[Any], begin: queue.SimpleQueue[None]) -> None:
    begin.get()
    env = ref()
    if env is not None and env not in _ended:
        _run_teardown(env)


def _begin_exit() -> None:
    waiting = [(env, each) for env, each in _at_exit.items() if env not in _ended]
    _in_threads.update(env for env, _ in waiting)
    for _, each in waiting:
        each.begin.put(None)
    _wait_for([each.thread for _, each in waiting], TEARDOWN_WITHIN_S)


def _run_teardown(env: Any) -> None:
    asyncio.run(env.teardown())


def _with_members(envs: Iterable[Any]) -> Iterator[Any]:
    """Environments, those of a group before the group."""
    for env in envs:
        yield from _with_members(getattr(env, "envs", None) or ())
        yield env


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
