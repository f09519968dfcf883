"""A small blocking client for a rollout server's control routes, named as vLLM names them."""

from __future__ import annotations

import http.client
import json
import logging
import time
import urllib.error
import urllib.request
from typing import Any

from verifiers.errors import WeightSyncError

__all__ = ["NoAnswerError", "RefusedError", "ServerControl"]

logger = logging.getLogger("verifiers.train")

_POLL_S = 0.25
# a host that is gone answers no connection, and the system would go on asking for minutes
_CONNECT_S = 5.0


class NoAnswerError(WeightSyncError):
    """The server could not be reached, or did not answer in time; it may be starting again.

    Attributes:
        timed_out: it was reached, but too slow.
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


class ServerControl:
    """Talks to the routes that pause, load, version and describe a rollout server.

    Args:
        base_url: of the OpenAI surface, with or without "/v1".
        api_key: bearer token of that surface.
        timeout_s: deadline of one request, in seconds.
    """

    def __init__(self, base_url: str, api_key: str = "EMPTY", timeout_s: float = 60.0) -> None:
        self.root = base_url.rstrip("/").removesuffix("/v1")
        self.timeout_s = timeout_s
        self._headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
        # a proxy from the environment must not stand between two processes of one run
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _Http(), _Https())

    @property
    def url(self) -> str:
        """Base URL of the OpenAI surface, with /v1."""
        return self.root + "/v1"

    def request(self, method: str, path: str, body: Any = None, timeout_s: float | None = None) -> Any:
        """The parsed JSON of a 2xx answer (None for an empty one).

        Raises:
            WeightSyncError: refused, unreachable or too late; the message has the server's own words.
        """
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.root + path, data=data, headers=self._headers, method=method)
        try:
            with self._opener.open(request, timeout=timeout_s or self.timeout_s) as response:
                content = response.read()
        except urllib.error.HTTPError as error:
            raise RefusedError(
                f"{method} {self.root}{path} was answered {error.code}: {_text_of(error)}", error.code
            ) from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = getattr(error, "reason", error)
            late = isinstance(error, TimeoutError) or isinstance(reason, TimeoutError)
            raise NoAnswerError(
                f"{method} {self.root}{path} got no answer: {str(reason) or type(reason).__name__}", timed_out=late
            ) from error
        try:
            return json.loads(content) if content else None
        except ValueError:
            return content.decode(errors="replace")

    def wait_until_healthy(self, deadline_s: float) -> None:
        """Poll /health until it answers 200.

        Raises:
            WeightSyncError: it did not within `deadline_s` seconds.
        """
        deadline = time.monotonic() + deadline_s
        told = False
        while True:
            try:
                self.request("GET", "/health", timeout_s=5.0)
                return
            except WeightSyncError as error:
                if time.monotonic() >= deadline:
                    raise WeightSyncError(
                        f"the rollout server at {self.root} did not answer within {deadline_s:.3g} s (server_wait): "
                        f"{error}; start it first, for example with: vf-serve --model DIR, or vf-vllm --model NAME"
                    ) from error
            if not told:
                logger.warning("waiting up to %g s for the rollout server at %s", deadline_s, self.root)
                told = True
            time.sleep(min(_POLL_S, max(0.0, deadline - time.monotonic())))

    def is_healthy(self, timeout_s: float) -> bool:
        """Whether /health is answered 200 within so many seconds."""
        try:
            self.request("GET", "/health", timeout_s=timeout_s)
        except WeightSyncError:
            return False
        return True

    def weight_version(self, timeout_s: float | None = None) -> str:
        """What the server calls the weights it holds; a server that was never pushed to says "default"."""
        answer = self.request("GET", "/weight_info", timeout_s=timeout_s)
        if not isinstance(answer, dict):
            raise WeightSyncError(f"{self.root}/weight_info answers {answer!r:.100}, which names no version.")
        return str(answer.get("weight_version"))

    def model_name(self) -> str:
        """The first model that the server offers."""
        answer = self.request("GET", "/v1/models")
        models = (answer.get("data") if isinstance(answer, dict) else None) or []
        if not models:
            raise WeightSyncError(f"{self.root}/v1/models lists no model.")
        return str(models[0]["id"])


def _text_of(error: urllib.error.HTTPError) -> str:
    """The beginning of what an error's answer says, as far as it came."""
    with error:
        try:
            return error.read().decode(errors="replace")[:1000]
        except (OSError, http.client.HTTPException) as broken:
            return f"(its text broke off: {broken!r:.100})"


class _Connection(http.client.HTTPConnection):
    """One whose making has a deadline of its own, and is told apart from an answer that is late."""

    def connect(self) -> None:
        whole_s = self.timeout or _CONNECT_S
        self.timeout = min(_CONNECT_S, whole_s)
        try:
            super().connect()
        except TimeoutError as error:
            raise ConnectionError(f"no connection within {self.timeout:.3g} s") from error
        finally:
            self.timeout = whole_s
        self.sock.settimeout(whole_s)


class _SecureConnection(_Connection, http.client.HTTPSConnection):
    pass


class _Http(urllib.request.HTTPHandler):
    def http_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_Connection, request)


class _Https(urllib.request.HTTPSHandler):
    def https_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_SecureConnection, request)
