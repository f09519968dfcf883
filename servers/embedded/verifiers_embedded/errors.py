"""Every exception this package raises on purpose.

EmbeddedError
├── StartError (RuntimeError)      the server cannot start; the command ends with its `exit_code`
├── ApiError (ValueError)          a request is refused; carries the HTTP status and OpenAI's error fields
├── WeightsError (ValueError)      a reload is refused before anything was copied
├── EngineDied (RuntimeError)      the engine thread ended with an exception; nothing is generated any more
├── EngineStopped (RuntimeError)   the server is shutting down
├── BrokenLogits (RuntimeError)    the model's output for one request was not a distribution
└── GrammarFailed (RuntimeError)   one request's grammar could not be followed any further
"""

from __future__ import annotations

from typing import Any


class EmbeddedError(Exception):
    """Root of this package's exceptions."""


class StartError(EmbeddedError, RuntimeError):
    """The server cannot start. `exit_code`: 2 where the command line must change, 1 otherwise."""

    def __init__(self, message: str, exit_code: int = 2) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class ApiError(EmbeddedError, ValueError):
    """A request is refused with an HTTP status and OpenAI's error object.

    Args:
        param: the request field at fault, if it is one.
        code: OpenAI's machine-readable code, e.g. ``context_length_exceeded``.
    """

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        """Return the JSON answer: ``{"error": {"message", "type", "param", "code"}}``."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {
            "error": {"message": str(self), "type": kind, "param": self.param, "code": self.code},
        }


class WeightsError(EmbeddedError, ValueError):
    """The weights given do not fit the model that is served. Nothing was copied."""


class EngineDied(EmbeddedError, RuntimeError):
    """The engine thread ended with an exception. Every waiting request is answered with it; restart the server."""


class EngineStopped(EmbeddedError, RuntimeError):
    """The server is shutting down. The request may be sent again elsewhere."""


class BrokenLogits(EmbeddedError, RuntimeError):
    """The model gave NaN or infinite logits for one request; usually the weights that were pushed have diverged."""


class GrammarFailed(EmbeddedError, RuntimeError):
    """The grammar of one request left no token, or grew beyond its limits; other requests are not affected."""
