"""Lines between the ranks of a run, on which one that fails says why, and one that vanishes is missed.

Rank 0 listens, every other rank holds one connection to it, and each message is one line of JSON. Nothing here is a
collective, so it works while every rank is inside one. A process that is killed is missed at once, for its system
closes its connection; a host that vanishes, by unanswered probes of the connection, after half a minute.
"""

from __future__ import annotations

import json
import os
import secrets
import selectors
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["HubLinks", "LeafLinks", "Links", "RankFailure", "WireAddress", "join_hub", "open_hub"]

_MOST_BYTES = 2**17
_MOST_TEXT = 2**13
_REFUSAL_S = 0.05


@dataclass(frozen=True, slots=True)
class RankFailure:
    """What ended a rank.

    Attributes:
        rank: which one.
        text: the type and the text of its error, or how else it ended.
        traceback: where that was; empty for a process that vanished.
    """

    rank: int
    text: str
    traceback: str = ""

    @property
    def sentence(self) -> str:
        return f"rank {self.rank} stopped: {self.text}"

    def cut(self) -> RankFailure:
        """The same, short enough for one message; of a traceback the end matters."""
        return RankFailure(self.rank, self.text[:_MOST_TEXT], self.traceback[-_MOST_TEXT:])


@dataclass(frozen=True, slots=True)
class WireAddress:
    """Where rank 0 listens, and the secret by which it knows the other ranks."""

    host: str
    port: int
    token: str


class Links:
    """This rank's lines, used by one thread; of this class itself, lines to nobody.

    Attributes:
        selector: becomes readable when something is to be read from a line (or to be accepted).
        on_failure: called with each failure that is heard of.
        ended: ranks that have said that they are done.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.selector = selectors.DefaultSelector()
        self.on_failure: Callable[[RankFailure], None] = lambda failure: None
        self.ended: set[int] = set()
        self._unread: dict[socket.socket, bytes] = {}

    def say_failure(self, failure: RankFailure) -> None:
        """Tell all other ranks."""
        self._send({"failed": asdict(failure.cut())})

    def say_ended(self) -> None:
        """Tell that this rank needs the others no more, and that its line may break."""
        self._send({"ended": self.rank})

    def handle(self, ready: Any) -> None:
        """Read what has come on a line."""
        line: socket.socket = ready
        try:
            received = line.recv(2**16)
        except BlockingIOError:
            return
        except OSError:
            received = b""
        if not received:
            self._forget(line)
            self._broke(line)
            return
        *messages, rest = (self._unread.get(line, b"") + received).split(b"\n")
        self._unread[line] = rest
        try:
            if len(rest) > _MOST_BYTES:
                raise ValueError("no message is as long")
            for message in messages:
                self._got(line, json.loads(message))
        except (ValueError, KeyError, TypeError):
            # no rank writes that; whoever found the port is sent away
            self._forget(line)
            self._broke(line)

    def close(self) -> None:
        for key in list(self.selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self.selector.close()

    def _send(self, message: dict[str, Any]) -> None:
        """Write a message on every line."""

    def _got(self, line: socket.socket, message: dict[str, Any]) -> None:
        """Take a message."""

    def _broke(self, line: socket.socket) -> None:
        """A line has ended, and was forgotten."""

    def _hear(self, message: dict[str, Any]) -> None:
        if "failed" in message:
            self.on_failure(RankFailure(**message["failed"]))
        if "ended" in message:
            self.ended.add(int(message["ended"]))

    def _listen_to(self, line: socket.socket) -> None:
        line.settimeout(2.0)
        _probe_when_idle(line)
        self.selector.register(line, selectors.EVENT_READ)

    def _forget(self, line: socket.socket) -> None:
        self._unread.pop(line, None)
        self.selector.unregister(line)
        line.close()


class HubLinks(Links):
    """Rank 0's lines: it passes on what any rank says."""

    def __init__(self, listener: socket.socket, token: str) -> None:
        super().__init__(0)
        self._listener = listener
        self._token = token
        self._lines: dict[int, socket.socket] = {}
        self.selector.register(listener, selectors.EVENT_READ)

    def handle(self, ready: Any) -> None:
        if ready is not self._listener:
            super().handle(ready)
            return
        try:
            line, _ = self._listener.accept()
            self._listen_to(line)
        except OSError:
            # whoever wanted in has gone, or this process may open no more files: the rest of it is watched on
            time.sleep(_REFUSAL_S)

    def _send(self, message: dict[str, Any]) -> None:
        self._pass_on(message, self._lines.values())

    def _got(self, line: socket.socket, message: dict[str, Any]) -> None:
        if line not in self._lines.values():
            if not secrets.compare_digest(str(message["token"]), self._token):
                raise ValueError("not the secret of this run")
            self._lines[int(message["rank"])] = line
            return
        self._pass_on(message, [other for other in self._lines.values() if other is not line])
        self._hear(message)

    def _broke(self, line: socket.socket) -> None:
        rank = next((rank for rank, known in self._lines.items() if known is line), None)
        if rank is None:
            return
        del self._lines[rank]
        if rank not in self.ended:
            failure = _vanished(rank)
            self.say_failure(failure)
            self.on_failure(failure)

    def _pass_on(self, message: dict[str, Any], lines: Iterable[socket.socket]) -> None:
        data = json.dumps(message).encode() + b"\n"
        for line in list(lines):
            try:
                line.sendall(data)
            except OSError:
                # reading from it will say so
                continue


class LeafLinks(Links):
    """The one line of a rank that is not 0."""

    def __init__(self, rank: int, line: socket.socket) -> None:
        super().__init__(rank)
        self._line = line
        self._listen_to(line)

    def _send(self, message: dict[str, Any]) -> None:
        try:
            self._line.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            return

    def _got(self, line: socket.socket, message: dict[str, Any]) -> None:
        self._hear(message)

    def _broke(self, line: socket.socket) -> None:
        if 0 not in self.ended:
            self.on_failure(_vanished(0))


def open_hub() -> tuple[HubLinks, WireAddress]:
    """Listen where the other ranks can reach this one: on loopback, where all of them are on this host."""
    host = _own_host()
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, 0), family=family, backlog=1024)
    except OSError:
        # the name that others know this host by need not be an address of its own
        listener = socket.create_server(("", 0), backlog=1024)
    token = secrets.token_hex(16)
    return HubLinks(listener, token), WireAddress(host, listener.getsockname()[1], token)


def join_hub(rank: int, address: WireAddress, timeout_s: float) -> LeafLinks:
    """Connect to rank 0.

    Raises:
        OSError: it cannot be reached.
    """
    line = socket.create_connection((address.host, address.port), timeout=timeout_s)
    line.sendall(json.dumps({"rank": rank, "token": address.token}).encode() + b"\n")
    return LeafLinks(rank, line)


def _own_host() -> str:
    everywhere, here = os.environ.get("WORLD_SIZE"), os.environ.get("LOCAL_WORLD_SIZE")
    if everywhere == here:
        return "127.0.0.1"
    return os.environ.get("MASTER_ADDR", "127.0.0.1")


def _vanished(rank: int) -> RankFailure:
    return RankFailure(
        rank, "its process vanished without a word, so it was killed (out of memory?), crashed, or lost its host"
    )


def _probe_when_idle(line: socket.socket) -> None:
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # macOS has another name for the first
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPALIVE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):
            line.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
