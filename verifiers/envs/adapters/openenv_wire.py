"""What is said to an OpenEnv server: its address, its self-description, and the messages of its WebSocket.

The protocol is that of openenv-core: JSON texts `{"type": "reset" | "step" | "state" | "close", "data": {...}}` one
way, `{"type": "observation" | "state" | "error", "data": {...}}` the other, one answer for each request but `close`.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from verifiers.errors import ConfigError, InfraError

__all__ = ["OpenEnvAddress", "OpenEnvServer", "Refusal", "Step", "describe_server", "encode_request", "read_answer"]

# of a policy's action, as opposed to what is wrong with the server or the session
_OF_THE_ACTION = frozenset({"VALIDATION_ERROR", "EXECUTION_ERROR"})
_LARGE_CHARS = 1 << 18  # a JSON text longer than this is parsed in a thread


@dataclass(frozen=True, slots=True)
class OpenEnvAddress:
    """Where an OpenEnv server is.

    Attributes:
        base_url: "http://host:port" or "ws://host:port"; a path before `/ws` may follow.
        headers: sent with every request, e.g. an Authorization; never logged.
    """

    base_url: str
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.base_url, str) or not re.match(r"(https?|wss?)://[^/\s]", self.base_url):
            raise ConfigError(
                f"base_url is {self.base_url!r}; give an OpenEnv server's address, like 'http://127.0.0.1:8000'."
            )

    @property
    def http_url(self) -> str:
        """Base of the plain routes, without a slash at its end."""
        base = self.base_url.rstrip("/").removesuffix("/ws")
        return re.sub(r"^ws", "http", base)

    @property
    def ws_url(self) -> str:
        """Of the WebSocket."""
        return re.sub(r"^http", "ws", self.http_url) + "/ws"


@dataclass(frozen=True, slots=True)
class Step:
    """What the environment answers to a reset or a step.

    Attributes:
        observation: the environment's own fields, nearly always a dict.
        reward: of this step; None where the server gave none.
        done: the episode is over.
    """

    observation: Any
    reward: float | None = None
    done: bool = False
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Refusal:
    """An error that a server answered.

    Attributes:
        code: one of openenv-core's codes, e.g. "VALIDATION_ERROR", or "" where the server gave none.
        text: what is wrong, for a reader.
        max_sessions: with CAPACITY_REACHED, how many sessions the server takes at once.
    """

    code: str
    text: str
    max_sessions: int | None = None

    @property
    def is_of_the_action(self) -> bool:
        """True where the session lives on, and another action may be taken."""
        return self.code in _OF_THE_ACTION


@dataclass(frozen=True, slots=True)
class OpenEnvServer:
    """What a server says about itself; schemas are empty where it does not tell."""

    name: str = ""
    description: str = ""
    action_schema: Mapping[str, Any] = field(default_factory=dict)
    observation_schema: Mapping[str, Any] = field(default_factory=dict)


def encode_request(kind: Literal["reset", "step", "state", "close"], data: Mapping[str, Any] | None = None) -> str:
    """The JSON text of a request.

    Raises:
        ValueError: `data` holds what JSON or UTF-8 has no form for (infinities, lone surrogates).
    """
    message = {"type": kind} if data is None else {"type": kind, "data": dict(data)}
    try:
        text = json.dumps(message, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
        text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"cannot be written as JSON: {error}") from None
    return text


async def read_answer(text: str, expected: Literal["observation", "state"]) -> Step | dict[str, Any] | Refusal:
    """What a server's message means.

    Raises:
        InfraError: it is none of the protocol's.
    """
    try:
        message = await asyncio.to_thread(json.loads, text) if len(text) > _LARGE_CHARS else json.loads(text)
        kind, data = message["type"], message["data"]
        if kind == "error":
            return _refusal(data)
        if kind == "state" == expected and isinstance(data, dict):
            return data
        if kind == "observation" == expected:
            return _step(data)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise InfraError(
            f"The OpenEnv server sent what is no message of the protocol ({error!r}): {text[:200]!r}."
        ) from error
    raise InfraError(f"The OpenEnv server answered {kind!r} where {expected!r} was due: {text[:200]!r}.")


def _step(data: Mapping[str, Any]) -> Step:
    reward = data.get("reward")
    return Step(
        observation=data["observation"],
        reward=None if reward is None else float(reward),
        done=bool(data.get("done", False)),
        metadata=data.get("metadata") or {},
    )


def _refusal(data: Mapping[str, Any]) -> Refusal:
    text = str(data.get("message") or "no reason given")
    if details := data.get("errors"):
        text = f"{text}: {'; '.join(map(_validation_error, details))}"
    most = data.get("max_sessions")
    return Refusal(str(data.get("code") or ""), text, most if isinstance(most, int) and most > 0 else None)


def _validation_error(error: Any) -> str:
    """One entry of pydantic's list of errors, without the input it quotes."""
    if not isinstance(error, Mapping):
        return str(error)
    place = ".".join(map(str, error.get("loc") or ()))
    what = str(error.get("msg") or error.get("type") or "is not valid")
    return f"{place}: {what}" if place else what


async def describe_server(address: OpenEnvAddress, timeout_s: float = 10.0) -> OpenEnvServer:
    """Ask `/health`, `/schema` and `/metadata`.

    Raises:
        ConfigError: something else than an OpenEnv server answers there.
        InfraError: nothing answers, or the server says that it is unhealthy.
    """
    import aiohttp

    url = address.http_url
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    try:
        async with aiohttp.ClientSession(headers=dict(address.headers), timeout=timeout) as http:
            status, health = await _get(http, f"{url}/health")
            if status >= 500:
                raise InfraError(f"The OpenEnv server at {url!r} answered {status} to /health; look at its log.")
            if status != 200 or not isinstance(health, dict) or "status" not in health:
                raise ConfigError(
                    f"No OpenEnv server is at base_url={url!r}: /health answered {status} instead of a status; "
                    "give the address whose /ws is the environment's, without that path."
                )
            if health["status"] == "unhealthy":
                raise InfraError(f"The OpenEnv server at {url!r} says that it is unhealthy; look at its log.")
            # servers older than these routes still play
            _, schema = await _get(http, f"{url}/schema")
            _, metadata = await _get(http, f"{url}/metadata")
    except TimeoutError as error:
        raise InfraError(f"The OpenEnv server at {url!r} did not answer within {timeout_s:g} s.") from error
    except (aiohttp.ClientError, OSError) as error:
        raise InfraError(
            f"Nothing answers at base_url={url!r} ({error}); start the OpenEnv server or correct the address."
        ) from error
    schema = schema if isinstance(schema, dict) else {}
    metadata = metadata if isinstance(metadata, dict) else {}
    return OpenEnvServer(
        name=str(metadata.get("name") or ""),
        description=str(metadata.get("description") or ""),
        action_schema=_object(schema.get("action")),
        observation_schema=_object(schema.get("observation")),
    )


async def _get(http: Any, url: str) -> tuple[int, Any]:
    async with http.get(url) as response:
        content = await response.read()
        try:
            return response.status, json.loads(content)
        except ValueError:
            return response.status, None


def _object(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
