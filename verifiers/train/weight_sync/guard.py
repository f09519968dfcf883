"""Asks a server which weights it has whenever the rollouts' client connects to it anew.

A server process that was started again can only be reached through connections that were made after its start. So
no request reaches weights that were not pushed: the connection that would carry it fails first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
from aiohttp.client_proto import ResponseHandler

from verifiers.threads import threads_for

__all__ = ["ConnectionGuard"]

# of all servers together; each is asked one at a time
_MOST_QUESTIONS = 64


class ConnectionGuard:
    """Checks new connections; those that are made while one question is asked share the next one.

    Args:
        url: of the server, for the message.
        holds_pushed_weights: asks it; blocking, run in a thread.
    """

    def __init__(self, url: str, holds_pushed_weights: Callable[[], bool]) -> None:
        self._url = url
        self._ask = holds_pushed_weights
        self._next: asyncio.Task[bool] | None = None
        self._asked: asyncio.Task[bool] | None = None

    def connector(self, **options: Any) -> aiohttp.TCPConnector:
        """A connector for aiohttp's sessions: a request waits for `check` on a new connection, and fails with it."""
        return _Checking(self.check, **options)

    async def check(self) -> None:
        """Raises ConnectionError where the server has other weights than were pushed."""
        loop = asyncio.get_running_loop()
        if self._next is None or self._next.get_loop() is not loop:
            before = self._asked if self._asked is not None and self._asked.get_loop() is loop else None
            self._next = self._asked = asyncio.create_task(self._answer(before))
        if not await asyncio.shield(self._next):
            raise ConnectionError(f"{self._url} was started again and has not been given the present weights yet")

    async def _answer(self, before: asyncio.Task[bool] | None) -> bool:
        if before is not None:
            await asyncio.wait([before])
        # who connects from here on must ask again: the answer says nothing of connections made after the question
        self._next = None
        # not asyncio's own threads: environments may fill those and wait for the very request that waits here
        return await threads_for("weight check", _MOST_QUESTIONS).run(self._ask)


class _Checking(aiohttp.TCPConnector):
    def __init__(self, check: Callable[[], Awaitable[None]], **options: Any) -> None:
        super().__init__(**options)
        self._check = check

    async def _create_connection(self, *args: Any, **kwargs: Any) -> ResponseHandler:
        connection = await super()._create_connection(*args, **kwargs)
        try:
            await self._check()
        except BaseException:
            # aiohttp forgets a connection whose hooks fail or are cancelled, and leaves it open; so it is no hook
            connection.close()
            raise
        return connection
