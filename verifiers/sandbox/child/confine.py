"""What a process of the sandbox gives up between its fork and the first line of somebody else's code."""

from __future__ import annotations

import math
import os
import resource
import signal
from typing import Any, NamedTuple

from verifiers.sandbox.child import system

__all__ = ["Limits", "close_all_but", "confine", "tasks_of_user"]


class Limits(NamedTuple):
    """What every process of a sandbox is held to.

    Args:
        uid: user and group to become, or None to stay.
        base_processes: processes that this user has outside the sandbox: RLIMIT_NPROC counts those too.
    """

    directory: str
    memory_bytes: int
    file_bytes: int
    processes: int
    open_files: int
    environment: dict[str, str]
    uid: int | None = None
    base_processes: int = 0

    @classmethod
    def of(cls, config: dict[str, Any], **changes: Any) -> Limits:
        """From the message that opened the sandbox."""
        names = ("directory", "memory_bytes", "file_bytes", "processes", "open_files", "environment")
        return cls(**{**{name: config[name] for name in names}, **changes})


def close_all_but(keep: set[int]) -> None:
    """Close every descriptor above stderr that is not in `keep`."""
    lowest = 3
    for fd in sorted(fd for fd in keep if fd >= 3):
        os.closerange(lowest, fd)
        lowest = fd + 1
    highest = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    os.closerange(lowest, min(highest, 1 << 16) if highest != resource.RLIM_INFINITY else 1 << 16)


def _limit(kind: int, value: int) -> None:
    hard = resource.getrlimit(kind)[1]
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    resource.setrlimit(kind, (value, value))


def tasks_of_user(uid: int) -> int:
    """How many processes and threads a user has now; 0 where there is no /proc."""
    count = 0
    try:
        entries = [entry for entry in os.scandir("/proc") if entry.name.isdigit()]
    except OSError:
        return 0
    for entry in entries:
        try:
            if entry.stat().st_uid == uid:
                count += len(os.listdir(f"/proc/{entry.name}/task"))
        except OSError:
            continue
    return count


def confine(limits: Limits, cpu_time_s: float | None) -> None:
    """Turn this freshly forked process into one of the sandbox. Its descriptors are the caller's business.

    It gets a session of its own, dies with the process that forked it, and can never get more rights than it has.
    """
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    os.umask(0o022)
    # the process that forked this one may be closed to its own user, and with it /proc/self
    system.set_dumpable(True)
    if system.LINUX:
        # the first to go when the machine runs out of memory; without /proc it competes like any other
        try:
            with open("/proc/self/oom_score_adj", "w") as file:
                file.write("1000")
        except OSError:
            pass
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_FSIZE, limits.file_bytes)
    _limit(resource.RLIMIT_NOFILE, limits.open_files)
    if cpu_time_s is not None:
        _limit(resource.RLIMIT_CPU, max(1, math.ceil(cpu_time_s)))
    if system.LINUX:
        _limit(resource.RLIMIT_NPROC, limits.base_processes + limits.processes)
    if limits.uid is not None:
        os.setgroups([])
        os.setresgid(limits.uid, limits.uid, limits.uid)
        os.setresuid(limits.uid, limits.uid, limits.uid)
    system.drop_capabilities()
    system.join_new_keyring()
    system.forbid_new_privileges()
    # after the change of user, which undoes both
    system.set_dumpable(True)
    system.die_with_parent(signal.SIGKILL)
    os.chdir(limits.directory)
    # last: from here on a large allocation fails. macOS refuses this limit; there memory is not held
    try:
        _limit(resource.RLIMIT_AS, limits.memory_bytes)
    except (OSError, ValueError):
        pass
