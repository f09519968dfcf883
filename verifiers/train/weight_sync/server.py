"""A small blocking client for a rollout server's control routes, named as vLLM names them."""

from __future__ import annotations

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
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

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
            with error:
                text = error.read().decode(errors="replace")[:1000]
            raise RefusedError(f"{method} {self.root}{path} was answered {error.code}: {text}", error.code) from error
        except OSError as error:
            reason = getattr(error, "reason", error)
            late = isinstance(error, TimeoutError) or isinstance(reason, TimeoutError)
            raise NoAnswerError(f"{method} {self.root}{path} got no answer: {reason}", timed_out=late) from error
        except (urllib.error.URLError, ConnectionError, ValueError) as error:
            raise NoAnswerError(f"{method} {self.root}{path} got no answer: {error}") from error
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

    def weight_version(self, timeout_s: float | None = None) -> str:
        """What the server calls the weights it holds; a server that was never pushed to says "default"."""
        answer = self.request("GET", "/weight_info", timeout_s=timeout_s)
        return str((answer or {}).get("weight_version"))

    def model_name(self) -> str:
        """The first model that the server offers."""
        models = (self.request("GET", "/v1/models") or {}).get("data") or []
        if not models:
            raise WeightSyncError(f"{self.root}/v1/models lists no model.")
        return str(models[0]["id"])
