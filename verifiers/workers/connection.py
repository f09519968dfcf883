"""Messages between rank 0 and a worker: lines of JSON over a socket.

What is sent in one iteration of the event loop is written at once, so that the cost of a system call is shared.
"""

from __future__ import annotations

import asyncio
import builtins
import json
import traceback
from collections.abc import Callable, Mapping
from typing import Any, cast

from verifiers import errors
from verifiers.errors import ConfigError, WorkerCallError
from verifiers.inference.limiter import NoMoreSlotsError

Message = dict[str, Any]

ROW_FIELDS = ("prompt", "answer", "task", "info")
"""Fields of a row of a dataset that a worker gets."""

# made once: `json.dumps` makes an encoder for each call that asks for separators
_encode = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode


class Connection(asyncio.Protocol):
    """One end of the socket between rank 0 and a worker.

    Args:
        on_lost: called once when the other end is gone, or when a message could not be read.
    """

    def __init__(self, on_message: Callable[[Message], None], on_lost: Callable[[], None]) -> None:
        self._on_message, self._on_lost = on_message, on_lost
        self._transport: asyncio.Transport | None = None
        self._received: list[bytes] = []
        self._lines: list[str] = []
        self._is_lost = False

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message; one to an end that is gone is dropped.

        Raises:
            ConfigError: a value that is not JSON, with the name of its field.
        """
        try:
            text = _encode(message)
        except (TypeError, ValueError, RecursionError):
            refuse_unsendable(message)
            raise
        if self._transport is None or self._is_lost:
            return
        if not self._lines:
            asyncio.get_running_loop().call_soon(self._flush)
        self._lines.append(f"{text}\n")

    async def close(self) -> None:
        """Send what is left and close the socket; `on_lost` is called."""
        self._flush()
        if self._transport is not None:
            self._transport.close()
            # it is closed one iteration of the loop later, and the loop may end with this call
            await asyncio.sleep(0)

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _flush(self) -> None:
        lines, self._lines = self._lines, []
        if lines and self._transport is not None and not self._is_lost:
            self._transport.write("".join(lines).encode())

    # -- called by the event loop ---------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        # a long message comes in many pieces, which are joined once
        head, newline, rest = data.rpartition(b"\n")
        if newline:
            for line in (b"".join(self._received) + head).split(b"\n"):
                self._on_message(json.loads(line))
            self._received.clear()
        self._received.append(rest)

    def connection_lost(self, error: Exception | None) -> None:
        if not self._is_lost:
            self._is_lost = True
            self._on_lost()


def refuse_unsendable(message: Mapping[str, Any]) -> None:
    """Raise ConfigError, with the name of the field, where a message holds what is not JSON."""
    found = _unsendable(message, "")
    if found is not None:
        raise ConfigError(
            f"{found} and cannot travel between rank 0 and a rollout worker; leave it out or make it text."
        )


def _unsendable(value: Any, name: str) -> str | None:
    """Return which field is not JSON, as the beginning of a sentence."""
    if value is None or isinstance(value, (str, int, float)):
        return None
    items: Any
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, (str, int, float, type(None))):
                return f"{name or 'a message'} has the key {key!r:.100}, which is not text,"
        items = ((f"{name}.{key}" if name else str(key), item) for key, item in value.items())
    elif isinstance(value, (list, tuple)):
        items = ((f"{name}[{place}]", item) for place, item in enumerate(value))
    else:
        return f"{name} is a {type(value).__name__} ({value!r:.100}), which is not JSON"
    return next((found for inner, item in items if (found := _unsendable(item, inner)) is not None), None)


# -- failures -----------------------------------------------------------------------------------------------------


class _RemoteTraceback(Exception):
    """The traceback of a worker's exception, as the cause of its copy."""

    def __str__(self) -> str:
        return f"\n\n{self.args[0]}"


class _Shown(str):
    """The text of an exception, which KeyError would quote a second time."""

    __slots__ = ()
    __repr__ = str.__str__


def failure_data(error: BaseException) -> Message:
    try:
        text = str(error) or repr(error)
    except Exception as unprintable:
        # as inline fails
        error, text = unprintable, str(unprintable)
    data: Message = {"kind": type(error).__name__, "text": text}
    if isinstance(error, errors.ProviderError):
        data |= {"status": error.status, "body": error.body}
    data["traceback"] = "".join(traceback.format_exception(error))
    return data


def error_from(data: Mapping[str, Any]) -> Exception:
    """Return the exception of a message of `failure_data`: of its own class where that is ours or Python's."""
    kind, text = data["kind"], _Shown(data["text"])
    found: Any = getattr(errors, kind, None) or getattr(builtins, kind, None)
    error: Exception
    if kind == "NoMoreSlotsError":
        error = NoMoreSlotsError(text)
    elif found is errors.ProviderError:
        error = errors.ProviderError(text, status=data.get("status"), body=data.get("body") or "")
    elif isinstance(found, type) and issubclass(found, Exception) and found not in _OTHER_ARGUMENTS:
        error = found(text)
    else:
        error = WorkerCallError(f"{kind}: {text}", kind=kind)
    if data.get("traceback"):
        error.__cause__ = _RemoteTraceback(data["traceback"])
    return error


_OTHER_ARGUMENTS = {ExceptionGroup, UnicodeDecodeError, UnicodeEncodeError, UnicodeTranslateError}
