"""Marks for methods of environments: when a rollout stops, and what to tidy up after it."""

from __future__ import annotations

import asyncio
import atexit
import inspect
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from types import FunctionType, MethodType
from typing import Any, TypeVar, overload

F = TypeVar("F", bound=Callable[..., Any])


async def maybe_await(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `func` and await the result where it can be awaited. Errors pass through as they are."""
    result = func(*args, **kwargs)
    return await result if inspect.isawaitable(result) else result


_MARKS = "_verifiers_marks"


class _Mark:
    """A decorator of methods, used bare or with a priority."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    @overload
    def __call__(self, func: F, /) -> F: ...
    @overload
    def __call__(self, /, *, priority: int = 0) -> Callable[[F], F]: ...
    def __call__(self, func: Any = None, /, *, priority: int = 0) -> Any:
        def marked(method: F) -> F:
            setattr(method, _MARKS, {**getattr(method, _MARKS, {}), self.kind: priority})
            return method

        return marked if func is None else marked(func)


stop = _Mark("stop")
"""Mark a method `(self, state) -> bool`, sync or async, that ends a rollout when it returns True.

`@vf.stop`, or `@vf.stop(priority=1)`: higher is asked first; methods of one priority in the order of their names.
"""

cleanup = _Mark("cleanup")
"""Mark a method `(self, state)`, sync or async, that runs after every rollout, also after a failed one; as `stop`."""

teardown = _Mark("teardown")
"""Mark a method `(self)`, sync or async, that runs once when the environment is no longer needed; as `stop`."""


def marked_methods(obj: Any, kind: str) -> list[Callable[..., Any]]:
    """Return the bound methods of an object marked as `kind` ("stop", "cleanup", "teardown").

    A method overridden without the mark is no longer marked. Functions put on the instance count too.

    Returns:
        Highest priority first, then by name.
    """
    cls: Any = type(obj)
    found = dict(_marked_names(cls, kind))
    for name, value in getattr(obj, "__dict__", {}).items():
        # other callables may answer to any attribute (mocks do), and would seem marked
        if isinstance(value, (FunctionType, MethodType)):
            priority = getattr(value, _MARKS, {}).get(kind)
            if priority is not None:
                found[name] = priority
            else:
                found.pop(name, None)
    return [getattr(obj, name) for name in sorted(found, key=lambda name: (-found[name], name))]


@lru_cache(maxsize=512)
def _marked_names(cls: Any, kind: str) -> tuple[tuple[str, int], ...]:
    # asked before and after every turn of every rollout, so it is cached
    found = []
    for name in dir(cls):
        # static: descriptors such as a dataset that is made at its first reading are left alone
        method = inspect.getattr_static(cls, name, None)
        # of a static or class method, the function
        marks = getattr(getattr(method, "__func__", method), _MARKS, None)
        if isinstance(marks, dict) and kind in marks:
            found.append((name, marks[kind]))
    return tuple(found)


logger = logging.getLogger("verifiers.envs")

TEARDOWN_WITHIN_S = 5.0

_ended: weakref.WeakSet[Any] = weakref.WeakSet()
# those that have a thread of their own, which their group need not wait for
_in_threads: weakref.WeakSet[Any] = weakref.WeakSet()
_at_exit: weakref.WeakSet[Any] = weakref.WeakSet()
_at_exit_thread: threading.Thread | None = None
_exiting = threading.Event()


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

    What has not ended after `within_s` seconds is left behind, with a warning.
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
    """Register the environment's teardown for the end of the interpreter, which waits 5 seconds for it.

    For the classic calls, of which none is known to be the last. It does nothing for an environment without
    marked methods.
    """
    global _at_exit_thread
    _at_exit.update(each for each in _with_members([env]) if marked_methods(each, "teardown"))
    # it is there before, since an interpreter that ends starts no thread (Python 3.12); a fork has none
    if _at_exit and (_at_exit_thread is None or not _at_exit_thread.is_alive()):
        _at_exit_thread = threading.Thread(target=_await_exit, name="verifiers-at-exit", daemon=True)
        _at_exit_thread.start()
        atexit.unregister(_begin_exit)
        atexit.register(_begin_exit, _at_exit_thread)


def _await_exit() -> None:
    _exiting.wait()

    async def end_all() -> None:
        waiting = [env.teardown() for env in list(_at_exit) if env not in _ended]
        # marked methods log what they raise; none keeps the others from their end
        await asyncio.gather(*waiting, return_exceptions=True)

    asyncio.run(end_all())


def _begin_exit(thread: threading.Thread) -> None:
    _exiting.set()
    _wait_for([thread], TEARDOWN_WITHIN_S)


def _run_teardown(env: Any) -> None:
    asyncio.run(env.teardown())


def _with_members(envs: Iterable[Any]) -> Iterator[Any]:
    """Yield environments, those of a group before the group."""
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
