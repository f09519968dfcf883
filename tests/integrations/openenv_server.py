"""A small server of the OpenEnv protocol, whose environment is a game: guess the seed's last digit."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import threading
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any

from aiohttp import WSMsgType, web

GUESS_SCHEMA = {
    "type": "object",
    "properties": {"guess": {"type": "integer"}, "metadata": {"type": "object"}},
    "required": ["guess"],
}


class SessionLost(Exception):
    """Raised by a game: the server hangs up without a word."""


def guess_digit(episode: dict[str, Any], action: dict[str, Any]) -> dict[str, Any]:
    """One step: 1.0 for the digit, -0.25 for another; a 13 raises, a 99 ends the connection."""
    guess = action.get("guess")
    if not isinstance(guess, int):
        raise TypeError("guess")
    if guess == 13:
        raise RuntimeError("thirteen is unlucky")
    if guess == 99:
        raise SessionLost
    right = guess == episode["seed"] % 10
    text = "right" if right else f"not {guess}"
    return {"observation": {"text": text}, "reward": 1.0 if right else -0.25, "done": right}


class OpenEnvServer:
    """`with OpenEnvServer() as server: server.url`. Listens on a loopback port, in a thread of its own.

    Args:
        max_sessions: sessions at once; more are refused with CAPACITY_REACHED.
        play: one step of the environment.
        first_error: (code, message) answered in place of a session.
        action_schema: reported by /schema.
        answer: replaces the answers of the WebSocket by kind, e.g. {"reset": "no JSON"}.
        health: body of /health; None answers 404.
        lose_resets: how many connections end before their first reset is answered.

    Attributes:
        open, most_open, refused, begun: sessions now, at most, refused, ever.
        received: the requests of all sessions, in order of arrival.
        goodbyes: sessions that ended by `close`.
        pongs: answers to the pings of `ping`.
        headers: of the newest WebSocket request.
    """

    def __init__(
        self,
        max_sessions: int = 100,
        *,
        play: Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]] = guess_digit,
        first_error: tuple[str, str] | None = None,
        action_schema: dict[str, Any] = GUESS_SCHEMA,
        answer: dict[str, str] | None = None,
        health: str | None = '{"status": "healthy"}',
        lose_resets: int = 0,
        hang_on: str = "",
    ) -> None:
        self.max_sessions = max_sessions
        self.play = play
        self.first_error = first_error
        self.action_schema = action_schema
        self.answer = answer or {}
        self.health = health
        self.lose_resets = lose_resets
        self.hang_on = hang_on
        self.open = self.most_open = self.refused = self.begun = self.goodbyes = self.pongs = 0
        self.received: list[dict[str, Any]] = []
        self.headers: dict[str, str] = {}
        self.url = ""
        self._changed = threading.Condition()
        self._loop: asyncio.AbstractEventLoop
        self._stopping: asyncio.Event
        self._newest: web.WebSocketResponse

    def wait_until(self, condition: Callable[[OpenEnvServer], bool], timeout_s: float = 60.0) -> None:
        """Block until `condition(self)` holds; looked at whenever a session or a pong comes or goes."""
        with self._changed:
            if not self._changed.wait_for(lambda: condition(self), timeout_s):
                raise TimeoutError(f"{self.open} sessions are open, {self.begun} were begun")

    def ping(self, timeout_s: float = 60.0) -> None:
        """Ping the newest session, and block until it has answered."""
        expected = self.pongs + 1
        asyncio.run_coroutine_threadsafe(self._newest.ping(), self._loop).result(timeout_s)
        self.wait_until(lambda it: it.pongs == expected, timeout_s)

    def __enter__(self) -> OpenEnvServer:
        ready: concurrent.futures.Future[int] = concurrent.futures.Future()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(ready)), daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{ready.result(60)}"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join()

    async def _serve(self, ready: concurrent.futures.Future[int]) -> None:
        self._loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        app = web.Application()
        app.router.add_get("/ws", self._session)
        app.router.add_get("/health", self._health)
        app.router.add_get("/schema", self._json({"action": self.action_schema, "observation": {}, "state": {}}))
        app.router.add_get("/metadata", self._json({"name": "digits", "description": "Guess a digit."}))
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.2, handler_cancellation=True)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            address: Any = runner.addresses[0]
            ready.set_result(address[1])
            await self._stopping.wait()
        finally:
            await runner.cleanup()

    async def _health(self, request: web.Request) -> web.Response:
        if self.health is None:
            return web.Response(status=404, text="nothing here")
        return web.Response(text=self.health, content_type="application/json")

    def _json(self, body: dict[str, Any]) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handle(request: web.Request) -> web.StreamResponse:
            return web.json_response(body)

        return handle

    async def _session(self, request: web.Request) -> web.StreamResponse:
        self.headers = dict(request.headers)
        socket = self._newest = web.WebSocketResponse(autoping=False)
        await socket.prepare(request)
        if self.first_error is not None:
            await self._say_error(socket, *self.first_error)
        elif self.open >= self.max_sessions:
            self.refused += 1
            limits = {"active_sessions": self.open, "max_sessions": self.max_sessions}
            await self._say_error(socket, "CAPACITY_REACHED", "Server at capacity", **limits)
        else:
            self._count(1)
            try:
                await self._play(socket, request)
            finally:
                self._count(-1)
        await socket.close()
        return socket

    def _count(self, change: int) -> None:
        with self._changed:
            self.open += change
            self.begun += change > 0
            self.most_open = max(self.most_open, self.open)
            self._changed.notify_all()

    async def _play(self, socket: web.WebSocketResponse, request: web.Request) -> None:
        episode: dict[str, Any] = {}
        async for message in socket:
            if message.type is WSMsgType.PONG:
                with self._changed:
                    self.pongs += 1
                    self._changed.notify_all()
                continue
            if message.type is not WSMsgType.TEXT:
                return
            request_json = json.loads(message.data)
            self.received.append(request_json)
            kind, data = request_json["type"], request_json.get("data")
            if kind == "close":
                self.goodbyes += 1
                return
            if kind == self.hang_on:
                continue
            if kind == "reset" and self.lose_resets:
                self.lose_resets -= 1
                return
            if kind in self.answer:
                await socket.send_str(self.answer[kind])
                continue
            try:
                await self._answer(socket, episode, kind, data)
            except SessionLost:
                assert request.transport is not None
                request.transport.abort()
                return

    async def _answer(self, socket: web.WebSocketResponse, episode: dict[str, Any], kind: str, data: Any) -> None:
        if kind == "reset":
            episode.update(seed=data.get("seed", 0), steps=0)
            first = {"text": "guess", "hints": []}
            await self._say(socket, "observation", {"observation": first, "reward": None, "done": False})
        elif kind == "state":
            await self._say(socket, "state", {"episode_id": None, "step_count": episode["steps"]})
        else:
            try:
                result = self.play(episode, data)
            except TypeError as error:
                errors = [{"type": "int_type", "loc": ["guess"], "msg": "not an integer", "input": str(error)}]
                await self._say_error(socket, "VALIDATION_ERROR", "Invalid message", errors=errors)
            except (RuntimeError, ValueError) as error:
                await self._say_error(socket, "EXECUTION_ERROR", str(error))
            else:
                episode["steps"] += 1
                await self._say(socket, "observation", result)

    async def _say(self, socket: web.WebSocketResponse, kind: str, data: dict[str, Any]) -> None:
        await socket.send_str(json.dumps({"type": kind, "data": data}))

    async def _say_error(self, socket: web.WebSocketResponse, code: str, message: str, **more: Any) -> None:
        await self._say(socket, "error", {"message": message, "code": code, **more})
