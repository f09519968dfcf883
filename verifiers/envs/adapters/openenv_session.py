"""One episode on an OpenEnv server: a WebSocket of its own, opened when the server has room, closed at the end."""

from __future__ import annotations

import asyncio
import random
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from verifiers.envs.adapters.openenv_wire import OpenEnvAddress, Refusal, Step, encode_request, read_answer
from verifiers.errors import InfraError

__all__ = ["OpenEnvSession", "SessionLimits", "SessionSlots"]

_CONNECT_ATTEMPTS = 3
_FIRST_WAIT_S = 0.1
_LONGEST_WAIT_S = 5.0
_UNREAD_MESSAGES = 16


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """Bounds of one session; times in seconds.

    Attributes:
        connect_timeout_s: for the WebSocket's handshake.
        message_timeout_s: for each answer of the server.
        capacity_timeout_s: how long a server may go on refusing a session because it is full. Time in the
            queue of `max_sessions` does not count.
        close_timeout_s: for the server's goodbye.
        max_message_bytes: of one message, either way.
    """

    connect_timeout_s: float = 10.0
    message_timeout_s: float = 60.0
    capacity_timeout_s: float = 300.0
    close_timeout_s: float = 2.0
    max_message_bytes: int = 32 << 20


class SessionSlots:
    """At most `limit` sessions at once, first come first served, over all event loops of the process.

    Args:
        limit: None for no bound of our own.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self.open = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._granted: set[asyncio.Future[None]] = set()
        self._lock = threading.Lock()

    async def acquire(self) -> None:
        """Wait for a slot; cancelled waiters give theirs back."""
        with self._lock:
            if self._has_room() and not self._waiting:
                self.open += 1
                return
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            with self._lock:
                if turn in self._granted:
                    self.open -= 1
                else:
                    self._waiting.remove(turn)
                self._grant()
            raise
        finally:
            with self._lock:
                self._granted.discard(turn)

    def release(self) -> None:
        """Give a slot back, from any thread."""
        with self._lock:
            self.open -= 1
            self._grant()

    def lower(self, limit: int) -> None:
        """The server takes no more than `limit` at once."""
        with self._lock:
            self.limit = limit if self.limit is None else min(limit, self.limit)

    def _has_room(self) -> bool:
        return self.limit is None or self.open < self.limit

    def _grant(self) -> None:
        while self._waiting and self._has_room():
            turn = self._waiting.popleft()
            try:
                turn.get_loop().call_soon_threadsafe(_wake, turn)
            except RuntimeError:
                continue  # its event loop is closed, and the waiter with it
            self._granted.add(turn)
            self.open += 1


def _wake(turn: asyncio.Future[None]) -> None:
    if not turn.done():
        turn.set_result(None)


class OpenEnvSession:
    """One episode: `begin`, then `step` as often as wanted, then `close`. For one task at a time.

    The socket belongs to a task of its own that reads all the time: a server's pings are answered while the policy
    thinks, and cancelling that task at any moment closes the socket.

    Args:
        address: of the server.
        limits: time and size bounds.
        slots: shared by the sessions of one server; each open socket holds one.
    """

    def __init__(
        self, address: OpenEnvAddress, limits: SessionLimits | None = None, slots: SessionSlots | None = None
    ) -> None:
        self._address = address
        self._limits = limits or SessionLimits()
        self._slots = slots or SessionSlots()
        self._owner: asyncio.Task[None] | None = None
        self._socket: Any = None
        self._inbox: asyncio.Queue[str] = asyncio.Queue(_UNREAD_MESSAGES)
        self._end = ""

    @property
    def is_open(self) -> bool:
        """True while a socket is held."""
        return self._owner is not None and not self._owner.done()

    async def begin(self, reset: Mapping[str, Any] | None = None) -> Step:
        """Open a session and reset it; a server that is full is asked again, less and less often.

        Args:
            reset: the environment's reset arguments, e.g. {"seed": 7}.

        Raises:
            InfraError: no session, or no first observation, within the limits.
        """
        request = encode_request("reset", reset or {})
        lost, refused_s, wait_s = 0, 0.0, _FIRST_WAIT_S
        while True:
            await self._slots.acquire()
            await self._connect()
            answer = await self._exchange(request, "observation")
            if isinstance(answer, Step):
                return answer
            if answer is None:
                lost += 1
            if lost == _CONNECT_ATTEMPTS or not (answer is None or _is_full(answer)):
                raise self._failure(answer)
            if isinstance(answer, Refusal):
                if refused_s >= self._limits.capacity_timeout_s:
                    raise InfraError(
                        f"The OpenEnv server at {self._address.http_url!r} had no free session for "
                        f"capacity_timeout_s={self._limits.capacity_timeout_s:g} ({answer.text}); "
                        "lower max_sessions to what it takes, or raise its max_concurrent_envs."
                    )
                if answer.max_sessions is not None:
                    self._slots.lower(answer.max_sessions)
            await self.close()
            pause_s = min(wait_s * random.uniform(0.5, 1.0), self._limits.capacity_timeout_s - refused_s)
            await asyncio.sleep(max(pause_s, 0.0))
            refused_s, wait_s = refused_s + pause_s, min(wait_s * 2, _LONGEST_WAIT_S)

    async def step(self, action: Mapping[str, Any]) -> Step | Refusal:
        """Take one action.

        Returns:
            The step, or why the action was refused; the episode then stands where it was.

        Raises:
            InfraError: the session failed; it cannot go on.
        """
        try:
            request = encode_request("step", action)
        except ValueError as error:
            return Refusal("VALIDATION_ERROR", f"the action {error}")
        if len(request) > self._limits.max_message_bytes // 4:
            return Refusal("VALIDATION_ERROR", f"the action is too long: {len(request)} characters")
        answer = await self._exchange(request, "observation")
        if isinstance(answer, Step) or (isinstance(answer, Refusal) and answer.is_of_the_action):
            return answer
        raise self._failure(answer)

    async def state(self) -> dict[str, Any]:
        """The server's own account of the episode: episode_id, step_count and the environment's fields.

        Raises:
            InfraError: the session failed.
        """
        answer = await self._exchange(encode_request("state"), "state")
        if isinstance(answer, dict):
            return answer
        raise self._failure(answer)

    async def close(self) -> None:
        """Say goodbye and free the slot; does nothing where no socket is open. Never raises for the server's sake."""
        owner, socket = self._owner, self._socket
        self._owner = self._socket = None
        if owner is None:
            return
        try:
            if socket is not None and not owner.done():
                async with asyncio.timeout(self._limits.close_timeout_s):
                    # the server frees the session before it hangs up: then the next one finds room
                    await socket.send_str(encode_request("close"))
                    await asyncio.wait([owner])
        except (TimeoutError, OSError):
            pass
        finally:
            owner.cancel()
            await asyncio.wait([owner])

    async def _connect(self) -> None:
        """Open the socket; the slot that the caller took is the owner task's from here on."""
        opened: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._socket, self._end, self._inbox = None, "", asyncio.Queue(_UNREAD_MESSAGES)
        self._owner = asyncio.create_task(self._own(opened, self._inbox), name="openenv-session")
        self._owner.add_done_callback(lambda _: self._slots.release())
        await asyncio.wait([self._owner, opened], return_when=asyncio.FIRST_COMPLETED)
        if opened.done():
            self._socket = opened.result()

    async def _own(self, opened: asyncio.Future[Any], inbox: asyncio.Queue[str]) -> None:
        """Hold the socket: everything that arrives goes to the inbox, until it ends or this is cancelled."""
        import aiohttp

        limits, url = self._limits, self._address.ws_url
        try:
            connecting = aiohttp.ClientTimeout(total=None, connect=limits.connect_timeout_s)
            async with aiohttp.ClientSession(headers=dict(self._address.headers), timeout=connecting) as http:
                async with asyncio.timeout(limits.connect_timeout_s):
                    socket = await http.ws_connect(
                        url,
                        max_msg_size=limits.max_message_bytes,
                        timeout=aiohttp.ClientWSTimeout(ws_close=limits.close_timeout_s),
                    )
                async with socket:
                    opened.set_result(socket)
                    async for message in socket:
                        if message.type is aiohttp.WSMsgType.ERROR:
                            break
                        if message.type is not aiohttp.WSMsgType.TEXT:
                            self._end = f"The OpenEnv server at {url!r} sent {message.type.name} where text was due."
                            return
                        await inbox.put(message.data)
                self._end = _why_closed(url, socket, limits)
        except TimeoutError:
            self._end = f"No WebSocket opened at {url!r} within connect_timeout_s={limits.connect_timeout_s:g}."
        except aiohttp.WSServerHandshakeError as error:
            self._end = (
                f"The server at {self._address.http_url!r} answered {error.status} to /ws; "
                "give the base_url of an OpenEnv server, and its headers if it asks for a key."
            )
        except (aiohttp.ClientError, OSError, ValueError) as error:
            self._end = f"The connection to {url!r} failed: {error or type(error).__name__}."
        finally:
            self._end = self._end or f"The session at {url!r} was closed."
            # a request that waits for an answer learns that none will come
            if inbox.full():
                inbox.get_nowait()
            inbox.put_nowait("")

    async def _exchange(
        self, request: str, expected: Literal["observation", "state"]
    ) -> Step | dict[str, Any] | Refusal | None:
        """Send one request and read its answer; None where the socket has ended."""
        limit_s = self._limits.message_timeout_s
        if self._socket is None:
            return None
        try:
            async with asyncio.timeout(limit_s):
                try:
                    await self._socket.send_str(request)
                except OSError:
                    pass  # what the server said before it hung up tells why
                text = await self._inbox.get()
        except TimeoutError as error:
            raise InfraError(
                f"The OpenEnv server at {self._address.http_url!r} did not answer "
                f"within message_timeout_s={limit_s:g}."
            ) from error
        if not text:
            self._inbox.put_nowait("")
            return None
        return await read_answer(text, expected)

    def _failure(self, answer: Any) -> InfraError:
        if answer is None:
            return InfraError(self._end or "The OpenEnv session is not open; begin it first.")
        if isinstance(answer, Refusal):
            kind = answer.code or "an error without a code"
            return InfraError(f"The OpenEnv server at {self._address.http_url!r} answered {kind}: {answer.text}.")
        return InfraError(f"The OpenEnv server at {self._address.http_url!r} answered {answer!r:.200}.")


def _is_full(answer: Any) -> bool:
    return isinstance(answer, Refusal) and answer.code == "CAPACITY_REACHED"


def _why_closed(url: str, socket: Any, limits: SessionLimits) -> str:
    if socket.close_code == 1009:
        return f"A message of {url!r} was longer than max_message_bytes={limits.max_message_bytes}; raise it."
    return f"The OpenEnv server at {url!r} closed the session (code {socket.close_code})."
