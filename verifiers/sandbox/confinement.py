"""Limits and rights of a sandbox's processes, set between the fork and the first line of foreign code; their end.

Standard library only: this runs inside the sandbox. The few calls through ctypes are those that neither Python nor
bubblewrap offers: the process level has no bubblewrap at all, and bubblewrap knows only the sandbox's first process.
"""

from __future__ import annotations

import ctypes
import math
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

LINUX = sys.platform == "linux"

# from <linux/prctl.h> and <linux/capability.h>
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 4, 36, 38
_PR_CAPBSET_DROP, _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 24, 47, 4
_CAPABILITY_VERSION_3 = 0x20080522
# number of keyctl(2), which glibc does not wrap
_KEYCTL = {"x86_64": 250, "aarch64": 219, "riscv64": 219}
_JOIN_SESSION_KEYRING = 1

_libc = ctypes.CDLL(None, use_errno=True)


class Limits(NamedTuple):
    """The limits of every process of a sandbox.

    Args:
        uid: user and group to become, or None to stay the agent's own.
        base_processes: processes that this user has outside the sandbox, which RLIMIT_NPROC counts too.
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
        return cls(**{**{name: config[name] for name in cls._fields if name in config}, **changes})


def _prctl(option: int, value: int = 0) -> int:
    if not LINUX:
        return 0
    result: int = _libc.prctl(ctypes.c_int(option), *map(ctypes.c_ulong, (value, 0, 0, 0)))
    return result


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parents die. In a pid namespace the first process is that anyway."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def set_dumpable(dumpable: bool) -> None:
    """Set whether other processes of the same user may trace this one and read its /proc files."""
    _prctl(_PR_SET_DUMPABLE, int(dumpable))


def leave_keyring() -> None:
    """Leave the session keyring, which may hold the user's keys. Best effort: kernels may lack keyrings."""
    number = _KEYCTL.get(os.uname().machine)
    if LINUX and number is not None:
        _libc.syscall(ctypes.c_long(number), ctypes.c_long(_JOIN_SESSION_KEYRING), None)


class _CapabilityHeader(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


def _drop_rights() -> None:
    """Give up every capability, and the way to new ones through set-user-id programs."""
    if not LINUX:
        return
    _prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
    number = 0
    # fails at the first number that the kernel does not know, or at once where there is none to give up
    while _prctl(_PR_CAPBSET_DROP, number) == 0:
        number += 1
    header = _CapabilityHeader(_CAPABILITY_VERSION_3, 0)
    if _prctl(_PR_SET_NO_NEW_PRIVS, 1) < 0 or _libc.capset(ctypes.byref(header), (ctypes.c_uint32 * 6)()) < 0:
        raise OSError(ctypes.get_errno(), f"rights cannot be dropped: {os.strerror(ctypes.get_errno())}")


def close_all_but(keep: set[int]) -> None:
    lowest = 3
    for fd in sorted(fd for fd in keep if fd >= 3):
        os.closerange(lowest, fd)
        lowest = fd + 1
    highest = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    os.closerange(lowest, min(highest, 1 << 16) if highest != resource.RLIM_INFINITY else 1 << 16)


def tasks_of_user(uid: int) -> int:
    """Return how many processes and threads a user has now; 0 where there is no /proc."""
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


def _limit(kind: int, value: int) -> None:
    hard = resource.getrlimit(kind)[1]
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    resource.setrlimit(kind, (value, value))


def confine(limits: Limits, cpu_time_s: float | None) -> None:
    """Turn this freshly forked process into one of the sandbox. The caller sees to its descriptors.

    The process gets a session of its own, dies with the process that forked it, and can never get more rights.
    """
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    os.umask(0o022)
    # the agent is closed to its own user, and so would be this fork's /proc/self
    set_dumpable(True)
    if LINUX:
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
    if LINUX:
        _limit(resource.RLIMIT_NPROC, limits.base_processes + limits.processes)
    if limits.uid is not None:
        os.setgroups([])
        os.setresgid(limits.uid, limits.uid, limits.uid)
        os.setresuid(limits.uid, limits.uid, limits.uid)
    _drop_rights()
    # after the change of user, which undoes both
    set_dumpable(True)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        os.chdir(limits.directory)
    except PermissionError:
        # an earlier command closed it to its owner
        os.chmod(limits.directory, 0o700)
        os.chdir(limits.directory)
    # last: from here on a large allocation fails. macOS refuses this limit, so memory is not held there
    try:
        _limit(resource.RLIMIT_AS, limits.memory_bytes)
    except (OSError, ValueError):
        pass


def unusable_path(limits: Limits, paths: list[str]) -> str | None:
    """Return the first of some paths that a confined process cannot read, or None."""
    pid = os.fork()
    if pid == 0:
        code = 255
        try:
            confine(limits, None)
            code = next((number for number, path in enumerate(paths[:254], 1) if not os.access(path, os.R_OK)), 0)
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return None if code == 0 else paths[code - 1] if 0 < code <= len(paths) else limits.directory


# -- killing: daemons, new sessions and fork bombs included --------------------------------------------------------

# No signal goes to a process that is not known to descend from this one. A child that has not been waited for keeps
# its number, so signalling it is safe; anything deeper is held by a pidfd and looked at again before it is signalled.

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
    try:
        names = [name for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return {}
    return {int(name): seen for name in names if (seen := _look(name)) is not None}


def _living(scan: dict[int, _Seen], roots: Collection[int]) -> set[int]:
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
