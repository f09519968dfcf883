"""Faults of an endpoint, and the requests that they hit."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from verifiers.errors import ConfigError

__all__ = ["Fault", "FaultSchedule", "Faults"]


@dataclass(frozen=True, slots=True)
class Fault:
    """One way in which a request fails.

    Attributes:
        status: HTTP status, default 500. A status of 200 with a `body` sends that body as the answer.
        times: how many requests in a row it befalls, in a schedule; default 1.
        retry_after: value of the Retry-After header: seconds, or an HTTP date as text; default no header.
        body: text, or a dict sent as JSON; default an error object in OpenAI's format.
        kind: use the class methods for those other than "status".
    """

    status: int = 500
    times: int = 1
    retry_after: float | str | None = None
    body: str | dict[str, Any] | None = None
    kind: Literal["status", "disconnect", "hang", "malformed"] = "status"

    @classmethod
    def disconnect(cls, times: int = 1) -> Fault:
        """Make a fault that cuts the connection before an answer."""
        return cls(times=times, kind="disconnect")

    @classmethod
    def hang(cls, times: int = 1) -> Fault:
        """Make a fault that gives no answer until the caller gives up or the server stops."""
        return cls(times=times, kind="hang")

    @classmethod
    def malformed(cls, times: int = 1) -> Fault:
        """Make a fault of status 200 with JSON that breaks off in the middle."""
        return cls(status=200, times=times, body='{"id": "fake", "choices": [{"mess', kind="malformed")

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the answer that are not about its body."""
        return {} if self.retry_after is None else {"Retry-After": f"{self.retry_after}"}

    @property
    def text(self) -> str:
        """The body of the answer."""
        if isinstance(self.body, str):
            return self.body
        body = self.body
        if body is None:
            error = {"message": f"scripted fault {self.status}", "type": "fake_fault", "code": self.status}
            body = {"error": error}
        return json.dumps(body)


Faults = Fault | Sequence[Fault | None] | Callable[[int], Fault | None] | None
"""Schedule of faults. A Fault hits the first `times` requests. In a list each entry is one request: None is answered,
a Fault counts for its `times` requests, and all after the list are answered. A function decides by request number."""


class FaultSchedule:
    """Faults of requests, which are numbered from 0.

    Raises:
        ConfigError: an entry that is neither a Fault nor None.
    """

    def __init__(self, faults: Faults) -> None:
        self._decide: Callable[[int], Fault | None] | None = None
        self._listed: list[Fault | None] = []
        if isinstance(faults, Fault) or not callable(faults):
            entries = [faults] if isinstance(faults, Fault) else list(faults or ())
            for entry in entries:
                if entry is not None and not isinstance(entry, Fault):
                    raise ConfigError(f"a fault schedule holds {entry!r}; each entry must be a Fault or None.")
                self._listed += [entry] * (entry.times if entry is not None else 1)
        else:
            self._decide = faults

    def fault(self, number: int) -> Fault | None:
        """Return the fault of request number `number`, or None."""
        if self._decide is not None:
            return self._decide(number)
        return self._listed[number] if number < len(self._listed) else None
