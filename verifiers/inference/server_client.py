"""Client of a rollout server's control routes, under the names that vLLM gives them."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from typing import TYPE_CHECKING, Any

from verifiers.errors import WeightSyncError

if TYPE_CHECKING:
    import aiohttp

__all__ = ["NoAnswerError", "RefusedError", "ServerClient", "time_left"]

logger = logging.getLogger("verifiers.train")

_POLL_S = 0.25
# without a limit of its own, connecting to a host that is down takes minutes
_CONNECT_S = 5.0


class NoAnswerError(WeightSyncError):
    """The server could not be reached, or did not answer in time; it may be restarting.

    Attributes:
        timed_out: the server was reached, but was too slow.
    """

    def __init__(self, message: str, *, timed_out: bool = False) -> None:
        super().__init__(message)
        self.timed_out = timed_out


class RefusedError(WeightSyncError):
    """The server answered with an error.

    Attributes:
        status: the HTTP status.
    """

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def time_left(deadline: float) -> float:
    """Return the seconds until a deadline of time.monotonic, at least 0.1."""
    return max(0.1, deadline - time.monotonic())


class ServerClient:
    """Asynchronous client of the routes that pause, load, version and describe one rollout server.

    Each request has a connection of its own, so it reaches the process that listens at that moment, and no proxy of
    the environment stands in between.

    Args:
        base_url: of the OpenAI surface, with or without "/v1".
        api_key: bearer token of that surface.
        timeout_s: deadline of one request, in seconds.
    """

    def __init__(self, base_url: str, api_key: str = "EMPTY", timeout_s: float = 60.0) -> None:
        self.root = base_url.rstrip("/").removesuffix("/v1")
        self.timeout_s = timeout_s
        self._headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}

    @property
    def url(self) -> str:
        """Base URL of the OpenAI surface, with /v1."""
        return self.root + "/v1"

    async def request(self, method: str, path: str, body: Any = None, timeout_s: float | None = None) -> Any:
        """Return the parsed JSON of a 2xx answer (None for an empty one).

        Raises:
            NoAnswerError: unreachable or too late.
            RefusedError: answered with an error; the message quotes the beginning of its text.
        """
        import aiohttp

        limit_s = timeout_s or self.timeout_s
        connect_s = min(_CONNECT_S, 0.9 * limit_s)
        timeout = aiohttp.ClientTimeout(total=limit_s, sock_connect=connect_s)
        data = None if body is None else json.dumps(body).encode()
        asked = f"{method} {self.root}{path}"
        try:
            async with (
                aiohttp.ClientSession(headers=self._headers, timeout=timeout) as session,
                session.request(method, self.root + path, data=data) as response,
            ):
                if response.status >= 300:
                    text = await _error_text(response)
                    raise RefusedError(f"{asked} was answered {response.status}: {text}", response.status)
                content = await response.read()
        except aiohttp.ConnectionTimeoutError as error:
            raise NoAnswerError(f"{asked} got no answer: no connection within {connect_s:.3g} s") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            late = isinstance(error, TimeoutError)
            reason = "timed out" if late else str(error) or type(error).__name__
            raise NoAnswerError(f"{asked} got no answer: {reason}", timed_out=late) from error
        try:
            return json.loads(content) if content else None
        except ValueError:
            return content.decode(errors="replace")

    async def wait_until_healthy(self, deadline_s: float) -> None:
        """Poll /health until it is answered 200.

        Raises:
            WeightSyncError: it was not within `deadline_s` seconds.
        """
        deadline = time.monotonic() + deadline_s
        warned = False
        while True:
            try:
                await self.request("GET", "/health", timeout_s=_CONNECT_S)
                return
            except WeightSyncError as error:
                problem = error
                if time.monotonic() >= deadline:
                    raise WeightSyncError(
                        f"the rollout server at {self.root} did not answer within {deadline_s:.3g} s (server_wait): "
                        f"{error}; start it first, for example with: vf-serve --model DIR, or vf-vllm --model NAME"
                    ) from error
            if not warned:
                logger.warning("waiting up to %g s for the rollout server: %s", deadline_s, problem)
                warned = True
            await asyncio.sleep(min(_POLL_S, max(0.0, deadline - time.monotonic())))

    async def is_healthy(self, timeout_s: float) -> bool:
        """Return True if /health is answered 200 within `timeout_s` seconds."""
        try:
            await self.request("GET", "/health", timeout_s=timeout_s)
        except WeightSyncError:
            return False
        return True

    async def weight_version(self, timeout_s: float | None = None) -> str:
        """Return the name of the weights that the server holds; "default" before the first push."""
        answer = await self.request("GET", "/weight_info", timeout_s=timeout_s)
        if not isinstance(answer, dict):
            raise WeightSyncError(f"{self.root}/weight_info answers {answer!r:.100}, which names no version.")
        return str(answer.get("weight_version"))

    async def model_name(self) -> str:
        """Return the first model that the server lists."""
        answer = await self.request("GET", "/v1/models")
        models = (answer.get("data") if isinstance(answer, dict) else None) or []
        if not models:
            raise WeightSyncError(f"{self.root}/v1/models lists no model.")
        return str(models[0]["id"])


async def _error_text(response: aiohttp.ClientResponse) -> str:
    """Return the beginning of an error's text, as far as it was received."""
    import aiohttp

    try:
        return (await response.read()).decode(errors="replace")[:1000]
    except (aiohttp.ClientError, OSError) as broken:
        return f"(its text broke off: {broken!r:.100})"
