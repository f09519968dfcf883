"""Ports for servers of tests that must know theirs before they listen."""

import random
import socket


def free_port() -> int:
    """Return a port that is free now, below those the kernel gives to connections: theirs may be taken before use."""
    while True:
        port = random.SystemRandom().randrange(15_000, 32_000)
        with socket.socket() as held:
            # servers allow this too; without it, a port whose last connection just ended seems taken
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                held.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
