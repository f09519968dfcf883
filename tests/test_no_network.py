"""The guard that keeps tests off the network."""

from __future__ import annotations

import asyncio
import socket

import pytest


def test_addresses_beyond_this_machine_are_refused() -> None:
    with socket.socket() as sock:
        with pytest.raises(RuntimeError, match=r"'192\.0\.2\.1'"):
            sock.connect(("192.0.2.1", 80))
        with pytest.raises(RuntimeError, match=r"'192\.0\.2\.1'"):
            sock.connect_ex(("192.0.2.1", 80))
    with pytest.raises(RuntimeError, match=r"'example\.com'"):
        socket.getaddrinfo("example.com", 443)


def test_reserved_names_do_not_exist_without_asking_anyone() -> None:
    with pytest.raises(socket.gaierror):
        socket.getaddrinfo("no.such.host.invalid", 443)


async def test_event_loops_are_guarded_too() -> None:
    with pytest.raises(RuntimeError, match=r"'example\.com'"):
        await asyncio.open_connection("example.com", 443)
