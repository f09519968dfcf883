"""What a failed call means: by its status, by the exception's class, and by what the server said."""

from __future__ import annotations

import errno
import json

from verifiers.errors import OverlongPromptError, ProviderError
from verifiers.rollouts.overflow import is_context_overflow
from verifiers.rollouts.retries import RetryableError, is_retryable_status, retry_after_s

__all__ = ["broke", "client_error", "reason", "status_error"]

# a connection that was there and is lost: the system's numbers, and classes of aiohttp's and httpx's
_LOST = frozenset({errno.ECONNRESET, errno.ECONNABORTED, errno.EPIPE})
_BREAKS = frozenset({"ServerDisconnectedError", "ClientPayloadError", "ReadError", "RemoteProtocolError"})


def status_error(url: str, status: int, text: str, retry_after: float | None) -> Exception:
    if is_context_overflow(status, text):
        return OverlongPromptError(_server_message(text))
    message = f"{url} answered {status}: {_server_message(text)}"
    if _may_pass(status, text):
        return RetryableError(message, status=status, body=text, retry_after_s=retry_after)
    return ProviderError(message, status=status, body=text)


def _may_pass(status: int, text: str) -> bool:
    # an account without money answers 429 too, and waiting does not fill it
    return is_retryable_status(status) and not (status == 429 and "insufficient_quota" in text)


def client_error(base_url: str, error: Exception) -> Exception:
    """What an exception of a foreign client means; its class and status decide, its text is kept."""
    status = getattr(error, "status_code", None)
    text = f"{type(error).__name__}: {error}"
    if is_context_overflow(status, text):
        return OverlongPromptError(str(error))
    headers = getattr(getattr(error, "response", None), "headers", None) or {}
    if isinstance(status, int):
        if _may_pass(status, text):
            return RetryableError(text, status=status, body=text, retry_after_s=retry_after_s(headers))
        return ProviderError(text, status=status, body=text)
    unreadable = isinstance(error, json.JSONDecodeError) or type(error).__name__ == "APIResponseValidationError"
    no_answer = type(error).__name__ in ("APIConnectionError", "APITimeoutError")
    if unreadable or no_answer or isinstance(error, (ConnectionError, TimeoutError)):
        broken = type(error).__name__ == "APIConnectionError" or isinstance(error, ConnectionError)
        return RetryableError(f"{base_url or 'the client'}: {text}", unreachable=broken, broke=broke(error))
    return error


def broke(error: BaseException) -> bool:
    """Whether a connection was lost that had been there, by class or by what the system says."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in _LOST
    cause = error.__cause__
    return type(error).__name__ in _BREAKS or (cause is not None and type(cause).__name__ in _BREAKS)


def _server_message(text: str) -> str:
    """The sentence inside an OpenAI error body, or the start of the body."""
    try:
        error = json.loads(text)
        inner = error.get("error", error) if isinstance(error, dict) else error
        message = inner.get("message") or inner.get("detail") if isinstance(inner, dict) else inner
        return str(message or text)[:500]
    except (ValueError, AttributeError):
        return text[:500] or "(empty body)"


def reason(error: BaseException) -> str:
    return str(error) or type(error).__name__
