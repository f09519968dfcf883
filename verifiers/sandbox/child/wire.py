"""Frames between a program and its sandbox: four bytes of length, then JSON; file descriptors travel beside them."""

from __future__ import annotations

import json
import socket
import struct
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

__all__ = ["MAX_FDS", "MAX_FRAME_BYTES", "FrameError", "Frames", "pack", "send_frame"]

MAX_FRAME_BYTES = 64 << 20
MAX_FDS = 3
_LENGTH = struct.Struct(">I")


class FrameError(Exception):
    """Bytes that are not a frame, or a frame that is too long."""


def pack(message: dict[str, Any]) -> bytes:
    """The bytes of a message."""
    body = json.dumps(message).encode()
    if len(body) > MAX_FRAME_BYTES:
        raise FrameError(f"a message of {len(body)} bytes is over the limit of {MAX_FRAME_BYTES}")
    return _LENGTH.pack(len(body)) + body


def send_frame(sock: socket.socket, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
    """Send a message over a blocking socket, with the descriptors that its `fds` counts."""
    data = pack({**message, "fds": len(fds)})
    sent = socket.send_fds(sock, [data], list(fds)) if fds else 0
    sock.sendall(data[sent:])


class Frames:
    """Puts frames together again out of what the socket gives."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._fds: deque[int] = deque()

    def receive(self, sock: socket.socket) -> bool:
        """Take what is there; False at the end of the stream. Raises BlockingIOError when nothing is."""
        data, fds, _, _ = socket.recv_fds(sock, 1 << 16, MAX_FDS * 4)
        self._fds.extend(fds)
        self._buffer += data
        return bool(data)

    def messages(self) -> Iterator[tuple[dict[str, Any], list[int]]]:
        """The whole messages received so far, each with its descriptors."""
        while len(self._buffer) >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._buffer)
            if size > MAX_FRAME_BYTES:
                raise FrameError(f"a message of {size} bytes is over the limit of {MAX_FRAME_BYTES}")
            end = _LENGTH.size + size
            if len(self._buffer) < end:
                return
            try:
                message = json.loads(self._buffer[_LENGTH.size : end])
            except ValueError as error:
                raise FrameError(f"a message that is not JSON: {error}") from None
            del self._buffer[:end]
            yield message, [self._fds.popleft() for _ in range(message.get("fds", 0))]
