"""Taking an address before the model is loaded, so that a port in use does not cost a minute to find out."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from pathlib import Path

from verifiers_embedded.errors import StartError


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet.

    Raises:
        StartError: the address is not one of this machine, or the port is in use or not allowed.
    """
    if not 0 <= port <= 65535:
        raise StartError(f"--port {port} is no port; give 1 to 65535, or 0 for a free one")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        raise StartError(f"--host {host!r} is no address of this machine ({error}); try 127.0.0.1") from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise cannot_bind(host, port, error) from error
    return listener


def cannot_bind(host: str, port: int, error: OSError) -> StartError:
    """The error to raise where a socket cannot be bound or cannot listen."""
    if error.errno == errno.EADDRINUSE:
        return StartError(
            f"--port {port} on {host} is in use; end what listens there or give --port 0 for a free one"
        )
    return StartError(
        f"cannot listen on --host {host} --port {port}: {error.strerror or error}; choose another"
    )


def is_loopback(address: str) -> bool:
    """Whether only this machine reaches the address."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def write_atomically(path: Path, content: str) -> None:
    """Writes a file so that a reader sees the whole content or no file.

    Raises:
        StartError: the path cannot be written.
    """
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(content)
        partial.replace(path)
    except OSError as error:
        raise StartError(
            f"cannot write --port-file {str(path)!r}: {error}; give a path that can be written"
        ) from error
