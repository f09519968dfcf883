"""One episode on an OpenEnv server, over a WebSocket of its own.

The protocol is that of openenv-core: JSON texts `{"type": "reset" | "step" | "state" | "close", "data": {...}}` one
way, `{"type": "observation" | "state" | "error", "data": {...}}` the other, one answer for each request but `close`.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from verifiers.errors import ConfigError, InfraError

# errors of a policy's action, as opposed to those of the server or the session
_ACTION_ERRORS = ("VALIDATION_ERROR", "EXECUTION_ERROR")
_LARGE_CHARS = 1 << 18  # a JSON text longer than this is parsed in a thread


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """Bounds of one session; times in seconds.

    Attributes:
        connect_timeout_s: for the WebSocket's handshake, and for each of the server's plain routes.
        message_timeout_s: for each answer of the server.
        capacity_timeout_s: time during which a full server may refuse sessions while it holds none of ours.
        close_timeout_s: for the server to end the session.
        max_message_bytes: of one message, either way.
    """

    connect_timeout_s: float = 10.0
    message_timeout_s: float = 60.0
    capacity_timeout_s: float = 300.0
    close_timeout_s: float = 2.0
    max_message_bytes: int = 32 << 20


@dataclass(frozen=True, slots=True)
class Step:
    """The environment's answer to a reset or a step.

    Attributes:
        observation: the environment's own fields, nearly always a dict.
        reward: of this step; None where the server gave none.
        done: True where the episode is over.
    """

    observation: Any
    reward: float | None = None
    done: bool = False


@dataclass(frozen=True, slots=True)
class Refusal:
    """An error answered by the server.

    Attributes:
        code: one of openenv-core's codes, e.g. "VALIDATION_ERROR", or "" where the server gave none.
        text: the reason, for a reader.
    """

    code: str
    text: str


class OpenEnvSession:
    """One episode on a server: `open`, then `reset` and `step`, then `close`. For one task at a time.

    A task of its own reads the socket, so that a server's pings are answered while the policy generates.

    Args:
        base_url: of the server; "http" or "ws".
    """

    def __init__(self, base_url: str, headers: Mapping[str, str], limits: SessionLimits) -> None:
        self.url = re.sub(r"^http", "ws", base_url) + "/ws"
        self._headers = dict(headers)
        self._limits = limits
        self._http: Any = None
        self._socket: Any = None
        self._reader: asyncio.Task[None] | None = None
        self._inbox: asyncio.Queue[str | None] = asyncio.Queue(16)
        self._end = ""

    async def open(self) -> None:
        """Connect.

        Raises:
            InfraError: no WebSocket opened.
        """
        import aiohttp

        limits = self._limits
        self._http = aiohttp.ClientSession(headers=self._headers)
        try:
            async with asyncio.timeout(limits.connect_timeout_s):
                self._socket = await self._http.ws_connect(
                    self.url,
                    max_msg_size=limits.max_message_bytes,
                    timeout=aiohttp.ClientWSTimeout(ws_close=limits.close_timeout_s),
                )
        except TimeoutError as error:
            seconds = f"connect_timeout_s={limits.connect_timeout_s:g}"
            raise InfraError(f"No WebSocket opened at {self.url!r} within {seconds}.") from error
        except aiohttp.WSServerHandshakeError as error:
            raise InfraError(
                f"The server at {self.url!r} answered {error.status}; give the base_url of an OpenEnv server, and "
                "its headers if it asks for a key."
            ) from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise InfraError(f"The connection to {self.url!r} failed: {error or type(error).__name__}.") from error
        self._reader = asyncio.create_task(self._read(), name="openenv-session")

    async def reset(self, arguments: Mapping[str, Any]) -> Step | Refusal | None:
        """Start the episode; None where the session ended before an answer."""
        return await self._exchange(_encoded("reset", arguments), "observation")

    async def step(self, action: Mapping[str, Any]) -> Step | Refusal:
        """Take one action; a refused one leaves the episode as it was.

        Raises:
            InfraError: the session failed and cannot continue.
        """
        try:
            request = _encoded("step", action)
        except ValueError as error:
            return Refusal("VALIDATION_ERROR", f"the action {error}")
        if len(request) > self._limits.max_message_bytes // 4:
            return Refusal("VALIDATION_ERROR", f"the action is too long: {len(request)} characters")
        answer = await self._exchange(request, "observation")
        if isinstance(answer, Step) or (isinstance(answer, Refusal) and answer.code in _ACTION_ERRORS):
            return answer
        raise self.failure(answer)

    async def state(self) -> Any:
        """Return the server's own account of the episode: episode_id, step_count and the environment's fields.

        Raises:
            InfraError: the session failed.
        """
        answer = await self._exchange(_encoded("state", None), "state")
        if answer is None or isinstance(answer, Refusal):
            raise self.failure(answer)
        return answer

    async def close(self) -> None:
        """End the session; errors of the server are ignored. May be called twice."""
        http, self._http = self._http, None
        if http is None:
            return
        try:
            if self._reader is not None and not self._reader.done():
                async with asyncio.timeout(self._limits.close_timeout_s):
                    # the server frees the session before it hangs up: then the next one finds room
                    await self._socket.send_str(_encoded("close", None))
                    await asyncio.wait([self._reader])
        except (TimeoutError, OSError):
            pass
        finally:
            if self._reader is not None:
                self._reader.cancel()
                await asyncio.wait([self._reader])
            await http.close()

    def failure(self, answer: Refusal | None) -> InfraError:
        """Return the error for an answer that ends the session; None stands for no answer."""
        if answer is None:
            return InfraError(self._end or f"The session at {self.url!r} is not open.")
        kind = answer.code or "an error without a code"
        return InfraError(f"The OpenEnv server at {self.url!r} answered {kind}: {answer.text}.")

    async def _read(self) -> None:
        import aiohttp

        try:
            async for message in self._socket:
                if message.type is not aiohttp.WSMsgType.TEXT:
                    break
                await self._inbox.put(message.data)
        finally:
            most = self._limits.max_message_bytes
            self._end = (
                f"A message of {self.url!r} was longer than max_message_bytes={most}; raise it."
                if self._socket.close_code == 1009
                else f"The OpenEnv server at {self.url!r} closed the session (code {self._socket.close_code})."
            )
            if not self._inbox.full():
                self._inbox.put_nowait(None)

    async def _exchange(self, request: str, expected: str) -> Any:
        """Send one request and read its answer; None where the session has ended."""
        limit_s = self._limits.message_timeout_s
        if self._http is None or self._reader is None:
            return None
        try:
            async with asyncio.timeout(limit_s):
                if not self._reader.done():
                    try:
                        await self._socket.send_str(request)
                    except OSError:
                        pass  # the server's last message has the reason
                elif self._inbox.empty():
                    return None
                text = await self._inbox.get()
        except TimeoutError as error:
            raise InfraError(
                f"The OpenEnv server at {self.url!r} did not answer within message_timeout_s={limit_s:g}."
            ) from error
        return None if text is None else await _decoded(text, expected)


def _encoded(kind: str, data: Mapping[str, Any] | None) -> str:
    """Return the JSON text of a request.

    Raises:
        ValueError: `data` holds values without a form in JSON or UTF-8 (infinities, lone surrogates).
    """
    message = {"type": kind} if data is None else {"type": kind, "data": dict(data)}
    try:
        text = json.dumps(message, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
        text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"cannot be written as JSON: {error}") from None
    return text


async def _decoded(text: str, expected: str) -> Any:
    """Return the step, state or refusal in a server's message.

    Raises:
        InfraError: it is none of the protocol's, or not the expected one.
    """
    try:
        message = await asyncio.to_thread(json.loads, text) if len(text) > _LARGE_CHARS else json.loads(text)
        kind, data = message["type"], message["data"]
        if kind == "error":
            reasons = [
                str(data.get("message") or "no reason given"),
                *map(_validation_error, data.get("errors") or ()),
            ]
            return Refusal(str(data.get("code") or ""), "; ".join(reasons).replace("; ", ": ", 1))
        if kind == "state" == expected and isinstance(data, dict):
            return data
        if kind == "observation" == expected:
            reward = data.get("reward")
            return Step(data["observation"], None if reward is None else float(reward), bool(data.get("done", False)))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise InfraError(
            f"The OpenEnv server sent a text that is not a message of the protocol ({error!r}): {text[:200]!r}."
        ) from error
    raise InfraError(f"The OpenEnv server answered {kind!r} instead of {expected!r}: {text[:200]!r}.")


def _validation_error(error: Any) -> str:
    """Return one entry of pydantic's list of errors, without the input it quotes."""
    if not isinstance(error, Mapping):
        return str(error)
    place = ".".join(map(str, error.get("loc") or ()))
    reason = str(error.get("msg") or error.get("type") or "is not valid")
    return f"{place}: {reason}" if place else reason


async def action_schema_of(base_url: str, headers: Mapping[str, str], timeout_s: float) -> Mapping[str, Any]:
    """Return the schema of a server's actions; empty where the server has none.

    Raises:
        ConfigError: something else than an OpenEnv server answers there.
        InfraError: nothing answers, or the server is unhealthy.
    """
    import aiohttp

    async def get(path: str) -> tuple[int, Any]:
        async with http.get(base_url + path) as response:
            try:
                return response.status, json.loads(await response.read())
            except ValueError:
                return response.status, None

    try:
        async with aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(total=timeout_s)) as http:
            status, health = await get("/health")
            if status >= 500 or (isinstance(health, dict) and health.get("status") == "unhealthy"):
                raise InfraError(f"The OpenEnv server at {base_url!r} is unhealthy ({status}); look at its log.")
            if status != 200 or not isinstance(health, dict) or "status" not in health:
                raise ConfigError(
                    f"No OpenEnv server is at base_url={base_url!r}: /health answered {status} instead of a status; "
                    "give the address whose /ws is the environment's, without that path."
                )
            _, schemas = await get("/schema")
    except TimeoutError as error:
        raise InfraError(f"The OpenEnv server at {base_url!r} did not answer within {timeout_s:g} s.") from error
    except (aiohttp.ClientError, OSError) as error:
        raise InfraError(
            f"Nothing answers at base_url={base_url!r} ({error}); start the OpenEnv server or correct the address."
        ) from error
    # servers older than this route still play
    schema = schemas.get("action") if isinstance(schemas, dict) else None
    return schema if isinstance(schema, dict) else {}
