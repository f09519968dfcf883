"""Functions for the tests to call in workers. Some are hostile."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

calls = 0


def echo(*args: object, **kwargs: object) -> object:
    return {"args": args, "kwargs": kwargs}


def count() -> object:
    global calls
    calls += 1
    return calls


def poison() -> object:
    import math

    math.sqrt = lambda number: 666
    json.dumps = lambda value: '{"value": "poisoned"}'
    sys.modules[__name__].echo = lambda *args: "poisoned"
    os.environ["POISON"] = "1"
    return "done"


def chatter() -> object:
    print('{"value": "from stdout"}', flush=True)
    os.write(1, b"x" * 100000)
    os.write(2, b'{"value": "from stderr"}')
    sys.stderr.write("x" * 100000)
    return "quiet"


def forge() -> object:
    """Write where an answer could be expected, and do not end."""
    if os.fork() == 0:
        os.setsid()
        time.sleep(0.5)
        for _ in range(200):
            for fd in range(3, 64):
                try:
                    os.write(fd, b'{"value": "forged"}')
                except OSError:
                    pass
            time.sleep(0.01)
        os._exit(0)
    return "left"


def corrupt() -> object:
    for fd in range(3, 64):
        try:
            os.write(fd, b"garbage")
        except OSError:
            pass
    os._exit(0)


def background(marker: str) -> object:
    subprocess.Popen(["sleep", marker], start_new_session=True)
    return subprocess.Popen(["sleep", marker]).pid > 0


def hang(marker: str | None = None) -> None:
    if marker:
        subprocess.Popen(["sleep", marker], start_new_session=True)
    time.sleep(1000)


def burn() -> None:
    while True:
        pass


def recurse() -> object:
    return recurse()


def deep() -> object:
    value = []
    for _ in range(100000):
        value = [value]
    return value


def huge() -> object:
    return "x" * (64 << 20)


def flood() -> object:
    while True:
        for fd in range(3, 64):
            try:
                os.write(fd, b"x" * 65536)
            except OSError:
                pass


def eat() -> object:
    held = []
    while True:
        # zeroed by the kernel when read: address space ends, and no page is written
        held.append(bytes(32 << 20))


def leave() -> None:
    raise SystemExit(3)


def crash() -> object:
    os.kill(os.getpid(), 11)


def kill_parent() -> object:
    try:
        os.kill(os.getppid(), 9)
    except PermissionError:
        return "parent is alive"
    time.sleep(0.2)
    return "parent is alive" if os.getppid() else "gone"


def fail(message: str) -> None:
    raise KeyError(message)


def network(port: int) -> object:
    import socket

    try:
        socket.create_connection(("127.0.0.1", port), 1)
        return "reached"
    except OSError:
        return "stopped"


def write_to(path: str) -> object:
    try:
        open(path, "w").close()
        return "written"
    except OSError:
        return "stopped"


def environment() -> object:
    return dict(os.environ)
