"""Awaiting several coroutines without leaving any of them behind, and ending what an event loop holds with it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable
from typing import Any, TypeVar

__all__ = ["at_loop_end", "gather_owned"]

T = TypeVar("T")


async def gather_owned(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Await all coroutines as tasks that cannot outlive this call; the first error cancels the rest and is raised.

    Unlike a bare TaskGroup it raises that error itself, so that callers can catch its class.
    """
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(coroutine) for coroutine in work]
    except BaseExceptionGroup as group:
        first = group.exceptions[0]
    else:
        return [task.result() for task in running]
    # out here, where raising it leaves its own cause and context alone
    raise first


def at_loop_end(end: Callable[[], Awaitable[None]]) -> Callable[[], Awaitable[None]]:
    """Have `end` awaited when the running event loop ends, or when what this returns is awaited, whichever is first.

    A loop's end is that of `asyncio.run`, or its `shutdown_asyncgens`. Keep what is returned: when it is forgotten,
    `end` runs soon after.
    """

    async def wait() -> AsyncGenerator[None]:
        try:
            yield
        finally:
            await end()

    # a loop knows no other thing that it ends itself than asynchronous generators which have begun
    generator = wait()
    with contextlib.suppress(StopIteration):
        generator.__anext__().__await__().send(None)
    return generator.aclose
