"""A small blocking client for a rollout server's control routes, named as vLLM names them."""

from __future__ import annotations

import json
import logging
import time
import urllib.error
import urllib.request
from typing import Any

from verifiers.errors import WeightSyncError

__all__ = ["ServerControl"]

logger = logging.getLogger("verifiers.train")


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
            text = error.read().decode(errors="replace")[:1000]
            raise WeightSyncError(f"{method} {self.root}{path} was answered {error.code}: {text}") from error
        except (OSError, TimeoutError) as error:
            reason = getattr(error, "reason", error)
            raise WeightSyncError(f"{method} {self.root}{path} got no answer: {reason}") from error
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
                        f"the rollout server at {self.root} did not answer within {deadline_s:g} s (server_wait): "
                        f"{error}; start it first, for example with: vf-serve --model DIR"
                    ) from error
            if not told:
                logger.warning("waiting up to %g s for the rollout server at %s", deadline_s, self.root)
                told = True
            time.sleep(min(0.25, max(0.0, deadline - time.monotonic())))

    def model_name(self) -> str:
        """The first model that the server offers."""
        models = (self.request("GET", "/v1/models") or {}).get("data") or []
        if not models:
            raise WeightSyncError(f"{self.root}/v1/models lists no model.")
        return str(models[0]["id"])
