"""A chat server that answers every request at once with the same bytes; its own cost stays far below any client's.

    python instant_server.py PORT_FILE ANSWER

Plain asyncio and nothing else, so that any interpreter runs it. It ends when its parent does.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path


def reply(answer: str) -> bytes:
    """Return one whole HTTP answer: a chat completion with its usage, and neither log-probs nor token ids."""
    message = {"role": "assistant", "content": answer}
    body = {
        "id": "chatcmpl-0",
        "object": "chat.completion",
        "created": 1_700_000_000,
        "model": "fake",
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 20, "completion_tokens": 6, "total_tokens": 26},
    }
    data = json.dumps(body).encode()
    head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


class InstantHttp(asyncio.Protocol):
    """A protocol that counts requests by their Content-Length and answers each."""

    def __init__(self, answer: bytes) -> None:
        self._answer = answer
        self._held = b""
        self._transport: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        held = self._held + data if self._held else data
        assert self._transport is not None
        while True:
            end = held.find(b"\r\n\r\n")
            if end < 0:
                break
            head = held[:end].lower()
            at = head.find(b"content-length:")
            length = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            if len(held) < end + 4 + length:
                break
            held = held[end + 4 + length :]
            self._transport.write(self._answer)
        self._held = held


async def serve(port_file: Path, answer: bytes) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: InstantHttp(answer), "127.0.0.1", 0, backlog=4096)
    partial = port_file.with_suffix(".partial")
    partial.write_text(str(server.sockets[0].getsockname()[1]))
    partial.replace(port_file)
    parent = os.getppid()
    while os.getppid() == parent:  # noqa: ASYNC110 - nothing tells of a parent that ends
        await asyncio.sleep(0.5)


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1]), reply(sys.argv[2])))
