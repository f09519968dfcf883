"""The relay in a sandbox without network, from 127.0.0.1 to a Unix socket outside. Standard library only.

The agent forks it; in a container it is started as `python3 -I -S -c <the text of this file> <path of the socket>`.
One thread: threads would count against the sandbox's limit of processes.
"""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import sys

CHUNK_BYTES = 1 << 16


async def serve(target: str) -> None:
    """Write the port as a line to stdout, and pass on what comes."""
    # two descriptors a connection, and a few for this process; what comes beyond waits
    room = asyncio.Semaphore(max(1, (resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 16) // 2))

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with room:
            try:
                target_reader, target_writer = await asyncio.open_unix_connection(target)
                try:
                    await asyncio.gather(_pass_on(reader, target_writer), _pass_on(target_reader, writer))
                finally:
                    target_writer.close()
            except OSError:
                # one side is gone, so the other is closed too
                pass
            finally:
                writer.close()

    listening = socket.create_server(("127.0.0.1", 0), backlog=128)
    server = await asyncio.start_server(connect, sock=listening)
    os.write(1, b"%d\n" % listening.getsockname()[1])
    await server.serve_forever()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Pass on what one side sends, with its end."""
    while data := await reader.read(CHUNK_BYTES):
        writer.write(data)
        await writer.drain()
    writer.write_eof()


def run(target: str) -> None:
    """Serve until this process is killed."""
    asyncio.run(serve(target))


if __name__ == "__main__":
    run(sys.argv[1])
