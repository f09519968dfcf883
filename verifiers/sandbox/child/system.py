"""System calls that the standard library lacks. On systems without them each does nothing or says so."""

from __future__ import annotations

import ctypes
import os
import sys

__all__ = [
    "CLONE_NEWCGROUP",
    "CLONE_NEWIPC",
    "CLONE_NEWNET",
    "CLONE_NEWNS",
    "CLONE_NEWPID",
    "CLONE_NEWUSER",
    "CLONE_NEWUTS",
    "LINUX",
    "become_subreaper",
    "die_with_parent",
    "drop_capabilities",
    "forbid_new_privileges",
    "join_new_keyring",
    "mount",
    "pivot_root",
    "set_dumpable",
    "unmount",
    "unshare",
]

LINUX = sys.platform == "linux"

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_CAPBSET_DROP = 24
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38
_PR_CAP_AMBIENT = 47
_PR_CAP_AMBIENT_CLEAR_ALL = 4
_CAPABILITY_VERSION_3 = 0x20080522
_KEYCTL_JOIN_SESSION_KEYRING = 1
_MNT_DETACH = 2
# (pivot_root, keyctl): glibc has no wrappers for them
_NUMBERS = {"x86_64": (155, 250), "aarch64": (41, 219), "riscv64": (41, 219)}

_MACHINE = os.uname().machine
_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _prctl(option: int, value: int = 0, third: int = 0) -> int:
    if not LINUX:
        return 0
    arguments = [ctypes.c_ulong(number) for number in (value, third, 0, 0)]
    result: int = _libc.prctl(ctypes.c_int(option), *arguments)
    return result


def die_with_parent(signal_number: int) -> None:
    """Get this signal when the thread that forked this process ends. Cleared by a change of user."""
    _prctl(_PR_SET_PDEATHSIG, signal_number)


def become_subreaper() -> None:
    """Descendants whose parent died become children of this process."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def forbid_new_privileges() -> None:
    """No set-user-id program gives this process or its children anything."""
    _check(_prctl(_PR_SET_NO_NEW_PRIVS, 1), "prctl(PR_SET_NO_NEW_PRIVS)")


def set_dumpable(dumpable: bool) -> None:
    """False keeps other processes of the same user from tracing this one and from reading its /proc files."""
    _prctl(_PR_SET_DUMPABLE, int(dumpable))


class _CapabilityHeader(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


def drop_capabilities() -> None:
    """Give up every capability, for this process and for all that it starts."""
    if not LINUX:
        return
    _prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
    number = 0
    # fails at the first number that the kernel does not know, or at once where there is none to give up
    while _prctl(_PR_CAPBSET_DROP, number) == 0:
        number += 1
    header = _CapabilityHeader(_CAPABILITY_VERSION_3, 0)
    nothing = (ctypes.c_uint32 * 6)()
    _check(_libc.capset(ctypes.byref(header), ctypes.byref(nothing)), "capset")


def join_new_keyring() -> None:
    """Leave the session keyring, which may hold the user's keys. Best effort: kernels may lack keyrings."""
    numbers = _NUMBERS.get(_MACHINE)
    if LINUX and numbers is not None:
        _libc.syscall(ctypes.c_long(numbers[1]), ctypes.c_long(_KEYCTL_JOIN_SESSION_KEYRING), None)


def unshare(flags: int) -> None:
    """Enter new namespaces."""
    if not LINUX:
        raise OSError("only Linux has namespaces")
    _check(_libc.unshare(ctypes.c_int(flags)), "unshare")


def mount(source: str, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    """mount(2)."""
    result = _libc.mount(
        source.encode(),
        target.encode(),
        kind.encode() if kind else None,
        ctypes.c_ulong(flags),
        options.encode() if options else None,
    )
    _check(result, f"mount {source} on {target}")


def unmount(target: str) -> None:
    """Detach a mount now; it ends when nothing uses it any more."""
    _check(_libc.umount2(target.encode(), ctypes.c_int(_MNT_DETACH)), f"unmount {target}")


def pivot_root(new_root: str, old_root: str) -> None:
    """pivot_root(2)."""
    numbers = _NUMBERS.get(_MACHINE)
    if numbers is None:
        raise OSError(f"the number of pivot_root is not known for {_MACHINE}")
    _check(_libc.syscall(ctypes.c_long(numbers[0]), new_root.encode(), old_root.encode()), "pivot_root")
