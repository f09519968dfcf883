"""The client of a rollout server's control routes, under vLLM's names: it pauses, loads, versions and describes."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import time
from typing import Any

from verifiers.errors import WeightSyncError
from verifiers.inference.endpoint import MAX_ANSWER_MB, proxy_for, read_body
from verifiers.inference.retry import RetryPolicy, may_pass, reason, retry

logger = logging.getLogger("verifiers.train")

HEALTH_S = 5.0
"""Seconds for a question that a healthy server answers at once."""

# more tries than a rollout has: what fails here for good ends the run
CONTROL_RETRIES = RetryPolicy(max_attempts=9, cap_s=4.0)

_POLL_S = 0.25
# without a limit of its own, connecting to a host that is down takes minutes
_CONNECT_S = 5.0


class NoAnswerError(WeightSyncError, ConnectionError):
    """The server could not be reached, did not answer in time, or has lost its engine; it may be restarting.

    Attributes:
        timed_out: the server was reached, but was too slow.
    """

    def __init__(self, message: str, *, timed_out: bool = False) -> None:
        super().__init__(message)
        self.timed_out = timed_out


class RefusedError(WeightSyncError):
    """The server answered with an error."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def passes_in_place(error: BaseException) -> bool:
    """Return `may_pass`, but False for a server that is gone: to bring it back is the pool's."""
    is_gone = isinstance(error, NoAnswerError) and not error.timed_out
    return may_pass(error) and not is_gone


class ServerClient:
    """Asynchronous client of the routes that pause, load, version and describe one rollout server.

    Each request has a connection of its own, so it reaches the process that listens at that moment.

    Args:
        base_url: of the OpenAI surface, with or without "/v1".
        api_key: bearer token of that surface.
    """

    def __init__(self, base_url: str, api_key: str = "EMPTY", timeout_s: float = 60.0) -> None:
        self.root = base_url.rstrip("/").removesuffix("/v1")
        self.timeout_s = timeout_s
        self._headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}

    @property
    def url(self) -> str:
        return self.root + "/v1"

    @functools.cached_property
    def _proxy(self) -> str | None:
        # looked up once, where aiohttp would do it for every request
        return proxy_for(self.root)

    async def request(self, method: str, path: str, body: Any = None, timeout_s: float | None = None) -> Any:
        """Return the parsed JSON of a 2xx answer (None for an empty one).

        Raises:
            NoAnswerError: unreachable, too late, or an error of a server whose engine is gone.
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
                aiohttp.ClientSession(headers=self._headers, timeout=timeout, proxy=self._proxy) as session,
                session.request(method, self.root + path, data=data) as response,
            ):
                status = response.status
                content = await read_body(response, MAX_ANSWER_MB)
        except aiohttp.ConnectionTimeoutError as error:
            raise NoAnswerError(f"{asked} got no answer: no connection within {connect_s:.3g} s") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            late = isinstance(error, TimeoutError)
            why = "timed out" if late else reason(error)
            raise NoAnswerError(f"{asked} got no answer: {why}", timed_out=late) from error
        if status >= 300:
            text = f"{asked} was answered {status}: {content[:1000].decode(errors='replace')}"
            if status >= 500 and path != "/health" and not await self.is_up(min(HEALTH_S, limit_s)):
                raise NoAnswerError(f"{text}; and {self.root}/health says that it is not up")
            raise RefusedError(text, status)
        try:
            return json.loads(content) if content else None
        except (ValueError, RecursionError):
            return content.decode(errors="replace")

    async def ask(self, method: str, path: str, body: Any = None, timeout_s: float | None = None) -> Any:
        """Return what `request` gives, tried again where that failed and may pass; for what may be asked twice."""
        return await retry(lambda: self.request(method, path, body, timeout_s), CONTROL_RETRIES, log_retry)

    async def wait_until_up(self, deadline_s: float) -> None:
        """Poll /health until it answers.

        Raises:
            WeightSyncError: it did not within `deadline_s` seconds.
        """
        deadline = time.monotonic() + deadline_s
        warned = False
        while (problem := await self._why_down(_CONNECT_S)) is not None:
            if time.monotonic() >= deadline:
                raise WeightSyncError(
                    f"the rollout server at {self.root} did not answer within {deadline_s:.3g} s (server_wait): "
                    f"{problem}; start it first, for example with: vf-serve --model DIR, or vf-vllm --model NAME"
                ) from problem
            if not warned:
                logger.warning("waiting up to %g s for the rollout server: %s", deadline_s, problem)
                warned = True
            await asyncio.sleep(min(_POLL_S, max(0.0, deadline - time.monotonic())))

    async def is_up(self, timeout_s: float) -> bool:
        """Return whether /health is answered in time, and not with a 5xx: a provider lacks the route."""
        return await self._why_down(timeout_s) is None

    async def _why_down(self, timeout_s: float) -> WeightSyncError | None:
        try:
            await self.request("GET", "/health", timeout_s=timeout_s)
        except NoAnswerError as error:
            return error
        except RefusedError as error:
            return error if error.status >= 500 else None
        return None

    async def weight_version(self, timeout_s: float | None = None) -> str:
        """Return the name of the weights that the server holds; "default" before the first push."""
        answer = await self.request("GET", "/weight_info", timeout_s=timeout_s)
        if not isinstance(answer, dict):
            raise WeightSyncError(f"{self.root}/weight_info answers {answer!r:.100}, which names no version.")
        return str(answer.get("weight_version"))

    async def model_name(self) -> str:
        answer = await self.ask("GET", "/v1/models")
        try:
            return str(answer["data"][0]["id"])
        except (LookupError, TypeError) as error:
            raise WeightSyncError(f"{self.root}/v1/models lists no model: {answer!r:.200}") from error


def log_retry(error: Exception) -> None:
    logger.warning("%s; asking again", error)
