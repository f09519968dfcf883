"""Frames between a program and its sandbox: four bytes of length, then JSON; file descriptors travel beside them."""

from __future__ import annotations

import json
import socket
import struct
from collections import deque
from collections.abc import Iterator
from typing import Any

_MAX_FRAME_BYTES = 64 << 20
_LENGTH = struct.Struct(">I")


class FrameError(Exception):
    """Bytes that are not a frame, or a frame that is too long."""


def pack(message: dict[str, Any]) -> bytes:
    body = json.dumps(message).encode()
    if len(body) > _MAX_FRAME_BYTES:
        raise FrameError(f"a message of {len(body)} bytes is over the limit of {_MAX_FRAME_BYTES}")
    return _LENGTH.pack(len(body)) + body


class Frames:
    """Frames put together again out of what the socket gives."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._fds: deque[int] = deque()

    def receive(self, sock: socket.socket) -> bool:
        """Take what is there; False at the end of the stream. Raises BlockingIOError when nothing is."""
        data, fds, _, _ = socket.recv_fds(sock, 1 << 16, 12)
        self._fds.extend(fds)
        self._buffer += data
        return bool(data)

    def messages(self) -> Iterator[tuple[dict[str, Any], list[int]]]:
        """Yield the whole messages received so far, each with its descriptors."""
        while len(self._buffer) >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._buffer)
            if size > _MAX_FRAME_BYTES:
                raise FrameError(f"a message of {size} bytes is over the limit of {_MAX_FRAME_BYTES}")
            end = _LENGTH.size + size
            if len(self._buffer) < end:
                return
            try:
                message = json.loads(self._buffer[_LENGTH.size : end])
            except (ValueError, RecursionError) as error:
                raise FrameError(f"a message that is not JSON: {error}") from None
            del self._buffer[:end]
            yield message, [self._fds.popleft() for _ in range(message.get("fds", 0))]
