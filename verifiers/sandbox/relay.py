"""The relay in a sandbox without network, from 127.0.0.1 to a Unix socket outside. Standard library only.

The agent forks it; in a container it is started as `python3 -I -S -c <the text of this file> <path of the socket>`.
One thread: threads would count against the sandbox's limit of processes.
"""

from __future__ import annotations

import os
import resource
import selectors
import socket
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

__all__ = ["serve"]

CHUNK_BYTES = 1 << 16
READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE


class End:
    """One of the two sockets of a connection.

    Attributes:
        pending: still to be sent here. The other end is not read before that is done.
        has_ended: nothing more will be read here.
    """

    __slots__ = ("has_ended", "mask", "other", "pending", "sock")

    other: End

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.pending = b""
        self.has_ended = False
        self.mask = 0

    def read(self) -> None:
        """Take a chunk and send it on; an end that is read is passed on as one."""
        data = self.sock.recv(CHUNK_BYTES)
        if data:
            self.other.pending = data
            self.other.write()
        else:
            self.has_ended = True
            self.other.sock.shutdown(socket.SHUT_WR)

    def write(self) -> None:
        """Send as much as the socket takes."""
        self.pending = self.pending[self.sock.send(self.pending) :]

    def wanted(self) -> int:
        """Return the events to wait for."""
        return (READ if not self.has_ended and not self.other.pending else 0) | (WRITE if self.pending else 0)


class Relay:
    """The listening socket and the connections that came to it."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._selector = selectors.DefaultSelector()
        self._server = socket.create_server(("127.0.0.1", 0), backlog=128)
        self._server.setblocking(False)
        # two descriptors each, and a few for this process; what comes beyond waits to be accepted
        self._room = max(1, (resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 16) // 2)
        self._selector.register(self._server, READ, None)
        self.port: int = self._server.getsockname()[1]

    def serve(self) -> NoReturn:
        """Pass everything on."""
        while True:
            for key, events in self._selector.select():
                if key.data is None:
                    self._accept()
                elif key.data.mask:
                    self._pass(key.data, events)

    def _accept(self) -> None:
        try:
            client, _ = self._server.accept()
        except OSError:
            # it has gone already
            return
        target = socket.socket(socket.AF_UNIX)
        try:
            target.connect(self._target)
        except OSError:
            client.close()
            target.close()
            return
        one, other = End(client), End(target)
        one.other, other.other = other, one
        self._watch(one)
        self._watch(other)
        self._room -= 1
        if not self._room:
            self._selector.unregister(self._server)

    def _pass(self, end: End, events: int) -> None:
        try:
            if events & WRITE:
                end.write()
            if events & READ and end.wanted() & READ:
                end.read()
        except BlockingIOError:
            # the rest goes when there is room
            pass
        except OSError:
            self._close(end)
            return
        if end.has_ended and end.other.has_ended and not end.pending and not end.other.pending:
            self._close(end)
            return
        self._watch(end)
        self._watch(end.other)

    def _watch(self, end: End) -> None:
        mask = end.wanted()
        if mask == end.mask:
            return
        if not end.mask:
            self._selector.register(end.sock, mask, end)
        elif mask:
            self._selector.modify(end.sock, mask, end)
        else:
            self._selector.unregister(end.sock)
        end.mask = mask

    def _close(self, end: End) -> None:
        for each in (end, end.other):
            if each.mask:
                self._selector.unregister(each.sock)
                each.mask = 0
            each.sock.close()
        if not self._room:
            self._selector.register(self._server, READ, None)
        self._room += 1


def serve(target: str) -> NoReturn:
    """Write the port as a line to stdout, and serve until this process is killed."""
    relay = Relay(target)
    os.write(1, b"%d\n" % relay.port)
    relay.serve()


if __name__ == "__main__":
    serve(sys.argv[1])
