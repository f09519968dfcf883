"""Faults of the fakes: what can go wrong with a request, and with which."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from verifiers.errors import ConfigError


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
        return {} if self.retry_after is None else {"Retry-After": f"{self.retry_after}"}

    @property
    def text(self) -> str:
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


def fault_schedule(faults: Faults) -> Callable[[int], Fault | None]:
    """Return the function that gives the fault of a request, which are numbered from 0."""
    if callable(faults) and not isinstance(faults, Fault):
        return faults
    listed: list[Fault | None] = []
    for entry in [faults] if isinstance(faults, Fault) else faults or ():
        if entry is not None and not isinstance(entry, Fault):
            raise ConfigError(f"a fault schedule holds {entry!r}; each entry must be a Fault or None.")
        listed += [entry] * (entry.times if entry is not None else 1)
    return lambda number: listed[number] if number < len(listed) else None
