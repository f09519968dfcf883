"""Ports for servers of tests that must know theirs before they listen."""

import random
import socket


def free_port() -> int:
    """Return a port that is free now, neither of those of Ray's workers nor of those given to connections."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as held:
            # servers allow this too; without it, a port whose last connection just ended seems taken
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                held.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
