"""Awaiting several coroutines without leaving any of them behind."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

__all__ = ["gather_owned"]

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
