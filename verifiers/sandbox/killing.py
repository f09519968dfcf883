"""Killing everything that a sandbox's code has started, including daemons, new sessions and fork bombs.

Standard library only: this runs inside the sandbox. No signal goes to a process that is not known to descend from
this one. A child that has not been waited for keeps its number, so signalling it is safe; anything deeper is held by
a pidfd and looked at again before it is signalled.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Collection
from typing import NamedTuple

from verifiers.sandbox.confinement import LINUX

__all__ = ["kill_everyone", "kill_group", "kill_trees", "kill_user", "orphans"]

_TREES_S = 5.0
"""Seconds to try to kill what descends from the roots."""


class _Seen(NamedTuple):
    parent: int
    state: str
    started: str


def _look(pid: int | str) -> _Seen | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return _Seen(int(fields[1]), fields[0].decode(), fields[19].decode())


def _scan() -> dict[int, _Seen]:
    """Return every process that can be seen."""
    try:
        names = [name for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return {}
    return {int(name): seen for name in names if (seen := _look(name)) is not None}


def _living(scan: dict[int, _Seen], roots: Collection[int]) -> set[int]:
    """Return the roots and their descendants that still run."""
    children: dict[int, list[int]] = {}
    for pid, seen in scan.items():
        children.setdefault(seen.parent, []).append(pid)
    found: set[int] = set()
    waiting = list(roots)
    while waiting:
        pid = waiting.pop()
        if pid not in found:
            found.add(pid)
            waiting.extend(children.get(pid, ()))
    return {pid for pid in found if pid in scan and scan[pid].state not in "ZX"}


def orphans(known: Collection[int]) -> set[int]:
    """Return the children of this process that it did not fork itself: their own parents died."""
    me = os.getpid()
    return {pid for pid, seen in _scan().items() if seen.parent == me and pid not in known}


def _signal(pid: int, seen: _Seen, number: int) -> None:
    try:
        if seen.parent == os.getpid():
            os.kill(pid, number)
            return
        handle = os.pidfd_open(pid)
        try:
            again = _look(pid)
            if again is not None and again.started == seen.started:
                signal.pidfd_send_signal(handle, number)
        finally:
            os.close(handle)
    except (ProcessLookupError, PermissionError):
        pass


def kill_group(leader: int) -> None:
    """Kill a process group. Its leader must be a child of this process that has not been waited for."""
    try:
        os.killpg(leader, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        # before its setsid it is not yet a group, and macOS answers so for a group of zombies
        try:
            os.kill(leader, signal.SIGKILL)
        except ProcessLookupError:
            pass


def kill_trees(roots: Callable[[], Collection[int]], reap: Callable[[], None]) -> bool:
    """Kill all that descends from the roots; False when something is left after `_TREES_S`.

    Everything is stopped before anything is killed, as a process that forks faster than it is found would always
    leave a child.

    Args:
        roots: children of this process, asked again each round, as orphans may have come to it.
        reap: waits for children that have ended.
    """
    if not LINUX:
        for root in roots():
            kill_group(root)
        return True
    end = time.monotonic() + _TREES_S
    while True:
        stopped: set[int] = set()
        while True:
            scan = _scan()
            new = _living(scan, roots()) - stopped
            if not new or time.monotonic() > end:
                break
            for pid in new:
                _signal(pid, scan[pid], signal.SIGSTOP)
            stopped |= new
        scan = _scan()
        alive = _living(scan, roots())
        for pid in alive:
            _signal(pid, scan[pid], signal.SIGKILL)
        reap()
        if not alive:
            return True
        if time.monotonic() > end:
            return False
        time.sleep(0.001)


def kill_everyone() -> None:
    """Kill all other processes of this pid namespace in one system call, which no fork can outrun."""
    try:
        os.kill(-1, signal.SIGKILL)
    except ProcessLookupError:
        pass


def kill_user(uid: int) -> None:
    """Kill every process of a user, which must be the sandbox's own, in one system call that no fork can outrun."""
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            # never as root: -1 would then mean every process of the machine
            if os.getresuid() == (uid, uid, uid) and uid != 0:
                os.kill(-1, signal.SIGKILL)
        except OSError:
            pass
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
