"""The process of a server: its address, its port file, its signals, and its end with the process that started it."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import os
import signal
import socket
import threading
import time
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from verifiers.errors import ConfigError

_PARENT_POLL_S = 0.5
_ORPHAN_GRACE_S = 5.0


def bind(host: str, port: int) -> socket.socket:
    """Bind a socket that does not listen yet: an address in use is found out before anything is loaded.

    Port 0 takes a free one.

    Raises:
        ConfigError: the address is not one of this machine, or the port is in use or not allowed.
    """
    if not 0 <= port <= 65535:
        raise ConfigError(f"--port {port} is not a port; give 1 to 65535, or 0 for a free one")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"--host {host!r} is not an address of this machine ({error}); try 127.0.0.1") from error
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise cannot_listen(host, port, error) from error
    return listener


def cannot_listen(host: str, port: int, error: OSError) -> ConfigError:
    """Return the error for a socket that cannot be bound or cannot listen."""
    if error.errno == errno.EADDRINUSE:
        return ConfigError(
            f"--port {port} on {host} is in use; end what listens there or give --port 0 for a free one"
        )
    return ConfigError(f"cannot listen on --host {host} --port {port}: {error.strerror or error}; choose another")


def url_of(listener: socket.socket) -> str:
    address, port = listener.getsockname()[:2]
    return f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"


def is_loopback(url: str) -> bool:
    """Return whether the URL's host is this machine: localhost, 127.0.0.0/8, ::1, or an unspecified address."""
    host = (urllib.parse.urlsplit(url).hostname or "").rstrip(".")
    is_named = host in ("localhost", "0.0.0.0", "::") or host.endswith(".localhost")
    return is_named or is_loopback_address(host)


def is_loopback_address(address: str) -> bool:
    """Return whether only this machine reaches the address."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def write_port_file(path: Path, listener: socket.socket) -> None:
    """Write the port of a listening socket so that a reader sees the whole number or no file."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(f"{listener.getsockname()[1]}\n")
        partial.replace(path)
    except OSError as error:
        raise ConfigError(
            f"cannot write --port-file {str(path)!r}: {error}; give a path that can be written"
        ) from error


def end_by_signals() -> asyncio.Future[int]:
    """Return a future of the running loop that gets the exit code: 0 after SIGTERM, 130 after Ctrl-C."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[int] = loop.create_future()

    def end(code: int) -> None:
        if not ended.done():
            ended.set_result(code)

    loop.add_signal_handler(signal.SIGTERM, end, 0)
    loop.add_signal_handler(signal.SIGINT, end, 130)
    return ended


@contextmanager
def exits_on_sigterm() -> Iterator[None]:
    """End the process with code 0 on SIGTERM while a server starts; the handler of before is back afterwards."""
    before = signal.signal(signal.SIGTERM, _exit)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def _exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(0)


def follow_parent(pid: int) -> None:
    """End this process when process `pid` has ended: by SIGTERM first, and for good 5 s later."""

    def watch() -> None:
        while process_lives(pid):
            time.sleep(_PARENT_POLL_S)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_ORPHAN_GRACE_S)
        os._exit(1)

    threading.Thread(target=watch, name="verifiers-parent-watch", daemon=True).start()


def process_lives(pid: int) -> bool:
    """Return whether process `pid` runs; one that has ended but was not waited for (a zombie) does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        # Linux only; elsewhere a zombie counts as alive until its parent waits for it
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (OSError, IndexError):
        return True
