"""What rank 0 and a worker ask and tell each other: lines of JSON over a socket.

What is sent in one iteration of the event loop is written at once, so that the cost of a system call is shared.
"""

from __future__ import annotations

import asyncio
import builtins
import functools
import itertools
import json
import traceback
from collections.abc import Awaitable, Mapping
from typing import Any, cast

from verifiers import errors
from verifiers.errors import ConfigError, WorkerCallError
from verifiers.inference.limiter import NoMoreSlotsError

Message = dict[str, Any]

ROW_FIELDS = ("prompt", "answer", "task", "info")
"""Fields of a row of a dataset that a worker gets."""

# made once: `json.dumps` makes an encoder for each call that asks for separators
_encode = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode


class Asked(asyncio.Future[Any]):
    """The answer to come; where this is cancelled, so is the work at the other end."""

    number: int
    is_interrupted = False


class Connection(asyncio.Protocol):
    """One end of the socket between rank 0 and a worker.

    Args:
        side: has `on_OP(message)` for each operation that the other end names. What is returned for one that was
            asked is awaited, and what comes of it is the answer. `on_lost()` is called once when the other end is
            gone, or when a message could not be read.
    """

    def __init__(self, side: Any) -> None:
        self._side = side
        self._transport: asyncio.Transport | None = None
        self._received: list[bytes] = []
        self._lines: list[str] = []
        self._is_lost = False
        self._numbers = itertools.count()
        self._asked: dict[int, Asked] = {}
        self._work: dict[int, asyncio.Future[Any]] = {}

    def ask(self, op: str, **fields: Any) -> Asked:
        """Ask the other end for something; what it raises there is raised by awaiting the answer.

        Raises:
            ConfigError: as `send`.
        """
        number = next(self._numbers)
        self.send({"op": op, "ask": number, **fields})
        asked = self._asked[number] = Asked(loop=asyncio.get_running_loop())
        asked.number = number
        asked.add_done_callback(self._note_answer)
        return asked

    def interrupt(self, asked: Asked) -> None:
        """Cancel the work at the other end, which may answer nevertheless."""
        # once: a second time would end its cleanup
        if not asked.is_interrupted:
            asked.is_interrupted = True
            self.send({"cancel": asked.number})

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

    def cancel_work(self) -> list[asyncio.Future[Any]]:
        """Cancel all that the other end asked for, and return it."""
        work = list(self._work.values())
        for each in work:
            each.cancel()
        return work

    def fail(self, error: Exception) -> None:
        """Raise an error where an answer is waited for."""
        for asked in [each for each in self._asked.values() if not each.done()]:
            asked.set_exception(type(error)(*error.args))
            # it counts as seen, also where nobody waits for it any more
            asked.exception()

    async def close(self) -> None:
        """Send what is left and close the socket; the side learns that it is lost."""
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

    def _note_answer(self, asked: Asked) -> None:
        del self._asked[asked.number]
        if asked.cancelled():
            self.interrupt(asked)

    def _receive(self, message: Message) -> None:
        if "answer" in message:
            asked = self._asked.get(message["answer"])
            if asked is None or asked.done():
                return
            if "error" in message:
                asked.set_exception(error_from(message["error"]))
            else:
                asked.set_result(message["result"])
        elif "cancel" in message:
            if (work := self._work.get(message["cancel"])) is not None:
                work.cancel()
        else:
            result: Awaitable[Any] | None = getattr(self._side, f"on_{message['op']}")(message)
            if result is not None:
                work = self._work[message["ask"]] = asyncio.ensure_future(result)
                work.add_done_callback(functools.partial(self._answer, message["ask"]))

    def _answer(self, number: int, work: asyncio.Future[Any]) -> None:
        del self._work[number]
        if work.cancelled():
            return
        error = work.exception()
        try:
            self.send({"answer": number, "result": work.result()} if error is None else _failed(number, error))
        except Exception as unsendable:
            # nested too deep, or a number with too many digits: the other end waits for a word
            self.send(_failed(number, unsendable))

    # -- the socket -----------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        # a long message comes in many pieces, which are joined once
        head, newline, rest = data.rpartition(b"\n")
        if newline:
            for line in (b"".join(self._received) + head).split(b"\n"):
                self._receive(json.loads(line))
            self._received.clear()
        self._received.append(rest)

    def connection_lost(self, error: Exception | None) -> None:
        if not self._is_lost:
            self._is_lost = True
            self._side.on_lost()


def _failed(number: int, error: BaseException) -> Message:
    return {"answer": number, "error": failure_data(error)}


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
